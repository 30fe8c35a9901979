"""Part B2: each option by itself, profiles, kernels alone, and the loops of transformers.

Options are found in the configuration's schema: every key with a few values, each value that is not
its default. So a key that is added later is measured without a change here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from benchmarks.gpu import features
from benchmarks.gpu.arguments import PartArguments
from benchmarks.gpu.cells import Cell, SkipCell
from benchmarks.gpu.kernel_speed import time_attention, time_head
from benchmarks.gpu.models import model_folder
from benchmarks.gpu.policies import Options, PolicyHolder, check_options, option_defaults
from benchmarks.gpu.rows import full_lengths
from benchmarks.gpu.training_steps import COMPILE, StepCase, profile_steps, time_loss, time_steps
from benchmarks.gpu.transformers_loops import LoopCase, time_loop
from nemo_like.config.loss import PolicyGradientLossConfig
from nemo_like.losses import ClippedPolicyGradientLoss
from nemo_like.models.spec import load_spec
from nemo_like.policy.heads.targets import TargetSettings

_NO_OPTIONS = (
    "policy.engine",
    "policy.precision",
    "policy.oom",
    "policy.oversize_rows",
    "policy.shared_prefix",
    "policy.router_replay",
    "parallel.dynamic_context",
    "parallel.sequence",
)
"""Keys with a few values that are not measured here: other parts, more than one GPU, or without an
effect on these rows and models.
"""
_EXPECTED_KEYS = (COMPILE, "policy.activation_checkpointing")
"""Recorded as skipped where the schema has no such key."""
_CHUNK_SIZES = (1024, 2048, 4096, 8192)
EXPERTS = ("expert", "moe", "grouped")
"""Parts of keys without effect on dense models, which part D measures."""


def make_cells(arguments: PartArguments) -> tuple[Iterator[Cell], Callable[[], None]]:
    """Return the cells, and a function that closes the policy that they share."""
    holder = PolicyHolder(arguments.device)
    return _Part(arguments, holder).cells(), holder.close


def option_sets() -> dict[str, Options]:
    """Return name -> options of each value that is not the default of its key."""
    found: dict[str, Options] = {}
    defaults = option_defaults()
    for key in _EXPECTED_KEYS:
        if key not in defaults:
            found[f"{key}=layers"] = {key: "layers"}
    for key, (default, values) in defaults.items():
        if key in _NO_OPTIONS:
            continue
        for value in values:
            if value != default:
                found[f"{key}={value}"] = {key: value}
    return found


class _Part:
    """The cells of the part, which share the arguments and the open policy."""

    def __init__(self, arguments: PartArguments, holder: PolicyHolder) -> None:
        self._arguments = arguments
        self._size = arguments.size
        self._holder = holder

    def cells(self) -> Iterator[Cell]:
        """Yield cells in the order of importance."""
        yield self._step("baseline 1b", "1b", {}, expected_s=30.0)
        yield self._cell("profile 1b", partial(self._profile, "1b", {}), 25.0)
        yield self._loop("padded", "sdpa", "bfloat16", num_rows=4)
        yield from self._packed_loops()
        yield self._loop("padded", "sdpa", "bfloat16", num_rows=1)
        for name, options in option_sets().items():
            if any(part in name for part in EXPERTS):
                continue
            changes_compilation = COMPILE in options
            expected_s = 60.0 if changes_compilation else 20.0
            yield self._step(name, "1b", options, expected_s=expected_s)
            if changes_compilation:
                yield self._cell(f"profile {name}", partial(self._profile, "1b", options), 25.0)
        yield from self._features()
        for model in ("8b-shape", "1b"):
            for name, options in self._full_row_options().items():
                yield self._step(
                    f"{model} full rows, {name}", model, options, expected_s=60.0, rows="full"
                )
        for name, coefficient in (("policy gradient", 0.0), ("policy gradient, entropy", 0.01)):
            yield self._cell(name, partial(self._policy_gradient, coefficient), 20.0)
        yield from self._chunks()
        yield from self._kernels()
        yield self._loop("padded", "sdpa", "float32", num_rows=4)
        # Compiled for every shape, which may take minutes.
        yield self._loop("packed", "flex_attention", "bfloat16")

    def _features(self) -> Iterator[Cell]:
        """Yield what changes the model, its optimizer or its loss, each by itself."""
        for name, options in features.OPTIONS.items():
            yield self._step(name, "1b", options, expected_s=30.0)
        for name, settings in features.TARGETS.items():
            yield self._cell(name, partial(self._distillation, settings), 40.0)
        yield self._cell("reward model", self._scores, 30.0)

    def _full_row_options(self) -> dict[str, Options]:
        """Return the defaults, and each option of compilation with rows of equal length."""
        compiled = {name: value for name, value in option_sets().items() if COMPILE in value}
        return {"defaults": {}, **compiled}

    def _packed_loops(self) -> Iterator[Cell]:
        for attention in ("sdpa", "flash_attention_2", "flash_attention_3"):
            yield self._loop("packed", attention, "bfloat16")

    def _chunks(self) -> Iterator[Cell]:
        for chunk in _CHUNK_SIZES:
            options = {"policy.logprob_chunk_size": chunk}
            yield self._step(f"policy.logprob_chunk_size={chunk}", "1b", options, expected_s=20.0)

    def _kernels(self) -> Iterator[Cell]:
        for rows in ("mixed", "full"):
            for kernel in ("engine", "FlashAttention 2"):
                measure = partial(self._attention, rows, kernel)
                yield self._cell(f"attention alone, {rows} rows, {kernel}", measure, 8.0)
        for with_entropy in (False, True):
            for chunk in _CHUNK_SIZES:
                name = f"head alone, chunk {chunk}{', entropy' if with_entropy else ''}"
                yield self._cell(name, partial(self._head, chunk, with_entropy), 8.0)

    def _cell(
        self,
        name: str,
        measure: Callable[[], Mapping[str, Any]],
        expected_s: float,
        **settings: Any,
    ) -> Cell:
        return Cell(
            name=name,
            measure=measure,
            settings={"model": "1b", "budget": self._size.main_budget, **settings},
            expected_s=expected_s,
            limit_s=180.0,
        )

    def _step(
        self,
        name: str,
        model: str,
        options: Options,
        *,
        expected_s: float,
        rows: Literal["mixed", "full"] = "mixed",
    ) -> Cell:
        measure = partial(self._measure_step, model, options, rows)
        shown = dict(features.shown_options(options))
        settings = {"model": model, "options": shown, "rows": rows}
        return self._cell(name, measure, expected_s, **settings)

    def _loop(
        self,
        layout: Literal["padded", "packed"],
        attention: str,
        master: Literal["bfloat16", "float32"],
        *,
        num_rows: int = 1,
    ) -> Cell:
        shown = f"padded, {num_rows} at a time," if layout == "padded" else layout
        return self._cell(
            f"transformers {shown} {attention} {master} weights",
            partial(self._measure_loop, layout, attention, master, num_rows),
            30.0,
            layout=layout,
            attention=attention,
            weights=master,
        )

    def _folder(self, model: str) -> Path:
        arguments = self._arguments
        settings = self._size.models[model]
        return model_folder(arguments.work, model, settings, arguments.device)

    def _case(self, model: str, options: Options, rows: str) -> StepCase:
        size = self._size
        lengths = self._arguments.draw_lengths(size.min_step_tokens, size.longest)
        if rows == "full":
            lengths = full_lengths(size.min_step_tokens, size.longest)
        return StepCase(
            folder=self._folder(model),
            lengths=lengths,
            budget=size.main_budget,
            longest=size.longest,
            options=options,
            num_steps=size.num_steps,
        )

    def _check_compilation(self, options: Options) -> None:
        """Raise SkipCell for options that this version lacks, and on a CPU for compilation."""
        check_options(options)
        if options.get(COMPILE) == "layers" and not self._arguments.is_cuda:
            raise SkipCell("compilation takes minutes on a CPU; its own tests compile there")

    def _measure_step(
        self, model: str, options: Options, rows: Literal["mixed", "full"]
    ) -> Mapping[str, Any]:
        self._check_compilation(options)
        features.check_packages(options)
        case = self._case(model, options, rows)
        return time_steps(case, self._holder, self._arguments.device)

    def _measure_loop(
        self,
        layout: Literal["padded", "packed"],
        attention: str,
        master: Literal["bfloat16", "float32"],
        num_rows: int,
    ) -> Mapping[str, Any]:
        # The loop needs the memory of the policy.
        self._holder.close()
        size = self._size
        case = LoopCase(
            folder=self._folder("1b"),
            layout=layout,
            num_rows=num_rows,
            attention=attention,
            master=master,
            lengths=self._arguments.draw_lengths(size.min_step_tokens, size.longest),
            budget=size.main_budget,
            num_steps=size.num_steps,
        )
        return time_loop(case, self._arguments.device)

    def _policy_gradient(self, coefficient: float) -> Mapping[str, Any]:
        loss_config = PolicyGradientLossConfig(entropy_coefficient=coefficient)
        loss = ClippedPolicyGradientLoss(config=loss_config)
        case = self._case("1b", {}, "mixed")
        return time_loss(case, self._holder, self._arguments.device, loss.for_num_steps(1))

    def _distillation(self, settings: TargetSettings) -> Mapping[str, Any]:
        case = self._case("1b", {}, "mixed")
        device = self._arguments.device
        return features.time_distillation(case, self._holder, device, settings)

    def _scores(self) -> Mapping[str, Any]:
        case = self._case("1b", {}, "mixed")
        return features.time_scores(case, self._holder, self._arguments.device)

    def _profile(self, model: str, options: Options) -> Mapping[str, Any]:
        self._check_compilation(options)
        case = self._case(model, options, "mixed")
        return profile_steps(case, self._holder, is_cuda=self._arguments.is_cuda)

    def _attention(self, rows: str, kernel: Any) -> Mapping[str, Any]:
        size = self._size
        lengths = full_lengths(size.main_budget, size.longest)
        if rows == "mixed":
            lengths = self._arguments.draw_lengths(size.main_budget, size.longest)
        return time_attention(
            load_spec(str(self._folder("1b"))), lengths, self._arguments.device, kernel=kernel
        )

    def _head(self, chunk_size: int, with_entropy: bool) -> Mapping[str, Any]:
        return time_head(
            load_spec(str(self._folder("1b"))),
            self._size.main_budget,
            chunk_size,
            self._arguments.device,
            with_entropy=with_entropy,
        )
