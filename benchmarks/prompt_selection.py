"""Dynamic sampling with and without `grpo.prompt_selection` on sums of the demo.

    python -m benchmarks.prompt_selection --model runs/demo_sft/hf --seeds 0 1 2

The prompts are 16 sums of one digit, 16 of two and 32 of four from `runs/demo`, so that some are
too easy and some too hard for the model. Prints per variant the share of groups with equal rewards,
sampled and trained tokens, and both per 0.01 of gain in the mean reward of greedy answers.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from nemo_like.algorithms.grpo.config import GrpoRunConfig
from nemo_like.algorithms.grpo.loop import run_grpo
from nemo_like.algorithms.registry import load_config

CONFIG = Path(__file__).parents[1] / "examples/configs/demo_grpo.yaml"
NUM_ROWS = {1: 16, 2: 16, 4: 32}
"""Training rows by the number of digits of the larger summand."""
VALIDATION_FACTOR = 4
"""Validation rows for each of them: with 256 the standard error of an accuracy is at most 0.03."""
GROUP = 8
OPTIONS = (
    "cluster.backend=local", "cluster.workers_per_node=1", "cluster.cpus_per_worker=1",
    "checkpointing.enabled=false", "checkpointing.export_hf=false", "policy.parity_check=false",
    "logger.save_rollouts=false",
    "grpo.val_at_start=true", "grpo.val_period=0", "policy.generation.max_new_tokens=64",
    "grpo.num_prompts_per_step=8", f"grpo.num_generations_per_prompt={GROUP}",
    "policy.optimizer.lr=2e-4", "policy.train_global_batch_size=64",
    "grpo.dynamic_sampling.enabled=true",
)  # fmt: skip
ENABLED = "grpo.prompt_selection.enabled=true"
VARIANTS = {
    "dynamic sampling": (),
    "+ selection": (ENABLED,),
    "+ selection, no weights": (ENABLED, "grpo.prompt_selection.importance_weights=false"),
}


def write_rows(source: Path, train: Path, validation: Path, rng: np.random.Generator) -> None:
    """Write different random rows of `source` by their number of digits to both paths."""
    lines = source.read_text().splitlines()
    digits = [max(map(len, json.loads(line)["prompt"].split("+"))) for line in lines]
    chosen: dict[Path, list[str]] = {train: [], validation: []}
    for number, count in NUM_ROWS.items():
        rows = [line for line, each in zip(lines, digits, strict=True) if each == number]
        shuffled = rng.permutation(rows).tolist()
        chosen[train] += shuffled[:count]
        chosen[validation] += shuffled[count : count * (1 + VALIDATION_FACTOR)]
    for path, rows in chosen.items():
        path.write_text("\n".join(rows) + "\n")


def measure(options: list[str]) -> dict[str, float]:
    """Run GRPO; return shares, tokens and the gain in reward."""
    result = run_grpo(load_config(GrpoRunConfig, CONFIG, options))
    lines = [json.loads(line) for line in result.directory.metrics.read_bytes().splitlines()]
    steps = [line for line in lines if "dynamic_sampling/kept_share" in line]
    groups = np.array([line["dynamic_sampling/num_sampled_groups"] for line in steps])
    kept = np.array([line["dynamic_sampling/kept_share"] for line in steps])
    lengths = np.array([line["generation/completion_length_mean"] for line in steps])
    skipped = [line.get("selection/skipped_share", 0.0) for line in steps]
    refills = [line["dynamic_sampling/num_refills"] for line in steps]
    first, last = (result_of["validation/reward_mean"] for result_of in (result.first, result.last))
    return {
        "uninformative": 1 - (kept * groups).sum() / groups.sum(),
        "skipped": float(np.mean(skipped)),
        "refills/step": float(np.mean(refills)),
        "missing": sum(line["dynamic_sampling/num_missing_groups"] for line in steps),
        "sampled tokens": (lengths * groups).sum() * GROUP,
        "trained tokens": steps[-1]["progress/num_tokens"],
        "reward": last,
        "gain": last - first,
    }


def main() -> None:
    """Run all variants and seeds; print the means over seeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="runs/demo_sft/hf")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--variants", type=int, nargs="+", default=[*range(len(VARIANTS))])
    parser.add_argument("--folder", type=Path, default=Path("runs/prompt_selection"))
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    options = [*OPTIONS, f"grpo.max_num_steps={arguments.steps}"]
    options += [f"policy.model_name={arguments.model}", f"output_dir={arguments.folder}"]
    train, validation = (arguments.folder / f"{name}.jsonl" for name in ("train", "validation"))
    source = Path("runs/demo/grpo_train.jsonl")
    write_rows(source, train, validation, np.random.default_rng(0))
    options += [f"data.train_path={train}", f"data.validation_path={validation}"]
    for number in arguments.variants:
        variant, changes = [*VARIANTS.items()][number]
        results = []
        for seed in arguments.seeds:
            run = [*options, *changes, f"seed={seed}", f"run_name=variant_{number}_seed_{seed}"]
            results.append(measure(run))
            print(variant, seed, json.dumps(results[-1]), flush=True)
        mean = {key: float(np.mean([each[key] for each in results])) for key in results[0]}
        for kind in ("sampled", "trained"):
            mean[f"{kind} per 0.01"] = mean[f"{kind} tokens"] / max(mean["gain"] * 100, 1e-9)
        print(variant, "mean", json.dumps({key: round(value, 3) for key, value in mean.items()}))


if __name__ == "__main__":
    main()
