"""The methods of a generation worker that a driver calls.

A worker is one replica of the generator, on one or several devices. It implements
`GenerationWorkerProtocol` and runs only while one of its methods is called: the driver submits
requests, then calls `poll` again and again, and updates the weights between two polls. Weights,
requests and completions therefore change in the order of the calls, with no thread in the worker.
"""

from __future__ import annotations

from typing import Protocol

from nemo_like.data.jagged import Jagged
from nemo_like.generation.requests import GenerationProgress, GenerationRequests
from nemo_like.weight_sync.channel import WeightTarget


class GenerationWorkerProtocol(WeightTarget, Protocol):
    """One replica of the generator.

    A weight update (`WeightTarget`) may come while requests are unfinished. They then continue with
    the new weights: the replica recomputes their KV cache, and no cached prefix of the old weights
    is read again.
    """

    def submit(self, requests: GenerationRequests) -> None:
        """Add requests to the queue; they are decoded by later calls of `poll`.

        Raises ValueError for a prompt that is empty or leaves no room for a token; no request of
        the call is added then.
        """
        ...

    def poll(self, max_seconds: float) -> GenerationProgress:
        """Decode for about `max_seconds`, or until every request is finished.

        At least one decoding step is done if a request is unfinished. Raises FloatingPointError if
        the model's logits are not finite, RuntimeError inside a weight update.
        """
        ...

    def partial_tokens(self) -> dict[int, list[int]]:
        """Return the tokens sampled so far for each running request, by its id.

        For output while a completion is decoded; `poll` returns the complete ones.
        """
        ...

    def abort(self) -> int:
        """Discard all unfinished requests; return the number of tokens sampled for them."""
        ...

    def start_rollout(self) -> None:
        """Forget cached prefixes if no request is unfinished.

        Results of a rollout then do not depend on what the replica computed before, which a
        bit-exact resume needs.
        """
        ...

    def score(self, rows: Jagged) -> Jagged:
        """Return the log-prob of each token given those before it in its row, float32.

        `rows` has int32 token ids, at most `max_total_length` per row. The log-probs are those of
        the model at temperature 1 without filters; the first of each row is 0. The result has the
        lengths of `rows`. For the comparison with the policy after a weight update: raises
        RuntimeError if cached prefixes of older weights would be read.
        """
        ...

    def offload(self) -> None:
        """Release the memory of the device: weights go to host memory, the KV cache is dropped."""
        ...

    def onload(self) -> None:
        """Move the weights back to the device."""
        ...
