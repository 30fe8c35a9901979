"""Opens what rows with images need of a model, and refuses runs that cannot train with images."""

from __future__ import annotations

import json
from pathlib import Path

from nemo_like.config.check import padding_multiples
from nemo_like.config.errors import ConfigError
from nemo_like.config.needs import RunNeeds
from nemo_like.config.paths import model_directory
from nemo_like.config.schema import DataConfig, PolicyConfig
from nemo_like.data.image_encoding import ImageEncoder
from nemo_like.models.pretrained import import_transformers_without_torch, load_model_config
from nemo_like.models.vision import VISION_TYPES, ImageSettings, VisionSpec
from nemo_like.parallel_layout import ParallelLayout


def open_images(
    policy: PolicyConfig, data: DataConfig, *, without_torch: bool = False
) -> ImageEncoder | None:
    """Return what encodes the images of rows; None for a model without a vision tower.

    `without_torch` is as in `import_transformers_without_torch`. A model whose configuration
    cannot be read is left to `open_model_config`. Raises ConfigError for a missing or unusable
    configuration of its image processor.
    """
    name = policy.model_name
    try:
        directory = model_directory("policy.model_name", name, weights=False)
        values = json.loads((Path(directory) / "config.json").read_text(encoding="utf-8"))
        if values["model_type"] not in VISION_TYPES:
            return None
        if without_torch:
            import_transformers_without_torch()
        model_config = load_model_config(directory)
    except (ConfigError, OSError, ValueError, LookupError, TypeError):
        return None
    spec = VisionSpec.from_config(model_config, name)
    limits = policy.vision
    settings = ImageSettings.load(
        Path(directory), spec, min_pixels=limits.min_pixels, max_pixels=limits.max_pixels
    )
    root = None if data.image_root is None else Path(data.image_root).expanduser().absolute()
    return ImageEncoder(spec, settings, root)


def check_trains_images(
    policy: PolicyConfig, layout: ParallelLayout, needs: RunNeeds, model_type: str
) -> None:
    """Raise ConfigError for a run that cannot train a model with a vision tower."""
    subject = f"policy.model_name is {policy.model_name!r}, a model of type {model_type}"
    budget = policy.sequence_packing.train_mb_tokens
    multiples = padding_multiples(layout, policy.sequence_packing)
    longest = multiples.tokens_of_row(policy.max_total_sequence_length)
    longest *= needs.batch.rows_per_example
    refused = {
        "policy.engine=megatron": policy.engine != "dtensor",
        f"the job {needs.job}": not needs.trains_images,
        "programs (environment.kind=program)": (
            needs.rollouts is not None and needs.rollouts.environment.is_program
        ),
        f"policy.vision.train={policy.vision.train} and adapters (policy.lora.enabled=true): set"
        " policy.vision.train=frozen": (
            policy.adapter is not None and policy.vision.train != "frozen"
        ),
        "pipeline parallelism (parallel.pipeline)": layout.pp > 1,
        "padded rows: set policy.sequence_packing.enabled=true": (
            not policy.sequence_packing.enabled
        ),
        # The planner would cut a row inside of an image.
        f"rows cut to policy.sequence_packing.train_mb_tokens={budget}: set it to {longest} or"
        " more, or policy.max_total_sequence_length lower": (
            policy.oversize_rows == "truncate" and budget < longest
        ),
    }
    for text, is_refused in refused.items():
        if is_refused:
            raise ConfigError(
                f"{subject}: models with a vision tower are trained by sft, dpo and grpo, with"
                f" packed rows on the DTensor engine, not with {text}"
            )
