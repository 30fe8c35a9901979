"""Exponential moving average (EMA) of the weights that are trained, sharded like them.

After optimizer step n, e_n = d e_(n-1) + (1 - d) w_n with the decay d (Polyak and Juditsky 1992, in
the exponential form of Kingma and Ba 2015, section 7.2). Until step `start_step` the average is the
weight itself.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from nemo_like.config.optimization import EmaConfig

Masters = Iterable[tuple[str, Tensor]]
"""Name and float32 shard [...] of each trained weight, in a fixed order."""


class WeightEma:
    """Averages of the shards of one rank, float32."""

    def __init__(self, masters: Masters, config: EmaConfig) -> None:
        """Start with the values of `masters`, [...] each."""
        self.shards = {name: weight.detach().clone() for name, weight in masters}
        self._config = config

    @torch.no_grad()
    def update(self, masters: Masters, num_steps: int) -> None:
        """Include `masters`, [...] each, the weights after `num_steps` applied optimizer steps."""
        decay = self._config.decay if num_steps > self._config.start_step else 0.0
        for name, weight in masters:
            self.shards[name].lerp_(weight.detach(), 1.0 - decay)

    def reset(self, masters: Masters) -> None:
        """Start again with the values of `masters`, [...] each."""
        for name, weight in masters:
            self.shards[name].copy_(weight.detach())

    @torch.no_grad()
    def swap(self, masters: Masters) -> None:
        """Exchange the averages and the weights `masters`, [...] each, bit by bit."""
        for name, weight in masters:
            average = self.shards[name]
            # One copy at a time.
            current = weight.detach().clone()
            weight.detach().copy_(average)
            average.copy_(current)
