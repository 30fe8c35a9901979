"""`validate` and `nemo-like plan` preview the plan that a run makes on the driver."""

from __future__ import annotations

from typing import Any

import pytest

from nemo_like import parallel_layout
from nemo_like.algorithms.sft.loop import run_sft
from nemo_like.cli import build_parser
from nemo_like.commands.plan import first_lengths, plan_request
from nemo_like.commands.validate import validate
from nemo_like.config.parallel import policy_layout
from nemo_like.config.schema import RunConfig
from nemo_like.data.planning.plan import BatchPlan
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.policy.policy import Policy
from nemo_like.prediction.lengths import RowLengths
from nemo_like.prediction.plan_report import make_plan
from nemo_like.training.model_files import open_model_spec
from tests.recipe import Recipe

BATCH_SIZE = 16
LAYOUTS: dict[str, tuple[str, ...]] = {
    "dp 4": (),
    "dp 4, rounded": ("policy.sequence_packing.sequence_length_round=6",),
    "dp 2 x tp 2, sequence": ("parallel.tensor=2", "parallel.sequence=true"),
    "dp 2 x cp 2": ("parallel.context=2",),
    "tp 2 x cp 2, sequence, dynamic batching": (
        "parallel.tensor=2",
        "parallel.context=2",
        "parallel.sequence=true",
        "policy.sequence_packing.enabled=false",
        "policy.dynamic_batching.enabled=true",
    ),
    "megatron, dp 4": ("policy.engine=megatron",),
    "megatron, dp 2 x pp 2": ("policy.engine=megatron", "parallel.pipeline=2"),
}
LARGE = ("dp 4, rounded", "dp 2 x cp 2", "megatron, dp 4")
"""Layouts of a model too large to stay unsharded."""


class UnreachableGroup:
    """A worker group whose workers cannot be called: it has a layout and nothing else."""

    def __init__(self, layout: ParallelLayout) -> None:
        self.name = "policy"
        self.parallel_layout = layout
        self.world_size = layout.world_size

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"planning used `{name}` of the worker group")


def plan_of_run(config: RunConfig, rows: RowLengths) -> BatchPlan:
    """Plan a step as a run does."""
    group: Any = UnreachableGroup(policy_layout(config.parallel, config.cluster))
    policy = Policy(group, config.policy, open_model_spec(config.policy), seed=config.seed)
    return policy.plan(rows.counts)


def assert_validate_describes(plan: BatchPlan, config: RunConfig) -> None:
    """The line of `validate` about the first step has the numbers of `plan`."""
    report = validate(config)
    assert report.problems == ()
    (line,) = (line for line in report.sections["plan"] if "microbatches per worker" in line)
    metrics = plan.metrics()
    assert f" {metrics['packing/padding_share']:.1%} padding (" in line
    assert line.endswith(f"optimizer step: {metrics['packing/num_microbatches']:g}")


def plan_of_command(recipe: Recipe, overrides: tuple[str, ...]) -> BatchPlan:
    """The strategy of the config in the report of `nemo-like plan`."""
    path = str(recipe.folder / "sft.yaml")
    options = ["--config", path, "--limit", str(BATCH_SIZE), *overrides]
    arguments = build_parser().parse_args(["plan", *options])
    arguments.owns_process = False
    return make_plan(plan_request(arguments)).comparison.chosen.plan


@pytest.mark.parametrize(
    ("layout", "is_large"), [*((layout, layout in LARGE) for layout in LAYOUTS), ("dp 4", True)]
)
def test_the_previewed_plan_is_that_of_the_run(
    layout: str, is_large: bool, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "megatron" in layout:
        pytest.importorskip("megatron")
    if is_large:
        # FSDP2 then all-gathers the weights of every microbatch.
        monkeypatch.setattr(parallel_layout, "MAX_UNSHARDED_BYTES", 0)
    overrides = (
        "cluster.backend=ray",
        "cluster.workers_per_node=4",
        "policy.dynamic_batching.train_mb_tokens=256",
        *LAYOUTS[layout],
    )
    config = recipe.sft(*overrides)
    rows = first_lengths(config, BATCH_SIZE, 1)
    plan = plan_of_run(config, rows)
    assert len(rows.values) == BATCH_SIZE
    waits_often = "pp 2" in layout or (is_large and "megatron" not in layout)
    assert plan.spec.sync == ("microbatch" if waits_often else "step")
    assert_validate_describes(plan, config)
    assert plan_of_command(recipe, overrides).to_json() == plan.to_json()


def test_a_run_makes_the_previewed_plan(recipe: Recipe) -> None:
    config = recipe.sft("sft.max_num_steps=1", "sft.val_at_start=false", "sft.val_period=0")
    rows = first_lengths(config, BATCH_SIZE, 1)
    result = run_sft(config)
    saved = (result.directory.path / "plan" / "step_0.json").read_text()
    assert BatchPlan.from_json(saved).to_json() == plan_of_run(config, rows).to_json()
