"""Checkpoints, resuming and export: what a run leaves on the disk, and how it is read back."""
