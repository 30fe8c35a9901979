"""Requests of programs that other systems record wrongly or do not survive."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import numpy as np
import openai
import pytest

from nemo_like.agents.calls import Episode
from nemo_like.agents.codec import ChatCodec
from nemo_like.config.rollout import EnvironmentConfig
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.jagged import Jagged
from nemo_like.data.planning.prefixes import SharedPrefixes
from nemo_like.training.model_warnings import history_warnings
from tests.agents.scripted import END, Conversation, assert_exact, codec_of
from tests.agents.test_endpoint import USER, raw_post, served
from tests.data.chat_templates import QWEN
from tests.data.tiny_tokenizer import CHATML, tiny_tokenizer


def test_a_program_that_compacts_when_there_is_no_room_has_two_rows() -> None:
    async def run() -> None:
        async with served(max_total_tokens=400) as each:
            messages: list[Any] = [USER]
            num_calls = 0
            with pytest.raises(openai.BadRequestError) as caught:
                while True:
                    completion = await each.chat(messages)
                    num_calls += 1
                    messages.append(completion.choices[0].message.model_dump())
                    messages.append({"role": "user", "content": "again " * 10})
            assert caught.value.code == "context_length_exceeded"
            assert num_calls > 1 and each.session.limit == "limit_tokens"
            summary = {"role": "user", "content": "It was four. Go on."}
            completion = await each.chat([summary])
            assert each.session.limit is None
            await each.chat([summary, completion.choices[0].message.model_dump(), USER])
            episode = each.session.episode
            assert sorted(len(row.calls) for row in episode.rows()) == [2, num_calls]
            assert episode.reasons == {"first": 1, "new_root": 1}
            assert_exact(episode, each.model.log)

    asyncio.run(run())


def test_a_program_that_rewrites_its_history_has_a_row_for_each_call() -> None:
    """Replies come back as texts of the user, and the instructions stay at the beginning."""
    conversation = Conversation([f"step {index}{END}" for index in range(5)])
    messages: list[Any] = [{"role": "system", "content": "Answer in steps. " * 20}, USER]
    for _ in range(5):
        reply = conversation.call(messages)
        messages.append({"role": "user", "content": f"You said: {reply['content']}"})
    rows = conversation.episode.rows()
    assert [len(row.calls) for row in rows] == [1] * 5
    assert_exact(conversation.episode, conversation.model.log)
    input_ids = Jagged.from_rows([row.token_ids for row in rows], np.int32)
    shared = SharedPrefixes.of_tokens([0] * 5, input_ids).shared.sum()
    assert shared > 0.7 * len(input_ids.values)


@pytest.mark.parametrize("template", [QWEN, CHATML])
def test_a_run_warns_of_prompts_that_a_chat_server_would_not_send(template: str) -> None:
    """The warning is there exactly where a rendering of the messages lacks the reasoning."""
    codec = ChatCodec(ChatEncoder(tiny_tokenizer(template)))
    reply = {"role": "assistant", "content": "<think>\nI add.\n</think>\n\n4"}
    text = codec.full_text(codec.prompt_ids([USER, reply, USER], None))
    is_different = "I add." not in text
    assert is_different == (template == QWEN)
    encoder = ChatEncoder(tiny_tokenizer(template))
    program = EnvironmentConfig(kind="program", path="my_agent.solve")
    warnings = list(history_warnings(program, encoder))
    assert [("removes the reasoning" in each) for each in warnings] == [True] * is_different
    for other in (replace(program, history="template"), EnvironmentConfig()):
        assert list(history_warnings(other, encoder)) == []


def test_requests_with_random_keys_record_nothing() -> None:
    async def run() -> None:
        async with served(max_refused=10) as each:
            base = each.endpoint.base_url(each.session).replace(f"/e/{each.session.key}", "")
            letters = random.Random(0)
            bodies: list[Any] = [{"model": "m", "messages": [USER]}, b"{", b"", {"reward": 1}]
            for number in range(80):
                characters = list(each.session.key)
                for _ in range(letters.randint(1, 3)):
                    characters[letters.randrange(len(characters))] = letters.choice("0af-_z%2")
                key = "".join(characters)
                if key == each.session.key:
                    continue
                path = letters.choice(("chat/completions", "completions", "responses", "reward"))
                header = letters.choice(("authorization", "x_session_id"))
                value = f"Bearer {key}" if header == "authorization" else key
                response = await raw_post(f"{base}/{path}", bodies[number % 4], **{header: value})
                assert response.status_code in (401, 404, 410), response.text
                assert each.session.key not in response.text
            assert each.session.num_refused == 0 and each.session.rewards == []
            assert each.session.failure is None and each.model.log == []
            await each.chat()

    asyncio.run(run())


def test_requests_that_never_end_delay_no_other_episode() -> None:
    async def run() -> None:
        async with served() as each:
            url = each.endpoint.base_url(each.session)
            address = url.split("//")[1].split("/")[0]
            host, _, port = address.rpartition(":")
            path = url.split(address)[1]
            head = f"POST {path}/chat/completions HTTP/1.1\r\nHost: {address}\r\n"
            writers = []
            for _ in range(50):
                _, writer = await asyncio.open_connection(host, int(port))
                writer.write(f"{head}Content-Length: 1000\r\n\r\n{{".encode())
                await writer.drain()
                writers.append(writer)
            other = each.endpoint.start(Episode(codec_of(), 2, max_total_tokens=1000))
            own = f"{each.endpoint.base_url(other)}/chat/completions"
            body = {"model": "m", "messages": [USER]}
            for target in (own, f"{url}/chat/completions"):
                response = await asyncio.wait_for(raw_post(target, body), 10)
                assert response.status_code == 200
            for writer in writers:
                writer.close()
            assert len(each.session.episode.calls) == len(other.episode.calls) == 1

    asyncio.run(run())


def test_images_are_refused_by_the_api() -> None:
    async def run() -> None:
        async with served() as each:
            image = {"type": "image_url", "image_url": {"url": "data:"}}
            with pytest.raises(openai.BadRequestError, match="image_url"):
                await each.chat([{"role": "user", "content": [image]}])
            assert each.session.episode.calls == []

    asyncio.run(run())
