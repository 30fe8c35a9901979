"""The work of a row, `a * L + b * L^2` less the output projection of tokens without loss, for MFU.

Ranks are balanced by work. Tokens determine memory; other modules compare them with the limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nemo_like.models.spec import ModelSpec


@dataclass(frozen=True)
class CostModel:
    """Forward work of a row of L tokens: `linear * L + quadratic * L^2`, for causal attention.

    `head` is the part of `linear` for the output projection, which is computed for tokens with loss
    only: with n of them the work is `head * (L - n)` less.

    With a sliding `window`, the share `windowed_share` of the quadratic part (its layers) sees at
    most `window` tokens back, so beyond the window it grows by the line `window * (2 * L - window)`
    instead of `L^2`.

    The default is a dense 7B model in units of its attention: hidden size h = 4096 gives 24 h^2 L
    of matrices and 2 h L^2 of causal attention per layer, that is 12 h = 49152 to 1.

    Example: `CostModel(linear=10, quadratic=1, window=4).of([2, 6])` is `[24, 60 + 4 * 8] = [24,
    92]`. With `head=3` and `num_trained=[2, 1]` it is `[24, 92 - 3 * 5] = [24, 77]`.
    """

    linear: float = 49152.0
    quadratic: float = 1.0
    window: int | None = None
    windowed_share: float = 1.0
    head: float = 0.0

    def __post_init__(self) -> None:
        if self.linear < 0 or self.quadratic < 0 or self.linear + self.quadratic == 0:
            raise ValueError(
                f"a cost needs weights >= 0, not both 0; got linear={self.linear},"
                f" quadratic={self.quadratic}"
            )
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is a number of tokens >= 1 or None; got {self.window}")
        if not 0.0 <= self.windowed_share <= 1.0:
            raise ValueError(f"windowed_share is between 0 and 1; got {self.windowed_share}")
        if not 0.0 <= self.head <= self.linear:
            raise ValueError(
                f"head is a part of linear, between 0 and {self.linear}; got {self.head}"
            )

    def of(
        self,
        lengths: Sequence[int] | np.ndarray,
        num_trained: Sequence[int] | np.ndarray | None = None,
    ) -> np.ndarray:
        """Work of each row, float64 of the shape of `lengths`.

        `num_trained` are the tokens of each row with loss; None: all positions.
        """
        return self.products(lengths, num_trained) + self._attention(lengths)

    def products(
        self,
        lengths: Sequence[int] | np.ndarray,
        num_trained: Sequence[int] | np.ndarray | None = None,
    ) -> np.ndarray:
        """Work of the products with weights alone, float64; see `of`."""
        tokens = np.asarray(lengths, dtype=np.float64)
        work = self.linear * tokens
        if num_trained is None:
            return work
        return work - self.head * (tokens - np.asarray(num_trained, dtype=np.float64))

    def _attention(self, lengths: Sequence[int] | np.ndarray) -> np.ndarray:
        tokens = np.asarray(lengths, dtype=np.float64)
        square = tokens * tokens
        if self.window is not None:
            # Twice the area under min(position, window), which without a window is L^2.
            seen = np.minimum(tokens, self.window)
            full = (1.0 - self.windowed_share) * square
            square = full + self.windowed_share * seen * (2.0 * tokens - seen)
        return self.quadratic * square

    @classmethod
    def from_spec(cls, spec: ModelSpec) -> CostModel:
        """Return the work of a model in forward FLOPs.

        It is `2 * P_active` per token and `2 * sum_layers H * d` per token squared, for H heads of
        dimension d. Layers of linear attention add no quadratic work.
        """
        linear = 2.0 * spec.num_active_params
        head = 2.0 * spec.head_params
        if spec.head == "scores":
            # One product per row, and not per token: it is not counted.
            linear -= head
            head = 0.0
        windows = []
        for layer in range(spec.num_layers):
            if layer not in spec.linear_attention_layers:
                windows.append(spec.windows[layer])
        windowed = [window for window in windows if window is not None]
        return cls(
            linear=linear,
            quadratic=float(len(windows) * spec.attention_width),
            window=max(windowed, default=None),
            windowed_share=len(windowed) / len(windows) if windowed else 1.0,
            head=head,
        )


def train_flops(
    spec: ModelSpec,
    lengths: Sequence[int] | np.ndarray,
    num_trained: Sequence[int] | np.ndarray | None = None,
) -> float:
    """Return the FLOPs of forward and backward over rows of these lengths.

    `6 * P_active * N + 6 * layers * H * d * sum(L^2)` for causal attention, where N is the number
    of tokens and each row attends to itself only. The embedding lookup is not counted, the output
    projection is for the `num_trained` int [B] tokens with loss (None: all), recomputation is not:
    divided by time, devices and peak this is MFU, not HFU. `lengths` int [B].
    """
    forward = CostModel.from_spec(spec).of(lengths, num_trained).sum()
    # The backward pass computes gradients of inputs and of weights: twice the forward FLOPs.
    return 3.0 * float(forward)
