"""Memory of gradients, optimizer state and averages that depends on what is trained, and how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from nemo_like.models.spec import ModelSpec
from nemo_like.models.weight_files import weight_sizes

OptimizerName = Literal["adamw", "adamw_8bit", "muon"]


@dataclass(frozen=True, kw_only=True)
class TrainedState:
    """The settings of `policy` that gradients and optimizer state depend on."""

    optimizer: OptimizerName = "adamw"
    freeze: tuple[str, ...] = ()
    has_ema: bool = False

    def trained_share(self, spec: ModelSpec) -> float:
        """Return the share of the parameters that is trained; 1 where names are not known."""
        return 1.0 - frozen_share(spec, self.freeze)

    def optimizer_bytes(self, spec: ModelSpec) -> float:
        """Return the bytes of optimizer state per trained parameter, without master weights.

        AdamW has two float32 moments. Muon has one for the matrices of layers, whose norms and
        biases are neglected. 8-bit moments have a code per value and a float32 scale per block of
        256.
        """
        if self.optimizer == "adamw_8bit":
            return 2 * (1 + 4 / 256)
        if self.optimizer == "adamw":
            return 8.0
        in_layers = spec.num_layers * spec.layer_params / spec.num_params
        return 8.0 - 4.0 * in_layers

    def assumptions(self, spec: ModelSpec) -> list[str]:
        """Return in words what differs from AdamW on all weights; nothing if nothing does."""
        lines = []
        if self.freeze:
            lines.append(
                f"policy.freeze: {self.trained_share(spec):.1%} of P are trained, with gradients,"
                " master weights and optimizer state."
            )
        if self.optimizer != "adamw":
            lines.append(
                f"policy.optimizer.name {self.optimizer}: {self.optimizer_bytes(spec):.2f} bytes of"
                " optimizer state per trained parameter instead of the 8 of AdamW."
            )
        if self.has_ema:
            lines.append(
                "policy.ema: 4 bytes per trained parameter, sharded like its optimizer state."
            )
        return lines


def frozen_share(spec: ModelSpec, patterns: Sequence[str]) -> float:
    """Return the share of the parameters whose name matches a pattern of `policy.freeze`.

    0 for a model whose names are not known, so that the prediction is not too small.
    """
    sizes = weight_sizes(spec) if patterns else None
    if sizes is None:
        return 0.0
    if spec.is_tied:
        # Either name freezes a tied embedding.
        patterns = [pattern.replace("lm_head.", "model.embed_tokens.") for pattern in patterns]
    frozen = 0
    for name, size in sizes.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            frozen += size
    return frozen / sum(sizes.values())
