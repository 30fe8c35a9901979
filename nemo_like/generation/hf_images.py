"""Prompts with images in decoding: features of the vision tower in the place of image tokens.

The tower computes an image once, also if several completions of a prompt or several batches in
succession have it. The composite forward of transformers is not used, because it would take image
tokens that were sampled for further images.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from nemo_like.data.image_patches import PatchCache, check_unchanged, normalize
from nemo_like.data.image_tokens import rope_positions
from nemo_like.data.images import RowImage
from nemo_like.models.vision import ImageSettings, VisionSpec
from nemo_like.weight_sync.channel import plan_buckets

_MAX_PATCHES = 16384
"""Patches of one call of the tower, more only for one image; limits its memory."""


class PlacedImages(NamedTuple):
    """Features of the images of left-padded texts, and where they go."""

    positions: Tensor
    """int64 [3, b, n]: positions of the tokens in time, height and width."""
    places: Tensor
    """int64 [F]: ascending places of image tokens among all b x n tokens."""
    features: Sequence[Tensor]
    """[F, D] each: those of the last layer, then those added in the first layers of the language
    model, in their order."""


class ImageTower:
    """Computes features of images with the tower of a composite model, and runs the model."""

    def __init__(
        self,
        model: PreTrainedModel,
        spec: VisionSpec,
        settings: ImageSettings,
        device: torch.device,
    ) -> None:
        self._model: Any = model
        self._spec = spec
        self._settings = settings
        self._device = device
        self._patches = PatchCache(spec, settings)
        self._features: dict[str, list[Tensor]] = {}
        """By hash, of the images of the last batch; see `PlacedImages.features`."""

    @classmethod
    def open(
        cls,
        model: PreTrainedModel,
        directory: str,
        device: torch.device,
        *,
        min_pixels: int | None,
        max_pixels: int | None,
    ) -> ImageTower | None:
        """Read the image processor of a model; None for one without a tower."""
        spec = VisionSpec.of_composite(model.config, directory)
        if spec is None:
            return None
        settings = ImageSettings.load(
            Path(directory), spec, min_pixels=min_pixels, max_pixels=max_pixels
        )
        return cls(model, spec, settings, device)

    def forget(self) -> None:
        """Forget all features: the weights have changed, or move to host memory."""
        self._features = {}

    def place(
        self, texts: Sequence[np.ndarray], images: Sequence[Sequence[RowImage]], length: int
    ) -> PlacedImages:
        """Compute the images of b texts, int32 [L] each, which are left-padded to `length`.

        Raises ConfigError for an image that cannot be read, or is another than the one that was
        encoded.
        """
        positions = np.zeros((3, len(texts), length), dtype=np.int64)
        places = [np.empty(0, dtype=np.int64)]
        for slot, (text, own) in enumerate(zip(texts, images, strict=True)):
            start = length - len(text)
            grids = np.array([image.grid for image in own], dtype=np.int64).reshape(-1, 3)
            positions[:, slot, start:] = rope_positions(
                text, grids, self._spec.image_token_id, self._spec.merge_size
            )
            first = slot * length + start
            places += [np.arange(first + image.start, first + image.end) for image in own]
        parts = self._compute([image for own in images for image in own])
        return PlacedImages(
            torch.from_numpy(positions).to(self._device),
            torch.from_numpy(np.concatenate(places)).to(self._device),
            [torch.cat(layer) for layer in zip(*parts, strict=True)],
        )

    def logits(self, input_ids: Tensor, placed: PlacedImages | None, **options: Any) -> Tensor:
        """Return the logits [b, V] after the last of the tokens int64 [b, n].

        `options` are arguments of the language model. `placed` are the images of a prompt; None for
        the tokens behind it.
        """
        language = self._model.model.language_model
        embeddings = language.get_input_embeddings()(input_ids)
        if placed is not None and placed.features:
            last, *deep = (each.to(embeddings.dtype) for each in placed.features)
            flat = embeddings.flatten(0, 1).index_copy(0, placed.places, last)
            embeddings = flat.view_as(embeddings)
            if deep:
                mask = torch.zeros_like(input_ids, dtype=torch.bool)
                mask.view(-1).index_fill_(0, placed.places, True)
                options |= {"visual_pos_masks": mask, "deepstack_visual_embeds": deep}
        hidden = language(inputs_embeds=embeddings, **options).last_hidden_state
        return self._model.lm_head(hidden[:, -1])

    def _compute(self, images: Sequence[RowImage]) -> list[list[Tensor]]:
        """Return the features of each image, [F, D] per layer."""
        unique = self._patches.load([image.image for image in images])
        grids = np.zeros((len(unique.patches), 3), dtype=np.int64)
        for image, number in zip(images, unique.numbers, strict=True):
            check_unchanged(image, unique.patches[number])
            grids[number] = image.grid
        known = self._features
        self._features = {each: known[each] for each in unique.digests if each in known}
        new = [index for index, each in enumerate(unique.digests) if each not in known]
        for group in plan_buckets([len(unique.patches[index]) for index in new], _MAX_PATCHES):
            members = new[group.start : group.stop]
            patches = [unique.patches[index] for index in members]
            layers = self._tower(np.concatenate(patches), grids[members])
            for index, *features in zip(members, *layers, strict=True):
                self._features[unique.digests[index]] = features
        return [self._features[unique.digests[number]] for number in unique.numbers]

    def _tower(self, patches: np.ndarray, grids: np.ndarray) -> list[Sequence[Tensor]]:
        """Return the features of images by layer, [F, D] for each image.

        `patches` are uint8 [N, ...], `grids` int64 [n, 3].
        """
        tower = self._model.model.visual
        pixels = normalize(
            torch.from_numpy(patches).to(self._device),
            self._settings,
            self._spec.temporal_patch_size,
        )
        output = tower(
            pixels.to(tower.dtype),
            grid_thw=torch.from_numpy(grids).to(self._device),
            return_dict=True,
        )
        layers = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
        counts = self._spec.image_tokens(grids).tolist()
        return [layer.split(counts) for layer in layers]
