"""Start-up check of a run: a difference from transformers ends it and has a cause, equal outcomes
are kept, and a check that fails or takes long ends nothing.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from nemo_like.cli import main
from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import (
    ActivationCheckpointing,
    ClusterConfig,
    ParallelConfig,
    PolicyConfig,
    SequencePackingConfig,
)
from nemo_like.data.encoded_rows import CACHE_VARIABLE
from nemo_like.policy.dtensor import model as dtensor_model
from nemo_like.policy.inputs import attention
from nemo_like.run.progress import Progress
from nemo_like.training import parity_check, parity_process
from nemo_like.training.parity_check import ParityCheck, checked_run
from tests.exhaustive import usually
from tests.recipe import Recipe

PACKED = SequencePackingConfig(enabled=True)


@pytest.fixture
def model(tmp_path: Path) -> str:
    """Return a directory with the config of a model, which is all that the check reads."""
    LlamaConfig(num_attention_heads=8, num_key_value_heads=4).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def packed_scale() -> None:
    """Make the scale of attention in packed rows 1 % larger."""
    exact = attention.varlen_attention

    def wrong(*args: Any, scale: float, **options: Any) -> Any:
        return exact(*args, scale=1.01 * scale, **options)

    attention.varlen_attention = wrong


def context_scale() -> None:
    """Do so where ranks have parts of a row."""
    exact = attention.varlen_attention

    def wrong(*args: Any, scale: float, cp_group: Any = None, **options: Any) -> Any:
        factor = 1.0 if cp_group is None else 1.01
        return exact(*args, scale=factor * scale, cp_group=cp_group, **options)

    attention.varlen_attention = wrong


def recomputed_scale() -> None:
    """Make the outputs of a recomputed layer 1 % larger."""

    def wrong(layers: Any, mode: str) -> None:
        layers[0].register_forward_hook(lambda layer, inputs, output: 1.01 * output)

    dtensor_model.checkpoint_layers = wrong


def nothing() -> None:
    """Change nothing."""


def compare(
    folder: Path, policy: PolicyConfig, parallel: ParallelConfig, fault: Callable[[], None]
) -> tuple[str, str]:
    """Return kind and text of the outcome of a check, in whose process `fault` is called first."""
    run = checked_run(policy, parallel, 1)
    (folder / "run.json").write_text(json.dumps(asdict(run)))
    # Forked from a process that has imported torch.
    process = multiprocessing.get_context("forkserver").Process(
        target=compare_with_fault, args=(folder, fault)
    )
    process.start()
    process.join()
    return json.loads((folder / "outcome.json").read_text())


def compare_with_fault(folder: Path, fault: Callable[[], None]) -> None:
    fault()
    parity_process.main(folder)


FAULTS: dict[str, tuple[Callable[[], None], ParallelConfig, ActivationCheckpointing, str]] = {
    "packing": (
        packed_scale,
        ParallelConfig(),
        "none",
        "The cause is sequence packing: set policy.sequence_packing.enabled=false and policy.dyn",
    ),
    "context": (
        context_scale,
        ParallelConfig(context=4),
        "full",
        "The cause is context parallelism: set parallel.context=1,",
    ),
    "recomputation": (
        recomputed_scale,
        ParallelConfig(),
        "full",
        "The cause is activation checkpointing: set policy.activation_checkpointing=none,",
    ),
}


@pytest.mark.parametrize("name", usually(FAULTS, "packing", "context"))
def test_a_difference_has_its_cause_its_size_and_how_to_turn_it_off(
    name: str, model: str, tmp_path: Path
):
    fault, parallel, recomputation, cause = FAULTS[name]
    policy = PolicyConfig(
        model_name=model, sequence_packing=PACKED, activation_checkpointing=recomputation
    )
    kind, text = compare(tmp_path, policy, parallel, fault)
    assert kind == "different"
    assert cause in text
    assert "a tiny copy of policy.model_name (model type llama)" in text
    assert "relative, limit 1e-05" in text
    assert text.endswith("or train in spite of it with policy.parity_check=false")


def test_a_right_layout_is_equal(model: str, tmp_path: Path):
    policy = PolicyConfig(
        model_name=model, sequence_packing=PACKED, activation_checkpointing="selective"
    )
    kind, _ = compare(tmp_path, policy, ParallelConfig(), nothing)
    assert kind == "equal"


def test_a_model_without_a_tiny_copy_is_unknown_with_the_reason(model: str, tmp_path: Path):
    LlamaConfig(hidden_act="unheard").save_pretrained(model)
    kind, text = compare(tmp_path, PolicyConfig(model_name=model), ParallelConfig(), nothing)
    assert kind == "unknown"
    assert "small model of the type llama cannot be built (KeyError: 'unheard')" in text


class Started:
    """Stands for the process of a check: it does what a test needs, and is counted."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        patch.syspath_prepend(folder)
        patch.setenv(CACHE_VARIABLE, str(folder / "cache"))

    def does(self, code: str) -> None:
        """Run `code` in place of the comparison; it can use `write(kind, text)`."""
        # Python imports this module when it starts.
        (self._folder / "sitecustomize.py").write_text(
            "import json, os, pathlib, sys, time\n"
            "def write(kind, text=''):\n"
            "    path = pathlib.Path(sys.orig_argv[-1], 'outcome.json')\n"
            "    path.write_text(json.dumps([kind, text]))\n"
            "if 'nemo_like.training.parity_process' in sys.orig_argv:\n"
            f"    with open({str(self._folder / 'pids')!r}, 'a') as file:\n"
            "        print(os.getpid(), os.environ['CUDA_VISIBLE_DEVICES'] == '', file=file)\n"
            f"    {code}\n"
            "    os._exit(0)\n"
        )

    @property
    def pids(self) -> list[int]:
        path = self._folder / "pids"
        lines = path.read_text().splitlines() if path.exists() else []
        assert all(line.endswith(" True") for line in lines), "no GPU is visible"
        return [int(line.split()[0]) for line in lines]


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Started:
    folder = tmp_path / "started"
    folder.mkdir()
    return Started(folder, monkeypatch)


def check(policy: PolicyConfig, parallel: ParallelConfig | None = None) -> None:
    with ExitStack() as closing:
        started = ParityCheck(
            policy, parallel or ParallelConfig(), ClusterConfig(workers_per_node=2), closing
        )
        started.finish(Progress(StringIO()))


def test_an_equal_outcome_is_kept_for_this_model_and_layout(
    model: str, started: Started, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    started.does("write('equal', 'equal to transformers')")
    policy = PolicyConfig(model_name=model, sequence_packing=PACKED)
    for _ in range(2):
        check(policy)
    assert len(started.pids) == 1
    assert [record.message for record in caplog.records] == [
        "policy.parity_check: equal to transformers in this run",
        "policy.parity_check: equal to transformers in an earlier run",
    ]
    check(policy, ParallelConfig(tensor=2))
    assert len(started.pids) == 2
    LlamaConfig(num_attention_heads=8, num_key_value_heads=2).save_pretrained(model)
    check(policy)
    assert len(started.pids) == 3


def test_a_difference_is_measured_again_and_a_missing_copy_is_not(
    model: str, started: Started, caplog: pytest.LogCaptureFixture
):
    policy = PolicyConfig(model_name=model)
    started.does("write('different', 'the difference')")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"^the difference$"):
            check(policy)
    assert len(started.pids) == 2
    started.does("write('unknown', 'the reason')")
    for _ in range(2):
        check(policy)
    assert len(started.pids) == 3
    assert [record.message for record in caplog.records] == [
        "policy.parity_check: the reason in this run",
        "policy.parity_check: the reason in an earlier run",
    ]
    assert {record.levelname for record in caplog.records} == {"WARNING"}


def test_it_is_off_by_the_key_and_logged(
    model: str, started: Started, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    started.does("write('different', 'the difference')")
    check(PolicyConfig(model_name=model, parity_check=False))
    assert started.pids == []
    (record,) = caplog.records
    assert record.message.startswith("policy.parity_check is false: the layout is not compared")


def test_a_process_that_takes_too_long_is_ended_with_a_warning(
    model: str, started: Started, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(parity_check, "LIMIT_S", 0.1)
    started.does("time.sleep(600)")
    begin = time.monotonic()
    check(PolicyConfig(model_name=model))
    assert time.monotonic() - begin < 60
    (record,) = caplog.records
    assert record.message == "policy.parity_check: no result after 0.1 s, so it is left out"
    for pid in started.pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_process_that_fails_gives_a_warning_with_the_reason(
    model: str, started: Started, caplog: pytest.LogCaptureFixture
):
    started.does("print('first\\nthe reason', flush=True); os._exit(3)")
    check(PolicyConfig(model_name=model))
    (record,) = caplog.records
    assert record.message == (
        "policy.parity_check: the comparison with transformers failed: the reason"
    )


def test_a_difference_ends_the_run_before_its_first_step(
    recipe: Recipe, started: Started, capsys: pytest.CaptureFixture[str]
):
    started.does("write('different', 'The cause is packing')")
    recipe.sft()
    config = str(recipe.folder / "sft.yaml")
    assert main(["sft", "--config", config, "policy.parity_check=true"]) == 2
    assert "The cause is packing" in capsys.readouterr().err
    assert len(started.pids) == 1
    assert not (recipe.folder / "sft" / "metrics.jsonl").exists()


@pytest.mark.parametrize("backend", usually(("local", "ray")))
def test_a_run_compares_in_the_background_and_ends_with_the_cause(
    backend: str,
    recipe: Recipe,
    started: Started,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    # The machine may have other work.
    monkeypatch.setattr(parity_check, "LIMIT_S", 600.0)
    started.does(
        "import tests.training.test_parity_check as each; each.packed_scale();"
        " from nemo_like.training.parity_process import main;"
        " main(pathlib.Path(sys.orig_argv[-1]))"
    )
    recipe.sft()
    command = ["sft", "--config", str(recipe.folder / "sft.yaml"), f"cluster.backend={backend}"]
    assert main([*command, "policy.parity_check=true"]) == 2
    assert "The cause is sequence packing: set" in capsys.readouterr().err
