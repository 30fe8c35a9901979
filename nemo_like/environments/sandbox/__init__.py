"""Runs untrusted Python programs in processes of their own, with limits and isolation."""
