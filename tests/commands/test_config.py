"""`nemo-like config` and docs/configuration.md describe every key of the schema."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_like.algorithms.registry import RUN_CONFIGS
from nemo_like.cli import main
from nemo_like.commands.config import reference_text
from nemo_like.config.keys import USER_NAME, KeyReference, all_keys, section_references

DOCUMENT = Path(__file__).parents[2] / "docs" / "configuration.md"
REGENERATE = "python -m nemo_like config all --markdown > docs/configuration.md"


def references(kind: str) -> dict[str, KeyReference]:
    return {
        reference.key: reference
        for section in section_references(RUN_CONFIGS[kind])
        for reference in section.keys
    }


@pytest.mark.parametrize("kind", RUN_CONFIGS)
def test_every_key_and_section_has_a_description(kind: str) -> None:
    found = references(kind)
    keys = {key for key, _ in all_keys(RUN_CONFIGS[kind])}
    # Without the sections, which are the beginnings of other keys.
    leaves = {key for key in keys if not any(each.startswith(f"{key}.") for each in keys)}
    assert {key.replace(USER_NAME, "*") for key in found} == leaves
    without = [key for key, reference in found.items() if not reference.description]
    without += [
        section.path
        for section in section_references(RUN_CONFIGS[kind])
        if not section.description.strip()
    ]
    assert without == [], "write the description as a string below the field in schema.py"


def test_a_key_has_type_default_constraints_and_description() -> None:
    found = references("grpo")
    assert found["policy.optimizer.beta1"] == KeyReference(
        key="policy.optimizer.beta1",
        type="number",
        default="0.9",
        constraints="at least 0 and below 1",
        description="Decay of the running mean of gradients.",
    )
    expected = {
        "run_name": ("text", "required"),
        "resume": ("true or false", "false"),
        "data.max_train_rows": ("integer or null", "null"),
        "data.last_batch": ("keep | drop", "keep"),
        "policy.generation.stop_strings": ("list of texts", "[]"),
        "reward.functions.NAME.weight": ("number", "1.0"),
    }
    assert {key: (found[key].type, found[key].default) for key in expected} == expected


def test_the_document_is_up_to_date() -> None:
    expected = reference_text("all", "", markdown=True) + "\n"
    assert DOCUMENT.read_text(encoding="utf-8") == expected, f"regenerate it with: {REGENERATE}"


def test_one_key_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "sft", "policy.optimizer.lr"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "policy.optimizer.lr",
        "    number; above 0; default 1e-05",
        "    Peak learning rate; `policy.scheduler` scales it per optimizer step.",
    ]


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (
            "grpo.advantage",
            ["baseline", "normalize", "whiten", "components", "turns", "turn_discount"],
        ),
        ("reward.functions", ["path", "weight", "options", "grouped", "keep_special_tokens"]),
        ("reward.functions.answer.weight", ["weight"]),
    ],
)
def test_a_section_is_printed_with_the_keys_below_it(key: str, expected: list[str]) -> None:
    lines = reference_text("grpo", key, markdown=False).splitlines()
    keys = [line for line in lines if not line.startswith(" ")]
    assert [line.rpartition(".")[2] for line in keys] == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("sft", "policy.optimiser.lr"), "did you mean policy.optimizer.lr?"),
        (("sft", "grpo.max_num_steps"), "it belongs to `nemo-like grpo`"),
    ],
)
def test_an_unknown_key_is_one_message_with_a_suggestion(
    arguments: tuple[str, str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", *arguments]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: unknown key {arguments[1]}")
    assert expected in message and len(message.splitlines()) == 1


def test_markdown_names_the_job_of_a_section_that_not_every_job_has() -> None:
    text = reference_text("all", "loss_fn", markdown=True)
    assert "## `loss_fn`\n" in text and "Only for `nemo-like grpo`." in text
    assert "Only for" not in reference_text("all", "policy", markdown=True)


def test_markdown_has_the_keys_that_two_jobs_share_once() -> None:
    text = reference_text("all", "data", markdown=True)
    assert text.count("## `data`\n") == 1 and text.count("* `train_path` ") == 1
    (curriculum,) = [line for line in text.splitlines() if line.startswith("* `curriculum`")]
    assert curriculum.endswith("Only for `nemo-like sft`.")
