"""A chat template whose end of a turn is no token that the model declares, and that opens more than
a turn shows.
"""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from nemo_like.algorithms.grpo.data import open_source
from nemo_like.algorithms.run import open_training_run
from nemo_like.data.jagged import Jagged
from nemo_like.generation.requests import SamplingParams
from tests.recipe import Recipe

TEMPLATE = (
    "{% for message in messages %}{{ '<assistant>' if message.role == 'assistant' else '' }}{{"
    " message.content }}<user>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>0{% endif %}"
)


def test_a_run_knows_the_end_of_a_turn_and_reports_how_prompts_differ(
    recipe: Recipe, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE)
    config = recipe.grpo(f"policy.chat_template={path}")
    source = open_source(config)
    num_rows, sampling = 32, SamplingParams(max_new_tokens=24, temperature=2.0)
    with (
        caplog.at_level(logging.WARNING),
        open_training_run(
            config, source.data, source.loader(), num_steps=1, num_optimizer_steps=1
        ) as run,
    ):
        prompts = Jagged.from_rows(
            [source.data.encoder.encode_prompt([{"role": "user", "content": "1+1"}])] * num_rows,
            np.int32,
        )
        seeds = np.arange(num_rows, dtype=np.uint64)
        completions = run.workers.rollout.generator.generate(
            prompts, seeds, sampling, max_total_length=96
        )
    end = AutoTokenizer.from_pretrained(config.policy.model_name).convert_tokens_to_ids("<user>")
    ended = [ids for ids in completions.token_ids if end in ids]
    assert len(ended) > num_rows // 4
    assert all((ids == end).sum() == 1 and ids[-1] == end for ids in ended)
    reports = [
        record.message
        for record in caplog.records
        if "makes rollouts and SFT rows differ" in record.message
    ]
    assert len(reports) == 1
    assert "<assistant>0'" in reports[0]
