"""Preference optimization on pairs of completions: DPO, IPO and SimPO."""
