"""OpenAI's completions of raw prompts through the gateway, with the official SDK on a real server."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from agent_helpers import RecordingGenerateFn
from hypothesis import given
from json_mutations import mutated_bodies
from openai.types import Completion
from test_gateway import SHORT, gateway, generate, graph_of, openai_client
from transformers import AutoTokenizer

from verl_server.agent import RolloutLimits
from verl_server.gateway import Gateway
from verl_server.gateway.conversation import AssistantTurn, TurnDelta
from verl_server.gateway.dialects.chat import CompletionsDialect
from verl_server.gateway.errors import GatewayError
from verl_server.trajectory import ChatRenderer

__all__ = ["gateway", "generate"]

LONG = {"max_new_tokens": 8, "ignore_eos": True}
BODIES: tuple[dict[str, Any], ...] = (
    {
        "model": "m",
        "prompt": "Once upon a time",
        "max_tokens": 20,
        "temperature": 0.7,
        "top_p": 0.9,
        "stop": ["\n", "END"],
        "logprobs": 1,
        "n": 1,
        "best_of": 1,
        "echo": False,
        "suffix": None,
        "stream": True,
        "stream_options": {"include_usage": True},
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "logit_bias": {},
        "user": "u",
    },
    {"model": "m", "prompt": [1, 2, 3], "max_tokens": 20},
    {"model": "m", "prompt": [[1, 2, 3]], "stop": "x"},
)


def token_ids_of(choice: Any) -> list[int]:
    return list(choice.model_extra["token_ids"])


def test_a_text_is_the_prompt_as_it_is(gateway: Gateway, generate: RecordingGenerateFn) -> None:
    info, key = gateway.create_session(sampling_params=LONG)
    generate.prompts.clear()
    reply = openai_client(gateway, key).completions.create(model="m", prompt="<|im_start|>user\nHi", logprobs=0)
    Completion.model_validate(reply.to_dict())
    (choice,) = reply.choices
    graph = graph_of(gateway, info.id)
    prompt, turn = graph.nodes
    assert generate.prompts == [list(prompt.token_ids)]
    assert prompt.message == {"appended_text": "<|im_start|>user\nHi"}
    assert token_ids_of(choice) == list(turn.token_ids)
    assert choice.finish_reason == "length"
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == list(turn.logprobs)
    assert choice.logprobs.text_offset is not None
    assert choice.logprobs.tokens is not None
    assert len(choice.logprobs.text_offset) == len(choice.logprobs.tokens) == 8
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(prompt.token_ids), 8)


def test_token_ids_that_begin_with_a_path_continue_it(gateway: Gateway, generate: RecordingGenerateFn) -> None:
    info, key = gateway.create_session(sampling_params=LONG)
    client = openai_client(gateway, key)
    generate.prompts.clear()
    token_ids, sent = [11, 12, 13], []
    for _ in range(3):
        sent.append(token_ids)
        reply = client.completions.create(model="m", prompt=token_ids)
        token_ids = [*token_ids, *token_ids_of(reply.choices[0]), 14, 15]
    assert generate.prompts == sent
    graph = graph_of(gateway, info.id)
    (leaf,) = graph.leaves
    assert [node.sampled for node in graph.path(leaf)] == [False, True] * 3
    client.completions.create(model="m", prompt=sent[1])  # the same prompt again: a second sample
    client.completions.create(model="m", prompt=[11, 12])  # no recorded path: a new root
    graph = graph_of(gateway, info.id)
    assert len(graph.leaves) == 3
    assert generate.prompts[3:] == [sent[1], [11, 12]]
    assert len(graph.children(None)) == 2


def test_raw_prompts_and_chats_do_not_mix_by_meaning(gateway: Gateway) -> None:
    """A chat after a raw prompt is a path of its own. Token ids that begin with the path of a chat continue it."""
    info, key = gateway.create_session(sampling_params=LONG)
    client = openai_client(gateway, key)
    text = client.completions.create(model="m", prompt="Hi").choices[0].text
    client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": text},
                             {"role": "user", "content": "b"}]
    )  # fmt: skip
    graph = graph_of(gateway, info.id)
    assert len(graph.children(None)) == 2
    chat = graph.leaves[-1]
    client.completions.create(model="m", prompt=[*graph.token_ids(chat), 17])
    graph = graph_of(gateway, info.id)
    assert graph.node(graph.children(chat)[0]).token_ids == (17,)


def test_a_restarted_gateway_continues_raw_prompts(
    generate: RecordingGenerateFn, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    renderer = ChatRenderer(AutoTokenizer.from_pretrained(tiny("qwen3")))
    settings: dict[str, Any] = {"renderer": renderer, "limits": RolloutLimits(max_context_tokens=2000, max_turns=9)}
    with Gateway(generate, tmp_path, **settings) as first:
        info, key = first.create_session(sampling_params=LONG)
        reply = openai_client(first, key).completions.create(model="m", prompt=[11, 12])
    token_ids = [11, 12, *token_ids_of(reply.choices[0]), 13]
    with Gateway(generate, tmp_path, **settings) as second:
        openai_client(second, key).completions.create(model="m", prompt=token_ids)
        assert len(graph_of(second, info.id).leaves) == 1


@pytest.mark.parametrize("cut", [0, 1, 3, 5, 8])
def test_the_offsets_of_tokens_count_characters(cut: int) -> None:
    """The bytes of one character are several tokens here, and one token ends a character and begins another text."""
    tokens = [b"\xf0", b"\x9f", b"\x99", b"\x82", b"a", b"\xc3", b"\xa9b", b"<|im_end|>", b"c", b""]
    logprobs, expected = [-1.0] * len(tokens), [0, 0, 0, 0, 1, 2, 2, 4, 14, 15]
    assert b"".join(tokens).decode() == "🙂aéb<|im_end|>c"
    dialect, ids = CompletionsDialect(), range(len(tokens))
    request = dialect.parse({"model": "m", "prompt": "x", "logprobs": 1})
    turn = AssistantTurn("t", 1, b"".join(tokens).decode(), "", (), "stop", None, 1, 0, ids, logprobs, tokens)
    assert dialect.reply(request, turn)["choices"][0]["logprobs"]["text_offset"] == expected
    stream, offsets = dialect.open_stream(request, "t"), list[int]()
    for part in (slice(cut), slice(cut, None)):
        for event in stream.add(TurnDelta("", "", ids[part], logprobs[part], tokens[part])):
            assert isinstance(event.data, dict)
            offsets += event.data["choices"][0]["logprobs"]["text_offset"]
    assert offsets == expected


def test_a_stream_is_the_same_completion(gateway: Gateway) -> None:
    info, key = gateway.create_session(sampling_params={**SHORT, "temperature": 0, "regex": "<think>a</think>b"})
    client = openai_client(gateway, key)
    whole = client.completions.create(model="m", prompt="Hi").choices[0]
    assert whole.text == "<think>a</think>b", "a completion is not split into parts"
    assert whole.finish_reason == "stop"
    stream = client.completions.create(
        model="m", prompt="Hi", stream=True, logprobs=1, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    for chunk in chunks:
        # The SDK has one type for completions and their chunks; only the last chunk has a finish_reason.
        data: Any = chunk.to_dict()
        for choice in data["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        Completion.model_validate(data)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.text
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices] == [None, "stop"]
    assert chunks[0].choices[0].logprobs is not None
    assert chunks[-1].usage is not None
    assert len(graph_of(gateway, info.id).children(None)) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("best_of", 3),
        ("echo", True),
        ("suffix", "end"),
        ("logprobs", 5),
        ("logprobs", False),
        ("logit_bias", {"5": -101}),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"9" * 5000: 1}),
        ("seed", 1.5),
        ("seed", 2**63),
        ("prompt", ""),
        ("prompt", []),
        ("prompt", ["a", "b"]),
        ("prompt", [1, -1]),
        ("prompt", [1, 10**6]),
        ("prompt", [True]),
        ("prompt", [1, "a"]),
        ("prompt", None),
        ("max_tokens", 0),
        ("stream", 1),
        ("stream_options", []),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(gateway: Gateway, name: str, value: Any) -> None:
    info, key = gateway.create_session()
    body = {"model": "m", "prompt": "a", name: value}
    reply = httpx.post(f"{gateway.openai_url}/completions", json=body, headers={"Authorization": f"Bearer {key}"})
    assert reply.status_code == 400
    assert name in reply.json()["error"]["message"]
    assert not (gateway.config.run_dir / f"{info.id}.jsonl").exists() or not graph_of(gateway, info.id).nodes


def test_a_prompt_that_is_too_long(gateway: Gateway) -> None:
    """The record has a note, with the number of tokens and the turn after which the prompt would have come."""
    info, key = gateway.create_session(sampling_params=LONG)
    client = openai_client(gateway, key)
    turn = token_ids_of(client.completions.create(model="m", prompt=[11, 12]).choices[0])
    for prompt, num_tokens in (([11] * 2000, 2000), ([11, 12, *turn, *[11] * 2000], 2010)):
        known = f"maximum context length is 2000 tokens. However, the conversation has {num_tokens} tokens"
        with pytest.raises(openai.BadRequestError, match=known) as caught:
            client.completions.create(model="m", prompt=prompt)
        assert caught.value.code == "context_length_exceeded"
    notes = [(note.name, note.node, note.value["num_tokens"]) for note in graph_of(gateway, info.id).notes]
    assert notes == [("refused", None, 2000), ("refused", 1, 2010)]


@given(mutated_bodies(BODIES))
def test_malformed_bodies_are_refused(body: dict[str, Any]) -> None:
    with contextlib.suppress(GatewayError):
        assert CompletionsDialect().parse(body).raw_prompt
