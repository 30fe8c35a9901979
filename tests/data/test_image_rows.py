"""Where the images of a row stand, in the forms of other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_like.config.errors import ConfigError
from nemo_like.data.image_rows import column_images, place_images
from nemo_like.data.known_rows import known_row

ROOT = Path("/data")
Row = dict[str, Any]


def placed(row: Row) -> tuple[list[Any], list[str]]:
    """The contents of the messages with `*` for an image, and the paths."""
    found = place_images(row["messages"], column_images(row), ROOT)
    contents = []
    for message in found.messages:
        content = message.get("content")
        if isinstance(content, list):
            content = [part["text"] if part["type"] == "text" else "*" for part in content]
        contents.append(content)
    return contents, [image.path for image in found.images]


def user(content: Any, **columns: Any) -> Row:
    return {"messages": [{"role": "user", "content": content}], **columns}


def test_parts_of_openai() -> None:
    parts = [
        {"type": "text", "text": "Compare "},
        {"type": "image_url", "image_url": {"url": "a.png", "detail": "low"}},
        {"type": "image", "image": "b.png"},
        {"type": "image", "path": "/c.png"},
        {"type": "image_url", "image_url": "d.png"},
    ]
    contents, paths = placed(user(parts))
    assert contents == [["Compare ", "*", "*", "*", "*"]]
    assert paths == ["/data/a.png", "/data/b.png", "/c.png", "/data/d.png"]
    # A data set of `datasets` has the parts as JSON texts.
    contents, paths = placed(user(['{"type": "image", "image": "a.png"}', "What?"]))
    assert (contents, paths) == ([["*", "What?"]], ["/data/a.png"])


def test_llava_sharegpt_and_llama_factory() -> None:
    turns = [
        {"from": "human", "value": "<image>\nWhat is this?"},
        {"from": "gpt", "value": "In HTML it is <image>."},
        {"from": "human", "value": "And <image> and <image>?"},
    ]
    row = known_row({"conversations": turns, "images": ["1.png", "2.png", "3.png"]}, {})
    contents, paths = placed(row)
    assert contents == [
        ["*", "\nWhat is this?"],
        "In HTML it is <image>.",
        ["And ", "*", " and ", "*", "?"],
    ]
    assert paths == ["/data/1.png", "/data/2.png", "/data/3.png"]
    row = known_row({"conversations": turns[:1], "image": "coco/1.png"}, {})
    assert placed(row) == ([["*", "\nWhat is this?"]], ["/data/coco/1.png"])


def test_images_of_a_column_precede_the_first_user_turn_in_trl() -> None:
    row = user("What?", images=[{"bytes": b"1", "path": "x"}, {"bytes": None, "path": "2.png"}])
    row["messages"].insert(0, {"role": "system", "content": "Look."})
    row["messages"].append({"role": "assistant", "content": "A cat."})
    contents, paths = placed(row)
    assert contents == ["Look.", ["*", "*", "What?"], "A cat."]
    assert paths == ["x", "/data/2.png"]
    # With parts that have no source the images are those of the column.
    parts = [{"type": "text", "text": "What?"}, {"type": "image"}]
    assert placed(user(parts, images=["1.png"])) == ([["What?", "*"]], ["/data/1.png"])


def test_a_text_is_an_image_only_where_the_row_has_a_column_of_images() -> None:
    text = "<image> <|image_pad|> <|vision_start|>"
    assert placed(user(text)) == placed(user(text, images=None)) == ([text], [])
    assert placed(user("x", images=[])) == (["x"], [])
    part = {"type": "image", "image": "a.png"}
    contents, _ = placed(user([part, {"type": "text", "text": text}]))
    assert contents == [["*", text]]
    message: Row = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}
    found = place_images([message, *user("x")["messages"]], None, ROOT)
    assert found.messages[0] == message and found.images == ()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (user("<image>", images=["a.png", "b.png"]), "2 images in its column and 1 place for"),
        (user("<image><image>", image="a.png"), "1 image in its column and 2 places"),
        (user("<image>", images=[]), "0 images in its column and 1 place for"),
        (user([{"type": "image"}]), "0 images in its column and 1 place for"),
        (user([{"type": "image", "image": "a.png"}], images=["b.png"]), "1 image in .* 0 places"),
        (user("x", image="a.png", images=["b.png"]), "has both 'images' and 'image'"),
        (user([{"type": "video", "video": "a.mp4"}]), r"messages\[0\].content\[0\] is .*video"),
        (
            user([{"type": "image_url", "image_url": {"url": "http://x/a.png"}}]),
            r"\[0\]: the image",
        ),
        (user("<image>", images=["http://x/a.png"]), r"images\[0\]: the image .* is on the web"),
        (user("<image>", images=[3]), r"images\[0\]: 3 \(int\) is not an image"),
        ({"messages": [{"role": "system", "content": "x"}], "images": ["a"]}, "and 0 places"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "image", "image": "a"}]}]},
            "which an assistant does not write",
        ),
    ],
)
def test_bad_rows_name_the_place_and_the_numbers(row: Row, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        placed(row)


def test_numbers_of_placeholders_and_images_of_random_rows() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        num_places, num_images = rng.integers(0, 4, 2).tolist()
        text = "".join(
            "<image>" if place else "a" for place in rng.permutation([1] * num_places + [0] * 3)
        )
        row = user(text, images=[f"{number}.png" for number in range(num_images)])
        if num_places not in (0, num_images):
            with pytest.raises(ConfigError, match=f"{num_images} images? .* {num_places} place"):
                placed(row)
            continue
        (content,), paths = placed(row)
        assert paths == [f"/data/{number}.png" for number in range(num_images)]
        assert list(content).count("*") == num_images
        written = "".join("<image>" if part == "*" else part for part in content)
        # Without a place, the images stand before the text.
        assert written == ("" if num_places else "<image>" * num_images) + text
