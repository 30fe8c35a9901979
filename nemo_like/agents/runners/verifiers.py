"""Episodes of environments of the package verifiers, release 0.4, with its interface v1.

    environment:
      kind: program
      path: nemo_like.agents.runners.verifiers.solve
      python: <interpreter with verifiers>
      options: {taskset: {id: my_taskset}}     # as the section `env` of verifiers

The column `task` of a row has the data of its task: `task.data.model_dump(mode="json")` of a task
of the taskset.
"""

from __future__ import annotations

from typing import Any

import openai.resources.chat  # noqa: F401 (else each episode imports it)
import verifiers.v1 as vf
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.utils.loaders import load_environment, resolve_env_config


async def solve(task: Any, **env: Any) -> dict[str, float]:
    """Run the environment on one task, and return its rewards times their weights, by name.

    Agents run on this machine unless `env` names another runtime for them. Raises ValueError for
    a row without task, and RuntimeError for a failed episode.
    """
    environment = _environment(**env)
    task_class = type(environment.taskset).task_type()
    if "task" not in task.row:
        raise ValueError("the row has no column 'task' with the data of a task")
    data = task_class.data_type().model_validate(task.row["task"])
    client = vf.EvalClientConfig(base_url=task.base_url, api_key_var="OPENAI_API_KEY")
    async with environment.serving():
        run_task = task_class(data, environment.taskset.config.task)
        episode = await environment.run_episode(run_task, ModelContext("policy", client))
    problems = [each.last_error for each in (episode, *episode.traces) if not each.ok]
    if problems or len(episode.traces) != 1:
        raise RuntimeError(f"{len(episode.traces)} runs of agents, with the errors {problems}")
    rewards = episode.traces[0].rewards
    return {name: reward.value for name, reward in rewards.items() if reward is not None}


def _environment(**env: Any) -> Any:
    """Return the environment of a section `env`, with agents that run on this machine."""
    config = resolve_env_config(env)
    for seat in agent_config_fields(config).values():
        # The default is a sandbox of a service.
        if "runtime" not in seat.model_fields_set:
            seat.runtime = vf.SubprocessConfig()
    return load_environment(config)


# It imports the taskset, which takes many times longer than an episode.
solve.prepare = _environment
