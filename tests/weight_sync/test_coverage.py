from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_like.weight_sync.channel import UpdateCoverage

SHAPES = {"embed": (4, 2), "norm": (2,), "scale": ()}
TIED = {"head": "embed"}


def complete(coverage: UpdateCoverage, names: list[str]) -> None:
    for name in names:
        coverage.add(name, SHAPES[TIED.get(name, name)])
    coverage.check_complete()


@given(st.permutations(["norm", "scale", "embed"]), st.booleans())
def test_every_weight_once_in_any_order_and_by_either_name_of_a_tie(
    names: list[str], uses_head: bool
) -> None:
    if uses_head:
        names = ["head" if name == "embed" else name for name in names]
    complete(UpdateCoverage(SHAPES, names, tied=TIED), names)


def test_announced_names_are_checked_before_anything_is_loaded() -> None:
    with pytest.raises(ValueError, match="1 weights that the generator's model does not have: new"):
        UpdateCoverage(SHAPES, [*SHAPES, "new"])
    with pytest.raises(ValueError, match="does not have: head"):
        UpdateCoverage(SHAPES, ["norm", "scale", "head"])
    with pytest.raises(ValueError, match="1 weights twice: embed"):
        UpdateCoverage(SHAPES, [*SHAPES, "head"], tied=TIED)
    with pytest.raises(ValueError, match=r"does not send 2 weights .*: norm, scale"):
        UpdateCoverage(SHAPES, ["head"], tied=TIED)


def test_loaded_weights_are_checked_one_by_one() -> None:
    coverage = UpdateCoverage(SHAPES, list(SHAPES), tied=TIED)
    with pytest.raises(ValueError, match="'other' is not part of"):
        coverage.add("other", (1,))
    with pytest.raises(ValueError, match=r"'embed' has shape \(2, 4\), the generator's has \(4, 2"):
        coverage.add("embed", (2, 4))
    coverage.add("embed", (4, 2))
    with pytest.raises(ValueError, match="'head' came twice"):
        coverage.add("head", (4, 2))
    with pytest.raises(ValueError, match=r"left out 2 weights .*: norm, scale"):
        coverage.check_complete()
