"""The endpoint, called by the client of the `openai` package."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx
import openai
import pytest

from nemo_like.agents.calls import Call, Episode, Sampled
from nemo_like.agents.endpoint import AgentEndpoint, EndpointLimits, Session
from nemo_like.agents.protocol import RequestRules
from nemo_like.agents.statuses import Status
from tests.agents.scripted import END, TOOLS, ScriptedModel, assert_exact, codec_of, tool_call

USER = {"role": "user", "content": "2 + 2?"}
RESULT = {"role": "tool", "tool_call_id": "x", "content": "4"}


@dataclass
class Served:
    """An endpoint with one episode, and a client of it."""

    endpoint: AgentEndpoint
    session: Session
    model: ScriptedModel
    client: openai.AsyncOpenAI

    def chat(self, messages: Sequence[Any] = (USER,), **options: Any) -> Awaitable[Any]:
        return self.client.chat.completions.create(
            model="policy", messages=list(messages), **options
        )

    async def post(self, body: Any, **headers: str) -> httpx.Response:
        url = f"{self.client.base_url}chat/completions"
        return await raw_post(url, body, **headers)


async def raw_post(url: str, body: Any, **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with httpx.AsyncClient(trust_env=False, verify=False) as client:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await client.post(url, content=content, headers=named)


@contextlib.asynccontextmanager
async def served(
    script: Sequence[str] | Callable[[str], str] = lambda prompt: f"four{END}",
    sample: Callable[[ScriptedModel, Call], Awaitable[Sampled]] | None = None,
    rules: RequestRules | None = None,
    max_total_tokens: int = 10_000,
    timeout: float = 20.0,
    **limits: Any,
) -> AsyncIterator[Served]:
    codec = codec_of()
    model = ScriptedModel(codec, script)

    async def at_once(call: Call) -> Sampled:
        await asyncio.sleep(0)
        return model.sample(call) if sample is None else await sample(model, call)

    endpoint = AgentEndpoint(at_once, rules=rules, limits=EndpointLimits(**limits))
    async with endpoint.serving():
        session = endpoint.start(Episode(codec, 1, max_total_tokens=max_total_tokens))
        async with openai.AsyncOpenAI(
            base_url=endpoint.base_url(session), api_key="dummy", timeout=timeout, max_retries=2
        ) as client:
            yield Served(endpoint, session, model, client)


async def agent(each: Served, *, is_streamed: bool) -> list[Any]:
    """Call a tool until the model answers."""
    messages: list[Any] = [USER]
    while True:
        if is_streamed:
            tools: Any = TOOLS
            async with each.client.chat.completions.stream(
                model="m", messages=messages, tools=tools
            ) as stream:
                completion = await stream.get_final_completion()
        else:
            completion = await each.chat(messages, tools=TOOLS)
        message = completion.choices[0].message
        messages.append(message.model_dump())
        if not message.tool_calls:
            assert completion.choices[0].finish_reason == "stop"
            return messages
        assert completion.choices[0].finish_reason == "tool_calls"
        messages += [{**RESULT, "tool_call_id": call.id} for call in message.tool_calls]


def test_streamed_and_plain_answers_make_equal_rows() -> None:
    async def run(*, is_streamed: bool) -> tuple[list[Any], list[Any]]:
        script = [tool_call(a=index, b=2) for index in range(3)]
        async with served([*script, f"The answer is 4.{END}"]) as each:
            messages = await agent(each, is_streamed=is_streamed)
            episode = each.session.episode
            assert_exact(episode, each.model.log)
            (row,) = episode.rows()
            assert episode.reasons == {"first": 1}
            return messages, [row.token_ids.tolist(), row.token_mask.tolist()]

    plain, plain_row = asyncio.run(run(is_streamed=False))
    streamed, streamed_row = asyncio.run(run(is_streamed=True))
    assert plain_row == streamed_row
    assert plain[-1]["content"] == streamed[-1]["content"] == "The answer is 4."
    calls = [[message.get("tool_calls") for message in each] for each in (plain, streamed)]
    arguments = [
        [json.loads(call["function"]["arguments"]) for each in found if each for call in each]
        for found in calls
    ]
    assert arguments[0] == arguments[1] == [{"a": index, "b": 2} for index in range(3)]


def test_the_parts_of_a_stream_are_the_answer() -> None:
    async def run() -> None:
        async with served([f"<think>\nhm\n</think>\n\n{tool_call()}"]) as each:
            options: Any = {"stream": True, "stream_options": {"include_usage": True}}
            chunks = [chunk async for chunk in await each.chat(tools=TOOLS, **options)]
            deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
            assert "".join(delta.content or "" for delta in deltas) == "I add."
            assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == "hm"
            assert deltas[0].tool_calls[0].index == 0
            assert chunks[-2].choices[0].finish_reason == "tool_calls"
            prompt, sampled = each.model.log[0]
            assert chunks[-1].usage.prompt_tokens == len(prompt)
            assert chunks[-1].usage.completion_tokens == len(sampled)

    asyncio.run(run())


def test_several_answers_are_siblings() -> None:
    async def run() -> None:
        async with served([f"{text}{END}" for text in "abcd"]) as each:
            completion = await each.chat(n=4)
            assert sorted(choice.message.content for choice in completion.choices) == list("abcd")
            assert len({call.seed for call in each.model.calls}) == 4
            rows = each.session.episode.rows()
            assert len(rows) == 4 and each.session.num_turns == 4
            assert_exact(each.session.episode, each.model.log)
            # The program goes on with one of them.
            more = [USER, {"role": "assistant", "content": "b"}, USER]
            with contextlib.suppress(openai.InternalServerError):
                await each.chat(more)
            assert each.session.problem.startswith("IndexError")

    asyncio.run(run())


def test_parallel_calls_of_an_episode_are_rows_of_one_start() -> None:
    async def run() -> list[Any]:
        async with served(lambda prompt: f"{prompt.count('part')}{END}") as each:
            first = (await each.chat()).choices[0].message
            start = [USER, first.model_dump()]
            parts = [[*start, {"role": "user", "content": f"part {index}"}] for index in range(5)]
            await asyncio.gather(*map(each.chat, parts))
            assert_exact(each.session.episode, each.model.log)
            rows = each.session.episode.rows()
            assert len(rows) == 5
            assert sum(row.is_trained[0] for row in rows) == 1
            return [row.token_ids.tolist() for row in rows]

    assert len(asyncio.run(run())) == 5


def test_limits_are_errors_of_the_api() -> None:
    async def run() -> None:
        async with served(max_turns=2, max_total_tokens=60) as each:
            await each.chat()
            long = [{"role": "user", "content": "very long " * 50}]
            with pytest.raises(openai.BadRequestError, match="maximum context length") as caught:
                await each.chat(long)
            assert caught.value.code == "context_length_exceeded"
            assert each.session.limit is Status.LIMIT_TOKENS
            # The program may go on with less.
            await each.chat()
            assert each.session.limit is None
            with pytest.raises(openai.BadRequestError) as caught:
                await each.chat()
            assert caught.value.code == each.session.limit == "limit_turns"
            assert len(each.session.episode.calls) == 2

    async def run_out_of_time() -> None:
        async with served() as each:
            each.endpoint.stop(each.session, Status.LIMIT_TIME)
            with pytest.raises(openai.BadRequestError) as caught:
                await each.chat()
            assert caught.value.code == each.session.limit == "limit_time"

    asyncio.run(run())
    asyncio.run(run_out_of_time())


def test_keys_of_other_and_ended_episodes_are_refused() -> None:
    async def run() -> None:
        async with served() as each:
            key = each.session.key
            url = each.endpoint.base_url(each.session)
            plain = url.replace(f"/e/{key}", "") + "/chat/completions"
            other = each.endpoint.start(Episode(codec_of(), 2, max_total_tokens=100))
            ended = each.endpoint.start(Episode(codec_of(), 3, max_total_tokens=100))
            each.endpoint.end(ended)
            body = {"model": "m", "messages": [USER]}
            statuses = {}
            headers = {
                "bearer": {"authorization": f"Bearer {key}"},
                "session": {"x_session_id": key},
                "none": {},
                "wrong": {"authorization": f"Bearer {key[:-1]}x"},
                "number": {"authorization": "Bearer 0-"},
                "letters": {"x_session_id": "\N{LATIN SMALL LETTER E WITH ACUTE}".encode()},
                "ended": {"authorization": f"Bearer {ended.key}"},
                "two": {"authorization": f"Bearer {key}", "x_session_id": other.key},
            }
            for name, given in headers.items():
                statuses[name] = (await raw_post(plain, body, **given)).status_code
            refused = dict.fromkeys(("none", "wrong", "number", "letters", "two"), 401)
            assert statuses == {"bearer": 200, "session": 200, "ended": 410, **refused}
            path = f"{url}/chat/completions"
            given = {"authorization": f"Bearer {other.key}"}
            assert (await raw_post(path, body, **given)).status_code == 401
            wrong = path.replace(key, f"{key[:-1]}x")
            response = await raw_post(wrong, body, authorization=f"Bearer {key}")
            assert response.status_code == 401 and key[:-1] not in response.text
            assert len(each.session.episode.calls) == 2
            assert other.episode.calls == ended.episode.calls == []
            each.endpoint.end(each.session)
            with pytest.raises(openai.APIStatusError, match="the episode has ended"):
                await each.chat()
            assert key not in repr(each.session)

    asyncio.run(run())


def test_an_episode_that_ends_while_a_request_arrives_records_nothing() -> None:
    async def run() -> None:
        async with served() as each:

            async def slow_body() -> AsyncIterator[bytes]:
                yield b'{"model": "m", '
                # Until the server has read this part.
                await asyncio.sleep(0.2)
                each.endpoint.end(each.session)
                yield json.dumps({"messages": [USER]})[1:].encode()

            url = f"{each.client.base_url}chat/completions"
            async with httpx.AsyncClient(trust_env=False, verify=False) as client:
                response = await client.post(url, content=slow_body())
            assert response.status_code == 410 and each.model.log == []

    asyncio.run(run())


def test_a_repeated_request_is_one_call() -> None:
    async def run() -> None:
        async with served([f"{text}{END}" for text in "abcd"]) as each:
            body = {"model": "m", "messages": [USER]}
            first = await each.post(body, x_stainless_retry_count="0")
            again = await each.post(body, x_stainless_retry_count="1")
            assert again.content == first.content and len(each.model.log) == 1
            # Equal requests on purpose.
            assert (await each.post(body)).content != first.content
            assert len(each.session.episode.calls) == 2

    asyncio.run(run())


def test_a_client_that_gives_up_and_repeats_gets_the_answer_that_is_sampled() -> None:
    async def slowly(model: ScriptedModel, call: Call) -> Sampled:
        await asyncio.sleep(1.5)
        return model.sample(call)

    async def run() -> None:
        # No heartbeat before the limit of the client.
        async with served([f"a{END}"], slowly, timeout=0.6, heartbeat_s=9.0) as each:
            completion = await each.chat()
            assert completion.choices[0].message.content == "a"
            assert len(each.model.log) == len(each.session.episode.rows()) == 1

    async def run_without_header() -> None:
        goes_on = asyncio.Event()

        async def when_told(model: ScriptedModel, call: Call) -> Sampled:
            await goes_on.wait()
            return model.sample(call)

        async with served([f"a{END}"], when_told) as each:
            body = {"model": "m", "messages": [USER]}
            await give_up(each, body)
            goes_on.set()
            while each.session.num_unfinished:
                await asyncio.sleep(0.01)
            assert len(each.session.episode.calls) == 1
            assert each.session.episode.rows() == [], "nobody has the answer"
            assert (await each.post(body)).status_code == 200
            assert len(each.model.log) == len(each.session.episode.rows()) == 1

    asyncio.run(run())
    asyncio.run(run_without_header())


async def give_up(each: Served, body: Any) -> None:
    """Send a request, and leave while its answer is sampled."""
    waiting = asyncio.create_task(each.post(body))
    while each.session.num_unfinished == 0:
        await asyncio.sleep(0.01)
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting


def test_an_answer_for_which_nobody_waits_is_cancelled() -> None:
    async def run() -> None:
        cancelled = asyncio.Event()

        async def forever(model: ScriptedModel, call: Call) -> Sampled:
            del model, call
            try:
                await asyncio.sleep(60)
            finally:
                cancelled.set()
            raise AssertionError

        async with served([], forever, retry_grace_s=0.1, heartbeat_s=0.1) as each:
            body = {"model": "m", "messages": [USER]}
            for options in ({}, {"stream": True}):
                await give_up(each, {**body, **options})
                await cancelled.wait()
                cancelled.clear()
                while each.session.num_unfinished:
                    await asyncio.sleep(0.01)
            assert each.session.episode.calls == []
            # The end of an episode cancels what runs.
            waiting = asyncio.create_task(each.post(body))
            while each.session.num_unfinished == 0:
                await asyncio.sleep(0.01)
            each.endpoint.end(each.session)
            with contextlib.suppress(httpx.RemoteProtocolError):
                assert (await waiting).status_code == 410
            assert each.session.num_unfinished == 0

    asyncio.run(run())


def test_heartbeats_keep_impatient_clients() -> None:
    async def slowly(model: ScriptedModel, call: Call) -> Sampled:
        await asyncio.sleep(2.2)
        return model.sample(call)

    async def run() -> None:
        async with served(sample=slowly, timeout=1.0, heartbeat_s=0.1) as each:
            completion = await each.chat()
            assert completion.choices[0].message.content == "four"
            stream = await each.chat([USER, USER], stream=True)
            texts = [chunk.choices[0].delta.content async for chunk in stream]
            assert texts == ["four"]
            assert len(each.model.log) == 2

    asyncio.run(run())


def test_a_failure_of_the_generator_is_not_repeated() -> None:
    async def fail(model: ScriptedModel, call: Call) -> Sampled:
        model.calls.append(call)
        raise RuntimeError("the replica is lost")

    async def run() -> None:
        async with served(sample=fail) as each:
            with pytest.raises(openai.InternalServerError, match="the generator failed"):
                await each.chat()
            assert len(each.model.calls) == 1
            assert each.session.failure is Status.FAILED_INFRA
            assert each.session.problem == "RuntimeError: the replica is lost"

    async def fail_late(model: ScriptedModel, call: Call) -> Sampled:
        await asyncio.sleep(0.3)
        return await fail(model, call)

    async def run_late() -> None:
        # The status was sent with the first heartbeat.
        async with served(sample=fail_late, heartbeat_s=0.05) as each:
            with pytest.raises(openai.APIStatusError, match="the episode has ended"):
                await each.chat()
            assert len(each.model.calls) == 1

    async def run_stream() -> None:
        async with served(sample=fail) as each:
            with pytest.raises(openai.APIError, match="the generator failed"):
                [chunk async for chunk in await each.chat(stream=True)]

    asyncio.run(run())
    asyncio.run(run_late())
    asyncio.run(run_stream())


def test_every_field_is_applied_or_refused() -> None:
    async def run() -> None:
        async with served() as each:
            await each.chat(
                max_tokens=7, stop=["ur"], user="x", seed=None, frequency_penalty=0, logprobs=False
            )
            options = each.model.calls[-1].options
            assert options.max_tokens == 7 and options.stop == ("ur",)
            assert options.temperature is options.top_p is None
            for name, value in {
                "logit_bias": {"5": 1},
                "frequency_penalty": 0.5,
                "seed": 3,
                "logprobs": True,
            }.items():
                with pytest.raises(openai.BadRequestError, match=name):
                    await each.chat(**{name: value})
            with pytest.raises(openai.BadRequestError, match="top_k"):
                await each.chat(extra_body={"top_k": 3})
            all_wrong: Any = (
                {"n": 0}, {"n": "x"}, {"max_tokens": 0}, {"tools": 4}, {"tools": [3]},
                {"stop": 3}, {"stop": [3]}, {"stop": ""}, {"stop": ["a", ""]},
                {"temperature": -1}, {"temperature": "x"}, {"top_p": 0}, {"top_p": 1.5},
            )  # fmt: skip
            for wrong in all_wrong:
                with pytest.raises(openai.BadRequestError):
                    await each.chat(**wrong)
            body = b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}'
            assert (await each.post(body)).status_code == 400
            image = {"type": "image_url", "image_url": {"url": "data:,"}}
            wrong_messages: Any = (
                [],
                [{"role": "user", "content": [image]}],
                [{"role": 3}],
                "text",
            )
            for messages in wrong_messages:
                with pytest.raises(openai.BadRequestError, match="messages"):
                    await each.chat(messages)
            for body in (b"{", b"[]", b"{}", b"[" * 100_000):
                assert (await each.post(body)).status_code == 400
            assert len(each.session.episode.calls) == 1 and not each.session.not_applied

    asyncio.run(run())


@pytest.mark.parametrize("sampling", ["run", "request", "refuse"])
def test_whose_temperature_is_applied(sampling: Any) -> None:
    async def run() -> None:
        async with served(rules=RequestRules(sampling=sampling, temperature=0.8)) as each:
            await each.chat(temperature=0.8, top_p=1)
            assert len(each.session.episode.rows()) == 1
            if sampling == "refuse":
                with pytest.raises(openai.BadRequestError, match="temperature must be those"):
                    await each.chat(temperature=0)
                return
            await each.chat([USER, USER], temperature=0, top_p=0.9)
            options = each.model.calls[-1].options
            # Another distribution than that of the run is not trained.
            is_applied = sampling == "request"
            assert options.temperature == (0 if is_applied else None)
            assert options.top_p == (0.9 if is_applied else None)
            assert len(each.session.episode.rows()) == (1 if is_applied else 2)
            assert set(each.session.not_applied) == (
                set() if is_applied else {"temperature", "top_p"}
            )

    asyncio.run(run())


def test_constrained_decoding_is_counted_or_refused() -> None:
    options: dict[str, Any] = {
        "tool_choice": "required",
        "response_format": {"type": "json_object"},
    }

    async def run() -> None:
        async with served() as each:
            await each.chat(tools=TOOLS, **options)
            assert each.session.not_applied == {"tool_choice": 1, "response_format": 1}
            await each.chat(tool_choice="auto", response_format={"type": "text"})
            assert sum(each.session.not_applied.values()) == 2
            ignored = RequestRules(constrained="refuse", ignored_fields=frozenset({"seed"}))
        async with served(rules=ignored) as each:
            for name, value in options.items():
                with pytest.raises(openai.BadRequestError, match=name):
                    await each.chat(**{name: value})
            await each.chat(seed=3)
            assert each.session.not_applied == {"seed": 1}

    asyncio.run(run())


def test_calls_may_be_tagged_as_not_trained() -> None:
    async def run() -> None:
        async with served() as each:
            await each.chat(extra_headers={"X-Nemo-Like-Train": "false"})
            url = str(each.client.base_url).replace("/v1", "/untrained/v1")
            async with openai.AsyncOpenAI(base_url=url, api_key="x") as client:
                messages: Any = [USER]
                await client.chat.completions.create(model="m", messages=messages)
            assert len(each.session.episode.calls) == 2 and each.session.episode.rows() == []

    asyncio.run(run())


def test_completions_of_texts_and_token_ids() -> None:
    async def run() -> None:
        async with served([f"four{END}", "five", "six"]) as each:
            prompt = "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
            first = await each.client.completions.create(model="m", prompt=prompt)
            assert first.choices[0].text == "four"
            prompt += f"four{END}\n<|im_start|>user\nsure?"
            stream = await each.client.completions.create(model="m", prompt=[prompt], stream=True)
            assert [chunk.choices[0].text async for chunk in stream] == ["five"]
            (row,) = each.session.episode.rows()
            ids = row.token_ids.tolist()
            await each.client.completions.create(model="m", prompt=[*ids, 5])
            assert len(each.session.episode.rows()) == 1
            assert_exact(each.session.episode, each.model.log)
            all_wrong: Any = ([], "", ["a", "b"], [[1], [2]], [1, "a"], [-1], [2**40])
            for wrong in all_wrong:
                with pytest.raises(openai.BadRequestError):
                    await each.client.completions.create(model="m", prompt=wrong)

    asyncio.run(run())


def test_the_responses_api_makes_the_rows_of_the_chat_api() -> None:
    script = [tool_call(), f"4{END}"]
    tools: Any = TOOLS
    tool: Any = {"type": "function", **tools[0]["function"], "strict": False}

    async def run() -> Any:
        async with served(script) as each:
            items: list[Any] = [{"role": "user", "content": "2 + 2?"}]
            options: Any = {"model": "m", "tools": [tool], "instructions": "Add."}
            options["include"] = []
            first = await each.client.responses.create(input=items, **options)
            (message, call) = first.output
            assert first.output_text == "I add." and message.type == "message"
            assert call.type == "function_call" and json.loads(call.arguments) == {"a": 2, "b": 2}
            items += [item.model_dump() for item in first.output]
            result = [{"type": "input_text", "text": "4"}]
            items.append(
                {"type": "function_call_output", "call_id": call.call_id, "output": result}
            )
            last = await each.client.responses.create(input=items, **options)
            assert last.output_text == "4"
            all_wrong: Any = ([{"type": "x"}], [3], [{"role": "user", "content": [4]}])
            for wrong in all_wrong:
                with pytest.raises(openai.BadRequestError):
                    await each.client.responses.create(input=wrong, model="m")
            (row,) = each.session.episode.rows()
            return row.token_ids.tolist()

    async def run_chat() -> Any:
        async with served(script) as each:
            messages: list[Any] = [{"role": "system", "content": "Add."}, USER]
            first = await each.chat(messages, tools=tools)
            await each.chat([*messages, first.choices[0].message, RESULT], tools=tools)
            (row,) = each.session.episode.rows()
            return row.token_ids.tolist()

    assert asyncio.run(run()) == asyncio.run(run_chat())


def test_rewards_belong_to_calls() -> None:
    async def run() -> None:
        async with served() as each:
            url = f"{each.client.base_url}reward"
            first = await each.chat()
            assert (await raw_post(url, {"reward": 1})).status_code == 200
            await each.chat([USER, USER])
            assert (await raw_post(url, {"reward": {"a": 2, "b": 0.5}})).status_code == 200
            assert (await raw_post(url, {"reward": 4, "call": first.id})).status_code == 200
            assert each.session.call_rewards() == [5, 2.5]
            bad = ("x", None, [1], {"a": "x"}, 1e300)
            for body in [b"{", b"3", {}, *({"reward": value} for value in bad)]:
                assert (await raw_post(url, body)).status_code == 400
            assert (await raw_post(url, {"reward": 1, "call": "call-7"})).status_code == 400
            assert len(each.session.rewards) == 3

    asyncio.run(run())


def test_a_flood_ends_only_its_episode() -> None:
    async def slowly(model: ScriptedModel, call: Call) -> Sampled:
        await asyncio.sleep(0.3)
        return model.sample(call)

    async def run() -> None:
        limits: dict[str, Any] = {"max_concurrent": 2, "max_refused": 5}
        async with served(sample=slowly, **limits) as each:
            bodies = [
                {"model": "m", "messages": [{"role": "user", "content": str(i)}]} for i in range(4)
            ]
            found = await asyncio.gather(*map(each.post, bodies))
            assert sorted(response.status_code for response in found) == [200, 200, 429, 429]
            response = await each.post(b"x" * 1_000_000)
            assert response.json()["error"]["code"] == "context_length_exceeded"
            other = each.endpoint.start(Episode(codec_of(), 2, max_total_tokens=1000))
            for _ in range(3):
                await each.post(b"x")
            assert each.session.failure is Status.FAILED_PROGRAM
            assert (await each.post(bodies[0])).status_code == 410
            assert len(each.session.episode.calls) == 2
            url = f"{each.endpoint.base_url(other)}/chat/completions"
            assert (await raw_post(url, bodies[0])).status_code == 200

    asyncio.run(run())


def test_a_request_that_the_template_refuses_is_an_error_of_the_api() -> None:
    async def run() -> None:
        async with served() as each:
            with pytest.raises(openai.BadRequestError, match="role"):
                await each.chat([{"role": "judge", "content": "x"}])

    asyncio.run(run())
