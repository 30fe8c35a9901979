"""Measurements of one GPU: `python -m benchmarks.gpu.report`, described in README.md."""
