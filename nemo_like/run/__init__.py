"""The files of a run: directory, lock, checkpoints, metrics, log and console output."""
