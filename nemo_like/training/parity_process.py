"""Process of the start-up check: a tiny copy of a run against transformers, then the cause of a
difference.

See `training.parity_check`, which starts it and reads its outcome.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from nemo_like.config.build import build_config
from nemo_like.config.errors import ConfigError
from nemo_like.models.pretrained import load_model_config
from nemo_like.models.tiny import save_tiny_copy
from nemo_like.models.vision import VISION_TYPES
from nemo_like.parallel_layout import LayoutError
from nemo_like.run.files import write_json
from nemo_like.training import parity
from nemo_like.training.parity import Reference, TinyRun, in_mode, tiny_run
from nemo_like.training.policy_backends import policy_backend


def main(folder: Path) -> None:
    """Compare the run in `folder` and write the outcome there."""
    run, _ = build_config(TinyRun, json.loads((folder / "run.json").read_text()))
    assert run is not None, "it was written from a run"
    # Before the ranks are forked, so that it is imported once.
    policy_backend(run.policy).worker()
    fork = multiprocessing.get_context("fork")
    try:
        with ProcessPoolExecutor(run.num_workers, fork) as pool:
            for outcome in _outcomes(run, folder, pool):
                write_json(folder / "outcome.json", outcome)
    except (ConfigError, LayoutError) as error:
        outcome = "unknown", f"nothing is compared with transformers: {error}"
        write_json(folder / "outcome.json", outcome)


def _outcomes(run: TinyRun, folder: Path, pool: ProcessPoolExecutor) -> Iterator[tuple[str, str]]:
    """Yield the outcome for a tiny copy in the layout of `run`; of a difference then its cause.

    Raises ConfigError or LayoutError if there is no such copy.
    """
    model_config = load_model_config(run.policy.model_name)
    if model_config.model_type not in VISION_TYPES:
        model_config = model_config.get_text_config()
    model = save_tiny_copy(model_config, run.parallel, folder / "model")
    run = replace(run, policy=replace(run.policy, model_name=str(folder / "model")))
    batch = parity.random_batch(model.config)
    expected = Reference(model, batch, run, num_steps=1)
    difference = partial(_first_difference, batch=batch, expected=expected, pool=pool)
    found = difference(run, folder=folder / "run")
    if not found:
        yield "equal", "equal to transformers"
        return
    begin = (
        f"a tiny copy of policy.model_name (model type {model_config.model_type}), trained for"
        f" one step on {run.layout} with policy.engine={run.policy.engine}, differs from"
        f" transformers: {found}. "
    )
    end = "use another model, or train in spite of it with policy.parity_check=false"
    yield "different", f"{begin}To continue, {end}"
    # Rows with images are packed only.
    can_pad = model_config.model_type not in VISION_TYPES
    for part, keys, reduced in _reductions(run, can_pad=can_pad):
        with suppress(ConfigError, LayoutError):
            if not difference(reduced, folder=folder / part.replace(" ", "_")):
                yield "different", f"{begin}The cause is {part}: set {keys}, {end}"
                return
    yield "different", f"{begin}The cause is the model type, which the engine computes wrong: {end}"


_AXES: dict[str, Any] = {
    "expert": 1, "virtual_pipeline": 1, "pipeline": 1, "context": 1, "sequence": False, "tensor": 1,
}  # fmt: skip
"""Axis of a layout -> its value without it, in the order in which they are left out."""


def _reductions(run: TinyRun, *, can_pad: bool) -> Iterator[tuple[str, str, TinyRun]]:
    """Yield a part of a run, the keys that turn it off, and the run without it and those before."""
    model = Path(run.policy.model_name)
    if run.policy.checkpointing != "none":
        run = replace(run, policy=replace(run.policy, activation_checkpointing="none"))
        yield "activation checkpointing", "policy.activation_checkpointing=none", run
    for axis, off in _AXES.items():
        if getattr(run.parallel, axis) != off:
            parallel = replace(run.parallel, **{axis: off})
            run = tiny_run(run.policy, parallel, run.layout.dp, model)
            yield f"{axis} parallelism", f"parallel.{axis}={str(off).lower()}", run
    if run.layout.dp > 1:
        run = tiny_run(run.policy, run.parallel, 1, model)
        yield "data parallelism", "one worker", run
    if not can_pad:
        return
    if run.policy.sequence_packing.enabled:
        run = replace(run, policy=in_mode(run.policy, "dynamic"))
        keys = "policy.sequence_packing.enabled=false and policy.dynamic_batching.enabled=true"
        yield "sequence packing", keys, run
    single = replace(in_mode(run.policy, "padded"), train_micro_batch_size=1, logprob_batch_size=1)
    keys = "policy.dynamic_batching.enabled=false and policy.train_micro_batch_size=1"
    yield "padding of rows in a microbatch", keys, replace(run, policy=single)


def _first_difference(
    run: TinyRun, *, batch: Any, expected: Reference, folder: Path, pool: ProcessPoolExecutor
) -> str:
    """Return the first difference of one step from transformers, or ""."""
    found, leak = parity.train_layout(run, batch, folder, pool, num_steps=1)
    for what in parity.FIRST_STEP:
        each = expected.compare("", what, found)
        if not each.is_equal:
            detail = f", {each.detail}" if each.detail else ""
            return f"{what}: {each.difference:.1e} relative, limit {parity.LIMIT:g}{detail}"
    # Last, because rows that are computed wrongly together need not see each other.
    return leak


if __name__ == "__main__":
    main(Path(sys.argv[1]))
