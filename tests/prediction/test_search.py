"""The search of `nemo-like plan --gpus`: what it recommends fits and is the fastest, and the
predicted seconds are those of the FLOPs.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_like.cli import main
from nemo_like.data.planning.spec import CostModel, PlanSpec
from nemo_like.data.planning.token_counts import TokenCounts
from nemo_like.models.spec import load_spec
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.prediction.duration import StepDuration
from nemo_like.prediction.lengths import COMPARED, PastRun, RowLengths
from nemo_like.prediction.placement import Placement
from nemo_like.prediction.plan_report import (
    MeasuredTime,
    PlanRequest,
    measured_time,
    plan_configured,
    seconds_per_step,
)
from nemo_like.prediction.search import Setting, all_settings, search

GIB = 2**30


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    """1,023 lognormal lengths, and a long one."""
    generator = random.Random(0)
    values = [int(generator.lognormvariate(6.8, 0.9)) + 1 for _ in range(1023)] + [32_128]
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(map(str, values)))
    return path


def plan(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main(["plan", "--json", "-", *map(str, arguments)]) == 0
    return json.loads(capsys.readouterr().out)


def keys_of(candidate: dict[str, Any]) -> dict[str, str]:
    return dict(text.split("=") for text in candidate["overrides"].split())


def peak_of_8b(keys: dict[str, str], num_tokens: int) -> float:
    """Bytes of Llama-3.1-8B under FSDP2 on 16 GPUs without tensor parallelism, from its sizes."""
    assert keys["policy.engine"] == "dtensor" and keys["parallel.tensor"] == "1"
    hidden, width, num_layers, vocabulary = 4096, 14336, 32, 128_256
    queries, keys_width = 32 * 128, 8 * 128
    layer = 2 * hidden * queries + 2 * hidden * keys_width + 3 * hidden * width + 2 * hidden
    num_params = num_layers * layer + 2 * vocabulary * hidden + hidden
    assert num_params == 8_030_261_248
    state = (4 + 4 + 8) * num_params / 16
    gathered = 2 * (vocabulary * hidden + 2 * layer)
    cp = int(keys["parallel.context"])
    tokens = num_tokens / cp
    # Compiled: the inputs of two norms as they are, and three results of the feed-forward block.
    key_shares = 1 if cp == 1 else cp + 0.5
    saved = 2 * (2 * hidden + 4) + 2 * 2 * hidden
    saved += 2 * (2 * queries + 2 * keys_width * key_shares) + 4 * 32 + 3 * 2 * width
    assert keys["policy.activation_checkpointing"] == "none"
    # A chunk of logits in float32 and bfloat16; the sum of the embedding's gradients beside one.
    logits = 4096 * vocabulary * 6 + 6 * vocabulary * hidden
    logits += tokens * (6 * hidden + 4 + 2 * 2 * hidden + 2 * hidden)
    return state + gathered + tokens * num_layers * saved + logits


def test_what_is_recommended_for_8b_on_two_nodes_fits_by_hand(lengths: Path, capsys) -> None:
    options = ("--lengths", lengths, "--gpus", 16, "--memory-gb", 80, "policy.model_name=8b")
    record = plan(capsys, *options)
    best, *others = record["search"]
    keys = keys_of(best)
    assert keys["cluster.num_nodes"] == "2" and keys["cluster.gpus_per_node"] == "8"
    budget = int(keys["policy.sequence_packing.train_mb_tokens"])
    assert budget >= record["rows"]["max"] and budget % 256 == 0
    peak = peak_of_8b(keys, budget)
    assert best["peak_gib"] * GIB == pytest.approx(peak, rel=1e-6)
    # 2 GiB of a context and 10 % of the rest are left free.
    assert peak <= 0.9 * 78 * GIB < peak_of_8b(keys, budget + 256)
    # No alternative is faster, and the ones that do not fit need more than the GPU has.
    assert all(each["seconds"] is None or each["seconds"] >= best["seconds"] for each in others)
    plain = [each for each in others if each["seconds"] is None]
    assert plain and all(each["peak_gib"] > 0.9 * 78 for each in plain)
    # The line can be pasted: the same config is planned, with the same time.
    pasted = plan(capsys, *options[:2], "policy.model_name=8b", *best["overrides"].split())
    assert pasted["seconds_per_step"] == pytest.approx(record["seconds_per_step"])
    assert pasted["setting"]["max_tokens"] == budget
    assert record["seconds_per_step"] == pytest.approx(best["seconds"], rel=0.05)


def test_keys_that_are_set_are_kept(lengths: Path, tmp_path: Path, capsys) -> None:
    options = ("--lengths", lengths, "--gpus", 8, "--memory-gb", 80, "policy.model_name=1b")
    given = ("parallel.tensor=2", "policy.activation_checkpointing=full")
    for each in plan(capsys, *options, *given)["search"]:
        assert set(given) <= set(each["overrides"].split())
        # Megatron has a pipeline, FSDP2 has none.
        keys = keys_of(each)
        assert (keys["parallel.pipeline"] == "1") == (keys["policy.engine"] == "dtensor")
    page = tmp_path / "plan.html"
    assert main(["plan", *map(str, options), "--html", str(page)]) == 0
    assert "parallel.tensor=1 " in page.read_text().split("Recommended settings")[1]
    shown = capsys.readouterr().out
    assert "recommended: cluster.num_nodes=1 cluster.gpus_per_node=8" in shown
    assert "H100" in shown and "tokens/s" in shown and "GPU hours" in shown
    assert max(map(len, shown.splitlines())) <= 100


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--gpus", "16"), ("--memory-gb",)),
        (("--gpus", "12", "--memory-gb", "80"), ("--gpus 12", "multiple of 8")),
        (("--gpus", "8", "--memory-gb", "8", "policy.model_name=70b"), ("nothing fits", "8 GPUs")),
        (
            ("--gpus", "8", "--memory-gb", "80", "policy.sequence_packing.enabled=false"),
            ("policy.sequence_packing.enabled",),
        ),
    ],
)
def test_wrong_input_is_one_message(
    arguments: tuple[str, ...], words: tuple[str, ...], lengths: Path, capsys
) -> None:
    assert main(["plan", "--lengths", str(lengths), *arguments]) == 2
    text = capsys.readouterr().err
    assert all(word in text for word in words) and "Traceback" not in text


MODEL = load_spec("8b", "policy.model_name")


def request_of(setting: Setting, rows: RowLengths, num_gpus: int = 8) -> PlanRequest:
    layout = ParallelLayout.from_world_size(
        num_gpus, tp=setting.tensor, cp=setting.context, pp=setting.pipeline
    )
    spec = PlanSpec(
        max_tokens=8192,
        num_ranks=layout.dp,
        cp_size=layout.cp,
        tp_size=layout.tp,
        global_batch_size=32,
        cost=CostModel.from_spec(MODEL),
        sync="microbatch",
    )
    placement = Placement(
        parallel_layout=layout, activation_checkpointing=setting.checkpointing, is_compiled=True
    )
    return PlanRequest(
        rows=rows,
        spec=spec,
        max_tokens=8192,
        model=MODEL,
        placement=placement,
        num_gpus=num_gpus,
        memory_gib=80,
    )


@pytest.mark.parametrize("seed", range(3))
def test_settings_that_are_not_planned_are_no_faster(seed: int, monkeypatch) -> None:
    rng = np.random.default_rng(seed)
    values = rng.lognormal(6.0, 1.0, 64).astype(np.int64).clip(1, 6000)
    rows = RowLengths(TokenCounts(values), "a test", is_ordered=True)
    settings = [
        each
        for each in all_settings(8, has_experts=False, fixed={"parallel.pipeline": 1})
        if each.expert == 1
    ]
    found = search(settings, lambda setting: request_of(setting, rows))
    # Every setting planned in full.
    seconds = {
        each.setting: seconds_per_step(each.request, plan_configured(each.request))
        for each in found
        if each.fits
    }
    least = min(seconds.values())
    near = [each for each in found if seconds.get(each.setting, np.inf) <= 1.02 * least]
    best = found[0]
    assert not best.is_bound and best.seconds == seconds[best.setting]
    # Of equal sizes and times the one with less memory.
    ranks = [(np.prod(each.setting[1:]), seconds[each.setting], each.peak_gib) for each in near]
    assert near[ranks.index(min(ranks))] is best
    for each in found:
        if each.is_bound:
            assert 1.02 * least <= each.seconds <= seconds[each.setting] * (1 + 1e-9)
    assert len(seconds) > 8 and any(each.is_bound for each in found)


def test_of_nearly_equal_times_the_smaller_layout_is_recommended() -> None:
    rows = RowLengths(TokenCounts(np.array([100] * 32)), "a test", is_ordered=True)
    # By (tensor, context), without checkpointing; all others take 2 s.
    seconds = {(1, 4): 1.0, (2, 2): 1.005, (1, 2): 1.019, (2, 1): 1.017, (1, 1): 1.021}

    def scaled(setting: Setting) -> PlanRequest:
        """A request whose predicted time is the one above."""
        request = request_of(setting, rows)
        _, tensor, context, _, _ = setting
        is_plain = setting.checkpointing == "none"
        wanted = seconds.get((tensor, context), 2.0) if is_plain else 2.0
        scale = wanted / seconds_per_step(request, plan_configured(request))
        return replace(request, measured=MeasuredTime(scale=scale, num_steps=1))

    settings = all_settings(8, has_experts=False, fixed={"parallel.pipeline": 1})
    found = search(settings, scaled)
    assert found[0].setting == Setting("none", 2, 1, 1, 1)
    assert [each.seconds for each in found[1:4]] == pytest.approx([1.0, 1.005, 1.019])
    seconds[1, 1] = 1.0199
    assert search(settings, scaled)[0].setting == Setting("none", 1, 1, 1, 1)


def test_a_step_takes_the_flops_of_its_rows() -> None:
    length = 4096
    rows = RowLengths(TokenCounts(np.array([length] * 32)), "a test", is_ordered=True)
    request = request_of(Setting("none", 1, 1, 1, 1), rows, num_gpus=1)
    seconds = seconds_per_step(request, plan_configured(request))
    # Forward and backward: three times 2 FLOPs per parameter but the input embedding, and per
    # layer 2 x 2 x 4096 x half of the positions for attention.
    products = 2 * (8_030_261_248 - 128_256 * 4096) * length
    attention = 32 * 4 * 4096 * length * length / 2
    flops = 3 * 32 * (products + attention)
    # 49.9 % of 989 TFLOP/s were measured with this width.
    assert seconds == pytest.approx(flops / (0.499 * 989e12), rel=5e-3)
    recomputed = replace(
        request, placement=replace(request.placement, activation_checkpointing="full")
    )
    again = seconds_per_step(recomputed, plan_configured(recomputed))
    assert again == pytest.approx(seconds * 4 / 3)


def test_collectives_of_a_token_by_hand() -> None:
    layout = ParallelLayout(dp=2, tp=2, cp=2)
    place = Placement(parallel_layout=layout, is_compiled=True)
    duration = StepDuration(MODEL, place)
    # Per layer, forward and backward: two all-reduces of half of the token's hidden states, each
    # 2 (tp - 1) / tp of the bytes; and half of its keys and values, half of the heads.
    num_bytes = 2 * 32 * 2 * (2 * 2 * (1 / 2) * 4096 / 2 + 2 * 8 * 128 / 2 * (1 / 2))
    products = 3 * 2 * (8_030_261_248 - 128_256 * 4096) / 4
    mfu = 0.499
    share = (num_bytes / 300e9) / (products / (mfu * 989e12))
    assert duration.token_share == pytest.approx(share, rel=5e-3)


def test_a_run_is_planned_by_its_directory(tmp_path: Path, capsys, monkeypatch) -> None:
    run = tmp_path / "runs" / "old"
    (run / "plan").mkdir(parents=True)
    line = {"step": 1, **TokenCounts(np.array([10, 20])).to_dict()}
    (run / "plan" / "lengths.jsonl").write_text(json.dumps(line))
    default = Path(__file__).parents[2] / "nemo_like" / "commands" / "plan.yaml"
    (run / "config.yaml").write_text(default.read_text())
    (run / "metrics.jsonl").write_text("")
    record = plan(capsys, run, "policy.model_name=1b", "policy.train_global_batch_size=2")
    assert record["rows"]["num_tokens"] == 30 and "the run" in record["rows"]["source"]
    # Its config is also found by its directory.
    (tmp_path / "lengths.txt").write_text("7\n")
    keys = ("policy.model_name=1b", "--lengths", tmp_path / "lengths.txt")
    assert plan(capsys, "--config", run, *keys)["rows"]["num_tokens"] == 7


def flops_of_8b(length: int) -> float:
    """Forward FLOPs of a row of Llama-3.1-8B: its products, and half of the attention scores."""
    return 2 * (8_030_261_248 - 128_256 * 4096) * length + 32 * 4 * 4096 * length**2 / 2


def past_run(tmp_path: Path, *changes: tuple[str, str]) -> Path:
    """A run of 8B on one GPU with three steps of 32 rows of 4,096 tokens; the first one is slow."""
    run = tmp_path / "run"
    (run / "plan").mkdir(parents=True)
    counts = TokenCounts(np.array([4096] * 32)).to_dict()
    compared = {"packing/padding_share": 0.0, "packing/utilization": 1.0}
    compared |= {"packing/num_microbatches": 16.0, "packing/rank_imbalance_flops": 1.0}
    steps = [(1, 99.0), (2, 21.0), (3, 20.0)]
    texts = [json.dumps({"step": step, **counts}) for step, _ in steps]
    (run / "plan" / "lengths.jsonl").write_text("\n".join(texts))
    texts = [json.dumps({"step": step, "timing/train_s": s} | compared) for step, s in steps]
    (run / "metrics.jsonl").write_text("\n".join(texts))
    default = Path(__file__).parents[2] / "nemo_like" / "commands" / "plan.yaml"
    config = default.read_text()
    sizes = [("model_name: 7b", "model_name: 8b"), ("batch_size: 512", "batch_size: 32")]
    for old, new in (*sizes, *changes):
        assert old in config
        config = config.replace(old, new)
    (run / "config.yaml").write_text(config)
    return run


def test_the_time_of_a_past_run_replaces_the_assumed_rates(tmp_path: Path, capsys) -> None:
    run = past_run(tmp_path)
    # The median of its steps; the rate of the GPU is neither needed nor assumed.
    assert plan(capsys, run)["seconds_per_step"] == pytest.approx(21.0)
    short = tmp_path / "short.txt"
    short.write_text("1024\n" * 64)
    record = plan(capsys, run, "--lengths", short)
    seconds = 21.0 * flops_of_8b(1024) / flops_of_8b(4096)
    assert record["seconds_per_step"] == pytest.approx(seconds, rel=1e-5)
    assert record["rows"]["num_rows"] == 64
    # Full recomputation is a fourth forward pass.
    recomputed = plan(capsys, run, "policy.activation_checkpointing=full")
    assert recomputed["seconds_per_step"] == pytest.approx(21.0 * 4 / 3)
    assert main(["plan", str(run)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    mfu = 3 * 32 * flops_of_8b(4096) / 21.0 / 989e12
    assert f"3 steps of the past run ({mfu:.0%} of 989 TFLOP/s)" in shown
    assert "1 GPU: 21 s per step, 6,242 tokens/s" in shown and "assumed" not in shown


def test_the_search_uses_the_time_of_a_past_run(tmp_path: Path, capsys) -> None:
    run = past_run(tmp_path)
    record = plan(capsys, run, "--gpus", 1, "--memory-gb", 500)
    best = record["search"][0]
    assert "activation_checkpointing=none" in best["overrides"]
    assert best["seconds"] == pytest.approx(21.0)


def test_the_time_of_a_cpu_is_not_used_for_gpus(tmp_path: Path, capsys) -> None:
    run = past_run(tmp_path, ("gpus_per_node: 1", "gpus_per_node: 0"))
    assert plan(capsys, run)["seconds_per_step"] == pytest.approx(21.0)
    assert main(["plan", str(run)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "as in the past run: 21 s per step, 6,242 tokens/s; these rows take 0.0175 hours" in shown
    )
    record = plan(capsys, run, "cluster.gpus_per_node=1")
    assert record["seconds_per_step"] < 21.0
    assert any("the time of the past run is not used" in each for each in record["notes"])


def test_passes_over_the_rows_of_a_step_are_counted() -> None:
    rows = RowLengths(TokenCounts(np.array([4096] * 32)), "a test", is_ordered=True)
    request = request_of(Setting("none", 1, 1, 1, 1), rows, num_gpus=1)
    logged = dict.fromkeys(COMPARED, 1.0) | {"timing/train_s": 30.0}
    past = PastRun(Path("run"), {1: rows.counts}, {1: logged})
    times = [measured_time(request, past, num_epochs) for num_epochs in (1, 3)]
    assert times[0] is not None and times[1] is not None
    assert times[0].scale == pytest.approx(3 * times[1].scale)
    assert measured_time(request, replace(past, metrics={}), 1) is None
