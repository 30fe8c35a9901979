"""Engine on FSDP2 over a Hugging Face model."""
