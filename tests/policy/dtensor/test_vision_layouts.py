"""Rows with images on several ranks: the gradient is that of plain transformers, row by row."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from nemo_like.config.schema import (
    AdapterConfig,
    ParallelConfig,
    PolicyConfig,
    SequencePackingConfig,
    VisionConfig,
)
from nemo_like.data.images import ImageRef, RowImage
from nemo_like.data.jagged import EncodedRow, collate
from nemo_like.distributed import process_groups
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.policy.batching import plan_spec
from nemo_like.policy.dtensor.parameters import local_shard
from tests.exhaustive import usually
from tests.policy.dtensor.test_layouts import Rank, gradients
from tests.policy.planned import planned
from tests.policy.tiny import context, relative_error, run_ranks
from tests.vision import FAMILIES, IMAGE_TOKEN, save_tiny_vision_model, true_float64

TOLERANCE = {"float64": 1e-10, "float64, shared": 1e-10}
"""Of each part of `program`; the others are float32."""
FLOAT32 = 1e-5
CONFIG = PolicyConfig(
    model_name="",
    train_global_batch_size=9,
    logprob_chunk_size=16,
    shared_prefix=False,
    sequence_packing=SequencePackingConfig(enabled=True, train_mb_tokens=24),
    vision=VisionConfig(train="all"),
)
LORA = AdapterConfig(enabled=True, rank=3, alpha=6, target_modules=("gate_proj", "o_proj"))
"""Names of layers that a tower has as well."""
SHARED = dataclasses.replace(CONFIG, shared_prefix=True)
GRIDS = ((4, 6), (2, 2), (6, 4), (4, 4))
"""Rows and columns of the patches of each picture; four patches are an image token."""
IMAGES = ((), (0,), (1, 2, 1), (), (3,), (3,), (), (), (0,))
"""Pictures of each row."""
GROUP = (4, 5)
"""Rows with the same prompt."""
LAYOUTS = {
    "dp 2": (2, ParallelConfig()),
    "cp 2": (2, ParallelConfig(context=2)),
    "cp 4": (4, ParallelConfig(context=4)),
    "dp 2 x cp 2": (4, ParallelConfig(context=2)),
    "tp 2": (2, ParallelConfig(tensor=2)),
    "tp 2, sequence": (2, ParallelConfig(tensor=2, sequence=True)),
    "dp 2 x tp 2, sequence": (4, ParallelConfig(tensor=2, sequence=True)),
}


def rows() -> list[EncodedRow]:
    rng = np.random.default_rng(0)
    files = []
    for height, width in GRIDS:
        pixels = rng.integers(0, 256, (4 * height, 4 * width, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG")
        files.append(ImageRef(data=file.getvalue()))
    made = []
    prompt = rng.integers(7, 60, 4)
    for row, pictures in enumerate(IMAGES):
        parts = [prompt if row in GROUP else rng.integers(7, 60, rng.integers(2, 9))]
        images = []
        for picture in pictures:
            height, width = GRIDS[picture]
            start, size = sum(map(len, parts)), height * width // 4
            images.append(RowImage(files[picture], (1, height, width), start, size))
            parts += [np.full(size, IMAGE_TOKEN), np.array([9, 8, 7])]
        if row == 0:
            # A sampled image token is a token like any other.
            parts.append(np.array([IMAGE_TOKEN]))
        num_prompt = sum(map(len, parts))
        parts.append(rng.integers(7, 60, rng.integers(3, 9)))
        ids = np.concatenate(parts).astype(np.int32)
        mask = (np.arange(len(ids)) >= num_prompt).astype(np.uint8)
        made.append(EncodedRow(ids, mask, tuple(images)))
    return made


def batch() -> BatchedDataDict:
    columns = collate(rows())
    return BatchedDataDict({**columns, "group": np.array([0, 1, 2, 3, 4, 4, 6, 7, 8])})


@true_float64()
def expected_gradients(model_dir: str) -> dict[str, torch.Tensor]:
    """Gradients of plain transformers in float64, row by row."""
    model = AutoModelForImageTextToText.from_pretrained(model_dir, dtype=torch.float64)
    processor = AutoImageProcessor.from_pretrained(model_dir, use_fast=False)
    num_trained = sum(row.num_trained for row in rows())
    for row in rows():
        ids = torch.from_numpy(row.input_ids.astype(np.int64))[None]
        options: dict[str, Any] = {}
        if row.images:
            pictures = [Image.open(io.BytesIO(image.image.read())) for image in row.images]
            options = dict(processor(images=pictures, return_tensors="pt"))
            # The processor computes in float32: 2 v / 255 - 1 of the values v of the file.
            values = ((options["pixel_values"].double() + 1) * 127.5).round()
            options["pixel_values"] = 2 * values / 255 - 1
            options["mm_token_type_ids"] = (ids == IMAGE_TOKEN).int()
        logits = model(input_ids=ids, **options).logits[0]
        losses = F.cross_entropy(logits[:-1], ids[0, 1:], reduction="none")
        ((losses * torch.from_numpy(row.token_mask[1:])).sum() / num_trained).backward()
    return {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad
        for name, weight in model.named_parameters()
    }


def program(
    worker_context: WorkerContext, model: str, parallel: ParallelConfig
) -> dict[str, dict[str, np.ndarray]]:
    """Gradients of one step: complete rows, shared prefixes, parts of the tower, and adapters."""
    if worker_context.world_size > 1:
        process_groups.init_process_group(worker_context)
    try:
        rank = Rank(worker_context, parallel)
        worker = rank.worker(dataclasses.replace(CONFIG, model_name=model))
        found = {}
        for name, config in (("packed", CONFIG), ("shared", SHARED)):
            shard = rank.shard(config, batch())
            found[name] = gradients(worker, shard)[0]
        shard = rank.shard(CONFIG, batch())
        with true_float64():
            exact = rank.worker(dataclasses.replace(CONFIG, model_name=model))
            found["float64"] = gradients(exact, shard)[0]
            found["float64, shared"] = gradients(exact, rank.shard(SHARED, batch()))[0]
        for train in ("frozen", "projector"):
            config = dataclasses.replace(CONFIG, model_name=model, vision=VisionConfig(train=train))
            found[train] = gradients(rank.worker(config), shard)[0]
        config = dataclasses.replace(CONFIG, model_name=model, vision=VisionConfig(), lora=LORA)
        with true_float64():
            with_lora = rank.worker(config)
            found["lora"] = gradients(with_lora, shard)[0]
        engine: Any = with_lora.engine
        found["lora weights"] = {
            each.name: each.gather_full(local_shard(each.parameter)).numpy()
            for each in engine.trained
        }
        return found
    finally:
        if worker_context.world_size > 1:
            process_groups.destroy()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, Any]]:
    """Directory and expected gradients of each family."""
    made = {}
    for model_type in FAMILIES:
        directory = tmp_path_factory.mktemp(model_type)
        # Files in float32 cannot be read under `true_float64`.
        save_tiny_vision_model(model_type, directory).double().save_pretrained(directory)
        made[model_type] = (str(directory), expected_gradients(str(directory)))
    return made


def assert_gradients(found: dict[str, dict[str, np.ndarray]], expected: Any) -> None:
    lora, weights = found.pop("lora"), found.pop("lora weights")
    layers = {name.removesuffix(".lora_A.weight") for name in weights if "lora_A" in name}
    assert len(layers) == 6 and all("language_model" in name for name in layers)
    assert {name for name in lora if "visual." in name and lora[name].any()} == set()
    for layer in layers:
        # B is 0: the gradient of W + 2 B A is that of W times A.
        right = torch.from_numpy(weights[f"{layer}.lora_A.weight"]).double()
        grad = 2 * expected[f"{layer}.weight"] @ right.T
        difference = torch.from_numpy(lora[f"{layer}.lora_B.weight"]) - grad
        assert difference.norm() < TOLERANCE["float64"] * grad.norm(), layer
    for name, values in found.items():
        tensors = {key: torch.from_numpy(value).double() for key, value in values.items()}
        frozen = {key for key in expected if "visual." in key and name in ("frozen", "projector")}
        if name == "projector":
            frozen -= {key for key in frozen if "merger" in key}
        zero = [key for key, value in expected.items() if key in frozen or not value.any()]
        for key in zero:
            assert not tensors.pop(key).any(), (name, key)
        wanted = {key: value for key, value in expected.items() if key not in zero}
        # The gradient of a key's bias is rounding alone: softmax does not depend on it.
        for key in list(wanted):
            if wanted[key].norm() < 1e-6:
                assert tensors.pop(key).norm() < 1e-5
                del wanted[key]
        assert relative_error(tensors, wanted) < TOLERANCE.get(name, FLOAT32), name


def test_two_ranks_have_microbatches_with_an_image_on_one_of_them_and_without_any() -> None:
    """What `dp 2` below computes."""
    spec = plan_spec(CONFIG, purpose="train", parallel_layout=ParallelLayout(dp=2), model=None)
    has_images = []
    for microbatches in zip(*planned(batch(), spec, False).ranks, strict=True):
        own = [any(IMAGES[row] for row in each.rows) for each in microbatches]
        has_images.append(own)
        assert [each.has_images for each in microbatches] == [any(own)] * 2
    assert {(True, False), (False, False)} <= {
        tuple(sorted(own, reverse=True)) for own in has_images
    }


@pytest.mark.parametrize("model_type", FAMILIES)
def test_one_rank_has_the_gradient_of_transformers(models, model_type: str) -> None:
    directory, expected = models[model_type]
    assert_gradients(program(context(), directory, ParallelConfig()), expected)


USUAL = ("dp 2 x cp 2, qwen3_vl", "tp 2, sequence, qwen2_5_vl")


@pytest.mark.parametrize(
    "case", usually([f"{layout}, {each}" for layout in LAYOUTS for each in FAMILIES], *USUAL)
)
def test_layouts_have_the_gradient_of_transformers(
    models, rank_pool, meeting: Path, case: str
) -> None:
    layout, _, model_type = case.rpartition(", ")
    world_size, parallel = LAYOUTS[layout]
    directory, expected = models[model_type]
    found = run_ranks(rank_pool, program, world_size, meeting, directory, parallel)
    assert_gradients(found[0], expected)
