"""Shapes on disk: Arrow schemas, manifest records, and the upgrades between their versions.

This package knows nothing of the library above it. What it refuses, it refuses with one of the two
errors below; storage turns them into its own.
"""


class Malformed(ValueError):
    """The bytes or columns do not have the shape their version promises."""


class NewerVersion(ValueError):
    """Written under a version that this software does not know yet."""
