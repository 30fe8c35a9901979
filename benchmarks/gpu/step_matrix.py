"""Part B1: training steps by model, token budget and activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.arguments import PartArguments
from benchmarks.gpu.cells import Cell
from benchmarks.gpu.models import model_folder
from benchmarks.gpu.policies import PolicyHolder, option_defaults, policy_config, predicted_peak_gb
from benchmarks.gpu.rows import full_lengths
from benchmarks.gpu.training_steps import StepCase, time_steps
from nemo_like.models.spec import ModelSpec

CHECKPOINTING = "policy.activation_checkpointing"
_MODELS = ("1b", "8b-shape", "3b")
"""By importance."""


def make_cells(arguments: PartArguments) -> tuple[Iterator[Cell], Callable[[], None]]:
    """Return the cells, and a function that closes the policy that they share."""
    holder = PolicyHolder(arguments.device)
    cells = list(_cells(arguments, holder))
    # After a cell that runs out of memory the model is loaded again.
    cells.sort(key=partial(_exceeds_memory, arguments))
    return iter(cells), holder.close


def _exceeds_memory(arguments: PartArguments, cell: Cell) -> bool:
    """Return True if the predicted peak of a cell is above the memory of the GPU."""
    if not arguments.is_cuda:
        return False
    settings = cell.settings
    options = {CHECKPOINTING: checkpointing_values()[settings["checkpointing"]]}
    budget = settings["budget"]
    config = policy_config(Path(), budget=budget, num_rows=1, longest=budget, options=options)
    spec = ModelSpec.from_config(arguments.size.models[settings["model"]])
    peak = predicted_peak_gb(config, "dtensor", arguments.device, options, budget, spec)
    return peak > torch.cuda.get_device_properties(arguments.device).total_memory / 1e9


def checkpointing_values() -> dict[str, Any]:
    """Return name -> value of `policy.activation_checkpointing`, without recomputation first."""
    _, values = option_defaults()[CHECKPOINTING]
    names = {False: "none", True: "full"}
    return {names.get(value, str(value)): value for value in values}


def _cells(arguments: PartArguments, holder: PolicyHolder) -> Iterator[Cell]:
    """Yield cells in the order of importance; those that share a loaded model are consecutive."""
    size = arguments.size
    others = [budget for budget in size.budgets if budget != size.main_budget]
    for checkpointing in checkpointing_values():
        for model in _MODELS:
            for budget in (size.main_budget, *sorted(others, reverse=True)):
                is_new = budget == size.main_budget
                yield _cell(arguments, holder, model, budget, checkpointing, "mixed", is_new=is_new)
                if is_new:
                    # Rows as long as the budget: one row per microbatch.
                    yield _cell(arguments, holder, model, budget, checkpointing, "full")


def _cell(
    arguments: PartArguments,
    holder: PolicyHolder,
    model: str,
    budget: int,
    checkpointing: str,
    rows: str,
    *,
    is_new: bool = False,
) -> Cell:
    settings = {"model": model, "budget": budget, "checkpointing": checkpointing, "rows": rows}
    return Cell(
        name=f"{model} {budget} tokens, checkpointing {checkpointing}, {rows} rows",
        measure=partial(_measure, arguments, holder, settings),
        settings=settings,
        # A model that is not loaded yet is written or read first, and compiled.
        expected_s=50.0 if is_new else 8.0,
        limit_s=150.0,
    )


def _measure(
    arguments: PartArguments, holder: PolicyHolder, settings: Mapping[str, Any]
) -> Mapping[str, Any]:
    size = arguments.size
    budget = settings["budget"]
    model = settings["model"]
    num_tokens = max(size.min_step_tokens, 2 * budget)
    lengths: np.ndarray
    if settings["rows"] == "full":
        longest = budget
        lengths = full_lengths(num_tokens, longest)
    else:
        longest = size.matrix_longest
        lengths = arguments.draw_lengths(num_tokens, longest)
    value = checkpointing_values()[settings["checkpointing"]]
    case = StepCase(
        folder=model_folder(arguments.work, model, size.models[model], arguments.device),
        lengths=lengths,
        budget=budget,
        longest=longest,
        options={CHECKPOINTING: value},
        num_steps=size.num_steps,
    )
    return time_steps(case, holder, arguments.device)
