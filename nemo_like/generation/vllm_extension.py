"""Methods that are added to vLLM's worker processes: weight updates in place.

vLLM imports this class by name in every worker process of a replica (`worker_extension_cls`). Its
methods become methods of vLLM's worker, so their names must not be methods of that class.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from nemo_like.weight_sync.channel import BucketMessage, ChannelSpec, Endpoint, LoadedBucket
from nemo_like.weight_sync.receiver import WeightReceiver

_MAX_NAMES = 5
"""Names that an error message lists."""


class VLLMWorkerExtension:
    """Loads new weights into the model of one vLLM worker, bucket by bucket.

    With tensor parallelism every worker gets the full tensors and keeps its shard. A failed update
    leaves the model unusable: the replica must be restarted.
    """

    # Set by vLLM's worker, whose base class this becomes.
    vllm_config: Any
    model_config: Any
    model_runner: Any
    rank: int
    device: torch.device

    def weight_endpoint(self) -> Endpoint:
        """Return this process, for `WeightTarget.weight_endpoints`."""
        return Endpoint.of_process(self.device)

    def open_weight_channel(self, spec: ChannelSpec, first_index: int) -> str:
        """Join a channel; the index of this receiver is `first_index` plus the tp rank."""
        self._weight_receiver = WeightReceiver(self.device)
        return self._weight_receiver.open(spec, first_index + self.rank)

    def close_weight_channel(self) -> int:
        """See `WeightTarget.close_weight_channel`."""
        # The class has no constructor of its own: vLLM adds its methods to a worker.
        receiver = getattr(self, "_weight_receiver", None)
        return 0 if receiver is None else receiver.close()

    def begin_update(self) -> None:
        """See `WeightTarget.begin_update`."""
        model = self.model_runner.model
        with set_current_vllm_config(self.vllm_config):
            # Ends an update that broke off, whose values are all replaced now.
            finalize_layerwise_reload(model, self.model_config)
            initialize_layerwise_reload(model)

    def load_bucket(self, message: BucketMessage) -> LoadedBucket:
        """See `WeightTarget.load_bucket`."""
        with set_current_vllm_config(self.vllm_config):
            # Copies, because a layer keeps references to its tensors until all of them have come.
            return self._weight_receiver.load(
                message, self.model_runner.model.load_weights, copy=True
            )

    def finish_update(self) -> None:
        """Complete the update. Raises ValueError if a module did not get all of its weights."""
        model = self.model_runner.model
        with set_current_vllm_config(self.vllm_config):
            incomplete = _incomplete_modules(model)
            if incomplete:
                raise ValueError(
                    f"the weight update left out weights of {len(incomplete)} modules:"
                    f" {', '.join(incomplete[:_MAX_NAMES])} ..."
                )
            finalize_layerwise_reload(model, self.model_config)
            self._refresh_output_head()

    def _refresh_output_head(self) -> None:
        """Repack the output head on CPU.

        There vLLM computes the logits from a packed copy of the head. With tied embeddings the
        reload does not update that copy, since the head has no weights of its own.
        """
        head = getattr(self.model_runner.model, "lm_head", None)
        if head is None or not isinstance(head, VocabParallelEmbedding):
            return
        if head.weight.device.type == "cpu":
            head.quant_method.process_weights_after_loading(head)


def _incomplete_modules(model: nn.Module) -> list[str]:
    """Return the names of modules that have parameters without new values."""
    names = []
    for name, module in model.named_modules():
        info = get_layerwise_info(module)
        parameters = dict(module.named_parameters(recurse=False))
        # A module that got all values has been processed, and its record cleared.
        if not info.can_load() or not parameters:
            continue
        if isinstance(module, VocabParallelEmbedding):
            # The padding of the vocabulary is never loaded. A tied head gets nothing at all.
            is_tied = module is getattr(model, "lm_head", None) and _is_tied(model)
            if info.load_numel > 0 or is_tied:
                continue
        names.append(name)
    return names


def _is_tied(model: nn.Module) -> bool:
    config = getattr(model, "config", None)
    return bool(getattr(config, "tie_word_embeddings", False))
