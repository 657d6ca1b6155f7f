"""Pure parts of the router: choice of a replica, generations over several attempts, stored results, status messages."""

from __future__ import annotations

import dataclasses
import random
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_server.config import RouterConfig
from verl_server.errors import BadInputError, NotReadyError, ServerBusyError
from verl_server.router.policy import (
    ReplicaLoad,
    VersionRequirement,
    choose_replica,
    require_queue_capacity,
    suitable_replicas,
)
from verl_server.router.replica_status import ReplicaStats, ReplicaStatus, StatusQueue, merge_stats
from verl_server.router.result_cache import ResultCache, estimate_bytes
from verl_server.router.resumable_generation import DEFAULT_MAX_NEW_TOKENS, ResumableGeneration, join_version_spans

CONFIG = RouterConfig(max_running_requests_per_replica=4, overload_factor=1.5)


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
    with pytest.raises(BadInputError, match=r"\['max_new_tokens'\] must be a whole number"):
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


@pytest.mark.parametrize("field", [item.name for item in dataclasses.fields(RouterConfig)])
def test_router_settings_are_positive_numbers(field: str) -> None:
    may_be_zero = field in ("max_queued_requests", "result_cache_bytes", "max_sessions", "orphan_timeout_s")
    if may_be_zero:
        assert getattr(RouterConfig(**{field: 0}), field) == 0
    for bad in (-1, "2", True, *([] if may_be_zero else [0])):
        with pytest.raises(BadInputError, match=f"RouterConfig.{field} must be a (positive|whole) number"):
            RouterConfig(**{field: bad})  # type: ignore[arg-type]


LOADS = st.lists(
    st.builds(
        ReplicaLoad,
        name=st.sampled_from(list("abcdef")),
        tokens_in_flight=st.integers(0, 5000),
        running_requests=st.integers(0, 6),
        weight_version=st.integers(0, 3),
        admitted=st.booleans(),
        suspect=st.booleans(),
    ),
    max_size=6,
    unique_by=lambda load: load.name,
)


VERSIONS = st.none() | st.integers(0, 4)


def choose(loads: list[ReplicaLoad], session_replica: str | None, prompt_tokens: int) -> str | None:
    return choose_replica(
        loads, VersionRequirement(), session_replica=session_replica, prompt_tokens=prompt_tokens, config=CONFIG
    )


@given(LOADS, VERSIONS, VERSIONS, st.none() | st.sampled_from("abcdef"), st.integers(0, 500))
def test_requests_go_only_to_suitable_replicas(
    loads: list[ReplicaLoad], exact: int | None, minimum: int | None, session_replica: str | None, prompt_tokens: int
) -> None:
    requirement = VersionRequirement(exact, minimum)
    suitable = [load for load in loads if load.admitted and requirement.is_met_by(load.weight_version)]

    def find() -> str | None:
        return choose_replica(
            loads, requirement, session_replica=session_replica, prompt_tokens=prompt_tokens, config=CONFIG
        )

    if not suitable:
        with pytest.raises(NotReadyError):
            find()
        return
    found = find()
    assert suitable_replicas(loads, requirement) == suitable
    healthy = [load for load in suitable if not load.suspect] or suitable
    limit = CONFIG.max_running_requests_per_replica
    available = {load.name: load for load in healthy if load.running_requests < limit}
    assert (found is None) == (not available)
    if found is not None:
        assert found in available
        least = min(load.tokens_in_flight for load in available.values())
        assert found == session_replica or available[found].tokens_in_flight == least


def test_session_stays_until_its_replica_is_overloaded() -> None:
    def choose_at(tokens: int, elsewhere: int = 0) -> str | None:
        return choose([ReplicaLoad("a", tokens, 1, 0), ReplicaLoad("b", elsewhere, 0, 0)], "a", 200)

    assert choose_at(150) == "a", "moving costs the computation of a prompt of 200 tokens"
    assert choose_at(250) == "b"
    assert choose_at(3000, 2700) == "a", "the load of a is close to the mean load"
    full = [ReplicaLoad("a", 10, 4, 0), ReplicaLoad("b", 500, 1, 0)]
    assert choose(full, "a", 50) == "b"
    assert choose([ReplicaLoad("a", 10, 4, 0)], None, 50) is None


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_skewed_sessions_are_balanced(replicas: int) -> None:
    """Many concurrent sessions of very different lengths: on average the largest load is below 1.5 times the mean."""
    rng = random.Random(replicas)
    tokens = dict.fromkeys("abcd"[:replicas], 0)
    running: list[tuple[str, int]] = []
    session_replicas: dict[int, str] = {}
    lengths = {session: int(rng.paretovariate(1.1) * 40) % 1500 + 20 for session in range(64)}
    imbalances: list[float] = []
    for _ in range(4000):
        session = rng.randrange(64)
        loads = [ReplicaLoad(name, in_flight, 0, 0) for name, in_flight in tokens.items()]
        name = choose(loads, session_replicas.get(session), lengths[session])
        assert name is not None
        session_replicas[session] = name
        tokens[name] += lengths[session]
        running.append((name, lengths[session]))
        if len(running) > 48:  # one request ends
            ended, size = running.pop(rng.randrange(len(running)))
            tokens[ended] -= size
        imbalances.append(max(tokens.values()) * replicas / sum(tokens.values()))
    assert sum(imbalances[200:]) / len(imbalances[200:]) < 1.5


@pytest.mark.parametrize("bad", [-1, "2", 1.5, True])
def test_required_versions_are_whole_numbers(bad: Any) -> None:
    with pytest.raises(BadInputError, match="weight_version must be a whole number"):
        VersionRequirement(weight_version=bad)


def test_full_queue_refuses_requests() -> None:
    require_queue_capacity(9, 10)
    with pytest.raises(ServerBusyError):
        require_queue_capacity(10, 10)


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
