"""`nemo-like explain loss`: the formula that a config selects, an example, and unused keys."""

from __future__ import annotations

from nemo_like.algorithms.grpo.config import GrpoRunConfig
from nemo_like.commands.loss_formula import formula_lines, keys_without_effect
from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import RunConfig


def explain_loss(config: RunConfig) -> str:
    """Return the explanation of the loss of a GRPO config as text.

    Raises ConfigError for a config of another job, and for a loss of the user that cannot be used.
    """
    if not isinstance(config, GrpoRunConfig):
        raise ConfigError(
            f"`nemo-like explain loss` explains the loss of a grpo config, and this is a config for"
            f" {config.kind}; docs/numerics.md has the losses of sft, dpo and rm"
        )
    # Imports torch, which no other line of this command needs.
    from nemo_like.commands.loss_example import example_lines

    example = example_lines(
        config.loss_fn,
        config.policy.generation.max_new_tokens,
        is_single_step=not config.has_many_optimizer_steps,
    )
    unused = []
    for key, reason in keys_without_effect(config):
        unused.append(f"{key}: {reason}")
    sections = {
        "loss": formula_lines(config),
        "example of two rows, computed with this loss": example,
        "keys of loss_fn without effect": unused or ["none"],
    }
    blocks = []
    for title, lines in sections.items():
        blocks.append("\n".join([f"{title}:", *(f"  {line}".rstrip() for line in lines)]))
    return "\n\n".join(blocks)
