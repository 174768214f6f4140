"""Care of finished work: inventory, fsck, gc, audit, forks and archives."""
