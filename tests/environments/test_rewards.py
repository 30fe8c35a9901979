"""Reward functions named in the YAML: found, called, weighted; and what is said when one cannot
be.
"""

from __future__ import annotations

import math
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_like.algorithms.grpo.advantage_config import AdvantageConfig
from nemo_like.algorithms.grpo.advantages import group_advantages
from nemo_like.algorithms.grpo.rollouts import rows_with_spread
from nemo_like.config.errors import ConfigError
from nemo_like.config.rollout import RewardConfig, RewardFunctionConfig
from nemo_like.data.jagged import Jagged
from nemo_like.demo.task import build_tokenizer
from nemo_like.distributed.local_group import LocalGroup, local_context
from nemo_like.distributed.worker_group import Handle
from nemo_like.environments.reward import RewardError, RewardSample
from nemo_like.environments.reward_calls import load_reward_functions
from nemo_like.environments.reward_worker import RewardEnvironment, RewardWorker
from nemo_like.metrics import metric_values
from nemo_like.rollout.rows import reward_metrics

_CONTEXT = local_context(num_threads=1)
_SOURCE = """
def length(sample): return len(sample.completion)
def answered(sample): return sample.answer is not None
def divides(sample): return 1 / len(sample.completion)
def not_a_number(sample): return float("nan")
def infinite(sample): return float("inf")
def nothing(sample): return None
def from_row(sample): return sample.row["weight"]
def text(sample): return "1.0"
def several(sample): return [1.0, 2.0]
def flag(sample): return True
def tensor(sample): return torch.tensor(0.5)
def leaves(sample): sys.exit(3)
def forks(sample): return float(os.waitpid(os.fork() or os._exit(7), 0)[1] >> 8)
async def waits(sample):
    running.append(sample)
    seen.append(len(running))
    await asyncio.sleep(0.01)
    running.remove(sample)
    return len(sample.completion)
async def waits_for_nothing(sample): pass
async def leaves_while_waiting(sample):
    await asyncio.sleep(0)
    sys.exit(5)
def hands_over(sample): return waits(sample)
import asyncio, os, sys, torch
running, seen = [], []
constant = 3
"""


@pytest.fixture(autouse=True)
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "user_rewards.py").write_text(_SOURCE)
    (tmp_path / "broken_rewards.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("user_rewards", "broken_rewards"):
        sys.modules.pop(name, None)


def _functions(**paths: str) -> dict[str, RewardFunctionConfig]:
    return {name: RewardFunctionConfig(path=path) for name, path in paths.items()}


def _sample(completion: str, answer: str | None = None, **row: object) -> RewardSample:
    return RewardSample(prompt="2+2=?", completion=completion, answer=answer, row=row)


def _score(
    environment: RewardEnvironment, samples: Sequence[RewardSample]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Submit the samples in two parts; rewards and values of the functions in their order."""
    middle = len(samples) // 2
    environment.submit(range(middle), samples[:middle])
    environment.submit(range(middle, len(samples)), samples[middle:])
    return _collected(environment, len(samples))


def _collected(
    environment: RewardEnvironment, num_samples: int
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Rewards and values of the functions of samples with the keys 0, 1, ..."""
    rewards = np.full(num_samples, np.nan)
    components: dict[str, np.ndarray] = {}
    num_scored = 0
    while num_scored < num_samples:
        for scored in environment.collect(timeout_s=1.0):
            rewards[scored.keys] = scored.rewards
            for name, values in scored.components.items():
                components.setdefault(name, np.zeros(num_samples))[scored.keys] = values
            num_scored += len(scored.keys)
    assert environment.collect(timeout_s=0.0) == []
    return rewards, components


def test_every_function_scores_every_sample() -> None:
    worker = RewardWorker(
        _CONTEXT,
        functions=_functions(
            length="user_rewards.length",
            answered="user_rewards.answered",
            row="user_rewards.from_row",
        ),
    )
    scores = worker.score([_sample("abc", "4", weight=0.5), _sample("", weight=-2)]).components
    assert scores["length"].dtype == np.float64
    assert {name: values.tolist() for name, values in scores.items()} == {
        "length": [3, 0],
        "answered": [1, 0],
        "row": [0.5, -2],
    }


def test_the_workers_decode_completions_that_are_token_ids() -> None:
    functions = _functions(length="user_rewards.length", answered="user_rewards.answered")
    environment = RewardEnvironment(
        LocalGroup(RewardWorker, {"functions": functions}, _CONTEXT),
        RewardConfig(functions=functions),
    )
    tokenizer = build_tokenizer()
    environment.set_tokenizer(tokenizer)
    texts = ["#### 4", "12+7", ""]
    token_ids = []
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        token_ids.append(np.array([*ids, tokenizer.eos_token_id], np.int32))
    environment.submit([0, 1, 2], [_sample("", "4") for _ in texts], token_ids)
    found, components = _collected(environment, 3)
    expected, expected_components = _score(environment, [_sample(text, "4") for text in texts])
    assert found.tolist() == expected.tolist()
    for name, values in expected_components.items():
        assert components[name].tolist() == values.tolist()
    assert components["length"].tolist() == [len(text) for text in texts]


def test_no_samples_give_no_scores() -> None:
    assert RewardWorker(_CONTEXT, functions=_functions(length="user_rewards.length")).score(
        []
    ).components["length"].shape == (0,)


def test_the_reward_is_the_weighted_sum() -> None:
    functions = {
        "length": RewardFunctionConfig(path="user_rewards.length", weight=0.5),
        "answered": RewardFunctionConfig(path="user_rewards.answered", weight=-1.0),
    }
    environment = RewardEnvironment(
        LocalGroup(RewardWorker, {"functions": functions}, _CONTEXT),
        RewardConfig(functions=functions),
    )
    reward, components = _score(environment, [_sample("abcd", "4"), _sample("ab")])
    assert reward.dtype == np.float64 and reward.tolist() == [1.0, 1.0]
    assert components["length"].tolist() == [4, 2] and components["answered"].tolist() == [1, 0]
    environment.shutdown()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("length", r"is 'length'; write module\.function"),
        ("no_such_module.length", "importing 'no_such_module' failed with ModuleNotFoundError"),
        ("broken_rewards.length", "a_module_that_is_not_there"),
        ("user_rewards.lenght", r"has no 'lenght'; it has answered, divides, .*length"),
        ("user_rewards.constant", "a int that cannot be called"),
    ],
)
def test_a_function_that_cannot_be_had_is_named_with_its_key(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_reward_functions(_functions(bonus=path))
    assert "reward.functions.bonus.path" in str(caught.value)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("divides", "raised ZeroDivisionError: division by zero"),
        ("not_a_number", "returned nan, which is not a finite number"),
        ("infinite", "returned inf, which is not a finite number"),
        ("nothing", "returned None, which is not a finite number"),
        ("text", "returned '1.0', which is not a finite number"),
        ("several", r"returned \[1.0, 2.0\] \(2 values\), which is not a finite number"),
        ("leaves", r"called sys.exit\(3\), which would end the run"),
        ("waits_for_nothing", "returned None, which is not a finite number"),
        ("leaves_while_waiting", r"called sys.exit\(5\), which would end the run"),
        ("from_row", "raised KeyError: 'weight'"),
    ],
)
def test_a_failing_function_shows_the_sample(function: str, message: str) -> None:
    worker = RewardWorker(_CONTEXT, functions=_functions(bonus=f"user_rewards.{function}"))
    with pytest.raises(RewardError, match=message) as caught:
        worker.score([RewardSample(prompt="2+2=?", completion="", answer="4")])
    text = str(caught.value)
    assert f"reward.functions.bonus (user_rewards.{function})" in text
    assert "prompt: '2+2=?'" in text and "completion: ''" in text and "answer: '4'" in text
    assert str(pickle.loads(pickle.dumps(caught.value))) == text


_TRL_SOURCE = """
seen = []

def plain(completions, **kwargs):
    seen.append(kwargs | {"completions": completions})
    return [float(len(completion)) for completion in completions]

async def correct(prompts, completions, solution, scale=1, **kwargs):
    texts = [completion[0]["content"] for completion in completions]
    return [scale * (text == wanted) if wanted else None for text, wanted in zip(texts, solution)]

def by_length(completions, completion_ids):
    return [len(each) for each in completion_ids]

def unknown_column(completions, ground_truth):
    return [0.0 for completion in completions]
"""


def test_functions_with_the_signature_of_trl_get_lists_and_columns(tmp_path: Path) -> None:
    (tmp_path / "trl_rewards.py").write_text(_TRL_SOURCE)
    sys.modules.pop("trl_rewards", None)
    paths = {name: f"trl_rewards.{name}" for name in ("plain", "correct", "by_length")}
    functions = _functions(plain=paths["plain"], by_length=paths["by_length"])
    ids = np.array([5, 6, 7], dtype=np.int32)
    samples = [
        RewardSample(
            prompt="2+2=?",
            completion=text,
            row={"prompt": "2+2=?", "completion": "4", "answer": "4"},
            completion_ids=ids[:number],
        )
        for number, text in enumerate(("4", "five"))
    ]
    scored = RewardWorker(_CONTEXT, functions=functions).score(samples)
    assert scored.components["plain"].tolist() == [1.0, 4.0]
    assert scored.components["by_length"].tolist() == [0.0, 1.0]
    assert sys.modules["trl_rewards"].seen == [
        {
            "prompts": ["2+2=?", "2+2=?"],
            "completions": ["4", "five"],
            "completion_ids": [[], [5]],
            "answer": ["4", "4"],
        }
    ]
    # Conversations are lists of messages, and an option is passed as it is.
    chat = [{"role": "user", "content": "2+2=?"}]
    rows = [{"prompt": chat, "solution": "4"}, {"prompt": chat, "solution": None}]
    samples = [RewardSample(prompt="2+2=?", completion="4", row=row) for row in rows]
    config = RewardFunctionConfig(path=paths["correct"], options={"scale": 3})
    worker = RewardWorker(_CONTEXT, functions={"correct": config, **functions}, timeout_s=5.0)
    values = worker.score(samples).components["correct"]
    worker.close()
    assert values[0] == 3.0 and np.isnan(values[1])
    worker = RewardWorker(_CONTEXT, functions=_functions(a="trl_rewards.unknown_column"))
    missing = "TypeError: the parameter 'ground_truth' is not a column of the rows"
    with pytest.raises(RewardError, match=missing):
        worker.score(samples)


def test_a_wrong_signature_names_the_file_of_the_user_and_the_right_one(tmp_path: Path) -> None:
    path = tmp_path / "wrong_rewards.py"
    path.write_text(
        "\ndef score(prompt, completion):\n    return 1.0\n"
        "\ndef length(completions_):\n    return [len(each) for each in completions_]\n"
    )
    sys.modules.pop("wrong_rewards", None)
    with pytest.raises(ConfigError) as caught:
        load_reward_functions(_functions(mine="wrong_rewards.score"))
    assert str(caught.value) == (
        "reward.functions.mine.path is wrong_rewards.score, but wrong_rewards.score(prompt,"
        f" completion) ({path}:2) cannot be called with a sample: missing a required argument:"
        " 'completion'; write def score(sample), which reads sample.prompt, sample.completion and"
        " sample.answer, or def score(completions, **kwargs) as in TRL"
    )
    worker = RewardWorker(_CONTEXT, functions=_functions(mine="wrong_rewards.length"))
    with pytest.raises(RewardError) as raised:
        worker.score([_sample("4")])
    assert (
        f"raised TypeError: 'RewardSample' object is not iterable ({path}:6: return [len(each) for"
        " each in completions_]); the function gets one RewardSample, and a list of them only with"
        " the attribute batched = True"
    ) in str(raised.value)


def test_a_long_sample_is_shown_in_part() -> None:
    worker = RewardWorker(_CONTEXT, functions=_functions(bonus="user_rewards.from_row"))
    with pytest.raises(RewardError, match=r"\(9,002 characters\)") as caught:
        worker.score([_sample("x" * 9000)])
    assert len(str(caught.value)) < 2000


def test_no_functions_is_an_error_that_names_the_key() -> None:
    with pytest.raises(ConfigError, match=r"reward\.functions is empty"):
        RewardEnvironment(LocalGroup(RewardWorker, {"functions": {}}, _CONTEXT), RewardConfig())


class _InProcessGroup:
    """Several reward workers in this process, with the calls `RewardEnvironment` makes."""

    def __init__(self, workers: Sequence[RewardWorker]) -> None:
        self.world_size = len(workers)
        self.workers = workers

    def submit_one(self, rank: int, method: str, *args: Any) -> Handle:
        return Handle(getattr(self.workers[rank], method)(*args), None, rank, method)

    def wait_any(self, handles: Sequence[Handle], timeout_s: float) -> list[Handle]:
        return list(handles)

    def is_done(self, handles: Sequence[Handle]) -> bool:
        return True

    def get(self, handles: Sequence[Handle]) -> list[Any]:
        return [handle.value for handle in handles]


@pytest.mark.parametrize("num_samples", [1, 2, 7])
def test_samples_keep_their_order_over_workers(num_samples: int) -> None:
    functions = _functions(length="user_rewards.length")
    group = _InProcessGroup([RewardWorker(_CONTEXT, functions=functions) for _ in range(3)])
    environment = RewardEnvironment(group, RewardConfig(functions=functions))  # type: ignore[arg-type]
    reward, components = _score(environment, [_sample("x" * row) for row in range(num_samples)])
    assert reward.tolist() == components["length"].tolist() == list(range(num_samples))


def test_async_functions_score_samples_concurrently_and_in_order() -> None:
    functions = _functions(slow="user_rewards.waits", same="user_rewards.hands_over")
    worker = RewardWorker(_CONTEXT, functions=functions)
    samples = [_sample("x" * length) for length in range(100)]
    scores = worker.score(samples).components
    assert scores["slow"].tolist() == scores["same"].tolist() == list(range(100))
    assert max(sys.modules["user_rewards"].seen) == 32


def test_numbers_of_other_libraries_count_and_a_forked_process_may_exit() -> None:
    names = ("flag", "tensor", "forks")
    worker = RewardWorker(_CONTEXT, functions=_functions(**{n: f"user_rewards.{n}" for n in names}))
    scores = worker.score([_sample("a")]).components
    assert {name: values.tolist() for name, values in scores.items()} == {
        "flag": [1.0],
        "tensor": [0.5],
        "forks": [7.0],
    }


def test_a_failure_names_the_key_and_the_path_of_the_function() -> None:
    worker = RewardWorker(_CONTEXT, functions=_functions(mine="user_rewards.leaves"))
    with pytest.raises(RewardError, match=r"^reward.functions.mine \(user_rewards.leaves\) called"):
        worker.score([_sample("a")])


_KEPT = """
import asyncio, os
slots = asyncio.Semaphore(1)
async def judge(sample):
    async with slots:
        await asyncio.sleep(0.001)
        return float(sample.completion)
def hands_over(sample): return judge(sample)
class Judge:
    running = 0
    async def __call__(self, sample):
        self.running += 1
        await asyncio.sleep(0.05)
        return self.running
judge_object = Judge()
def part(sample, *, name): return sample.row[name]
def pops(sample): return sample.row.pop("weight") + sample.row["list"].pop()
def applies(sample): return None if sample.completion == "other" else 0.25
def never(sample): return None
def rank(samples):
    assert len({sample.group for sample in samples}) == 1
    texts = [sample.completion for sample in samples]
    return [100 * len(texts) + sorted(texts).index(text) for text in texts]
def is_cut(sample): return sample.finish_reason == "length"
def num_ids(sample): return len(sample.completion_ids)
def ends(sample): return sample.completion.count("<")
def sees(sample): return len(sample.completion)
"""


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kept_rewards.py").write_text(_KEPT)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("kept_rewards", None)


def _worker(timeout_s: float | None = None, **functions: RewardFunctionConfig) -> RewardWorker:
    return RewardWorker(_CONTEXT, functions=functions, timeout_s=timeout_s)


def _kept(name: str, **keys: Any) -> RewardFunctionConfig:
    return RewardFunctionConfig(path=f"kept_rewards.{name}", **keys)


@pytest.mark.parametrize("timeout_s", [None, 20.0])
@pytest.mark.parametrize("function", ["judge", "hands_over"])
def test_a_semaphore_of_the_module_serves_every_batch(
    kept: None, function: str, timeout_s: float | None
) -> None:
    """A semaphore belongs to the event loop in which a call first waited for it."""
    worker = _worker(timeout_s, mine=_kept(function))
    for first in (0, 5):
        texts = [str(number) for number in range(first, first + 5)]
        scored = worker.score([_sample(text) for text in texts])
        assert scored.rewards.tolist() == list(map(float, texts))
    worker.close()


def test_an_object_with_an_async_call_is_called_concurrently(kept: None) -> None:
    """Every call sees that all calls have started."""
    worker = _worker(mine=_kept("judge_object"))
    assert worker.score([_sample("a")] * 4).rewards.tolist() == [4.0] * 4


def test_equal_sums_of_other_components_have_no_advantage(kept: None) -> None:
    """0.3 + 0.6 and 0.9 + 0 differ by 1e-16 in float64 and by 6e-8 in float32."""
    worker = _worker(
        first=_kept("part", options={"name": "first"}),
        second=_kept("part", options={"name": "second"}),
    )
    tenths = [(a, b) for a in range(1, 60) for b in range(1, 40)]
    samples = []
    for a, b in tenths:
        samples += [_sample("", first=a / 10, second=b / 10)]
        samples += [_sample("", first=(a + b) / 10, second=0.0)]
    rewards = worker.score(samples).rewards
    groups = np.repeat(np.arange(len(tenths)), 2)
    assert not group_advantages(rewards, groups, AdvantageConfig()).any()
    assert not rows_with_spread(rewards, groups, np.ones(len(groups), dtype=bool)).any()


def test_large_rewards_keep_their_differences(kept: None) -> None:
    worker = _worker(ns=_kept("part", options={"name": "ns"}, weight=2.0))
    rewards = worker.score([_sample("", ns=10**9 + k) for k in range(20)]).rewards
    assert rewards.tolist() == [2.0 * (10**9 + k) for k in range(20)]
    deviations = [2.0 * (k - 9.5) for k in range(20)]
    std = math.sqrt(sum(value**2 for value in deviations) / 19)
    found = group_advantages(rewards, np.zeros(20, dtype=int), AdvantageConfig())
    np.testing.assert_allclose(found, [value / std for value in deviations], rtol=1e-5)


@pytest.mark.parametrize("timeout_s", [None, 20.0])
def test_a_function_gets_a_separate_copy_of_the_row(kept: None, timeout_s: float | None) -> None:
    row = {"weight": 2, "list": [1, 3]}
    samples = [RewardSample(prompt="", completion="", row=row) for _ in range(3)]
    worker = _worker(timeout_s, one=_kept("pops"), two=_kept("pops"))
    assert worker.score(samples).rewards.tolist() == [10.0] * 3
    assert row == {"weight": 2, "list": [1, 3]}
    worker.close()


def test_none_is_no_value_and_no_failure(kept: None) -> None:
    worker = _worker(mine=_kept("applies", weight=4.0), length=_kept("sees"))
    scored = worker.score([_sample("other"), _sample("ab")])
    assert scored.rewards.tolist() == [5.0, 3.0] and scored.problems == [None, None]
    assert math.isnan(scored.components["mine"][0]) and scored.components["mine"][1] == 0.25
    metrics = reward_metrics(scored.rewards, np.zeros(2, dtype=int), scored.components)
    assert metric_values(metrics)["reward/mine_mean"] == 0.25
    with pytest.raises(RewardError, match=r"returned None, .* and no other function applies"):
        _worker(mine=_kept("never"), other=_kept("applies")).score([_sample("other")])


@pytest.mark.parametrize("timeout_s", [None, 20.0])
def test_a_grouped_function_gets_the_completions_of_one_prompt(
    kept: None, timeout_s: float | None
) -> None:
    worker = _worker(timeout_s, rank=_kept("rank", grouped=True))
    texts = [("b", 7), ("a", 7), ("d", 3), ("c", 7), ("e", 3)]
    samples = [RewardSample(prompt="p", completion=text, group=group) for text, group in texts]
    assert worker.score(samples).rewards.tolist() == [301, 300, 200, 302, 201]
    worker.close()


@pytest.mark.parametrize("sizes", [[4], [2, 2, 2], [3, 1, 5]])
def test_the_samples_of_a_group_stay_on_one_worker(kept: None, sizes: list[int]) -> None:
    functions = {"rank": _kept("rank", grouped=True)}
    group = _InProcessGroup([RewardWorker(_CONTEXT, functions=functions) for _ in range(3)])
    environment = RewardEnvironment(group, RewardConfig(functions=functions))  # type: ignore[arg-type]
    samples = []
    expected = []
    for number, size in enumerate(sizes):
        texts = [chr(97 + index) for index in range(size)]
        samples += [RewardSample(prompt="p", completion=text, group=number) for text in texts]
        expected += [100 * size + index for index in range(size)]
    environment.submit(range(len(samples)), samples)
    rewards, _ = _collected(environment, len(samples))
    assert rewards.tolist() == expected


def test_a_function_sees_token_ids_finish_reason_and_special_tokens(kept: None) -> None:
    worker = _worker(
        cut=_kept("is_cut"),
        ids=_kept("num_ids"),
        plain=_kept("ends"),
        special=_kept("ends", keep_special_tokens=True),
    )
    tokenizer = build_tokenizer()
    worker.set_tokenizer(tokenizer)
    ids = [*tokenizer("12+7", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    rows = Jagged.from_rows([np.array(ids, np.int32), np.array(ids[:-1], np.int32)], np.int32)
    samples = [
        RewardSample(prompt="", completion=""),
        RewardSample(prompt="", completion="", finish_reason="length"),
    ]
    components = worker.score(samples, [0, 1], rows).components
    assert {name: values.tolist() for name, values in components.items()} == {
        "cut": [0, 1],
        "ids": [len(ids), len(ids) - 1],
        "plain": [0, 0],
        "special": [1, 0],
    }
