"""Plans of groups of completions with a common prompt: work of the slowest rank, against a bound.

    NEMO_LIKE_DATA=data python benchmarks/shared_prefix_plan.py

The data folder has `gsm8k/train.jsonl` and `lengths/azure_conv.csv` (ContextTokens,
GeneratedTokens). Completions of a group scatter around the recorded length (lognormal, sigma 0.4).
GSM8K lengths are characters / 3.5, as no tokenizer is needed then. `separate` computes every row
completely; `within` shares only inside the microbatches of that plan; `shared` plans with prefixes.
Columns: computed tokens, work of the slowest rank over the lower bound of `shared` (the sum over
microbatches with `sync=microbatch`, the makespan with `sync=step`), milliseconds of a plan.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from nemo_like.data.packing.packers import Packing
from nemo_like.data.planning.oversize import FittedRows
from nemo_like.data.planning.plan import BatchPlan, PlanSpec, join_steps, plan_batch
from nemo_like.data.planning.prefixes import SharedPrefixes
from nemo_like.data.planning.shared_step import shared_work_bound
from nemo_like.data.planning.spec import CostModel
from nemo_like.data.planning.token_counts import TokenCounts
from nemo_like.models.spec import load_spec

_CHARACTERS_PER_TOKEN = 3.5


def main(argv: Sequence[str] | None = None) -> None:
    """Print one line for each data set, group size, number of ranks and kind of sync."""
    arguments = _parser().parse_args(argv)
    cost = CostModel.from_spec(load_spec(arguments.model))
    print(
        f"{'lengths':<8}{'G':>3}{'ranks':>6} {'sync':<11}{'M':>3}"
        f"{'tokens: separate':>18}{'within':>8}{'shared':>8}"
        f"{'slowest: separate':>19}{'within':>8}{'shared':>8}{'plan ms':>9}"
    )
    for name, prompts, answers in _recorded(Path(os.environ["NEMO_LIKE_DATA"])):
        for group_size in (4, 8, 16):
            for num_ranks in arguments.ranks:
                for sync in ("microbatch", "step"):
                    spec = PlanSpec(
                        max_tokens=arguments.max_tokens, num_ranks=num_ranks, sync=sync, cost=cost
                    )
                    row = _row(prompts, answers, group_size, spec, arguments)
                    print(f"{name:<8}{group_size:>3}{num_ranks:>6} {sync:<11}{row}", flush=True)


def _row(
    prompts: np.ndarray,
    answers: np.ndarray,
    group_size: int,
    spec: PlanSpec,
    arguments: argparse.Namespace,
) -> str:
    rng = np.random.default_rng(arguments.seed)
    chosen = rng.choice(len(prompts), arguments.rows // group_size, replace=False)
    scale = rng.lognormal(-0.08, 0.4, (len(chosen), group_size))
    completions = np.maximum(2, answers[chosen][:, None] * scale).astype(np.int64).ravel()
    prompt_of = prompts[chosen].repeat(group_size)
    lengths = np.minimum(prompt_of + completions, arguments.max_tokens)
    num_trained = lengths - prompt_of
    groups = np.arange(len(chosen)).repeat(group_size)
    prefixes = SharedPrefixes.of_groups(groups, prompt_of)
    counts = TokenCounts(lengths, num_trained, prefixes)
    separate = plan_batch(counts, spec, shared_prefix=False)
    within = _shared_within(separate, prefixes)
    # The first plan may compile.
    shared = plan_batch(counts, spec)
    times = []
    for _ in range(arguments.repeats):
        start = time.perf_counter()
        plan_batch(counts, spec)
        times.append(time.perf_counter() - start)
    bound = shared_work_bound(counts, spec)
    plans = (separate, within, shared)
    tokens = [plan.computed_lengths.sum() / 1e3 for plan in plans]
    slowest = [slowest_work(plan) / bound for plan in plans]
    return (
        f"{shared.num_microbatches:>3}{tokens[0]:>17.0f}k{tokens[1]:>7.0f}k{tokens[2]:>7.0f}k"
        f"{slowest[0]:>19.3f}{slowest[1]:>8.3f}{slowest[2]:>8.3f}{min(times) * 1e3:>9.1f}"
    )


def slowest_work(plan: BatchPlan) -> float:
    """Work of the slowest rank: the sum over microbatches, or the makespan, by `spec.sync`."""
    before = np.concatenate([[0.0], np.cumsum(plan.work)])
    work = np.diff(before[plan.offsets]).reshape(plan.spec.num_ranks, -1)
    if plan.spec.sync == "microbatch":
        return float(work.max(0).sum())
    return float(work.sum(1).max())


def _shared_within(plan: BatchPlan, prefixes: SharedPrefixes) -> BatchPlan:
    """The same microbatches, each of which computes common tokens once."""
    assert plan.num_trained is not None, "planned with them"
    lengths, num_trained = np.zeros((2, plan.num_rows), dtype=np.int64)
    lengths[plan.rows], num_trained[plan.rows] = plan.lengths, plan.num_trained
    fitted = FittedRows.of(TokenCounts(lengths, num_trained, prefixes), plan.spec)
    return join_steps(plan.spec, fitted, [Packing(plan.rows, plan.offsets)])


def _recorded(folder: Path) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield (name, tokens of each prompt, tokens of each answer)."""
    problems = [json.loads(line) for line in (folder / "gsm8k/train.jsonl").open()]
    texts = np.array([(len(each["question"]) + 80, len(each["answer"])) for each in problems])
    tokens = np.ceil(texts / _CHARACTERS_PER_TOKEN).astype(np.int64)
    yield "gsm8k", tokens[:, 0], tokens[:, 1]
    with (folder / "lengths/azure_conv.csv").open() as file:
        rows = [(row["ContextTokens"], row["GeneratedTokens"]) for row in csv.DictReader(file)]
    tokens = np.array(rows, dtype=np.int64)
    yield "azure", tokens[:, 0], tokens[:, 1]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="8b", help="size of the model that gives the work")
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--max-tokens", type=int, default=16_384)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    main()
