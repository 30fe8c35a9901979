"""Presentation of a plan: terminal output, HTML page, charts."""
