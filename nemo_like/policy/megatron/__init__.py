"""Engine on Megatron-Core."""
