"""Transfer of weights from the policy to the generator, in buckets."""
