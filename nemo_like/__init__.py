"""nemo_like: post-training of language models on a Ray cluster, where batch formation is a plan."""

__version__ = "0.1.0"
