"""The tokens that end a completion, from the files of a model."""

from __future__ import annotations

from transformers import GenerationConfig, PreTrainedTokenizerBase


def declared_end_token_ids(
    generation_config: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase
) -> frozenset[int]:
    """Return the end tokens that the generation config (one or several) and tokenizer declare."""
    declared = None
    if generation_config is not None:
        declared = generation_config.eos_token_id
    ids = declared if isinstance(declared, list) else [declared]
    candidates = [*ids, tokenizer.eos_token_id]
    # Either may be None.
    return frozenset(token_id for token_id in candidates if isinstance(token_id, int))
