"""The vision tower of a composite model: sizes, image tokens of a picture, work and memory.

A tower (Qwen2.5-VL, Qwen3-VL) computes patches of `patch_size` pixels a side. `merge_size` times
`merge_size` patches become one image token of the language model. Grids are int64 [n, 3]: frames,
rows and columns of patches per image; an image has one frame.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nemo_like.config.errors import ConfigError, shown_path
from nemo_like.models.config_fields import ConfigFields

_IS_GATED = {"qwen2_5_vl": True, "qwen3_vl": False}
"""Model types with such a tower -> its feed-forward blocks have a gate."""
VISION_TYPES = tuple(_IS_GATED)
"""Model types that are trained with images."""
_MAX_ASPECT_RATIO = 200
"""Limit of the image processor."""
PROCESSOR_FILE = "preprocessor_config.json"
_BICUBIC = 3
_STEPS = {
    "do_resize": True,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "do_convert_rgb": True,
    "resample": _BICUBIC,
}
"""Settings of an image processor that are not read: only these values are supported."""


@dataclass(frozen=True, kw_only=True)
class VisionSpec:
    """Sizes of a vision tower, with the names of Hugging Face's configurations."""

    model_type: str
    """Model type of the composite model."""
    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    """Width of an image token, the hidden size of the language model."""
    patch_size: int
    temporal_patch_size: int
    """Frames of a patch; an image has equal ones."""
    merge_size: int
    window: int | None
    """Rows and columns of patches of a window; None if all layers attend to the complete image."""
    num_full_layers: int
    """Layers that attend to the complete image."""
    num_deepstack: int
    """Layers whose features are added in the language model's first layers as well."""
    num_positions: int
    """Learned positions of patches; 0 without."""
    image_token_id: int
    is_tied: bool
    """The language model's input embedding is its output projection."""

    @classmethod
    def from_config(cls, config: Any, name: str = "") -> VisionSpec:
        """Read the configuration of a composite model: a mapping, or an object.

        Raises ConfigError for a model type without such a tower and for a missing size.
        """
        values = config
        if not isinstance(config, Mapping):
            values = {**vars(config), "model_type": config.model_type}
        model_type = values.get("model_type")
        if model_type not in _IS_GATED:
            types = " and ".join(_IS_GATED)
            raise ConfigError(
                f"{name or 'the model'} is of type {model_type}, which cannot be trained with"
                f" images; use a model of type {types}"
            )
        fields = ConfigFields(values["vision_config"], name)
        depth = fields.size("depth")
        patch_size = fields.size("patch_size")
        merge_size = fields.size("spatial_merge_size")
        window = fields.get("window_size", default=None)
        full_layers = fields.get("fullatt_block_indexes", default=range(depth))
        return cls(
            model_type=model_type,
            depth=depth,
            hidden_size=fields.size("hidden_size"),
            intermediate_size=fields.size("intermediate_size"),
            num_heads=fields.size("num_heads"),
            out_hidden_size=fields.size("out_hidden_size"),
            patch_size=patch_size,
            temporal_patch_size=fields.size("temporal_patch_size"),
            merge_size=merge_size,
            # Windows have complete image tokens.
            window=None if window is None else window // patch_size // merge_size * merge_size,
            num_full_layers=len(full_layers),
            num_deepstack=len(fields.get("deepstack_visual_indexes", default=())),
            num_positions=fields.get("num_position_embeddings", default=0),
            image_token_id=values["image_token_id"],
            is_tied=bool(values.get("tie_word_embeddings")),
        )

    @classmethod
    def of_composite(cls, config: Any, name: str = "") -> VisionSpec | None:
        """Return the tower of a configuration, see `from_config`; None of another model type."""
        is_mapping = isinstance(config, Mapping)
        model_type = config.get("model_type") if is_mapping else getattr(config, "model_type", None)
        return cls.from_config(config, name) if model_type in VISION_TYPES else None

    @property
    def num_mlp_matrices(self) -> int:
        """3 for a gated feed-forward block (gate, up, down), else 2."""
        return 3 if _IS_GATED[self.model_type] else 2

    @property
    def num_params(self) -> int:
        """All parameters of the tower."""
        hidden, inner = self.hidden_size, self.intermediate_size
        biases = 5 * hidden + (2 * inner if _IS_GATED[self.model_type] else inner)
        layer = hidden * (4 * hidden + self.num_mlp_matrices * inner) + biases
        layer += 2 * self._norm_params
        return self.root_params + self.depth * layer

    @property
    def _norm_params(self) -> int:
        """RMSNorm has a weight, LayerNorm a bias as well."""
        return self.hidden_size * (1 if _IS_GATED[self.model_type] else 2)

    @property
    def projector_params(self) -> int:
        """Parameters that merge patches to image tokens, also those of `deepstack`."""
        merged = self.merge_size**2 * self.hidden_size
        merger = merged * (merged + 1) + (merged + 1) * self.out_hidden_size
        # Those of `deepstack` normalize merged patches.
        deep = self.num_deepstack * (merger + self.merge_size**2 * self._norm_params)
        return merger + self._norm_params + deep

    @property
    def root_params(self) -> int:
        """Parameters outside of the repeated blocks."""
        patch = 3 * self.temporal_patch_size * self.patch_size**2 * self.hidden_size
        if not _IS_GATED[self.model_type]:
            patch += self.hidden_size
        return patch + self.num_positions * self.hidden_size + self.projector_params

    @property
    def patch_bytes(self) -> int:
        """Bytes of the pixels of an image token on a device: 8 bits, and normalized in float32."""
        pixels = 3 * (self.merge_size * self.patch_size) ** 2
        return pixels * (1 + 4 * self.temporal_patch_size)

    def image_tokens(self, grids: np.ndarray) -> np.ndarray:
        """Return the image tokens of each image, int64 [n]."""
        return grids.prod(axis=1) // self.merge_size**2

    def flops(self, grids: np.ndarray) -> np.ndarray:
        """Return the forward FLOPs of each image, float64 [n]: products and attention.

        With h, d the hidden size and depth, P the patches and S the sum of the squares of the
        patches of each window, it is `a P + 4 h (full P^2 + (d - full) S)`.
        """
        hidden = self.hidden_size
        merged = self.merge_size**2 * hidden
        patch = 3 * self.temporal_patch_size * self.patch_size**2
        merger = merged * (merged + self.out_hidden_size) // self.merge_size**2
        layer = hidden * (4 * hidden + self.num_mlp_matrices * self.intermediate_size)
        per_patch = patch * hidden + self.depth * layer + (1 + self.num_deepstack) * merger
        frames, rows, columns = grids.astype(np.float64).T
        full = (rows * columns) ** 2
        windowed = _squares(rows, self.window) * _squares(columns, self.window)
        pairs = self.num_full_layers * full + (self.depth - self.num_full_layers) * windowed
        return frames * (2.0 * per_patch * rows * columns + 4.0 * hidden * pairs)

    def saved_bytes(self, *, itemsize: int = 2, recomputed: bool = False) -> float:
        """Return the bytes that the backward pass of a trained tower needs per image token.

        `recomputed`: with activation checkpointing of each layer, which keeps its input. Otherwise
        each layer keeps the inputs of norms and of products, queries and keys with and without
        rotation, values and output of attention, and the inputs of the activation function.
        """
        hidden = self.hidden_size
        layer = itemsize * hidden
        if not recomputed:
            is_gated = _IS_GATED[self.model_type]
            # RMSNorm saves its input in float32 and the normalized values, LayerNorm its input.
            norms = 2 * ((4 + itemsize) * hidden + 4 if is_gated else itemsize * hidden + 8)
            attention = 7 * itemsize * hidden + 4 * self.num_heads
            inner = (4 if is_gated else 2) * self.intermediate_size
            layer = norms + attention + itemsize * (hidden + inner)
        return float(self.merge_size**2 * self.depth * layer)


def _squares(lengths: np.ndarray, window: int | None) -> np.ndarray:
    """Return the sum of the squares of the parts that windows cut `lengths` [n] into."""
    if window is None:
        return lengths**2
    return lengths // window * window**2 + (lengths % window) ** 2


def planner_sizes(lengths: np.ndarray, image_tokens: np.ndarray, weight: float) -> np.ndarray:
    """Return the size of each row for a limit on tokens, int64 [B]: `lengths + weight * images`.

    `weight` is the activation memory of the tower per image token over that of the language model
    per token; 0 for a frozen tower, which keeps none. Rounded up. Example: 100 tokens, 60 of them
    of images, with a weight of 1.5 have size 190.
    """
    return lengths + np.ceil(weight * image_tokens).astype(np.int64)


def unshared_images(
    image_tokens: np.ndarray, lengths: np.ndarray, shared: np.ndarray
) -> np.ndarray:
    """Return at most how many image tokens a row adds to rows that compute its first tokens.

    All arrays are int64 [B]: of rows of `lengths`, `shared` leading tokens are computed by others.
    Images are in the prompt, so that this is few where a prompt is shared.
    """
    return np.minimum(image_tokens, lengths - shared)


@dataclass(frozen=True, kw_only=True)
class ImageSettings:
    """Settings of an image processor: sizes of resized images, and their normalization."""

    min_pixels: int
    max_pixels: int
    factor: int
    """Sides of a resized image are multiples of it: patch size times merge size."""
    mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)
    """Per channel, of values between 0 and 1."""
    std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)

    def __post_init__(self) -> None:
        if not self.factor**2 <= self.max_pixels or not 0 < self.min_pixels <= self.max_pixels:
            raise ConfigError(
                f"min_pixels {self.min_pixels} and max_pixels {self.max_pixels} of images do not"
                f" fit: min_pixels is above 0 and at most max_pixels, and max_pixels at least"
                f" {self.factor**2}, the pixels of one image token"
            )

    @classmethod
    def of_sizes(cls, spec: VisionSpec, max_tokens: int = 64) -> ImageSettings:
        """Return settings for images of 1 to `max_tokens` image tokens."""
        factor = spec.patch_size * spec.merge_size
        return cls(min_pixels=factor**2, max_pixels=max_tokens * factor**2, factor=factor)

    def save(self, directory: Path, spec: VisionSpec) -> None:
        """Write the file that `load` reads."""
        values = {
            "image_processor_type": "Qwen2VLImageProcessor",
            "min_pixels": self.min_pixels,
            "max_pixels": self.max_pixels,
            "image_mean": self.mean,
            "image_std": self.std,
            "patch_size": spec.patch_size,
            "temporal_patch_size": spec.temporal_patch_size,
            "merge_size": spec.merge_size,
        }
        (directory / PROCESSOR_FILE).write_text(json.dumps(values), encoding="utf-8")

    @classmethod
    def load(
        cls,
        directory: Path,
        spec: VisionSpec,
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
    ) -> ImageSettings:
        """Read the image processor of a model directory; the limits replace its own.

        A limit beyond the other one of the file replaces that as well.
        Raises ConfigError for a missing or unusable file.
        """
        path = directory / PROCESSOR_FILE
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            size = values.get("size") or {}
            own_min = values.get("min_pixels") or size["shortest_edge"]
            own_max = values.get("max_pixels") or size["longest_edge"]
            means = {name: tuple(values[f"image_{name}"]) for name in ("mean", "std")}
            sizes = ("patch_size", "temporal_patch_size", "merge_size")
            expected = _STEPS | {name: getattr(spec, name) for name in sizes}
            for name, value in expected.items():
                if values.get(name, value) != value:
                    raise ValueError(f"{name} is {values[name]}, and only {value} is supported")
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{shown_path(path)} is no usable configuration of an image processor"
                f" ({type(error).__name__}: {error}): copy the file from the original model"
            ) from error
        return cls(
            min_pixels=min_pixels or min(own_min, max_pixels or own_min),
            max_pixels=max_pixels or max(own_max, min_pixels or own_max),
            factor=spec.patch_size * spec.merge_size,
            **means,
        )

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Return width and height after resizing.

        Both are multiples of `factor`, the area is between the limits, and the ratio changes as
        little as possible (smart_resize of the image processor of Qwen2-VL in transformers).
        Raises ConfigError for a side that is more than 200 times the other.
        """
        ratio = max(width, height) / min(width, height)
        if ratio > _MAX_ASPECT_RATIO:
            raise ConfigError(
                f"its size is {width}x{height}, and one side may be {_MAX_ASPECT_RATIO} times the"
                f" other, not {ratio:.0f} times: crop or remove it"
            )
        sides = [round(side / self.factor) * self.factor for side in (width, height)]
        if math.prod(sides) > self.max_pixels:
            scale = math.sqrt(width * height / self.max_pixels)
            steps = [math.floor(side / scale / self.factor) for side in (width, height)]
            sides = [max(step, 1) * self.factor for step in steps]
        elif math.prod(sides) < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (width * height))
            steps = [math.ceil(side * scale / self.factor) for side in (width, height)]
            sides = [step * self.factor for step in steps]
        return sides[0], sides[1]

    def grid(self, width: int, height: int, patch_size: int) -> tuple[int, int, int]:
        """Return frames, rows and columns of the patches of an image; see `resized`."""
        resized_width, resized_height = self.resized(width, height)
        return 1, resized_height // patch_size, resized_width // patch_size
