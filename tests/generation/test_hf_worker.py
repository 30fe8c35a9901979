"""The embedded generator against transformers: greedy tokens, log-probs of a full forward, rows on
their own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from nemo_like.data.jagged import Jagged
from nemo_like.distributed.local_group import local_context
from nemo_like.generation.hf_worker import HFGenerationWorker
from nemo_like.generation.requests import (
    Completions,
    GenerationRequests,
    GenerationStart,
    SamplingParams,
)
from nemo_like.sampling_filter import filter_logits
from nemo_like.weight_sync.channel import BucketMessage, ChannelSpec
from tests.generation.driven import generate

_TEXT = [
    "the quick brown fox jumps over the lazy dog",
    "12 + 30 = 42, so 42 is the answer",
    "wörter mit ümlaut: süß, größer",
]
_CONTEXT = local_context(num_threads=1)
_SIZES = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # wide, so that distributions are far from uniform
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


class _Driven(HFGenerationWorker):
    """A worker with a method that runs a batch of prompts."""

    def generate(
        self, prompt_ids: Jagged, seeds: np.ndarray, sampling: SamplingParams, max_total_length: int
    ) -> Completions:
        return generate(self, prompt_ids, seeds, sampling, max_total_length)


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE: tokens of several characters, and characters of several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


@pytest.fixture(scope="module", params=["llama", "qwen3", "gpt2"])
def model_directory(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    if request.param == "llama":
        model = LlamaForCausalLM(LlamaConfig(**_SIZES, tie_word_embeddings=False))
    elif request.param == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**_SIZES, head_dim=8, tie_word_embeddings=True))
    else:  # learned absolute positions: the one that notices wrong position ids
        names: dict[str, Any] = {
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 128,
            "bos_token_id": 0,
            "eos_token_id": 1,
        }
        model = GPT2LMHeadModel(GPT2Config(vocab_size=320, initializer_range=0.3, **names))
    model.save_pretrained(directory)
    byte_level_tokenizer().save_pretrained(directory)
    return directory


def _worker(directory: Path, batch_size: int = 64) -> _Driven:
    return _Driven(
        _CONTEXT, batch_size=batch_size, start=GenerationStart(model_name=str(directory))
    )


def _prompts(num_rows: int, seed: int = 0) -> Jagged:
    rng = np.random.default_rng(seed)
    return Jagged.from_rows(
        [rng.integers(2, 320, rng.integers(1, 12)) for _ in range(num_rows)], np.int32
    )


def _seeds(num_rows: int) -> np.ndarray:
    return np.arange(num_rows, dtype=np.uint64) + 100


def _same(left: Completions, right: Completions) -> None:
    assert left.finish_reasons == right.finish_reasons
    assert np.array_equal(left.token_ids.offsets, right.token_ids.offsets)
    assert np.array_equal(left.token_ids.values, right.token_ids.values)
    np.testing.assert_allclose(left.logprobs.values, right.logprobs.values, atol=1e-4)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_new_tokens=12),
        SamplingParams(max_new_tokens=12, temperature=0.7, top_k=20, top_p=0.9, min_p=0.02),
        SamplingParams(max_new_tokens=12, temperature=0.0),
    ],
)
def test_logprobs_equal_a_full_forward(model_directory: Path, sampling: SamplingParams) -> None:
    prompts = _prompts(9)
    completions = _worker(model_directory, batch_size=4).generate(
        prompts, _seeds(9), sampling, max_total_length=64
    )
    model = AutoModelForCausalLM.from_pretrained(model_directory)
    for prompt, token_ids, logprobs in zip(
        prompts, completions.token_ids, completions.logprobs, strict=True
    ):
        row = torch.from_numpy(np.concatenate([prompt, token_ids]).astype(np.int64))
        with torch.no_grad():
            logits = model(row[None]).logits[0, len(prompt) - 1 : -1]
        if sampling.temperature:
            logits = filter_logits(logits / sampling.temperature, sampling.token_filter)
        expected = logits.log_softmax(dim=-1).gather(-1, row[len(prompt) :, None]).squeeze(-1)
        np.testing.assert_allclose(logprobs, expected.numpy(), atol=1e-4)


def test_given_end_tokens_end_a_completion_too(model_directory: Path) -> None:
    """The chat template's end of a turn is passed where neither the model nor the tokenizer
    declares it.
    """
    prompts, greedy = _prompts(4), SamplingParams(max_new_tokens=12, temperature=0.0)
    free = _worker(model_directory).generate(prompts, _seeds(4), greedy, max_total_length=64)
    end = int(free.token_ids[0][5])
    worker = _Driven(
        _CONTEXT, start=GenerationStart(model_name=str(model_directory), end_token_ids=(end,))
    )
    ended = worker.generate(prompts, _seeds(4), greedy, max_total_length=64)
    assert ended.finish_reasons[0] == "stop"
    for full, cut in zip(free.token_ids, ended.token_ids, strict=True):
        stops = np.flatnonzero(full == end)
        assert cut.tolist() == full[: stops[0] + 1 if len(stops) else None].tolist()


def test_greedy_equals_transformers_generate(model_directory: Path) -> None:
    prompts = _prompts(8, seed=1)
    sampling = SamplingParams(max_new_tokens=16, temperature=0.0)
    completions = _worker(model_directory, batch_size=3).generate(
        prompts, _seeds(8), sampling, max_total_length=64
    )
    model: Any = AutoModelForCausalLM.from_pretrained(model_directory)
    for prompt, token_ids in zip(prompts, completions.token_ids, strict=True):
        input_ids = torch.from_numpy(prompt.astype(np.int64))[None]
        expected = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=False,
            max_new_tokens=16,
            pad_token_id=0,
        )
        assert token_ids.tolist() == expected[0, len(prompt) :].tolist()


def test_a_row_depends_on_its_prompt_and_seed_alone(model_directory: Path) -> None:
    """Whatever the batch size, the order, or the rows beside it (which end at other times and are
    compacted away).
    """
    prompts, seeds = _prompts(24, seed=2), _seeds(24)
    sampling = SamplingParams(max_new_tokens=40, temperature=1.3)
    worker = _worker(model_directory)
    worker.end_ids = frozenset(range(1, 16))  # so that rows end early and late
    together = worker.generate(prompts, seeds, sampling, max_total_length=64)
    assert len(set(together.token_ids.lengths.tolist())) > 3, (
        "rows must end at different times for this test to mean anything"
    )
    worker.batch_size = 5
    _same(worker.generate(prompts, seeds, sampling, max_total_length=64), together)
    order = np.random.default_rng(0).permutation(24)
    _same(
        worker.generate(prompts.take(order), seeds[order], sampling, max_total_length=64),
        together.take(order),
    )
    _same(
        worker.generate(prompts.slice(3, 4), seeds[3:4], sampling, max_total_length=64),
        together.take(np.array([3])),
    )


def test_equal_prompts_with_other_seeds_differ(model_directory: Path) -> None:
    prompts = Jagged.from_rows([[5, 6, 7]] * 4, np.int32)
    completions = _worker(model_directory).generate(
        prompts, _seeds(4), SamplingParams(max_new_tokens=20), max_total_length=64
    )
    assert len({tuple(row.tolist()) for row in completions.token_ids}) == 4


def test_lengths_end_where_the_limits_say(model_directory: Path) -> None:
    prompts = Jagged.from_rows([[5] * 3, [6] * 10, [7] * 19], np.int32)
    worker = _worker(model_directory)
    sampling = SamplingParams(max_new_tokens=15, temperature=0.0)
    worker.end_ids = frozenset()
    completions = worker.generate(prompts, _seeds(3), sampling, max_total_length=20)
    assert completions.token_ids.lengths.tolist() == [15, 10, 1]
    assert completions.finish_reasons == ["length"] * 3


def test_a_finished_row_does_not_outgrow_the_models_positions(model_directory: Path) -> None:
    """One of four is not enough to be cut out, so it stays in the batch until the others end."""
    prompts = Jagged.from_rows([[5] * 126, [6], [7], [8]], np.int32)
    worker = _worker(model_directory)
    worker.end_ids = frozenset()
    completions = worker.generate(
        prompts, _seeds(4), SamplingParams(max_new_tokens=200), max_total_length=128
    )
    assert completions.token_ids.lengths.tolist() == [2, 127, 127, 127]


def test_the_end_token_is_the_last_and_the_reason_is_stop(model_directory: Path) -> None:
    sampling = SamplingParams(max_new_tokens=100, temperature=1.5)
    completions = _worker(model_directory).generate(
        _prompts(16), _seeds(16), sampling, max_total_length=128
    )
    for token_ids, reason in zip(completions.token_ids, completions.finish_reasons, strict=True):
        assert (token_ids[-1] == 1) == (reason == "stop")
        assert 1 not in token_ids[:-1]


def test_stop_strings_end_with_the_token_that_completes_one(model_directory: Path) -> None:
    worker = _worker(model_directory)
    prompts, seeds = _prompts(12, seed=4), _seeds(12)
    free = worker.generate(prompts, seeds, SamplingParams(max_new_tokens=60), max_total_length=128)
    texts = [str(worker.tokenizer.decode(row)) for row in free.token_ids]
    stops = (texts[0][7:10], texts[1][11:16])
    stopped = worker.generate(
        prompts, seeds, SamplingParams(max_new_tokens=60, stop_strings=stops), max_total_length=128
    )
    for row in range(12):
        token_ids = stopped.token_ids[row]
        assert token_ids.tolist() == free.token_ids[row][: len(token_ids)].tolist()
        before = str(worker.tokenizer.decode(token_ids[:-1]))
        text = str(worker.tokenizer.decode(token_ids))
        assert not any(stop in before for stop in stops)
        assert any(stop in text for stop in stops) or len(token_ids) == len(free.token_ids[row])
    assert stopped.finish_reasons[:2] == ["stop", "stop"]
    assert stopped.token_ids.lengths[0] < free.token_ids.lengths[0]


def test_no_rows_give_no_rows(model_directory: Path) -> None:
    empty = Jagged.from_rows([], np.int32)
    completions = _worker(model_directory).generate(
        empty, _seeds(0), SamplingParams(max_new_tokens=3), max_total_length=8
    )
    assert len(completions) == 0 and len(completions.token_ids) == 0


def test_bfloat16_follows_its_own_forward(model_directory: Path) -> None:
    worker = _Driven(
        _CONTEXT, start=GenerationStart(model_name=str(model_directory), precision="bfloat16")
    )
    completions = worker.generate(
        _prompts(6), _seeds(6), SamplingParams(max_new_tokens=8), max_total_length=64
    )
    assert completions.logprobs.dtype == np.float32
    assert (
        np.isfinite(completions.logprobs.values).all() and (completions.logprobs.values <= 0).all()
    )


def test_a_weight_update_changes_the_model_and_the_version(model_directory: Path) -> None:
    prompts, seeds, sampling = (
        _prompts(6),
        _seeds(6),
        SamplingParams(max_new_tokens=10, temperature=0.0),
    )
    worker = _worker(model_directory)
    before = worker.generate(prompts, seeds, sampling, max_total_length=64)
    assert before.versions == (0, 0)
    model = AutoModelForCausalLM.from_pretrained(model_directory)
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    named = [(name, parameter.data) for name, parameter in model.named_parameters()]
    _begin_update(worker, [name for name, _ in named])
    worker.load_bucket(BucketMessage(0, tuple(named[:3])))
    with pytest.raises(RuntimeError, match="inside a weight update"):
        worker.poll(0.0)
    worker.load_bucket(BucketMessage(1, tuple(named[3:])))
    worker.finish_update(version=7)
    after = worker.generate(prompts, seeds, sampling, max_total_length=64)
    assert after.versions == (7, 7)
    assert not np.array_equal(before.token_ids.values, after.token_ids.values)
    for prompt, token_ids in zip(prompts, after.token_ids, strict=True):
        row = torch.from_numpy(np.concatenate([prompt, token_ids]).astype(np.int64))
        with torch.no_grad():
            assert (
                model(row[None]).logits[0, len(prompt) - 1 : -1].argmax(dim=-1).tolist()
                == token_ids.tolist()
            )


def _begin_update(worker: HFGenerationWorker, names: list[str]) -> None:
    spec = ChannelSpec(transport="in_process", layouts=(), slot_bytes=0, timeout_s=1.0)
    assert worker.open_weight_channel(spec, (0,)) == ""
    worker.begin_update(names)


def test_a_weight_update_that_does_not_fit_names_the_weight(model_directory: Path) -> None:
    worker = _worker(model_directory)
    names = [name for name, _ in worker.model.named_parameters()]
    with pytest.raises(ValueError, match=r"does not have: model\.extra"):
        _begin_update(worker, [*names, "model.extra"])
    with pytest.raises(ValueError, match=rf"does not send 1 weights .*: {names[-1]}"):
        _begin_update(worker, names[:-1])
    with pytest.raises(RuntimeError, match="outside begin_update"):
        worker.load_bucket(BucketMessage(0, ()))
    _begin_update(worker, names)
    with pytest.raises(ValueError, match=r"'model\.extra' is not part of"):
        worker.load_bucket(BucketMessage(0, (("model.extra", torch.zeros(2)),)))
    name, parameter = next(iter(worker.model.named_parameters()))
    with pytest.raises(ValueError, match=rf"{name!r} has shape \(3,\), .* \(320, 32\)"):
        worker.load_bucket(BucketMessage(0, ((name, parameter[0, :3]),)))
    with pytest.raises(ValueError, match="left out"):
        worker.finish_update(version=1)


def test_tied_embeddings_are_delivered_by_either_name(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**_SIZES, tie_word_embeddings=True))
    model.save_pretrained(tmp_path)
    byte_level_tokenizer().save_pretrained(tmp_path)
    names = dict(model.named_parameters())
    embedding = names.pop("model.embed_tokens.weight").data + 1
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        worker = _worker(tmp_path)
        others = [(other, value.data) for other, value in names.items()]
        named = ((name, embedding), *others)
        _begin_update(worker, [name for name, _ in named])
        worker.load_bucket(BucketMessage(0, named))
        worker.finish_update(version=1)
        weights = worker.model.state_dict()
        assert torch.equal(weights["model.embed_tokens.weight"], embedding)
        assert torch.equal(weights["lm_head.weight"], embedding)


def test_diverged_weights_are_reported_and_not_sampled_from(model_directory: Path) -> None:
    worker = _worker(model_directory)
    next(worker.model.parameters()).fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="not finite at token 0"):
        worker.generate(
            _prompts(2), _seeds(2), SamplingParams(max_new_tokens=3), max_total_length=64
        )


def test_a_completion_over_two_versions_has_the_log_probs_of_each(model_directory: Path) -> None:
    """An update between two polls: tokens before it are those of the old weights, tokens after it
    those of the new weights given all tokens before.
    """
    prompts, sampling = _prompts(5, seed=3), SamplingParams(max_new_tokens=30)
    worker = _worker(model_directory)
    worker.end_ids = frozenset()
    ids = np.arange(5, dtype=np.int64)
    worker.submit(GenerationRequests(ids, prompts, _seeds(5), sampling, max_total_length=64))
    for _ in range(12):
        assert len(worker.poll(0.0).request_ids) == 0
    old = AutoModelForCausalLM.from_pretrained(model_directory)
    new = AutoModelForCausalLM.from_pretrained(model_directory)
    torch.manual_seed(1)
    for parameter in new.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    _begin_update(worker, [name for name, _ in new.named_parameters()])
    worker.load_bucket(BucketMessage(0, tuple((n, p.data) for n, p in new.named_parameters())))
    worker.finish_update(version=1)
    progress = worker.poll(60.0)
    assert progress.num_unfinished == 0 and len(progress.request_ids) == 5
    for position, request_id in enumerate(progress.request_ids.tolist()):
        prompt = prompts[request_id]
        versions = progress.completions.weight_versions[position]
        assert versions.tolist() == [0] * 12 + [1] * 18
        token_ids = progress.completions.token_ids[position]
        row = torch.from_numpy(np.concatenate([prompt, token_ids]).astype(np.int64))
        for version, model in ((0, old), (1, new)):
            with torch.no_grad():
                logits = model(row[None]).logits[0, len(prompt) - 1 : -1]
            expected = logits.log_softmax(dim=-1).gather(-1, row[len(prompt) :, None]).squeeze(-1)
            span = versions == version
            np.testing.assert_allclose(
                progress.completions.logprobs[position][span], expected.numpy()[span], atol=1e-4
            )


def test_aborted_requests_are_gone_and_their_tokens_counted(model_directory: Path) -> None:
    worker = _worker(model_directory, batch_size=2)
    worker.end_ids = frozenset()
    requests = GenerationRequests(
        np.arange(5, dtype=np.int64), _prompts(5), _seeds(5), SamplingParams(max_new_tokens=9), 64
    )
    worker.submit(requests)
    worker.poll(0.0)
    worker.poll(0.0)
    partial = worker.partial_tokens()
    assert worker.abort() == 4, "two rows of the first batch have two tokens each"
    assert worker.partial_tokens() == {}
    assert worker.poll(0.0).num_unfinished == 0
    worker.submit(requests)
    progress = worker.poll(60.0)
    assert sorted(progress.request_ids.tolist()) == [0, 1, 2, 3, 4]
    assert len(partial) == 2
    for request_id, row in zip(progress.request_ids, progress.completions.token_ids, strict=True):
        if request_id in partial:
            assert partial[request_id] == row[:2].tolist()


def test_cancelled_requests_are_gone_also_inside_an_update(model_directory: Path) -> None:
    """Requests that wait, run, have finished, or are unknown; the others keep their tokens."""
    prompts, seeds = _prompts(6), _seeds(6)
    sampling = SamplingParams(max_new_tokens=9)
    plain = _worker(model_directory)
    plain.end_ids = frozenset()
    expected = plain.generate(prompts, seeds, sampling, max_total_length=64)
    worker = _worker(model_directory, batch_size=4)
    worker.end_ids = frozenset()
    ids = np.arange(6, dtype=np.int64)
    worker.submit(GenerationRequests(ids, prompts, seeds, sampling, 64))
    worker.poll(0.0)
    worker.poll(0.0)
    running = sorted(worker.partial_tokens())
    waiting = sorted(set(range(6)) - set(running))
    assert (len(running), len(waiting)) == (4, 2)
    worker.cancel([running[0], waiting[0], 99])
    progress = worker.poll(0.0)
    assert (progress.num_cancelled_tokens, progress.num_unfinished) == (2, 4)
    assert worker.batch is not None
    named = list(worker.model.named_parameters())
    _begin_update(worker, [name for name, _ in named])
    worker.cancel([running[1]])
    worker.load_bucket(BucketMessage(0, tuple((name, p.data.clone()) for name, p in named)))
    worker.finish_update(version=1)
    progress = worker.poll(60.0)
    kept = sorted([*running[2:], *waiting[1:]])
    assert (progress.num_cancelled_tokens, progress.num_unfinished) == (3, 0)
    assert sorted(progress.request_ids.tolist()) == kept
    worker.cancel(kept)
    completions = progress.completions.take(np.argsort(progress.request_ids))
    assert np.array_equal(
        completions.token_ids.values, expected.take(np.array(kept)).token_ids.values
    )
    worker.submit(GenerationRequests(ids, prompts, seeds, sampling, 64))
    worker.poll(0.0)
    worker.cancel(range(6))
    assert worker.batch is None and not worker.queue, "the KV cache is freed"
    progress = worker.poll(0.0)
    assert (progress.num_cancelled_tokens, len(progress.request_ids)) == (4, 0)


def test_a_poll_may_end_with_the_first_completion(model_directory: Path) -> None:
    worker = _worker(model_directory)
    worker.end_ids = frozenset()
    prompts, seeds = _prompts(2), _seeds(2)
    for request_id, limit in enumerate((3, 9)):
        ids = np.array([request_id], dtype=np.int64)
        sampling = SamplingParams(max_new_tokens=9)
        length = len(prompts[request_id])
        row = prompts.take([request_id])
        worker.submit(GenerationRequests(ids, row, seeds[:1], sampling, length + limit))
    assert worker.poll(60.0, 0.0).request_ids.tolist() == [0]
    assert worker.poll(60.0, 30.0).request_ids.tolist() == [1]


def test_waiting_requests_of_several_calls_are_decoded_in_one_batch(model_directory: Path) -> None:
    prompts, seeds = _prompts(7), _seeds(7)
    sampling = SamplingParams(max_new_tokens=9)
    greedy = SamplingParams(max_new_tokens=9, temperature=0.0)
    expected = _worker(model_directory).generate(prompts, seeds, sampling, max_total_length=64)
    worker = _worker(model_directory, batch_size=5)
    ids = np.arange(7, dtype=np.int64)
    for row in range(7):
        options = greedy if row == 3 else sampling
        requests = GenerationRequests(ids, prompts, seeds, options, 64)
        worker.submit(requests.take([row]))
    sizes = []
    rows: list[int] = []
    parts = []
    while worker.queue or worker.batch is not None:
        if worker.batch is None:
            num_waiting = len(worker.queue)
            progress = worker.poll(0.0)
            sizes.append(num_waiting - len(worker.queue))
        else:
            progress = worker.poll(0.0)
        rows += progress.request_ids.tolist()
        parts.append(progress.completions)
    assert sizes == [3, 1, 3], "requests of other options are not in one batch"
    completions = Completions.concat(parts).take(np.argsort(rows))
    sampled = np.array([0, 1, 2, 4, 5, 6])
    _same(completions.take(sampled), expected.take(sampled))


def test_scores_are_the_log_probs_of_the_model(model_directory: Path) -> None:
    rows = _prompts(4, seed=9)
    scores = _worker(model_directory).score(rows)
    model = AutoModelForCausalLM.from_pretrained(model_directory)
    assert np.array_equal(scores.offsets, rows.offsets)
    for row, scored in zip(rows, scores, strict=True):
        token_ids = torch.from_numpy(row.astype(np.int64))
        with torch.no_grad():
            logprobs = model(token_ids[None]).logits[0, :-1].log_softmax(dim=-1)
        expected = logprobs.gather(-1, token_ids[1:, None]).squeeze(-1)
        assert scored[0] == 0
        np.testing.assert_allclose(scored[1:], expected.numpy(), atol=1e-5)


@pytest.mark.parametrize(("has_order", "expected"), [(False, [1, 3, 2, 0]), (True, [0, 1, 2, 3])])
def test_batches_keep_an_order_by_predicted_lengths(
    model_directory: Path, has_order: bool, expected: list[int]
) -> None:
    """Without one, prompts of similar length are decoded together."""
    worker = _worker(model_directory, batch_size=2)
    prompts = Jagged.from_rows([[5] * 9, [5], [5] * 4, [5] * 2], np.int32)
    requests = GenerationRequests(
        np.arange(4, dtype=np.int64),
        prompts,
        _seeds(4),
        SamplingParams(max_new_tokens=3),
        16,
        has_order=has_order,
    )
    worker.submit(requests)
    order = [each for batch in worker.queue for each in batch.request_ids.tolist()]
    assert [len(batch) for batch in worker.queue] == [2, 2] and order == expected
    assert all(batch.has_order == has_order for batch in worker.queue)
