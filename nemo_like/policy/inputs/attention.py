"""Causal attention over packed rows: one function for every device, used by both engines.

A position attends only to earlier positions of its own segment, so changing a token of one row
leaves every other row bit-equal. Right-padded rows ([B, S], no `cu_seqlens`) need no mask: with
causal attention a real token never sees the padding after it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import AttentionInterface

from nemo_like.config.errors import ConfigError
from nemo_like.policy.inputs.exchange import Exchange, plan_exchange, select_keys_values
from nemo_like.policy.inputs.segment_attention import (
    AttentionOptions,
    Spans,
    sdpa,
    segment_attention,
)
from nemo_like.policy.inputs.varlen_kernels import varlen_kernel

IMPLEMENTATION = "nemo_like"
"""The `attn_implementation` of Hugging Face models that use `attention_forward`."""


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    scale: float,
    window: int | None = None,
    causal: bool = True,
    cp_group: ProcessGroup | None = None,
    exchange: Exchange | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return [T, H, E] from `q` [T, H, D], `k` [T, H_kv, D] and `v` [T, H_kv, E].

    `cu_seqlens`, int32 [R+1], covers all T positions. `window` is the number of positions that a
    token attends to, itself included; None means its entire past. `softcap` and `sinks` [H] are as
    in `AttentionOptions`. In half precision on CUDA this is
    a kernel of `varlen_kernels`, elsewhere SDPA, segment by segment. That is correct but slow in
    float32 on CUDA, where each call also waits for the device: it is meant for tests.

    With a `cp_group` of c > 1 ranks, `q`, `k`, `v` and the result are this rank's share of T/c
    positions (`grid.cp_shard_positions`), while `cu_seqlens` and `max_seqlen` describe all
    ranks' positions. `cu_seqlens` must not be modified after a call: results derived from it are
    cached for the lifetime of the tensor. With shared prefixes `exchange` has the keys of each
    segment of this rank (`ModelInputs.exchange`) and `cu_seqlens` is not read.
    """
    options = AttentionOptions(scale, window, causal, softcap, sinks)
    spans = Spans(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    if cp_group is not None and cp_group.size() == 1:
        cp_group = None
    if cp_group is not None and exchange is None:
        exchange = plan_exchange(cu_seqlens, max_seqlen, cp_group, q.shape[0])
    if exchange is not None:
        if not causal:
            raise ValueError(
                "context parallelism and shared prefixes support causal attention only"
            )
        k, v = select_keys_values(k, v, exchange, cp_group)
        spans = exchange.spans
    if has_varlen_kernel(q):
        return varlen_kernel()(q, k, v, spans, options)
    return segment_attention(q, k, v, spans, options)


def padded_attention(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
    """Return causal attention [B, H, S, E] of `q` [B, H, S, D], `k` and `v` [B, H_kv, S, D or E].

    Rows are padded on the right. In half precision on CUDA they are segments of equal lengths for
    the kernel of packed rows: SDPA needs a mask [S, S] for a window, and has no fast kernel with
    one.
    """
    if not has_varlen_kernel(q):
        return sdpa(q, k, v, options)
    num_rows, _, length, _ = q.shape
    # From the shape, and on the device, so that the host does not wait.
    bounds = torch.arange(0, (num_rows + 1) * length, length, dtype=torch.int32, device=q.device)
    # [B, H, S, D] to [T, H, D] with T = B x S.
    q, k, v = (heads.transpose(1, 2).flatten(0, 1) for heads in (q, k, v))
    out = varlen_kernel()(q, k, v, Spans(bounds, bounds, length, length), options)
    return out.unflatten(0, (num_rows, length)).transpose(1, 2)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int = 0,
    cp_group: ProcessGroup | None = None,
    exchange: Exchange | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function of a Hugging Face layer: `query` [B, H, S, D] -> ([B, S, H, D], None).

    The policy passes `cu_seqlens` (with B = 1), `cp_group` and `exchange` to the model's forward.
    Raises ConfigError for a layer that needs another kind of attention, which would silently train
    wrong.
    """
    _check_supported(module, attention_mask, dropout, kwargs)
    # A graph that read the index of its layer would be compiled for each layer. The isolation check
    # runs without compilation.
    if sliding_window is None and not torch.compiler.is_compiling() and _has_window(module):
        raise ConfigError(
            f"{type(module).__name__} has a window in its config.json (sliding_window or"
            " layer_types), which its code leaves to a mask that packed rows do not have; set"
            " policy.model_name to a model of a type in docs/models.md, or to one without windows"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if cu_seqlens is None:
        if cp_group is not None and cp_group.size() > 1:
            raise ValueError("context parallelism needs packed rows; pass cu_seqlens")
        options = AttentionOptions(scale, sliding_window, softcap=softcap, sinks=s_aux)
        out = padded_attention(query, key, value, options)
        return out.transpose(1, 2), None
    # Packed rows have B = 1: [1, H, T, D] to [T, H, D].
    q = query.squeeze(0).transpose(0, 1)
    k = key.squeeze(0).transpose(0, 1)
    v = value.squeeze(0).transpose(0, 1)
    out = varlen_attention(
        q,
        k,
        v,
        cu_seqlens,
        max_seqlen,
        scale=scale,
        window=sliding_window,
        cp_group=cp_group,
        exchange=exchange,
        softcap=softcap,
        sinks=s_aux,
    )
    return out.unsqueeze(0), None


def register() -> None:
    """Register `attn_implementation="nemo_like"` with transformers.

    Without a mask function transformers builds no mask: the bounds of the rows are an argument of
    each call. With one it would also search the positions for packed rows, and wait for the device.
    """
    AttentionInterface.register(IMPLEMENTATION, attention_forward)  # type: ignore[arg-type]


def has_varlen_kernel(q: Tensor) -> bool:
    """Return True for queries of any shape in half precision on CUDA."""
    return q.is_cuda and q.dtype in (torch.float16, torch.bfloat16)


def _has_window(module: nn.Module) -> bool:
    """Return True if the configuration gives a layer a window."""
    config: Any = getattr(module, "config", None)
    index = getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    size = "sliding_window"
    if kinds is not None and index is not None and index < len(kinds):
        sizes = {"sliding_attention": size, "chunked_attention": "attention_chunk_size"}
        size = sizes.get(kinds[index], "")
    # A key of another type is kept by transformers and ignored.
    elif size not in getattr(type(config), "__dataclass_fields__", {}):
        return False
    window = getattr(config, size, None) if size else None
    return window is not None and window < getattr(config, "max_position_embeddings", math.inf)


def _check_supported(
    module: nn.Module, mask: Tensor | None, dropout: float, others: dict[str, Any]
) -> None:
    """Raise ConfigError if the layer needs more than causal attention.

    A `mask` of any shape, such as [B, 1, S, S], is refused.
    """
    unsupported = [
        name for name in ("position_bias", "block_indices") if others.get(name) is not None
    ]
    if not getattr(module, "is_causal", True):
        unsupported.append("bidirectional attention")
    if mask is not None:
        unsupported.append("an attention mask")
    if dropout:
        unsupported.append(f"attention dropout {dropout}")
    if unsupported:
        raise ConfigError(
            f"{type(module).__name__} needs {', '.join(unsupported)}, which packed causal attention"
            " does not support; set policy.model_name to a model of a type in docs/models.md"
        )
