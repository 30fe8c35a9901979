"""Entry point of an encoding process: `python -m nemo_like.algorithms.encoding_worker`.

`data.encoding_pool` starts it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from nemo_like.algorithms.registry import ALGORITHMS
from nemo_like.config.generation import GenerationConfig
from nemo_like.config.schema import DataConfig, PolicyConfig, RunConfig
from nemo_like.data.collate import EncodedRow
from nemo_like.data.datasets import Row
from nemo_like.data.encoded_rows import encode_row
from nemo_like.data.encoding_pool import serve
from nemo_like.models.pretrained import import_transformers_without_torch
from nemo_like.training.model_files import open_encoder


def open_encode(setup: dict[str, Any]) -> Callable[[Row], tuple[EncodedRow | None, str | None]]:
    """Return the encoding of one row, as `encoding.encoding_setup` describes it."""
    # torch is not needed for a tokenizer; its import takes seconds and memory in every process.
    import_transformers_without_torch()
    generation = GenerationConfig(max_new_tokens=setup["max_new_tokens"])
    policy = PolicyConfig(**setup["policy"], generation=generation)
    config = RunConfig(run_name="encoding", policy=policy, data=DataConfig(**setup["data"]))
    encode = ALGORITHMS[setup["kind"]].import_data().encode_row
    # The driver has loaded the same files, so they are in the cache of this machine.
    encoder = open_encoder(config, setup["vocab_size"])
    return partial(encode_row, partial(encode, encoder, config))


if __name__ == "__main__":
    serve(open_encode)
