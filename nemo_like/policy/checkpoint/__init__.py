"""Weights on disk: sharded checkpoints, Hugging Face export, GGUF."""
