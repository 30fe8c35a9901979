"""Training on pairs of completions: DPO, IPO, SimPO, and reward models (Bradley-Terry)."""
