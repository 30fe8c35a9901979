"""The inputs of a model: rows of a microbatch as tensors, and attention over them."""
