"""Commands of `nemo-like` besides the training runs, one module each."""
