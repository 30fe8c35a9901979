"""Reward functions named in the YAML: found, called, weighted; and what is said when one cannot
be.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_like.config.errors import ConfigError
from nemo_like.config.rollout import RewardConfig, RewardFunctionConfig
from nemo_like.demo.task import build_tokenizer
from nemo_like.distributed.local_group import LocalGroup, local_context
from nemo_like.distributed.worker_group import Handle
from nemo_like.environments.reward import RewardError, RewardSample
from nemo_like.environments.reward_worker import (
    RewardEnvironment,
    RewardWorker,
    load_reward_functions,
)

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
    rewards = np.full(num_samples, np.nan, dtype=np.float32)
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
    assert scores["length"].dtype == np.float32
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
    assert reward.dtype == np.float32 and reward.tolist() == [1.0, 1.0]
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
