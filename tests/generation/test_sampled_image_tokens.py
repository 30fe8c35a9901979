"""Sampled image tokens: they are tokens like any other, in generation and in training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from nemo_like.data.jagged import Jagged
from tests.generation.driven import generate
from tests.generation.test_hf_images import GREEDY, PROMPTS, pixels_of, worker_of
from tests.vision import IMAGE_TOKEN


def test_log_probs_after_a_sampled_image_token_are_those_of_its_embedding(tmp_path: Path) -> None:
    worker, model = worker_of("qwen2_5_vl", tmp_path)
    ids, images = PROMPTS[2]
    with torch.no_grad():
        # Of two opposite logits one is the largest.
        for each in (worker.model, model):
            row = each.lm_head.weight[9].clone()
            each.lm_head.weight.zero_()
            each.lm_head.weight[9] = row
            each.lm_head.weight[IMAGE_TOKEN] = -row
    rows = Jagged.from_rows([ids], np.int32)
    result = generate(worker, rows, np.zeros(1, np.uint64), GREEDY, 128, images=[images])
    sampled = result.token_ids[0]
    assert set(sampled.tolist()) == {9, IMAGE_TOKEN}
    # By hand, because the composite forward takes every image token for an image.
    tokens = torch.from_numpy(np.concatenate([ids, sampled]).astype(np.int64))[None]
    is_image = (tokens == IMAGE_TOKEN) & (torch.arange(tokens.shape[1]) < len(ids))
    options = pixels_of(tmp_path, images)
    with torch.no_grad():
        grids = options["image_grid_thw"]
        features = model.model.visual(options["pixel_values"], grid_thw=grids).pooler_output
        embeddings = model.get_input_embeddings()(tokens)
        embeddings[is_image] = features
        positions, _ = model.model.get_rope_index(tokens, is_image.int(), image_grid_thw=grids)
        language = model.model.language_model
        hidden = language(inputs_embeds=embeddings, position_ids=positions).last_hidden_state
        logits = model.lm_head(hidden)[0, len(ids) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, tokens[0, len(ids) :, None])[:, 0]
    np.testing.assert_allclose(result.logprobs[0], expected, atol=1e-5)
