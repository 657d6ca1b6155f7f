"""Rendering of single turns: the same token ids as the chat template, without tokenizing earlier turns again."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from agent_helpers import add, renderer_with_template
from helpers import LLAMA, QWEN, chat_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from verl_server.agent import ToolRegistry
from verl_server.errors import BadInputError, UnsupportedError
from verl_server.tiny import make_tokenizer
from verl_server.trajectory import ASSISTANT_PLACEHOLDER, ChatRenderer, FamilyRenderer, get_renderer
from verl_server.trajectory.rendering import chat_renderer
from verl_server.trajectory.rendering.families import PROBE_PROMPTS, PROBE_TOOL
from verl_server.trajectory.rendering.tokenizer import TRUNCATION_MARK, truncate_text

NUMBERED_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ loop.index }} {{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)
CONTENT_ONLY_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
USER_ONLY_TEMPLATE = "{% for m in messages if m.role == 'user' %}{{ m.content }}<|im_end|>{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))


TEXT = (
    st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), min_size=1, max_size=12)
    .map(str.strip)
    .filter(bool)
)
ROLE = st.sampled_from(["user", "tool", "system"])


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    template=st.sampled_from([QWEN, LLAMA]),
    first_message=TEXT,
    turns=st.lists(st.tuples(TEXT, st.lists(st.tuples(ROLE, TEXT), min_size=1, max_size=3)), min_size=1, max_size=4),
    has_end_marker=st.booleans(),
)
def test_rendering_by_turns_equals_the_template(
    tokenizer: Any, template: str, first_message: str, turns: list[Any], has_end_marker: bool
) -> None:
    """Both for turns that the policy ended and for turns that were cut off."""
    renderer = renderer_with_template(tokenizer, template)
    end_marker = tokenizer.encode("<|im_end|>" if template is QWEN else "<|eot_id|>", add_special_tokens=False)
    messages: list[dict[str, str]] = [{"role": "user", "content": first_message}]
    token_ids = renderer.render_prompt(messages)
    for turn_text, replies in turns:
        turn_ids = [*tokenizer.encode(turn_text, add_special_tokens=False), *(end_marker if has_end_marker else [])]
        new_messages = [{"role": role, "content": content} for role, content in replies]
        token_ids += [*turn_ids, *renderer.render_next_turn(new_messages, turn_ids)]
        messages += [{"role": "assistant", "content": turn_text}, *new_messages]
    assert token_ids == renderer.render_prompt(messages)


@pytest.mark.parametrize("end", ["", "\n", "\n<|im_end|>"])
def test_end_marker_after_a_newline_is_not_repeated(tokenizer: Any, end: str) -> None:
    """DeepSeek-Coder's template has a newline between the content and the end marker. Also for turns cut off there."""
    renderer = renderer_with_template(
        tokenizer,
        "{% for m in messages %}# {{ m.role }}\n{{ m.content }}\n{% if m.role == 'assistant' %}<|im_end|>\n{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}# assistant\n{% endif %}",
    )
    first, second = {"role": "user", "content": "u"}, {"role": "user", "content": "v"}
    turn_ids = renderer.encode(f"hi{end}")
    token_ids = [*renderer.render_prompt([first]), *turn_ids, *renderer.render_next_turn([second], turn_ids)]
    assert token_ids == renderer.render_prompt([first, {"role": "assistant", "content": "hi"}, second])


def test_truncated_text_has_whole_characters_and_all_control_tokens(tokenizer: Any) -> None:
    """The tokens are bytes, so a cut can be inside a character."""
    renderer = renderer_with_template(tokenizer, QWEN)
    assert renderer.truncate("\U0001f600\U0001f600", 6) == "\U0001f600 [cut]"
    assert renderer.truncate("a<|im_end|>b long text", 3) == "a<| [cut]", "what counts are the tokens of foreign text"
    assert renderer.truncate("a\ufffd long text", 4) == "a\ufffd [cut]", "the text has this character itself"


@pytest.mark.parametrize("cut", ["start", "middle", "end"])
def test_long_texts_are_truncated_as_if_all_of_the_text_was_tokenized(cut: str) -> None:
    """Only about as much text as is kept is tokenized, also if a token has many characters."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    words = ["the tensor ", "weights\n", " " * 100, "\u4f60\u597d", "\U0001f600 ", "x = 1\n"]
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False)  # type: ignore[no-untyped-call]
    bpe.train_from_iterator(words * 50, trainer)
    encoded = [0]

    def encode(text: str) -> list[int]:
        encoded[0] += len(text)
        return list(bpe.encode(text).ids)

    def decode(token_ids: Sequence[int]) -> str:
        return str(bpe.decode(list(token_ids)))

    rng = random.Random(0)
    for _ in range(200):
        text = "".join(rng.choices(words, k=rng.randrange(1, 2000)))
        limit, ids = rng.randrange(1, 500), bpe.encode(text).ids
        num_last = {"start": limit, "middle": limit // 2, "end": 0}[cut]
        first, last = decode(ids[: limit - num_last]), decode(ids[-num_last:]) if num_last else ""
        first, last = first.rstrip("\ufffd"), last.lstrip("\ufffd")
        expected = text if len(ids) <= limit else first + TRUNCATION_MARK + (f" {last}" if last else "")
        assert truncate_text(text, limit, cut, encode, decode) in (expected, expected.strip())
    text, encoded[0] = "weights\n" * 100_000, 0
    assert len(truncate_text(text, 500, cut, encode, decode)) < 10_000
    assert encoded[0] < 20_000


def test_the_first_prompt_of_a_group_is_rendered_once(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for longer than a minute: a template may write the present time."""
    renderer = renderer_with_template(tokenizer, QWEN)
    messages = [{"role": "user", "content": "u"}]
    first = renderer.render_prompt(messages)
    tokenizer.chat_template = QWEN.replace("{{ m.content }}", "{{ m.content }} at noon")
    changed = ChatRenderer(tokenizer).render_prompt(messages)
    assert changed != first
    again = renderer.render_prompt(messages)
    assert again == first
    again.append(0)
    assert renderer.render_prompt(messages) == first, "callers have copies"
    assert renderer.render_prompt([{"role": "user", "content": "v"}]) != first
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + chat_renderer.LIFETIME_S)
    assert renderer.render_prompt(messages) == changed
    for number in range(2 * chat_renderer.MAX_PROMPTS):
        renderer.render_prompt([{"role": "user", "content": str(number)}])
    tokenizer.chat_template = QWEN
    assert renderer.render_prompt(messages) == first, "old prompts are forgotten"


def test_thoughts_that_the_template_removes_are_kept(tokenizer: Any) -> None:
    renderer = renderer_with_template(tokenizer, QWEN)
    prompt_ids = renderer.render_prompt([{"role": "user", "content": "u"}])
    turn_ids = tokenizer.encode("<think>hm</think>yes<|im_end|>", add_special_tokens=False)
    token_ids = [*prompt_ids, *turn_ids, *renderer.render_next_turn([{"role": "user", "content": "v"}], turn_ids)]
    assert "<think>hm</think>yes" in tokenizer.decode(token_ids)
    rendered_again = renderer.render_prompt(
        [
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": "<think>hm</think>yes"},
            {"role": "user", "content": "v"},
        ]
    )
    assert "<think>" not in tokenizer.decode(rendered_again), "the test needs a template that removes thoughts"
    assert rendered_again[-8:] == token_ids[-8:]


@pytest.mark.parametrize(
    ("template", "expected"),
    [(NUMBERED_TEMPLATE, "differently after different histories"), (USER_ONLY_TEMPLATE, "does not show")],
)
def test_templates_that_depend_on_the_history_are_refused(tokenizer: Any, template: str, expected: str) -> None:
    with pytest.raises(UnsupportedError, match=expected):
        renderer_with_template(tokenizer, template)


def test_template_without_markers_is_accepted_if_tokens_never_merge(tokenizer: Any) -> None:
    """The tokens are bytes, so the text before them does not change them."""
    renderer = renderer_with_template(tokenizer, CONTENT_ONLY_TEMPLATE)
    token_ids = renderer.render_next_turn([{"role": "user", "content": "z"}], [])
    assert token_ids == tokenizer.encode("z", add_special_tokens=False)


def test_tokenizer_that_merges_across_turns_is_refused() -> None:
    """`x` at the end of a turn and `f` at the start of the next message become one token."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    letters = {letter: index for index, letter in enumerate(dict.fromkeys("abcdefghxyz \n"))}
    merging = Tokenizer(models.BPE(vocab={**letters, "xf": len(letters)}, merges=[("x", "f")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=merging)
    with pytest.raises(UnsupportedError, match="joins the end of an assistant turn"):
        renderer_with_template(tokenizer, CONTENT_ONLY_TEMPLATE)


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([], "no messages"),
        ([{"role": "pope", "content": "x"}], "role 'pope'"),
        (["x"], "message 0: expected a dict, got str"),
        ([{"role": "user", "content": "x"}, {"role": "user"}], "message 1: the key 'content' is missing"),
        ([{"role": "user", "content": 7}], "has the type int"),
        ([{"role": "tool", "content": "\ud800"}], "message 0: a value cannot be recorded as JSON.*surrogates"),
        ([{"role": "user", "content": f"a{ASSISTANT_PLACEHOLDER}"}], "contains the reserved placeholder"),
        (
            [{"role": "user", "content": [{"type": "text", "text": ASSISTANT_PLACEHOLDER}]}],
            "message 0: .* contains the reserved placeholder",
        ),
        ([{"role": "tool", "content": "x", "name": ASSISTANT_PLACEHOLDER}], "contains the reserved placeholder"),
    ],
)
def test_invalid_messages_are_refused(tokenizer: Any, messages: list[Any], expected: str) -> None:
    renderer = renderer_with_template(tokenizer, LLAMA)
    with pytest.raises(BadInputError, match=expected):
        renderer.render_prompt(messages)
    with pytest.raises(BadInputError, match=expected):
        renderer.render_next_turn(messages, [1])


FAMILIES = st.sampled_from([("qwen3", "<|im_end|>"), ("llama-3", "<|eot_id|>")])


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    family=FAMILIES,
    first_message=TEXT,
    turns=st.lists(st.tuples(TEXT, st.lists(st.sampled_from(["user", "tool"]), min_size=1, max_size=3)), min_size=1),
    has_end_marker=st.booleans(),
)
def test_family_rendering_by_turns_equals_whole_conversations(
    tokenizer: Any, family: Any, first_message: str, turns: list[Any], has_end_marker: bool
) -> None:
    """Prompts that grow by turns equal the family's rendering of the whole conversation, apart from thoughts."""
    name, end_marker_text = family
    renderer = FamilyRenderer(tokenizer, name)
    end_marker = tokenizer.encode(end_marker_text, add_special_tokens=False)
    messages: list[dict[str, str]] = [{"role": "user", "content": first_message}]
    token_ids = renderer.render_prompt(messages)
    preceding_ids = token_ids
    for turn_text, roles in turns:
        turn_ids = [*tokenizer.encode(turn_text, add_special_tokens=False), *(end_marker if has_end_marker else [])]
        new_messages = [{"role": role, "content": f"answer {index}"} for index, role in enumerate(roles)]
        next_ids = renderer.render_next_turn(new_messages, turn_ids, preceding_ids)
        assert next_ids == renderer.render_next_turn(new_messages, turn_ids), "the result depends on earlier turns"
        token_ids += [*turn_ids, *next_ids]
        messages += [{"role": "assistant", "content": turn_text}, *new_messages]
        preceding_ids = next_ids
    rendered = renderer.render_prompt(messages)
    assert "<think>" in tokenizer.decode(rendered) or token_ids == rendered


def test_threads_that_share_a_renderer_do_not_mix_their_messages(tokenizer: Any) -> None:
    """The gateway renders in threads. A message with the text of a control token is rendered with a mark."""
    renderer = FamilyRenderer(tokenizer, "qwen3")
    with_control_token = [{"role": "user", "content": "a <|im_end|> b"}]
    expected = renderer.render_prompt(with_control_token)
    interruptions: list[str] = []

    class RendersMeanwhile:
        """Another thread renders a message without a control token while this tokenizer encodes its first text."""

        def encode(self, text: str, **options: Any) -> Any:
            if not interruptions:
                interruptions.append(text)
                with ThreadPoolExecutor(1) as pool:
                    pool.submit(renderer.render_prompt, [{"role": "user", "content": "plain"}]).result(60)
            return tokenizer.encode(text, **options)

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

    renderer._marking_tokenizer._tokenizer = RendersMeanwhile()
    assert renderer.render_prompt(with_control_token) == expected
    assert interruptions


def test_family_renderer_keeps_thoughts_and_parses_tool_calls(tokenizer: Any) -> None:
    renderer = FamilyRenderer(tokenizer, "qwen3")
    tools = [{"type": "function", "function": {"name": "add"}}]
    prompt_ids = renderer.render_prompt([{"role": "user", "content": "u"}], tools)
    text = '<think>hm</think>yes<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><tool_call>{</tool_call>'
    turn_ids = tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False)
    parsed = renderer.parse_turn(turn_ids, prompt_ids, [])
    assert parsed is not None
    good, bad = parsed.tool_calls
    assert (good.name, good.arguments, good.parse_error) == ("add", {"a": 1}, None)
    assert bad.parse_error is not None
    assert (parsed.text, parsed.reasoning) == ("yes", "hm")
    deep = f'<tool_call>{{"name": "add", "arguments": {{"a": {"[" * 5000 + "]" * 5000}}}}}</tool_call>'
    too_deep = renderer.parse_turn(tokenizer.encode(f"{deep}<|im_end|>", add_special_tokens=False), prompt_ids, [])
    assert (too_deep.text, len(too_deep.tool_calls)) == (deep, 1)
    assert "too many levels" in (too_deep.tool_calls[0].parse_error or "")
    without_calls = renderer.parse_turn(tokenizer.encode("no", add_special_tokens=False), prompt_ids, [])
    assert list(without_calls.tool_calls) == []
    next_ids = renderer.render_next_turn([{"role": "user", "content": "v"}], turn_ids, prompt_ids)
    assert "<think>hm</think>yes" in tokenizer.decode([*prompt_ids, *turn_ids, *next_ids])


@pytest.mark.parametrize(
    ("tokenizer_argument", "expected"),
    [
        (
            "Qwen/Qwen3-8B",
            r"got the path or name 'Qwen/Qwen3-8B'; pass .*from_pretrained\('Qwen/Qwen3-8B'\)",
        ),
        (Path("/models/policy"), r"AutoTokenizer.from_pretrained\('/models/policy'\)"),
        (None, r"NoneType has no apply_chat_template\(\)"),
        (SimpleNamespace(tokenizer=None), "SimpleNamespace has no .*; pass its attribute `tokenizer`"),
    ],
)
def test_only_tokenizers_have_renderers(tokenizer_argument: Any, expected: str) -> None:
    for make in (get_renderer, ChatRenderer, lambda argument: FamilyRenderer(argument, "qwen3")):
        with pytest.raises(BadInputError, match=expected):
            make(tokenizer_argument)


def test_get_renderer_selects_the_family(tokenizer: Any) -> None:
    tokenizer.chat_template = QWEN
    assert type(get_renderer(tokenizer)) is ChatRenderer
    assert isinstance(get_renderer(tokenizer, "qwen3"), FamilyRenderer)
    tokenizer.name_or_path = "Qwen/Qwen3-8B"
    assert isinstance(get_renderer(tokenizer), FamilyRenderer)
    for name in ("kimi-k2", "no such family"):
        with pytest.raises(UnsupportedError, match=f"not of the family '{name}'"):
            get_renderer(tokenizer, name)
    tokenizer.name_or_path = ""


def test_a_folder_that_is_called_as_a_released_model_is_compared_with_its_family(
    tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The template is made of what the family renders, so that both are the same in the first case."""
    family = FamilyRenderer(tokenizer, "qwen3")
    tokenizer.chat_template = "{{ 'x' }}"
    prompts = {
        f"{len(messages)}{bool(tools)}": tokenizer.decode(family.render_prompt(messages, tools))
        for messages in PROBE_PROMPTS
        for tools in (None, [PROBE_TOOL])
    }
    cases = "".join(
        f"{{%- if (messages | length) ~ (tools is not none) == '{key}' %}}{{{{ {text!r} }}}}{{%- endif %}}"
        for key, text in prompts.items()
    )
    paths = ("/models/Qwen3-8B", "/cache/models--Qwen--Qwen3-8B/snapshots/0123abc")
    for path in paths:
        tokenizer.name_or_path, tokenizer.chat_template = path, cases
        assert isinstance(get_renderer(tokenizer), FamilyRenderer)
        tokenizer.chat_template = QWEN
        with caplog.at_level("INFO"):
            assert type(get_renderer(tokenizer)) is ChatRenderer
        assert "pass family='qwen3' if the family is right" in caplog.records[-1].getMessage()
    for path in ("/models/my-qwen", "/cache/models--me--Qwen3-8B/snapshots/1", "/m/Kimi-K2-Instruct", ""):
        tokenizer.name_or_path, tokenizer.chat_template = path, QWEN
        assert type(get_renderer(tokenizer)) is ChatRenderer


def test_arguments_of_templates(tokenizer: Any) -> None:
    """They count as inputs of the samples. A misspelled argument would change nothing."""
    template = (
        QWEN + "{%- if add_generation_prompt and not enable_thinking | default(true) %}<think></think>{% endif %}"
    )
    tokenizer.chat_template = template
    question = [{"role": "user", "content": "u"}]
    plain, short = ChatRenderer(tokenizer), get_renderer(tokenizer, enable_thinking=False)
    ids = plain.render_prompt(question)
    assert short.render_prompt(question) == [*ids, *plain.encode("<think></think>")]
    turn = plain.encode("x<|im_end|>")
    assert short.render_next_turn(question, turn)[-2:] == plain.encode("<think></think>")
    assert plain.identity != short.identity
    for name in ("enable_thinkin", "messages", "tools"):
        with pytest.raises(BadInputError, match=f"the chat template has no variable '{name}'"):
            get_renderer(tokenizer, **{name: None})
    family, silent = (FamilyRenderer(tokenizer, "qwen3", enable_thinking=value) for value in (True, False))
    assert silent.render_prompt(question) != family.render_prompt(question)
    assert silent.identity != family.identity
    with pytest.raises(BadInputError, match=r"'qwen3' has no template argument 'thinking'; it has .*enable_thinking"):
        get_renderer(tokenizer, "qwen3", thinking=False)
    with pytest.raises(BadInputError, match="refuses the template arguments"):
        get_renderer(tokenizer, "qwen3", enable_thinking="perhaps")


def test_a_family_refuses_what_it_cannot_render(tokenizer: Any) -> None:
    family = FamilyRenderer(tokenizer, "llama-3")
    with pytest.raises(BadInputError, match="cannot append messages"):
        family.render_next_turn([{"role": "assistant", "content": "mine"}], [1])
    with pytest.raises(BadInputError, match="no messages"):
        family.render_prompt([])


def test_a_template_that_ignores_tools_is_refused(tmp_path: Path) -> None:
    """Unless the messages describe the tools. The template of the tiny models shows them."""
    messages, tools = [{"role": "user", "content": "x"}], ToolRegistry([add]).schemas
    tokenizer = make_tokenizer(tmp_path)
    ChatRenderer(tokenizer).render_prompt(messages, tools)
    tokenizer.chat_template = CONTENT_ONLY_TEMPLATE
    renderer = ChatRenderer(tokenizer)
    renderer.render_prompt(messages)
    with pytest.raises(BadInputError, match=r"does not show the tools \['add'\].* describe the tools in the messages"):
        renderer.render_prompt(messages, tools)
    described = [{"role": "system", "content": "You can call add(a, b)."}, *messages]
    assert renderer.render_prompt(described, tools) == renderer.render_prompt(described)
