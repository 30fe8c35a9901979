"""Models whose config.json ties the embeddings while their files have an output embedding."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from nemo_like.config.schema import PolicyConfig
from nemo_like.distributed import process_groups
from nemo_like.policy.dtensor.worker import DTensorPolicyWorker
from tests.policy.tiny import context, save_tiny_model

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


def weights_after_loading(engine: Any, model: Path, export: Path) -> dict[str, torch.Tensor]:
    worker_class: Any = DTensorPolicyWorker
    if engine == "megatron":
        pytest.importorskip("megatron.core")
        from nemo_like.policy.megatron.worker import MegatronPolicyWorker

        worker_class = MegatronPolicyWorker
    config = PolicyConfig(model_name=str(model), precision="float32", engine=engine)
    try:
        loaded = worker_class(context(meeting=export.with_name("meeting")), config=config).engine
        loaded.export_hf(export)
        return {name: each.clone() for name, each in loaded.full_weights(loaded.weight_shapes())}
    finally:
        process_groups.destroy()


@pytest.mark.parametrize("engine", ["dtensor", "megatron"])
@pytest.mark.parametrize("stored", ["other", "equal", "only the head"])
def test_the_head_of_the_files_is_used_and_exported(
    engine: str, stored: str, tmp_path: Path
) -> None:
    model = save_tiny_model(tmp_path / "model", "llama_tied")
    weights = load_file(model / "model.safetensors")
    weights[HEAD] = weights[EMBEDDING].clone()
    if stored == "other":
        weights[HEAD] += torch.rand(weights[HEAD].shape)
    if stored == "only the head":
        del weights[EMBEDDING]
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    # transformers 5 unties embeddings that differ in the files.
    expected: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    found = weights_after_loading(engine, model, tmp_path / "export")
    assert (HEAD in found) == (stored == "other")
    assert torch.equal(found[EMBEDDING], expected.get_input_embeddings().weight)
    assert torch.equal(found.get(HEAD, found[EMBEDDING]), expected.lm_head.weight)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    assert exported.config.tie_word_embeddings == (stored != "other")
    tokens = torch.arange(2, 40)[None]
    with torch.no_grad():
        assert torch.equal(exported(tokens).logits, expected(tokens).logits)
