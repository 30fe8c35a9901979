"""`nemo-like generate`: sample completions of the prompts of the validation files of a config.

`nemo-like eval` and `nemo-like chat` take their config from here.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from nemo_like.algorithms.grpo.config import GrpoRunConfig
from nemo_like.algorithms.registry import load_any_config
from nemo_like.algorithms.sft.config import SftRunConfig
from nemo_like.commands.answers import Answers, Record, prompt_record
from nemo_like.config.build import to_dict
from nemo_like.config.errors import ConfigError, shown_path
from nemo_like.config.optimization import EmaConfig, LoraConfig, OptimizerConfig
from nemo_like.config.paths import resolve_paths
from nemo_like.config.rollout import RewardConfig
from nemo_like.config.schema import ParallelConfig, RunConfig
from nemo_like.config.text import counted
from nemo_like.rollout.answers import Answer
from nemo_like.training.model_files import open_model_config, open_model_spec
from nemo_like.training.run_data import PromptSet
from nemo_like.training.steps import AnswerSampling

_DEFAULTS = Path(__file__).with_name("answers.yaml")
_WITH_GPU = ("cluster.gpus_per_node=1", "policy.precision=bfloat16")
"""Keys of the default config on a machine with a GPU."""
_SETTINGS = (
    "model_name",
    "tokenizer_name",
    "chat_template",
    "precision",
    "max_total_sequence_length",
    "oversize_rows",
    "generation",
)
"""Keys of `policy` that determine the answers."""
_NO_INFLUENCE = ("hf", "vllm", "check_weights", "max_restarts", "progress_timeout_s")
"""Keys of `policy.generation` that change the answers by rounding only."""


@dataclass(frozen=True, kw_only=True)
class AnswerRunConfig(RunConfig):
    """Config of a command that only samples answers; keys of training have no effect."""

    sampling: AnswerSampling = field(default_factory=AnswerSampling)
    """As the validation of the job samples them."""

    kind: ClassVar[str] = "answers"

    @property
    def generates(self) -> bool:
        return True


def run(arguments: argparse.Namespace) -> int:
    """Sample and write the completions; return the exit code. Raises ConfigError."""
    if arguments.num_samples < 1:
        raise ConfigError(f"--num-samples is {arguments.num_samples}; it must be at least 1")
    # Completions are not scored; an environment has its own rewards.
    config = replace(answer_config(arguments), reward=RewardConfig())
    answers = Answers(config, num_samples=arguments.num_samples)
    settings = described_settings(config) | {"num_samples": arguments.num_samples}

    def make_record(prompts: PromptSet, index: int, sampled: Sequence[Answer]) -> Record:
        record = prompt_record(prompts, index, sampled)
        if arguments.token_ids:
            record["token_ids"] = [answer.token_ids.tolist() for answer in sampled]
        return record

    with answers.opened(arguments.out, settings, resume=arguments.resume) as file:
        answers.sample(file, make_record)
    if arguments.out is None:
        for key in answers.keys:
            # JSON escapes control characters, so that a completion cannot control the terminal.
            print(json.dumps(file.records[key]))
    num_completions = counted(len(answers.keys) * arguments.num_samples, "completion")
    place = "" if arguments.out is None else f" in {shown_path(arguments.out)}"
    answers.progress.print_line(
        f"{num_completions} of {counted(len(answers.keys), 'prompt')}{place}"
    )
    return 0


def answer_config(arguments: argparse.Namespace) -> AnswerRunConfig:
    """Return the config of `--config` with the overrides, with absolute paths.

    A run directory stands for its config with the model that the run exported. Raises ConfigError.
    """
    source: Path | None = arguments.config
    overrides = list(arguments.overrides)
    if source is None:
        device = _WITH_GPU if torch.cuda.is_available() else ()
        # `grpo.val_*` are keys of the evaluation; only GRPO refuses to sample greedily.
        kind = GrpoRunConfig.kind if arguments.command == "eval" else SftRunConfig.kind
        base = load_any_config(_DEFAULTS, [*device, *overrides], arguments.kind or kind)
    elif source.is_dir():
        base = load_any_config(source / "config.yaml", overrides, arguments.kind)
        if not any(text.lstrip("+").startswith("policy.model_name=") for text in overrides):
            model = _exported_model(source)
            base = replace(base, policy=replace(base.policy, model_name=model))
    else:
        base = load_any_config(source, overrides, arguments.kind)
    return _without_training(base)


def _exported_model(run: Path) -> str:
    if not (run / "hf" / "config.json").is_file():
        raise ConfigError(
            f"{shown_path(run)} has no exported model in hf/; write one with `nemo-like export"
            f" {run} --out DIR` and set policy.model_name=DIR"
        )
    return str(run / "hf")


def _without_training(base: RunConfig) -> AnswerRunConfig:
    """Return the keys that matter for answers; those of training have their defaults."""
    policy = replace(
        base.policy,
        engine="dtensor",
        optimizer=OptimizerConfig(),
        # The exported model contains its adapters.
        lora=LoraConfig(),
        ema=EmaConfig(),
        freeze=(),
    )
    # Reward models score when all answers are sampled, in this process.
    models = {name: replace(model, num_workers=0) for name, model in base.reward.models.items()}
    sampling = AnswerSampling()
    if isinstance(base, GrpoRunConfig):
        sampling = AnswerSampling(
            temperature=base.grpo.val_temperature,
            num_samples=base.grpo.val_num_samples,
            pass_reward=base.grpo.val_pass_reward,
        )
    config = resolve_paths(
        AnswerRunConfig(
            run_name=base.run_name,
            seed=base.seed,
            policy=policy,
            data=base.data,
            cluster=base.cluster,
            parallel=ParallelConfig(),
            reward=replace(base.reward, models=models),
            environment=base.environment,
            sampling=sampling,
        )
    )
    limit = open_model_spec(config).max_positions
    if limit is not None:
        config = _with_max_length(config, limit)
    open_model_config(config)
    return config


def _with_max_length(config: AnswerRunConfig, limit: int) -> AnswerRunConfig:
    """Return the config with rows of at most `limit` tokens, at most half of them sampled."""
    policy = config.policy
    if policy.max_total_sequence_length <= limit:
        return config
    max_new_tokens = min(policy.generation.max_new_tokens, max(limit // 2, 1))
    generation = replace(policy.generation, max_new_tokens=max_new_tokens)
    policy = replace(policy, max_total_sequence_length=limit, generation=generation)
    return replace(config, policy=policy)


def with_temperature(config: AnswerRunConfig, temperature: float) -> AnswerRunConfig:
    """Return the config with another temperature of sampling."""
    generation = replace(config.policy.generation, temperature=temperature)
    return replace(config, policy=replace(config.policy, generation=generation))


def described_settings(config: AnswerRunConfig) -> dict[str, Any]:
    """Return the settings that determine the answers, as JSON values."""
    policy = to_dict(config.policy)
    settings = {name: policy[name] for name in _SETTINGS}
    for name in _NO_INFLUENCE:
        del settings["generation"][name]
    return settings | {
        "seed": config.seed,
        "system_prompt": config.data.system_prompt,
        "prompt_template": config.data.prompt_template,
        "environment": to_dict(config.environment),
        "weights": weight_files(config.policy.model_name),
    }


def weight_files(directory: str) -> dict[str, list[int]]:
    """Return size and time of change of the weight files of a local model, by name."""
    files = {}
    for path in sorted(Path(directory).glob("*.safetensors")):
        status = path.stat()
        files[path.name] = [status.st_size, status.st_mtime_ns]
    return files
