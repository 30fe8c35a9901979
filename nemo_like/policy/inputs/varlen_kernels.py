"""The variable-length attention kernel of a CUDA device: FlashAttention 3 or 4, flash-attn 2 or
torch's own.

Each is called in one way, with the keywords that its installed release has.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import attention as torch_attention
from torch.nn.attention.varlen import varlen_attn

from nemo_like.config.errors import ConfigError
from nemo_like.policy.collectives import keyword_names
from nemo_like.policy.inputs.segment_attention import AttentionOptions, Spans, shares_kv_heads
from nemo_like.policy.inputs.sink_attention import SinkAttention, SinkCall

logger = logging.getLogger(__name__)

_IMPLEMENTATIONS = {9: ("FA3", "flash_attn_interface"), 10: ("FA4", "flash_attn.cute")}
"""Major compute capability -> (implementation in torch, its package): Hopper and Blackwell."""

_chosen: VarlenKernel | None = None
"""The kernel of this process; None before the first call of `varlen_kernel`."""


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
        self, q: Tensor, k: Tensor, v: Tensor, spans: Spans, options: AttentionOptions
    ) -> Tensor:
        """Return [T_q, H, E] from `q` [T_q, H, D], `k` [T_k, H_kv, D] and `v` [T_k, H_kv, E].

        Raises ConfigError for `options` that the kernel does not have.
        """
        if self.is_flash_attn and options.sinks is not None:
            # flash-attn's own function does not return the log-sum-exp with a gradient.
            return VarlenKernel.of_torch(varlen_attn)(q, k, v, spans, options)
        # All kernels align the ends of queries and keys. Their window is the number of positions
        # before the token itself, -1 for all of them.
        left = -1 if options.window is None else options.window - 1
        window_size = (left, 0 if options.causal else left)
        keywords: dict[str, Any] = self._keywords(options, shares_kv_heads(q.shape[1], k.shape[1]))
        # The kernels have one head size for queries, keys and values.
        value_size = v.shape[-1]
        if value_size < q.shape[-1]:
            v = nn.functional.pad(v, (0, q.shape[-1] - value_size))
        if options.sinks is not None:
            call = SinkCall(spans, options.scale, window_size, keywords)
            out = SinkAttention.apply(q, k, v, options.sinks, call)
        else:
            scale = "softmax_scale" if self.is_flash_attn else "scale"
            keywords[scale] = options.scale
            out = self.function(q, k, v, *spans, window_size=window_size, **keywords)
        # torch returns a tuple only with auxiliary outputs.
        assert isinstance(out, Tensor)
        return out if value_size == q.shape[-1] else out[..., :value_size]

    def _keywords(self, options: AttentionOptions, shares_kv_heads: bool) -> dict[str, Any]:
        """Return the arguments of the installed release, without scale and window.

        Raises ConfigError for a soft cap that the kernel does not have.
        """
        keywords: dict[str, Any] = {}
        if options.softcap is not None:
            if "softcap" not in self.keywords:
                raise ConfigError(
                    "policy.model_name has a soft cap of attention scores, which flash-attn 2 has;"
                    f" the attention kernel {self.name} cannot compute it: set"
                    " policy.precision=float32"
                )
            keywords["softcap"] = options.softcap
        if self.is_flash_attn:
            keywords["causal"] = options.causal
            if "deterministic" in self.keywords:
                keywords["deterministic"] = torch.are_deterministic_algorithms_enabled()
            return keywords
        # Releases without the keyword accept fewer key-value heads without it.
        if "enable_gqa" in self.keywords:
            keywords["enable_gqa"] = shares_kv_heads
        # FlashAttention 3 and 4 may split the keys by the longest row of the batch, so that a row
        # would depend on the others. FlashAttention 2 splits them only for single queries, and some
        # releases refuse the keyword with it.
        if self.implementation is not None and "num_splits" in self.keywords:
            keywords["num_splits"] = 1
        return keywords

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
