"""What the policy reads of the results of tools: the names and the ids with which it has called the tools."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from agent_helpers import ScriptedGenerateFn, add, renderer_with_template

from verl_server.agent import RolloutLimits, RolloutRunner, Sample, Task
from verl_server.gateway import Gateway
from verl_server.tiny import make_tokenizer
from verl_server.trajectory import ChatRenderer, FamilyRenderer

KIMI = (
    "[BOS]", "[EOS]", "[EOT]", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|im_end|>",
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>",
    "<|tool_call_argument_begin|>",
)  # fmt: skip
GEMMA = (
    "<bos>", "<eos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>", "<|tool>", "<tool|>",
    "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>', "<|image|>", "<|image>",
    "<image|>", "<|video|>", "<|audio|>", "<|audio>", "<audio|>",
)  # fmt: skip
NAMED = (
    "{%- for t in tools or [] %}{{ t.function.name + ' ' }}{%- endfor %}"
    "{%- for m in messages %}<|im_start|>{{ m.role + (' ' + m.name if m.name else '') + '\n' + (m.content or '') }}"
    "{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{%- endfor %}<|im_end|>\n"
    "{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template that shows the names of tools beside their results."""


def kimi_turn(*calls: str) -> str:
    """A turn with calls, by their ids."""
    each = [f'<|tool_call_begin|>{call}<|tool_call_argument_begin|>{{"a": 1}}<|tool_call_end|>' for call in calls]
    return f"<|tool_calls_section_begin|>{''.join(each)}<|tool_calls_section_end|><|im_end|>"


KIMI_TURN = kimi_turn("functions.add:0", "functions.run:1")
GEMMA_TURN = "<|tool_call>call:add{a:1}<tool_call|><|tool_call>call:run{a:1}<tool_call|><|tool_response>"
HERMES_TURN = "".join(
    f'<tool_call>{{"name": "{name}", "arguments": {{"a": 1}}}}</tool_call>' for name in ("add", "run")
)


def make_family(folder: Path, family: str, special: tuple[str, ...]) -> ChatRenderer:
    tokenizer = make_tokenizer(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)}, replace_extra_special_tokens=False)
    if "<bos>" in special:
        tokenizer.bos_token = "<bos>"
    return FamilyRenderer(tokenizer, family)


def make_generic(folder: Path) -> ChatRenderer:
    return renderer_with_template(make_tokenizer(folder), NAMED)


RENDERERS: dict[str, tuple[Callable[[Path], ChatRenderer], str, tuple[str, str]]] = {
    "kimi-k2": (
        lambda folder: make_family(folder, "kimi-k2", KIMI),
        KIMI_TURN,
        (
            "<|im_system|>add<|im_middle|>## Return of functions.add:0\nfirst",
            "<|im_system|>run<|im_middle|>## Return of functions.run:1\nsecond",
        ),
    ),
    "gemma4": (
        lambda folder: make_family(folder, "gemma4", GEMMA),
        GEMMA_TURN,
        ('response:add{value:<|"|>first<|"|>}', 'response:run{value:<|"|>second<|"|>}'),
    ),
    "generic": (make_generic, HERMES_TURN, ("tool add\nfirst", "tool run\nsecond")),
}
"""By the name of a family: its renderer, a turn with calls of `add` and `run`, and results as the policy reads them."""
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {"a": {}}}}}
    for name in ("add", "run")
]


def ask(gateway: Gateway, key: str, messages: Any) -> Any:
    """The message of the reply to a chat."""
    body = {"model": "m", "messages": messages, "tools": TOOLS}
    headers = {"Authorization": f"Bearer {key}"}
    reply = httpx.post(f"{gateway.openai_url}/chat/completions", json=body, headers=headers, timeout=60.0)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["message"]


@pytest.mark.parametrize("is_restarted", [False, True], ids=["", "restarted"])
@pytest.mark.parametrize("kind", RENDERERS)
def test_results_have_the_names_and_the_ids_of_the_calls_that_the_policy_has_written(
    tmp_path: Path, kind: str, is_restarted: bool
) -> None:
    """In a conversation that goes on, also after a restart, and in a changed conversation with a prompt of its own."""
    make, turn, results = RENDERERS[kind]
    renderer = make(tmp_path / "tokenizer")
    policy = ScriptedGenerateFn(renderer.tokenizer, lambda prompt: turn if "first" not in prompt else "done")
    options: Any = {"renderer": renderer, "limits": RolloutLimits(max_context_tokens=10_000)}
    question = {"role": "user", "content": "go"}
    with Gateway(policy, tmp_path / "run", **options) as gateway:
        _, key = gateway.create_session("s")
        called = ask(gateway, key, [question])
        answers = [
            {"role": "tool", "tool_call_id": call["id"], "content": content}
            for call, content in zip(called["tool_calls"], ("first", "second"), strict=True)
        ]
        assert [call["function"]["name"] for call in called["tool_calls"]] == ["add", "run"]
        if not is_restarted:
            ask(gateway, key, [question, called, *answers])
            ask(gateway, key, [{"role": "user", "content": "changed"}, called, *answers])
    if is_restarted:
        with Gateway(policy, tmp_path / "run", **options) as gateway:
            ask(gateway, key, [question, called, *answers])
            ask(gateway, key, [{"role": "user", "content": "changed"}, called, *answers])
    _, continued, changed = policy.prompts
    assert turn in continued, "the recorded tokens"
    for prompt in (continued, changed):
        places = [prompt.index(result) for result in results]
        assert places == sorted(places)
        assert not any(call["id"] in prompt for call in called["tool_calls"]), "the ids of the gateway"
    assert continued[continued.index(results[0]) :] == changed[changed.index(results[0]) :]


def run_episode(renderer: ChatRenderer, turn: str) -> tuple[Sample, str]:
    """A sample whose policy writes this turn, and after its results a turn without calls. Also the last prompt."""
    policy = ScriptedGenerateFn(renderer.tokenizer, lambda prompt: "done" if turn in prompt else turn)

    async def run() -> Sample:
        runner = RolloutRunner([add], policy, renderer=renderer, limits=RolloutLimits(2000))
        (group,) = [group async for group in runner.run([Task("t", [{"role": "user", "content": "go"}])])]
        return group.samples[0]

    return asyncio.run(run()), policy.prompts[-1]


@pytest.mark.parametrize(
    ("calls", "headers"),
    [
        (["functions.add:0", "functions.add:1"], ["add<|im_middle|>## Return of functions.add:0\n2", "add:1\n2"]),
        (["functions.no:0", "functions.add:1"], ["no<|im_middle|>## Return of functions.no:0\nError", "add:1\n2"]),
        (["functions.:0", "functions.add:1"], ["tool<|im_middle|>## Return of functions.:0\nError", "add:1\n2"]),
    ],
)
def test_results_in_an_episode_have_the_ids_of_the_calls(tmp_path: Path, calls: list[str], headers: list[str]) -> None:
    renderer = make_family(tmp_path, "kimi-k2", KIMI)
    sample, prompt = run_episode(renderer, kimi_turn(*calls))
    assert sample.num_turns == 2
    assert all(header in prompt for header in headers), prompt


def test_results_without_names_have_those_of_the_calls_in_their_order(tmp_path: Path) -> None:
    """Also if an agent loop of a user answers some of the calls only, or more than there are."""
    renderer = make_family(tmp_path, "gemma4", GEMMA)
    prompt_ids, turn_ids = renderer.render_prompt([{"role": "user", "content": "go"}]), renderer.encode(GEMMA_TURN)
    for given, expected in (
        ([{}], ["add"]),
        ([{"name": "run"}], ["run"]),
        ([{"name": "run"}, {}], ["run", "add"]),
        ([{}, {}, {}], ["add", "run", "tool"]),
    ):
        results = [{"role": "tool", "content": "x", **fields} for fields in given]
        text = renderer.decode_all(renderer.render_next_turn(results, turn_ids, prompt_ids, TOOLS))
        assert [part.partition("{")[0] for part in text.split("response:")[1:]] == expected
