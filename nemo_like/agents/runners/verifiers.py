"""Episodes of environments of the package `verifiers` (0.4, `verifiers.v1`).

    environment:
      kind: program
      path: nemo_like.agents.runners.verifiers.solve
      python: <interpreter with verifiers>
      options: {taskset: {id: my_taskset}}     # as the section `env` of verifiers

A row of the data has the data of its task in the column `task`; `tasks` returns such rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.utils.loaders import load_environment, load_taskset, resolve_env_config


def tasks(**env: Any) -> Iterator[dict[str, Any]]:
    """Yield rows with `prompt` and `task`; `env` is the section of the config."""
    for task in load_taskset(resolve_env_config(env).taskset):
        yield {"prompt": task.data.prompt_text, "task": task.data.model_dump(mode="json")}


async def solve(task: Any, **env: Any) -> dict[str, float]:
    """Run the environment on one task, and return its rewards times their weights, by name.

    Agents run on this machine unless `env` names another runtime for them. Raises ValueError for
    a row without task, and RuntimeError for a failed episode.
    """
    config = resolve_env_config(env)
    for seat in agent_config_fields(config).values():
        # The default is a sandbox of a service.
        if "runtime" not in seat.model_fields_set:
            seat.runtime = vf.SubprocessConfig()
    environment = load_environment(config)
    task_class = type(environment.taskset).task_type()
    if "task" not in task.row:
        raise ValueError("the row has no column 'task'; see nemo_like.agents.runners.verifiers")
    data = task_class.data_type().model_validate(task.row["task"])
    client = vf.EvalClientConfig(base_url=task.base_url, api_key_var="OPENAI_API_KEY")
    async with environment.serving():
        episode = await environment.run_episode(
            task_class(data, config.taskset.task), ModelContext(model="policy", client=client)
        )
    problems = [each.last_error for each in (episode, *episode.traces) if not each.ok]
    if problems or len(episode.traces) != 1:
        raise RuntimeError(f"{len(episode.traces)} runs of agents, with the errors {problems}")
    rewards = episode.traces[0].rewards
    return {name: reward.value for name, reward in rewards.items() if reward is not None}
