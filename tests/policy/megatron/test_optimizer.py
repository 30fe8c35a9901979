"""Four steps of Megatron's sharded AdamW are four steps of AdamW, wherever they are taken, saved
and continued.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from nemo_like.config.schema import OptimizerConfig, PolicyConfig
from nemo_like.policy.checkpoint.sharded_reader import open_checkpoint
from tests.policy.megatron.ranks import (
    NUM_STEPS,
    PARALLEL,
    Run,
    Trained,
    as_tensors,
    meeting_in,
    of_model,
    train_dtensor,
    train_runs,
)
from tests.policy.megatron.reference import TrainedReference, train_transformers
from tests.policy.test_gradient_equality import LAYOUTS, TOLERANCE
from tests.policy.tiny import relative_error, run_ranks

CONFIG = dataclasses.replace(
    LAYOUTS["packed, 2 microbatches"],
    optimizer=OptimizerConfig(lr=0.02, weight_decay=0.5, beta1=0.8, beta2=0.9),
    max_grad_norm=2.0,
)
DTENSOR = ("one rank", "tp2 x dp2")
CONTEXT, WORLD = "tp2 x cp2 + sp", "pp2 x dp2"
PLACES = {"qwen3": ("one rank", "dp2", CONTEXT), "llama_tied": ("one rank", WORLD)}
"""Architecture -> layouts of its `NUM_STEPS` steps."""
CONTINUED = (("one rank", WORLD), (WORLD, "one rank"), (WORLD, "dp2"), (WORLD, CONTEXT))
"""Layouts that save a checkpoint, and layouts that continue it."""
EXACT = ((CONTEXT, "qwen2"), (WORLD, "llama_tied"))
"""Layouts and architectures whose checkpoint is loaded and saved by `dp2`."""
SAVED = {"one rank": ("llama_tied",), CONTEXT: ("qwen2",), WORLD: ("llama_tied", "qwen3")}
"""Layout -> architectures that it saves after two steps."""
HALF = ("dp2", WORLD)
"""Layouts that train in bfloat16."""


@pytest.fixture(scope="module")
def adamw(model_dir: Callable[[str], str]) -> Callable[[str], TrainedReference]:
    """`adamw(architecture)`: `NUM_STEPS` steps of transformers under torch's AdamW."""

    @cache
    def compute(architecture: str) -> TrainedReference:
        return train_transformers(of_model(CONFIG, model_dir(architecture)))

    return compute


class Runs:
    """Runs of the layouts of this module; `folder` has what they save."""

    def __init__(
        self, folder: Path, pool: ProcessPoolExecutor, model_dir: Callable[[str], str]
    ) -> None:
        self.folder = folder
        self._pool = pool
        self._model_dir = model_dir
        self._trained: dict[tuple[str, str], list[Trained]] = {}
        for place in (WORLD, "one rank"):
            self._run(place, self._first_runs(place))
        for place in (CONTEXT, "dp2", "one rank", WORLD):
            runs = {} if place in (WORLD, "one rank") else self._first_runs(place)
            self._run(place, runs | self._runs_of_checkpoints(place))

    def of(self, place: str, name: str) -> list[Trained]:
        """Return the results of all ranks of one run."""
        return self._trained[place, name]

    def config(
        self, architecture: str, precision: Literal["float32", "bfloat16"] = "float32"
    ) -> PolicyConfig:
        config = of_model(CONFIG, self._model_dir(architecture))
        return dataclasses.replace(config, precision=precision)

    def _first_runs(self, place: str) -> dict[str, Run]:
        names = [name for name, places in PLACES.items() if place in places]
        runs = {name: Run(self.config(name), NUM_STEPS) for name in names}
        folder = self.folder / place
        for name in SAVED.get(place, ()):
            runs[f"half {name}"] = Run(self.config(name), 2, None, folder / name)
        if place in HALF:
            config = self.config("qwen3", "bfloat16")
            runs["begun"] = Run(config, 0, None, folder / "begun")
            runs["bfloat16"] = Run(config, NUM_STEPS, None, folder / "bfloat16")
        return runs

    def _runs_of_checkpoints(self, place: str) -> dict[str, Run]:
        runs = {}
        for saved, continued in CONTINUED:
            if continued == place:
                start = self.folder / saved / "llama_tied"
                runs[f"from {saved}"] = Run(self.config("llama_tied"), 2, start)
        for saved, name in EXACT if place == "dp2" else ():
            out = self.folder / f"{saved} again"
            start = self.folder / saved / name
            runs[f"again {saved}"] = Run(self.config(name), 0, start, out)
        return runs

    def _run(self, place: str, runs: dict[str, Run]) -> None:
        world_size, parallel = PARALLEL[place]
        meeting = meeting_in(self.folder)
        arguments = (world_size, meeting, parallel, list(runs.values()))
        ranks = run_ranks(self._pool, train_runs, *arguments)
        for name, *results in zip(runs, *ranks, strict=True):
            self._trained[place, name] = results


@pytest.fixture(scope="module")
def runs(tmp_path_factory, pool, model_dir) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"), pool, model_dir)


@pytest.mark.parametrize("architecture", PLACES)
def test_four_steps_are_those_of_adamw_with_decay_on_matrices_only(architecture, adamw, runs):
    losses, norms, weights = adamw(architecture)
    for place in PLACES[architecture]:
        ranks = runs.of(place, architecture)
        assert ranks[-1].losses == pytest.approx(losses, rel=TOLERANCE), place
        assert ranks[0].norms == pytest.approx(norms, rel=10 * TOLERANCE), place
        assert relative_error(as_tensors(ranks[0].weights), weights) < 10 * TOLERANCE, place


def test_a_checkpoint_of_one_layout_continues_in_others(adamw, runs):
    losses, _, weights = adamw("llama_tied")
    for saved, place in CONTINUED:
        ranks = runs.of(place, f"from {saved}")
        assert ranks[-1].losses == pytest.approx(losses[2:], rel=TOLERANCE), (saved, place)
        error = relative_error(as_tensors(ranks[0].weights), weights)
        assert error < 10 * TOLERANCE, (saved, place)
        assert set().union(*(rank.counts for rank in ranks)) == {NUM_STEPS}, (
            "no two shards share a step counter"
        )


def test_a_checkpoint_of_either_engine_continues_in_the_other(adamw, runs, on_ranks, tmp_path):
    losses, _, _ = adamw("qwen3")
    config = runs.config("qwen3")
    saved = runs.folder / WORLD / "qwen3"
    for place in DTENSOR:
        ranks = on_ranks(train_dtensor, place, config, saved, None)
        assert ranks[0] == pytest.approx(losses[2:], rel=TOLERANCE), place
        on_ranks(train_dtensor, place, config, None, tmp_path / place)
    continued = [Run(config, 2, tmp_path / place) for place in DTENSOR]
    for back in on_ranks(train_runs, CONTEXT, continued)[0]:
        assert back.losses == pytest.approx(losses[2:], rel=TOLERANCE)


def test_saving_and_loading_is_exact_and_the_export_is_the_model(runs):
    for place, architecture in EXACT:
        weights = runs.of(place, f"half {architecture}")[0].weights
        loaded = runs.of("dp2", f"again {place}")[0].weights
        saved = runs.folder / place / architecture
        model = AutoModelForCausalLM.from_pretrained(saved / "hf")
        for name, parameter in model.named_parameters():
            assert np.array_equal(parameter.detach().numpy(), weights[name]), name
            assert np.array_equal(loaded[name], weights[name]), name
        with (
            open_checkpoint(saved) as first,
            open_checkpoint(runs.folder / f"{place} again") as second,
        ):
            assert first.num_optimizer_steps == second.num_optimizer_steps == 2
            for name, shape in first.shapes.items():
                for kind in ("weight", "exp_avg", "exp_avg_sq"):
                    parts = [
                        reader.read(f"{kind}/{name}", (0,) * len(shape), shape)
                        for reader in (first, second)
                    ]
                    assert torch.equal(*parts), (kind, name)


def test_bfloat16_computes_in_half_precision_on_float32_masters(adamw, runs):
    losses, _, _ = adamw("qwen3")
    original = AutoModelForCausalLM.from_pretrained(runs.config("qwen3").model_name)
    for place in HALF:
        with open_checkpoint(runs.folder / place / "begun") as reader:
            assert not reader.has_moments
            for name, parameter in original.named_parameters():
                found = reader.read(f"weight/{name}", (0,) * parameter.ndim, tuple(parameter.shape))
                assert torch.equal(found, parameter.detach()), (
                    "masters are the files' numbers, not rounded ones"
                )
        ranks = runs.of(place, "bfloat16")
        assert ranks[-1].losses == pytest.approx(losses, rel=0.05), place
        with open_checkpoint(runs.folder / place / "bfloat16") as reader:
            master = reader.read("weight/model.norm.weight", (0,), (32,))
        assert not torch.equal(master, master.bfloat16().float()), "masters keep float32 precision"
        assert torch.equal(
            torch.from_numpy(ranks[0].weights["model.norm.weight"]), master.bfloat16().float()
        )
