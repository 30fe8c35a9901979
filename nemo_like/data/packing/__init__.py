"""Integer algorithms of batch formation: bin packers, the joint scheduler, bounds and metrics."""
