"""What one value may be: bounds of numbers, the form of names and templates. How keys fit together
is `check`'s.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator
from functools import reduce

from nemo_like.config.durations import parse_duration
from nemo_like.config.errors import Problem
from nemo_like.config.keys import RUN_CONFIGS, type_at
from nemo_like.config.schema import RunConfig

_AT_LEAST_ONE = (
    "policy.train_global_batch_size",
    "policy.train_micro_batch_size",
    "policy.logprob_batch_size",
    "policy.logprob_chunk_size",
    "policy.sequence_packing.sequence_length_round",
    "policy.dynamic_batching.sequence_length_round",
    "policy.generation.max_new_tokens",
    "policy.generation.batch_size",
    "data.max_train_rows",
    "data.max_validation_rows",
    "sft.max_num_steps",
    "sft.max_num_epochs",
    "grpo.num_prompts_per_step",
    "grpo.max_num_steps",
    "reward.num_workers",
    "cluster.num_nodes",
    "cluster.workers_per_node",
    "parallel.tensor",
    "parallel.context",
    "parallel.pipeline",
    "parallel.expert",
    "checkpointing.keep_latest",
)
_AT_LEAST_ZERO = (
    "seed",
    "policy.max_grad_norm",
    "policy.max_skipped_steps",
    "policy.optimizer.weight_decay",
    "policy.scheduler.warmup_steps",
    "policy.generation.temperature",
    "policy.generation.min_p",
    "sft.val_period",
    "grpo.val_period",
    "grpo.val_temperature",
    "loss_fn.ratio_clip_min",
    "loss_fn.ratio_clip_max",
    "loss_fn.reference_policy_kl_penalty",
    "loss_fn.entropy_coefficient",
    "cluster.gpus_per_node",
    "cluster.generation_workers",
    "cluster.progress_timeout_s",
    "checkpointing.save_period",
    "data.num_encoding_workers",
    "data.encoding_timeout_s",
    "logger.num_samples_shown",
)
_ABOVE_ZERO = (
    "policy.optimizer.lr",
    "policy.optimizer.eps",
    "policy.generation.top_p",
    "grpo.advantage.eps",
    "cluster.cpus_per_worker",
    "cluster.placement_timeout_s",
    "cluster.collective_timeout_s",
)
_AT_MOST_ONE = (
    "policy.generation.top_p",
    "policy.generation.min_p",
    "policy.scheduler.min_ratio",
    "loss_fn.ratio_clip_min",
)
_SHARES_BELOW_ONE = ("policy.optimizer.beta1", "policy.optimizer.beta2")

_RUN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


def value_problems(config: RunConfig) -> Iterator[Problem]:
    """Every key whose value is out of its bounds or not of its form."""
    yield from _ranges(config)
    yield from _names(config)
    yield from _prompt_template(config)
    yield from _time_limit(config)


def select(config: RunConfig, key: str) -> object:
    """The value at a dotted key; None if this kind of config has no such key."""
    assert any(type_at(known, key) is not None for known in RUN_CONFIGS.values()), (
        f"{key} is not in the schema"
    )
    return None if type_at(type(config), key) is None else reduce(getattr, key.split("."), config)


def _ranges(config: RunConfig) -> Iterator[Problem]:
    for keys, holds, rule in (
        (_AT_LEAST_ONE, lambda value: value >= 1, "at least 1"),
        (_AT_LEAST_ZERO, lambda value: value >= 0, "0 or above"),
        (_ABOVE_ZERO, lambda value: value > 0, "above 0"),
        (_AT_MOST_ONE, lambda value: value <= 1, "at most 1"),
        (_SHARES_BELOW_ONE, lambda value: 0 <= value < 1, "in [0, 1)"),
        (
            ("policy.max_total_sequence_length",),
            lambda value: value >= 2,
            "at least 2: one token to read, one to predict",
        ),
        (
            ("policy.generation.top_k",),
            lambda value: value >= -1,
            "at least 1; null, 0 or -1 turns the filter off",
        ),
        (
            ("loss_fn.ratio_clip_c",),
            lambda value: value > 1,
            "above 1 (about 3), or null to turn the dual clip off",
        ),
        (("policy.scheduler.min_ratio",), lambda value: value >= 0, "0 or above"),
    ):
        for key in keys:
            value = select(config, key)
            if value is not None and not holds(value):
                yield Problem((key,), f"{key} is {value}; it must be {rule}")


def _names(config: RunConfig) -> Iterator[Problem]:
    if not _RUN_NAME.fullmatch(config.run_name):
        yield Problem(
            ("run_name",),
            f"run_name is {config.run_name!r}; as a directory it takes letters, digits, '_', '-'"
            f" and '.'",
        )
    for name, function in config.reward.functions.items():
        key = f"reward.functions.{name}.path"
        if not _IMPORT_PATH.fullmatch(function.path):
            yield Problem(
                (key,),
                f"{key} is {function.path!r}; write module.function, e.g."
                f" nemo_like.environments.math.answer_reward",
            )
    for key in ("policy.model_name", "data.train_path", "output_dir"):
        if not select(config, key):
            yield Problem((key,), f"{key} is empty")


def _time_limit(config: RunConfig) -> Iterator[Problem]:
    key, limit = "cluster.time_limit", config.cluster.time_limit
    if limit is None:
        return
    try:
        parse_duration(limit)
    except ValueError as error:
        yield Problem((key,), f"{key} is {limit!r}; {error}")


def _prompt_template(config: RunConfig) -> Iterator[Problem]:
    key, template = "data.prompt_template", config.data.prompt_template
    if template is None:
        return
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        yield Problem(
            (key,),
            f"{key} is no format string: {error}; write {{prompt}} for the text, and {{{{ }}}} for"
            f" braces",
        )
        return
    if set(names) != {"prompt"}:
        yield Problem(
            (key,),
            f"{key} is {template!r}; it must hold {{prompt}} and no other field ({{{{ }}}} are"
            f" literal braces)",
        )
