"""Rows: data sets, chat templates, collation, the loader, jagged arrays."""
