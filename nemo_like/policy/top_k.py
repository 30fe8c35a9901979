"""The k most probable tokens of a model per position, from hidden states, a chunk at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from nemo_like.policy.collectives import gather_rows
from nemo_like.policy.divergence_chunks import marked_columns
from nemo_like.policy.logit_chunks import scaled_logits
from nemo_like.policy.projection import VocabShard


@torch.no_grad()
def top_k_logprobs(
    hidden: Tensor,
    weight: Tensor,
    *,
    k: int,
    temperature: float,
    chunk_size: int,
    bias: Tensor | None = None,
    vocab: VocabShard | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the token ids int64 [T, k] and the log-probs float32 [T, k + 1].

    The last log-prob is that of all other tokens together. `hidden` is [T, D], `weight` [V, D] and
    `bias` [V] are this rank's rows of the output embedding; the distribution is softmax(logits /
    temperature). The results are equal on all ranks of `vocab`. k is at most the vocabulary size.
    """
    num_tokens = len(hidden)
    ids = torch.empty((num_tokens, k), dtype=torch.int64, device=hidden.device)
    logprobs = torch.empty((num_tokens, k + 1), dtype=torch.float32, device=hidden.device)
    start = 0 if vocab is None else vocab.start
    for first in range(0, num_tokens, chunk_size):
        part = slice(first, first + chunk_size)
        logits = scaled_logits(hidden[part], weight, bias, temperature)
        values, ids[part] = _largest(logits, k, start, vocab)
        is_kept = marked_columns(ids[part] - start, logits.shape[1])
        rest = logits.masked_fill(is_kept, float("-inf"))
        sums = torch.stack([logits.logsumexp(dim=1), rest.logsumexp(dim=1)])
        if vocab is not None:
            sums = gather_rows(vocab.group, sums[None]).logsumexp(dim=0)
        outcomes = torch.cat([values, sums[1][:, None]], dim=1)
        logprobs[part] = outcomes - sums[0][:, None]
    return ids, logprobs


def _largest(logits: Tensor, k: int, start: int, vocab: VocabShard | None) -> tuple[Tensor, Tensor]:
    """Return the k largest logits float32 [chunk, k] over all ranks and their token ids.

    `logits` [chunk, V] are those of this rank, whose first token is `start`.
    """
    num_tokens, num_columns = logits.shape
    if vocab is None:
        return logits.topk(k, dim=1)
    # A rank may have fewer than k rows; its share is filled up to equal sizes.
    num_local = min(k, num_columns)
    values = logits.new_full((num_tokens, k), float("-inf"))
    ids = torch.zeros((num_tokens, k), dtype=torch.int64, device=logits.device)
    if num_local > 0:
        values[:, :num_local], columns = logits.topk(num_local, dim=1)
        ids[:, :num_local] = columns + start
    # [ranks, chunk, k] -> [chunk, ranks x k].
    all_values = gather_rows(vocab.group, values[None]).transpose(0, 1).flatten(1)
    all_ids = gather_rows(vocab.group, ids[None]).transpose(0, 1).flatten(1)
    largest, index = all_values.topk(k, dim=1)
    return largest, all_ids.gather(1, index)
