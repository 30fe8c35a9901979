"""Training of reward models on pairs of completions (Bradley-Terry)."""
