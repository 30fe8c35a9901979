"""The parts of `benchmarks.gpu.report` on a CPU at the size `tiny`, as on a bare GPU machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.gpu import features, part, report, tables
from benchmarks.gpu.attention_check import CP_LENGTHS, chunk_spans
from benchmarks.gpu.cells import Budget, Cell, Recorder, SkipCell, read_record, run_cells
from benchmarks.gpu.correctness import parse_outcomes
from benchmarks.gpu.layouts import LAYOUTS
from benchmarks.gpu.machine import ROOT
from benchmarks.gpu.policies import check_options, option_defaults, policy_config, predicted_peak_gb
from benchmarks.gpu.profile import summarize
from benchmarks.gpu.rows import file_lengths, full_lengths, lognormal_lengths
from benchmarks.gpu.transformers_loops import packed, padded
from nemo_like.models.spec import PRESETS, load_spec
from nemo_like.policy.inputs.grid import cp_shard_positions

HIDDEN = ("ray", "megatron", "pydantic", "omegaconf", "vllm", "math_verify", "flash_attn")
"""Modules that a machine with a bare PyTorch image lacks."""

# Each cell ends with a collection of garbage, which visits every object of all imported modules
# but for those that are frozen.
RUN_PARTS = """
import gc, importlib, sys
for name in {hidden!r}:
    sys.modules[name] = None
import torch
torch.set_num_threads(1)
import nemo_like.policy.policy
from benchmarks.gpu import part
for module, _ in part.MODULES.values():
    importlib.import_module(module)
gc.freeze()
for name in sys.argv[1].split(","):
    code = part.main([name, "--seconds", "400", "--device", "cpu", "--size", "tiny", *sys.argv[2:]])
    assert code == 0, code
"""

Record = Mapping[str, Any]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of all parts, measured in one process without the hidden modules."""
    out = tmp_path_factory.mktemp("results")
    work = tmp_path_factory.mktemp("work")
    script = RUN_PARTS.format(hidden=HIDDEN)
    command = [sys.executable, "-c", script, ",".join(part.MODULES)]
    command += ["--out", str(out), "--work", str(work)]
    # One file of tests/gpu; `test_gpu_suite` collects all of them.
    environment = os.environ | {
        "PYTEST_ADDOPTS": "--ignore-glob=*/test_[b-z]*.py",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=900, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def cells_of(results: Path, name: str) -> dict[str, Record]:
    return {cell["name"]: cell for cell in read_record(results / f"{name}.json")["cells"]}


@pytest.mark.parametrize("name", list(part.MODULES))
@pytest.mark.exhaustive
def test_a_part_finishes_and_no_cell_fails(results: Path, name: str) -> None:
    record = read_record(results / f"{name}.json")
    assert record["finished"] and record["running"] is None
    assert record["machine"]["packages"]["torch"] == torch.__version__
    wrong = [cell for cell in record["cells"] if cell["status"] not in ("ok", "skipped")]
    assert wrong == []
    for cell in record["cells"]:
        assert cell["status"] == "ok" or cell["reason"]


def test_the_short_measurement_runs_and_prints_each_cell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--parts", "S", "--device", "cpu", "--size", "tiny", "--out", str(tmp_path)]
    arguments += ["--cells", "1b 256 tokens;layout;shared prefix;GRPO", "--seconds", "200"]
    assert report.main(arguments) == 0
    cells = cells_of(tmp_path, "S")
    printed = capsys.readouterr().out
    assert {cell["status"] for cell in cells.values()} == {"ok"}
    for name, cell in cells.items():
        assert f"  {name}: " in printed
        assert any(text in name for text in ("1b 256", "layout", "shared prefix", "GRPO")), cell
    # All layouts have the same loss, and sharing changes the tokens and not the loss.
    for lengths in ("same lengths", "GSM8K-like lengths"):
        losses = [cells[f"layout {name}, {lengths}"]["values"]["loss"] for name in LAYOUTS]
        assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-2)
    prefix = cells["shared prefix 256+32, groups of 8"]["values"]
    assert prefix["true computed_tokens"] < prefix["false computed_tokens"] / 3
    assert prefix["true loss"] == pytest.approx(prefix["false loss"], abs=2e-2)
    assert read_record(tmp_path / "S.json")["finished"]


def test_outcomes_of_tests_are_read_from_output_that_a_limit_cut() -> None:
    text = (
        "tests/gpu/test_a.py::test_x[a-b, c] PASSED    [ 10%]\n"
        "tests/gpu/test_a.py::test_y SKIPPED (needs a GPU)   [ 20%]\n"
        "[gw3] [ 30%] FAILED tests/gpu/test_b.py::test_z[1-2] \n"
        "tests/gpu/test_a.py::test_w \n"
        "FAILED tests/gpu/test_b.py::test_z[1-2] - AssertionError\n"
    )
    assert parse_outcomes(text) == {
        "tests/gpu/test_a.py::test_x[a-b, c]": "PASSED",
        "tests/gpu/test_a.py::test_y": "SKIPPED",
        "tests/gpu/test_b.py::test_z[1-2]": "FAILED",
    }


@pytest.mark.exhaustive
def test_kernels_log_probs_and_steps_agree_with_their_references(results: Path) -> None:
    cells = cells_of(results, "A")
    measured = [name for name, cell in cells.items() if cell["status"] == "ok"]
    for prefix in ("attention d=16 GQA 8", "attention cp 8 rank 7", "log-probs", "dtensor step"):
        assert any(name.startswith(prefix) for name in measured)
    assert cells["megatron step llama float32"]["status"] == "skipped"
    assert "pytest tests/gpu" in measured


@pytest.mark.exhaustive
def test_the_matrix_has_all_models_budgets_and_kinds_of_checkpointing(results: Path) -> None:
    cells = cells_of(results, "B1").values()
    settings = [cell["settings"] for cell in cells]
    assert {each["model"] for each in settings} == {"1b", "3b", "8b-shape"}
    assert {each["budget"] for each in settings} == {64, 128}
    assert {each["checkpointing"] for each in settings} >= {"none", "full"}
    assert all(cell["values"]["tokens_per_s"] > 0 for cell in cells)
    # The same rows and weights give the same loss in every budget and with recomputation.
    losses = [
        cell["values"]["loss"]
        for cell in cells
        if cell["settings"]["model"] == "1b" and cell["settings"]["rows"] == "mixed"
    ]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-2)


@pytest.mark.exhaustive
def test_the_loops_of_transformers_train_on_the_same_loss(results: Path) -> None:
    cells = cells_of(results, "B2")
    baseline = cells["baseline 1b"]["values"]
    for layout in ("padded, 4 at a time,", "padded, 1 at a time,", "packed"):
        values = cells[f"transformers {layout} sdpa bfloat16 weights"]["values"]
        assert values["loss"] == pytest.approx(baseline["loss"], rel=2e-2)
        assert values["num_tokens"] == baseline["num_tokens"]


@pytest.mark.exhaustive
def test_lora_distillation_and_reward_models_are_measured(results: Path) -> None:
    cells = cells_of(results, "B2")
    baseline = cells["baseline 1b"]["values"]
    for name in ("LoRA rank 16", "Muon", "EMA", "embeddings frozen"):
        values = cells[name]["values"]
        assert values["loss"] == pytest.approx(baseline["loss"], rel=1e-2), name
    for name in features.TARGETS:
        values = cells[name]["values"]
        assert values["divergence"] == pytest.approx(0.0, abs=1e-2), "its teacher is the student"
        assert values["step_s"] == pytest.approx(values["teacher_s"] + values["train_s"])
    assert cells["reward model"]["values"]["loss"] == pytest.approx(0.69, abs=0.3)


def test_the_predicted_memory_is_that_of_the_options() -> None:
    def predicted(options: Mapping[str, Any]) -> float:
        config = policy_config(Path("1b"), budget=8192, num_rows=8, longest=2048, options=options)
        return predicted_peak_gb(config, "dtensor", "cuda:0", options, 8192)

    baseline = predicted({})
    # Weights, gradients and moments of all parameters, in float32.
    assert baseline > 16 * load_spec("1b").num_params / 1e9
    for name, options in features.OPTIONS.items():
        # Averages take memory; adapters, frozen weights and smaller moments save it.
        assert (predicted(options) > baseline) == (name == "EMA"), name


@pytest.mark.exhaustive
def test_bytes_arrive_in_the_second_process_and_a_grpo_step_has_all_phases(results: Path) -> None:
    cells = cells_of(results, "C")
    assert cells["transport shared_memory"]["values"]["passed"]
    assert cells["CUDA IPC raw"]["reason"] == "CUDA IPC needs a CUDA device"
    assert "vllm" in cells["GRPO step vllm"]["reason"]
    phases = cells["GRPO step hf"]["values"]["phases_s"]
    assert {"rollout", "train", "weight sync", "policy offload"} <= phases.keys()


@pytest.mark.exhaustive
def test_grouped_products_of_experts_equal_the_loop(results: Path) -> None:
    cells = cells_of(results, "D")
    assert cells["MoE layer in torch, 64 tokens"]["values"]["passed"]
    assert "Megatron-Core" in cells["megatron step 1b, defaults"]["reason"]


@pytest.mark.exhaustive
def test_tables_and_plots_of_a_gpu_run_replace_the_text_between_the_markers(
    results: Path, tmp_path: Path
) -> None:
    records = tables.read_records(results)
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{tables.BEGIN}\nold\n{tables.END}\nafter\n", encoding="utf-8")
    tables.write_readme(readme, records)
    text = readme.read_text(encoding="utf-8")
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    for name, record in records.items():
        assert f"### {name}: {record['title']}" in text
    assert "| 1b | 128 | none | mixed |" in text
    assert "GRPO step hf | rollout |" in text
    assert (tmp_path / "mfu.svg").read_text(encoding="utf-8").startswith("<svg xmlns=")
    # A second time nothing changes.
    tables.write_readme(readme, records)
    assert readme.read_text(encoding="utf-8") == text


@pytest.mark.exhaustive
def test_a_gpu_run_is_written_with_its_memory_and_its_profile(
    results: Path, tmp_path: Path
) -> None:
    """The results of a CPU, with the fields that a GPU adds."""
    for name in part.MODULES:
        record = json.loads((results / f"{name}.json").read_text(encoding="utf-8"))
        record["size"] = "full"
        record["machine"] |= {"device": "cuda:0", "gpu": "A GPU", "driver": "1.2"}
        for cell in record["cells"]:
            if name == "B1":
                cell["values"] |= {"peak_gb": 2.0, "predicted_over_measured": 0.5}
            if cell["name"] == "profile 1b":
                kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 0, "dur": 10}
                cell["values"] = summarize([kernel], 2)
        (tmp_path / f"{name}.json").write_text(json.dumps(record), encoding="utf-8")
    readme = tmp_path / "README.md"
    readme.write_text(f"{tables.BEGIN}\n{tables.END}\n", encoding="utf-8")
    assert tables.main([str(tmp_path), "--readme", str(readme)]) == 0
    text = readme.read_text(encoding="utf-8")
    assert "A GPU, driver 1.2, torch" in text and "![memory](memory.svg)" in text
    assert "the GPU is busy 100.0% of" in text and "| `gemm` | 1 | 0.01 | 100.0% |" in text
    assert 'class="mark"' in (tmp_path / "memory.svg").read_text(encoding="utf-8")


@pytest.mark.exhaustive
def test_results_of_a_cpu_are_not_written_into_the_readme(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tables.README.read_text(encoding="utf-8")
    assert tables.main([str(results)]) == 2
    assert "ran on cpu" in capsys.readouterr().err
    assert tables.README.read_text(encoding="utf-8") == before
    assert tables.main([str(results), "--print"]) == 0
    assert "### A: correctness" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_without_time_the_report_records_every_cell_as_not_run(tmp_path: Path) -> None:
    arguments = ["--parts", "D", "--device", "cpu", "--size", "tiny", "--seconds", "40"]
    # The reserve of 10 s and the expected 40 s of a step leave no time for one.
    assert report.main([*arguments, "--out", str(tmp_path)]) == 0
    record = read_record(tmp_path / "D.json")
    assert record["finished"]
    by_name = {cell["name"]: cell for cell in record["cells"]}
    assert by_name["dtensor step 1b, defaults"]["status"] == "not run"
    assert "out of time" in by_name["dtensor step 1b, defaults"]["reason"]


# Cells


class Clock:
    """Seconds that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_cells_are_measured_in_order_until_the_time_is_over(tmp_path: Path) -> None:
    clock = Clock()

    def measure() -> dict[str, Any]:
        clock.now += 4
        return {"x": clock.now}

    cells = [Cell(name=f"c{index}", measure=measure, expected_s=3) for index in range(4)]
    recorder = Recorder(tmp_path / "A.json", {"part": "A"})
    run_cells(recorder, cells, Budget(10, clock))
    found = [(cell["name"], cell["status"]) for cell in read_record(recorder.path)["cells"]]
    assert found == [("c0", "ok"), ("c1", "ok"), ("c2", "not run"), ("c3", "not run")]


def test_a_failing_cell_is_recorded_and_the_next_one_runs(tmp_path: Path) -> None:
    def fail() -> dict[str, Any]:
        raise ValueError("no such kernel")

    def skip() -> dict[str, Any]:
        raise SkipCell("needs a GPU")

    released = []
    measures = {"fails": fail, "skips": skip, "wrong": lambda: {"passed": False}, "ok": dict}
    cells = [Cell(name=name, measure=measure) for name, measure in measures.items()]
    recorder = Recorder(tmp_path / "A.json", {})
    run_cells(recorder, cells, Budget(60), free=lambda: released.append(1))
    found = {cell["name"]: cell for cell in read_record(recorder.path)["cells"]}
    statuses = {name: cell["status"] for name, cell in found.items()}
    assert statuses == {"fails": "failed", "skips": "skipped", "wrong": "wrong", "ok": "ok"}
    assert found["fails"]["reason"].startswith("ValueError: no such kernel")
    assert released == [1]


def test_a_new_process_continues_after_the_cell_that_ended_the_last_one(tmp_path: Path) -> None:
    path = tmp_path / "A.json"
    cells = [Cell(name=name, measure=dict) for name in ("first", "second", "third")]
    recorder = Recorder(path, {})
    run_cells(recorder, cells[:1], Budget(60))
    recorder.begin(cells[1])
    report.note_failure(path, "the process ended with signal SIGSEGV")
    run_cells(Recorder(path, {}, resume=True), cells, Budget(60))
    found = [(cell["name"], cell["status"]) for cell in read_record(path)["cells"]]
    assert found == [("first", "ok"), ("second", "failed"), ("third", "ok")]


def test_a_cell_that_hangs_ends_its_process(tmp_path: Path) -> None:
    path = tmp_path / "A.json"
    running = {"name": "hangs", "settings": {}, "since": time.time() - 60, "limit_s": 50}
    path.write_text(json.dumps({"running": running, "cells": []}), encoding="utf-8")
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    reason = report.watch(process, path, time.monotonic() + 600)
    report.end_session(process)
    assert reason == "the cell exceeded its limit of 50 s"
    assert process.returncode < 0


def test_parts_are_named_by_letters_and_b_has_two_halves() -> None:
    assert report.parse_parts("A,B") == ["A", "B1", "B2"]
    with pytest.raises(SystemExit, match="'X'; the parts are A, S, S3, B1, B2, C, D, B"):
        report.parse_parts("A,X")


# Inputs


def test_lognormal_lengths_vary_as_much_as_real_ones() -> None:
    lengths = lognormal_lengths(2_000_000, mean=1000, longest=100_000)
    assert lengths.sum() >= 2_000_000
    assert lengths.mean() == pytest.approx(1000, rel=0.1)
    assert lengths.std() / lengths.mean() == pytest.approx(1, abs=0.2)
    assert lognormal_lengths(10_000, mean=1000, longest=50).max() == 50


def test_lengths_come_from_the_columns_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("a,b\n10,1\n500,0\n", encoding="utf-8")
    lengths = file_lengths(path, ("a", "b"), 1000, longest=100)
    assert set(lengths.tolist()) == {11, 100}
    assert lengths.sum() >= 1000 > lengths[:-1].sum()


def test_full_rows_have_the_longest_length() -> None:
    assert full_lengths(100, 32).tolist() == [32, 32, 32, 32]


@pytest.mark.parametrize("cp_size", [1, 2, 8])
def test_chunks_of_a_rank_are_those_of_the_engine(cp_size: int) -> None:
    for rank in range(cp_size):
        queries, keys = chunk_spans(CP_LENGTHS, cp_size, rank)
        starts = np.repeat(np.cumsum([0, *CP_LENGTHS[:-1]]), 1 if cp_size == 1 else 2)
        found = [
            start + first + np.arange(length)
            for start, (first, length) in zip(starts, queries, strict=True)
        ]
        expected = cp_shard_positions(CP_LENGTHS, cp_size, rank)
        np.testing.assert_array_equal(np.concatenate(found), expected)
        ends = [first + length for first, length in queries]
        assert [length for _, length in keys] == ends


def test_packed_and_padded_microbatches_have_the_same_labels() -> None:
    rows = [np.arange(2, 2 + length) for length in (3, 5, 2)]
    long = packed(rows, 8)
    assert [part["input_ids"].shape for part in long] == [(1, 8), (1, 2)]
    assert long[0]["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 4]]
    # transformers predicts the label at i from position i - 1, so a row's first label is unused.
    num_packed = sum(int((each["labels"] != -100).sum()) for each in long)
    num_padded = sum(int((each["labels"][:, 1:] != -100).sum()) for each in padded(rows, 2))
    assert num_packed == num_padded == sum(len(row) - 1 for row in rows)


def test_options_that_this_version_lacks_are_skipped_with_the_reason() -> None:
    with pytest.raises(SkipCell, match=r"no key policy\.no_such_key"):
        check_options({"policy.no_such_key": 1})
    with pytest.raises(SkipCell, match=r"policy\.engine is one of dtensor, megatron, not x"):
        check_options({"policy.engine": "x"})
    check_options({"policy.engine": "megatron", "policy.logprob_chunk_size": 64})
    assert option_defaults()["policy.engine"] == ("dtensor", ("dtensor", "megatron"))


def test_a_profile_counts_overlapping_kernels_once_and_all_host_waits() -> None:
    def event(category: str, name: str, start: float, duration: float) -> dict[str, Any]:
        return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration}

    events = [
        event("kernel", "gemm", 0, 40),
        event("kernel", "gemm", 30, 20),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 90, 10),
        event("gpu_user_annotation", "Optimizer.step", 0, 100),
        event("cuda_runtime", "cudaStreamSynchronize", 50, 30),
        event("cuda_runtime", "cudaLaunchKernel", 0, 5),
        {"ph": "M", "name": "process_name"},
    ]
    summary = summarize(events, 2)
    assert summary["busy_share"] == pytest.approx(0.6)
    # 20 microseconds before the kernel; the copy follows 40 later.
    gaps = summary["gaps"]
    assert gaps["by_length"]["10 to 100 us"] == {"count": 1, "ms": pytest.approx(0.04)}
    assert gaps["longest"][0]["after"] == "gemm"
    # Waits outside the profiled function are those of the profiler.
    call = event("user_annotation", "measured call", 60, 40)
    assert summarize([*events, call], 2)["num_waits"] == 0
    assert summary["num_waits"] == 1 and summary["waits_per_microbatch"] == 0.5
    assert summary["top_kernels"][0] == {"name": "gemm", "count": 2, "ms": 0.06, "share": 60 / 70}


def test_the_models_of_the_matrix_have_the_shapes_of_the_presets() -> None:
    from benchmarks.gpu.sizes import FULL

    assert FULL.models["1b"].items() >= PRESETS["1b"][1].items()
    assert FULL.models["8b-shape"]["num_hidden_layers"] == 8
