"""The trained model: driver side, worker, engines and log-probs."""
