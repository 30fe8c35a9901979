"""The keys of `loss_fn.importance_correction`: weights for a sampler that differs from training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Le

from nemo_like.config.errors import Problem

CorrectionKind = Literal[
    "none", "token_truncate", "sequence_truncate", "token_mask", "sequence_mask", "bypass"
]
_DEFAULT_BOUNDS: dict[CorrectionKind, tuple[float | None, float | None]] = {
    "none": (None, None),
    "token_truncate": (None, 2.0),
    "sequence_truncate": (None, 2.0),
    "token_mask": (0.5, 5.0),
    "sequence_mask": (0.999, 1.002),
    "bypass": (None, None),
}
"""(lower, upper) of each kind: TIS of verl, IcePop, and the geometric mean of Geo-RS."""
_KEY = "loss_fn.importance_correction"


@dataclass(frozen=True, kw_only=True)
class ImportanceCorrectionConfig:
    """Correction for completions that were sampled with other kernels, in another precision or with
    older weights than the training pass uses. The weight of a token is w = exp(l_prev -
    l_generation); it multiplies the surrogate loss, not the KL penalty or the entropy bonus.
    """

    kind: CorrectionKind = "none"
    """`token_truncate` uses min(w, upper) (TIS), `sequence_truncate` the product of the row's
    weights, at most upper (sequence-level TIS); `token_mask` leaves tokens with w outside [lower,
    upper] out (IcePop, MIS), `sequence_mask` rows with exp(mean log w) outside of it (Geo-RS), and
    both keep w otherwise. `bypass` corrects in the ratio: l_prev is the generator's log-prob, and
    the policy's own is not computed. `none` only measures."""
    upper: Annotated[float | None, Ge(1)] = None
    """Upper bound; null is 2 for the truncated kinds, 5 for `token_mask` and 1.002 for
    `sequence_mask`."""
    lower: Annotated[float | None, Ge(0), Le(1)] = None
    """Lower bound; null is 0.5 for `token_mask`, 0.999 for `sequence_mask` and no bound for the
    truncated kinds."""

    @property
    def bounds(self) -> tuple[float | None, float | None]:
        """(lower, upper) with the defaults of `kind`; None is no bound."""
        lower, upper = _DEFAULT_BOUNDS[self.kind]
        if self.lower is not None:
            lower = self.lower
        if self.upper is not None:
            upper = self.upper
        return lower, upper

    @property
    def has_weights(self) -> bool:
        """True if the surrogate loss is multiplied by weights."""
        return self.kind not in ("none", "bypass")

    def problems(self) -> Iterator[Problem]:
        """Yield bounds that the kind does not use, and bounds in the wrong order."""
        for name in ("lower", "upper"):
            value = getattr(self, name)
            if value is not None and not self.has_weights:
                yield Problem(
                    (f"{_KEY}.{name}", f"{_KEY}.kind"),
                    f"{_KEY}.{name} is {value:g}, but {_KEY}.kind {self.kind} has no weights to"
                    f" bound: remove {name}, or set kind to token_truncate, sequence_truncate,"
                    " token_mask or sequence_mask",
                )
        lower, upper = self.bounds
        if lower is not None and upper is not None and lower >= upper:
            yield Problem(
                (f"{_KEY}.lower", f"{_KEY}.upper"),
                f"{_KEY}.lower is {lower:g} and {_KEY}.upper {upper:g}; lower must be below upper,"
                f" e.g. the defaults {_defaults(self.kind)} of kind {self.kind}",
            )


def _defaults(kind: CorrectionKind) -> str:
    """Return the default bounds in words. Example: `0.5 and 5`."""
    lower, upper = _DEFAULT_BOUNDS[kind]
    shown_lower = "null" if lower is None else f"{lower:g}"
    return f"{shown_lower} and {upper:g}"
