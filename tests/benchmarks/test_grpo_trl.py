"""The benchmark against TRL: inputs, records and summaries. TRL itself is in another environment,
so that only the runs of this package are started here.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from benchmarks.grpo_trl import check_equal, main, summarize
from benchmarks.grpo_trl_reward import score
from benchmarks.grpo_trl_runs import (
    PHASES,
    Task,
    read_prompts,
    read_steps,
    run,
    trl_request,
    write_endless_model,
    write_prompts,
)
from nemo_like.data.chat import ChatEncoder
from nemo_like.demo.task import build_demo


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    build_demo(folder, 0)
    return folder


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("3 + 4 = 7\n#### 7", "7", 1.0),
        ("#### 1,234.0 of 5", "1234", 1.0),
        ("the answer is 8, not 7", "7", 1.0),
        ("the answer is 7, not 8", "7", 0.0),
        ("7\n#### ", "7", 0.0),
        ("no number", "7", 0.0),
    ],
)
def test_the_reward_compares_the_marked_or_the_last_number(
    completion: str, answer: str, expected: float
):
    assert score(completion, answer) == expected


def test_prompts_are_drawn_without_repeats_and_equally_for_a_seed(tmp_path: Path):
    data = tmp_path / "data.jsonl"
    rows = [{"question": f"{i} + 0?", "answer": f"so\n#### {i}"} for i in range(9)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = read_prompts(data, "Solve {prompt}")
    assert read[3] == {"prompt": "Solve 3 + 0?", "answer": "3"}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_prompts(read, tmp_path / name, 9, seed)
    texts = [(tmp_path / name).read_text() for name in "abc"]
    assert texts[0] == texts[1] != texts[2]
    assert sorted(texts[0].splitlines()) == sorted(json.dumps(row) for row in read)
    with pytest.raises(ValueError, match="count is 10 prompts"):
        write_prompts(read, tmp_path / "d", 10, 0)


def test_the_endless_model_has_the_same_prompts_and_another_end(demo: Path, tmp_path: Path):
    model = demo / "model"
    write_endless_model(model, tmp_path / "endless", "<unk>")
    before = ChatEncoder(AutoTokenizer.from_pretrained(model))
    after = ChatEncoder(AutoTokenizer.from_pretrained(tmp_path / "endless"))
    messages = [{"role": "user", "content": "12+34"}]
    assert after.encode_prompt(messages).tolist() == before.encode_prompt(messages).tolist()
    unknown = before.tokenizer.convert_tokens_to_ids("<unk>")
    assert after.end_token_ids == (unknown,)
    assert before.end_token_ids != after.end_token_ids
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "endless" / name).read_text())["eos_token_id"] == unknown
    with pytest.raises(ValueError, match="end_token is '<none>'"):
        write_endless_model(model, tmp_path / "none", "<none>")


@pytest.mark.exhaustive
def test_a_run_without_ray_gives_one_record_per_step(demo: Path, tmp_path: Path):
    prompts = tmp_path / "prompts.jsonl"
    write_prompts(read_prompts(demo / "grpo_train.jsonl", "{prompt}"), prompts, 4, 0)
    task = _task(demo / "model")
    steps = run(
        "hf-local",
        task,
        prompts,
        tmp_path / "run",
        num_steps=2,
        seed=0,
        trl_python="",
        timeout_s=120,
    )
    assert [step.number for step in steps] == [1, 2]
    assert math.isnan(steps[0].seconds)
    assert 0 < math.fsum(steps[1].phases.values()) <= steps[1].seconds
    assert all(1 <= step.mean_length <= task.max_new_tokens for step in steps)
    summary = summarize("hf-local", steps[1:])
    assert math.fsum(summary.phases.values()) == pytest.approx(summary.seconds)
    assert summary.tokens_per_s == pytest.approx(steps[1].num_tokens / steps[1].seconds)


@pytest.mark.exhaustive
@pytest.mark.exhaustive
def test_a_failed_run_shows_the_end_of_its_log(demo: Path, tmp_path: Path):
    with pytest.raises(RuntimeError, match=r"trl ended with code 1(.|\n)*No such file"):
        run(
            "trl",
            _task(demo / "model"),
            tmp_path / "prompts.jsonl",
            tmp_path / "run",
            num_steps=1,
            seed=0,
            # An environment without TRL.
            trl_python=sys.executable,
            timeout_s=120,
        )


def test_records_of_trl_are_divided_into_phases():
    record = {
        "num_tokens": 40,
        "num_rows": 4,
        "num_at_limit": 1,
        "longest": 16,
        "reward_mean": 0.5,
        "rollout_s": 3.0,
        "generation_s": 2.5,
        "weight_sync_s": 0.5,
    }
    records = [record | {"step": 1, "unix_time_s": 10.0}, record | {"step": 2, "unix_time_s": 15.0}]
    _, step = read_steps(records, 4)
    assert step.seconds == 5.0
    assert step.phases == {"generation": 2.0, "logprobs": 0.0, "train": 2.0, "weight_sync": 0.5}
    assert (step.mean_length, step.at_limit_share, step.reward) == (10.0, 0.25, 0.5)
    assert tuple(step.phases) == PHASES
    assert summarize("trl", [step]).phases["other"] == pytest.approx(0.5)
    check_equal("trl", [step], 10)
    with pytest.raises(RuntimeError, match=r"step 2 of trl has completions of 10\.0 tokens"):
        check_equal("trl", [step], 16)


def test_the_request_of_trl_is_plain_values(demo: Path, tmp_path: Path):
    request = trl_request(
        "trl", _task(demo / "model"), tmp_path / "p", tmp_path, num_steps=2, seed=1
    )
    assert json.loads(json.dumps(request)) == request
    assert request["max_total_length"] == 40


def test_unknown_variants_are_refused(demo: Path):
    arguments = ["--trl-python", "x", "--model", str(demo / "model"), "--data", "x"]
    with pytest.raises(SystemExit, match="'verl' is not one of trl"):
        main([*arguments, "--variants", "trl,verl"])


def _task(model: Path) -> Task:
    return Task(
        model=model,
        num_prompts=2,
        num_generations=2,
        max_new_tokens=8,
        max_prompt_tokens=32,
        lr=1e-4,
        ratio_clip_max=0.2,
        train_mb_tokens=256,
        rows_per_microbatch=4,
    )
