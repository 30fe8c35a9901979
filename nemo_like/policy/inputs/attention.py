"""Causal attention over packed rows: one function for every device, used by both engines.

Context parallelism by all-gathering keys and values.

Every segment is split into 2c chunks for c ranks, and rank r has chunks r and 2c-1-r of each
(zig-zag order, see `model_inputs`), which balances the causal work. All ranks' keys and values are
gathered once, so attention needs no exchange of partial results. Each of a rank's two query chunks
becomes a segment of its own; it attends to the prefix that ends at its own last position.

The variable-length attention kernel of a CUDA device: FlashAttention 3 or 4, flash-attn 2 or
torch's own.

Each is called in one way, with the keywords that its installed release has.

A position attends only to earlier positions of its own segment, so changing a token of one row
leaves every other row bit-equal. Right-padded rows ([B, S], no `cu_seqlens`) need no mask: with
causal attention a real token never sees the padding after it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import attention as torch_attention
from torch.nn.attention.varlen import varlen_attn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface

from nemo_like.config.errors import ConfigError
from nemo_like.policy.collectives import gather_rows, keyword_names
from nemo_like.policy.inputs.segment_attention import (
    NO_EXTRAS,
    AttentionExtras,
    Exchange,
    Spans,
    sdpa,
    segment_attention,
    shares_kv_heads,
)
from nemo_like.policy.inputs.sink_attention import SinkAttention


def select_keys_values(
    k: Tensor, v: Tensor, kv_index: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Select `k` [T_k, H_kv, D] and `v` [T_k, H_kv, E] of an exchange from this rank's [T/c, ...].

    With a `group` they are gathered from its c ranks first.
    """
    if group is None:
        return k.index_select(0, kv_index), v.index_select(0, kv_index)
    # Joined, so that there is one collective in the forward and one in the backward.
    local = torch.cat((k, v), dim=-1)
    gathered = gather_rows(group, local)
    selected = gathered.index_select(0, kv_index)
    k, v = selected.split((k.shape[-1], v.shape[-1]), dim=-1)
    return k, v


def plan_exchange(
    cu_seqlens: Tensor, max_seqlen: int, group: dist.ProcessGroup, num_positions: int
) -> Exchange:
    """Return the exchange of this rank of `group`, which has `num_positions` = T/c positions.

    `cu_seqlens` int32 [R + 1] are the segment bounds over all ranks of the group.
    It is computed once per `cu_seqlens` tensor, as all layers of a forward pass the same one.
    """
    key = (group.size(), group.rank(), num_positions, max_seqlen)
    plans = _plans.setdefault(cu_seqlens, {})
    if key not in plans:
        plans[key] = make_exchange(
            cu_seqlens, max_seqlen, group.size(), group.rank(), num_positions
        )
    return plans[key]


_plans: Any = WeakTensorKeyDictionary()
"""Exchanges by `cu_seqlens` tensor; an entry lives as long as its tensor."""


def make_exchange(
    cu_seqlens: Tensor, max_seqlen: int, size: int, rank: int, num_positions: int
) -> Exchange:
    """Build the exchange on the device of `cu_seqlens` [R + 1], without waiting for the device."""
    if cu_seqlens.device.type == "cpu":
        # On CUDA the check would wait for the device.
        _check(cu_seqlens.tolist(), size, num_positions)
    device = cu_seqlens.device
    num_chunks = 2 * size
    starts = cu_seqlens.long()
    # int64 [R]: length of one chunk of each segment.
    chunk_lengths = starts.diff() // num_chunks
    # int64 [2R]: two queries per segment, each as long as a chunk.
    lengths_q = chunk_lengths[:, None].expand(-1, 2).flatten()
    # Query chunk r sees r + 1 chunks, query chunk 2c-1-r sees 2c-r. Factors from the host are
    # arguments of kernels, where a tensor of them would be a copy that waits for the device.
    lengths_of_first = chunk_lengths * (rank + 1)
    lengths_of_second = chunk_lengths * (num_chunks - rank)
    lengths_k = torch.stack((lengths_of_first, lengths_of_second), dim=1).flatten()
    bounds_k = _bounds(lengths_k)
    # The sum of `lengths_k`, computed on the host so as not to wait for the device: each segment
    # contributes 2c + 1 of its chunks.
    num_keys = (num_chunks + 1) * (num_positions // 2)
    # int64 [T_k] from here on: for each key its query, and its place in the segment.
    queries = torch.arange(len(lengths_k), device=device)
    query = torch.repeat_interleave(queries, lengths_k, output_size=num_keys)
    segment = query // 2
    position = torch.arange(num_keys, device=device) - bounds_k[query]
    chunk_length = chunk_lengths[segment]
    chunk = position // chunk_length
    is_first = chunk < size
    owner = torch.where(is_first, chunk, num_chunks - 1 - chunk)
    # A rank's share of a segment is its first chunk, then its second.
    share_start = starts[segment] // size
    offset_of_chunk = torch.where(is_first, 0, chunk_length)
    within_share = share_start + position % chunk_length + offset_of_chunk
    max_chunk_length = max_seqlen // num_chunks
    spans = Spans(
        cu_seqlens_q=_bounds(lengths_q).int(),
        cu_seqlens_k=bounds_k.int(),
        max_seqlen_q=max_chunk_length,
        max_seqlen_k=max_chunk_length * (num_chunks - rank),
    )
    return Exchange(owner * num_positions + within_share, spans)


def _bounds(lengths: Tensor) -> Tensor:
    """Return segment bounds int64 [n + 1] from lengths int64 [n]."""
    ends = lengths.cumsum(0)
    return torch.nn.functional.pad(ends, (1, 0))


def _check(bounds: list[int], size: int, num_positions: int) -> None:
    if bounds[-1] != num_positions * size:
        raise ValueError(
            f"cu_seqlens ends at {bounds[-1]} but there are {size} x {num_positions} positions"
        )
    if any(bound % (2 * size) for bound in bounds):
        raise ValueError(
            f"cu_seqlens {bounds} are not all multiples of 2 x {size}, as {size} context-parallel"
            f" ranks need"
        )


logger = logging.getLogger(__name__)

_IMPLEMENTATIONS = {9: ("FA3", "flash_attn_interface"), 10: ("FA4", "flash_attn.cute")}
"""Major compute capability -> (implementation in torch, its package): Hopper and Blackwell."""


@dataclass(frozen=True)
class VarlenKernel:
    """Causal or full attention of packed segments, in half precision on CUDA."""

    name: str
    """For logs."""
    function: Callable[..., Any]
    """`torch.nn.attention.varlen.varlen_attn` or `flash_attn.flash_attn_varlen_func`."""
    is_flash_attn: bool
    """True for flash-attn's own function, whose keywords have other names than torch's."""
    keywords: frozenset[str]
    """Keywords that `function` accepts."""
    implementation: str | None = None
    """`FA3` or `FA4` if torch uses it in place of its own FlashAttention 2."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        spans: Spans,
        *,
        scale: float,
        window: int | None,
        causal: bool,
        extras: AttentionExtras = NO_EXTRAS,
    ) -> Tensor:
        """Return [T_q, H, E] from `q` [T_q, H, D], `k` [T_k, H_kv, D] and `v` [T_k, H_kv, E].

        Raises ConfigError for `extras` that the kernel does not have.
        """
        if self.is_flash_attn and extras.sinks is not None:
            torch_kernel = VarlenKernel.of_torch(varlen_attn)
            return torch_kernel(
                q, k, v, spans, scale=scale, window=window, causal=causal, extras=extras
            )
        # All kernels align the ends of queries and keys. Their window is the number of positions
        # before the token itself, -1 for all of them.
        left = -1 if window is None else window - 1
        window_size = (left, 0 if causal else left)
        options: dict[str, Any] = {"window_size": window_size, **self._options(extras)}
        # The kernels have one head size for queries, keys and values.
        value_size = v.shape[-1]
        if value_size < q.shape[-1]:
            v = nn.functional.pad(v, (0, q.shape[-1] - value_size))
        if self.is_flash_attn:
            options["softmax_scale"] = scale
            options["causal"] = causal
            if "deterministic" in self.keywords:
                options["deterministic"] = torch.are_deterministic_algorithms_enabled()
        else:
            options["scale"] = scale
            # Releases without the keyword accept fewer key-value heads without it.
            if "enable_gqa" in self.keywords:
                options["enable_gqa"] = shares_kv_heads(q.shape[1], k.shape[1])
            # FlashAttention 3 and 4 may split the keys by the longest row of the batch, so that a
            # row would depend on the others. FlashAttention 2 splits them only for single queries,
            # and some releases refuse the keyword with it.
            if self.implementation is not None and "num_splits" in self.keywords:
                options["num_splits"] = 1
        if extras.sinks is None:
            out = self.function(q, k, v, *spans, **options)
        else:
            del options["scale"], options["window_size"]
            out = SinkAttention.apply(q, k, v, extras.sinks, spans, scale, window_size, options)
        # torch returns a tuple only with auxiliary outputs.
        assert isinstance(out, Tensor)
        return out if value_size == q.shape[-1] else out[..., :value_size]

    def _options(self, extras: AttentionExtras) -> dict[str, Any]:
        """Return the arguments for `extras`. Raises ConfigError if the kernel has none."""
        if extras.softcap is None:
            return {}
        if "softcap" not in self.keywords:
            raise ConfigError(
                "policy.model_name has a soft cap of attention scores, which flash-attn 2 has; the"
                f" attention kernel {self.name} cannot compute it: set policy.precision=float32"
            )
        return {"softcap": extras.softcap}

    @classmethod
    def of_torch(
        cls, function: Callable[..., Any], implementation: str | None = None
    ) -> VarlenKernel:
        """Return the kernel behind a function with the parameters of torch's `varlen_attn`."""
        name = f"torch.nn.attention.varlen ({implementation or 'FlashAttention 2'})"
        return cls(name, function, False, keyword_names(function), implementation)

    @classmethod
    def of_flash_attn(cls, function: Callable[..., Any]) -> VarlenKernel:
        """Return the kernel behind a function with the parameters of flash-attn 2."""
        return cls("flash-attn 2", function, True, keyword_names(function))


_chosen: VarlenKernel | None = None


def varlen_kernel() -> VarlenKernel:
    """Return the fastest installed kernel; the choice is logged once per process.

    torch.compile can trace all calls but the first.
    """
    global _chosen
    if _chosen is None:
        _chosen = choose_kernel()
        logger.info("attention of packed rows on CUDA: %s", _chosen.name)
    return _chosen


def choose_kernel() -> VarlenKernel:
    """Return the fastest kernel of the device and the installed packages."""
    implementation = _activated_implementation()
    if implementation is not None:
        return VarlenKernel.of_torch(varlen_attn, implementation)
    try:
        from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]
    except ImportError:
        return VarlenKernel.of_torch(varlen_attn)
    return VarlenKernel.of_flash_attn(flash_attn_varlen_func)


def _activated_implementation() -> str | None:
    """Have torch use FlashAttention 3 or 4 if the device has one; return its name in torch.

    Warns if the package is missing or cannot be used: the other kernels compute the same, slower.
    """
    if not torch.cuda.is_available():
        return None
    major, _ = torch.cuda.get_device_capability()
    if major not in _IMPLEMENTATIONS:
        return None
    name, package = _IMPLEMENTATIONS[major]
    try:
        torch_attention.activate_flash_attention_impl(name)
    # A missing package or a build of another torch fails in many ways.
    except Exception as error:  # noqa: BLE001
        logger.warning(
            "torch cannot use the fastest attention of this device, %s of the package %s (%s: %s);"
            " a slower kernel is used",
            name,
            package,
            type(error).__name__,
            error,
        )
        return None
    return name


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
    extras: AttentionExtras = NO_EXTRAS,
) -> Tensor:
    """Return [T, H, E] from `q` [T, H, D], `k` [T, H_kv, D] and `v` [T, H_kv, E].

    `cu_seqlens`, int32 [R+1], covers all T positions. `window` is the number of positions that a
    token attends to, itself included; None means its entire past. In half precision on CUDA this is
    a kernel of `varlen_kernels`, elsewhere SDPA, segment by segment. That is correct but slow in
    float32 on CUDA, where each call also waits for the device: it is meant for tests.

    With a `cp_group` of c > 1 ranks, `q`, `k`, `v` and the result are this rank's share of T/c
    positions (`segments.cp_shard_positions`), while `cu_seqlens` and `max_seqlen` describe all
    ranks' positions. `cu_seqlens` must not be modified after a call: results derived from it are
    cached for the lifetime of the tensor. With shared prefixes `exchange` has the keys of each
    segment of this rank (`ModelInputs.exchange`) and `cu_seqlens` is not read.
    """
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
        k, v = select_keys_values(k, v, exchange.kv_index, cp_group)
        spans = exchange.spans
    if has_varlen_kernel(q):
        return varlen_kernel()(
            q, k, v, spans, scale=scale, window=window, causal=causal, extras=extras
        )
    return segment_attention(q, k, v, spans, scale, window, causal, extras)


def padded_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    window: int | None = None,
    extras: AttentionExtras = NO_EXTRAS,
) -> Tensor:
    """Return causal attention [B, H, S, E] of `q` [B, H, S, D], `k` and `v` [B, H_kv, S, D or E].

    Rows are padded on the right. In half precision on CUDA they are segments of equal lengths for
    the kernel of packed rows: SDPA needs a mask [S, S] for a window, and has no fast kernel with
    one.
    """
    if not has_varlen_kernel(q):
        return sdpa(q, k, v, scale, window, causal=True, extras=extras)
    num_rows, _, length, _ = q.shape
    # From the shape, and on the device, so that the host does not wait.
    bounds = torch.arange(0, (num_rows + 1) * length, length, dtype=torch.int32, device=q.device)
    # [B, H, S, D] to [T, H, D] with T = B x S.
    q, k, v = (heads.transpose(1, 2).flatten(0, 1) for heads in (q, k, v))
    out = varlen_attention(q, k, v, bounds, length, scale=scale, window=window, extras=extras)
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
    extras = AttentionExtras(softcap, s_aux)
    if cu_seqlens is None:
        if cp_group is not None and cp_group.size() > 1:
            raise ValueError("context parallelism needs packed rows; pass cu_seqlens")
        out = padded_attention(query, key, value, scale=scale, window=sliding_window, extras=extras)
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
        extras=extras,
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
    module: nn.Module, mask: Tensor | None, dropout: float, extras: dict[str, Any]
) -> None:
    """Raise ConfigError if the layer needs more than causal attention.

    A `mask` of any shape, such as [B, 1, S, S], is refused.
    """
    unsupported = [
        name for name in ("position_bias", "block_indices") if extras.get(name) is not None
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
