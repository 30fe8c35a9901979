"""Pages with charts: the report of runs and the report of a plan."""
