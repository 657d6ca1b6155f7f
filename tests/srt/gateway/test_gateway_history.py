"""What agents send back: content that the policy cannot see, and turns in another form, are no new conversation."""

from __future__ import annotations

import base64
import gzip
import io
import json
import random
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import orjson
import pytest
import zstandard
from agent_helpers import ScriptedGenerateFn, call_text
from helpers import chat_tokenizer
from PIL import Image
from transformers import AutoProcessor, AutoTokenizer
from vision_models import make_vision_model

from verl_server.agent import RolloutLimits
from verl_server.gateway import Gateway
from verl_server.gateway.conversation import as_template_call, normalize_messages
from verl_server.gateway.dialects.base import KnownItems, NoObjectError
from verl_server.trajectory import ChatRenderer, TrajectoryGraph, get_renderer, load_session

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("add", "sub")
]
FLAT_TOOLS: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]
ANTHROPIC_TOOLS = [{"name": name, "input_schema": {"type": "object"}} for name in ("add", "sub")]
CALLS = call_text("add", a=1) + "\n" + call_text("sub", a=2)
TURN_START = "<|im_start|>assistant\n"
PATHS = {"chat": "/v1/chat/completions", "anthropic": "/v1/messages", "responses": "/v1/responses"}


def pixel(size: int = 2) -> str:
    buffer = io.BytesIO()
    Image.new("RGB", (size, size)).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


class Policy(ScriptedGenerateFn):
    """Writes `turns[n]` as its n-th turn of a conversation, and the last of them from then on."""

    turns: list[str]

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, lambda prompt: self.turns[min(prompt.count(TURN_START), len(self.turns)) - 1])


@pytest.fixture(scope="module")
def policy(tiny: Callable[..., Path]) -> Policy:
    return Policy(AutoTokenizer.from_pretrained(tiny("qwen3")))


@pytest.fixture(scope="module")
def gateway(policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    limits = RolloutLimits(max_context_tokens=20_000)
    folder, renderer = tmp_path_factory.mktemp("run"), ChatRenderer(policy._tokenizer)
    with Gateway(policy, folder, renderer=renderer, limits=limits) as gateway:
        yield gateway


def post(gateway: Gateway, key: str, path: str, body: Any, **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(f"{gateway.url}{path}", content=content, headers={"x-api-key": key, **headers}, timeout=30.0)


def graph_of(gateway: Gateway, session_id: str) -> TrajectoryGraph:
    return load_session(gateway.config.run_dir / f"{session_id}.jsonl")


def ask(gateway: Gateway, key: str, dialect: str, messages: list[Any], **fields: Any) -> Any:
    name = "input" if dialect == "responses" else "messages"
    limit = {"max_tokens": 500} if dialect == "anthropic" else {}
    reply = post(gateway, key, PATHS[dialect], {"model": "m", name: messages, **limit, **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()


# -- content that the policy cannot see -------------------------------------------------------------

PNG, PDF = pixel(), base64.b64encode(b"%PDF-1.4").decode()
NOTES = base64.b64encode(b"my notes").decode()
BLOCKS: dict[str, list[tuple[Any, str]]] = {
    "chat": [
        ({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}, "[image omitted"),
        ({"type": "image_url", "image_url": {"url": "data:image/bmp;base64,Qk0="}}, "[image omitted"),
        ({"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}, "[image omitted: the g"),
        ({"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}, "[audio omitted"),
        ({"type": "file", "file": {"file_data": f"data:application/pdf;base64,{PDF}"}}, "[file omitted"),
        ({"type": "file", "file": {"file_data": f"data:text/plain;base64,{NOTES}"}}, "my notes"),
        ({"type": "video_url", "video_url": {"url": "http://a/b"}}, "[video omitted"),
        ({"type": "hologram", "depth": 3}, "[hologram omitted"),
    ],
    "anthropic": [
        ({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}, "[image omitted"),
        ({"type": "image", "source": {"type": "url", "url": "http://a/b.png"}}, "[image omitted"),
        ({"type": "image", "source": {"type": "file", "file_id": "file_1"}}, "[image omitted"),
        ({"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": PDF}}, "[document"),
        ({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "my notes"}}, "my notes"),
        ({"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "my"}]}}, "my"),
        ({"type": "tool_reference", "tool_name": "add"}, "[tool_reference omitted"),
        ({"type": "search_result", "source": "a", "title": "b", "content": [{"type": "text", "text": "c d"}]}, "c d"),
        ({"type": "container_upload", "file_id": "file_1"}, "[container_upload omitted"),
        ({"type": "hologram", "depth": 3}, "[hologram omitted"),
    ],
    "responses": [
        ({"type": "input_image", "image_url": f"data:image/png;base64,{PNG}"}, "[image omitted"),
        ({"type": "input_image", "image_url": "http://a/b.png"}, "[image omitted"),
        ({"type": "input_image", "file_id": "file_1"}, "[image omitted"),
        ({"type": "input_file", "file_id": "file_1"}, "[file omitted"),
        ({"type": "input_file", "filename": "a", "file_data": f"data:text/plain;base64,{NOTES}"}, "my notes"),
        ({"type": "hologram", "depth": 3}, "[hologram omitted"),
    ],
}  # fmt: skip
ITEMS: list[Any] = [
    {"type": "compaction", "encrypted_content": "x"},
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "q"}},
    {"type": "mcp_list_tools", "id": "m", "server_label": "s", "tools": []},
    {"type": "hologram", "depth": 3},
]


def returned(dialect: str, reply: Any) -> list[Any]:
    """A turn as an agent sends it again."""
    if dialect == "chat":
        return [reply["choices"][0]["message"]]
    return [{"role": "assistant", "content": reply["content"]}] if dialect == "anthropic" else reply["output"]


@pytest.mark.parametrize("dialect", PATHS)
@pytest.mark.parametrize("in_result", [False, True])
def test_a_conversation_goes_on_after_content_that_the_policy_cannot_see(
    gateway: Gateway, policy: Policy, dialect: str, in_result: bool
) -> None:
    for block, shown in BLOCKS[dialect]:
        graph = hold_conversation(gateway, policy, dialect, block, in_result)
        assert shown in policy.prompts[-1]
        noted = [note for note in graph.notes if note.name == "omitted"]
        assert [list(note.value.values()) for note in noted] == ([[1]] if shown.startswith("[") else [])
        assert all("omitted" not in message for node in graph.nodes for message in node.message.get("messages", ()))  # type: ignore[union-attr]


def hold_conversation(gateway: Gateway, policy: Policy, dialect: str, block: Any, in_result: bool) -> TrajectoryGraph:
    """A conversation of three turns with a block in its first message or in a result, which is repeated."""
    policy.turns = [call_text("add", a=1), "Done."]
    tools = {"chat": TOOLS, "anthropic": ANTHROPIC_TOOLS, "responses": FLAT_TOOLS}[dialect]
    info, key = gateway.create_session()
    content = [block, {"type": "input_text" if dialect == "responses" else "text", "text": "Look."}]
    user: Any = {"role": "user", "content": "Go." if in_result else content}
    turn = returned(dialect, ask(gateway, key, dialect, [user], tools=tools))
    if dialect == "chat":
        call_id = turn[0]["tool_calls"][0]["id"]
        result: Any = {"role": "tool", "tool_call_id": call_id, "content": content if in_result else "3"}
    elif dialect == "anthropic":
        part = {"type": "tool_result", "tool_use_id": turn[0]["content"][-1]["id"]}
        result = {"role": "user", "content": [{**part, "content": content if in_result else "3"}]}
    else:
        part = {"type": "function_call_output", "call_id": turn[-1]["call_id"]}
        result = {**part, "output": content if in_result else "3"}
    history = [user, *turn, result]
    history += returned(dialect, ask(gateway, key, dialect, history, tools=tools))
    history.append({"role": "user", "content": "More."})
    if dialect == "anthropic":
        counted = post(gateway, key, "/v1/messages/count_tokens", {"model": "m", "messages": history})
        assert counted.status_code == 200, counted.text
    ask(gateway, key, dialect, history, tools=tools)
    graph = graph_of(gateway, info.id)
    assert len(graph.leaves) == 1, block
    return graph


def picture(size: tuple[int, int] = (64, 64), image_format: str = "PNG", mode: str = "RGB") -> bytes:
    buffer = io.BytesIO()
    Image.effect_noise(size, 50).convert(mode).save(buffer, image_format)
    return buffer.getvalue()


GOOD = base64.b64encode(picture()).decode()
READABLE = {
    "png": GOOD,
    "lines": "\r\n".join(GOOD[start : start + 76] for start in range(0, len(GOOD), 76)) + "\n",
    "palette": base64.b64encode(picture(image_format="GIF", mode="P")).decode(),
    "CMYK": base64.b64encode(picture(image_format="JPEG", mode="CMYK")).decode(),
}
BROKEN_PNG = picture()[:60] + b"\xff" * 40 + picture()[100:]
UNREADABLE = {
    "HTML": base64.b64encode(b"<!doctype html><p>404").decode(),
    "nothing": "",
    "cut": base64.b64encode(picture()[:-400]).decode(),
    "cut JPEG": base64.b64encode(picture(image_format="JPEG")[:-400]).decode(),
    "damaged": base64.b64encode(BROKEN_PNG).decode(),
    "header only": base64.b64encode(picture()[:20]).decode(),
    "strip": base64.b64encode(picture((1, 400))).decode(),
    "BMP": base64.b64encode(picture(image_format="BMP")).decode(),
    "no base64": "?" + GOOD,
    "cut base64": GOOD[:-3],
    "no Latin": GOOD[:9] + "\u3042" + GOOD[9:],
}


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Gateway, Policy]]:
    folder = tmp_path_factory.mktemp("vision")
    processor = AutoProcessor.from_pretrained(make_vision_model(folder / "model", "qwen2_5_vl"))
    policy, limits = Policy(processor.tokenizer), RolloutLimits(max_context_tokens=20_000)
    with Gateway(policy, folder / "run", renderer=get_renderer(processor), limits=limits) as gateway:
        yield gateway, policy


@pytest.mark.parametrize("dialect", PATHS)
@pytest.mark.parametrize("in_result", [False, True])
def test_a_conversation_with_a_policy_with_vision_goes_on_after_an_image_that_cannot_be_read(
    vision: tuple[Gateway, Policy], dialect: str, in_result: bool
) -> None:
    for name, data in {**READABLE, **UNREADABLE}.items():
        url = f"data:image/png;base64,{data}"
        block: Any = {
            "chat": {"type": "image_url", "image_url": {"url": url}},
            "anthropic": {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}},
            "responses": {"type": "input_image", "image_url": url},
        }[dialect]
        graph = hold_conversation(*vision, dialect, block, in_result)
        assert len(graph.images(graph.leaves[0])) == (name in READABLE), name
        noted = [note.value for note in graph.notes if note.name == "omitted"]
        assert noted == ([] if name in READABLE else [{"image": 1}]), name
        shown = "[image omitted: it cannot be read]Look." in vision[1].prompts[-1]
        assert shown == (name in UNREADABLE), name


def chat_call(arguments: Any, **fields: Any) -> Any:
    return {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}, **fields}


def after_call(message: Any) -> list[Any]:
    return [{"role": "assistant", "content": None, "tool_calls": [chat_call("{}")]}, message]


def chat_result(content: Any) -> list[Any]:
    return after_call({"role": "tool", "tool_call_id": "c", "content": content})


def anthropic_result(content: Any) -> list[Any]:
    use = {"type": "tool_use", "id": "c", "name": "add", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": content}
    return [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]


def responses_result(output: Any) -> list[Any]:
    call = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
    return [call, {"type": "function_call_output", "call_id": "c", "output": output}]


def with_call(arguments: Any, **fields: Any) -> list[Any]:
    return [{"role": "assistant", "content": "x", "tool_calls": [chat_call(arguments, **fields)]}]


FORMS: list[tuple[str, list[Any], str]] = [
    *((dialect, result({"sum": [3]}), ': {"sum":[3]}<') for dialect, result in (
        ("chat", chat_result), ("anthropic", anthropic_result), ("responses", responses_result))),
    *((dialect, result([{"sum": 3}, {"sum": 4}]), ': [{"sum":3},{"sum":4}]<') for dialect, result in (
        ("chat", chat_result), ("anthropic", anthropic_result), ("responses", responses_result))),
    ("chat", chat_result({"type": "text", "text": "three"}), ": three<"),
    ("chat", chat_result(["three", {"type": "text", "text": " four"}]), ": three four<"),
    ("chat", chat_result(3), ": 3<"),
    ("chat", chat_result(False), ": false<"),
    ("chat", [{"role": "user", "content": ["three"]}], ": three<"),
    ("anthropic", [{"role": "user", "content": {"type": "text", "text": "three"}}], ": three<"),
    ("anthropic", [{"role": "assistant", "content": None}], "assistant: <"),
    ("chat", [{"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": 1}'}},
              {"role": "function", "name": "add", "content": "three"}], '<add a=1>'),
    ("chat", [{"role": "assistant", "function_call": {"name": "add", "arguments": "{}"}},
              {"role": "function", "name": "add", "content": "three"}], "add result: three<"),
    ("chat", with_call("a=1"), "<add input=a=1>"),
    ("chat", with_call("[1]"), "<add input=[1]>"),
    ("chat", with_call([1]), "<add input=[1]>"),
    ("chat", with_call("null"), "<add>"),
    ("chat", with_call(" "), "<add>"),
    ("chat", with_call(None, type="custom", custom={"name": "patch", "input": "***"}), "<patch input=***>"),
    ("anthropic", [{"role": "assistant", "content": [
        {"type": "tool_use", "id": "c", "name": "add", "input": "a=1"}]}], "<add input=a=1>"),
    ("responses", [{"type": "function_call", "call_id": "c", "name": "add", "arguments": "a=1"}], "<add input=a=1>"),
]  # fmt: skip
ITERATING = (
    "{%- for m in messages %}<|im_start|>{% if m.role == 'tool' %}{{ m.name }} result{% else %}{{ m.role }}{% endif %}"
    ": {{ m.content }}{%- for call in m.tool_calls or [] %}<{{ call.function.name }}"
    "{%- for key, value in call.function.arguments.items() %} {{ key }}={{ value }}{%- endfor %}>{%- endfor %}"
    "<|im_end|>\n{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n{%- endif %}"
)
"""As GLM's: the arguments of a call are read as an object."""


def test_values_with_a_plain_meaning_are_read(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path)
    tokenizer.chat_template = ITERATING
    policy, limits = Policy(tokenizer), RolloutLimits(max_context_tokens=20_000)
    policy.turns = ["Yes."]
    with Gateway(policy, tmp_path / "run", renderer=ChatRenderer(tokenizer), limits=limits) as gateway:
        _, key = gateway.create_session()
        for dialect, messages, shown in FORMS:
            history = [{"role": "user", "content": "Go."}, *messages, {"role": "user", "content": "On."}]
            ask(gateway, key, dialect, history)
            assert shown in policy.prompts[-1], (dialect, messages, policy.prompts[-1])


@pytest.mark.parametrize(
    ("messages", "culprit"),
    [
        ([{"role": "user", "content": {"sum": 3}}], "'content' must be"),
        ([{"role": "user", "content": [3]}], "'content' must be"),
        ([{"role": "function", "content": "three"}], "'name' must be"),
        ([{"role": "assistant", "function_call": "add"}], "'function_call' must be"),
        (with_call("{}", function="add"), "'function' must be"),
        ([{"role": "critic", "content": "x"}], "role 'critic'"),
        ([{"role": {}, "content": "x"}], "role"),
    ],
)
def test_values_without_a_meaning_are_refused_by_name(gateway: Gateway, messages: list[Any], culprit: str) -> None:
    _, key = gateway.create_session()
    reply = post(gateway, key, PATHS["chat"], {"model": "m", "messages": [{"role": "user", "content": "a"}, *messages]})
    assert (reply.status_code, culprit in reply.text) == (400, True), reply.text


def test_items_of_any_type_are_texts(gateway: Gateway, policy: Policy) -> None:
    policy.turns = ["Yes."]
    for item in ITEMS:
        info, key = gateway.create_session()
        history = [{"role": "user", "content": "a"}, item]
        history += returned("responses", ask(gateway, key, "responses", history))
        ask(gateway, key, "responses", [*history, {"role": "user", "content": "b"}])
        assert f"[{item['type']} omitted" in policy.prompts[-1]
        assert len(graph_of(gateway, info.id).leaves) == 1


@pytest.mark.parametrize(
    ("dialect", "block"),
    [
        ("chat", {"type": "text", "text": 5}),
        ("chat", {"type": "image_url", "image_url": {}}),
        ("chat", {"text": "a"}),
        ("anthropic", {"type": "image"}),
        ("responses", {"type": "input_text"}),
        ("responses", {"type": "input_image", "image_url": 5}),
    ],
)
def test_malformed_content_is_refused(gateway: Gateway, dialect: str, block: Any) -> None:
    _, key = gateway.create_session()
    name = "input" if dialect == "responses" else "messages"
    body = {"model": "m", "max_tokens": 5, name: [{"role": "user", "content": [block]}]}
    assert post(gateway, key, PATHS[dialect], body).status_code == 400


def test_a_policy_with_vision_keeps_its_images(vision: tuple[Gateway, Policy]) -> None:
    gateway, policy = vision
    policy.turns = ["Yes."]
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": pixel(64)}}
    document = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": PDF}}
    by_url = {"type": "image", "source": {"type": "url", "url": "http://a/b.png"}}
    info, key = gateway.create_session()
    history = [{"role": "user", "content": [image, document, by_url]}]
    history += returned("anthropic", ask(gateway, key, "anthropic", history, system=[image, document]))
    history.append({"role": "user", "content": "b"})
    ask(gateway, key, "anthropic", history, system=[image, document])
    graph = graph_of(gateway, info.id)
    assert (len(graph.leaves), len(graph.images(graph.leaves[0]))) == (1, 1)
    assert [note.value for note in graph.notes if note.name == "omitted"] == [{"image": 2, "document": 2}]


# -- a conversation that ends with the assistant ----------------------------------------------------


@pytest.fixture(scope="module", params=["generic", "family"])
def either(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Gateway, Policy, bool]]:
    """A gateway, its policy, and whether its renderer appends messages of the assistant to a recorded path."""
    folder, is_generic = tmp_path_factory.mktemp("either"), request.param == "generic"
    tokenizer = chat_tokenizer(folder)
    renderer = ChatRenderer(tokenizer) if is_generic else get_renderer(tokenizer, "qwen3")
    policy, limits = Policy(tokenizer), RolloutLimits(max_context_tokens=20_000)
    with Gateway(policy, folder / "run", renderer=renderer, limits=limits) as gateway:
        yield gateway, policy, is_generic


@pytest.mark.parametrize("dialect", PATHS)
@pytest.mark.parametrize("is_joined", [False, True])
def test_the_policy_begins_a_turn_after_a_message_of_the_assistant(
    either: tuple[Gateway, Policy, bool], dialect: str, is_joined: bool
) -> None:
    """Clients write such a message at a limit of steps, or as the beginning of the turn."""
    gateway, policy, is_generic = either
    policy.turns = ["First.", "Second.", "Third.", "Fourth."]
    info, key = gateway.create_session()
    history = [{"role": "user", "content": "Go."}]
    history += returned(dialect, ask(gateway, key, dialect, history))
    history += [{"role": "user", "content": "On."}, {"role": "assistant", "content": "No more steps."}]
    if dialect == "anthropic":
        counted = post(gateway, key, "/v1/messages/count_tokens", {"model": "m", "messages": history}).json()
    said = ask(gateway, key, dialect, history)
    assert policy.prompts[-1].endswith(f"No more steps.<|im_end|>\n{TURN_START}")
    graph = graph_of(gateway, info.id)
    assert graph.nodes[-1].sampled
    assert policy.prompts[-1] == policy._tokenizer.decode(graph.token_ids(graph.nodes[-2].id))
    assert dialect != "anthropic" or counted["input_tokens"] == graph.num_tokens(graph.nodes[-2].id)
    if is_joined:
        history[-1] = {"role": "assistant", "content": "No more steps.Third."}
    else:
        history += returned(dialect, said)
    ask(gateway, key, dialect, [*history, {"role": "user", "content": "More."}])
    graph = graph_of(gateway, info.id)
    assert "No more steps.<|im_end|>\n<|im_start|>assistant\nThird." in policy.prompts[-1].replace(
        "<think>\n\n</think>\n\n", ""
    )
    assert len(graph.leaves) == (1 if is_generic else 2)
    assert [node.sampled for node in graph.path(graph.leaves[-1])] == [False, True] * (3 if is_generic else 2)


@pytest.mark.parametrize("dialect", PATHS)
def test_a_conversation_that_ends_with_a_turn_of_the_policy_keeps_its_tokens(
    either: tuple[Gateway, Policy, bool], dialect: str
) -> None:
    gateway, policy, is_generic = either
    policy.turns = ["First.", "Second.", "Third."]
    info, key = gateway.create_session()
    history = [{"role": "user", "content": "Go."}]
    history += returned(dialect, ask(gateway, key, dialect, history))
    said = ask(gateway, key, dialect, history)
    assert f"First.<|im_end|>\n{TURN_START}" in policy.prompts[-1]
    assert "Second." in json.dumps(said)
    ask(gateway, key, dialect, [*history, *returned(dialect, said), {"role": "user", "content": "More."}])
    graph = graph_of(gateway, info.id)
    assert "Second.<|im_end|>\n<|im_start|>user\nMore." in policy.prompts[-1]
    assert len(graph.leaves) == (1 if is_generic else 2)


WITHOUT_HEADER = {
    "user message opens": "{%- for m in messages %}{%- if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{%- else %} {{ m.content }}<|im_end|>{%- endif %}{%- endfor %}",
    "only after others": "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt and messages[-1].role != 'assistant' %}<|im_start|>assistant\n{% endif %}",
    "another last end": "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{{ '<|eot_id|>' if loop.last and m.role == 'assistant' else '<|im_end|>' }}{%- endfor %}"
    "{%- if messages[-1].role == 'user' %}<|im_start|>assistant\n{% endif %}",
}


@pytest.mark.parametrize("template", WITHOUT_HEADER)
def test_no_turn_begins_after_the_end_of_an_assistant_message(template: str, tmp_path: Path) -> None:
    """The template has no header of a turn there: the policy would generate after its own end marker."""
    policy = Policy(chat_tokenizer(tmp_path))
    policy._tokenizer.chat_template = WITHOUT_HEADER[template]
    policy.turns = ["First."]
    user, said = {"role": "user", "content": "Go."}, {"role": "assistant", "content": "No more."}
    renderer, limits = ChatRenderer(policy._tokenizer), RolloutLimits(max_context_tokens=20_000)
    with Gateway(policy, tmp_path / "run", renderer=renderer, limits=limits) as gateway:
        info, key = gateway.create_session()
        turn = returned("chat", ask(gateway, key, "chat", [user]))
        for messages in ([user, *turn], [user, *turn, user, said], [user, said]):
            for dialect in PATHS:
                name = "input" if dialect == "responses" else "messages"
                body = {"model": "m", name: messages, **({"max_tokens": 9} if dialect == "anthropic" else {})}
                reply = post(gateway, key, PATHS[dialect], body)
                assert (reply.status_code, "no header of an assistant turn" in reply.text) == (400, True), reply.text
        ask(gateway, key, "chat", [user, *turn, user])
        assert len(graph_of(gateway, info.id).nodes) == 4


@pytest.mark.parametrize("dialect", PATHS)
@pytest.mark.parametrize("said", ["", "No more."])
def test_a_restart_changes_no_conversation_with_new_turns(dialect: str, said: str, tmp_path: Path) -> None:
    """A gateway that starts again before each request gives the policy the prompts of one that does not."""
    policy = Policy(chat_tokenizer(tmp_path))
    policy.turns = ["First.\n", "Second.", "Third. " + call_text("add", a=1), "Fourth.", "Fifth.", "Sixth."]
    renderer, limits = ChatRenderer(policy._tokenizer), RolloutLimits(max_context_tokens=20_000)
    tools = {"chat": TOOLS, "anthropic": ANTHROPIC_TOOLS, "responses": FLAT_TOOLS}[dialect]

    def converse(restarts: bool) -> list[str]:
        folder, start = tmp_path / str(restarts), len(policy.prompts)
        gateway = Gateway(policy, folder, renderer=renderer, limits=limits)
        info, key = gateway.create_session()
        history: list[Any] = [{"role": "user", "content": "Go."}]
        for number in range(6):
            if restarts:
                gateway.shutdown()
                gateway = Gateway(policy, folder, renderer=renderer, limits=limits)
            turn = returned(dialect, ask(gateway, key, dialect, history, tools=tools))
            history += turn
            if number == 0 and said:
                history += [{"role": "user", "content": "On."}, {"role": "assistant", "content": said}]
            if number == (1 if said else 2):  # the turn after two messages of the assistant
                history.append(result_of(dialect, turn))
            if number == 4:
                history.append({"role": "user", "content": "More."})
        gateway.shutdown()
        graph = load_session(folder / f"{info.id}.jsonl")
        assert len(graph.leaves) == 1
        assert graph.num_turns(graph.leaves[0]) == 6
        return policy.prompts[start:]

    assert converse(restarts=True) == converse(restarts=False)


def result_of(dialect: str, turn: list[Any]) -> Any:
    """The result of the call at the end of a turn."""
    if dialect == "chat":
        return {"role": "tool", "tool_call_id": turn[-1]["tool_calls"][0]["id"], "content": "3"}
    if dialect == "responses":
        return {"type": "function_call_output", "call_id": turn[-1]["call_id"], "output": "3"}
    part = {"type": "tool_result", "tool_use_id": turn[-1]["content"][-1]["id"], "content": "3"}
    return {"role": "user", "content": [part]}


# -- turns that come back in another form -----------------------------------------------------------


def rewrite(turn: Any, results: list[Any], seed: int) -> list[Any]:
    """A turn of the chat dialect and the results of its calls, in another form with the same meaning."""
    rng = random.Random(seed)
    calls, text = [dict(call) for call in turn.get("tool_calls") or ()], turn["content"]
    results = [dict(result) for result in results]
    renames: list[Callable[[str, int], str]] = [
        lambda call_id, place: call_id,
        lambda call_id, place: f"toolu_{call_id}",
        lambda call_id, place: call_id[:3] + str(place),
        lambda call_id, place: str(place),
        lambda call_id, place: "same",
    ]
    rename = rng.choice(renames)
    ids = {call["id"]: rename(call["id"], place) for place, call in enumerate(calls)}
    if "same" not in ids.values() and rng.random() < 0.5:
        rng.shuffle(results)
    for entry, name in [*((call, "id") for call in calls), *((result, "tool_call_id") for result in results)]:
        entry[name] = ids[entry[name]]
    for call in calls:
        arguments = json.loads(call["function"]["arguments"])
        call["function"] = {**call["function"], "arguments": json.dumps(arguments, indent=rng.choice([None, 2]))}
    form = rng.randrange(4)
    if not calls or form == 0:
        parts = [{"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}]
        cut = rng.randrange(len(text or "") + 1)
        if not calls and rng.random() < 0.5:
            parts = [{"role": "assistant", "content": half} for half in (text[:cut], text[cut:])]
    else:
        single = [{"role": "assistant", "content": None, "tool_calls": [call]} for call in calls]
        together = [{"role": "assistant", "content": "", "tool_calls": calls}]
        said = {"role": "assistant", "content": text}
        parts = [[said, *single], [*single, said], [*together, said]][form - 1]
    return [*parts, *results]


def change(history: list[Any], rng: random.Random) -> list[Any]:
    """The conversation with another meaning."""
    changed: list[Any] = json.loads(json.dumps(history))
    calls = [call for message in changed for call in message.get("tool_calls") or ()]
    results = [message for message in changed if message["role"] == "tool"]
    kind = rng.randrange(5)
    if kind == 0 and len(results) >= 2:  # the results of two calls of a turn
        results[0]["content"], results[1]["content"] = results[1]["content"], results[0]["content"]
    elif kind == 1 and calls:
        rng.choice(calls)["function"]["arguments"] = '{"a": 99}'
    elif kind == 2 and calls:
        rng.choice(calls)["function"]["name"] = "other"
    elif kind == 3 and results:
        results[0]["content"] += "!"
    else:
        turn = next(message for message in changed if message["role"] == "assistant")
        turn["content"] = f"{turn['content'] or ''} not"
    return changed


@pytest.mark.parametrize("seed", range(12))
def test_the_form_of_a_history_is_no_fork_and_its_meaning_is(gateway: Gateway, policy: Policy, seed: int) -> None:
    rng = random.Random(seed)
    words = [f"I say {number}.\n" for number in range(3)]
    policy.turns = [
        rng.choice([words[0] + CALLS, CALLS, words[0] + call_text("add", a=1), words[0]]),
        rng.choice([words[1] + CALLS, words[1]]),
        words[2],
    ]
    info, key = gateway.create_session()
    plain: list[Any] = [{"role": "user", "content": "Go."}]
    sent = plain[:1]
    for number in range(3):
        turn = ask(gateway, key, "chat", sent, tools=TOOLS)["choices"][0]["message"]
        calls = turn.get("tool_calls") or []
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": f"result {number} {place}"}
            for place, call in enumerate(calls)
        ]
        follow = [] if results else [{"role": "user", "content": f"more {number}"}]
        plain += [turn, *results, *follow]
        # All turns are written in another form with each request, so the earlier ones change again.
        sent, at = plain[:1], 1
        while at < len(plain):
            end = next((i for i in range(at + 1, len(plain)) if plain[i]["role"] != "tool"), len(plain))
            if plain[at]["role"] == "assistant":
                sent = [*sent, *rewrite(plain[at], plain[at + 1 : end], rng.randrange(10**6))]
            else:
                sent = [*sent, *plain[at:end]]
            at = end
    ask(gateway, key, "chat", sent, tools=TOOLS)
    graph = graph_of(gateway, info.id)
    assert len(graph.leaves) == 1, [node.fork_reason for node in graph.nodes]
    issued = {call["id"] for message in plain for call in message.get("tool_calls") or ()}
    recorded = [message for node in graph.nodes for message in (node.message or {}).get("messages", ())]
    assert {message["tool_call_id"] for message in recorded if message["role"] == "tool"} <= issued
    prompt = graph.nodes[-1].parent
    for _ in range(4):
        ask(gateway, key, "chat", change(sent, rng), tools=TOOLS)
        graph = graph_of(gateway, info.id)
        assert graph.nodes[-1].parent != prompt
        assert len(graph.leaves) >= 2


def test_the_ids_of_calls_survive_clients_that_clean_them(gateway: Gateway, policy: Policy) -> None:
    policy.turns = [CALLS]
    _, key = gateway.create_session()
    calls = ask(gateway, key, "chat", [{"role": "user", "content": "Go."}], tools=TOOLS)["choices"][0]["message"]
    ids = [call["id"] for call in calls["tool_calls"]]
    assert len(set(ids)) == 2
    assert all(len(call_id) == 9 and call_id.isalnum() and call_id.isascii() for call_id in ids)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by_response", [False, True])
def test_ids_of_responses_and_items_stand_for_turns(
    gateway: Gateway, policy: Policy, by_response: bool, stream: bool
) -> None:
    """What Vercel's AI SDK sends by default, and `previous_response_id`."""
    policy.turns = [f"<think>Hm</think>\n\nI add.\n{CALLS}", "It is 3.", "Yes."]
    info, key = gateway.create_session()
    history: list[Any] = [{"role": "user", "content": "Go."}]
    body = {"model": "m", "instructions": "Be brief.", "tools": FLAT_TOOLS, "stream": stream, "input": history}
    for number in range(3):
        reply = post(gateway, key, PATHS["responses"], body)
        assert reply.status_code == 200, reply.text
        data = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: ")]
        response = data[-1]["response"] if stream else reply.json()
        new: list[Any] = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "3"}
            for item in response["output"]
            if item["type"] == "function_call"
        ] or [{"role": "user", "content": f"more {number}"}]
        if by_response:
            body |= {"previous_response_id": response["id"], "input": new}
        else:
            history += [*({"type": "item_reference", "id": item["id"]} for item in response["output"]), *new]
    graph = graph_of(gateway, info.id)
    assert (len(graph.leaves), graph.num_turns(graph.leaves[0])) == (1, 3)
    for wrong in ({"previous_response_id": "resp_x", "input": "a"}, {"input": [{"type": "item_reference", "id": "x"}]}):
        reply = post(gateway, key, PATHS["responses"], {"model": "m", **wrong})
        assert reply.status_code == 400
        assert "not sent in this session" in reply.text
    _, other = gateway.create_session()
    assert post(gateway, other, PATHS["responses"], body | {"stream": False}).status_code == 400


def test_the_last_turn_without_calls_continues_the_path(gateway: Gateway, policy: Policy) -> None:
    policy.turns = [call_text("add", a=1), "Done."]
    forms = {
        "chat": (TOOLS, "none"),
        "anthropic": (ANTHROPIC_TOOLS, {"type": "none"}),
        "responses": (FLAT_TOOLS, "none"),
    }
    for dialect, (tools, choice) in forms.items():
        info, key = gateway.create_session()
        history: list[Any] = [{"role": "user", "content": "Go."}]
        history += returned(dialect, ask(gateway, key, dialect, history, tools=tools))
        history.append({"role": "user", "content": "Stop."})
        ask(gateway, key, dialect, history, tools=tools, tool_choice=choice)
        assert len(graph_of(gateway, info.id).leaves) == 1, dialect


def test_tools_that_the_policy_cannot_call_are_left_out_with_a_note(gateway: Gateway, policy: Policy) -> None:
    policy.turns = ["Done."]
    others = [{"type": "custom", "name": "x", "custom": {"name": "x"}}, {"type": "web_search_preview"}]
    forms = {
        "chat": [*TOOLS, *others],
        "responses": [*FLAT_TOOLS, *others],
        "anthropic": [*ANTHROPIC_TOOLS, {"type": "bash_20250124", "name": "bash"}, {"type": "web_search_preview"}],
    }
    for dialect, tools in forms.items():
        info, key = gateway.create_session()
        ask(gateway, key, dialect, [{"role": "user", "content": "Go."}], tools=tools)
        graph = graph_of(gateway, info.id)
        assert [tool["function"]["name"] for tool in graph.nodes[0].message["tools"]] == ["add", "sub"]  # type: ignore[index]
        (note,) = graph.notes
        assert (note.node, note.name, sum(note.value.values())) == (0, "omitted", 2)


def test_thoughts_among_the_content_are_dropped(gateway: Gateway, policy: Policy) -> None:
    policy.turns = ["<think>Hm</think>\n\nYes.", "No."]
    info, key = gateway.create_session()
    ask(gateway, key, "chat", [{"role": "user", "content": "a"}])
    turn = {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm"}, {"type": "text", "text": "Yes."}]}
    ask(gateway, key, "chat", [{"role": "user", "content": "a"}, turn, {"role": "user", "content": "b"}])
    assert len(graph_of(gateway, info.id).leaves) == 1


# -- bodies, keys and paths -------------------------------------------------------------------------


def deflate(data: bytes) -> bytes:
    encoder = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return encoder.compress(data) + encoder.flush()


COMPRESS: dict[str, list[Callable[[bytes], bytes]]] = {
    "gzip": [gzip.compress],
    "deflate": [zlib.compress, deflate],
    "zstd": [zstandard.ZstdCompressor().compress],
    "identity": [lambda data: data],
    "gzip, zstd": [lambda data: zstandard.ZstdCompressor().compress(gzip.compress(data))],
}


def test_compressed_bodies_are_read_within_the_limit(gateway: Gateway, policy: Policy) -> None:
    policy.turns = ["Yes."]
    _, key = gateway.create_session()
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Is it? ä"}]}).encode()
    bomb = b" " * (gateway.config.max_body_bytes + 2)
    for name, compressions in COMPRESS.items():
        for compress in compressions:
            reply = post(gateway, key, PATHS["chat"], compress(body), **{"content-encoding": name})
            assert reply.status_code == 200, (name, reply.text)
        if name != "identity":
            reply = post(gateway, key, PATHS["chat"], compressions[0](bomb), **{"content-encoding": name})
            assert reply.status_code == 413, (name, reply.text)
            for broken in (b"", b"{}", compressions[0](body)[:-5]):
                reply = post(gateway, key, PATHS["chat"], broken, **{"content-encoding": name})
                assert reply.status_code == 400, (name, reply.text)
    for dialect in ("chat", "anthropic"):
        reply = post(gateway, key, PATHS[dialect], body, **{"content-encoding": "br"})
        assert reply.status_code == 415
        assert "'br'" in reply.json()["error"]["message"]


def test_the_key_of_the_session_counts_beside_other_keys(gateway: Gateway, policy: Policy) -> None:
    policy.turns = ["Yes."]
    _, key = gateway.create_session()
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
    assert post(gateway, key, PATHS["chat"], body, authorization="Bearer sk-of-the-user").status_code == 200
    reply = post(gateway, "sk-of-the-user", PATHS["chat"], body, authorization=f"Bearer {key}")
    assert reply.status_code == 200
    assert post(gateway, "sk-wrong", PATHS["chat"], body, authorization="Bearer sk-wrong-too").status_code == 401


def test_paths_that_are_almost_right(gateway: Gateway, policy: Policy) -> None:
    policy.turns = ["Yes."]
    _, key = gateway.create_session()
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "a"}]}
    for path in ("//v1/messages", "/v1//chat/completions", f"//session/{key}//v1/messages"):
        assert post(gateway, key, path, body).status_code == 200, path
    for path in ("/v1/messages/batches", "/messages"):
        reply = post(gateway, key, path, body)
        assert (reply.status_code, reply.json()["type"]) == (404, "error")
        assert reply.json()["error"]["type"] == "not_found_error"
    assert httpx.put(f"{gateway.url}/v1/messages").json()["type"] == "error"
    assert "param" in post(gateway, key, "/v1/batches", body).json()["error"]


def test_results_with_unknown_ids_belong_to_the_calls_in_their_order() -> None:
    """Also if the calls repeat an id."""
    for call_ids, result_ids in ((["f", "g", "f"], ["call_f", "call_g", "call_f"]), (["f", "g", "h"], ["x", "y", "z"])):
        calls = [as_template_call(call_id, call_id, "{}") for call_id in call_ids]
        results = [{"role": "tool", "tool_call_id": each, "content": str(n)} for n, each in enumerate(result_ids)]
        turn, *found = normalize_messages([{"role": "assistant", "content": "", "tool_calls": calls}, *results])
        assert [result["content"] for result in found] == ["0", "1", "2"]
        assert [result["tool_call_id"] for result in found] == [call["id"] for call in turn["tool_calls"]]


def test_half_a_character_does_not_end_a_conversation() -> None:
    """Agents cut results of tools within an emoji, and send the same history with every later request."""
    texts = [r"cut \ud83d", r"\ude00 cut", r"whole \ud83d\ude00", r"no escape \\ud83d", "é"]
    wanted = ["cut \ufffd", "\ufffd cut", "whole \U0001f600", r"no escape \ud83d", "é"]
    messages = ",".join(f'{{"role":"tool","content":"{text}"}}' for text in texts)
    body = KnownItems().parse(f'{{"model":"m","messages":[{messages}]}}'.encode())
    assert [message["content"] for message in body.fields["messages"]] == wanted
    for wrong in (r'{"a": NaN, "b": "\ud83d"}', r'{"b": "\ud83d"', r'["\ud83d"]'):
        with pytest.raises((orjson.JSONDecodeError, NoObjectError, msgspec.DecodeError)):
            KnownItems().parse(wrong.encode())
