"""A taskset of `verifiers`: sums, each answered in one turn, and rewarded if it is right."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI

__all__ = ["ChatHarness", "Sums"]


class SumData(vf.TaskData):
    """A sum and its value."""

    answer: str


class SumTask(vf.Task[SumData]):
    """Add two numbers."""

    @vf.reward
    async def right(self, trace: Any) -> float:
        """Return 1 for the right answer."""
        last = trace.assistant_messages[-1].content or ""
        return float(last.endswith(f"#### {self.data.answer}"))


class SumsConfig(vf.TasksetConfig):
    """Options of the taskset."""

    id: str = "verifiers_sums"
    num_tasks: int = 4000
    seed: int = 0
    max_digits: int = 4


class Sums(vf.Taskset[SumTask, SumsConfig]):
    """Sums of two numbers."""

    def load(self) -> Iterator[SumTask]:
        """Yield the tasks."""
        rng = random.Random(self.config.seed)
        for index in range(self.config.num_tasks):
            left, right = (
                rng.randrange(10 ** rng.randint(1, self.config.max_digits)) for _ in "ab"
            )
            data = SumData(idx=index, prompt=f"{left}+{right}", answer=str(left + right))
            yield SumTask(data, self.config.task)


class ChatHarnessConfig(vf.HarnessConfig):
    """Options of the harness."""

    id: str = "verifiers_sums"


class ChatHarness(vf.Harness[ChatHarnessConfig]):
    """Calls the model once, in this process."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False
    APPENDS_SYSTEM_PROMPT = True

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        *args: Any,
        **kwargs: Any,
    ) -> vf.ProgramResult:
        """Send the prompt of the task to the model."""
        data = kwargs["data"] if "data" in kwargs else args[-1]
        _, prompt = self.resolve_prompt(data)
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            messages: list[Any] = [{"role": "user", "content": prompt}]
            await client.chat.completions.create(model=ctx.model, messages=messages)
        return vf.ProgramResult(0, "", "")
