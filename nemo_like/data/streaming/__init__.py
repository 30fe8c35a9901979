"""Batch formation for streams of rows: windows, alignment of ranks, curriculum, shapes."""
