"""A run on disk: its directory, lock, ledger and checkpoints; what a run goes on from, and how it is stopped."""
