"""Stores of immutable objects: local folders, buckets, memory, and the view of a forked run."""
