"""Prompts that grow: the same ids as the template would give, and never those of earlier turns again."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import LLAMA, QWEN, chat_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from verl_server.errors import BadInputError, UnsupportedError
from verl_server.trajectory.families import FamilyRenderer, renderer_for
from verl_server.trajectory.rendering import MARK, Renderer

COUNTING = "{% for m in messages %}<|im_start|>{{ loop.index }} {{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
BARE = "{% for m in messages %}{{ m.content }}{% endfor %}"
FORGETFUL = "{% for m in messages if m.role == 'user' %}{{ m.content }}<|im_end|>{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def with_template(tokenizer: Any, template: str) -> Renderer:
    tokenizer.chat_template = template
    return Renderer(tokenizer)


TEXT = (
    st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), min_size=1, max_size=12)
    .map(str.strip)
    .filter(bool)
)
ROLE = st.sampled_from(["user", "tool", "system"])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    template=st.sampled_from([QWEN, LLAMA]),
    start=TEXT,
    turns=st.lists(st.tuples(TEXT, st.lists(st.tuples(ROLE, TEXT), min_size=1, max_size=3)), min_size=1, max_size=4),
    ended=st.booleans(),
)
def test_what_grows_is_what_the_template_says(
    tokenizer: Any, template: str, start: str, turns: list[Any], ended: bool
) -> None:
    """Whether the policy said the end of its turn itself or was cut off before it."""
    renderer = with_template(tokenizer, template)
    end = tokenizer.encode("<|im_end|>" if template is QWEN else "<|eot_id|>", add_special_tokens=False)
    messages: list[dict[str, str]] = [{"role": "user", "content": start}]
    ids = renderer.first(messages)
    for said, answers in turns:
        sampled = [*tokenizer.encode(said, add_special_tokens=False), *(end if ended else [])]
        new = [{"role": role, "content": content} for role, content in answers]
        ids += [*sampled, *renderer.suffix(new, sampled)]
        messages += [{"role": "assistant", "content": said}, *new]
    assert ids == renderer.first(messages)


def test_thoughts_stay_where_the_template_would_strip_them(tokenizer: Any) -> None:
    renderer = with_template(tokenizer, QWEN)
    prompt = renderer.first([{"role": "user", "content": "u"}])
    sampled = tokenizer.encode("<think>hm</think>yes<|im_end|>", add_special_tokens=False)
    ids = [*prompt, *sampled, *renderer.suffix([{"role": "user", "content": "v"}], sampled)]
    assert "<think>hm</think>yes" in tokenizer.decode(ids)
    rendered = renderer.first(
        [
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": "<think>hm</think>yes"},
            {"role": "user", "content": "v"},
        ]
    )
    assert "<think>" not in tokenizer.decode(rendered), "so rendering again would have drifted"
    assert rendered[-8:] == ids[-8:]


@pytest.mark.parametrize(
    ("template", "words"),
    [(COUNTING, "differently after different histories"), (FORGETFUL, "does not show")],
)
def test_templates_that_cannot_be_cut_are_refused(tokenizer: Any, template: str, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        with_template(tokenizer, template)


def test_a_template_without_marks_is_fine_where_tokens_never_join(tokenizer: Any) -> None:
    """Bytes: what stands before does not change them."""
    suffix = with_template(tokenizer, BARE).suffix([{"role": "user", "content": "z"}], [])
    assert suffix == tokenizer.encode("z", add_special_tokens=False)


def test_a_tokenizer_that_joins_a_turn_with_what_follows_is_refused() -> None:
    """A merge over the border: `x` and `f` are one token when they touch."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    letters = {letter: number for number, letter in enumerate(dict.fromkeys("abcdefghxyz \n"))}
    joined = Tokenizer(models.BPE(vocab={**letters, "xf": len(letters)}, merges=[("x", "f")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=joined)
    with pytest.raises(UnsupportedError, match="joins what a policy says"):
        with_template(tokenizer, BARE)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "no messages"),
        ([{"role": "pope", "content": "x"}], "role 'pope'"),
        (["x"], "role 'str'"),
        ([{"role": "user", "content": 7}], "is a int"),
        ([{"role": "user", "content": f"a{MARK}"}], "contains the mark"),
    ],
)
def test_bad_messages(tokenizer: Any, messages: list[Any], words: str) -> None:
    renderer = with_template(tokenizer, LLAMA)
    with pytest.raises(BadInputError, match=words):
        renderer.first(messages)
    with pytest.raises(BadInputError, match=words):
        renderer.suffix(messages, [1])


FAMILIES = st.sampled_from([("qwen3", "<|im_end|>"), ("llama-3", "<|eot_id|>")])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    family=FAMILIES,
    start=TEXT,
    turns=st.lists(st.tuples(TEXT, st.lists(st.sampled_from(["user", "tool"]), min_size=1, max_size=3)), min_size=1),
    ended=st.booleans(),
)
def test_a_family_grows_as_it_renders(tokenizer: Any, family: Any, start: str, turns: list[Any], ended: bool) -> None:
    """Prompts that grew equal the whole conversation, rendered by the family at once (thoughts aside)."""
    name, end = family
    renderer = FamilyRenderer(tokenizer, name)
    close = tokenizer.encode(end, add_special_tokens=False)
    messages: list[dict[str, str]] = [{"role": "user", "content": start}]
    ids = renderer.first(messages)
    before = ids
    for said, roles in turns:
        sampled = [*tokenizer.encode(said, add_special_tokens=False), *(close if ended else [])]
        new = [{"role": role, "content": f"answer {number}"} for number, role in enumerate(roles)]
        suffix = renderer.suffix(new, sampled, before)
        assert suffix == renderer.suffix(new, sampled), "of earlier turns nothing is needed"
        ids += [*sampled, *suffix]
        messages += [{"role": "assistant", "content": said}, *new]
        before = suffix
    assert "<think>" in tokenizer.decode(renderer.first(messages)) or ids == renderer.first(messages)


def test_a_family_keeps_thoughts_and_reads_calls(tokenizer: Any) -> None:
    renderer = FamilyRenderer(tokenizer, "qwen3")
    prompt = renderer.first([{"role": "user", "content": "u"}], [{"type": "function", "function": {"name": "add"}}])
    text = '<think>hm</think>yes<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><tool_call>{</tool_call>'
    sampled = tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False)
    good, bad = renderer.calls(sampled, prompt, []) or []
    assert (good.name, good.arguments, good.fault) == ("add", {"a": 1}, None)
    assert bad.fault is not None
    assert renderer.calls(tokenizer.encode("no", add_special_tokens=False), prompt, []) == []
    suffix = renderer.suffix([{"role": "user", "content": "v"}], sampled, prompt)
    assert "<think>hm</think>yes" in tokenizer.decode([*prompt, *sampled, *suffix])


def test_which_renderer(tokenizer: Any) -> None:
    tokenizer.chat_template = QWEN
    assert type(renderer_for(tokenizer)) is Renderer
    assert isinstance(renderer_for(tokenizer, "qwen3"), FamilyRenderer)
    tokenizer.name_or_path = "Qwen/Qwen3-8B"
    assert isinstance(renderer_for(tokenizer), FamilyRenderer)
    tokenizer.name_or_path = ""
    for name in ("kimi-k2", "no such family"):
        with pytest.raises(UnsupportedError, match=f"not of the family '{name}'"):
            renderer_for(tokenizer, name)
    family = FamilyRenderer(tokenizer, "llama-3")
    with pytest.raises(BadInputError, match="cannot let"):
        family.suffix([{"role": "assistant", "content": "mine"}], [1])
    with pytest.raises(BadInputError, match="no messages"):
        family.first([])
