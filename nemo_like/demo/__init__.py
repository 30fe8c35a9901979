"""Demos without network or GPU: data, tiny untrained models, and `python -m nemo_like.demo`."""
