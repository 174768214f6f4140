"""Environments of other libraries, unchanged: their code runs in an interpreter that has it."""
