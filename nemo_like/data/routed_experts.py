"""The token column `routed_experts`: the experts that the generator chose for each token and layer.

An entry is [layers, top-k], of the layers with experts in their order. It belongs to the position
of its own token, unlike other token columns, which are read at the position before. A token that
the generator never passed through the model, such as the last of a completion, has the largest
number of the data type.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

ROUTED_EXPERTS = "routed_experts"


def pack_experts(experts: np.ndarray, num_experts: int) -> np.ndarray:
    """Return `experts`, int [...] below `num_experts`, in the smallest type with an unused number.

    It is uint8 for up to 255 experts, else uint16.
    """
    return experts.astype(_dtype(num_experts))


def routed_bytes(num_experts: int) -> int:
    """Return the bytes of the number of one of `num_experts` experts."""
    return np.dtype(_dtype(num_experts)).itemsize


def _dtype(num_experts: int) -> type[np.unsignedinteger]:
    return np.uint8 if num_experts <= np.iinfo(np.uint8).max else np.uint16


def join_experts(parts: Sequence[np.ndarray], num_tokens: int) -> np.ndarray:
    """Concatenate the parts of a row, [n, layers, k] each, to [num_tokens, layers, k].

    Tokens after the parts have no experts.
    """
    known = np.concatenate(parts)
    result = np.full((num_tokens, *known.shape[1:]), np.iinfo(known.dtype).max, known.dtype)
    result[: len(known)] = known
    return result


def signed_experts(experts: np.ndarray) -> np.ndarray:
    """Return unsigned `experts` [...] as int16 [...], -1 for tokens without experts."""
    return np.where(experts == np.iinfo(experts.dtype).max, -1, experts.astype(np.int16))
