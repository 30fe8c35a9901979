"""Prompts with images in the embedded generator, against `generate` of transformers."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor

from nemo_like.config.schema import VisionConfig
from nemo_like.data.images import ImageRef, RowImage
from nemo_like.data.jagged import Jagged
from nemo_like.distributed.local_group import local_context
from nemo_like.generation.hf_worker import HFGenerationWorker
from nemo_like.generation.requests import GenerationRequests, GenerationStart, SamplingParams
from nemo_like.weight_sync.channel import BucketMessage, ChannelSpec
from tests.generation.driven import generate
from tests.vision import FAMILIES, IMAGE_TOKEN, save_tiny_vision_model

GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0)


def picture(width: int, height: int, seed: int = 0) -> ImageRef:
    stream = io.BytesIO()
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(values).save(stream, "PNG")
    return ImageRef(data=stream.getvalue())


def prompt(texts: list[str], sizes: list[tuple[int, int]]) -> tuple[np.ndarray, list[RowImage]]:
    """Bytes of the texts with an image of multiples of 8 pixels between two of them."""
    ids = [7 + each for each in texts[0].encode()]
    images = []
    for text, (width, height) in zip(texts[1:], sizes, strict=True):
        count = width * height // 64
        grid = (1, height // 4, width // 4)
        images.append(RowImage(picture(width, height), grid, len(ids) + 1, count))
        ids += [3, *[IMAGE_TOKEN] * count, 4, *(7 + each for each in text.encode())]
    return np.array(ids, dtype=np.int32), images


PROMPTS = [
    prompt(["no image"], []),
    prompt(["an ", " image"], [(24, 16)]),
    prompt(["", ",", ",", "."], [(16, 16), (40, 24), (8, 16)]),
    # At the end of a prompt: the next position is behind the larger side.
    prompt(["what", ""], [(40, 16)]),
]


def pixels_of(directory: Path, images: list[RowImage]) -> dict[str, Any]:
    processor = AutoImageProcessor.from_pretrained(directory, use_fast=False)
    pictures = [Image.open(io.BytesIO(image.image.read())) for image in images]
    return dict(processor(images=pictures, return_tensors="pt")) if images else {}


def worker_of(model_type: str, directory: Path) -> tuple[HFGenerationWorker, Any]:
    model = save_tiny_vision_model(model_type, directory)
    model.generation_config.eos_token_id = None
    start = GenerationStart(model_name=str(directory), vision=VisionConfig(train="all"))
    return HFGenerationWorker(local_context(num_threads=1), start), model


def logprobs_after(
    model: Any, directory: Path, ids: np.ndarray, images: list[RowImage], sampled: np.ndarray
) -> torch.Tensor:
    """Log-probs of `sampled`, in one forward of the composite model."""
    tokens = torch.from_numpy(np.concatenate([ids, sampled]).astype(np.int64))[None]
    options = pixels_of(directory, images)
    if images:
        options["mm_token_type_ids"] = (tokens == IMAGE_TOKEN).int()
    with torch.no_grad():
        logits = model(input_ids=tokens, **options).logits[0, len(ids) - 1 : -1]
    return logits.log_softmax(-1).gather(1, tokens[0, len(ids) :, None])[:, 0]


def greedy_tokens(
    model: Any, directory: Path, ids: np.ndarray, images: list[RowImage]
) -> list[int]:
    """The 12 tokens of transformers' `generate`, or fewer with the end token 2."""
    tokens = torch.from_numpy(ids.astype(np.int64))[None]
    options = pixels_of(directory, images)
    if images:
        options["mm_token_type_ids"] = (tokens == IMAGE_TOKEN).int()
    row = model.generate(
        input_ids=tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=2,
        pad_token_id=0,
        **options,
    )[0]
    return row[len(ids) :].tolist()


@pytest.mark.parametrize("model_type", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, model_type: str) -> None:
    worker, model = worker_of(model_type, tmp_path)
    ids = Jagged.from_rows([each for each, _ in PROMPTS], np.int32)
    images = [own for _, own in PROMPTS]
    seeds = np.zeros(len(ids), dtype=np.uint64)
    result = generate(worker, ids, seeds, GREEDY, 128, images=images)
    for row, (own_ids, own) in enumerate(PROMPTS):
        assert result.token_ids[row].tolist() == greedy_tokens(model, tmp_path, own_ids, own)
        logprobs = logprobs_after(model, tmp_path, own_ids, own, result.token_ids[row])
        np.testing.assert_allclose(result.logprobs[row], logprobs, atol=1e-5)


def test_the_tower_computes_an_image_once(tmp_path: Path) -> None:
    """For the samples of a group, and for the next batch with the same image."""
    worker, _ = worker_of("qwen3_vl", tmp_path)
    worker.batch_size = 4
    patches: list[int] = []
    tower: Any = worker.model.model.visual
    tower.register_forward_hook(lambda module, arguments, output: patches.append(len(arguments[0])))
    ids, images = PROMPTS[2]
    rows = Jagged.from_rows([ids] * 6, np.int32)
    seeds = np.arange(6, dtype=np.uint64)
    result = generate(
        worker, rows, seeds, SamplingParams(max_new_tokens=3), 128, images=[images] * 6
    )
    assert len({tuple(row.tolist()) for row in result.token_ids}) > 1
    assert patches == [sum(each.num_tokens for each in images) * 4]


def test_equal_tokens_with_another_image_have_other_completions(tmp_path: Path) -> None:
    worker, model = worker_of("qwen2_5_vl", tmp_path)
    ids, (image,) = PROMPTS[1]
    images = [[image], [image._replace(image=picture(24, 16, seed=1))]]
    rows = Jagged.from_rows([ids] * 2, np.int32)
    result = generate(worker, rows, np.zeros(2, np.uint64), GREEDY, 128, images=images)
    for row, own in enumerate(images):
        logprobs = logprobs_after(model, tmp_path, ids, own, result.token_ids[row])
        np.testing.assert_allclose(result.logprobs[row], logprobs, atol=1e-5)
    assert abs(result.logprobs[0][0] - result.logprobs[1][0]) > 1e-3


@pytest.mark.parametrize("part", ["visual.", "language_model."])
def test_a_weight_update_recomputes_the_images_of_running_requests(
    tmp_path: Path, part: str
) -> None:
    worker, model = worker_of("qwen3_vl", tmp_path)
    ids, images = PROMPTS[2]
    sampling = SamplingParams(max_new_tokens=8, temperature=0.0)
    worker.submit(
        GenerationRequests(
            np.array([3]),
            Jagged.from_rows([ids], np.int32),
            np.zeros(1, np.uint64),
            sampling,
            128,
            [images],
        )
    )
    for _ in range(3):
        assert worker.poll(0.0).num_unfinished == 1
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if part in name:
            parameter.data += 0.1 * torch.randn_like(parameter)
    named = tuple((name, parameter.data) for name, parameter in model.named_parameters())
    spec = ChannelSpec(transport="in_process", layouts=(), slot_bytes=0, timeout_s=1.0)
    worker.open_weight_channel(spec, (0,))
    worker.begin_update([name for name, _ in named])
    worker.load_bucket(BucketMessage(0, named))
    worker.finish_update(version=1)
    result = worker.poll(10.0).completions
    assert result.weight_versions[0].tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    logprobs = logprobs_after(model, tmp_path, ids, images, result.token_ids[0])
    np.testing.assert_allclose(result.logprobs[0][3:], logprobs[3:], atol=1e-5)
