"""What the driver sends to a generation worker for prompts with images."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np

from nemo_like.data.images import ImageRef
from nemo_like.data.jagged import Jagged
from nemo_like.generation.requests import GenerationRequests
from tests.generation.test_hf_images import GREEDY, prompt

SIZE = 64


def message_bytes(requests: GenerationRequests) -> int:
    """Length of a message to a replica in another process."""
    message = pickle.dumps(requests.take(np.arange(len(requests))))
    assert pickle.loads(message).images == list(requests.images)
    return len(message)


def test_messages_have_encoded_bytes_or_paths_once_and_no_pixels(tmp_path: Path) -> None:
    """An image of 64x64 has 12,288 bytes of pixels, 98,304 as two frames in float32."""
    ids, (image,) = prompt(["", "?"], [(SIZE, SIZE)])
    encoded = image.image.data
    assert encoded is not None
    path = tmp_path / "image.png"
    path.write_bytes(encoded)
    rows = Jagged.from_rows([ids] * 8, np.int32)
    seeds = np.zeros(8, np.uint64)
    others = 8 * ids.nbytes + 3000
    for ref, size in ((image.image, len(encoded)), (ImageRef(str(path)), len(str(path)))):
        images = [(image._replace(image=ref),)] * 8
        requests = GenerationRequests(np.arange(8), rows, seeds, GREEDY, 512, images)
        assert size < message_bytes(requests) < size + others
