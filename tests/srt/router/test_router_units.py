"""Pure parts of the router: choice of a replica, generations over several attempts, stored results, status messages."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import random
import signal
import subprocess
import sys
import time
import tracemalloc
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import orjson
import pytest
import requests
from helpers import free_port, wait_until
from hypothesis import example, given
from hypothesis import strategies as st

from verl_server.adapter.client import AsyncHttpServerEngineAdapter
from verl_server.adapter.sglang.replies import DEFAULT_MAX_NEW_TOKENS, IncrementalStream, prompt_limits
from verl_server.adapter.sglang.requests import generate_payload
from verl_server.config import RouterConfig
from verl_server.errors import BadInputError, NotReadyError, ServerBusyError, ServerDiedError, to_wire
from verl_server.router.dispatcher import ResultCache, estimate_bytes
from verl_server.router.placement import (
    LoadIndex,
    RequestQueues,
    RoutingRequest,
    VersionRequirement,
    require_queue_capacity,
    session_moves,
)
from verl_server.router.process.router_main import encode_status
from verl_server.router.process.supervisor import RouterSupervisor
from verl_server.router.replica import ErrorHistory, RoutedReplica, Slot, Trust
from verl_server.router.replica_status import ReplicaStats, ReplicaStatus, StatusQueue, merge_stats
from verl_server.router.resumable_generation import ResumableGeneration, join_version_spans

CONFIG = RouterConfig(max_running_requests_per_dp_rank=4, overload_factor=1.5)


def event(tokens: list[int], version: int, finish: Any = None, **meta: Any) -> dict[str, Any]:
    """A stream event as SGLang sends it: the whole output so far."""
    return {
        "output_ids": tokens,
        "meta_info": {
            "weight_version": version,
            **({"weight_versions": [{"version": version, "start": 0, "end": len(tokens)}]} if finish else {}),
            "completion_tokens": len(tokens),
            "finish_reason": finish,
            "output_token_logprobs": [[-float(token), token, None] for token in tokens],
            **meta,
        },
    }


STOP = {"type": "stop", "matched": 2}


@given(st.lists(st.integers(0, 99), min_size=1, max_size=40), st.lists(st.integers(1, 10), max_size=6))
def test_interrupted_generation_equals_uninterrupted_generation(tokens: list[int], cuts: list[int]) -> None:
    """Any number of lost attempts: same tokens, log probabilities and lengths; each token has its version."""
    generation = ResumableGeneration(
        {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 40, "min_new_tokens": 5}}
    )
    received = 0
    for version, cut in enumerate(cuts):
        body = generation.begin_attempt()
        assert body["input_ids"] == [1, 2, 3, *tokens[:received]]
        assert body["sampling_params"]["max_new_tokens"] == 40 - received
        assert body["sampling_params"]["min_new_tokens"] == max(0, 5 - received)
        stop = min(received + cut, len(tokens) - 1)
        for end in range(received + 1, stop + 1):
            generation.record_event(event(tokens[received:end], version, prompt_tokens=3 + received))
        generation.end_attempt()
        received = stop
    generation.begin_attempt()
    generation.record_event(event(tokens[received:], 100, STOP, prompt_tokens=3 + received))
    reply = generation.reply()
    meta = reply["meta_info"]
    assert reply["output_ids"] == tokens
    assert [entry[1] for entry in meta["output_token_logprobs"]] == tokens
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (3, len(tokens))
    assert meta["finish_reason"] == STOP
    assert meta["attempts"] == len(cuts) + 1
    covered = [position for span in meta["weight_versions"] for position in range(span["start"], span["end"])]
    assert covered == list(range(len(tokens)))


def test_tokens_with_uncertain_weight_version_are_generated_again() -> None:
    """The weights changed during the attempt and its server was lost: the version between two events is unknown."""
    generation = ResumableGeneration({"input_ids": [1], "sampling_params": {"max_new_tokens": 9}})
    generation.begin_attempt()
    for count, version in ((1, 4), (3, 4), (6, 5), (7, 5)):
        generation.record_event(event(list(range(count)), version))
    generation.end_attempt()
    assert generation.begin_attempt()["input_ids"] == [1, 0, 1, 2]
    generation.record_event(event([3, 4], 5, STOP))
    reply = generation.reply()
    assert reply["output_ids"] == [0, 1, 2, 3, 4]
    assert len(reply["meta_info"]["output_token_logprobs"]) == 5
    assert reply["meta_info"]["weight_versions"] == [
        {"version": 4, "start": 0, "end": 3},
        {"version": 5, "start": 3, "end": 5},
    ]


def test_generation_with_all_tokens_is_complete() -> None:
    generation = ResumableGeneration({"input_ids": [1], "sampling_params": {"max_new_tokens": 3}})
    generation.begin_attempt()
    generation.record_event(event([5, 6, 7], 1))
    generation.end_attempt()
    assert generation.is_complete
    assert generation.reply()["meta_info"]["finish_reason"] == {"type": "length", "length": 3}


@pytest.mark.parametrize("finish", [None, {"type": "abort"}])
def test_generation_without_a_limit_ends_only_when_the_server_says_so(finish: Any) -> None:
    """`max_new_tokens` of None is SGLang's "until the end of the context". A missing one is 128."""
    generation = ResumableGeneration({"input_ids": [1], "sampling_params": {"max_new_tokens": None}})
    generation.begin_attempt()
    generation.record_event(event(list(range(200)), 1, finish))
    generation.end_attempt()
    assert not generation.is_complete
    body = generation.begin_attempt()
    assert (len(body["input_ids"]), body["sampling_params"]["max_new_tokens"]) == (201, None)
    assert generation.remaining_tokens > 0
    generation.record_event(event([5], 1, STOP))
    assert (generation.is_finished, len(generation.reply()["output_ids"])) == (True, 201)


def interrupted_generation(first: dict[str, Any], second: dict[str, Any], **request: Any) -> ResumableGeneration:
    """A generation whose first attempt was lost after the event `first`, and whose second attempt ended."""
    generation = ResumableGeneration({"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 5}, **request})
    for number, one in enumerate((first, second)):
        generation.begin_attempt()
        generation.record_event(one)
        if number == 0:
            generation.end_attempt()
    return generation


def test_an_aborted_generation_returns_tokens_that_only_its_caller_can_continue() -> None:
    """With images or stop strings, the router itself could not continue it."""
    for extra in ({"image_data": ["x"]}, {"sampling_params": {"max_new_tokens": 9, "stop": "."}}):
        generation = ResumableGeneration({"input_ids": [1], "sampling_params": {"max_new_tokens": 9}, **extra})
        generation.begin_attempt()
        generation.record_event(event([5, 6], 3))
        assert not generation.has_ended
        generation.end_attempt(keep=True)
        assert generation.reply()["output_ids"] == [5, 6]
    generation.begin_attempt()
    generation.record_event(event([7], 3, {"type": "stop"}))
    assert generation.has_ended


def test_log_probabilities_of_the_prompt_are_those_of_the_first_attempt() -> None:
    """The continuation requests none, and SGLang answers with empty lists."""
    prompt = {
        "input_token_logprobs": [[None, 1, None], [-0.5, 2, None]],
        "input_top_logprobs": [None, [[-0.5, 2, None]]],
        "input_token_ids_logprobs": [None, [[-0.5, 2, None]]],
    }
    nothing: dict[str, Any] = {name: [] for name in prompt}
    generation = interrupted_generation(
        event([7, 8], 1, **prompt), event([9], 1, STOP, **nothing), return_logprob=True, logprob_start_len=0
    )
    meta = generation.reply()["meta_info"]
    assert {name: meta[name] for name in prompt} == prompt


def test_lengths_of_a_continued_reply_count_all_tokens() -> None:
    generation = interrupted_generation(
        event([7, 8], 1, output_token_logprobs_length=2),
        event([9, 10, 11], 1, {"type": "length", "length": 3}, output_token_logprobs_length=3),
    )
    meta = generation.reply()["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 5}
    assert meta["output_token_logprobs_length"] == len(meta["output_token_logprobs"]) == 5


def test_logprobs_length_of_a_reply_that_was_lost_at_its_last_tokens() -> None:
    """The weights changed before the last two tokens, so these two are generated again."""
    generation = ResumableGeneration({"input_ids": [1], "sampling_params": {"max_new_tokens": 4}})
    generation.begin_attempt()
    generation.record_event(event([5, 6], 1, output_token_logprobs_length=2))
    generation.record_event(event([5, 6, 7, 8], 2, output_token_logprobs_length=4))
    generation.end_attempt()
    assert generation.reply()["meta_info"]["output_token_logprobs_length"] == 2


def test_only_the_reply_of_a_single_attempt_has_a_text() -> None:
    """A cut inside a character leaves bytes that no part of the text has. The router has no tokenizer."""
    whole = ResumableGeneration({"input_ids": [1], "sampling_params": {"max_new_tokens": 5}})
    whole.begin_attempt()
    whole.record_event({**event([7], 1, STOP), "text": "a"})
    assert whole.reply()["text"] == "a"
    parts = interrupted_generation({**event([7], 1), "text": "a"}, {**event([8], 1, STOP), "text": "b"})
    assert "text" not in parts.reply()
    complete = ResumableGeneration({"input_ids": [1], "sampling_params": {"max_new_tokens": 1}})
    complete.begin_attempt()
    complete.record_event({**event([7], 1), "text": ""})
    complete.end_attempt()
    assert complete.is_complete
    assert "text" not in complete.reply()


@pytest.mark.parametrize(
    "params", [{"regex": "a+"}, {"json_schema": "{}"}, {"stop": ["x"]}, {"frequency_penalty": 0.5}]
)
def test_generation_that_cannot_continue_starts_again(params: dict[str, Any]) -> None:
    generation = ResumableGeneration({"input_ids": [1], "sampling_params": params})
    generation.begin_attempt()
    generation.record_event(event([5, 6], 1))
    generation.end_attempt()
    assert generation.begin_attempt()["input_ids"] == [1]
    assert generation.tokens == []


def test_default_of_max_new_tokens_is_that_of_sglang() -> None:
    from sglang.srt.sampling.sampling_params import SamplingParams

    assert SamplingParams().max_new_tokens == DEFAULT_MAX_NEW_TOKENS


def test_aborted_generation_continues() -> None:
    generation = ResumableGeneration({"input_ids": [1], "sampling_params": {"max_new_tokens": 9}})
    generation.begin_attempt()
    generation.record_event(event([5, 6], 1, {"type": "abort"}))
    assert generation.is_aborted
    generation.end_attempt()
    assert generation.begin_attempt()["input_ids"] == [1, 5, 6]


def test_neighbouring_spans_of_one_version_are_joined() -> None:
    parts = [event([1, 2], 3), event([3], 3), event([4], 4), event([], 5)]
    assert join_version_spans(parts) == [{"version": 3, "start": 0, "end": 3}, {"version": 4, "start": 3, "end": 4}]


def test_weight_versions_of_spans_are_whole_numbers() -> None:
    """Also when a reply still has the labels of SGLang; "default" is the checkpoint's version 0."""
    parts = [event([1], 0), event([2], 7)]
    parts[0]["meta_info"]["weight_version"], parts[1]["meta_info"]["weight_version"] = "default", "7"
    assert join_version_spans(parts) == [{"version": 0, "start": 0, "end": 1}, {"version": 7, "start": 1, "end": 2}]


def test_generation_has_one_prompt_and_one_sample() -> None:
    with pytest.raises(BadInputError, match="one prompt"):
        ResumableGeneration({"input_ids": [[1], [2]]})
    with pytest.raises(BadInputError, match="n=1"):
        ResumableGeneration({"input_ids": [1], "sampling_params": {"n": 2}})
    with pytest.raises(BadInputError, match="sampling_params must be one dict"):
        ResumableGeneration({"input_ids": [1], "sampling_params": [{}]})


def test_generation_refuses_wrong_types_before_it_waits_for_a_replica() -> None:
    with pytest.raises(BadInputError, match=r"ndarray.*\.tolist\(\)"):
        ResumableGeneration({"input_ids": np.array([1, 2])})
    with pytest.raises(BadInputError, match=r"\['max_new_tokens'\] must be"):
        ResumableGeneration({"input_ids": [1], "sampling_params": {"max_new_tokens": "ten"}})


def finished_generation(output_tokens: int) -> ResumableGeneration:
    generation = ResumableGeneration({"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": output_tokens}})
    generation.begin_attempt()
    generation.record_event(event(list(range(output_tokens)), 1, STOP))
    return generation


def test_result_cache_is_bounded_by_bytes() -> None:
    """The oldest results are removed first. A result that is larger than the cache is not stored."""
    generation = finished_generation(100)
    size_bytes = estimate_bytes(generation.request, generation.reply())
    cache = ResultCache(3 * size_bytes)
    for number in range(5):
        cache.add(f"r{number}", finished_generation(100))
        assert cache.size_bytes <= cache.max_bytes
    assert len(cache) == 3
    assert cache.size_bytes == 3 * size_bytes
    assert [cache.get(f"r{number}") is not None for number in range(5)] == [False, False, True, True, True]
    cache.add("large", finished_generation(1000))
    assert cache.get("large") is None
    assert len(cache) == 3
    for number in range(5):
        cache.remove(f"r{number}")
    assert (len(cache), cache.size_bytes) == (0, 0)


def test_finished_results_do_not_replace_aborted_generations(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller has received the tokens of an aborted generation: they must not be sampled again."""

    def aborted_generation() -> ResumableGeneration:
        generation = ResumableGeneration({"input_ids": [1], "sampling_params": {"max_new_tokens": 200}})
        generation.begin_attempt()
        generation.record_event(event(list(range(100)), 1, {"type": "abort"}))
        return generation

    size_bytes = estimate_bytes(aborted_generation().request, aborted_generation().reply())
    cache = ResultCache(size_bytes)
    for number in range(5):
        cache.add(f"aborted {number}", aborted_generation())
        cache.add(f"finished {number}", finished_generation(50))
    assert all(cache.get(f"aborted {number}") for number in range(5))
    assert len(cache) == 1
    cache.add("aborted 0", finished_generation(50))
    assert cache.get("aborted 0").is_finished  # type: ignore[union-attr]
    monkeypatch.setattr("verl_server.router.dispatcher.MAX_UNFINISHED_BYTES", 2 * size_bytes)
    cache = ResultCache(size_bytes)
    for number in range(3):
        cache.add(f"aborted {number}", aborted_generation())
    assert [cache.get(f"aborted {number}") is not None for number in range(3)] == [False, True, True]


def test_estimated_result_size_is_close_to_the_measured_size() -> None:
    """Within a factor of 1.5 for token ids and log probabilities, which make up most of a result."""
    tokens = list(range(1000, 3000))
    reply = event(tokens, 1, STOP)
    reply["meta_info"]["output_token_logprobs"] = [[-float(token), token + 10**6, None] for token in tokens]
    entries = reply["meta_info"]["output_token_logprobs"]
    measured = sys.getsizeof(tokens) + sum(map(sys.getsizeof, tokens)) + sys.getsizeof(entries)
    measured += sum(sys.getsizeof(entry) + sys.getsizeof(entry[0]) + sys.getsizeof(entry[1]) for entry in entries)
    estimated = estimate_bytes({"input_ids": []}, reply)
    assert measured / 1.5 < estimated < measured * 1.5


@pytest.mark.parametrize("place", ["request", "meta_info"])
@pytest.mark.parametrize(
    ("make", "measured"),
    [
        pytest.param(lambda: [[float(number) for number in range(10_000)]] * 10, 10 * 10_000 * 32, id="hidden states"),
        pytest.param(lambda: [{"url": "x" * 1_000_000}], 1_000_000, id="image"),
    ],
)
def test_lists_of_numbers_and_dicts_have_a_size(place: str, make: Callable[[], Any], measured: int) -> None:
    request: dict[str, Any] = {"input_ids": [1]}
    reply = event([1], 1, STOP)
    without = estimate_bytes(request, reply)
    (request if place == "request" else reply["meta_info"])["hidden_states"] = make()
    assert measured <= estimate_bytes(request, reply) - without < 1.1 * measured


@pytest.mark.parametrize("field", [item.name for item in dataclasses.fields(RouterConfig)])
def test_router_settings_are_positive_numbers(field: str) -> None:
    may_be_zero = field in ("max_queued_requests", "result_cache_bytes", "max_sessions", "orphan_timeout_s")
    if may_be_zero:
        assert getattr(RouterConfig(**{field: 0}), field) == 0
    low, of_another_type = "greater than", "a valid (integer|number)"
    for bad, rule in ((-1, low), ("2", of_another_type), (True, of_another_type), *([] if may_be_zero else [(0, low)])):
        with pytest.raises(BadInputError, match=f"RouterConfig.{field} must be {rule}.*, got {bad!r}"):
            RouterConfig(**{field: bad})  # type: ignore[arg-type]


def make_replica(name: str, tokens: int = 0, running: int = 0, version: int = 0, **state: Any) -> RoutedReplica:
    replica = RoutedReplica(name, FakeServer(), version, CONFIG.max_running_requests_per_dp_rank, **state)
    replica.tokens_in_flight, replica.running_requests = tokens, running
    return replica


class FakeServer:
    """A server that receives no requests."""

    base_url = "http://none"
    api_key: str | None = None

    async def generate(self, **request: Any) -> Any:
        raise AssertionError

    def generate_stream(self, **request: Any) -> Any:
        raise AssertionError


def make_index(replicas: Iterable[RoutedReplica]) -> LoadIndex:
    index = LoadIndex(CONFIG.overload_factor)
    for replica in replicas:
        index.refresh(replica)
    return index


def choose_by_comparing_all(
    replicas: Iterable[RoutedReplica], request: RoutingRequest, session_replica: str | None, tried: set[RoutedReplica]
) -> str | None:
    """The rule of `LoadIndex.choose` in its plainest form: it looks at every replica."""
    fit = [one for one in replicas if one.admitted and request.requirement.is_met_by(one.weight_version)]
    if not fit:
        raise NotReadyError("none")
    healthy = [one for one in fit if not one.is_suspect] or fit
    available = [one for one in healthy if not one.is_full]
    available = [one for one in available if one not in tried] or available
    if not available:
        return None
    least = min(available, key=lambda one: one.load)
    current = next((one for one in available if one.name == session_replica), None)
    if current is None or session_moves(
        current.tokens_in_flight,
        least.tokens_in_flight,
        sum(one.tokens_in_flight for one in healthy),
        len(healthy),
        request.prompt_tokens,
        CONFIG.overload_factor,
    ):
        return least.name
    return current.name


NAMES = st.sampled_from("abcdef")
VERSIONS = st.none() | st.integers(0, 3)
STEPS = st.lists(
    st.tuples(st.just("place"), VERSIONS, VERSIONS, st.none() | NAMES, st.sets(NAMES, max_size=3), st.integers(0, 500))
    | st.tuples(st.just("grow"), st.integers(0, 40), st.integers(0, 300))
    | st.tuples(st.just("end"), st.integers(0, 40))
    | st.tuples(st.just("state"), NAMES, st.integers(0, 2), st.booleans(), st.booleans())
    | st.tuples(st.just("remove"), NAMES),
    max_size=60,
)


PLACE: tuple[Any, ...] = ("place", None, None, None, set(), 0)


@given(STEPS)
@example([
    ("state", "b", 0, True, False), ("state", "c", 0, True, False), PLACE, PLACE,
    ("place", None, None, "c", {"b", "c"}, 0),
])  # fmt: skip
def test_the_index_chooses_as_a_comparison_of_all_replicas(steps: list[Any]) -> None:
    """After any sequence of placements, new tokens, ends, and changes of state."""
    replicas: dict[str, RoutedReplica] = {}
    index = LoadIndex(CONFIG.overload_factor)
    slots: list[Slot] = []
    for kind, *arguments in steps:
        if kind == "place":
            exact, minimum, session_replica, tried_names, tokens = arguments
            request = RoutingRequest(VersionRequirement(exact, minimum), None, tokens)
            tried = {replicas[name] for name in tried_names if name in replicas}
            try:
                expected = choose_by_comparing_all(replicas.values(), request, session_replica, tried)
            except NotReadyError:
                with pytest.raises(NotReadyError):
                    index.choose(request, session_replica, tried)
                continue
            chosen = index.choose(request, session_replica, tried)
            assert (None if chosen is None else chosen.name) == expected
            if chosen is not None:
                slots.append(Slot(chosen, tokens))
                index.update_load(chosen, tokens)
        elif kind == "grow" and slots:
            slot = slots[arguments[0] % len(slots)]
            index.update_load(slot.replica, slot.set_tokens(slot.tokens + arguments[1]))
        elif kind == "end" and slots:
            slot = slots.pop(arguments[0] % len(slots))
            slot.release()
            index.update_load(slot.replica, -slot.tokens)
        elif kind == "state":
            name, version, admitted, stalled = arguments
            replica = replicas.setdefault(name, make_replica(name))
            replica.weight_version, replica.admitted, replica.is_stalled = version, admitted, stalled
            index.refresh(replica)
        elif kind == "remove" and arguments[0] in replicas:
            index.remove(replicas.pop(arguments[0]))


@pytest.mark.parametrize("replicas", [10, 1000])
def test_a_placement_compares_few_replicas(replicas: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of loads that are read per placement does not grow with the number of replicas or of requests."""
    reads = 0
    load_of: Any = vars(RoutedReplica)["load"]

    def counted(replica: RoutedReplica) -> Any:
        nonlocal reads
        reads += 1
        return load_of.fget(replica)

    monkeypatch.setattr(RoutedReplica, "load", property(counted))
    rng = random.Random(0)
    members = [make_replica(f"r{number:04}") for number in range(replicas)]
    for member in members:
        member.max_running_requests = 10**6
    index = make_index(members)
    slots: list[Slot] = []
    reads = 0
    for number in range(10_000):
        chosen = index.choose(RoutingRequest(prompt_tokens=100), f"r{number % replicas:04}", ())
        assert chosen is not None
        slots.append(Slot(chosen, rng.randrange(1, 2000)))
        index.update_load(chosen, slots[-1].tokens)
        grown = rng.choice(slots)
        index.update_load(grown.replica, grown.set_tokens(grown.tokens + 16))
        if number % 2:
            ended = slots.pop(rng.randrange(len(slots)))
            ended.release()
            index.update_load(ended.replica, -ended.tokens)
    assert reads < 10_000 * 10


def choose(replicas: list[RoutedReplica], session_replica: str | None, prompt_tokens: int) -> str | None:
    chosen = make_index(replicas).choose(RoutingRequest(prompt_tokens=prompt_tokens), session_replica, ())
    return None if chosen is None else chosen.name


def test_session_stays_until_its_replica_is_overloaded() -> None:
    def choose_at(tokens: int, elsewhere: int = 0) -> str | None:
        return choose([make_replica("a", tokens, 1), make_replica("b", elsewhere)], "a", 200)

    assert choose_at(150) == "a", "moving costs the computation of a prompt of 200 tokens"
    assert choose_at(250) == "b"
    assert choose_at(3000, 2700) == "a", "the load of a is close to the mean load"
    assert choose([make_replica("a", 10, 4), make_replica("b", 500, 1)], "a", 50) == "b", "a is full"
    assert choose([make_replica("a", 10, 4)], None, 50) is None


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_skewed_sessions_are_balanced(replicas: int) -> None:
    """Many concurrent sessions of very different lengths: on average the largest load is below 1.5 times the mean."""
    rng = random.Random(replicas)
    members = {name: make_replica(name) for name in "abcd"[:replicas]}
    for member in members.values():
        member.max_running_requests = 1000
    index = make_index(members.values())
    slots: list[Slot] = []
    session_replicas: dict[int, str] = {}
    lengths = {session: int(rng.paretovariate(1.1) * 40) % 1500 + 20 for session in range(64)}
    imbalances: list[float] = []
    for _ in range(4000):
        session = rng.randrange(64)
        request = RoutingRequest(prompt_tokens=lengths[session])
        chosen = index.choose(request, session_replicas.get(session), ())
        assert chosen is not None
        session_replicas[session] = chosen.name
        slots.append(Slot(chosen, lengths[session]))
        index.update_load(chosen, lengths[session])
        if len(slots) > 48:  # one request ends
            ended = slots.pop(rng.randrange(len(slots)))
            ended.release()
            index.update_load(ended.replica, -ended.tokens)
        tokens = [member.tokens_in_flight for member in members.values()]
        imbalances.append(max(tokens) * replicas / sum(tokens))
    assert sum(imbalances[200:]) / len(imbalances[200:]) < 1.5


def test_errors_in_a_row_make_a_replica_suspect() -> None:
    """Requests that run when the suspicion begins are not counted. Each failed probe doubles the delay of the next."""
    history = ErrorHistory()
    first = [history.start_request() for _ in range(10)]
    assert [history.record_error(period) for period in first] == [None, None, 0.5] + [None] * 7
    assert history.trust is Trust.SUSPECT
    delays_s: list[float | None] = []
    for _ in range(9):
        history.begin_probe(history.period)
        assert (history.trust, history.has_probe) == (Trust.PROBED, False)
        probe = history.start_request()
        assert history.has_probe, "one request at a time is the probe"
        assert history.record_error(first[0]) is None
        delays_s.append(history.record_error(probe))
    assert delays_s == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]


def test_a_probe_that_returns_tokens_makes_a_replica_trusted() -> None:
    """Until a request has finished, the next error makes the replica suspect again."""
    history = ErrorHistory()
    for _ in range(3):
        history.record_error(history.start_request())
    suspect_period = history.period
    history.begin_probe(suspect_period)
    history.end_request(history.start_request())
    assert (history.trust, history.has_probe) == (Trust.PROBED, False), "a probe without an outcome is repeated"
    period = history.start_request()
    history.record_progress(period)
    assert history.record_error(history.start_request()) == 1.0
    history.begin_probe(suspect_period)
    assert history.record_error(history.start_request()) is None, "the timer of an earlier suspicion has no effect"
    history.begin_probe(history.period)
    history.record_finish(history.start_request())
    errors = [history.record_error(history.start_request()) for _ in range(3)]
    assert errors == [None, None, 0.5], "a finished request ends the row of errors"


def test_waiting_requests_are_ordered_by_requirement_and_arrival() -> None:
    """Retries come first. Removing any request leaves the order of the others."""

    async def run() -> None:
        queues = RequestQueues()
        any_version, exact = VersionRequirement(), VersionRequirement(weight_version=7)
        new = [queues.add(RoutingRequest(any_version), (), is_retry=False) for _ in range(4)]
        retry = queues.add(RoutingRequest(any_version), (), is_retry=True)
        waits_for_version = queues.add(RoutingRequest(exact), (), is_retry=False)
        assert len(queues) == 6
        assert [len(queue) for queue in queues.get(3)] == [5], "requests that need version 7 are not looked at"
        (queue,) = queues.get(3)
        assert list(queue) == [retry, *new]
        queues.discard(new[1])
        queues.discard(new[1])
        queues.discard(retry)
        assert (list(queue), len(queues)) == ([new[0], new[2], new[3]], 4)
        queues.discard(waits_for_version)
        assert queues.get() == [queue]

    asyncio.run(run())


@pytest.mark.parametrize("bad", [-1, "2", 1.5, True])
def test_required_versions_are_whole_numbers(bad: Any) -> None:
    with pytest.raises(BadInputError, match="weight_version must be a whole number"):
        VersionRequirement(weight_version=bad)


def test_full_queue_refuses_requests() -> None:
    require_queue_capacity(9, 10)
    with pytest.raises(ServerBusyError):
        require_queue_capacity(10, 10)


@pytest.mark.parametrize(
    "field",
    [
        {"return_hidden_states": True}, {"custom_logit_processor": "x"}, {"image_data": "x"},
        {"return_routed_experts": True}, {"return_entropy": True}, {"field_of_a_later_version": 1},
    ],
)  # fmt: skip
def test_results_of_the_whole_output_are_not_continued(field: dict[str, Any]) -> None:
    """Hidden states have an entry for each prompt token; a processor counts on the output that it has seen itself."""
    request = {"input_ids": [1], "return_logprob": True, "sampling_params": {"temperature": 0.5, "top_p": 0.9}}
    assert ResumableGeneration({**request, "lora_path": "x", "image_data": None, "priority": 3}).can_continue
    generation = ResumableGeneration({**request, **field})
    generation.begin_attempt()
    generation.record_event(event([5, 6], 1))
    generation.end_attempt()
    assert (generation.can_continue, generation.tokens) == (False, [])


def test_prompts_are_shorter_than_the_shortest_that_sglang_refuses() -> None:
    """SGLang refuses a prompt of `max_req_input_len` tokens."""
    limits = prompt_limits({"max_req_input_len": 10}, {}, {}, {})
    assert generate_payload(limits, {"input_ids": [1] * 9})
    with pytest.raises(BadInputError, match="has 10 tokens; the server accepts at most 9 tokens"):
        generate_payload(limits, {"input_ids": [1] * 10})


def test_incremental_events_are_joined() -> None:
    """Earlier replies do not change. The last event of an aborted waiting request repeats what was sent."""

    def incremental(tokens: list[int], count: int, logprobs: list[int], text: str, **meta: Any) -> dict[str, Any]:
        entries = [[-float(token), token, None] for token in logprobs]
        meta = {"completion_tokens": count, "output_token_logprobs": entries, **meta}
        return {"output_ids": tokens, "text": text, "meta_info": meta}

    def joined(*events: dict[str, Any]) -> list[Any]:
        stream = IncrementalStream()
        replies = [stream.add(event) for event in events]
        return [
            (one["output_ids"], one["text"], [entry[1] for entry in one["meta_info"]["output_token_logprobs"]])
            for one in replies
        ]

    first = incremental([1, 2], 2, [1, 2], "ab")
    whole = [([1, 2], "ab", [1, 2]), ([1, 2, 3], "abc", [1, 2, 3])]
    assert joined(first, incremental([3], 3, [3], "c")) == whole
    second = incremental([3], 3, [3], "c")
    assert (
        joined(first, second, incremental([3], 3, [1, 2, 3], "abc", finish_reason={"type": "abort"}))[1:]
        == [whole[1]] * 2
    )
    both = incremental([3, 3], 3, [3, 1, 2, 3], "cabc", finish_reason={"type": "abort"})  # two events, sent as one
    assert joined(first, both) == whole
    assert joined(incremental([], 0, [], "", finish_reason={"type": "abort"})) == [([], "", [])]


def test_an_incremental_event_copies_each_list_once() -> None:
    stream, number = IncrementalStream(), 100_000
    stream.add({"output_ids": list(range(number)), "meta_info": {"completion_tokens": number}})
    tracemalloc.start()
    try:
        stream.add({"output_ids": [1], "meta_info": {"completion_tokens": number + 1}})
        assert tracemalloc.get_traced_memory()[1] < 1.5 * 8 * number
    finally:
        tracemalloc.stop()


# -- processes ---------------------------------------------------------------------------------------


def test_a_router_process_answers_while_its_parent_reads_no_reports() -> None:
    """The report of 1,000 replicas is larger than the pipe. The end of the parent's messages ends the process."""
    port = free_port()
    settings = {"host": "127.0.0.1", "port": port, "api_key": "k", "config": {}, "parent_pid": os.getpid()}
    status: dict[str, Any] = {
        "url": "http://127.0.0.1:1", "api_key": None, "weight_version": 0, "admitted": True, "suspect": False,
        "will_serve": True, "removed": False, "reason": "", "failure": None, "dp_size": 1,
    }  # fmt: skip
    statuses = [{"name": f"replica_{number}", **status} for number in range(1000)]
    process = subprocess.Popen(
        [sys.executable, "-m", "verl_server.router.process.router_main"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stderr is not None
    try:
        for message in (settings, {"sequence": 1, "statuses": statuses, "metrics": ""}):
            process.stdin.write(orjson.dumps(message) + b"\n")
        process.stdin.flush()

        def serving_replicas() -> int:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as r,
            ):
                return int(orjson.loads(r.read())["serving"])
            return 0

        wait_until(lambda: serving_replicas() == 1000, 60.0, "the router process does not answer")
        time.sleep(0.5)  # several reports
        assert serving_replicas() == 1000
        process.stdin.write(b'{"sequence": 2, "stat')  # a parent that is killed writes half a line
        process.stdin.close()
        assert process.wait(10.0) == 0
        assert process.stderr.read() == b""
    finally:
        process.kill()
        process.wait()


def test_half_a_report_does_not_end_the_supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A router process that is killed may write half a line. Another process takes over."""
    report = orjson.dumps({"sequence": 0, "replicas": {}}).decode()
    program = tmp_path / "router"
    program.write_text(
        f"#!/bin/sh\necho '{report}'\n"
        f"if [ -e {tmp_path}/started ]; then exec sleep 60; fi\ntouch {tmp_path}/started\nprintf '{report[:9]}'\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    supervisor = RouterSupervisor(RouterConfig(), None, lambda: "")
    try:
        wait_until(lambda: supervisor.restarts == 1, 10.0, "no other process was started")
    finally:
        supervisor.close()


def test_a_router_process_reads_the_statuses_of_many_failed_replicas() -> None:
    """The error of each has up to 32 KB of its server's log. All statuses are one line."""

    def status(name: str, failure: Any = None) -> ReplicaStatus:
        serves = failure is None
        adapter = AsyncHttpServerEngineAdapter.attach("http://127.0.0.1:1") if serves else None
        return ReplicaStatus(name, adapter, 0, serves, False, serves, False, failure=failure)

    failure = to_wire(ServerDiedError("the server ended", log_tail="y" * 32_000 + "the end"))
    assert encode_status(status("failed", failure))["failure"]["details"]["log_tail"].endswith("the end")
    assert len(failure["details"]["log_tail"]) > 32_000
    supervisor = RouterSupervisor(RouterConfig(), None, lambda: "")
    try:
        supervisor.update_statuses([status("good"), *(status(f"r{number}", failure) for number in range(700))])
        wait_until(lambda: supervisor.replica_stats("good") is not None, 20.0, "the statuses do not arrive")
        assert supervisor.restarts == 0
    finally:
        supervisor.close()


def test_a_router_process_listens_for_other_machines() -> None:
    """With a host that stands for all addresses, the URL has an address of this machine at which others reach it."""
    supervisor = RouterSupervisor(RouterConfig(), None, lambda: "", "0.0.0.0")
    try:
        url = urlsplit(supervisor.url)
        assert url.hostname not in ("0.0.0.0", "127.0.0.2")
        for host in (url.hostname, "127.0.0.2"):
            health = requests.get(f"http://{host}:{url.port}/health", timeout=30).json()
            assert health == {"replicas": 0, "serving": 0, "paused": False}
    finally:
        supervisor.close()


STOPPED_PARENT = """
import sys, time
from verl_server.config import RouterConfig
from verl_server.router.process.supervisor import RouterSupervisor
supervisor = RouterSupervisor(RouterConfig(report_timeout_s=1.0), None, lambda: "")
print("ready", flush=True)
sys.stdin.readline()
print(supervisor.restarts, flush=True)
supervisor.close()
"""


def test_a_router_process_survives_a_stop_of_its_parent() -> None:
    """While the parent is stopped it reads no reports. Afterwards it does not take the router process for hung."""
    parent = subprocess.Popen(
        [sys.executable, "-c", STOPPED_PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    try:
        assert parent.stdout.readline() == "ready\n"
        for _ in range(3):
            parent.send_signal(signal.SIGSTOP)
            time.sleep(2.5)
            parent.send_signal(signal.SIGCONT)
            time.sleep(0.5)
        parent.stdin.write("\n")
        parent.stdin.flush()
        assert parent.stdout.readline() == "0\n"
        assert parent.wait(20.0) == 0
    finally:
        parent.kill()
        parent.wait()


@pytest.mark.parametrize(
    "use",
    [
        "from verl_server.router.dispatcher import Dispatcher; Dispatcher()",
        "from verl_server import RouterClient; RouterClient('http://127.0.0.1:1', None)",
        "from verl_server import AsyncHttpServerEngineAdapter as A; A.attach('http://127.0.0.1:1')",
        "from verl_server.adapter.blocking import EventLoopThread; EventLoopThread().close()",
        # A later change of the limit would replace the forkserver.
        "from verl_server.cpu.forkserver import prepare_forkserver\nprepare_forkserver({'SGLANG_PLATFORM': 'another'})",
    ],
)
def test_the_limit_of_open_files_is_raised(use: str) -> None:
    """As far as the hard limit allows."""
    program = (
        "import resource; limit = resource.RLIMIT_NOFILE\n"
        "resource.setrlimit(limit, (256, 3000))\n"
        f"{use}\n"
        "print(*resource.getrlimit(limit))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "3000 3000\n"


def test_progress_at_any_router_is_progress_of_the_replica() -> None:
    assert merge_stats(
        [ReplicaStats(2, 10.0, True), ReplicaStats(1, 30.0, True), ReplicaStats(0, 0.0, True), None]
    ) == ReplicaStats(3, 30.0, True)
    assert not merge_stats([ReplicaStats(0, 0.0, True), ReplicaStats(0, 0.0, False)]).admitted
    assert merge_stats([None]) == ReplicaStats(0, 0.0, True)


def test_status_queue_keeps_the_latest_status() -> None:
    def status(name: str, version: int, removed: bool = False) -> ReplicaStatus:
        return ReplicaStatus(name, None, version, admitted=True, suspect=False, will_serve=True, removed=removed)

    queue = StatusQueue()
    for version in range(3):
        queue.put(status("a", version))
    queue.put(status("b", 7))
    taken = queue.take()
    assert taken is not None
    assert taken[0] == queue.sequence == 4
    assert [(one.name, one.weight_version) for one in taken[1]] == [("a", 2), ("b", 7)]
    queue.put(status("b", 8, removed=True))
    assert queue.latest("b") is None
    queue.requeue_all()
    taken = queue.take()
    assert taken is not None
    assert sorted(one.name for one in taken[1]) == ["a", "b"], "the removal of b is still reported"
    queue.requeue_all()
    taken = queue.take()
    assert taken is not None
    assert [one.name for one in taken[1]] == ["a"], "a new reader receives the current statuses"
    queue.close()
    assert queue.take() is None
