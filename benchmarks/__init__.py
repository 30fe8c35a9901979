"""Programs that measure the package; README.md has their results."""
