"""The formulas behind the numbers of a plan report, in words."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_like.models.adapters import BYTES_PER_VALUE
from nemo_like.prediction.memory import CONTEXT_BYTES, GIB, SAFETY_SHARE, MemoryModel
from nemo_like.prediction.placement import frozen_share
from nemo_like.prediction.plan_report import PlanReport
from nemo_like.prediction.step_time import ACHIEVED_BYTES_PER_S, ACHIEVED_FLOPS, train_passes


def assumptions(report: PlanReport) -> list[str]:
    """Return the formulas, one sentence or more each."""
    return [*_time_lines(report), *memory_assumptions(report.memory)]


def _time_lines(report: PlanReport) -> Iterator[str]:
    request = report.request
    cost = report.spec.cost
    has_adapters = request.placement.lora is not None
    window = f" (sliding window {cost.window})" if cost.window else ""
    unknown = " (not known here: none)" if report.comparison.chosen.plan.num_trained is None else ""
    times = "three times"
    if has_adapters:
        times = "two times (the gradients of frozen weights are not computed)"
    yield (
        f"work of a row of L positions, padding included: {cost.linear:.4g} L +"
        f" {cost.quadratic:.4g} L^2{window}, forward FLOPs of {request.model.name} with causal"
        f" attention, less {cost.head:.4g} for each position without loss{unknown}; a training step"
        f" does {times} that."
    )
    sync = "once per step: total of the slowest rank"
    if report.spec.sync == "microbatch":
        sync = "in every microbatch: sum over microbatches of the slowest rank"
    pp_size = request.placement.parallel_layout.pp
    bubble = f", times (M + {pp_size} - 1) / M for the pipeline bubble" if pp_size > 1 else ""
    yield (
        f"step time: data-parallel ranks synchronize {sync}{bubble}; 1.00 is the work of the real"
        " tokens spread evenly over the ranks, without padding and idle time. Other communication"
        " and kernel efficiency are not included."
    )
    if request.min_microbatch_tokens:
        moved = "all-gathers the weights twice and reduce-scatters the gradients once"
        num_bytes = "(2 c + 4)"
        if has_adapters:
            moved = "all-gathers the frozen weights twice"
            num_bytes = "2 c"
        yield (
            "communication bound: a microbatch takes at least the time of"
            f" {request.min_microbatch_tokens:,.0f} tokens, because FSDP2 {moved} for each:"
            f" {num_bytes} bytes per parameter at {ACHIEVED_BYTES_PER_S / 1e9:.0f} GB/s, against"
            f" {2 * train_passes(request.placement)} FLOPs per parameter and token at"
            f" {ACHIEVED_FLOPS / 1e12:.0f} TFLOP/s."
        )
    yield (
        "transformers, NeMo RL and verl: their layouts, with the work and the synchronization of"
        " this system; speed: step time of the fastest of them over that of the row. A microbatch"
        " of verl may exceed the token budget. FFD: first fit decreasing."
    )
    yield (
        "over min: microbatches over the lower bound ceil(L2 / ranks) per rank, with L2 of Martello"
        " and Toth. over bound: time over its lower bound for the same number of microbatches (1 is"
        " optimal; - for padded rows and verl, for which there is no bound)."
    )


def memory_assumptions(memory: MemoryModel) -> Iterator[str]:
    """Yield each formula of the memory, with the place where it was checked."""
    spec = memory.spec
    yield (
        f"{spec.name}: {spec.num_params / 1e9:.3f} B parameters P, counted from the configuration"
        " (equal to transformers' count for Llama, Qwen2, Qwen3 and Mixtral shapes)."
    )
    yield _megatron_state(memory) if memory.placement.engine == "megatron" else _fsdp_state(memory)
    yield from _trained_lines(memory)
    saved = {
        "none": "layers x one layer",
        "full": "layers x c hidden, and one complete layer in the backward pass",
        "selective": (
            "layers x the results of products and attention, c (3 hidden + 2 H d + 2 H_kv d + 2"
            " width) + 4 H, and the rest of one layer in the backward pass"
        ),
    }[memory.placement.activation_checkpointing]
    yield (
        f"activations: {saved}; a layer saves {memory.activations.layer_bytes:,.0f} bytes per"
        " token: norms 2 x (4 + c) x hidden, projection inputs 2 c hidden, attention c (2 H d + 2"
        " H_kv d) + 4 H, feed-forward 4 c width; c bytes per value. Saved tensors equal autograd's;"
        " of the peak, predicted over measured bytes per token is 0.99 - 1.04 for small real Llamas"
        " on CPU (bfloat16 and float32, with and without checkpointing, the copies of CPU attention"
        " counted); no GPU has been measured."
    )
    yield (
        "tensor parallelism divides heads and width, sequence parallelism also the norms; context"
        " parallelism divides the tokens, but keys and values are all-gathered (cp + 1/2 shares);"
        " the first pipeline stage has pp microbatches in flight."
    )
    backward = (
        "2 c (width + hidden) bytes per token and a layer's gradients before they are reduced"
    )
    if spec.head == "scores":
        yield f"the peak is one layer's backward pass: {backward}; there are no logits."
    else:
        yield (
            "the peak is the larger of logits and one layer's backward pass:"
            f" {memory.placement.chunk_size} tokens x vocabulary x {memory.logit_bytes} bytes of"
            f" logits and the output embedding's gradient, or {backward}."
        )
    if memory.placement.teachers:
        stay = "only log-probs of k tokens stay during training"
        if memory.placement.keeps_teacher_embeddings:
            stay = "copies of all output embeddings stay during training"
        yield (
            "teachers: one at a time is on the device, beside the state of the policy and without"
            " its activations, with its weights in compute precision in the layout of the policy"
            f" and the tensors of one layer; {stay}."
        )
    yield (
        f"usable memory: device - {CONTEXT_BYTES / GIB:.0f} GiB (CUDA context, NCCL) -"
        f" {SAFETY_SHARE:.0%} of the rest (fragmentation). Generation is not included: a"
        " colocated generator is offloaded where both do not fit (cluster.offload)."
    )


def _megatron_state(memory: MemoryModel) -> str:
    """Return the formula of weights, gradients and optimizer state with Megatron-Core."""
    place = memory.placement
    shards = f"sharded over dp x cp = {place.num_shards}"
    if place.lora is not None:
        return (
            f"Megatron: frozen weights {place.compute_bytes} P on every rank, and of the adapters Q"
            f" weights {place.compute_bytes} Q and gradients 4 Q, AdamW with float32 master weights"
            f" 12 Q {shards}."
        )
    return (
        f"Megatron: weights {place.compute_bytes} P and gradients 4 P on every rank, AdamW with"
        f" float32 master weights 12 P {shards} (distributed optimizer); P / (tp x pp) per rank."
    )


def _fsdp_state(memory: MemoryModel) -> str:
    """Return the formula of weights, gradients and optimizer state with FSDP2."""
    place = memory.placement
    size = place.compute_bytes
    values = "float32 weights 4 P, gradients 4 P and AdamW 8 P"
    if place.lora is not None:
        frozen = f"frozen weights {size} P"
        if place.lora.is_quantized:
            frozen = (
                f"matrices of layers {BYTES_PER_VALUE:g} bytes per value (4 bits, and a float32"
                " scale per block of 64) on every rank of dp x cp, one matrix at a time"
                f" dequantized to {size} bytes per value; embeddings and norms {size} bytes per"
                " value"
            )
        values = f"{frozen}, and of the adapters Q float32 weights 4 Q, gradients 4 Q and AdamW 8 Q"
    copy = "the output embedding and two layers at a time"
    if not place.has_compute_copy:
        copy = "nothing, a single process uses its own weights"
    elif memory.keeps_unsharded:
        copy = "the complete model during a step (a small model)"
    num_replicas = place.parallel_layout.num_replicas
    shards = "dp x cp x tp" if num_replicas == 1 else f"dp x cp x tp / {num_replicas} replicas"
    num_ranks = place.num_shards * place.parallel_layout.tp
    return (
        f"FSDP2: {values}, each sharded over {shards} = {num_ranks} ranks; all-gathered in compute"
        f" precision: {copy}."
    )


def _trained_lines(memory: MemoryModel) -> Iterator[str]:
    """Yield what differs from AdamW on all weights."""
    place = memory.placement
    if place.freeze:
        trained = 1.0 - frozen_share(memory.spec, place.freeze)
        yield (
            f"policy.freeze: {trained:.1%} of P are trained, with gradients, master weights and"
            " optimizer state."
        )
    if place.optimizer != "adamw":
        yield (
            f"policy.optimizer.name {place.optimizer}: {memory.optimizer_bytes:.2f} bytes of"
            " optimizer state per trained parameter instead of the 8 of AdamW."
        )
    if place.has_ema:
        yield "policy.ema: 4 bytes per trained parameter, sharded like its optimizer state."
