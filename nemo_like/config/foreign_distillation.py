"""Keys of NeMo RL's distillation configs and of TRL's GKD script."""

from __future__ import annotations

from nemo_like.config.foreign_entries import Entry, obsolete, to, unsupported

NEMO_RL_DISTILLATION: dict[str, Entry] = {
    "distillation.seed": to("seed"),
    "distillation.num_prompts_per_step": to("policy.train_global_batch_size"),
    **unsupported(
        "a step samples one completion per prompt",
        "distillation.num_generations_per_prompt",
        off=("1",),
    ),
    **unsupported("rollouts have one turn", "distillation.max_rollout_turns", off=("1",)),
    "distillation.max_num_steps": to("distill.max_num_steps"),
    "distillation.max_num_epochs": to("distill.max_num_epochs"),
    "distillation.val_period": to("distill.val_period"),
    "distillation.val_at_start": to("distill.val_at_start"),
    "distillation.max_val_samples": to("data.max_validation_rows"),
    "distillation.topk_logits_k": to("distill.top_k"),
    "loss_fn.kl_type": to(
        "distill.divergence",
        values={"forward": "forward_kl", "reverse": "reverse_kl", "mixed": "mixed_kl"},
    ),
    "loss_fn.mixed_kl_weight": to("distill.forward_weight", note="for mixed_kl only"),
    "loss_fn.zero_outside_topk": to(
        "distill.top_k_tail",
        values={"false": "renormalize"},
        note="with bucket the tokens outside count as one further token",
    ),
    **obsolete("distillation.val_batch_size", "distillation.val_at_end"),
    "teacher.model_name": to("distill.teacher"),
    **unsupported(
        "a teacher has the engine, the layout and the precision of the policy", "teacher"
    ),
    **unsupported("distillation is a job of its own", "on_policy_distillation"),
}

TRL_DISTILLATION: dict[str, Entry] = {
    "teacher_model_name_or_path": to("distill.teacher"),
    "lmbda": to("distill.on_policy_fraction"),
    **unsupported("the rows of the data may be completions of the teacher", "seq_kd"),
    **unsupported(
        "a teacher has the engine, the layout and the precision of the policy",
        "teacher_model_init_kwargs",
    ),
}
