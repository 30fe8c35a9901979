"""The variable-length attention kernel of a CUDA device: FlashAttention 3, flash-attn 2 or torch's.

Each is called in one way, with the keywords that its installed release has.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import attention as torch_attention
from torch.nn.attention.varlen import varlen_attn

from nemo_like.policy.segment_attention import Spans, shares_kv_heads
from nemo_like.policy.torch_features import keyword_names

logger = logging.getLogger(__name__)

_HOPPER = (9, 0)
"""Compute capability; FlashAttention 3 has kernels for no other."""


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
    is_fa3: bool = False

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
    ) -> Tensor:
        """Return [T_q, H, D] from `q` [T_q, H, D] and `k`, `v` [T_k, H_kv, D]."""
        # All kernels align the ends of queries and keys. Their window is the number of positions
        # before the token itself, -1 for all of them.
        left = -1 if window is None else window - 1
        window_size = (left, 0 if causal else left)
        options: dict[str, Any] = {"window_size": window_size}
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
            # FlashAttention 3 splits the keys by the longest row of the batch, so that a row would
            # depend on the others. FlashAttention 2 splits them only for single queries, and some
            # releases refuse the keyword with it.
            if self.is_fa3 and "num_splits" in self.keywords:
                options["num_splits"] = 1
        out = self.function(q, k, v, *spans, **options)
        # torch returns a tuple only with auxiliary outputs.
        assert isinstance(out, Tensor)
        return out

    @classmethod
    def of_torch(cls, function: Callable[..., Any], *, is_fa3: bool) -> VarlenKernel:
        """Return the kernel behind a function with the parameters of torch's `varlen_attn`."""
        name = "FlashAttention 3" if is_fa3 else "torch.nn.attention.varlen (FlashAttention 2)"
        return cls(name, function, False, keyword_names(function), is_fa3)

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
        _chosen = _choose()
        logger.info("attention of packed rows on CUDA: %s", _chosen.name)
    return _chosen


def _choose() -> VarlenKernel:
    if _activate_fa3():
        return VarlenKernel.of_torch(varlen_attn, is_fa3=True)
    try:
        from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]
    except ImportError:
        return VarlenKernel.of_torch(varlen_attn, is_fa3=False)
    return VarlenKernel.of_flash_attn(flash_attn_varlen_func)


def _activate_fa3() -> bool:
    """Have torch use FlashAttention 3, and return True, where device and package allow it."""
    if importlib.util.find_spec("flash_attn_interface") is None:
        return False
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != _HOPPER:
        return False
    try:
        torch_attention.activate_flash_attention_impl("FA3")
    # A build of another torch fails in many ways; the other kernels compute the same.
    except Exception as error:  # noqa: BLE001
        logger.warning(
            "flash_attn_interface is installed, but torch cannot use its FlashAttention 3 (%s:"
            " %s); another kernel is used",
            type(error).__name__,
            error,
        )
        return False
    return True
