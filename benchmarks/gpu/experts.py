"""Part D: Megatron-Core beside FSDP2 on a dense 1B model, and a mixture-of-experts layer."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.arguments import PartArguments
from benchmarks.gpu.cells import Cell, SkipCell
from benchmarks.gpu.models import model_folder
from benchmarks.gpu.moe_layers import compare_moe_layers
from benchmarks.gpu.options import EXPERTS, option_sets
from benchmarks.gpu.policies import Options, PolicyHolder, worker_class
from benchmarks.gpu.training_steps import StepCase, time_steps


def make_cells(arguments: PartArguments) -> tuple[Iterator[Cell], Callable[[], None]]:
    """Return the cells, and a function that closes the policies that they share."""
    holders = {engine: PolicyHolder(arguments.device, engine) for engine in ("dtensor", "megatron")}

    def close() -> None:
        for holder in holders.values():
            holder.close()

    return _cells(arguments, holders), close


def _cells(arguments: PartArguments, holders: Mapping[str, PolicyHolder]) -> Iterator[Cell]:
    size = arguments.size
    settings = size.models["moe-layer"]
    for num_tokens in (size.moe_tokens, 4 * size.moe_tokens):
        yield Cell(
            name=f"MoE layer in torch, {num_tokens} tokens",
            measure=partial(compare_moe_layers, settings, num_tokens, arguments.device),
            expected_s=15.0,
        )
    yield _step(arguments, holders, "dtensor", "1b", {})
    # On the CPU Megatron-Core needs changes of its modules that stay in the process.
    yield _step(arguments, holders, "megatron", "1b", {})
    yield _step(arguments, holders, "megatron", "moe-layer", {})
    for name, options in option_sets().items():
        if any(part in name for part in EXPERTS):
            yield _step(arguments, holders, "megatron", "moe-layer", options)
    yield Cell(
        name="megatron step moe-layer, SequentialMLP",
        measure=partial(_measure_sequential, arguments, holders),
        settings={"engine": "megatron", "model": "moe-layer", "experts": "SequentialMLP"},
        expected_s=40.0,
        limit_s=180.0,
    )


def _step(
    arguments: PartArguments,
    holders: Mapping[str, PolicyHolder],
    engine: str,
    model: str,
    options: Options,
) -> Cell:
    shown = ", ".join(f"{key}={value}" for key, value in options.items()) or "defaults"
    return Cell(
        name=f"{engine} step {model}, {shown}",
        measure=partial(_measure, arguments, holders, engine, model, options),
        settings={"engine": engine, "model": model, "options": dict(options)},
        expected_s=40.0,
        limit_s=180.0,
    )


def _measure_sequential(
    arguments: PartArguments, holders: Mapping[str, PolicyHolder]
) -> Mapping[str, Any]:
    """Measure the MoE layer with Megatron-Core's own loop over the experts."""
    # Loading the worker class checks that Megatron-Core is installed.
    worker_class("megatron")
    try:
        module: Any = importlib.import_module("nemo_like.policy.megatron.moe")
    except ImportError:
        raise SkipCell("this version has no grouped experts; the step above has the loop") from None
    grouped = module.GroupedExperts
    forward = grouped.forward
    grouped.forward = grouped.__bases__[0].forward
    try:
        return _measure(arguments, holders, "megatron", "moe-layer", {})
    finally:
        grouped.forward = forward


def _measure(
    arguments: PartArguments,
    holders: Mapping[str, PolicyHolder],
    engine: str,
    model: str,
    options: Options,
) -> Mapping[str, Any]:
    for name, holder in holders.items():
        # Two engines would share the memory.
        if name != engine:
            holder.close()
    size = arguments.size
    folder: Path = model_folder(arguments.work, model, size.models[model], arguments.device)
    case = StepCase(
        folder=folder,
        lengths=arguments.draw_lengths(size.min_step_tokens, size.longest),
        budget=size.main_budget,
        longest=size.longest,
        options=options,
        num_steps=size.num_steps,
        engine=engine,
    )
    return time_steps(case, holders[engine], arguments.device)
