"""Relations between keys that can be checked without data, and the batch arithmetic in words.

Unknown keys are checked in `config.load`, types and single values in `build`, files, models
and rows of data in `commands.validate`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import reduce

from nemo_like.config.check_sections import (
    adapter_problems,
    compilation_problems,
    data_problems,
    memory_problems,
    optimization_problems,
    reward_model_problems,
)
from nemo_like.config.errors import Problem, counted, plural, quotient
from nemo_like.config.keys import type_at
from nemo_like.config.needs import RunNeeds
from nemo_like.config.parallel import (
    is_colocated,
    num_generation_workers,
    num_policy_workers,
    policy_layout,
    run_layout_problems,
    workers_shown,
)
from nemo_like.config.rollout import RewardConfig, environment_problems
from nemo_like.config.schema import (
    ClusterConfig,
    DynamicBatchingConfig,
    PolicyConfig,
    RunConfig,
    SequencePackingConfig,
)
from nemo_like.integer_math import ceil_div, nearest_multiples
from nemo_like.parallel_layout import PaddingMultiples, ParallelLayout

Budgets = SequencePackingConfig | DynamicBatchingConfig

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_AT_START = "it is read when a process starts; set it where `ray start` or the run is started"
_THREADS = "cluster.cpus_per_worker sets the number of threads"
_VARIABLES_SET_ELSEWHERE = {
    "LD_LIBRARY_PATH": _AT_START,
    "LD_PRELOAD": _AT_START,
    "PYTHONPATH": _AT_START,
    "PYTHONHASHSEED": _AT_START,
    "CUDA_VISIBLE_DEVICES": "Ray assigns a GPU to each worker; see cluster.gpus_per_node",
    "OMP_NUM_THREADS": _THREADS,
    "MKL_NUM_THREADS": _THREADS,
}
"""Environment variables that a worker cannot set, with the reason."""


def find_problems(config: RunConfig) -> list[Problem]:
    """Return every problem of `config` that does not depend on data, or an empty list."""
    policy, cluster, needs = config.policy, config.cluster, config.needs
    problems = [
        *_batching_modes(policy),
        *memory_problems(policy, is_fixed=needs.batch.is_fixed),
        *_shared_prefix(policy, needs),
        *_router_replay(policy, needs),
        *compilation_problems(policy),
        *adapter_problems(policy, needs),
        *_timeouts(config.reward, cluster),
        *_cluster(cluster),
        *_environment(cluster),
        *environment_problems(
            config.environment,
            generates=needs.rollouts is not None,
            has_reward_models=bool(config.reward.models),
        ),
        *optimization_problems(policy),
        *data_problems(config.data, needs),
        *_validation(config),
        *_selection(config),
    ]
    if problems:
        # The arithmetic below would divide by numbers that were just refused.
        return problems
    problems += run_layout_problems(config.parallel, cluster, policy)
    if problems:
        return problems
    layout = policy_layout(config.parallel, cluster)
    problems += [*_worker_shares(policy, cluster, needs, layout), *_budgets(policy, needs, layout)]
    if needs.rollouts is not None:
        problems += [*_sampling(policy), *_generation_layout(policy, cluster, needs)]
        problems += reward_model_problems(needs.rollouts.rewards, cluster)
    return [*problems, *config.job_problems()]


def batching_section(policy: PolicyConfig) -> tuple[str, Budgets] | None:
    """Return (name, section) of the enabled mode with a token budget; None if none is enabled."""
    if policy.sequence_packing.enabled:
        return "policy.sequence_packing", policy.sequence_packing
    if policy.dynamic_batching.enabled:
        return "policy.dynamic_batching", policy.dynamic_batching
    return None


def padding_multiples(layout: ParallelLayout, section: Budgets) -> PaddingMultiples:
    """Return the multiples to which a run with this token budget pads rows and microbatches."""
    rounding = section.sequence_length_round
    if not isinstance(section, SequencePackingConfig):
        return layout.padding_multiples("padded", sequence_length_round=rounding)
    return layout.padding_multiples(
        "packed",
        sequence_length_round=rounding,
        microbatch_length_round=section.microbatch_length_round,
    )


def derivation(
    policy: PolicyConfig, cluster: ClusterConfig, needs: RunNeeds, layout: ParallelLayout
) -> str:
    """Return the arithmetic from the rows of a step to optimizer steps and microbatches.

    One line each, counted in rows. Example: `8 prompts x 4 generations = 32 rows per step`.
    """
    policy = policy.in_rows(needs.batch.rows_per_example)
    batch = policy.train_global_batch_size
    workers = num_policy_workers(cluster)
    replicas = layout.dp
    lines = list(needs.batch.lines)
    if not needs.batch.is_fixed:
        # The number of rows of a step varies: only the budget of a microbatch is known.
        lines = [f"{workers} {plural(workers, 'worker')}, {layout}"]
        return "\n".join([*lines, *_microbatch_lines(policy, needs, layout, 0)])
    if replicas == workers:
        lines.append(
            f"{counted(batch, 'row')} / {counted(workers, 'worker')} ="
            f" {quotient(batch / workers)} {plural(batch // workers, 'row')} each"
        )
    else:
        size = layout.replica_size
        ranks = f"{replicas} data-parallel {plural(replicas, 'rank')}"
        lines.append(f"{workers} workers / {size} per model replica = {ranks}")
        share = f"{quotient(batch / replicas)} {plural(batch // replicas, 'row')} each"
        lines.append(f"{counted(batch, 'row')} / {ranks} = {share}")
    lines += _microbatch_lines(policy, needs, layout, ceil_div(batch, replicas))
    return "\n".join(lines)


def _microbatch_lines(
    policy: PolicyConfig, needs: RunNeeds, layout: ParallelLayout, rows: int
) -> Iterator[str]:
    """Yield a line about the microbatches of one rank's `rows`, for training and log-probs."""
    mode = batching_section(policy)
    passes = ["training"]
    if needs.logprob_pass:
        passes.append("log-probs")
    for name in passes:
        is_training = name == "training"
        if mode is None:
            size = policy.train_micro_batch_size if is_training else policy.logprob_batch_size
            microbatches = counted(ceil_div(rows, size), "microbatch", "microbatches")
            share = f"{counted(size, 'row')} per microbatch"
            yield f"{name}: {counted(rows, 'row')} / {share} = {microbatches}"
            continue
        section_name, section = mode
        verb = "packed" if section_name.endswith("packing") else "padded together"
        budget = section.train_mb_tokens if is_training else section.logprob_mb_tokens
        max_length = policy.max_total_sequence_length
        multiples = padding_multiples(layout, section)
        num_fitting = budget // multiples.tokens_of_row(max_length)
        yield (
            f"{name}: {verb} in microbatches of at most {budget} tokens, which fit"
            f" {num_fitting or 'less than one'} of the longest rows ({max_length} tokens) and more"
            " of shorter ones"
        )


def _batching_modes(policy: PolicyConfig) -> Iterator[Problem]:
    if policy.sequence_packing.enabled and policy.dynamic_batching.enabled:
        yield Problem(
            ("policy.dynamic_batching.enabled", "policy.sequence_packing.enabled"),
            "policy.sequence_packing.enabled and policy.dynamic_batching.enabled are both true, but"
            " exclude each other: set one of them to false (packing is the faster one)",
        )
    packing = policy.sequence_packing
    if packing.enabled and packing.algorithm == "balanced" and packing.balance == "none":
        yield Problem(
            ("policy.sequence_packing.balance", "policy.sequence_packing.algorithm"),
            "policy.sequence_packing.balance is none, but policy.sequence_packing.algorithm"
            " balanced assigns rows to ranks by work: set balance to flops or tokens, or algorithm"
            " to a bin packer such as best_fit_decreasing",
        )
    if policy.oversize_rows == "singleton" and batching_section(policy) is None:
        yield Problem(
            ("policy.oversize_rows",),
            "policy.oversize_rows is singleton, which needs a token budget: enable"
            " policy.sequence_packing or policy.dynamic_batching, or write error, truncate or drop",
        )


def _shared_prefix(policy: PolicyConfig, needs: RunNeeds) -> Iterator[Problem]:
    if policy.shared_prefix is not True:
        return
    key = "policy.shared_prefix"
    if not policy.sequence_packing.enabled:
        yield Problem(
            (key, "policy.sequence_packing.enabled"),
            f"{key} is true, which needs packed rows: set policy.sequence_packing.enabled to true,"
            f" or {key} to auto",
        )
    if not needs.groups_rows:
        yield Problem(
            (key,),
            f"{key} is true, but rows of {needs.job} are in no groups: set it to auto or false",
        )


def _router_replay(policy: PolicyConfig, needs: RunNeeds) -> Iterator[Problem]:
    key = "policy.router_replay"
    if policy.router_replay is not True:
        return
    if not needs.uses_experts:
        yield Problem(
            (key,),
            f"{key} is true, but only GRPO uses the experts of completions: set it to auto or"
            " false",
        )
    if policy.compile == "layers":
        yield Problem(
            (key, "policy.compile"),
            f"{key} is true, but compiled layers (policy.compile {policy.compile}) cannot"
            f" use given experts: set policy.compile to none, or {key} to false",
        )


def _timeouts(reward: RewardConfig, cluster: ClusterConfig) -> Iterator[Problem]:
    reward_s = reward.timeout_s
    if reward_s is not None and 0 < cluster.progress_timeout_s <= reward_s:
        yield Problem(
            ("reward.timeout_s", "cluster.progress_timeout_s"),
            f"reward.timeout_s {reward_s:g} must be below cluster.progress_timeout_s"
            f" {cluster.progress_timeout_s:g}, which would end the run before: lower the first, or"
            " raise the second",
        )


def _cluster(cluster: ClusterConfig) -> Iterator[Problem]:
    if cluster.backend == "local":
        for key, limit in (
            ("num_nodes", 1),
            ("gpus_per_node", 1),
            ("workers_per_node", 1),
            ("generation_workers", 0),
        ):
            value = getattr(cluster, key)
            if value > limit:
                yield Problem(
                    (f"cluster.{key}", "cluster.backend"),
                    f"cluster.{key} is {value}, but cluster.backend local is one worker in this"
                    f" process: set it to {limit}, or use ray",
                )
    min_nodes = cluster.restart.min_nodes
    if min_nodes is not None and min_nodes > cluster.num_nodes:
        yield Problem(
            ("cluster.restart.min_nodes", "cluster.num_nodes"),
            f"cluster.restart.min_nodes is {min_nodes}, but the run has cluster.num_nodes"
            f" {cluster.num_nodes}: set it to at most {cluster.num_nodes}",
        )


def _environment(cluster: ClusterConfig) -> Iterator[Problem]:
    # Without the values in the messages: they may be secrets.
    for name in cluster.env:
        key = f"cluster.env.{name}"
        if _VARIABLE.fullmatch(name) is None:
            yield Problem(
                (key,), f"{key} is not the name of a variable: use letters, digits and '_' only"
            )
        elif name in _VARIABLES_SET_ELSEWHERE:
            yield Problem((key,), f"{key} has no effect: {_VARIABLES_SET_ELSEWHERE[name]}")


def _validation(config: RunConfig) -> Iterator[Problem]:
    data = config.data
    period = _value_at(config, f"{config.kind}.val_period")
    if isinstance(period, int) and period > 0 and not data.validation_files:
        key = f"{config.kind}.val_period"
        yield Problem(
            (key,), f"{key} is {period}, but data.validation_path is not set; set it, or {key} to 0"
        )
    for name in data.validation_sets:
        if re.fullmatch(r"[a-z0-9][a-z0-9_]*", name) is None:
            yield Problem(
                ("data.validation_sets",),
                f"data.validation_sets has the name {name!r}, which is a part of metric names: use"
                " lower-case letters, digits and '_'",
            )


def _selection(config: RunConfig) -> Iterator[Problem]:
    """The best checkpoint and early stopping need a metric, and values of it."""
    best = config.checkpointing.keep_best
    if best is not None and not config.checkpointing.enabled:
        yield Problem(
            ("checkpointing.keep_best", "checkpointing.enabled"),
            f"checkpointing.keep_best is {best!r}, but checkpointing.enabled is false: set it to"
            " true, or checkpointing.keep_best to null",
        )
    key = "checkpointing.keep_best"
    if best is None:
        if config.early_stopping.patience is not None:
            yield Problem(
                ("early_stopping.patience", key),
                f"early_stopping.patience is {config.early_stopping.patience}, but {key} is null:"
                f" set {key} to the metric that must improve, or early_stopping.patience to null",
            )
        return
    if not best.startswith("validation/"):
        return
    period_key = f"{config.kind}.val_period"
    if not config.data.validation_files:
        yield Problem(
            (key,),
            f"{key} is {best!r}, but data.validation_path is not set; set it, or {key} to another"
            " metric or null",
        )
    elif _value_at(config, period_key) == 0:
        yield Problem(
            (key, period_key),
            f"{key} is {best!r}, but {period_key} is 0, so that the run validates only at its end;"
            f" set {period_key}, or {key} to null",
        )


def _value_at(config: RunConfig, key: str) -> object:
    """Return the value at a dotted key; None if this kind of config has no such key."""
    if type_at(type(config), key) is None:
        return None
    return reduce(getattr, key.split("."), config)


def _worker_shares(
    policy: PolicyConfig, cluster: ClusterConfig, needs: RunNeeds, layout: ParallelLayout
) -> Iterator[Problem]:
    """Every DP rank needs at least one example; without a token budget all need equally many."""
    if not needs.batch.is_fixed:
        return
    key = "policy.train_global_batch_size"
    batch = policy.train_global_batch_size
    replicas = layout.dp
    size = layout.replica_size
    has_budget = batching_section(policy) is not None
    if batch >= replicas and (has_budget or batch % replicas == 0):
        return
    workers = workers_shown(cluster)
    source = f"({workers})" if size == 1 else f"({workers}, {size} workers each)"
    share = (
        f"{key} {batch} / {replicas} data-parallel ranks {source} ="
        f" {quotient(batch / replicas)} {needs.batch.example}s each"
    )
    if has_budget:
        text = (
            f"{share}; every rank needs at least one: set it to {replicas} or more, or use fewer"
            " workers"
        )
    else:
        text = (
            f"{share}; without packing or dynamic batching every rank needs equally many: set it to"
            f" {nearest_multiples(batch, replicas)}"
        )
    yield Problem((key, "cluster.workers_per_node", "cluster.gpus_per_node"), text)


def _budgets(policy: PolicyConfig, needs: RunNeeds, layout: ParallelLayout) -> Iterator[Problem]:
    """The longest legal row must fit into the token budgets, or the oversize policy must apply."""
    mode = batching_section(policy)
    rows_per_example = needs.batch.rows_per_example
    longest = policy.max_total_sequence_length
    if mode is None:
        return
    name, section = mode
    multiples = padding_multiples(layout, section)
    padding = _padding_text(name, section.sequence_length_round, multiples)
    for key, budget in (
        ("train_mb_tokens", section.train_mb_tokens),
        ("logprob_mb_tokens", section.logprob_mb_tokens),
    ):
        needed = rows_per_example * multiples.tokens_of_row(longest)
        if budget < multiples.min_tokens:
            yield Problem(
                (f"{name}.{key}",),
                f"{name}.{key} is {budget}, below the {multiples.min_tokens} tokens to which the"
                f" shortest row is padded ({padding}): no row would fit",
            )
        elif budget < needed and policy.oversize_rows in ("error", "drop"):
            rows = f"{rows_per_example} rows of " if rows_per_example > 1 else ""
            has_total = needed != longest
            total = f", {needed} when rounded up to {padding}" if has_total else ""
            yield Problem(
                (f"{name}.{key}", "policy.max_total_sequence_length"),
                f"{name}.{key} is {budget}, but a {needs.batch.example} may have {rows}{longest}"
                f" tokens (policy.max_total_sequence_length{total}) and would stop the run: set"
                f" {key} to at least {needed}, or policy.oversize_rows to truncate or singleton",
            )


def _padding_text(name: str, rounding: int, multiples: PaddingMultiples) -> str:
    """Return the multiples to which rows are padded, in words.

    Example: `policy.sequence_packing.sequence_length_round 6 and microbatches of multiples of 4`.
    """
    text = f"{name}.sequence_length_round {rounding}"
    if multiples.total > 1:
        text += f" and microbatches of multiples of {multiples.total}"
    return text


def _sampling(policy: PolicyConfig) -> Iterator[Problem]:
    generation = policy.generation
    longest = policy.max_total_sequence_length
    if generation.max_new_tokens >= longest:
        yield Problem(
            ("policy.generation.max_new_tokens", "policy.max_total_sequence_length"),
            f"policy.generation.max_new_tokens is {generation.max_new_tokens} and"
            f" policy.max_total_sequence_length {longest}, prompt included, so no prompt would fit:"
            " lower the first or raise the second",
        )


def _generation_layout(
    policy: PolicyConfig, cluster: ClusterConfig, needs: RunNeeds
) -> Iterator[Problem]:
    """A replica's tensor-parallel ranks must fit into the generation workers."""
    size = policy.generation.engine.workers_per_replica
    if size == 1:
        return
    key = "policy.generation.vllm.tensor_parallel_size"
    if cluster.backend == "local":
        yield Problem(
            (key, "cluster.backend"),
            f"{key} is {size}, but cluster.backend local has one generation worker: set it to 1, or"
            " use ray",
        )
        return
    if is_colocated(cluster, needs.rollouts):
        yield Problem(
            (key, "cluster.generation_workers"),
            f"{key} is {size}, but cluster.generation_workers is 0: colocated replicas have one GPU"
            f" each. Set it to 1, or cluster.generation_workers to a multiple of {size}",
        )
        return
    num_workers = num_generation_workers(cluster)
    if num_workers % size != 0:
        source = "cluster.generation_workers"
        if cluster.generation_workers == 0:
            source = workers_shown(cluster)
        yield Problem(
            (key, "cluster.generation_workers"),
            f"{num_workers} generation workers ({source}) / {key} {size} ="
            f" {quotient(num_workers / size)} replicas, not a whole number: set"
            f" cluster.generation_workers to {nearest_multiples(num_workers, size)}",
        )
