"""LoRA, freezing, averages, Muon, 8-bit moments, scores and distillation on CUDA equal the CPU."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from nemo_like.policy.policy import Policy
from tests.gpu.features import (
    FEATURES,
    Values,
    all_values,
    check_values,
    counted_waits,
    engine_of,
    feature_values,
    features_of,
    open_feature,
    save_teachers,
    sharded_rows,
    targets_of,
    worker_of,
)

REPOSITORY = Path(__file__).parents[2]
CASES = [(worker, name) for worker in ("dtensor", "megatron") for name in features_of(worker)]
Models = tuple[str, list[str]]


@pytest.fixture(scope="session")
def models(model_dir: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A student, and its teachers."""
    return model_dir("llama"), save_teachers(tmp_path_factory.mktemp("teachers"))


@pytest.fixture(scope="session")
def reference(models: Models) -> Callable[[str, str], dict[str, Values]]:
    """`reference(worker, precision)`: values of all features on the CPU, in another process."""
    model, teachers = models

    @cache
    def compute(worker: str, precision: str) -> dict[str, Values]:
        command = [sys.executable, "-m", "tests.gpu.features", worker, "cpu", precision]
        done = subprocess.run(
            [*command, model, *teachers],
            capture_output=True,
            text=True,
            cwd=REPOSITORY,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return compute


@contextlib.contextmanager
def opened(name: str, models: Models, precision: str, mb_tokens: int = 256) -> Iterator[Policy]:
    policy = open_feature(name, "dtensor", *models, "cuda:0", precision, mb_tokens)
    try:
        yield policy
    finally:
        policy.shutdown()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(("worker", "name"), CASES)
def test_values_equal_those_on_the_cpu(
    models: Models,
    reference: Callable[[str, str], dict[str, Values]],
    worker: str,
    name: str,
    precision: str,
) -> None:
    if worker == "megatron":
        pytest.importorskip("megatron.core", reason="needs the extra megatron")
    found = all_values(worker, "cuda:0", precision, *models, [name])[name]
    check_values(name, found, reference(worker, precision)[name], precision)


@contextlib.contextmanager
def waits_of_the_device() -> Iterator[SimpleNamespace]:
    """The places of waits, which torch reports as warnings."""
    waits = SimpleNamespace(places=[])
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield waits
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for one in caught:
        if "synchroniz" in str(one.message):
            waits.places.append(f"{one.filename}:{one.lineno}")


@pytest.mark.parametrize("name", ["lora", "ema", "scores", "distillation", "distillation, top-k"])
def test_further_microbatches_add_no_waits(models: Models, name: str) -> None:
    counted = []
    for mb_tokens in (512, 128):
        with opened(name, models, "bfloat16", mb_tokens) as policy:
            counted.append(counted_waits(policy, name, waits_of_the_device))
    (num_few, waits_of_few), (num_many, waits_of_many) = counted
    assert num_many > num_few
    assert len(waits_of_many) == len(waits_of_few), waits_of_many


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["lora", "freeze", "ema", "muon", "scores"])
@pytest.mark.usefixtures("deterministic")
def test_an_offload_and_onload_change_nothing(models: Models, name: str, precision: str) -> None:
    values: dict[bool, Values] = {}
    for is_offloaded in (False, True):
        with opened(name, models, precision) as policy:
            for _ in range(3 if is_offloaded else 0):
                # The second and third offload copy no frozen weight again.
                policy.group.run_all_workers("offload")
                policy.group.run_all_workers("onload")
            first = feature_values(policy, name)
            if is_offloaded:
                policy.group.run_all_workers("offload")
                sizes = {
                    tensor.untyped_storage().nbytes()
                    for tensor in engine_of(policy).resident_tensors()
                }
                assert sizes == {0}, "weights, averages or moments stay on the device"
                policy.group.run_all_workers("onload")
            second = feature_values(policy, name)
            values[is_offloaded] = first | {f"{key}, again": each for key, each in second.items()}
    assert values[True] == values[False]


@pytest.mark.parametrize("name", ["distillation", "distillation, top-k"])
@pytest.mark.usefixtures("deterministic")
def test_teachers_are_on_the_device_only_while_they_compute(models: Models, name: str) -> None:
    with opened(name, models, "bfloat16") as policy:
        teachers: list[Any] = list(worker_of(policy).teachers.engines)
        assert len(teachers) == 2

        def check_offloaded() -> None:
            for teacher in teachers:
                shards = list(teacher.local_weights())
                assert {shard.untyped_storage().nbytes() for shard in shards} == {0}

        check_offloaded()
        sharded = sharded_rows(policy)
        divergences = []
        for _ in range(2):
            targets = targets_of(policy, name, sharded)
            check_offloaded()
            metrics = policy.evaluate(sharded, FEATURES[name].loss, targets)
            divergences.append(metrics["policy/divergence"].value)
        assert np.isfinite(divergences).all()
        assert divergences[0] == divergences[1], "the weights of a teacher changed on the way"
