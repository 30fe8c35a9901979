"""The output embedding of a Hugging Face model, vocabulary-parallel over the tp ranks."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import PreTrainedModel

from nemo_like.config.errors import ConfigError
from nemo_like.policy.dtensor.groups import Groups
from nemo_like.policy.model_inputs import ModelInputs, TokenLogprobs
from nemo_like.policy.projection import VocabShard
from nemo_like.policy.vocab_head import label_logprobs
from nemo_like.sampling_filter import SamplingFilter


class VocabularyHead:
    """The output embedding, tied or not."""

    def __init__(
        self, causal_lm: PreTrainedModel, groups: Groups, chunk_size: int, *, compile: bool
    ) -> None:
        self._causal_lm = causal_lm
        self._tensor = groups.tensor
        self._chunk_size = chunk_size
        self._compile = compile

    def __call__(
        self,
        hidden: Tensor,
        inputs: ModelInputs,
        temperature: float,
        with_entropy: bool,
        token_filter: SamplingFilter | None,
    ) -> TokenLogprobs:
        """See `label_logprobs`; `hidden` is [B, S, D], with sequence parallelism [1, T / tp, D]."""
        if self._tensor is not None and self._tensor.sequence:
            hidden = self._tensor.gather_input(hidden)
        # Looked up in each call: FSDP replaces the parameters of its modules.
        head = output_head(self._causal_lm)
        return label_logprobs(
            hidden.flatten(0, 1),
            head.weight,
            inputs,
            temperature=temperature,
            chunk_size=self._chunk_size,
            with_entropy=with_entropy,
            token_filter=token_filter,
            bias=head.bias,
            vocab=self._vocab_shard(head),
            compile=self._compile,
        )

    def _vocab_shard(self, head: nn.Linear) -> VocabShard | None:
        tensor = self._tensor
        if tensor is None:
            return None
        start, _ = tensor.shard_range(head.out_features)
        # With sequence parallelism the backward of the gather sums the ranks' gradients; without it
        # `token_logprobs` does.
        return VocabShard(tensor.group, start, partial_hidden_grad=tensor.sequence)


def is_tied(model: PreTrainedModel) -> bool:
    """Return True if the input embedding is the output embedding; False with a score head."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def output_head(causal_lm: PreTrainedModel) -> nn.Linear:
    """Return the output embedding, tied or not; raises ConfigError if it is no linear layer."""
    head = causal_lm.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ConfigError(
            f"{type(causal_lm).__name__} has no linear output embedding but {type(head).__name__}"
        )
    return head
