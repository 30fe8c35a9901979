"""Planner input from a policy's configuration. Imports neither Ray nor a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from nemo_like.config.batching import BatchingConfig
from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import PolicyConfig
from nemo_like.data.images import RowImage
from nemo_like.data.planning.prefixes import SharedPrefixMode
from nemo_like.data.planning.spec import CostModel, PlanSpec
from nemo_like.data.planning.token_counts import TokenCounts, count_image_tokens
from nemo_like.data.streaming.selection import Selection
from nemo_like.data.streaming.spec import StreamSpec
from nemo_like.models.spec import ModelSpec
from nemo_like.models.vision import VisionSpec
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.prediction.memory import MemoryModel
from nemo_like.prediction.placement import policy_placement

Purpose = Literal["train", "evaluate"]


def plan_spec(
    config: PolicyConfig,
    *,
    purpose: Purpose,
    parallel_layout: ParallelLayout,
    model: ModelSpec | None,
    seed: int = 0,
) -> PlanSpec:
    """Build the planner's input; runs, `validate` and `nemo-like plan` all use this function.

    Rows are packed, padded under a token budget, or padded with a fixed number per microbatch. What
    they are padded to and where ranks wait for each other follow from the parallel layout, the
    engine and the model. Without a `model` (`validate` of a run whose model cannot be read) the
    work of a row is as in a dense 7B model, and weights count as small.
    """
    max_tokens, max_rows = microbatch_budget(config, purpose)
    packing = config.sequence_packing
    dynamic = config.dynamic_batching
    common = {
        "max_tokens": max_tokens,
        "max_rows": max_rows,
        "num_ranks": parallel_layout.dp,
        "cp_size": parallel_layout.cp,
        "tp_size": parallel_layout.tp,
        "sequence_parallel": parallel_layout.sequence_parallel,
        "pp_size": parallel_layout.pp,
        "vpp_size": parallel_layout.vpp,
        # The interleaved schedule runs groups of pp microbatches.
        "microbatch_multiple": parallel_layout.pp if parallel_layout.vpp > 1 else 1,
        "global_batch_size": config.train_global_batch_size if purpose == "train" else None,
        "sync": parallel_layout.sync(config.engine, model.num_params if model else 0),
        # The loader drops oversize rows before it forms batches, so that every batch is full. Such
        # a row here is therefore an error.
        "oversize": "error" if config.oversize_rows == "drop" else config.oversize_rows,
        "cost": CostModel.from_spec(model) if model else CostModel(),
        "seed": seed,
    }
    if parallel_layout.dynamic_context and model is not None and model.vision is not None:
        raise ConfigError(
            "parallel.dynamic_context is true, but policy.model_name has a vision tower, whose"
            " images every context-parallel rank needs: set it to false"
        )
    if packing.enabled:
        if model is not None and model.vision is not None and purpose == "train":
            placement = policy_placement(config, parallel_layout, needs_reference=False)
            common["image_weight"] = MemoryModel(model, placement).image_weight
        return PlanSpec(
            layout="packed",
            algorithm=packing.algorithm,
            balance=packing.balance,
            sequence_length_round=packing.sequence_length_round,
            microbatch_length_round=packing.microbatch_length_round,
            dynamic_context=parallel_layout.dynamic_context,
            **common,
        )
    if dynamic.enabled:
        return PlanSpec(
            layout="padded", sequence_length_round=dynamic.sequence_length_round, **common
        )
    return PlanSpec(layout="padded", **common)


def with_image_work(
    counts: TokenCounts,
    images: Sequence[Sequence[RowImage]],
    config: PolicyConfig,
    spec: VisionSpec | None,
) -> TokenCounts:
    """Return the counts of rows with the tokens of the images of each row, and the forward FLOPs
    of the tower for them.

    A frozen tower has no backward pass, which takes two thirds of the time of a step.
    """
    image_tokens = count_image_tokens(images)
    if spec is None or image_tokens is None:
        return counts
    grids = [image.grid for row in images for image in row]
    flops = spec.flops(np.array(grids, dtype=np.int64))
    row_ids = np.repeat(np.arange(len(images)), [len(row) for row in images])
    work = np.bincount(row_ids, weights=flops, minlength=len(images))
    work /= 3 if config.vision.train == "frozen" else 1
    return replace(counts, image_tokens=image_tokens, image_work=work)


def shared_prefix_mode(config: PolicyConfig, model: ModelSpec | None) -> SharedPrefixMode:
    """Return `policy.shared_prefix`, or `false` where rows of different lengths cannot share.

    With rotary frequencies that depend on the length of a row, the hidden states of its first
    tokens do too. Raises ConfigError for `true` there.
    """
    threshold = None if model is None else model.rope_threshold
    if threshold is None or config.max_total_sequence_length <= threshold:
        return config.shared_prefix
    if config.shared_prefix is True:
        raise ConfigError(
            "policy.shared_prefix is true, but the rotary frequencies of policy.model_name depend"
            f" on the length of rows above {threshold} tokens: set it to auto or false, or set"
            f" policy.max_total_sequence_length to {threshold} or less"
        )
    return False


def stream_spec(batching: BatchingConfig, plan: PlanSpec) -> StreamSpec:
    """Build the input of the streaming planner for a `data.batching.kind` other than fixed.

    `plan` comes from `plan_spec`. Raises ConfigError for values that do not fit together.
    """
    if plan.dynamic_context:
        raise ConfigError(
            f"data.batching.kind is {batching.kind}, which forms microbatches one after the other,"
            " and parallel.dynamic_context divides them over ranks jointly: set"
            " data.batching.kind to fixed, or parallel.dynamic_context to false"
        )
    window_tokens = batching.window_tokens
    if window_tokens is None and batching.kind == "pool":
        # Cosmos-RL fills its pool by rows alone.
        window_tokens = 0
    try:
        return StreamSpec(
            plan=replace(plan, global_batch_size=None),
            selection=_selection(batching),
            microbatches_per_step=batching.microbatches_per_step,
            window_rows=batching.num_window_rows,
            window_tokens=window_tokens,
            tail=batching.tail,
            max_rows=batching.max_rows,
            count_mode=batching.count_mode,
            physical_overflow_ratio=batching.physical_overflow_ratio,
            warmup_steps=batching.warmup_steps,
            warmup_init_tokens=batching.warmup_init_tokens,
        )
    except ValueError as error:
        raise ConfigError(f"data.batching: {error}") from error


def _selection(batching: BatchingConfig) -> Selection:
    """Return the rule by which a kind selects the rows of a microbatch."""
    if batching.kind == "pool":
        return batching.strategy
    if batching.kind == "online":
        return "best_fit"
    if batching.kind == "token_budget":
        return "in_order"
    return "first_fit"


def microbatch_budget(config: PolicyConfig, purpose: Purpose) -> tuple[int | None, int | None]:
    """Return (max tokens, max rows) of a microbatch; one of them is None."""
    is_forward_only = purpose == "evaluate"
    for mode in (config.sequence_packing, config.dynamic_batching):
        if mode.enabled:
            max_tokens = mode.logprob_mb_tokens if is_forward_only else mode.train_mb_tokens
            return max_tokens, None
    max_rows = config.logprob_batch_size if is_forward_only else config.train_micro_batch_size
    return None, max_rows
