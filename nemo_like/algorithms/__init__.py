"""Training algorithms: one package each, with config, rows, loss and loop, and their registry."""
