"""The check that a weight update sets every weight of the generator exactly once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_MAX_SHOWN = 5


class UpdateCoverage:
    """The weights that an update in progress has set, by Hugging Face name."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        names: Sequence[str],
        *,
        tied: Mapping[str, str] | None = None,
    ) -> None:
        """Check the `names` that the policy will send against the model's weights.

        `shapes` has the shape of every weight of the model. `tied` maps the second name of a tied
        weight to its name in `shapes`, for example `lm_head.weight` to
        `model.embed_tokens.weight`. Raises ValueError for a name that the model does not have, for
        a weight that is sent twice, and for weights that are not sent.
        """
        self._shapes = shapes
        self._tied = tied or {}
        unknown = [name for name in names if self._canonical(name) not in shapes]
        if unknown:
            raise ValueError(
                f"the policy sends {len(unknown)} weights that the generator's model does not"
                f" have: {_shown(unknown)}; load policy and generator from the same model"
            )
        announced = [self._canonical(name) for name in names]
        if len(set(announced)) < len(announced):
            twice = sorted({name for name in announced if announced.count(name) > 1})
            raise ValueError(f"the policy sends {len(twice)} weights twice: {_shown(twice)}")
        self._raise_if_missing(set(announced), "the policy does not send")
        self._loaded: set[str] = set()

    def add(self, name: str, shape: tuple[int, ...]) -> None:
        """Record that `name` is set from a tensor of `shape`; call it before the weight changes.

        Raises ValueError for an unknown name, another shape, or a weight that was set before.
        """
        canonical = self._canonical(name)
        expected = self._shapes.get(canonical)
        if expected is None:
            raise ValueError(f"weight {name!r} is not part of the generator's model")
        if tuple(shape) != tuple(expected):
            raise ValueError(
                f"weight {name!r} has shape {tuple(shape)}, the generator's has {tuple(expected)}"
            )
        if canonical in self._loaded:
            raise ValueError(f"weight {name!r} came twice in one update")
        self._loaded.add(canonical)

    def check_complete(self) -> None:
        """Raise ValueError if a weight was not set."""
        self._raise_if_missing(self._loaded, "the weight update left out")

    def _canonical(self, name: str) -> str:
        return self._tied.get(name, name)

    def _raise_if_missing(self, present: set[str], problem: str) -> None:
        missing = [name for name in self._shapes if name not in present]
        if missing:
            raise ValueError(
                f"{problem} {len(missing)} weights of the generator's model: {_shown(missing)}"
            )


def _shown(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MAX_SHOWN])
    return f"{shown} ..." if len(names) > _MAX_SHOWN else shown
