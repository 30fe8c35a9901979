"""Part C: transfers, offload and onload, weight buckets, checkpoints, generation, a GRPO step."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.arguments import PartArguments
from benchmarks.gpu.cells import Cell
from benchmarks.gpu.generation_speed import time_generation
from benchmarks.gpu.grpo_step import time_grpo_steps
from benchmarks.gpu.models import model_folder
from benchmarks.gpu.policies import PolicyHolder, policy_config
from benchmarks.gpu.rows import random_rows
from benchmarks.gpu.training_steps import synchronize
from benchmarks.gpu.transfers import time_buckets, time_copy, time_raw_ipc, time_transport
from nemo_like.losses import NllLoss
from nemo_like.policy.policy import Policy

_MODEL = "1.5b"
_CHECKPOINT_MODEL = "1b"


def make_cells(arguments: PartArguments) -> tuple[Iterator[Cell], Callable[[], None]]:
    """Return the cells, and a function that closes the policy that they share."""
    holder = PolicyHolder(arguments.device)
    return _Part(arguments, holder).cells(), holder.close


class _Part:
    def __init__(self, arguments: PartArguments, holder: PolicyHolder) -> None:
        self._arguments = arguments
        self._size = arguments.size
        self._device = arguments.device
        self._holder = holder

    def cells(self) -> Iterator[Cell]:
        """Yield cells in the order of importance."""
        size = self._size
        num_bytes = size.transfer_bytes
        for direction in ("H2D", "D2H"):
            for is_pinned in (False, True):
                copy = partial(time_copy, self._device, direction, num_bytes, is_pinned=is_pinned)
                yield _cell(f"copy {direction} {'pinned' if is_pinned else 'pageable'}", copy)
        copy = partial(time_copy, self._device, "D2D", num_bytes, is_pinned=False)
        yield _cell("copy D2D", copy)
        yield _cell("CUDA IPC raw", partial(time_raw_ipc, self._device, num_bytes), 20.0)
        for transport in ("cuda_ipc", "shared_memory"):
            send = partial(time_transport, self._device, transport, 4 * num_bytes)
            yield _cell(f"transport {transport}", send, 25.0)
        yield _cell("offload and onload", self._offload, 40.0)
        yield _cell("GRPO step hf", partial(self._grpo, "hf"), 90.0, limit_s=200.0)
        yield _cell("GRPO step vllm", partial(self._grpo, "vllm"), 90.0, limit_s=240.0)
        for rows in size.generation_rows:
            yield _cell(f"generation hf {rows} rows", partial(self._generate, "hf", rows), 30.0)
        for rows in size.generation_rows:
            generate = partial(self._generate, "vllm", rows)
            yield _cell(f"generation vllm {rows} rows", generate, 60.0)
        for place in ("device", "host"):
            yield _cell(f"buckets in {place} memory", partial(self._buckets, place), 15.0)
        yield _cell("checkpoint", self._checkpoint, 75.0, limit_s=200.0)

    def _folder(self, model: str) -> Path:
        settings = self._size.models[model]
        return model_folder(self._arguments.work, model, settings, self._device)

    def _trained_policy(self, model: str) -> Policy:
        """Return a policy after one step, so that it has optimizer moments."""
        size = self._size
        folder = self._folder(model)
        lengths = self._arguments.draw_lengths(2 * size.main_budget, size.longest)
        config = policy_config(
            folder, budget=size.main_budget, num_rows=len(lengths), longest=size.longest, options={}
        )
        policy = self._holder.get(config)
        batch = random_rows(lengths, policy.model.vocab_size)
        policy.train(policy.shard(batch, policy.plan(lengths)), None, NllLoss())
        return policy

    def _offload(self) -> Mapping[str, Any]:
        policy = self._trained_policy(_MODEL)
        group = policy.group
        # Weights and both moments are float32.
        num_bytes = 12 * policy.model.num_params
        values: dict[str, Any] = {"num_bytes": num_bytes}
        for attempt in ("first", "second", "third"):
            for method in ("offload", "onload"):
                start = time.perf_counter()
                group.run_all_workers(method)
                synchronize(self._device)
                seconds = time.perf_counter() - start
                values[f"{attempt} {method}_s"] = seconds
                values[f"{attempt} {method}_gb_per_s"] = num_bytes / 1e9 / seconds
        if not self._arguments.is_cuda:
            values["note"] = "offload does nothing on the CPU"
        self._holder.close()
        return values

    def _grpo(self, backend: Any) -> Mapping[str, Any]:
        self._holder.close()
        return time_grpo_steps(self._folder(_MODEL), self._device, self._size, backend)

    def _generate(self, backend: str, num_rows: int) -> Mapping[str, Any]:
        self._holder.close()
        size = self._size
        return time_generation(
            self._folder(_MODEL),
            self._device,
            backend,
            num_rows=num_rows,
            prompt_tokens=size.prompt_tokens,
            new_tokens=size.generated_tokens,
        )

    def _buckets(self, place: Any) -> Mapping[str, Any]:
        return time_buckets(self._device, _weight_shapes(self._folder(_MODEL)), place)

    def _checkpoint(self) -> Mapping[str, Any]:
        policy = self._trained_policy(_CHECKPOINT_MODEL)
        folder = self._arguments.work / "checkpoint"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            start = time.perf_counter()
            blocking_s = _save(policy, folder)
            save_s = time.perf_counter() - start
            num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            start = time.perf_counter()
            policy.load(folder)
            synchronize(self._device)
            load_s = time.perf_counter() - start
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            self._holder.close()
        return {
            "num_bytes": num_bytes,
            "save_s": save_s,
            "save_blocking_s": blocking_s,
            "save_gb_per_s": num_bytes / 1e9 / save_s,
            "load_s": load_s,
            "load_gb_per_s": num_bytes / 1e9 / load_s,
            "note": "the read may come from the page cache",
        }


def _cell(
    name: str,
    measure: Callable[[], Mapping[str, Any]],
    expected_s: float = 5.0,
    *,
    limit_s: float = 120.0,
) -> Cell:
    return Cell(name=name, measure=measure, expected_s=expected_s, limit_s=limit_s)


def _save(policy: Any, folder: Path) -> float:
    """Save a checkpoint; return the seconds in which training could not have continued."""
    start = time.perf_counter()
    start_save = getattr(policy, "start_save", None)
    if start_save is None:
        policy.save(folder)
        return time.perf_counter() - start
    start_save(folder)
    blocking_s = time.perf_counter() - start
    policy.finish_save()
    return blocking_s


def _weight_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all weights of a model folder."""
    from safetensors import safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                shapes[name] = tuple(file.get_slice(name).get_shape())
    return shapes
