"""An environment in which the model writes a program, sees how its tests end, and tries again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nemo_like.environments.code import CodeScore, check_code, code_sandbox, extract_code, row_tests
from nemo_like.environments.environment import Conversation, State, StepResult
from nemo_like.environments.sandbox.sandbox import Requirement

_NO_CODE = "Write the complete program in one block that begins with ```python and ends with ```."


class CodeTests:
    """Runs the code of each turn with the tests of the row and answers with the problem.

    The conversation ends when all tests pass. Its reward is the largest share of the tests that a
    turn passed, or with `partial` False 1 for all of them. Tests and sandbox are as in
    `nemo_like.environments.code.code_reward`.
    """

    def __init__(
        self,
        time_limit_s: float = 10.0,
        memory_mb: int = 512,
        require: Requirement = "isolated",
        python_path: Sequence[str] = (),
        partial: bool = True,
        max_output_chars: int = 2000,
    ) -> None:
        """`max_output_chars` limits the output of the program that the model sees.

        Raises ValueError for a limit below 1, and SandboxError if this machine does not permit the
        isolation that `require` names.
        """
        if max_output_chars < 1:
            raise ValueError(f"max_output_chars is {max_output_chars}; it must be at least 1")
        self._sandbox = code_sandbox(time_limit_s, memory_mb, require, tuple(python_path))
        self._partial = partial
        self._max_output_chars = max_output_chars

    def reset(self, row: Mapping[str, Any]) -> State:
        """Return the best share of passed tests so far, 0. Raises ValueError without tests."""
        row_tests(row, row.get("answer"))
        return {"best": 0.0}

    async def step(self, conversation: Conversation) -> StepResult:
        """Test the code of the last turn."""
        code = extract_code(conversation.completion)
        if code is None:
            return StepResult(observation=_NO_CODE, reward={"tests": 0.0})
        tests = row_tests(conversation.row, conversation.row.get("answer"))
        score = await check_code(code, tests, self._sandbox)
        is_passed = score.share == 1.0
        best = float(conversation.state["best"])
        value = score.share if self._partial else float(is_passed)
        return StepResult(
            observation=None if is_passed else self._describe(score),
            # The rewards of the turns are summed.
            reward={"tests": max(0.0, value - best)},
            done=is_passed,
            state={"best": max(best, value)},
            metrics={"programs": 1.0, "programs_over_limit": float(score.is_over_limit)},
        )

    def _describe(self, score: CodeScore) -> str:
        text = f"{score.num_passed} of {score.num_tests} tests passed. {score.problem}"
        output = score.output.strip()
        if output:
            # The end, which has the traceback.
            text += f"\nOutput of the program:\n{output[-self._max_output_chars :]}"
        return text
