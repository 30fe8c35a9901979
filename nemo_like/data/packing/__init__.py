"""Bin packers and their metrics; they know no ranks and no steps."""
