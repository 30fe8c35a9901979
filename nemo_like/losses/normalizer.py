"""The denominator of the policy-gradient loss, and the weights of tokens in its sum."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from nemo_like.config.loss import LossNormalization
from nemo_like.losses.reduce import GlobalCounts, LossInputs, token_weights


@dataclass(frozen=True, kw_only=True)
class Normalizer:
    """Divides the summed loss by tokens, by rows, or by rows x a constant number of tokens.

    Sources: token mean as in DAPO (Yu et al. 2025); sequence mean as in GRPO (Shao et al. 2024);
    the constant of Dr. GRPO (Liu et al. 2025), which keeps the weight of a token independent of
    the length of its row.
    """

    kind: LossNormalization
    constant_length: int | None = None
    """Tokens per row of the kind `constant`."""

    def __post_init__(self) -> None:
        if self.kind == "constant" and self.constant_length is None:
            raise ValueError(
                "the normalization is constant, but constant_length is None; pass the number of"
                " tokens per row, e.g. policy.generation.max_new_tokens"
            )

    def denominator(self, counts: GlobalCounts) -> float:
        """Return the divisor of the summed loss of an optimizer step, at least 1."""
        if self.kind == "constant":
            return counts.denominator("sequence") * self._length
        return counts.denominator(self.kind)

    def weights(self, inputs: LossInputs) -> Tensor:
        """Return the weight of each token in the sum, float32 [T]; 0 for tokens not trained."""
        return token_weights(inputs, "sequence" if self.kind == "sequence" else "token")

    def count(self, inputs: LossInputs) -> Tensor:
        """Return what the microbatch adds to the denominator, float32 [].

        With context parallelism it is this rank's part; the parts of the ranks add up.
        """
        if self.kind == "constant":
            return token_weights(inputs, "sequence").sum() * self._length
        return self.weights(inputs).sum()

    @property
    def _length(self) -> int:
        assert self.constant_length is not None, "checked by __post_init__"
        return self.constant_length
