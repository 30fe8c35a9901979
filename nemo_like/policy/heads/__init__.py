"""What a policy computes from hidden states: log-probs, divergences, scores."""
