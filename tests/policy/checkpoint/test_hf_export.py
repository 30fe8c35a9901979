"""Files of an exported model: what its source has, in a form that other readers understand."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
)

from nemo_like.config.schema import PolicyConfig
from nemo_like.models.pretrained import load_model_config
from nemo_like.policy.checkpoint import hf_export
from nemo_like.policy.checkpoint.hf_metadata import write_config
from tests.policy.tiny import save_tiny_model

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
YARN = {"rope_type": "yarn", "rope_theta": 5e4, "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 2e4,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 32,
}
GEMMA = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "qwen2": {"rope_parameters": YARN | {"original_max_position_embeddings": 32}},
    "phi3": {"rope_parameters": LONGROPE, "pad_token_id": 0},
    "gemma3_text": {"rope_parameters": GEMMA, "head_dim": 8},
    "glm4": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 3e4,
            "partial_rotary_factor": 0.5,
        },
        "head_dim": 8,
        "pad_token_id": 0,
    },
}


class ModelWeights:
    """Implements `Weights` with the weights of a transformers model."""

    def __init__(self, model: Any) -> None:
        self._tensors = {name: weight.detach() for name, weight in model.named_parameters()}

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(weight.shape) for name, weight in self._tensors.items()}

    def full_weights(self, names: Any) -> Any:
        for name in names:
            yield name, self._tensors[name]


def export(source: Path, directory: Path) -> None:
    """Export the model of `source` as a run with it does."""
    config = load_model_config(str(source))
    model = AutoModelForCausalLM.from_pretrained(source, config=config, dtype=torch.float32)
    policy = PolicyConfig(model_name=str(source), precision="float32")
    hf_export.write_hf(ModelWeights(model), config, policy, directory)


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A deepseek_v3 with the layer for multi-token prediction that transformers does not load."""
    directory = tmp_path_factory.mktemp("source")
    save_tiny_model(directory, "deepseek_v3")
    config = read_json(directory / "config.json") | {"num_nextn_predict_layers": 1}
    (directory / "config.json").write_text(json.dumps(config))
    weights = load_file(directory / "model.safetensors")
    last = config["num_hidden_layers"]
    for name in ("enorm.weight", "hnorm.weight", "mlp.experts.0.gate_proj.weight"):
        weights[f"model.layers.{last}.{name}"] = torch.rand(8).to(torch.bfloat16)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize("max_bytes", [1 << 30, 40_000])
def test_tensors_that_the_model_does_not_load_are_kept(
    max_bytes: int,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(hf_export, "MAX_FILE_BYTES", max_bytes)
    export(source, tmp_path)
    (message,) = [each for each in caplog.messages if "exported" in each]
    assert message.startswith("3 tensors of ") and "are exported as they were" in message
    expected = load_file(source / "model.safetensors")
    found: dict[str, torch.Tensor] = {}
    for path in tmp_path.glob("*.safetensors"):
        found |= load_file(path)
    assert found.keys() == expected.keys()
    last = read_json(source / "config.json")["num_hidden_layers"]
    for name, tensor in expected.items():
        assert torch.equal(found[name].float(), tensor.float()), name
        if f"layers.{last}." in name:
            assert found[name].dtype == tensor.dtype
    index = tmp_path / "model.safetensors.index.json"
    assert index.is_file() == (max_bytes == 40_000)
    if index.is_file():
        # The sum of the tensors in the files, buffers of routers included.
        assert read_json(index)["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
        assert read_json(index)["weight_map"].keys() == expected.keys()


VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 16,
    "num_position_embeddings": 16,
}


@pytest.mark.parametrize("of_engine", [True, False], ids=["engine", "checkpoint"])
@pytest.mark.parametrize("config_class", [Qwen3_5Config, Qwen3_5MoeConfig])
def test_the_tower_of_a_composite_is_kept(
    config_class: Any, of_engine: bool, tmp_path: Path
) -> None:
    """An engine has the configuration of the language model, `nemo-like export` that of both."""
    source = tmp_path / "source"
    save_tiny_model(source, "llama")
    text = SIZES | {"head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2}
    text |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    text["layer_types"] = ["linear_attention", "full_attention"]
    if config_class is Qwen3_5MoeConfig:
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
        text["shared_expert_intermediate_size"] = 8
    config = config_class(text_config=text, vision_config=VISION, tie_word_embeddings=False)
    AutoModelForImageTextToText.from_config(config).save_pretrained(source)
    (source / "preprocessor_config.json").write_text('{"patch_size": 4}')
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        model.model.norm.weight += 1
    stored = model.config if of_engine else load_model_config(str(source))
    policy = PolicyConfig(model_name=str(source), precision="float32")
    hf_export.write_hf(ModelWeights(model), stored, policy, tmp_path / "export")
    expected = load_file(source / "model.safetensors")
    expected["model.language_model.norm.weight"] += 1
    found = load_file(tmp_path / "export/model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert any(name.startswith("model.visual.") for name in found)
    written, original = (
        read_json(tmp_path / f"{name}/config.json") for name in ("export", "source")
    )
    assert written["architectures"] == original["architectures"]
    assert original["text_config"].items() <= written["text_config"].items()
    assert original["vision_config"] == written["vision_config"]
    copied = tmp_path / "export/preprocessor_config.json"
    assert copied.read_text() == '{"patch_size": 4}'
    auto_class: Any = AutoModelForImageTextToText
    _, loading = auto_class.from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not any(loading.values()), loading


def test_the_tokenizer_is_that_of_the_source(source: Path, tmp_path: Path) -> None:
    settings = read_json(source / "tokenizer_config.json")
    # As transformers 4 writes them.
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings["added_tokens_decoder"] = {"3": {"content": "<x>", "special": True}}
    settings |= {"is_local": True, "local_files_only": True}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    export(source, tmp_path)
    found = read_json(tmp_path / "tokenizer_config.json")
    assert found["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert found["added_tokens_decoder"] == settings["added_tokens_decoder"]
    assert not {"is_local", "local_files_only", "backend"} & found.keys()
    assert (tmp_path / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def save_config(name: str, directory: Path) -> Any:
    config = AutoConfig.for_model(name, **SIZES, max_position_embeddings=128, **CONFIGS[name])
    config.save_pretrained(directory)
    return AutoConfig.from_pretrained(directory)


@pytest.mark.parametrize("name", CONFIGS)
def test_rope_parameters_are_also_written_for_transformers_4(name: str, tmp_path: Path) -> None:
    config = save_config(name, tmp_path / "source")
    write_config(config, tmp_path / "source", tmp_path / "export")
    written = read_json(tmp_path / "export/config.json")
    main = CONFIGS[name]["rope_parameters"]
    main = main.get("full_attention", main)
    assert written["rope_theta"] == main["rope_theta"]
    scaling = written["rope_scaling"] or {}
    assert scaling.get("factor") == main.get("factor")
    assert written.get("partial_rotary_factor") == main.get("partial_rotary_factor")
    if name == "gemma3_text":
        assert written["rope_local_base_freq"] == 1e4
    # transformers 5 reads the same parameters from both forms.
    read = AutoConfig.from_pretrained(tmp_path / "export")
    for kind, values in config.rope_parameters.items():
        found = read.rope_parameters[kind]
        assert not isinstance(values, dict) or values.items() <= found.items()
        assert isinstance(values, dict) or found == values


def test_keys_of_a_source_of_transformers_4_are_kept(tmp_path: Path) -> None:
    source = tmp_path / "source"
    LlamaConfig(**SIZES).save_pretrained(source)
    stored = read_json(source / "config.json")
    del stored["rope_parameters"]
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 64
    (source / "config.json").write_text(
        json.dumps(stored | {"rope_theta": 5e5, "rope_scaling": rope})
    )
    write_config(AutoConfig.from_pretrained(source), source, tmp_path / "export")
    written = read_json(tmp_path / "export/config.json")
    assert (written["rope_theta"], written["rope_scaling"]) == (5e5, rope)


READ_CONFIGS = """
import json, sys
sys.path[:0] = [sys.argv[1]]
sys.path.append(sys.argv[2])
import torch, transformers
from transformers import AutoConfig, AutoModelForCausalLM
assert transformers.__version__ == "4.57.6"
for directory in sys.argv[3:]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.arange(100)[None] % 64).logits
    torch.save(logits, directory + "/logits.pt")
"""


@pytest.fixture(scope="module")
def transformers_4(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with transformers 4.57.6; NEMO_LIKE_TRANSFORMERS_4 names one that exists."""
    found = os.environ.get("NEMO_LIKE_TRANSFORMERS_4")
    if found:
        return found
    target = str(tmp_path_factory.mktemp("transformers_4"))
    packages = ["transformers==4.57.6", "huggingface_hub<1", "tokenizers<0.23"]
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", target]
    result = subprocess.run([*command, *packages], capture_output=True, text=True, check=False)
    if result.returncode:
        pytest.skip(f"transformers 4.57.6 cannot be installed: {result.stderr[-200:]}")
    return target


@pytest.mark.exhaustive
def test_transformers_4_computes_the_same_logits(transformers_4: str, tmp_path: Path) -> None:
    directories = []
    for name in CONFIGS:
        source = tmp_path / name / "source"
        config = save_config(name, source)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        model.save_pretrained(source)
        directory = tmp_path / name / "export"
        model.save_pretrained(directory)
        write_config(model.config, source, directory)
        directories.append(directory)
    packages = sysconfig.get_path("purelib")
    arguments = [transformers_4, packages, *map(str, directories)]
    subprocess.run([sys.executable, "-c", READ_CONFIGS, *arguments], check=True)
    for directory in directories:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        with torch.no_grad():
            expected = model(torch.arange(100)[None] % 64).logits
        found = torch.load(directory / "logits.pt", weights_only=True)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
