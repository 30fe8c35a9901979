"""What an encoding process runs: `python -m nemo_like.training.encoding_worker`, see
`data.encoding_pool`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from nemo_like.config.schema import DataConfig, GenerationConfig, PolicyConfig, RunConfig
from nemo_like.data.collate import EncodedRow
from nemo_like.data.datasets import Row
from nemo_like.data.encoded_rows import encode_row
from nemo_like.data.encoding_pool import serve
from nemo_like.models.pretrained import import_transformers_without_torch
from nemo_like.training.dataset import open_encoder
from nemo_like.training.encoding import encode_conversation, encode_question


def open_encode(setup: dict[str, Any]) -> Callable[[Row], tuple[EncodedRow | None, str | None]]:
    """The encoding that `encoding.encoding_setup` describes. The driver has checked the files, so
    they are read locally.
    """
    import_transformers_without_torch()
    generation = GenerationConfig(max_new_tokens=setup["max_new_tokens"])
    policy = PolicyConfig(**setup["policy"], generation=generation)
    config = RunConfig(run_name="encoding", policy=policy, data=DataConfig(**setup["data"]))
    encode = encode_question if setup["purpose"] == "rl" else encode_conversation
    return partial(encode_row, partial(encode, open_encoder(config, local_files_only=True), config))


if __name__ == "__main__":
    serve(open_encode)
