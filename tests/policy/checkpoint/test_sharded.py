"""What any number of ranks write in blocks of any cut reads back to the bit in any other cut, or is
refused.
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from nemo_like.config.errors import ConfigError
from nemo_like.distributed import activity
from nemo_like.policy.checkpoint import sharded as sharded_checkpoint
from nemo_like.policy.checkpoint.sharded import Block, Contents, HostBuffers, save
from nemo_like.policy.checkpoint.sharded_reader import checkpoint_problem, open_checkpoint
from nemo_like.run.checkpoint import CheckpointError

SHAPES = {"embed.weight": (7, 4), "norm.weight": (5,)}
KINDS = ("weight", "exp_avg", "exp_avg_sq")


def random_bits(shape: tuple[int, ...], seed: int) -> Tensor:
    """Any float32 there is, infinities and NaNs among them."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randint(-(2**31), 2**31, shape, generator=generator)
        .to(torch.int32)
        .view(torch.float32)
    )


def same_bits(found: Tensor, expected: Tensor) -> bool:
    return torch.equal(found.view(torch.int32), expected.contiguous().view(torch.int32))


def random_model(shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, Tensor]:
    names = [f"{kind}/{name}" for kind in KINDS for name in shapes]
    return {name: random_bits(shapes[name.split("/")[1]], seed) for seed, name in enumerate(names)}


def save_blocks(directory: Path, ranks: Sequence[Iterable[Block]], **options: Any) -> None:
    """`save` and `finish` on as many ranks as there are lists of blocks."""
    barrier = threading.Barrier(len(ranks), timeout=60)

    def wait() -> None:
        barrier.wait()

    def run(rank: int) -> None:
        contents = {"num_optimizer_steps": 3, "has_moments": True, "shapes": SHAPES}
        contents |= {name: options[name] for name in contents if name in options}
        moments = KINDS[1:] if contents["has_moments"] else ()
        states = {kind: list(contents["shapes"]) for kind in moments}
        contents["states"] = options.get("states", states)
        ranked: Any = SimpleNamespace(rank=rank, barrier=wait)
        buffers = options.get("buffers", HostBuffers(pinned=False))
        in_background = options.get("in_background", False)
        try:
            save(
                directory,
                ranks[rank],
                Contents(**contents),
                ranked,
                buffers=buffers,
                in_background=in_background,
            ).finish()
        except (ValueError, CheckpointError):
            barrier.abort()
            raise

    with ThreadPoolExecutor(len(ranks)) as pool:
        futures = [pool.submit(run, rank) for rank in range(len(ranks))]
    errors = [error for error in (future.exception() for future in futures) if error is not None]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError))


def full_blocks(model: dict[str, Tensor]) -> list[Block]:
    return [
        Block(name, tuple(tensor.shape), (0,) * tensor.ndim, tensor)
        for name, tensor in model.items()
    ]


def cut(block: Block, draw: Callable[..., Any]) -> Iterator[Block]:
    """The block halved again and again, at random places along random dimensions, sometimes leaving
    an empty part.
    """
    if block.tensor.numel() == 0 or not draw(st.booleans()):
        yield block
        return
    dim = draw(st.integers(0, block.tensor.ndim - 1))
    place = draw(st.integers(0, block.tensor.shape[dim]))
    for start, stop in ((0, place), (place, block.tensor.shape[dim])):
        offset = (*block.offset[:dim], block.offset[dim] + start, *block.offset[dim + 1 :])
        yield from cut(
            block._replace(offset=offset, tensor=block.tensor.narrow(dim, start, stop - start)),
            draw,
        )


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    num_ranks=st.integers(1, 3),
    in_background=st.booleans(),
    chunk_bytes=st.sampled_from([4, 20, 1024]),
)
def test_any_part_reads_back_to_the_bit_however_it_was_cut(
    tmp_path_factory, data, num_ranks, in_background, chunk_bytes
):
    model = random_model()
    ranks: list[list[Block]] = [[] for _ in range(num_ranks)]
    for block in full_blocks(model):
        for part in cut(block, data.draw):
            ranks[data.draw(st.integers(0, num_ranks - 1))].append(part)
    directory = tmp_path_factory.mktemp("checkpoint")
    # Each rank has buffers of its own in a run, but here they are not kept after a save.
    buffers = HostBuffers(pinned=False, chunk_bytes=chunk_bytes)
    save_blocks(directory, ranks, buffers=buffers, in_background=in_background)
    with open_checkpoint(directory) as reader:
        assert (reader.num_optimizer_steps, reader.has_moments, reader.shapes) == (3, True, SHAPES)
        reader.check_model(SHAPES)
        for name, tensor in model.items():
            spans = [
                sorted((data.draw(st.integers(0, size)), data.draw(st.integers(0, size))))
                for size in tensor.shape
            ]
            part = tensor[tuple(slice(*span) for span in spans)]
            assert same_bits(reader.read(name, [start for start, _ in spans], part.shape), part)
            assert same_bits(reader.read(name, (0,) * tensor.ndim, tensor.shape), tensor)


def test_blocks_fill_file_after_file_and_a_large_one_is_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(sharded_checkpoint, "MAX_FILE_BYTES", 64)
    shapes = {"a": (11, 3), "b": (4,), "c": (2, 2, 2), "wide": (2, 40)}
    model = random_model(shapes)
    num_files: list[int] = []
    memory = torch.empty(80)

    def one_by_one() -> Iterator[Block]:
        for block in full_blocks(model):
            # The same memory for every block: what is kept of one must be a copy.
            tensor = memory[: block.tensor.numel()].view(block.tensor.shape)
            yield block._replace(tensor=tensor.copy_(block.tensor))
            num_files.append(len(list(tmp_path.glob("rank_*"))))

    save_blocks(tmp_path, [one_by_one()], shapes=shapes)
    assert 0 < num_files[0] < num_files[-1]  # written while the blocks come
    for path in tmp_path.glob("rank_*"):
        with safe_open(path, framework="pt") as file:
            sizes = [4 * math.prod(file.get_slice(key).get_shape()) for key in file.keys()]  # noqa: SIM118  (not a dict)
        assert sum(sizes) <= 64 or sizes == [160]  # one row of `wide` is larger
    with open_checkpoint(tmp_path) as reader:
        for name, tensor in model.items():
            assert same_bits(reader.read(name, (0,) * tensor.ndim, tensor.shape), tensor)


def test_a_checkpoint_without_moments_has_none(tmp_path):
    weights = {
        name: tensor for name, tensor in random_model().items() if name.startswith("weight/")
    }
    save_blocks(tmp_path, [full_blocks(weights)], has_moments=False, num_optimizer_steps=0)
    with open_checkpoint(tmp_path) as reader:
        assert (reader.has_moments, reader.num_optimizer_steps) == (False, 0)
        assert same_bits(
            reader.read("weight/norm.weight", (0,), (5,)), weights["weight/norm.weight"]
        )
        with pytest.raises(
            CheckpointError, match=r"has 0 of the 5 values of exp_avg/norm\.weight at \[0\]"
        ):
            reader.read("exp_avg/norm.weight", (0,), (5,))


def test_a_part_outside_the_tensor_is_refused(tmp_path):
    save_blocks(tmp_path, [full_blocks(random_model())])
    match = r"has 8 of the 12 values of weight/embed\.weight"
    with open_checkpoint(tmp_path) as reader, pytest.raises(CheckpointError, match=match):
        reader.read("weight/embed.weight", (5, 0), (3, 4))


def test_another_model_is_refused(tmp_path):
    save_blocks(tmp_path, [full_blocks(random_model())])
    message = (
        r"2 weights differ, first embed\.weight, saved as \[7, 4\] and now \[7, 8\];"
        r" check policy\.model_name"
    )
    with open_checkpoint(tmp_path) as reader, pytest.raises(ConfigError, match=message):
        reader.check_model({"embed.weight": (7, 8), "norm.weight": (5,), "extra": (1,)})


def test_an_incomplete_folder_is_refused(tmp_path):
    def refused(match: str) -> None:
        with pytest.raises(CheckpointError, match=match), open_checkpoint(tmp_path):
            pass
        assert re.search(match, str(checkpoint_problem(tmp_path)))

    refused(r"manifest\.json does not exist, so .* is not a complete policy checkpoint")
    blocks = full_blocks(random_model())
    save_blocks(tmp_path, [blocks[:3], blocks[3:]])
    second = tmp_path / "rank_00001_000.safetensors"
    content = second.read_bytes()
    second.write_bytes(content[:-1])
    refused(rf"rank_00001_000\.safetensors has {len(content) - 1} bytes instead of {len(content)}")
    second.unlink()
    refused(r"rank_00001_000\.safetensors is missing; the checkpoint in .* is incomplete")
    manifest = tmp_path / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 1}))
    refused("has format 1; this version reads format 2")


@pytest.mark.parametrize(
    "change",
    [
        {"files": {}},
        {"files": ["rank_00000_000.safetensors"]},
        {"shapes": {"norm.weight": [5, 1]}},
        {"states": None},
        {"format": None},
        "[]",
        "null",
        "\0",
        "",
    ],
)
def test_an_odd_manifest_is_one_checkpoint_error(tmp_path: Path, change: Any) -> None:
    save_blocks(tmp_path, [full_blocks(random_model())])
    path = tmp_path / "manifest.json"
    path.write_text(
        change
        if isinstance(change, str)
        else json.dumps({**json.loads(path.read_text()), **change})
    )
    problem = checkpoint_problem(tmp_path)
    assert problem is not None and len(problem) < 1000


@pytest.mark.parametrize(
    "blocks",
    [
        *("[]", '{"x": 1}', '{"weight/norm.weight@0": {"name": "weight/norm.weight"}}', "{", None),
        *(
            json.dumps({"weight/norm.weight@0": {"name": "weight/norm.weight", "offset": offset}})
            for offset in ([9], [0, 0])
        ),
    ],
)
def test_an_odd_weight_file_is_one_checkpoint_error(tmp_path: Path, blocks: str | None) -> None:
    model = {
        name: tensor for name, tensor in random_model().items() if name == "weight/norm.weight"
    }
    shapes = {"norm.weight": (5,)}
    save_blocks(tmp_path, [full_blocks(model)], shapes=shapes, has_moments=False)
    path = tmp_path / "rank_00000_000.safetensors"
    assert checkpoint_problem(tmp_path) is None
    save_file(
        {"weight/norm.weight@0": torch.ones(5)},
        path,
        metadata=None if blocks is None else {"blocks": blocks},
    )
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    manifest["files"] = {path.name: path.stat().st_size}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert checkpoint_problem(tmp_path) is not None


def test_blocks_that_are_not_the_model_leave_no_checkpoint(tmp_path):
    model = random_model()
    blocks = full_blocks(model)
    save_blocks(tmp_path, [blocks])

    def refused(match: str, *ranks: list[Block]) -> None:
        with pytest.raises((ValueError, CheckpointError), match=match):
            save_blocks(tmp_path, list(ranks))
        assert not (tmp_path / "manifest.json").exists()

    norm = next(block for block in blocks if block.name == "exp_avg/norm.weight")
    others = [block for block in blocks if block is not norm]
    half = norm._replace(tensor=norm.tensor[:3])
    refused(r"wrote 0 of the 5 values of exp_avg/norm\.weight", others)
    refused(r"wrote 3 of the 5 values of exp_avg/norm\.weight", others, [half])
    refused(r"wrote 10 of the 5 values of exp_avg/norm\.weight", blocks, [norm])
    refused(
        r"two blocks of exp_avg/norm\.weight .* overlap",
        [*others, half],
        [norm._replace(tensor=norm.tensor[:2])],
    )
    refused(r"two blocks with the same position: exp_avg/norm\.weight@0", [*blocks, half])
    refused(r"at \[3\], shape \[5\], lies outside \[5\]", [*others, norm._replace(offset=(3,))])
    refused(
        r"full shape \[6\]; the checkpoint's is \(5,\)", [*others, norm._replace(full_shape=(6,))]
    )
    refused(
        r"block of bias has full shape \[5\]; the checkpoint's is None",
        [*blocks, norm._replace(name="bias")],
    )


def test_saving_again_leaves_nothing_of_the_first_time(tmp_path):
    blocks = full_blocks(random_model())
    save_blocks(tmp_path, [blocks[:2], blocks[2:4], blocks[4:]])
    again = {name: tensor.flip(0) for name, tensor in random_model().items()}
    save_blocks(tmp_path, [full_blocks(again)])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "manifest.json",
        "rank_00000_000.safetensors",
    ]
    with open_checkpoint(tmp_path) as reader:
        assert same_bits(
            reader.read("exp_avg/norm.weight", (0,), (5,)), again["exp_avg/norm.weight"]
        )


def test_writing_and_reading_report_activity(tmp_path: Path) -> None:
    """So that a checkpoint that takes longer than `cluster.progress_timeout_s` is not taken for a
    hung worker.
    """
    model = random_model()
    before = activity.last().num_notes
    save_blocks(tmp_path, [full_blocks(model)])
    written = activity.last()
    assert written.num_notes > before and "writing rank_00000_000.safetensors" in written.text
    with open_checkpoint(tmp_path) as reader:
        for name, tensor in model.items():
            reader.read(name, (0,) * tensor.ndim, tensor.shape)
    assert activity.last().num_notes == written.num_notes + len(model)
