"""LoRA by PEFT in float64, and comparisons with it. Processes of ranks do not import this module:
importing PEFT takes seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
)

from nemo_like.config.schema import AdapterConfig
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from tests.policy.adapters import LORA_OF, adapter_values
from tests.policy.scores import loss_of_scores, reward_batch, scores_by_definition
from tests.policy.test_gradient_equality import TOLERANCE
from tests.policy.tiny import MIXTURES, grouped_batch, row_loss, saved_tensors


class Reference:
    """A model of transformers with adapters by PEFT, in float64 and on unpadded rows."""

    def __init__(self, architecture: str, model: str) -> None:
        self.batch = grouped_batch()
        self.model = model
        lora = LORA_OF[architecture]
        # Grouped products of experts do not exist in float64.
        options = {"experts_implementation": "eager"} if architecture in MIXTURES else {}
        plain = AutoModelForCausalLM.from_pretrained(
            model, attn_implementation="eager", dtype=torch.float64, **options
        )
        self.is_quantized = lora.is_quantized
        if self.is_quantized:
            round_layers(plain)
        self.base_outputs = row_outputs(plain, self.batch)
        adapted, trained = _adapted(plain, lora, architecture, "CAUSAL_LM")
        self.matrices = {name: parameter.detach().clone() for name, parameter in trained.items()}
        loss = row_loss(adapted, self.batch)
        loss.backward()
        self.loss = loss.item()
        self.gradient = _gradients(trained)
        squares = [float(gradient.norm()) ** 2 for gradient in self.gradient.values()]
        self.norm = math.sqrt(sum(squares))
        self.outputs = row_outputs(adapted, self.batch)
        self.logits = row_logits(adapted, self.batch)
        merged = adapted.merge_and_unload()
        self.merged = {name: weight.detach() for name, weight in merged.named_parameters()}


class RewardReference:
    """A reward model of transformers with adapters by PEFT, in float64 and on unpadded rows."""

    def __init__(self, architecture: str, model: str) -> None:
        self.model = model
        self.batch = reward_batch()
        plain = open_classifier(architecture, model, torch.float64)
        adapted, trained = _adapted(plain, LORA_OF[architecture], architecture, "SEQ_CLS")
        scores = scores_by_definition(adapted, self.batch)
        loss = loss_of_scores(scores)
        loss.backward()
        self.loss = loss.item()
        self.gradient = _gradients(trained)
        self.scores: dict[bytes, float] = {}
        for ids, score in zip(self.batch["input_ids"], scores.tolist(), strict=True):
            self.scores[ids.tobytes()] = score


def open_classifier(architecture: str, model: str, dtype: torch.dtype) -> Any:
    """The language or reward model of a directory, with a score head."""
    options = {"experts_implementation": "eager"} if architecture in MIXTURES else {}
    return AutoModelForSequenceClassification.from_pretrained(
        model, num_labels=1, attn_implementation="eager", dtype=dtype, **options
    )


def _adapted(
    plain: Any, lora: AdapterConfig, architecture: str, task: str
) -> tuple[Any, dict[str, Tensor]]:
    """The model with adapters, and its trained parameters, which have known values, by name."""
    adapted: Any = get_peft_model(plain, _peft_config(lora, architecture, task)).double()
    trained = {}
    for name, parameter in adapted.named_parameters():
        if not parameter.requires_grad:
            continue
        own_name = name.removeprefix("base_model.model.").replace("modules_to_save.", "")
        own_name = own_name.replace(".default.", ".")
        parameter.data.copy_(adapter_values(own_name, parameter.shape))
        trained[own_name] = parameter
    return adapted, trained


def _gradients(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradient of each parameter by name."""
    gradients = {}
    for name, parameter in parameters.items():
        assert parameter.grad is not None, name
        gradients[name] = parameter.grad
    return gradients


def _peft_config(lora: AdapterConfig, architecture: str, task: str) -> PeftLoraConfig:
    targets: Any = list(lora.target_modules)
    if targets == ["all-linear"]:
        # PEFT would give adapters to experts as well.
        is_mixture = architecture in MIXTURES
        targets = ["q_proj", "k_proj", "v_proj", "o_proj"] if is_mixture else "all-linear"
    return PeftLoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        use_rslora=lora.use_rslora,
        target_modules=targets,
        lora_dropout=0.0,
        bias="none",
        task_type=task,
        modules_to_save=["score"] if task == "SEQ_CLS" else None,
    )


# Appendix E of the paper (arXiv 2305.14314).
NF4_NEGATIVE = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
)
NF4_POSITIVE = (
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
NF4_VALUES = np.array((*NF4_NEGATIVE, 0.0, *NF4_POSITIVE), dtype=np.float32)


def nf4_rounded(weight: np.ndarray) -> np.ndarray:
    """Round float32 [m, n] to NF4: each value of 64 to the nearest multiple of the largest."""
    blocks = weight.reshape(-1, 64)
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    codes = np.abs((blocks / largest)[..., None] - NF4_VALUES).argmin(axis=-1)
    return (NF4_VALUES[codes] * largest).reshape(weight.shape)


def nf4_values(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The float32 values of blocks of 64, [blocks, 64]: two per byte of `codes`, upper bits first.

    `scales`, float32 of any shape, has the largest magnitude of each block.
    """
    indices = np.stack([codes >> 4, codes & 15], axis=-1)
    return NF4_VALUES[indices].reshape(-1, 64) * scales.reshape(-1, 1)


@torch.no_grad()
def round_layers(model: Any) -> None:
    """Round the weights of all linear layers but the output embedding to NF4."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            rounded = nf4_rounded(module.weight.float().numpy())
            module.weight.copy_(torch.from_numpy(rounded))


@torch.no_grad()
def dequantize_layers(model: Any) -> None:
    """Replace the layers of bitsandbytes by linear layers with the values of their codes.

    Its own products have the precision of bfloat16 on CPUs with instructions for it.
    """
    # Not imported above: it is an extra, and this module is also for LoRA without quantization.
    from bitsandbytes.nn.modules import Linear4bit

    modules = dict(model.named_modules())
    layers = {name: each for name, each in modules.items() if isinstance(each, Linear4bit)}
    assert layers
    for name, layer in layers.items():
        weight: Any = layer.weight
        state = weight.quant_state
        plain = nn.Linear(layer.in_features, layer.out_features, bias=False)
        values = nf4_values(weight.numpy(), state.absmax.numpy())
        plain.weight = nn.Parameter(torch.from_numpy(values.reshape(state.shape)))
        plain.bias = layer.bias
        model.set_submodule(name, plain)


@torch.no_grad()
def row_logits(model: Any, batch: BatchedDataDict) -> dict[bytes, Tensor]:
    """Logits [L, V] of each row, by the row's tokens."""
    logits = {}
    for ids in batch["input_ids"]:
        input_ids = torch.from_numpy(ids.astype(np.int64))[None]
        logits[ids.tobytes()] = model(input_ids).logits[0]
    return logits


def row_outputs(model: Any, batch: BatchedDataDict) -> dict[bytes, np.ndarray]:
    """Log-probs of each row's trained tokens, by the row's tokens."""
    logits = row_logits(model, batch)
    outputs = {}
    for ids, mask, is_trained in zip(
        batch["input_ids"], batch["token_mask"], batch["row_mask"], strict=True
    ):
        labels = torch.from_numpy(ids.astype(np.int64))[1:, None]
        log_probs = logits[ids.tobytes()].log_softmax(-1)
        row = np.zeros(len(ids))
        row[1:] = log_probs[:-1].gather(1, labels).squeeze(1).numpy()
        outputs[ids.tobytes()] = row * mask * is_trained
    return outputs


def assert_look(ranks: Sequence[dict[str, Any]], reference: Reference, where: object) -> None:
    """Gradients on rank 0, the loss on the last rank, the norm on each; outputs where they are."""
    for how, (found, _) in ranks[0]["steps"].items():
        assert found.keys() == reference.gradient.keys()
        for name, gradient in reference.gradient.items():
            error = float((torch.from_numpy(found[name]) - gradient).norm() / gradient.norm())
            assert error < TOLERANCE, (where, how, name)
        _, metrics = ranks[-1]["steps"][how]
        assert metrics["policy/loss"] == pytest.approx(reference.loss, rel=TOLERANCE), (where, how)
        for rank in ranks:
            _, metrics = rank["steps"][how]
            assert metrics["policy/grad_norm"] == pytest.approx(reference.norm, rel=TOLERANCE)
    assert len(ranks[-1]["outputs"]) > 0
    for rank in ranks:
        for ids, prev, base in rank["outputs"]:
            key = ids.tobytes()
            np.testing.assert_allclose(prev, reference.outputs[key], rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(base, reference.base_outputs[key], rtol=1e-5, atol=1e-5)


def assert_use(
    ranks: Sequence[dict[str, Any]], reference: Reference, losses: Sequence[float], out: Path
) -> None:
    """`losses` are those of four steps of one process."""
    for rank in ranks:
        if not np.isnan(rank["losses"]).all():
            assert rank["losses"] == pytest.approx(losses, rel=TOLERANCE)
            assert rank.get("continued", losses[2:]) == pytest.approx(losses[2:], rel=TOLERANCE)
        for ids, trained, kept in rank["kept"]:
            initial = reference.outputs[ids.tobytes()]
            np.testing.assert_allclose(kept, initial, rtol=1e-5, atol=1e-5)
            assert not initial.any() or np.abs(trained - initial).max() > 1e-3
    assert len(ranks[-1]["kept"]) > 0
    assert not np.isnan(ranks[-1]["losses"]).any()
    sent = ranks[0]["weights"]
    for name in sent.keys() & reference.merged.keys():
        expected = reference.merged[name].numpy()
        np.testing.assert_allclose(sent[name], expected, rtol=1e-5, atol=1e-6)
    assert any(name.endswith("q_proj.weight") for name in sent.keys() & reference.merged.keys())
    assert_files(out, reference)


def assert_files(out: Path, reference: Reference) -> None:
    """The checkpoint has the adapters; PEFT loads the adapter, transformers the merged model."""
    saved = saved_tensors(out / "start", "weight")
    assert saved.keys() == reference.matrices.keys()
    for name, matrix in reference.matrices.items():
        assert torch.equal(saved[name], matrix), name
    assert_same_keys(out / "half", saved)
    options: dict[str, Any] = {"attn_implementation": "eager"}
    quantization = {}
    if reference.is_quantized:
        # As QLoRA is used: the base model in 4 bits by bitsandbytes.
        quantization["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
        )
    base = AutoModelForCausalLM.from_pretrained(reference.model, **options, **quantization)
    adapted = PeftModel.from_pretrained(base, str(out / "hf" / "adapter"))
    if reference.is_quantized:
        dequantize_layers(adapted)
    merged = AutoModelForCausalLM.from_pretrained(out / "hf", **options)
    for model in (adapted, merged):
        for ids, logits in row_logits(model, reference.batch).items():
            expected = reference.logits[ids].float()
            torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def assert_scores(
    ranks: Sequence[dict[str, Any]], reference: RewardReference, architecture: str, out: Path
) -> None:
    """Gradients on rank 0, loss and scores where they are; PEFT and transformers read the files."""
    gradients, _ = ranks[0]["steps"]
    assert gradients.keys() == reference.gradient.keys()
    assert "score.weight" in gradients
    for name, gradient in reference.gradient.items():
        error = float((torch.from_numpy(gradients[name]) - gradient).norm() / gradient.norm())
        assert error < TOLERANCE, (architecture, name)
    _, metrics = ranks[-1]["steps"]
    assert metrics["policy/loss"] == pytest.approx(reference.loss, rel=TOLERANCE)
    assert ranks[-1]["scores"] is not None
    for rank in ranks:
        if rank["scores"] is not None:
            expected = [reference.scores[row] for row in rank["rows"]]
            np.testing.assert_allclose(rank["scores"], expected, rtol=1e-5, atol=1e-5)
    assert_same_keys(out / "reward_start", reference.gradient, kinds=("weight",))
    base = open_classifier(architecture, reference.model, torch.float32)
    adapted = PeftModel.from_pretrained(base, str(out / "reward_model" / "adapter"))
    merged = open_classifier(architecture, str(out / "reward_model"), torch.float32)
    for model in (adapted, merged):
        found = scores_by_definition(model, reference.batch).numpy()
        np.testing.assert_allclose(found, [*reference.scores.values()], rtol=1e-5, atol=1e-5)


def assert_same_keys(
    checkpoint: Path,
    weights: Mapping[str, Tensor],
    kinds: Sequence[str] = ("weight", "exp_avg", "exp_avg_sq"),
) -> None:
    """A checkpoint has both moments of each weight and nothing else."""
    for kind in kinds:
        tensors = saved_tensors(checkpoint, kind)
        assert tensors.keys() == weights.keys()
        assert all(tensors[name].shape == weights[name].shape for name in tensors)
