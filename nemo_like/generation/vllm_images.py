"""Prompts with images in the form that vLLM's engine takes behind its own preprocessing.

The engine gets the expanded token ids, 8-bit patches, a hash and a range of tokens for each image.
vLLM's public form, its key multi_modal_data, is not used: it resizes images with torchvision and
not as the policy does, expands the ids again, and takes image tokens that were sampled for images.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import VisionConfig
from nemo_like.data.image_patches import CHANNELS, PatchCache, check_unchanged
from nemo_like.data.images import RowImage
from nemo_like.generation.requests import GenerationRequests
from nemo_like.models.torchvision import torchvision_advice
from nemo_like.models.vision import ImageSettings, VisionSpec

if TYPE_CHECKING:
    from vllm.inputs.engine import DecoderOnlyEngineInput
    from vllm.multimodal.inputs import MultiModalKwargsItem

_MODALITY = "image"


class EngineImages:
    """Makes the engine's input of prompts for a model with a vision tower."""

    def __init__(self, spec: VisionSpec, settings: ImageSettings, *, tower_changes: bool) -> None:
        self._spec = spec
        self._settings = settings
        self._patches = PatchCache(spec, settings)
        self.tower_changes = tower_changes
        """Weight updates change the tower."""

    @classmethod
    def open(cls, model_config: Any, directory: str, config: VisionConfig) -> EngineImages | None:
        """Read the image processor of a model; None for one without a tower."""
        spec = VisionSpec.of_composite(model_config, directory)
        if spec is None:
            return None
        settings = ImageSettings.load(
            Path(directory), spec, min_pixels=config.min_pixels, max_pixels=config.max_pixels
        )
        return cls(spec, settings, tower_changes=config.train != "frozen")

    def engine_options(self) -> dict[str, Any]:
        """Return the options of the engine. Raises ConfigError if torchvision cannot be imported.

        vLLM imports it with the model, and reports in several screens that it failed.
        """
        try:
            importlib.import_module("torchvision")
        except Exception as error:
            raise ConfigError(torchvision_advice(str(error))) from error
        return {
            "limit_mm_per_prompt": {"video": 0},
            # It keeps processed images, and nothing is processed there.
            "mm_processor_cache_gb": 0,
            # Patches are 8-bit; float patches would be normalized a second time.
            "mm_device_do_normalize": True,
            # Memory is reserved for the largest image.
            "mm_processor_kwargs": {
                "min_pixels": self._settings.min_pixels,
                "max_pixels": self._settings.max_pixels,
            },
        }

    def engine_inputs(self, requests: GenerationRequests) -> list[DecoderOnlyEngineInput]:
        """Return the input of each request.

        Raises ConfigError for an image that cannot be read, or is another than the one that was
        encoded.
        """
        from vllm.inputs.engine import mm_input, tokens_input
        from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

        rows = requests.images_of_rows
        images = [image for row in rows for image in row]
        unique = self._patches.load([image.image for image in images])
        # One object for all completions of a prompt.
        items: dict[int, MultiModalKwargsItem] = {}
        for image, number in zip(images, unique.numbers, strict=True):
            check_unchanged(image, unique.patches[number])
            if number not in items:
                items[number] = self._item(unique.patches[number], image)
        numbers = iter(unique.numbers)
        inputs: list[DecoderOnlyEngineInput] = []
        for ids, row in zip(requests.prompt_ids, rows, strict=True):
            own = [next(numbers) for _ in row]
            if not own:
                inputs.append(tokens_input(ids.tolist()))
                continue
            ranges = [PlaceholderRange(offset=each.start, length=each.num_tokens) for each in row]
            inputs.append(
                mm_input(
                    ids.tolist(),
                    MultiModalKwargsItems({_MODALITY: [items[number] for number in own]}),
                    {_MODALITY: [unique.digests[number] for number in own]},
                    {_MODALITY: ranges},
                )
            )
        return inputs

    def _item(self, patches: np.ndarray, image: RowImage) -> MultiModalKwargsItem:
        """Return vLLM's form of an image with uint8 patches [N, 3 * patch_size^2]."""
        from vllm.multimodal.inputs import (
            MultiModalBatchedField,
            MultiModalFieldElem,
            MultiModalFlatField,
            MultiModalKwargsItem,
        )

        grid: Tensor = torch.tensor(image.grid)
        pixels = with_frames(torch.from_numpy(patches), self._spec.temporal_patch_size)
        elements = {
            "pixel_values": MultiModalFieldElem(pixels, MultiModalFlatField(slices=())),
            "image_grid_thw": MultiModalFieldElem(grid, MultiModalBatchedField(keep_on_cpu=True)),
        }
        return MultiModalKwargsItem(elements)


def with_frames(patches: Tensor, num_frames: int) -> Tensor:
    """Return patches uint8 [N, 3 * P] with equal frames, uint8 [N, 3 * num_frames * P]."""
    channels = patches.view(len(patches), CHANNELS, 1, -1)
    return channels.expand(-1, -1, num_frames, -1).flatten(1)


def keep_pixels() -> None:
    """Have vLLM, whose engine has started, give its workers the pixels of all images of a request.

    vLLM 0.32 leaves out those of an image whose tokens the prefix cache has. When the request is
    computed again, after a weight update or because the KV cache was full, its engine fails.
    """
    from vllm.v1.core.sched import output

    if not hasattr(output, "strip_covered_mm_data"):
        raise ConfigError(
            "this release of vLLM has another scheduler than 0.32, with which prompts with images"
            " were tested: install vllm==0.32.*, or set policy.generation.backend to hf"
        )
    output.strip_covered_mm_data = _unchanged  # pyright: ignore[reportPrivateImportUsage]


def _unchanged(mm_features: list[Any], *args: Any, **options: Any) -> list[Any]:
    return mm_features
