"""Calls of reward functions, which are code of the user: one by one, concurrently or in batches.

A failure of a function becomes a `BadReward`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache, partial
from inspect import isawaitable, iscoroutinefunction, signature, unwrap
from math import nan
from typing import Any, Literal, TypeVar, cast

from nemo_like.config.errors import ConfigError, shown_value
from nemo_like.config.import_path import import_function, user_error_text
from nemo_like.config.rollout import RewardFunctionConfig
from nemo_like.environments.reward import BadRewardKind, RewardFunction, RewardSample, finite_number

ResultT = TypeVar("ResultT")


MAX_CONCURRENT = 32
"""Maximum number of concurrent calls of an async function."""


@dataclass(frozen=True, slots=True)
class BadReward:
    """Why a reward function has no reward for a sample."""

    kind: BadRewardKind
    text: str
    """Example: `returned None, which is not a finite number`."""


TIMED_OUT = BadReward("timeout", "exceeded its time limit")
"""Result of a call that exceeded its limit, which the worker names."""

Score = float | BadReward
"""NaN for a function that does not apply to the sample."""


def score_each(
    function: RewardFunction,
    samples: Sequence[RewardSample],
    *,
    timeout_s: float | None = None,
    max_concurrent: int = MAX_CONCURRENT,
    report: Callable[[int, Score], None] | None = None,
) -> dict[int, Score]:
    """Return the score of each sample by its index.

    Failures are exceptions of the function, calls of sys.exit, and a value that is not one finite
    number; True and False are 1 and 0. An async function is called for several samples
    concurrently, and a call is cancelled after `timeout_s`; other functions cannot be interrupted
    here. A batched function is called once with all samples. `report` is called for each sample
    when its score is known; an exception of it ends the scoring.
    """
    scores: dict[int, Score] = {}

    def add(index: int, score: Score) -> None:
        scores[index] = score
        if report is not None:
            report(index, score)

    kind = function_kind(function)
    if kind == "async":
        _run(_score_concurrently(function, samples, timeout_s, max_concurrent, add))
    elif kind == "sync":
        for index, sample in enumerate(samples):
            add(index, _guarded(_reward, function, sample, timeout_s))
    elif samples:
        values = _guarded(_batch_rewards, function, samples, timeout_s)
        if isinstance(values, BadReward):
            values = [values] * len(samples)
        for index, score in enumerate(values):
            add(index, score)
    return scores


def function_kind(function: RewardFunction) -> Literal["sync", "async", "batched"]:
    """Return how a function is called: per sample, concurrently, or once with many samples."""
    # A function with options is a partial of the user's.
    if any(getattr(each, "batched", False) for each in (function, getattr(function, "func", None))):
        return "batched"
    called = getattr(function, "func", function)
    # Also an object with an async `__call__`.
    is_async = iscoroutinefunction(called) or iscoroutinefunction(type(called).__call__)
    return "async" if is_async else "sync"


async def _score_concurrently(
    function: Callable[[RewardSample], Any],
    samples: Sequence[RewardSample],
    timeout_s: float | None,
    max_concurrent: int,
    add: Callable[[int, Score], None],
) -> None:
    slots = asyncio.Semaphore(max_concurrent)

    async def score(index: int, sample: RewardSample) -> None:
        async with slots:
            try:
                result = _checked(await _awaited(function(sample), timeout_s))
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                task = asyncio.current_task()
                if isinstance(error, asyncio.CancelledError) and task and task.cancelling():
                    # The scoring has ended.
                    raise
                result = _failure(error)
        add(index, result)

    tasks = [asyncio.ensure_future(score(index, sample)) for index, sample in enumerate(samples)]
    try:
        await asyncio.gather(*tasks)
    finally:
        # The others if one raises.
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _reward(function: RewardFunction, sample: RewardSample, timeout_s: float | None) -> Score:
    return _checked(_called(function, sample, timeout_s))


def _batch_rewards(
    function: RewardFunction, samples: Sequence[RewardSample], timeout_s: float | None
) -> list[Score] | BadReward:
    """Call a batched function; return the score of each sample, or the failure of all."""
    values = _called(function, list(samples), timeout_s)
    if getattr(values, "ndim", None) == 0:
        values = [values]
    elif hasattr(values, "tolist"):
        # A NumPy array or a torch tensor.
        values = values.tolist()
    if isinstance(values, Mapping | Set):
        text = f"returned a {type(values).__name__}, which is not a list of numbers"
        return BadReward("value", text)
    if isinstance(values, str | bytes) or not hasattr(values, "__iter__"):
        values = [values]
    values = list(values)
    if len(values) != len(samples):
        text = f"returned {len(values)} values for a batch of {len(samples)} samples"
        return BadReward("value", text)
    return [_guarded(_checked, value) for value in values]


def _called(function: RewardFunction, argument: Any, timeout_s: float | None) -> Any:
    value = function(argument)
    # Also a plain function may return a coroutine.
    return _run(_awaited(value, timeout_s)) if isawaitable(value) else value


@cache
def _runner() -> asyncio.Runner:
    """Return the event loop of this process.

    Clients and semaphores that a module keeps belong to the loop that first used them, so all calls
    run in one.
    """
    return asyncio.Runner()


def _run(call: Coroutine[Any, Any, ResultT]) -> ResultT:
    return _runner().run(call)


async def _awaited(value: Awaitable[Any], timeout_s: float | None) -> Any:
    """Await a result. Raises _TimedOut after `timeout_s`, but not for its own TimeoutError."""
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            return await value
    except TimeoutError as error:
        if limit.expired():
            raise _TimedOut from error
        raise


def _guarded(call: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a call returns, or a BadReward for its exception, but not for Ctrl-C."""
    try:
        return call(*arguments)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 (code of the user raises anything)
        return _failure(error)


def _failure(error: BaseException) -> BadReward:
    """Return the failure of a call that raised `error`."""
    if isinstance(error, _TimedOut):
        return TIMED_OUT
    if isinstance(error, SystemExit):
        return BadReward("ended", f"called sys.exit({error.code!r}), which would end the run")
    text = f"raised {user_error_text(error)}"
    if isinstance(error, TypeError) and "'RewardSample'" in str(error):
        text += (
            "; the function gets one RewardSample, and a list of them only with the attribute"
            " batched = True"
        )
    return BadReward("raised", text)


def _checked(value: Any) -> Score:
    """Return a reward as float, or the failure of a value that is not one finite number.

    None means that the function does not apply, which is NaN.
    """
    number = nan if value is None else finite_number(value)
    if number is not None:
        return number
    count = f" ({len(value)} values)" if isinstance(value, list | tuple) else ""
    text = f"returned {shown_value(value, 200)}{count}, which is not a finite number"
    return BadReward("value", text)


class _TimedOut(Exception):
    """An async call exceeded the timeout."""


def load_reward_functions(
    functions: Mapping[str, RewardFunctionConfig],
) -> dict[str, RewardFunction]:
    """Import every function of `reward.functions`.

    Raises ConfigError, with the key, for a path that cannot be imported or called, and for options
    that the function does not have.
    """
    return {name: _import_reward(name, function) for name, function in functions.items()}


def _import_reward(name: str, config: RewardFunctionConfig) -> RewardFunction:
    """Import a reward function. Raises ConfigError that begins with its key."""
    example = "nemo_like.environments.math.answer_reward"
    key = f"reward.functions.{name}.path"
    imported = import_function(key, config.path, example, "RewardSample")
    is_trl = _check_signature(name, imported, config)
    function = partial(imported, **config.options)
    if is_trl:
        function = partial(_trl_rewards, imported, config.options)
    if is_trl or config.grouped:
        # Called once with many samples.
        setattr(function, "batched", True)  # noqa: B010 (a partial declares no attributes)
    return cast(RewardFunction, function)


def _check_signature(name: str, function: Callable[..., Any], config: RewardFunctionConfig) -> bool:
    """Return True for a function with the signature of TRL, which has a parameter `completions`.

    Raises ConfigError, with file and line of the function, if it cannot be called with a sample and
    its options.
    """
    try:
        parameters = signature(function)
    except (TypeError, ValueError):
        # Functions of C extensions may have none; the first call shows a mistake.
        return False
    if "completions" in parameters.parameters:
        return True
    try:
        parameters.bind("sample", **config.options)
    except TypeError as error:
        key = f"reward.functions.{name}"
        cause = f"{key}.path is {config.path}"
        if config.options:
            cause = f"{key}.options is {config.options}"
        code = getattr(unwrap(function), "__code__", None)
        place = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
        taken = "a sample and these" if config.options else "a sample"
        raise ConfigError(
            f"{cause}, but {config.path}{parameters}{place} cannot be called with {taken}: {error};"
            " write def score(sample), which reads sample.prompt, sample.completion and"
            " sample.answer, or def score(completions, **kwargs) as in TRL"
        ) from error
    return False


def _trl_rewards(
    function: Callable[..., Any], options: Mapping[str, Any], samples: Sequence[RewardSample]
) -> Any:
    """Call a function with the arguments that TRL passes: lists with an entry per completion.

    They are `prompts`, `completions`, `completion_ids` and the columns of the rows, as far as the
    function has parameters for them. The completions of a row whose prompt is a list of messages
    are lists of one message.
    """
    completions: list[Any] = []
    for sample in samples:
        is_chat = isinstance(sample.row.get("prompt"), list)
        message = {"role": "assistant", "content": sample.completion}
        completions.append([message] if is_chat else sample.completion)
    columns = [name for name in samples[0].row if name not in ("prompt", "completion")]
    arguments: dict[str, Any] = {
        **{name: [sample.row.get(name) for sample in samples] for name in columns},
        "prompts": [sample.row.get("prompt", sample.prompt) for sample in samples],
        "completions": completions,
        "completion_ids": [sample.completion_ids.tolist() for sample in samples],
        **options,
    }
    parameters = signature(function).parameters.values()
    for each in parameters:
        is_required = each.kind is not each.VAR_KEYWORD and each.default is each.empty
        if is_required and each.name not in arguments:
            raise TypeError(f"the parameter {each.name!r} is not a column of the rows")
    if not any(each.kind is each.VAR_KEYWORD for each in parameters):
        names = [each.name for each in parameters if each.name in arguments]
        arguments = {name: arguments[name] for name in names}
    return function(**arguments)
