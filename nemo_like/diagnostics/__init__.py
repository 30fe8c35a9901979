"""Checks of rows and batches before a run, and their report."""
