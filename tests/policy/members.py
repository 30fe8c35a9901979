"""Members of the policy-gradient losses, and the gradient of a model by definition in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from nemo_like.config.loss import ImportanceCorrectionConfig, PolicyGradientLossConfig
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.losses import ClippedPolicyGradientLoss
from tests.losses.definition import DefinedRow, gradient, loss_value


def _member(kind: str = "none", **keys: Any) -> PolicyGradientLossConfig:
    correction = ImportanceCorrectionConfig(kind=kind)  # type: ignore[arg-type]
    return PolicyGradientLossConfig(
        reference_policy_kl_penalty=0.05,
        reference_policy_kl_type="k2",
        importance_correction=correction,
        **keys,
    )


MEMBERS = {
    "dapo": _member(ratio_clip_max=0.28),
    "dr_grpo": _member(normalization="constant", constant_length=20),
    "gspo": _member("sequence_truncate", surrogate="gspo"),
    "gspo_token": _member("token_truncate", surrogate="gspo_token", normalization="token"),
    "cispo": _member("token_mask", surrogate="cispo"),
    "reinforce": _member(surrogate="reinforce", normalization="sequence"),
}
LOSSES = {name: ClippedPolicyGradientLoss(config=config) for name, config in MEMBERS.items()}


def gradients_by_definition(
    model: str, batch: BatchedDataDict, config: PolicyGradientLossConfig
) -> tuple[dict[str, Tensor], float]:
    """Gradients and loss by plain transformers on unpadded rows, in float64.

    The gradient with respect to the log-probs is that of finite differences.
    """
    policy = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float64, experts_implementation="eager"
    )
    rows: list[DefinedRow] = []
    logprobs: list[Tensor] = []
    for index, ids in enumerate(batch["input_ids"]):
        input_ids = torch.from_numpy(ids.astype(np.int64))[None]
        all_logprobs = policy(input_ids).logits[0, :-1].log_softmax(-1)
        of_labels = all_logprobs.gather(1, input_ids[0, 1:, None]).squeeze(1)
        logprobs.append(of_labels)

        def column(name: str, index: int = index) -> np.ndarray:
            return np.asarray(batch[name][index])[1:].astype(np.float64)

        is_trained = column("token_mask").astype(bool) & bool(batch["row_mask"][index])
        rows.append(
            DefinedRow(
                policy=of_labels.detach().numpy(),
                prev=column("prev_logprobs"),
                generation=column("generation_logprobs"),
                reference=column("reference_logprobs"),
                entropy=np.zeros(len(is_trained)),
                is_trained=is_trained,
                advantage=float(batch["advantages"][index]),
            )
        )
    policies = [row.policy for row in rows]
    loss = loss_value(rows, policies, policies, config)
    derivatives = [torch.from_numpy(each) for each in gradient(rows, config)]
    torch.autograd.backward(logprobs, derivatives)
    gradients: dict[str, Tensor] = {}
    for name, parameter in policy.named_parameters():
        assert parameter.grad is not None
        gradients[name] = parameter.grad.float()
    return gradients, loss
