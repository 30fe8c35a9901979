"""One GRPO run of TRL, in a process of its own. Started by `grpo_trl.py`, with the interpreter that
has TRL installed.

Reads a request, a JSON object, from the first argument; appends a JSON record per step to
`request["records"]`.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from importlib import import_module
from pathlib import Path
from typing import Any

from grpo_trl_reward import score


class Recorder:
    """Collects what happens in one step, and writes it as one record."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._values: dict[str, float] = {}

    def timed(self, name: str, function: Any) -> Any:
        """Return a function that calls `function` and adds its time to `name`."""

        def call(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self._seconds[name] += time.perf_counter() - start

        return call

    def add(self, values: dict[str, float]) -> None:
        """Add values to the record of the running step."""
        self._values |= values

    def write(self, step: int) -> None:
        """Append the record of `step` and begin the next one."""
        record: dict[str, float] = {"step": step, "unix_time_s": time.time(), **self._values}
        for name, seconds in self._seconds.items():
            record[f"{name}_s"] = seconds
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        self._seconds.clear()
        self._values = {}


def main(request: dict[str, Any]) -> None:
    """Train as requested."""
    # Found by name: the environment of this repository does not have these packages.
    torch = import_module("torch")
    trl = import_module("trl")
    transformers = import_module("transformers")
    datasets = import_module("datasets")
    torch.set_num_threads(request["num_threads"])
    transformers.utils.logging.set_verbosity_error()
    recorder = Recorder(Path(request["records"]))
    limit = request["max_new_tokens"]

    class StepTimes(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            recorder.write(state.global_step)

    def reward(completions: Any, completion_ids: Any, answer: Any, **kwargs: Any) -> list[float]:
        texts = [completion[-1]["content"] for completion in completions]
        scores = [score(*pair) for pair in zip(texts, answer, strict=True)]
        lengths = [len(ids) for ids in completion_ids]
        recorder.add(
            {
                "reward_mean": sum(scores) / len(scores),
                "num_tokens": sum(lengths),
                "num_rows": len(lengths),
                "num_at_limit": sum(length == limit for length in lengths),
                "longest": max(lengths),
            }
        )
        return scores

    trainer = trl.GRPOTrainer(
        model=request["model"],
        reward_funcs=reward,
        args=_config(trl, request),
        train_dataset=datasets.Dataset.from_list(_rows(Path(request["prompts"]))),
        callbacks=[StepTimes()],
    )
    # Methods that a release does not have are not timed; the time of a step is always recorded.
    for name, method in (
        ("rollout", "_generate_and_score_completions"),
        ("generation", "_generate"),
    ):
        if hasattr(trainer, method):
            setattr(trainer, method, recorder.timed(name, getattr(trainer, method)))
    if request["generation"] == "vllm":
        generation = trainer.vllm_generation
        generation.sync_weights = recorder.timed("weight_sync", generation.sync_weights)
    trainer.train()


def _rows(path: Path) -> list[dict[str, Any]]:
    rows = []
    for line in path.read_bytes().splitlines():
        row = json.loads(line)
        prompt = [{"role": "user", "content": row["prompt"]}]
        rows.append({"prompt": prompt, "answer": row["answer"]})
    return rows


def _config(trl: Any, request: dict[str, Any]) -> Any:
    """Return TRL's settings of the request, for a CPU."""
    num_rows = request["num_prompts"] * request["num_generations"]
    options: dict[str, Any] = {
        "output_dir": request["folder"],
        "seed": request["seed"],
        # Float32, and no recomputation: there is enough memory.
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "model_init_kwargs": {"dtype": "float32", "attn_implementation": "sdpa"},
        "dataloader_pin_memory": False,
        "max_steps": request["num_steps"],
        "per_device_train_batch_size": request["rows_per_microbatch"],
        "gradient_accumulation_steps": num_rows // request["rows_per_microbatch"],
        "num_generations": request["num_generations"],
        "max_completion_length": request["max_new_tokens"],
        "shuffle_dataset": False,
        "temperature": 1.0,
        "learning_rate": request["lr"],
        "lr_scheduler_type": "constant",
        "weight_decay": request["weight_decay"],
        "adam_beta1": request["beta1"],
        "adam_beta2": request["beta2"],
        "max_grad_norm": 1.0,
        # No KL penalty; the mean over all tokens of the batch; one update per rollout.
        "beta": 0.0,
        "loss_type": "dapo",
        "epsilon": request["ratio_clip_min"],
        "epsilon_high": request["ratio_clip_max"],
        "num_iterations": 1,
        "scale_rewards": "group",
        "report_to": "none",
        "logging_strategy": "no",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    if request["generation"] == "vllm":
        options |= {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_max_model_length": request["max_total_length"],
        }
    if request["generation"] == "continuous":
        options["use_transformers_continuous_batching"] = True
    return trl.GRPOConfig(**options)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
