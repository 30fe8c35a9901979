"""Part S: what decides the published figures, for a GPU that is available for minutes.

Cells are in the order of importance. Part S3 measures the decisive ones again where FlashAttention
3 is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.arguments import PartArguments
from benchmarks.gpu.attention_check import attention_cells
from benchmarks.gpu.cells import Cell, SkipCell
from benchmarks.gpu.correctness import run_pytest
from benchmarks.gpu.grpo_step import time_grpo_steps
from benchmarks.gpu.layouts import (
    LAYOUTS,
    PrefixCase,
    short_lengths,
    time_layout,
    time_shared_prefix,
)
from benchmarks.gpu.logprob_check import logprob_cells
from benchmarks.gpu.machine import ROOT
from benchmarks.gpu.models import model_folder
from benchmarks.gpu.policies import Options, PolicyHolder
from benchmarks.gpu.rows import full_lengths
from benchmarks.gpu.step_check import step_cells
from benchmarks.gpu.training_steps import (
    COMPILE,
    StepCase,
    median_seconds,
    profile_steps,
    time_steps,
)
from benchmarks.gpu.transformers_loops import LoopCase, time_loop

_EAGER: Options = {COMPILE: "none"}
_UNSHARDED: Options = {"parallel.reshard": False}
_HEAD_SIZES = ("d=64", "d=128", "d=16")
_GSM8K_LENGTHS = {"mean": 190, "longest": 1024}
_PREFIXES = ((512, 64, 16), (8192, 1024, 8))
"""Tokens of a prompt, max tokens of a completion, rows of a group."""


def make_cells(arguments: PartArguments) -> tuple[Iterator[Cell], Callable[[], None]]:
    """Return the cells, and a function that closes the policy that they share."""
    holder = PolicyHolder(arguments.device)
    return _Short(arguments, holder).cells(), holder.close


def make_fa3_cells(arguments: PartArguments) -> tuple[Iterator[Cell], Callable[[], None]]:
    """Return the cells of part S3, and a function that closes the policy that they share."""
    holder = PolicyHolder(arguments.device)
    return _Short(arguments, holder).fa3_cells(), holder.close


class _Short:
    """The cells of both parts. Seconds were measured on an H200."""

    def __init__(self, arguments: PartArguments, holder: PolicyHolder) -> None:
        self._arguments = arguments
        self._holder = holder
        self._size = arguments.size
        self._device = arguments.device
        self._is_tiny = arguments.size.name == "tiny"

    def cells(self) -> Iterator[Cell]:
        """Yield cells in the order of importance; those that share a loaded model are together."""
        budget = 2 * self._size.main_budget
        yield self._cell("machine", self._measure_machine, 8)
        yield from self._attention_cells()
        yield from _named(logprob_cells(self._device, self._size), ("bfloat16",))
        yield from step_cells(self._device, self._arguments.work, "dtensor", is_tiny=self._is_tiny)
        yield self._step("1b", budget, {}, 50)
        yield self._step("1b", budget // 2, {}, 10)
        yield self._profile("1b", budget)
        yield from self._prefixes()
        yield from self._layouts()
        yield self._loop(4)
        yield self._step("8b-shape", budget, {}, 45)
        yield self._step("8b-shape", budget, {}, 12, rows="full")
        yield self._profile("8b-shape", budget)
        yield self._cell("GRPO step hf", self._measure_grpo, 60, model="1.5b")
        yield self._step("1b", budget, _UNSHARDED, 20)
        yield self._cell("pytest tests/gpu", self._run_pytest, 130, limit_s=260.0)
        yield self._step("1b", budget, _EAGER, 12)
        yield self._step("8b-shape", budget, _EAGER, 20)
        yield self._step("8b-shape", budget, _UNSHARDED, 30)
        yield self._loop(1)
        yield self._step("3b", budget // 2, {}, 60)

    def fa3_cells(self) -> Iterator[Cell]:
        """Yield the cells of part S3."""
        budget = 2 * self._size.main_budget
        yield self._cell("machine", self._measure_machine, 8)
        yield from self._attention_cells()
        for model, expected_s in (("1b", 35), ("8b-shape", 35)):
            yield self._step(model, budget, {}, expected_s)
            yield self._step(model, budget, {}, 12, rows="full")

    def _cell(
        self,
        name: str,
        measure: Callable[[], Mapping[str, Any]],
        expected_s: float,
        *,
        limit_s: float = 150.0,
        **settings: Any,
    ) -> Cell:
        return Cell(
            name=name,
            measure=measure,
            expected_s=1.0 if self._is_tiny else expected_s,
            limit_s=limit_s,
            settings={"model": "1b", **settings},
        )

    def _attention_cells(self) -> Iterator[Cell]:
        cells = attention_cells(self._device, is_tiny=self._is_tiny)
        return _named(cells, _HEAD_SIZES)

    def _step(
        self, model: str, budget: int, options: Options, expected_s: float, *, rows: str = "mixed"
    ) -> Cell:
        shown = ", ".join(f"{key}={value}" for key, value in options.items()) or "defaults"
        return self._cell(
            f"{model} {budget} tokens, {shown}, {rows} rows",
            partial(self._measure_step, model, budget, options, rows),
            expected_s,
            model=model,
            budget=budget,
            options=dict(options),
            rows=rows,
        )

    def _loop(self, num_rows: int) -> Cell:
        return self._cell(
            f"transformers padded, {num_rows} at a time, sdpa bfloat16 weights",
            partial(self._measure_loop, num_rows),
            25,
            layout="padded",
        )

    def _profile(self, model: str, budget: int) -> Cell:
        measure = partial(self._measure_profile, model, budget)
        return self._cell(f"profile {model}", measure, 15, model=model)

    def _layouts(self) -> Iterator[Cell]:
        size = self._size
        budget = 2 * size.main_budget
        longest = min(size.longest, budget)
        mean = size.mean_length // 2 if self._is_tiny else _GSM8K_LENGTHS["mean"]
        drawn = {
            "same lengths": self._arguments.draw_lengths(size.min_step_tokens, longest),
            "GSM8K-like lengths": short_lengths(
                size.min_step_tokens, mean, _GSM8K_LENGTHS["longest"]
            ),
        }
        for name, lengths in drawn.items():
            for layout in LAYOUTS:
                measure = partial(self._measure_layout, layout, lengths, budget)
                yield self._cell(f"layout {layout}, {name}", measure, 15, layout=layout)

    def _prefixes(self) -> Iterator[Cell]:
        budget = self._size.main_budget
        divisor = 32 if self._is_tiny else 1
        for max_prompt, max_completion, group in _PREFIXES:
            prompt = max_prompt // divisor
            completion = max_completion // divisor
            total = group * (prompt + completion)
            case = PrefixCase(
                prompt=prompt,
                completion=completion,
                group=group,
                num_groups=max(2, 8 * budget // total),
                budget=max(2 * budget, prompt + group * completion),
            )
            name = f"shared prefix {prompt}+{completion}, groups of {group}"
            yield self._cell(name, partial(self._measure_prefix, case), 25)

    def _folder(self, model: str) -> Path:
        settings = self._size.models[model]
        return model_folder(self._arguments.work, model, settings, self._device)

    def _case(self, model: str, budget: int, options: Options, rows: str) -> StepCase:
        size = self._size
        num_tokens = max(size.min_step_tokens, 2 * budget)
        longest = min(size.longest, budget)
        lengths = self._arguments.draw_lengths(num_tokens, longest)
        if rows == "full":
            lengths = full_lengths(num_tokens, longest)
        return StepCase(
            folder=self._folder(model),
            lengths=lengths,
            budget=budget,
            longest=longest,
            options=options,
            num_steps=size.num_steps,
        )

    def _measure_step(
        self, model: str, budget: int, options: Options, rows: str
    ) -> Mapping[str, Any]:
        case = self._case(model, budget, options, rows)
        return time_steps(case, self._holder, self._device)

    def _measure_loop(self, num_rows: int) -> Mapping[str, Any]:
        # The loop needs the memory of the policy.
        self._holder.close()
        case = self._case("1b", self._size.main_budget, {}, "mixed")
        loop = LoopCase(
            folder=case.folder,
            layout="padded",
            num_rows=num_rows,
            attention="sdpa",
            master="bfloat16",
            lengths=case.lengths,
            budget=case.budget,
            num_steps=2,
        )
        return time_loop(loop, self._device)

    def _measure_profile(self, model: str, budget: int) -> Mapping[str, Any]:
        if not self._arguments.is_cuda:
            raise SkipCell("a profile needs a GPU")
        case = self._case(model, budget, {}, "mixed")
        return profile_steps(case, self._holder, is_cuda=True)

    def _measure_layout(self, layout: str, lengths: np.ndarray, budget: int) -> Mapping[str, Any]:
        folder = self._folder("1b")
        return time_layout(folder, layout, lengths, budget, self._holder, self._device)

    def _measure_prefix(self, case: PrefixCase) -> Mapping[str, Any]:
        return time_shared_prefix(self._folder("1b"), case, self._holder, self._device)

    def _measure_grpo(self) -> Mapping[str, Any]:
        self._holder.close()
        return time_grpo_steps(self._folder("1.5b"), self._device, self._size, "hf")

    def _run_pytest(self) -> Mapping[str, Any]:
        self._holder.close()
        return run_pytest(ROOT / "tests" / "gpu", self._arguments.out / "pytest.log")

    def _measure_machine(self) -> Mapping[str, Any]:
        """Measure a bfloat16 product and a copy, and name the attention kernel."""
        if not self._arguments.is_cuda:
            raise SkipCell("needs a GPU")
        from nemo_like.policy.inputs.varlen_kernels import varlen_kernel

        size = 8192
        left, right = (
            torch.randn(size, size, device=self._device, dtype=torch.bfloat16) for _ in range(2)
        )
        product_s = median_seconds(lambda: left @ right, self._device)
        source = torch.randint(0, 255, (2**31,), dtype=torch.uint8, device=self._device)
        target = torch.empty_like(source)
        copy_s = median_seconds(lambda: target.copy_(source), self._device)
        return {
            "product_tflops": 2 * size**3 / product_s / 1e12,
            # Bytes read and bytes written.
            "copy_gb_per_s": 2 * source.numel() / copy_s / 1e9,
            "attention": varlen_kernel().name,
            "free_gb": torch.cuda.mem_get_info()[0] / 1e9,
        }


def _named(cells: Iterator[Cell], parts: tuple[str, ...]) -> Iterator[Cell]:
    """Yield the cells whose name has one of `parts`."""
    for cell in cells:
        if any(part in cell.name for part in parts):
            yield cell
