"""Compilation for static shapes: one per shape, counted, logged and limited."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from nemo_like.torch_data.static_shapes import ShapeLimitError, StaticCompiler, warmup_plan

LOGGER = "nemo_like.torch_data.static_shapes"


@pytest.fixture(autouse=True)
def no_compiled_functions_remain() -> Iterator[None]:
    yield
    torch.compiler.reset()


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))


def compiled(model: Any = None, **options: Any) -> StaticCompiler:
    return StaticCompiler(model or model_of(), **{"backend": "aot_eager", **options})


def rows(num_rows: int, length: int = 3) -> torch.Tensor:
    return torch.randn(num_rows, length, 4)


def test_one_compilation_per_shape_beyond_the_limit_of_torch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = model_of()
    function = compiled(model, max_shapes=10)
    with caplog.at_level(logging.INFO, LOGGER):
        for _ in range(2):
            for num_rows in range(1, 11):
                batch = rows(num_rows)
                output = function(batch)
                torch.testing.assert_close(output, model(batch))
                output.sum().backward()
    assert function.num_shapes == function.num_compilations == 10
    assert len(caplog.records) == 10
    assert (
        "for shape 2 of at most 10: ([2, 3, 4] float32), gradients on, training mode" in caplog.text
    )


def test_gradients_are_those_without_compilation() -> None:
    model, other = model_of(), model_of()
    function = compiled(model)
    for num_rows in (2, 5, 2):
        batch = rows(num_rows)
        function(batch).square().sum().backward()
        other(batch).square().sum().backward()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad)


def test_modes_and_arguments_are_part_of_the_key() -> None:
    model = model_of()
    function = compiled(lambda batch, scale, mask=None: model(batch) * scale)
    function(rows(2), 1.0)
    function(rows(2), 1.0)
    assert function.num_shapes == 1
    function(rows(2), 2.0)
    function(rows(2), 2.0, mask=rows(1))
    with torch.no_grad():
        function(rows(2), 2.0)
    assert function.num_shapes == 4


def test_an_unexpected_recompilation_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    function = compiled(lambda batch: batch.sum(dim=0))
    function(torch.randn(3, 4))
    with caplog.at_level(logging.WARNING, LOGGER):
        function(torch.randn(4, 3).t())
    assert (function.num_shapes, function.num_compilations) == (1, 2)
    assert "compiled 1 graphs again" in caplog.text


def test_limit_with_error() -> None:
    function = compiled(max_shapes=2)
    function(rows(1))
    function(rows(2))
    with pytest.raises(
        ShapeLimitError, match=r"\(\[3, 3, 4\] float32\).* needs compilation 3, max_shapes is 2"
    ):
        function(rows(3))
    function(rows(2))
    assert function.num_compilations == 2


def test_limit_with_reset(caplog: pytest.LogCaptureFixture) -> None:
    function = compiled(max_shapes=2, on_limit="reset")
    with caplog.at_level(logging.WARNING, LOGGER):
        for num_rows in (1, 1, 2, 3, 3, 4, 5):
            assert function(rows(num_rows)).shape == (num_rows, 3, 1)
    assert (function.num_compilations, function.num_shapes) == (5, 1)
    assert len(caplog.records) == 2
    assert "max_shapes=2 is reached: reset all compiled functions" in caplog.text
    # The graphs of early shapes are gone.
    function(rows(1))
    assert function.num_compilations == 6


def test_limit_with_eager(caplog: pytest.LogCaptureFixture) -> None:
    model = model_of()
    function = compiled(model, max_shapes=1, on_limit="eager")
    with caplog.at_level(logging.WARNING, LOGGER):
        for num_rows in (1, 2, 3, 1):
            batch = rows(num_rows)
            torch.testing.assert_close(function(batch), model(batch))
    assert function.num_compilations == 1
    assert len(caplog.records) == 1


def test_two_compilers_have_a_limit_each() -> None:
    first = compiled(model_of(1), max_shapes=9)
    second = compiled(model_of(2), max_shapes=9)
    for num_rows in range(1, 10):
        first(rows(num_rows))
        second(rows(num_rows))
    assert (first.num_compilations, second.num_compilations) == (9, 9)


def test_after_the_warmup_nothing_is_compiled() -> None:
    shapes = [(4, 2), (2, 4), (4, 2), (1, 8), (2, 4), (4, 2)]
    plan = warmup_plan(shapes, 2)
    ranks = [compiled(model_of(rank), max_shapes=3) for rank in range(2)]
    for shape in plan.shapes:
        for function in ranks:
            function(rows(*shape)).sum().backward()
    for microbatch in plan.remaining:
        ranks[microbatch % 2](rows(*shapes[microbatch]))
    assert [function.num_compilations for function in ranks] == [3, 3]


def test_wrong_settings() -> None:
    with pytest.raises(ValueError, match="max_shapes is 0"):
        compiled(max_shapes=0)
    with pytest.raises(ValueError, match="on_limit is 'skip'"):
        compiled(on_limit="skip")
