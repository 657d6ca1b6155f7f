"""Generation by real servers of both engines: the same requests get replies of the same form, with the same tokens."""

from __future__ import annotations

from typing import Any

import pydantic
import pytest
import torch
from both_engines import KINDS, RunningStream, SharedEngines, load_of, until_idle
from helpers import GREEDY, PROMPTS, adapter_of, greedy_with_logprobs, reference_model
from transformers import AutoTokenizer

from verl_server import GenerateReply, HttpServerEngineAdapter, VerlEngine
from verl_server.errors import BadInputError

pytestmark = pytest.mark.timeout(600)

END_TOKEN = 258
HOT = {"temperature": 1.0, "max_new_tokens": 16, "ignore_eos": True}
TOLERANCE = 1e-5


@pytest.fixture(params=KINDS)
def engine(request: pytest.FixtureRequest, shared_engines: SharedEngines) -> VerlEngine:
    return shared_engines.of(request.param)


@pytest.fixture
def adapter(engine: VerlEngine) -> HttpServerEngineAdapter:
    return adapter_of(engine)


@pytest.fixture(scope="module")
def model(shared_engines: SharedEngines) -> Any:
    return reference_model(shared_engines.model)


@pytest.fixture(scope="module")
def tokenizer(shared_engines: SharedEngines) -> Any:
    return AutoTokenizer.from_pretrained(shared_engines.model)


# -- prompts and replies -----------------------------------------------------------------------------


def test_a_prompt_of_token_ids(adapter: HttpServerEngineAdapter, engine: VerlEngine, model: Any) -> None:
    tokens, logprobs = greedy_with_logprobs(model, PROMPTS[0])
    reply = adapter.generate(input_ids=PROMPTS[0], sampling_params=GREEDY, return_logprob=True, rid="one")
    meta = reply["meta_info"]
    assert reply["output_ids"] == tokens
    assert [entry[1:] for entry in meta["output_token_logprobs"]] == [[token, None] for token in tokens]
    assert [entry[0] for entry in meta["output_token_logprobs"]] == pytest.approx(logprobs, abs=TOLERANCE)
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("one", len(PROMPTS[0]), len(tokens))
    assert meta["finish_reason"] == {"type": "length", "length": len(tokens)}
    version = engine.weight_version
    assert meta["weight_version"] == version
    assert meta["weight_versions"] == [{"version": version, "start": 0, "end": len(tokens)}]


def test_replies_have_the_documented_types(adapter: HttpServerEngineAdapter, engine: VerlEngine) -> None:
    """`GenerateReply` and its parts: every field that a reply of a server has of them."""
    documented = pydantic.TypeAdapter(GenerateReply)
    for sampling in ({"max_new_tokens": 3}, {"max_new_tokens": 3, "stop_token_ids": list(range(300))}):
        request: dict[str, Any] = {
            "input_ids": PROMPTS[0],
            "sampling_params": sampling,
            "return_logprob": True,
        }
        for reply in (adapter.generate(**request), engine.generate(**request)):
            documented.validate_python(reply, strict=True)
            assert reply["meta_info"]["weight_versions"][0]["start"] == 0
            assert reply["meta_info"]["finish_reason"]["type"] in ("length", "stop")


def test_a_prompt_of_text(adapter: HttpServerEngineAdapter, model: Any, tokenizer: Any) -> None:
    prompt_ids = tokenizer.encode("hello")
    bias = {str(token): 100.0 for token in tokenizer.encode("abcdefgh")}
    reply = adapter.generate("hello", {**GREEDY, "logit_bias": bias}, return_logprob=True)
    again = adapter.generate(input_ids=prompt_ids, sampling_params={**GREEDY, "logit_bias": bias})
    assert reply["output_ids"] == again["output_ids"]
    assert reply["text"] == tokenizer.decode(reply["output_ids"])
    assert reply["meta_info"]["prompt_tokens"] == len(prompt_ids)
    assert adapter.generate("hello", GREEDY)["output_ids"] == greedy_with_logprobs(model, prompt_ids)[0]


def test_lists_of_prompts(adapter: HttpServerEngineAdapter, model: Any, tokenizer: Any) -> None:
    """Replies are in the order of the prompts. Each prompt has its id and its parameters."""
    lengths = [3, 12, 7]
    params = [{**GREEDY, "max_new_tokens": length} for length in lengths]
    rids = ["first", "second", "third"]
    replies = adapter.generate(input_ids=PROMPTS, sampling_params=params, rid=rids, return_logprob=[True, False, True])
    for prompt, reply, length in zip(PROMPTS, replies, lengths, strict=True):
        assert reply["output_ids"] == greedy_with_logprobs(model, prompt, length)[0]
    assert [reply["meta_info"]["id"] for reply in replies] == rids
    assert ["output_token_logprobs" in reply["meta_info"] for reply in replies] == [True, False, True]
    texts = adapter.generate(["hello", "ab"], GREEDY, rid="base")
    assert [reply["meta_info"]["id"] for reply in texts] == ["base_0", "base_1"]
    for text, reply in zip(["hello", "ab"], texts, strict=True):
        assert reply["output_ids"] == greedy_with_logprobs(model, tokenizer.encode(text))[0]


def test_several_samples_of_a_prompt(adapter: HttpServerEngineAdapter) -> None:
    """`n` samples of a prompt are neighbours in the list of replies."""
    replies = adapter.generate(input_ids=PROMPTS[0], sampling_params={**HOT, "n": 3})
    assert len({tuple(reply["output_ids"]) for reply in replies}) == 3
    both = adapter.generate(input_ids=[[1, 2, 3], [4]], sampling_params={**HOT, "n": 2})
    assert [reply["meta_info"]["prompt_tokens"] for reply in both] == [3, 3, 1, 1]
    assert [len(reply["output_ids"]) for reply in both] == [16] * 4


def test_log_probabilities_of_the_most_probable_tokens(adapter: HttpServerEngineAdapter, model: Any) -> None:
    """Log probabilities are those of the distribution from which tokens are sampled, behind the temperature.

    Some of the sampled tokens are not among the most probable ones.
    """
    temperature, prompt = 1.5, PROMPTS[1]
    params = {"temperature": temperature, "max_new_tokens": 16, "ignore_eos": True}
    reply = adapter.generate(input_ids=prompt, sampling_params=params, return_logprob=True, top_logprobs_num=5)
    tokens, meta = reply["output_ids"], reply["meta_info"]
    with torch.no_grad():
        logits = model.double()(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    model.float()
    logprobs = torch.log_softmax(logits / temperature, -1)
    sampled = [entry[0] for entry in meta["output_token_logprobs"]]
    assert sampled == pytest.approx([float(row[token]) for row, token in zip(logprobs, tokens, strict=True)], abs=2e-5)
    assert not all(token in row.topk(5).indices for row, token in zip(logprobs, tokens, strict=True))
    for row, entries in zip(logprobs, meta["output_top_logprobs"], strict=True):
        best = row.topk(5)
        assert [entry[1] for entry in entries] == best.indices.tolist()
        assert [entry[0] for entry in entries] == pytest.approx(best.values.tolist(), abs=2e-5)


# -- the end of a generation -------------------------------------------------------------------------


def test_stop_tokens(adapter: HttpServerEngineAdapter, model: Any) -> None:
    tokens, _ = greedy_with_logprobs(model, PROMPTS[2])
    stop = next(token for index, token in enumerate(tokens) if index >= 4 and token not in tokens[:index])
    params = {"temperature": 0.0, "stop_token_ids": [stop, 319]}  # with `ignore_eos`, SGLang ignores them
    reply = adapter.generate(input_ids=PROMPTS[2], sampling_params=params)
    assert reply["output_ids"] == tokens[: tokens.index(stop) + 1]
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


@pytest.mark.parametrize("is_text", [True, False], ids=["text", "token ids"])
@pytest.mark.parametrize("stop", ["xxx", ["yy", "xxx"]], ids=["one", "two"])
def test_stop_strings(adapter: HttpServerEngineAdapter, tokenizer: Any, stop: Any, is_text: bool) -> None:
    (x,) = tokenizer.encode("x")
    params = {**GREEDY, "logit_bias": {str(x): 1000.0}, "stop": stop}
    prompt: Any = {"prompt": "a"} if is_text else {"input_ids": [5, 6]}
    reply = adapter.generate(**prompt, sampling_params=params)
    assert reply["output_ids"] == [x] * 3
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": "xxx"}
    if is_text:
        assert reply["text"] == "", "the text ends before the stop string"


def test_end_tokens_and_the_smallest_number_of_tokens(adapter: HttpServerEngineAdapter) -> None:
    params = {"temperature": 0.0, "max_new_tokens": 9, "logit_bias": {str(END_TOKEN): 1000.0}}

    def ask(**more: Any) -> tuple[list[int], Any]:
        reply = adapter.generate(input_ids=[1, 2, 3], sampling_params={**params, **more})
        return reply["output_ids"], reply["meta_info"]["finish_reason"]

    stopped = {"type": "stop", "matched": END_TOKEN}
    assert ask() == ([END_TOKEN], stopped)
    assert ask(ignore_eos=True) == ([END_TOKEN] * 9, {"type": "length", "length": 9})
    tokens, reason = ask(min_new_tokens=4)
    assert (len(tokens), tokens.index(END_TOKEN), reason) == (5, 4, stopped)


def test_the_default_number_of_tokens_is_128(adapter: HttpServerEngineAdapter) -> None:
    reply = adapter.generate(input_ids=[1, 2, 3], sampling_params={"ignore_eos": True})
    assert len(reply["output_ids"]) == 128
    assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 128}


def test_a_limit_of_no_tokens(adapter: HttpServerEngineAdapter) -> None:
    request: Any = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 0}, "return_logprob": True}
    for reply in (adapter.generate(**request), list(adapter.generate_stream(**request))[-1]):
        meta = reply["meta_info"]
        assert reply["output_ids"] == [] == (meta.get("output_token_logprobs") or [])
        assert (meta["completion_tokens"], meta["prompt_tokens"]) == (0, 3)
        assert meta["finish_reason"] == {"type": "length", "length": 0}


def test_seeds(adapter: HttpServerEngineAdapter) -> None:
    def sample(seed: int | None) -> list[int]:
        reply = adapter.generate(input_ids=[1, 2, 3], sampling_params={**HOT, "sampling_seed": seed})
        return list(reply["output_ids"])

    assert sample(7) == sample(7)
    assert sample(7) != sample(8)
    assert sample(None) != sample(None)


# -- streams -----------------------------------------------------------------------------------------


def test_each_event_of_a_stream_is_the_reply_so_far(adapter: HttpServerEngineAdapter) -> None:
    request: Any = {"input_ids": PROMPTS[0], "sampling_params": GREEDY, "return_logprob": True, "top_logprobs_num": 2}
    whole = adapter.generate(**request, rid="whole")
    events = list(adapter.generate_stream(**request, rid="streamed"))
    for event in events:
        meta, count = event["meta_info"], len(event["output_ids"])
        assert event["output_ids"] == whole["output_ids"][:count]
        assert (meta["id"], meta["completion_tokens"], meta["prompt_tokens"]) == ("streamed", count, len(PROMPTS[0]))
        assert [entry[1] for entry in meta["output_token_logprobs"]] == event["output_ids"]
        assert len(meta["output_top_logprobs"]) == count
        assert meta["weight_version"] == whole["meta_info"]["weight_version"]
    assert [len(event["output_ids"]) for event in events] == sorted({len(event["output_ids"]) for event in events})
    assert [event["meta_info"]["finish_reason"] for event in events[:-1]] == [None] * (len(events) - 1)
    for name in ("finish_reason", "weight_versions"):
        assert events[-1]["meta_info"][name] == whole["meta_info"][name]
    assert "cached_tokens" in events[-1]["meta_info"]


def test_the_text_of_a_stream(adapter: HttpServerEngineAdapter, tokenizer: Any) -> None:
    bias = {str(token): 100.0 for token in tokenizer.encode("abcdefgh")}
    events = list(adapter.generate_stream("hello", {**GREEDY, "logit_bias": bias}))
    assert [event["text"] for event in events] == [tokenizer.decode(event["output_ids"]) for event in events]


def test_a_stream_of_several_samples(adapter: HttpServerEngineAdapter) -> None:
    last: dict[int, Any] = {}
    for event in adapter.generate_stream(input_ids=[1, 2], sampling_params={**HOT, "n": 2}, return_logprob=True):
        last[event["index"]] = event
    assert sorted(last) == [0, 1]
    for event in last.values():
        assert len(event["output_ids"]) == len(event["meta_info"]["output_token_logprobs"]) == 16
        assert event["meta_info"]["weight_versions"][0]["end"] == 16


def test_closing_a_stream_ends_its_request(adapter: HttpServerEngineAdapter) -> None:
    until_idle(adapter)
    events: Any = adapter.generate_stream(input_ids=[1, 2], sampling_params={"max_new_tokens": 30_000})
    next(events)
    assert load_of(adapter) == (1, 0)
    events.close()
    until_idle(adapter)


# -- aborts and ids ----------------------------------------------------------------------------------


def test_aborts_by_the_beginning_of_the_id(adapter: HttpServerEngineAdapter, model: Any) -> None:
    until_idle(adapter)
    streams = {rid: RunningStream(adapter, input_ids=[1, 2, 3], rid=rid) for rid in ("group", "group-2", "other")}
    for stream in streams.values():
        stream.until_tokens(3)
    adapter.abort_request("nobody")
    adapter.abort_request("group")
    expected = greedy_with_logprobs(model, [1, 2, 3], 300)[0]
    for rid in ("group", "group-2"):
        reply = streams[rid].result()
        tokens, meta = reply["output_ids"], reply["meta_info"]
        assert meta["finish_reason"]["type"] == "abort"
        assert tokens[:300] == expected[: len(tokens)]
        assert len(meta["output_token_logprobs"]) == len(tokens) == meta["weight_versions"][-1]["end"]
    assert streams["other"].is_running
    adapter.abort_request(abort_all=True)
    assert streams["other"].result()["meta_info"]["finish_reason"]["type"] == "abort"
    until_idle(adapter)


def test_the_same_id_twice(adapter: HttpServerEngineAdapter) -> None:
    stream = RunningStream(adapter, input_ids=[1, 2, 3], rid="twice")
    stream.until_tokens(1)
    with pytest.raises(BadInputError, match="twice"):
        adapter.generate(input_ids=[4, 5], sampling_params=GREEDY, rid="twice")
    count = stream.num_tokens
    stream.until_tokens(count + 1)
    adapter.abort_request("twice")
    stream.result()
    assert adapter.generate(input_ids=[4, 5], sampling_params=GREEDY, rid="twice")["output_ids"], "the id is free again"
