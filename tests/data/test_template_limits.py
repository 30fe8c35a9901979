"""Hostile chat templates and format strings are refused in bounded time and memory; those of real models pass."""

from __future__ import annotations

import resource

import pytest

from nemo_like.config.errors import ConfigError
from nemo_like.data.template_limits import check_chat_template, check_prompt_template
from tests.data.tiny_tokenizer import TEMPLATES

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


def test_an_error_of_a_template_is_left_to_its_use() -> None:
    check_chat_template("{{ raise_exception('no') }}", "'m'")
    check_chat_template("{% if %}", "'m'")


@pytest.mark.parametrize(
    "template", ["{prompt:>9999999999}", "{prompt!r}", "{prompt.x}", "{prompt[0]}", "{}", "{0}", "{x}", "{", "}", "no field"]
)
def test_format_strings_have_one_plain_field(template: str) -> None:
    with pytest.raises(ConfigError, match="prompt_template"):
        check_prompt_template(template)


def test_plain_format_strings_pass() -> None:
    check_prompt_template(None)
    check_prompt_template("Q: {prompt}\n{{json}} {prompt}")
