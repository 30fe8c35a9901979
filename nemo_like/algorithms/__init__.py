"""Training algorithms: SFT and GRPO, each with its loop; advantages."""
