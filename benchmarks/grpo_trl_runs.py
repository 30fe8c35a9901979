"""The runs that `grpo_trl.py` compares: inputs of both systems, their processes, their records."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WORKER = Path(__file__).parent / "grpo_trl_worker.py"
ROOT = Path(__file__).parents[1]
NUM_THREADS = 2
GENERATION = {
    "trl": "transformers",
    "trl-continuous": "continuous",
    "trl-vllm": "vllm",
    "vllm": "vllm",
    "hf": "hf",
    "vllm-local": "vllm",
    "hf-local": "hf",
}
"""The variants and what samples their completions. `-local` runs without Ray."""
PHASES = ("generation", "logprobs", "train", "weight_sync")


@dataclass(frozen=True, kw_only=True)
class Task:
    """Settings that both systems have."""

    model: Path
    num_prompts: int
    num_generations: int
    max_new_tokens: int
    max_prompt_tokens: int
    lr: float
    ratio_clip_max: float
    train_mb_tokens: int
    """Token limit of a packed microbatch."""
    rows_per_microbatch: int
    """Rows of a padded microbatch of TRL."""
    overrides: Sequence[str] = field(default_factory=tuple)
    """`KEY=VALUE` for the command line of nemo-like."""

    @property
    def max_total_length(self) -> int:
        return self.max_prompt_tokens + self.max_new_tokens

    @property
    def rows_per_step(self) -> int:
        return self.num_prompts * self.num_generations


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a run. Times in seconds."""

    number: int
    unix_time_s: float
    seconds: float
    """Time since the end of the step before, NaN for the first."""
    phases: dict[str, float]
    """Times of `PHASES`; one that the system does not have or does not report is 0."""
    num_tokens: float
    """Completion tokens."""
    mean_length: float
    at_limit_share: float
    """Share of the completions that reached the length limit."""
    reward: float


def read_prompts(path: Path, template: str) -> list[dict[str, str]]:
    """Read rows of prompt and answer (or question and answer, as GSM8K has them) of a JSONL file.

    `template` is a format string with `{prompt}`. Answers are reduced to the number after `####`.
    """
    rows = []
    for line in path.read_bytes().splitlines():
        row = json.loads(line)
        prompt = row["prompt"] if "prompt" in row else row["question"]
        answer = str(row["answer"]).rpartition("####")[2].strip()
        rows.append({"prompt": template.format(prompt=prompt), "answer": answer})
    return rows


def write_prompts(rows: Sequence[dict[str, str]], path: Path, count: int, seed: int) -> None:
    """Write `count` rows in the order that both systems use. Raises ValueError for too few rows."""
    if count > len(rows):
        raise ValueError(
            f"count is {count} prompts, but the data has {len(rows)}; use fewer steps or rounds"
        )
    chosen = random.Random(seed).sample(rows, count)
    path.write_text("".join(json.dumps(row) + "\n" for row in chosen), encoding="utf-8")


def write_endless_model(model: Path, folder: Path, end_token: str) -> None:
    """Write a copy of a model whose completions all reach the length limit, for both systems.

    The copy declares `end_token`, which the model does not use, as its only end of a completion.
    Prompts are rendered as before. Weights are linked. Raises ValueError if the tokenizer has no
    such token.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    end_id = tokenizer.get_vocab().get(end_token)
    if end_id is None:
        raise ValueError(f"end_token is {end_token!r}, which is not a token of the model {model}")
    folder.mkdir(parents=True)
    for path in model.glob("*.safetensors*"):
        (folder / path.name).symlink_to(path.resolve())
    pad_id = tokenizer.pad_token_id
    # The generator also stops at the token that ends an assistant's turn in the template.
    finished = (
        "{{ messages[:-1] | map(attribute='content') | join }}"
        "{{ messages[-1]['content'] }}{{ eos_token }}"
    )
    tokenizer.chat_template = (
        "{% if messages[-1]['role'] == 'assistant' %}"
        f"{finished}{{% else %}}{tokenizer.chat_template}{{% endif %}}"
    )
    tokenizer.eos_token = end_token
    tokenizer.save_pretrained(folder)
    for name in ("config.json", "generation_config.json"):
        if (model / name).exists():
            values = json.loads((model / name).read_text(encoding="utf-8"))
            values |= {"eos_token_id": end_id, "pad_token_id": pad_id}
            (folder / name).write_text(json.dumps(values, indent=1), encoding="utf-8")


def run(
    variant: str,
    task: Task,
    prompts: Path,
    folder: Path,
    *,
    num_steps: int,
    seed: int,
    trl_python: str,
    timeout_s: float,
) -> list[Step]:
    """Run `num_steps` steps of a variant in processes of its own, and return them.

    `folder` is replaced. Raises RuntimeError with the end of the log if the run fails.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(WORKER.parent))),
        "OMP_NUM_THREADS": str(NUM_THREADS),
        "MKL_NUM_THREADS": str(NUM_THREADS),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    settings = {"num_steps": num_steps, "seed": seed}
    if variant.startswith("trl"):
        records = folder / "records.jsonl"
        request = trl_request(variant, task, prompts, folder, **settings)
        (folder / "request.json").write_text(json.dumps(request, indent=1), encoding="utf-8")
        command = [trl_python, str(WORKER), str(folder / "request.json")]
        environment |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "1",
        }
    else:
        records = folder / "run" / "metrics.jsonl"
        config = nemo_like_config(variant, task, prompts, folder, **settings)
        # JSON is YAML.
        (folder / "config.yaml").write_text(json.dumps(config, indent=1), encoding="utf-8")
        command = [sys.executable, "-m", "nemo_like", "grpo"]
        command += ["--config", str(folder / "config.yaml"), *task.overrides]
    _execute(command, folder, environment, variant, timeout_s)
    lines = records.read_bytes().splitlines()
    steps = read_steps([json.loads(line) for line in lines], task.rows_per_step)
    if len(steps) != num_steps:
        raise RuntimeError(f"{variant} recorded {len(steps)} steps instead of {num_steps}")
    return steps


def _execute(
    command: list[str], folder: Path, environment: dict[str, str], variant: str, timeout_s: float
) -> None:
    log = folder / "log.txt"
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, env=environment, cwd=folder, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            code = process.wait(timeout_s)
        finally:
            if process.poll() is None:
                # After a timeout or an interrupt; nemo-like stops its Ray cluster on this signal.
                process.terminate()
                process.wait(120)
    if code != 0:
        end = log.read_text(encoding="utf-8", errors="replace")[-3000:]
        raise RuntimeError(f"{variant} ended with code {code}; the end of {log}:\n{end}")


def trl_request(
    variant: str, task: Task, prompts: Path, folder: Path, *, num_steps: int, seed: int
) -> dict[str, Any]:
    """Return the request of `grpo_trl_worker.py`."""
    return {
        "generation": GENERATION[variant],
        "model": str(task.model),
        "prompts": str(prompts),
        "folder": str(folder),
        "records": str(folder / "records.jsonl"),
        "num_steps": num_steps,
        "seed": seed,
        "num_threads": NUM_THREADS,
        "num_prompts": task.num_prompts,
        "num_generations": task.num_generations,
        "max_new_tokens": task.max_new_tokens,
        "max_total_length": task.max_total_length,
        "rows_per_microbatch": task.rows_per_microbatch,
        "lr": task.lr,
        "ratio_clip_min": 0.2,
        "ratio_clip_max": task.ratio_clip_max,
        "weight_decay": 0.01,
        "beta1": 0.9,
        "beta2": 0.95,
    }


def nemo_like_config(
    variant: str, task: Task, prompts: Path, folder: Path, *, num_steps: int, seed: int
) -> dict[str, Any]:
    """Return the config of `nemo-like grpo` with the settings of `trl_request`."""
    return {
        "output_dir": str(folder),
        "run_name": "run",
        "seed": seed,
        "policy": {
            "model_name": str(task.model),
            "precision": "float32",
            "max_total_sequence_length": task.max_total_length,
            "train_global_batch_size": task.rows_per_step,
            "max_grad_norm": 1.0,
            "parity_check": False,
            "optimizer": {"lr": task.lr, "weight_decay": 0.01, "beta1": 0.9, "beta2": 0.95},
            "sequence_packing": {
                "enabled": True,
                "train_mb_tokens": task.train_mb_tokens,
                "logprob_mb_tokens": task.train_mb_tokens,
            },
            "generation": {
                "backend": GENERATION[variant],
                "max_new_tokens": task.max_new_tokens,
                "temperature": 1.0,
                "hf": {"batch_size": task.rows_per_step},
            },
        },
        "data": {"train_path": str(prompts), "shuffle": False},
        "grpo": {
            "num_prompts_per_step": task.num_prompts,
            "num_generations_per_prompt": task.num_generations,
            "max_num_steps": num_steps,
            # TRL's constant.
            "advantage": {"baseline": "group_mean", "normalize": "group_std"},
        },
        "loss_fn": {
            "ratio_clip_min": 0.2,
            "ratio_clip_max": task.ratio_clip_max,
            "normalization": "token",
            "reference_policy_kl_penalty": 0.0,
        },
        "reward": {"functions": {"answer": {"path": "grpo_trl_reward.reward"}}},
        "cluster": {
            "backend": "local" if variant.endswith("-local") else "ray",
            "workers_per_node": 1,
            "cpus_per_worker": NUM_THREADS,
        },
        "checkpointing": {"enabled": False, "export_hf": False},
        "logger": {"tensorboard": False, "num_samples_shown": 0, "save_rollouts": False},
    }


def read_steps(records: Sequence[dict[str, Any]], num_rows: int) -> list[Step]:
    """Convert the records of either system; `num_rows` is the number of rows of a step."""
    steps: list[Step] = []
    for record in records:
        if "rollout_s" in record:
            values = _trl_values(record)
        elif "timing/step_s" in record:
            values = _nemo_like_values(record)
        else:
            # A record of a validation before the first step.
            continue
        before = steps[-1].unix_time_s if steps else math.nan
        seconds = record["unix_time_s"] - before
        phases = values["phases"]
        if "rollout_s" in record:
            # TRL's optimizer step is outside of every method that is timed.
            phases["train"] = seconds - record["rollout_s"]
        num_tokens = values["num_tokens"]
        steps.append(
            Step(
                number=int(record["step"]),
                unix_time_s=record["unix_time_s"],
                seconds=seconds,
                phases=phases,
                num_tokens=num_tokens,
                mean_length=num_tokens / num_rows,
                at_limit_share=values["at_limit_share"],
                reward=values["reward"],
            )
        )
    return steps


def _trl_values(record: dict[str, Any]) -> dict[str, Any]:
    phases = dict.fromkeys(PHASES, 0.0)
    weight_sync = record.get("weight_sync_s", 0.0)
    # TRL updates vLLM's weights inside the method that generates.
    phases["generation"] = record.get("generation_s", 0.0) - weight_sync
    phases["weight_sync"] = weight_sync
    phases["logprobs"] = record.get("logprobs_s", 0.0)
    return {
        "phases": phases,
        "num_tokens": record["num_tokens"],
        "at_limit_share": record["num_at_limit"] / record["num_rows"],
        "reward": record["reward_mean"],
    }


def _nemo_like_values(record: dict[str, Any]) -> dict[str, Any]:
    return {
        "phases": {name: record.get(f"timing/{name}_s", 0.0) for name in PHASES},
        "num_tokens": record["generation/num_tokens"],
        "at_limit_share": record["generation/truncated_share"],
        "reward": record["reward/mean"],
    }
