"""Hostile chat templates and format strings are refused in bounded time and memory; those of real
models pass.
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from nemo_like.algorithms.grpo.config import GrpoRunConfig
from nemo_like.algorithms.sft.config import SftRunConfig
from nemo_like.config.batching import StreamableDataConfig as DataConfig
from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import PolicyConfig
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.datasets import PROMPT_ROWS, SFT_ROWS
from nemo_like.data.row_loading import load_rows
from nemo_like.data.template_limits import check_chat_template, check_prompt_template
from nemo_like.training.encoding import encode_conversation, encode_question, open_training_rows
from nemo_like.training.model_files import open_encoder
from tests.data.tiny_tokenizer import TEMPLATES, tiny_tokenizer

LOOP = "{% for a in range(99999) %}"


@pytest.mark.parametrize(
    "template",
    [
        LOOP * 3 + "{% endfor %}" * 3,
        "{{ 'x' * 10**10 }}",
        "{{ range(10**9) | list }}",
        "{% set ns = namespace(x='ab') %}" + LOOP + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n else 'x' }}{% endmacro %}{{ f(60) }}",
        "{{ 9 ** (9 ** (9 ** 9)) }}",
        "{{ '%9999999999d' | format(1) }}",
        LOOP * 2 + "x" * 100 + "{% endfor %}" * 2,
        "{% if tools %}" + LOOP * 3 + "{% endfor %}" * 3 + "{% endif %}",
        "{% for m in messages if m.tool_calls %}{{ 'x' * 10**10 }}{% endfor %}",
    ],
)
def test_hostile_chat_templates_are_refused(template: str) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with pytest.raises(ConfigError, match=r"the chat template of 'm' does not render"):
        check_chat_template(template, "'m'")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_of_models_pass(name: str) -> None:
    check_chat_template(TEMPLATES[name], name)


SLOW_FOR_ONE_ROW = (
    "{% for m in messages %}{% if 'slow' in m.content %}"
    + LOOP * 3
    + "{% endfor %}" * 3
    + "{% endif %}"
    "{{ m.content }}{{ eos_token }}{% endfor %}"
)


@pytest.mark.parametrize("num_processes", [0, 1])
def test_a_template_that_is_slow_for_the_content_of_one_row_is_a_bad_row(
    tmp_path: Path, num_processes: int
) -> None:
    tokenizer = tiny_tokenizer(SLOW_FOR_ONE_ROW)
    tokenizer.save_pretrained(tmp_path / "model")
    lines = [
        [{"role": "user", "content": text}, {"role": "assistant", "content": "yes"}]
        for text in ("fine", "slow")
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"messages": line}) + "\n" for line in lines))
    config = SftRunConfig(
        run_name="x",
        policy=PolicyConfig(model_name=str(tmp_path / "model")),
        data=DataConfig(train_path=str(data), num_encoding_workers=num_processes),
    )
    rows = open_training_rows(
        config, open_encoder(config, None), load_rows(data, SFT_ROWS), encode_conversation
    )
    before = time.process_time()
    rows.start(np.arange(2))
    with pytest.raises(
        ConfigError,
        match=r"rows\.jsonl:2: the chat template of .* does not render this conversation within"
        r" 2 s",
    ):
        rows.finish()
    assert time.process_time() - before < 4
    assert signal.getsignal(signal.SIGVTALRM) == signal.SIG_DFL
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_a_template_that_fills_the_memory_for_one_row_is_a_bad_row(tmp_path: Path) -> None:
    """In an encoding process, whose memory is bounded."""
    tokenizer = tiny_tokenizer(
        "{% for m in messages %}{{ m.content * (10**10 if 'big' in m.content else 1) }}{% endfor %}"
    )
    tokenizer.save_pretrained(tmp_path / "model")
    data = tmp_path / "rows.jsonl"
    data.write_text(
        "".join(json.dumps({"prompt": text, "answer": "4"}) + "\n" for text in ("fine", "big"))
    )
    config = GrpoRunConfig(
        run_name="x",
        policy=PolicyConfig(model_name=str(tmp_path / "model")),
        data=DataConfig(train_path=str(data), num_encoding_workers=1),
    )
    rows = open_training_rows(
        config, open_encoder(config, None), load_rows(data, PROMPT_ROWS), encode_question
    )
    rows.start(np.arange(2))
    with pytest.raises(
        ConfigError, match=r"rows\.jsonl:2: the row cannot be encoded \(MemoryError"
    ):
        rows.finish()


def test_templates_are_checked_below_a_lower_limit_of_the_user() -> None:
    script = (
        "from nemo_like.data.template_limits import check_chat_template as check; check('a','')"
    )
    command = f'ulimit -v 900000 && exec {sys.executable} -c "{script}"'
    subprocess.run(command, shell=True, check=True)


@pytest.mark.parametrize("template", ["{{ ''|xmlattr }}", "{{ messages[9].content[1:]['x'] + 1 }}"])
def test_any_exception_of_a_template_is_a_refusal(template: str) -> None:
    encoder = ChatEncoder(tiny_tokenizer("{% if messages|length > 1 %}" + template + "{% endif %}"))
    messages = [{"role": "user", "content": "2"}, {"role": "assistant", "content": "4"}]
    with pytest.raises(ConfigError, match=r"refuses turns of \['user', 'assistant'\]: \w+"):
        encoder.encode_sft(messages)
    assert encoder.end_token_ids == (encoder.eos_token_id,)


def test_an_error_of_a_template_is_left_to_its_use() -> None:
    check_chat_template("{{ raise_exception('no') }}", "'m'")
    check_chat_template("{% if %}", "'m'")


@pytest.mark.parametrize(
    "template",
    [
        "{prompt:>9999999999}",
        "{prompt!r}",
        "{prompt.x}",
        "{prompt[0]}",
        "{}",
        "{0}",
        "{x}",
        "{",
        "}",
        "no field",
    ],
)
def test_format_strings_have_one_plain_field(template: str) -> None:
    with pytest.raises(ConfigError, match="prompt_template"):
        check_prompt_template(template)


def test_plain_format_strings_pass() -> None:
    check_prompt_template(None)
    check_prompt_template("Q: {prompt}\n{{json}} {prompt}")
