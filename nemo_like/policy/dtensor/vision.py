"""Forward of packed rows with images through a composite model of transformers.

The tower computes the features of the unique images. They replace the embeddings of the image
tokens, at places that the host knows, and the language model runs on embeddings. The composite
forward is not used: it takes `cu_seqlens` for the bounds of images, and finds image tokens on the
device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from nemo_like.models.vision import VISION_TYPES, VisionSpec
from nemo_like.policy.inputs import attention
from nemo_like.policy.inputs.images import VisionInputs

TOWER_IMPLEMENTATION = "nemo_like_vision"
"""The `attn_implementation` of vision towers."""


class _Segments(NamedTuple):
    """Bounds of attention in a tower: int32 [segments + 1], and the longest segment."""

    bounds: Tensor
    longest: int


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    segments: dict[bool, _Segments],
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Bidirectional attention of a tower's layer: `query` [1, H, N, D] -> ([1, N, H, D], None).

    All images are attended in one call; `segments` has images (False) and windows (True).
    """
    bounds, longest = segments[module.is_windowed]  # type: ignore[index]
    q, k, v = (heads.squeeze(0).transpose(0, 1) for heads in (query, key, value))
    out = attention.varlen_attention(q, k, v, bounds, longest, scale=scaling, causal=False)
    return out[None], None


class _PatchProjection(nn.Module):
    """The convolution of patches as a product: kernel and patch have the same size.

    In bfloat16 on CPU a convolution in three dimensions takes many times as long. The name of the
    weight stays.
    """

    def __init__(self, proj: nn.Conv3d) -> None:
        super().__init__()
        self.proj = proj

    def forward(self, patches: Tensor) -> Tensor:
        """Return the embeddings [N, D] of patches [N, patch size]."""
        weight = self.proj.weight.flatten(1)
        return F.linear(patches.to(weight.dtype), weight, self.proj.bias)


def _own_places(vision: VisionInputs, rank: int, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return the places of image tokens among the `num_tokens` of a rank: positions, features.

    The bounds are found on the host, because a search on the device waits for it.
    """
    first = rank * num_tokens
    assert vision.host_positions is not None, "inputs of `build_inputs` have them"
    start, stop = np.searchsorted(vision.host_positions, [first, first + num_tokens])
    return vision.positions[start:stop] - first, vision.features[start:stop]


def language_model(model: PreTrainedModel) -> Any:
    """Return the language model of a model without its output embedding."""
    backbone: Any = model.base_model
    return backbone.language_model if is_composite(model) else backbone


def is_composite(model: PreTrainedModel) -> bool:
    """Return True for a model with a vision tower that is trained with images."""
    return model.config.model_type in VISION_TYPES


def tower_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the repeated blocks of the tower in order; none of a language model."""
    tower: Any = model.base_model.visual if is_composite(model) else None
    return [] if tower is None else list(tower.blocks)


def frozen_names(model: PreTrainedModel, train: str) -> Iterator[str]:
    """Yield the names of the weights of the tower that `policy.vision.train` freezes."""
    for name, _ in model.named_parameters() if is_composite(model) else ():
        # The projector merges patches to image tokens, also those of `deepstack`.
        is_projector = "merger" in name
        if "visual." in name and (train == "frozen" or (train == "projector" and not is_projector)):
            yield name


def is_of_tower(name: str) -> bool:
    """Return whether a weight of this name is in the tower of a composite model."""
    return name.startswith("model.visual.")


def prepare(model: PreTrainedModel) -> None:
    """Set the attention of the tower and of the language model of a composite model."""
    attention.register()
    AttentionInterface.register(TOWER_IMPLEMENTATION, _attend)  # type: ignore[arg-type]
    implementations = {
        "text_config": attention.IMPLEMENTATION,
        "vision_config": TOWER_IMPLEMENTATION,
    }
    model.set_attn_implementation(implementations)
    tower: Any = model.model.visual
    tower.patch_embed = _PatchProjection(tower.patch_embed.proj)
    full_layers = getattr(tower, "fullatt_block_indexes", range(len(tower.blocks)))
    for index, block in enumerate(tower.blocks):
        block.attn.is_windowed = index not in full_layers


class Features(NamedTuple):
    """Features of images [F, D]."""

    last: Tensor
    deep: tuple[Tensor, ...]
    """Those that are added in the first layers of the language model, in their order."""


def image_features(model: PreTrainedModel, patches: Tensor, grids: Tensor) -> Features:
    """Compute the features of images, of patches [N, patch size] and `grids` [n, 3] on the CPU.

    Nothing is kept for a backward pass through a frozen tower.
    """
    tower: Any = model.model.visual
    arguments = _tower_arguments(tower, VisionSpec.from_config(model.config), grids, patches.device)
    is_trained = any(parameter.requires_grad for parameter in tower.parameters())
    with torch.set_grad_enabled(is_trained and torch.is_grad_enabled()):
        output = tower(patches, grid_thw=grids, return_dict=True, **arguments)
    return Features(output.pooler_output, tuple(getattr(output, "deepstack_features", None) or ()))


def _tower_arguments(
    tower: Any, spec: VisionSpec, grids: Tensor, device: torch.device
) -> dict[str, Any]:
    """Return what a tower would compute from `grids` on the device, where the host would wait.

    A tower calls its attention for each segment of its `cu_seqlens`: it gets one segment, and its
    attention the bounds of images and windows.
    """
    bounds = get_vision_cu_seqlens(grids)
    one_call = torch.tensor([0, int(bounds[-1])], dtype=torch.int32)
    segments = {False: _segments(bounds, device)}
    positions = get_vision_position_ids(grids, spec.merge_size)
    arguments: dict[str, Any] = {"cu_seqlens": one_call, "position_ids": positions.to(device)}
    if spec.window is not None:
        index, windows = get_vision_window_index(
            grids, spec.merge_size, spec.window * spec.patch_size, spec.patch_size
        )
        segments[True] = _segments(windows, device)
        arguments |= {"window_index": index.to(device), "cu_window_seqlens": one_call}
    if hasattr(tower, "num_grid_per_side"):
        indices, weights = get_vision_interpolation_indices_and_weights(
            grids,
            num_grid_per_side=tower.num_grid_per_side,
            mode=tower.interpolation_mode,
            align_corners=tower.interpolation_align_corners,
            spatial_merge_size=spec.merge_size,
        )
        arguments |= {"interp_indices": indices.to(device), "interp_weights": weights.to(device)}
    return arguments | {"segments": segments}


def _segments(bounds: Tensor, device: torch.device) -> _Segments:
    return _Segments(bounds.to(device, torch.int32), int(bounds.diff().max()))


def hidden_states(
    model: PreTrainedModel,
    input_ids: Tensor,
    position_ids: Tensor,
    vision: VisionInputs | None,
    sequence_rank: int | None = None,
    **bounds: Any,
) -> Tensor:
    """Return the last hidden states [1, T, D] of packed rows `input_ids` [1, T].

    `position_ids`, int64 [3, 1, T], are those of `image_tokens.rope_positions` per row; `bounds`
    are the arguments of `attention_forward`. `vision` is None for rows without images. With
    sequence parallelism rank `sequence_rank` has the hidden states [1, T / tp, D] of its tokens.
    """
    language = language_model(model)
    embeddings = language.get_input_embeddings()(input_ids)
    options: dict[str, Any] = {}
    if vision is not None:
        positions, features = vision.positions, vision.features
        if sequence_rank is not None:
            positions, features = _own_places(vision, sequence_rank, embeddings.shape[1])
        last, deep = image_features(model, vision.patches, vision.grids)
        taken = last.index_select(0, features).to(embeddings.dtype)
        embeddings = embeddings[0].index_copy(0, positions, taken)[None]
        if deep:
            mask = torch.zeros(embeddings.shape[:2], dtype=torch.bool, device=positions.device)
            options["visual_pos_masks"] = mask.index_fill_(1, positions, True)
            options["deepstack_visual_embeds"] = [each.index_select(0, features) for each in deep]
    output = language(
        inputs_embeds=embeddings, position_ids=position_ids, use_cache=False, **options, **bounds
    )
    return output.last_hidden_state
