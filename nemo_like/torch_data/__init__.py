"""Batches by token count for plain PyTorch training loops.

The rows of a microbatch are selected, ordered and aligned over ranks by the same code as in runs of
nemo_like: `data.streaming` and `data.row_order`.
"""
