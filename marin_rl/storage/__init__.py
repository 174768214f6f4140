"""Storage of runs: the object store, commits, runs and the shapes stored in them.

Import the module that is meant (`marin_rl.storage.commits`); nothing is re-exported here, so that
readers of rollouts do not pay for the libraries that checkpoints need.

Functions that read raise ObjectMissing, CorruptObject, NewerSchema or StoreUnavailable, those that
write StorageError, CommitConflict or CommitUnknown. Docstrings name other errors.
"""
