"""GRPO: group-relative policy optimization."""
