"""What configs of other tools mean, by the documentation of each tool and without our tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Tree = Mapping[str, Any]
Values = dict[str, Any]
"""Key of this package -> the value that it must have; None if the key must keep its default."""


def at(tree: Tree, path: str, default: Any = None) -> Any:
    """The value of a dotted key; `default` if it is not set or null."""
    value: Any = tree
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return default if value is None else value


def trl(tree: Tree, kind: str) -> Values:
    """`transformers.TrainingArguments` and `trl.*Config`."""
    lr = {"sft": 2e-5, "dpo": 1e-6, "rm": 1e-4, "grpo": 1e-6, "distill": 2e-5}[kind]
    num_rows = at(tree, "per_device_train_batch_size", 8)
    accumulation = at(tree, "gradient_accumulation_steps", 1)
    batch_size = num_rows * accumulation
    values = {
        "policy.train_global_batch_size": batch_size,
        "policy.train_micro_batch_size": num_rows,
        "policy.optimizer.lr": at(tree, "learning_rate", lr),
        f"{kind}.max_num_steps": _limit(at(tree, "max_steps")),
        **_schedule(tree, at(tree, "learning_rate", lr), "lr_scheduler_type"),
    }
    if kind != "grpo":
        values["policy.max_total_sequence_length"] = at(tree, "max_length", 1024)
        values[f"{kind}.max_num_epochs"] = _epochs(tree, "num_train_epochs", 3)
        return values
    group = at(tree, "num_generations", 8)
    generated = at(
        tree, "generation_batch_size", num_rows * at(tree, "steps_per_generation", accumulation)
    )
    num_updates = generated / batch_size * at(tree, "num_iterations", 1)
    steps = _limit(at(tree, "max_steps"))
    return {
        **values,
        # TRL counts optimizer steps, and this package steps of sampling.
        "grpo.max_num_steps": steps and steps / num_updates,
        "grpo.num_prompts_per_step": generated / group,
        "grpo.num_generations_per_prompt": group,
        "policy.generation.max_new_tokens": at(tree, "max_completion_length", 512),
        **_clip(at(tree, "epsilon"), at(tree, "epsilon_high")),
    }


def axolotl(tree: Tree, kind: str) -> Values:
    num_rows = at(tree, "micro_batch_size", 1)
    batch_size = num_rows * at(tree, "gradient_accumulation_steps", 1)
    values = {
        "policy.train_global_batch_size": batch_size,
        "policy.train_micro_batch_size": num_rows,
        "policy.optimizer.lr": at(tree, "learning_rate"),
        "policy.max_total_sequence_length": at(tree, "sequence_len", 512),
        f"{kind}.max_num_steps": _limit(at(tree, "max_steps")),
        **_schedule(tree, at(tree, "learning_rate"), "lr_scheduler", "cosine"),
    }
    if kind != "grpo":
        return {**values, f"{kind}.max_num_epochs": _epochs(tree, "num_epochs", 1)}
    group = at(tree, "trl.num_generations", 8)
    return {
        **values,
        "grpo.num_prompts_per_step": batch_size / group,
        "grpo.num_generations_per_prompt": group,
        "policy.generation.max_new_tokens": at(tree, "trl.max_completion_length"),
        **_clip(at(tree, "trl.epsilon"), at(tree, "trl.epsilon_high")),
    }


def llama_factory(tree: Tree, kind: str) -> Values:
    num_rows = at(tree, "per_device_train_batch_size", 8)
    lr = at(tree, "learning_rate", 5e-5)
    return {
        "policy.train_global_batch_size": num_rows * at(tree, "gradient_accumulation_steps", 1),
        "policy.train_micro_batch_size": num_rows,
        "policy.optimizer.lr": lr,
        "policy.max_total_sequence_length": at(tree, "cutoff_len", 2048),
        f"{kind}.max_num_steps": _limit(at(tree, "max_steps")),
        f"{kind}.max_num_epochs": _epochs(tree, "num_train_epochs", 3),
        **_schedule(tree, lr, "lr_scheduler_type"),
    }


def verl(tree: Tree, kind: str) -> Values:
    if kind == "sft":
        return {
            "policy.train_global_batch_size": at(tree, "data.train_batch_size", 256),
            "policy.optimizer.lr": at(tree, "optim.lr", 1e-5),
            "policy.max_total_sequence_length": at(tree, "data.max_length", 1024),
            "sft.max_num_steps": _limit(at(tree, "trainer.total_training_steps")),
        }
    model = "actor_rollout_ref"
    group = at(tree, "rollout.n", at(tree, f"{model}.rollout.n", 1))
    low = at(tree, f"{model}.actor.clip_ratio", 0.2)
    mini = at(tree, f"{model}.actor.ppo_mini_batch_size", 256)
    prompts = at(tree, "data.train_batch_size", 1024)
    if at(tree, "async_training") is not None:
        # `FullyAsyncTrainer`: the prompts of one weight sync.
        num_batches = at(tree, "async_training.require_batches", 1)
        prompts = mini * num_batches * at(tree, "async_training.trigger_parameter_sync_step", 4)
    return {
        # Both count prompts.
        "policy.train_global_batch_size": mini * group,
        "grpo.num_prompts_per_step": prompts,
        "grpo.num_generations_per_prompt": group,
        "policy.optimizer.lr": at(tree, f"{model}.actor.optim.lr", 1e-6),
        "policy.max_total_sequence_length": at(tree, "data.max_prompt_length", 512)
        + at(tree, "data.max_response_length", 512),
        "policy.generation.max_new_tokens": at(tree, "data.max_response_length", 512),
        "grpo.max_num_steps": _limit(at(tree, "trainer.total_training_steps")),
        "loss_fn.ratio_clip_min": at(tree, f"{model}.actor.clip_ratio_low", low),
        "loss_fn.ratio_clip_max": at(tree, f"{model}.actor.clip_ratio_high", low),
    }


def nemo_rl(tree: Tree, kind: str) -> Values:
    values = {
        "policy.train_global_batch_size": at(tree, "policy.train_global_batch_size"),
        "policy.train_micro_batch_size": at(tree, "policy.train_micro_batch_size"),
        "policy.optimizer.lr": at(tree, "policy.optimizer.kwargs.lr")
        or at(tree, "policy.megatron_cfg.optimizer.lr"),
        "policy.max_total_sequence_length": at(tree, "policy.max_total_sequence_length"),
        f"{kind}.max_num_steps": at(
            tree, f"{'distillation' if kind == 'distill' else kind}.max_num_steps"
        ),
    }
    if kind == "grpo":
        values |= {
            "grpo.num_prompts_per_step": at(tree, "grpo.num_prompts_per_step"),
            "grpo.num_generations_per_prompt": at(tree, "grpo.num_generations_per_prompt"),
            "policy.generation.max_new_tokens": at(tree, "policy.generation.max_new_tokens"),
            "loss_fn.ratio_clip_min": at(tree, "loss_fn.ratio_clip_min", 0.2),
            "loss_fn.ratio_clip_max": at(tree, "loss_fn.ratio_clip_max", 0.2),
        }
    return {key: value for key, value in values.items() if value is not None}


def openrlhf(tree: Tree, kind: str) -> Values:
    """The arguments with dots, and the earlier ones."""
    grpo = kind == "grpo"
    lr = {"sft": 5e-6, "dpo": 1e-5, "rm": 9e-6, "grpo": 1e-6}[kind]
    prefix = "actor." if grpo else ""
    old_lr = at(tree, "actor_learning_rate" if grpo else "learning_rate", lr)
    length = at(tree, "max_len") or at(tree, "data.max_len", 2048)
    if at(tree, "prompt_max_len"):
        length = at(tree, "prompt_max_len") + at(tree, "generate_max_len", 1024)
    values = {
        "policy.train_global_batch_size": at(tree, "train_batch_size")
        or at(tree, "train.batch_size", 128),
        "policy.optimizer.lr": at(tree, f"{prefix}adam.lr", old_lr),
        "policy.max_total_sequence_length": length,
    }
    if not grpo:
        return values
    low = at(tree, "actor.eps_clip", at(tree, "eps_clip", 0.2))
    low_high = at(tree, "actor.eps_clip_low_high", at(tree, "eps_clip_low_high", [low, low]))
    return {
        **values,
        "grpo.num_prompts_per_step": at(tree, "rollout_batch_size")
        or at(tree, "rollout.batch_size", 1024),
        "grpo.num_generations_per_prompt": at(tree, "n_samples_per_prompt")
        or at(tree, "rollout.n_samples_per_prompt", 1),
        "loss_fn.ratio_clip_min": low_high[0],
        "loss_fn.ratio_clip_max": low_high[1],
    }


def prime_rl(tree: Tree, kind: str) -> Values:
    if kind == "sft":
        return {
            "policy.train_global_batch_size": at(tree, "data.batch_size", 128),
            "policy.optimizer.lr": at(tree, "optim.lr", 1e-6),
            "policy.max_total_sequence_length": at(tree, "data.seq_len", 128),
            "sft.max_num_steps": at(tree, "max_steps"),
        }
    rows = at(tree, "orchestrator.batch_size", at(tree, "batch_size"))
    group = at(tree, "orchestrator.group_size", at(tree, "group_size"))
    group = at(tree, "orchestrator.rollouts_per_example", group)
    return {
        "policy.train_global_batch_size": rows,
        "grpo.num_prompts_per_step": rows / group if rows and group else None,
        "grpo.num_generations_per_prompt": group,
        "policy.optimizer.lr": at(tree, "trainer.optim.lr", 1e-6),
        "policy.max_total_sequence_length": at(tree, "seq_len", 2048),
        "grpo.max_num_steps": at(tree, "max_steps"),
    }


def cosmos_rl(tree: Tree, kind: str) -> Values:
    policy = "train.train_policy"
    rows = at(tree, "train.train_batch_per_replica", 8)
    values = {
        "policy.optimizer.lr": at(tree, "train.optm_lr", 1e-6),
        "policy.max_total_sequence_length": at(tree, "policy.model_max_length", 4096),
        f"{kind}.max_num_steps": at(tree, "train.max_num_steps"),
    }
    if kind == "sft" and at(tree, f"{policy}.enable_dp_load_balancing"):
        return {
            **values,
            # The load balancing ignores epochs and numbers of rows.
            "sft.max_num_epochs": None,
            "policy.train_global_batch_size": None,
            "data.batching.kind": "pool",
            "data.batching.tail": "wrap",
            "data.batching.window_rows": at(tree, f"{policy}.load_balanced_pool_size"),
            "data.batching.microbatches_per_step": at(
                tree, f"{policy}.load_balanced_batches_per_optimizer_step", 1
            ),
        }
    if kind != "grpo":
        epochs = at(tree, "train.epoch", 1)
        return {**values, "policy.train_global_batch_size": rows, f"{kind}.max_num_epochs": epochs}
    group = at(tree, "rollout.n_generation", 16)
    return {
        **values,
        "policy.train_global_batch_size": at(tree, f"{policy}.batch_size_per_optimize", rows),
        "grpo.num_prompts_per_step": rows / group,
        "grpo.num_generations_per_prompt": group,
        "policy.generation.max_new_tokens": at(tree, "rollout.max_response_length", 2048),
        "loss_fn.ratio_clip_min": at(tree, f"{policy}.epsilon_low", 0.2),
        "loss_fn.ratio_clip_max": at(tree, f"{policy}.epsilon_high", 0.2),
    }


READERS = {
    "TRL": trl,
    "axolotl": axolotl,
    "LLaMA-Factory": llama_factory,
    "verl": verl,
    "NeMo RL": nemo_rl,
    "OpenRLHF": openrlhf,
    "prime-rl": prime_rl,
    "Cosmos-RL": cosmos_rl,
}


def _limit(steps: Any) -> Any:
    return steps if isinstance(steps, int | float) and steps > 0 else None


def _epochs(tree: Tree, key: str, default: int) -> int:
    """A number of steps replaces the epochs: as many as do not end the run."""
    return _limit(at(tree, "max_steps")) or at(tree, key, default)


def _clip(low: Any, high: Any) -> Values:
    low = 0.2 if low is None else low
    high = low if high is None else high
    return {"loss_fn.ratio_clip_min": low, "loss_fn.ratio_clip_max": high}


def _schedule(tree: Tree, lr: Any, key: str, default: str = "linear") -> Values:
    """The final share of the learning rate of transformers' schedules."""
    if at(tree, key, default) != "cosine_with_min_lr":
        return {}
    options = "lr_scheduler_kwargs"
    least = at(tree, f"{options}.min_lr_rate")
    least = at(tree, f"{options}.min_lr", 0) / lr if least is None else least
    return {"policy.scheduler.kind": "cosine", "policy.scheduler.min_ratio": least}
