"""Sizes and properties of models; the only reader of a model's `config.json`."""
