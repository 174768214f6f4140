"""Rollouts and evaluations made from a served policy, committed as slots of the run."""
