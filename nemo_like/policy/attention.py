"""Causal attention over packed rows: one function for every device, used by both engines.

A position attends only to earlier positions of its own segment, so changing a token of one row
leaves every other row bit-equal. Right-padded rows ([B, S], no `cu_seqlens`) need no mask: with
causal attention a real token never sees the padding after it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import AttentionInterface

from nemo_like.config.errors import ConfigError
from nemo_like.policy.context_parallel import gather_keys_values, plan_exchange
from nemo_like.policy.segment_attention import Spans, sdpa, segment_attention
from nemo_like.policy.varlen_kernels import varlen_kernel

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
) -> Tensor:
    """Return [T, H, D] from `q` [T, H, D] and `k`, `v` [T, H_kv, D].

    `cu_seqlens`, int32 [R+1], covers all T positions. `window` is the number of positions that a
    token attends to, itself included; None means its entire past. In half precision on CUDA this is
    a kernel of `varlen_kernels`, elsewhere SDPA, segment by segment. That is correct but slow in
    float32 on CUDA, where each call also waits for the device: it is meant for tests.

    With a `cp_group` of c > 1 ranks, `q`, `k`, `v` and the result are this rank's share of T/c
    positions (`segments.cp_shard_positions`), while `cu_seqlens` and `max_seqlen` describe all
    ranks' positions. `cu_seqlens` must not be modified after a call: results derived from it are
    cached for the lifetime of the tensor.
    """
    spans = Spans(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    if cp_group is not None and cp_group.size() > 1:
        if not causal:
            raise ValueError("context parallelism supports causal attention only")
        exchange = plan_exchange(cu_seqlens, max_seqlen, cp_group, q.shape[0])
        k, v = gather_keys_values(k, v, exchange, cp_group)
        spans = Spans(
            exchange.cu_seqlens_q,
            exchange.cu_seqlens_k,
            exchange.max_seqlen_q,
            exchange.max_seqlen_k,
        )
    if _has_varlen_kernel(q):
        return varlen_kernel()(q, k, v, spans, scale=scale, window=window, causal=causal)
    return segment_attention(q, k, v, spans, scale, window, causal)


def padded_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None = None
) -> Tensor:
    """Return causal attention [B, H, S, D] of `q` [B, H, S, D] and `k`, `v` [B, H_kv, S, D].

    Rows are padded on the right. In half precision on CUDA they are segments of equal lengths for
    the kernel of packed rows: SDPA needs a mask [S, S] for a window, and has no fast kernel with
    one.
    """
    if not _has_varlen_kernel(q):
        return sdpa(q, k, v, scale, window, causal=True)
    num_rows, _, length, _ = q.shape
    # From the shape, and on the device, so that the host does not wait.
    bounds = torch.arange(0, (num_rows + 1) * length, length, dtype=torch.int32, device=q.device)
    # [B, H, S, D] to [T, H, D] with T = B x S.
    q, k, v = (heads.transpose(1, 2).flatten(0, 1) for heads in (q, k, v))
    out = varlen_attention(q, k, v, bounds, length, scale=scale, window=window)
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
    cu_seqlens: Tensor | None = None,
    max_seqlen: int = 0,
    cp_group: ProcessGroup | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function of a Hugging Face layer: `query` [B, H, S, D] -> ([B, S, H, D], None).

    The policy passes `cu_seqlens` (with B = 1) and `cp_group` to the model's forward. Raises
    ConfigError for a layer that needs another kind of attention, which would silently train wrong.
    """
    _check_supported(module, attention_mask, dropout, kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if cu_seqlens is None:
        if cp_group is not None and cp_group.size() > 1:
            raise ValueError("context parallelism needs packed rows; pass cu_seqlens")
        out = padded_attention(query, key, value, scale=scale, window=sliding_window)
        return out.transpose(1, 2), None
    # Packed rows have B = 1: [1, H, T, D] to [T, H, D].
    q = query.squeeze(0).transpose(0, 1)
    k = key.squeeze(0).transpose(0, 1)
    v = value.squeeze(0).transpose(0, 1)
    out = varlen_attention(
        q, k, v, cu_seqlens, max_seqlen, scale=scale, window=sliding_window, cp_group=cp_group
    )
    return out.unsqueeze(0), None


def register() -> None:
    """Register `attn_implementation="nemo_like"` with transformers.

    Without a mask function transformers builds no mask: the bounds of the rows are an argument of
    each call. With one it would also search the positions for packed rows, and wait for the device.
    """
    AttentionInterface.register(IMPLEMENTATION, attention_forward)  # type: ignore[arg-type]


def _has_varlen_kernel(q: Tensor) -> bool:
    """Return True for queries of any shape in half precision on CUDA."""
    return q.is_cuda and q.dtype in (torch.float16, torch.bfloat16)


def _check_supported(
    module: nn.Module, mask: Tensor | None, dropout: float, extras: dict[str, Any]
) -> None:
    """Raise ConfigError if the layer needs more than causal attention.

    A `mask` of any shape, such as [B, 1, S, S], is refused.
    """
    unsupported = [
        name for name in ("softcap", "s_aux", "position_bias") if extras.get(name) is not None
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
            " does not support; policy.model_name must be a plain causal model such as Llama, Qwen2"
            " or Qwen3"
        )
