"""Predictions of `nemo-like plan`: memory, step time, comparison of packers."""
