"""Worker groups, parallel layouts and batches across ranks, without Ray."""
