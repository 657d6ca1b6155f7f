"""The gateway splits turns while they are generated: what is sent is the beginning of the finished turn."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
from helpers import QWEN, chat_tokenizer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from verl_server.gateway.conversation import AssistantTurn, TurnRequest
from verl_server.gateway.errors import GatewayError
from verl_server.gateway.sessions.session import unsplit_turn
from verl_server.gateway.turn_text.splitting import (
    TokenDecoder,
    TurnDeltas,
    TurnParts,
    TurnProgress,
    TurnSplitter,
    bytes_of_tokens,
    decode_turn,
    decodes_in_parts,
    split_turn,
)
from verl_server.trajectory import ChatRenderer, FamilyRenderer

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
STOPS = ("#", "END", "\n\n", "</think>", "ab", "aab", " ")
MARKS_IN_CALL = CALL.replace('"a": 1', '"a": "</think> and <tool_call>"')
PIECES = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<thi", "</thin", "<tool_c", CALL, "<|im_end|>",
    "<|endoftext|>", "<|im_start|>", " ", "\n", "\n\n", "\t", "a", "ab", "END", "E", "#", "Hello world. ", "é", "日本",
    "🙂", "\ufffd", '{"name": "add"}', "it 's . n't", MARKS_IN_CALL,
)  # fmt: skip


@pytest.fixture(scope="module")
def renderers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatRenderer]:
    tokenizer = chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    tokenizer.chat_template = QWEN
    made: dict[str, ChatRenderer] = {name: FamilyRenderer(tokenizer, name) for name in ("qwen3", "llama-3")}
    return {"generic": ChatRenderer(tokenizer), **made}


def token_ids_of(renderer: ChatRenderer, pieces: list[Any]) -> list[int]:
    """Token ids of texts, and of bytes that are no whole characters."""
    token_ids = list[int]()
    for piece in pieces:
        ids = renderer.encode(piece[0] if isinstance(piece, tuple) else piece)
        token_ids += ids[: piece[1]] if isinstance(piece, tuple) else ids
    return token_ids


def finished(
    renderer: ChatRenderer, token_ids: list[int], preceding: list[int], stop: str | None, is_raw: bool
) -> tuple[str, str]:
    """Thoughts and text of the finished turn, as `Session` gives them."""
    if is_raw:
        parts = unsplit_turn(renderer, token_ids, stop)
    else:
        parts = split_turn(renderer, token_ids, preceding, [], "t", stop_sequence=stop)
    return parts.reasoning, parts.text


HALF_CHARACTERS = st.tuples(st.sampled_from(["é", "日", "🙂"]), st.integers(1, 2))


@settings(max_examples=600)
@given(
    name=st.sampled_from(["generic", "qwen3", "llama-3"]),
    pieces=st.lists(st.sampled_from(PIECES) | HALF_CHARACTERS | st.text(max_size=4), max_size=14),
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=5),
    stops=st.lists(st.sampled_from(STOPS), max_size=3, unique=True),
    prompt=st.sampled_from(["<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n", "<think>"]),
    is_raw=st.booleans(),
)
@example("generic", ["a", "<thi", "</think>", "b"], [1], [], "<think>", False)
@example("generic", ["\n", CALL, "a"], [1], [], "", False)
@example("qwen3", ["x ", CALL], [2], [], "<think>", False)
@example("qwen3", [" ", "a", " ", "<think>", "\n"], [1], [" "], "", False)
@example("generic", ["a", "<|im_end|>", "b"], [1], [], "", False)
@example("generic", ["Why", MARKS_IN_CALL, "a"], [3], [], "<think>", False)
@example("generic", ["a", CALL, "b", MARKS_IN_CALL, "c"], [3], ["b"], "", False)
@example("generic", [" <think>a b</think>c"], [1], [" "], "", False)
@example("generic", ["<think>aab"], [1], ["ab"], "", False)
@example("generic", ["a", CALL, "<think>", "b", "</think>", CALL], [3], [], "<think>", False)
@example("generic", ["a", CALL, "</think>", "b"], [3], [], "", False)
def test_deltas_are_the_beginning_of_the_turn(
    renderers: dict[str, ChatRenderer],
    name: str,
    pieces: list[Any],
    sizes: list[int],
    stops: list[str],
    prompt: str,
    is_raw: bool,
) -> None:
    renderer = renderers[name]
    preceding, token_ids = renderer.encode(prompt), token_ids_of(renderer, pieces)
    splitter = TurnSplitter(renderer, preceding, stops, is_raw=is_raw)
    reasoning, text, start = "", "", 0
    while start < len(token_ids):
        new = splitter.add(token_ids[start : start + sizes[start % len(sizes)]])
        start += sizes[start % len(sizes)]
        reasoning, text = reasoning + new[0], text + new[1]
    for stop in (None, *stops):
        whole = finished(renderer, token_ids, preceding, stop, is_raw)
        assert whole[0].startswith(reasoning), (reasoning, whole)
        assert whole[1].startswith(text), (text, whole)
    if name == "llama-3" and not is_raw:
        assert (reasoning, text) == ("", ""), "this family is not split by its text"


@pytest.mark.parametrize("name", ["generic", "qwen3"])
@pytest.mark.parametrize(
    ("prompt", "turn", "reasoning", "text", "num_calls"),
    [
        ("<think>\n", f"Why{MARKS_IN_CALL}", "Why", "", 1),
        ("<think>\n", f"Why{MARKS_IN_CALL}not</think>So", f"Why{MARKS_IN_CALL}not", "So", 0),
        ("", f"<think>Why</think>\n{MARKS_IN_CALL}", "Why", "", 1),
        ("", f"<think>Why{MARKS_IN_CALL}not</think>So{CALL}", f"Why{MARKS_IN_CALL}not", "So", 1),
        ("", f"First\n{CALL}\nand then\n{MARKS_IN_CALL}\nlast", "", "First\nand then\nlast", 2),
        ("<think>\n", f"Why\n{CALL}\nand then\n{CALL}", "Why", "and then", 2),
        ("<think>\n", f"Not {CALL}. <think> No.</think>\n\n{CALL}", f"Not {CALL}. <think> No.", "", 1),
        ("<think>\n", f"Not {CALL}. <think> No.</think>\n\nSo", f"Not {CALL}. <think> No.", "So", 0),
        ("<think>\n", f"Why</think>{CALL}</think>So", "Why", "</think>So", 1),
        ("", f"{CALL}\n</think>\n\nSo", "", "</think>\n\nSo", 1),
        ("", f"First{CALL}</think>{CALL}", "", "First\n</think>", 2),
    ],
)
def test_marks_in_the_arguments_of_calls_and_text_between_calls(
    renderers: dict[str, ChatRenderer], name: str, prompt: str, turn: str, reasoning: str, text: str, num_calls: int
) -> None:
    renderer = renderers[name]
    parts = split_turn(renderer, renderer.encode(turn), renderer.encode(prompt), [], "t")
    assert (parts.reasoning, parts.text, len(parts.tool_calls)) == (reasoning, text, num_calls)


@pytest.mark.parametrize("second", [CALL, "<tool_call>\nno JSON\n</tool_call>"])
def test_a_call_whose_marks_are_ordinary_tokens_does_not_vanish(
    renderers: dict[str, ChatRenderer], second: str
) -> None:
    """The package of a family finds the calls with the tokens of the marks only."""
    found = list[TurnParts]()
    for renderer in (renderers["generic"], renderers["qwen3"]):
        spelled = [token for letter in second for token in renderer.encode(letter)]
        found.append(split_turn(renderer, renderer.encode(f"{CALL}\n") + spelled, [], [], "t"))
    assert found[0] == found[1]
    names = [call.name for call in found[0].tool_calls]
    assert (names, found[0].text) == ((["add", "add"], "") if second == CALL else ([], f"{CALL}\n{second}"))


@pytest.mark.parametrize("value", ["[" * 5000 + "]" * 5000, '"\\ud800"', "1e999", "9" * 400])
@pytest.mark.parametrize("name", ["generic", "qwen3"])
def test_a_call_that_json_cannot_give_back_stays_in_the_text(
    renderers: dict[str, ChatRenderer], name: str, value: str
) -> None:
    renderer, turn = renderers[name], CALL.replace('"a": 1', f'"a": {value}')
    parts = split_turn(renderer, renderer.encode(f"{turn}<|im_end|>"), [], [], "t")
    assert (parts.text, list(parts.tool_calls)) == (turn, [])


@pytest.mark.parametrize(("prompt", "before"), [("", "<think>\nWhy</think>\n\n"), ("<think>\n", "Why</think>")])
def test_calls_of_a_family_without_json(renderers: dict[str, ChatRenderer], prompt: str, before: str) -> None:
    renderer = FamilyRenderer(renderers["generic"].tokenizer, "prime-qwen3")
    call = "<tool_call>\n<function=add>\n<parameter=a>\nx</think>y\n</parameter>\n</function>\n</tool_call>"
    turn = renderer.encode(f"{before}First\n{call}\nand then\n{call}\nlast")
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "add", "parameters": schema}}
    parts = split_turn(renderer, turn, renderer.encode(prompt), [tool], "t")
    assert (parts.reasoning, parts.text) == ("Why", "First\nand then\nlast")
    assert [found.arguments for found in parts.tool_calls] == ['{"a":"x</think>y"}'] * 2


@pytest.mark.parametrize("name", ["generic", "qwen3", "llama-3"])
def test_a_stop_sequence_in_a_thought_ends_the_thought(renderers: dict[str, ChatRenderer], name: str) -> None:
    """The engine has ended the turn there. The last token may have more characters than the stop sequence."""
    renderer = renderers[name]
    thought, call = renderer.encode("<think>Why not END##"), renderer.encode(f"{CALL} END")
    parts = split_turn(renderer, thought, [], [], "t", stop_sequence="END")
    found = parts.text if name == "llama-3" else parts.reasoning
    assert found.removeprefix("<think>").strip() == "Why not"
    splitter = TurnSplitter(renderer, [], ["END"])
    assert "".join(splitter.add([token])[0] for token in thought) == ("" if name == "llama-3" else "Why not")
    if name != "llama-3":
        assert split_turn(renderer, call, [], [], "t", stop_sequence="END").text == "", "the text after a call, too"


@pytest.mark.parametrize("name", ["generic", "qwen3"])
def test_text_is_sent_with_its_token(renderers: dict[str, ChatRenderer], name: str) -> None:
    """Nothing is held back longer than needed: white space, the beginning of a mark, a half character."""
    renderer = renderers[name]
    splitter, sent = TurnSplitter(renderer, [], ["END"]), list[tuple[str, str]]()
    for piece in (
        "<think>",
        "\nWhy",
        " not",
        "?\n",
        "</think>",
        "\n\n",
        "So ",
        "a <",
        "b",
        "🙂",
        " E",
        "N",
        "x",
        CALL,
        "y",
    ):
        found = [splitter.add([token]) for token in renderer.encode(piece)]
        sent.append(("".join(item[0] for item in found), "".join(item[1] for item in found)))
    thoughts = [("", ""), ("Why", ""), (" not", ""), ("?", ""), ("", ""), ("", "")]
    texts = ["So", " a", " <b", "🙂", "", "", " ENx", "", ""]
    assert sent == [*thoughts, *(("", text) for text in texts)]


def test_the_work_for_a_token_does_not_grow(renderers: dict[str, ChatRenderer]) -> None:
    """Also for turns of white space, half characters, beginnings of marks and tool calls only."""
    renderer = renderers["generic"]
    half = renderer.encode("日")[:1]
    for token_ids in (renderer.encode("a "), renderer.encode("\n"), half, renderer.encode("<"), renderer.encode(CALL)):
        times = list[float]()
        for count in (2_000, 20_000):
            turn = (token_ids * count)[:count]
            splitter, begun = TurnSplitter(renderer, [], ["<<<END"]), time.process_time()
            for token in turn:
                splitter.add([token])
            times.append(time.process_time() - begun)
        assert times[1] < 40 * times[0] + 0.1, f"ten times the tokens took {times[1] / times[0]:.0f} times as long"


def test_a_tokenizer_that_removes_spaces_sends_no_deltas(renderers: dict[str, ChatRenderer]) -> None:
    class Cleaning:
        """The tokenizer, which writes texts as those of word pieces do."""

        def __init__(self, tokenizer: Any) -> None:
            self._tokenizer = tokenizer

        def decode(self, token_ids: list[int], **options: Any) -> str:
            return str(self._tokenizer.decode(token_ids, **options)).replace(" .", ".")

        def __getattr__(self, name: str) -> Any:
            return getattr(self._tokenizer, name)

    renderer = ChatRenderer(Cleaning(renderers["generic"].tokenizer))
    assert decodes_in_parts(renderers["generic"])
    assert not decodes_in_parts(renderer)
    assert TurnSplitter(renderer, [], []).add(renderer.encode("Hello world")) == ("", "")


def spaced_renderer() -> ChatRenderer:
    """As Llama 2's: the first token of a text is written without its space, and the other characters are bytes."""
    special, letters = ["<unk>", "<|im_start|>", "<|im_end|>"], [*map(chr, range(33, 127)), "\u2581"]
    names = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *letters, "\u2581a", "\u2581."]
    model = models.BPE(
        {name: number for number, name in enumerate(names)},
        [("\u2581", "a"), ("\u2581", ".")],
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in special])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<|im_end|>")
    wrapped.chat_template = QWEN
    return ChatRenderer(wrapped)


def test_a_tokenizer_that_strips_the_first_space() -> None:
    renderer = spaced_renderer()
    turn = renderer.tokenizer.convert_tokens_to_ids(
        ["\u2581a", "\u2581a", "\u2581", "b", "<0xE2>", "<0x82>", "<0xAC>", "\u2581a", "\u2581.", "b"]
    )
    decoder = TokenDecoder(renderer)
    assert [decoder.add([token]) for token in turn] == ["a", " a", "", " b", "", "", "", "€ a", " .", "b"]
    assert renderer.decode(turn) == "a a b€ a .b"


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_run_of_bytes_is_sent_when_another_token_follows(size: int) -> None:
    """A byte that makes no character changes the text of all bytes before it."""
    renderer = spaced_renderer()
    names = [
        "\u2581a",
        "<0xE4>",
        "<0xBD>",
        "<0xA0>",
        "<0xE5>",
        "<0x41>",
        "b",
        "<0xE4>",
        "<0xBD>",
        "<0xA0>",
        "<|im_end|>",
    ]
    turn = renderer.tokenizer.convert_tokens_to_ids(names)
    assert split_turn(renderer, turn, [], [], "t").text == "a\ufffd\ufffd\ufffd\ufffd\ufffdb你"
    splitter = TurnSplitter(renderer, [], [])
    sent = [splitter.add(turn[start : start + size])[1] for start in range(0, len(turn), size)]
    assert "a\ufffd\ufffd\ufffd\ufffd\ufffdb你".startswith("".join(sent))
    assert size > 1 or sent == ["a", "", "", "", "", "", "\ufffd" * 5 + "b", "", "", "", ""]


def test_the_bytes_of_tokens_are_those_of_their_text(renderers: dict[str, ChatRenderer]) -> None:
    """Each byte is a token of this tokenizer, also a byte that is a part of a character."""
    renderer = renderers["generic"]
    for end in ("", "<|im_end|>"):
        text = "".join(map(chr, range(0x180))) + "日本🙂 <|im_end|>a<tool_call>b<|im_start|> c"
        turn = renderer.encode(text + end)
        tokens = bytes_of_tokens(renderer, turn)
        assert b"".join(tokens).decode() == decode_turn(renderer, turn) == text
        assert b"\x99" in tokens
        assert b"<tool_call>" in tokens
        assert b"".join(bytes_of_tokens(renderer, turn, 20)) == b"".join(tokens[20:])


@pytest.mark.parametrize("text", ["a b a .a", " a", "  a", "é a", "你 b", "<|im_end|> a <|im_start|> a", "a\n<0x41>"])
def test_the_bytes_of_tokens_have_their_spaces(text: str) -> None:
    """Also of a tokenizer that writes the first token of a text without its space."""
    renderer = spaced_renderer()
    turn = renderer.encode(text)
    for turn_ids in (turn, [*turn, *renderer.encode("<|im_end|>")]):
        assert b"".join(bytes_of_tokens(renderer, turn_ids)).decode() == decode_turn(renderer, turn_ids)


def test_the_bytes_of_tokens_do_not_depend_on_earlier_turns(renderers: dict[str, ChatRenderer]) -> None:
    """Each token is decoded once after other tokens. The first token of a turn may have other bytes."""
    for tokenizer in (spaced_renderer().tokenizer, renderers["generic"].tokenizer):
        renderer, token_ids = ChatRenderer(tokenizer), list(range(len(tokenizer)))
        for turn in (token_ids, token_ids[::-1], [*token_ids, *token_ids]):
            new = bytes_of_tokens(ChatRenderer(tokenizer), turn)
            assert new[1:-1] == [b"".join(bytes_of_tokens(renderer, [0, token, 0], 1)[:1]) for token in turn[1:-1]]
            for start in (0, 1, 5):
                assert bytes_of_tokens(renderer, turn, start) == new[start:]


def test_a_token_of_a_long_turn_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer, num_decoded = spaced_renderer(), [0]
    decode = renderer.decode_all

    def count(token_ids: Sequence[int]) -> str:
        num_decoded[0] += 1
        return decode(token_ids)

    monkeypatch.setattr(renderer, "decode_all", count)
    turn = renderer.encode("a b a .a") * 1000
    assert len(bytes_of_tokens(renderer, turn)) == len(turn)
    assert 0 < num_decoded[0] < 100
    num_decoded[0] = 0
    bytes_of_tokens(renderer, turn)
    assert num_decoded[0] < 10, "only the first token is decoded again"


# -- the tokens of a turn for several streams --------------------------------------------------------


def turn_of(renderer: ChatRenderer, token_ids: list[int]) -> AssistantTurn:
    parts = split_turn(renderer, token_ids, [], [], "t")
    logprobs = [-0.5] * len(token_ids)
    tokens = bytes_of_tokens(renderer, token_ids)
    values = ("s-1", 1, parts.text, parts.reasoning, (), "stop", None, 3, 0, token_ids, logprobs, tokens)
    return AssistantTurn(*values)  # type: ignore[arg-type]


def test_each_stream_gets_each_token_once(renderers: dict[str, ChatRenderer]) -> None:
    """Also a stream that begins later, and when an engine reports tokens again."""
    renderer = renderers["generic"]
    progress = TurnProgress(renderer, [], TurnRequest("m", (), logprobs=True), {"stop": "END"})
    token_ids = renderer.encode("<think>Why</think>So it is")
    early = TurnDeltas(progress)
    deltas = [early.take()]
    for start in range(0, len(token_ids), 2):
        progress.add(max(0, start - 3), token_ids[max(0, start - 3) : start + 2], [-0.5] * min(5, start + 2))
        deltas.append(early.take())
    late = TurnDeltas(progress)
    turn = turn_of(renderer, token_ids)
    for found in ([*deltas, early.take_rest(turn)], [late.take(), late.take_rest(turn)]):
        sent = [delta for delta in found if delta is not None]
        assert "".join(delta.text for delta in sent) == "So it is"
        assert "".join(delta.reasoning for delta in sent) == "Why"
        assert [token for delta in sent for token in delta.token_ids] == token_ids
        assert [text for delta in sent for text in delta.tokens] == list(turn.tokens)
        assert sum(len(delta.logprobs) for delta in sent) == len(token_ids)


def test_a_turn_that_was_generated_again_never_mixes_with_its_deltas(renderers: dict[str, ChatRenderer]) -> None:
    renderer = renderers["generic"]
    progress = TurnProgress(renderer, [], TurnRequest("m", ()), {})
    first, second = renderer.encode("One way"), renderer.encode("One road")
    before, silent = TurnDeltas(progress), TurnDeltas(progress)
    progress.add(0, first, [-1.0] * len(first))
    assert before.take() is not None
    progress.add(0, second, [-1.0] * len(second))
    assert before.take() is None
    with pytest.raises(GatewayError, match="send the request again"):
        before.take_rest(turn_of(renderer, second))
    after = TurnDeltas(progress)
    delta = after.take()
    assert delta is not None
    assert (delta.text, after.take_rest(turn_of(renderer, second)).text) == ("One road", "")
    assert silent.take() is None, "this stream has sent nothing yet"
    assert silent.take_rest(turn_of(renderer, second)).text == "One road"
