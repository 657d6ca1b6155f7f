"""Pure parts of the fleet: which replica, when is it sick, and a sample over several attempts."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_server.config import Limits, RecoveryConfig, RolloutMode
from verl_server.errors import BadInputError, NotReadyError, ServerBusyError, UnsupportedError
from verl_server.rollout.health import Observation, ReplicaState, judged, restart_after
from verl_server.rollout.modes import mode_of, server_args_for
from verl_server.rollout.parallel_config import parallel_config_of, require_room
from verl_server.router.policy import ReplicaLoad, VersionRequirement, choose, require_place_in_queue, suitable
from verl_server.router.resumable_generation import ResumableGeneration, spans_of
from verl_server.router.targets import ReplicaStats, ReplicaStatus, StatusQueue, merged

LIMITS = Limits(requests=4, overload=1.5)


def event(tokens: list[int], version: str, finish: Any = None, **meta: Any) -> dict[str, Any]:
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
def test_a_sample_cut_anywhere_is_the_same_sample(tokens: list[int], cuts: list[int]) -> None:
    """However often it is interrupted: the same tokens, logprobs and lengths, each token from its own weights."""
    sample = ResumableGeneration(
        {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 40, "min_new_tokens": 5}}
    )
    at = 0
    for number, cut in enumerate(cuts):
        body = sample.begin()
        assert body["input_ids"] == [1, 2, 3, *tokens[:at]]
        assert body["sampling_params"]["max_new_tokens"] == 40 - at
        assert body["sampling_params"]["min_new_tokens"] == max(0, 5 - at)
        stop = min(at + cut, len(tokens) - 1)
        for until in range(at + 1, stop + 1):
            sample.arrived(event(tokens[at:until], str(number), prompt_tokens=3 + at))
        sample.interrupted()
        at = stop
    sample.begin()
    sample.arrived(event(tokens[at:], "last", STOP, prompt_tokens=3 + at))
    reply = sample.reply()
    meta = reply["meta_info"]
    assert reply["output_ids"] == tokens
    assert [entry[1] for entry in meta["output_token_logprobs"]] == tokens
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (3, len(tokens))
    assert meta["finish_reason"] == STOP
    assert meta["attempts"] == len(cuts) + 1
    covered = [position for span in meta["weight_versions"] for position in range(span["start"], span["end"])]
    assert covered == list(range(len(tokens)))


def test_tokens_of_uncertain_weights_are_made_again() -> None:
    """New weights came while it ran, and its server was lost after that: what came between two words may be of both."""
    sample = ResumableGeneration({"input_ids": [1], "sampling_params": {"max_new_tokens": 9}})
    sample.begin()
    for count, version in ((1, "4"), (3, "4"), (6, "5"), (7, "5")):
        sample.arrived(event(list(range(count)), version))
    sample.interrupted()
    assert sample.begin()["input_ids"] == [1, 0, 1, 2]
    sample.arrived(event([3, 4], "5", STOP))
    reply = sample.reply()
    assert reply["output_ids"] == [0, 1, 2, 3, 4]
    assert len(reply["meta_info"]["output_token_logprobs"]) == 5
    assert reply["meta_info"]["weight_versions"] == [
        {"version": "4", "start": 0, "end": 3},
        {"version": "5", "start": 3, "end": 5},
    ]


def test_a_sample_that_has_all_its_tokens_is_done() -> None:
    sample = ResumableGeneration({"input_ids": [1], "sampling_params": {"max_new_tokens": 3}})
    sample.begin()
    sample.arrived(event([5, 6, 7], "1"))
    sample.interrupted()
    assert sample.is_full
    assert sample.reply()["meta_info"]["finish_reason"] == {"type": "length", "length": 3}


@pytest.mark.parametrize(
    "params", [{"regex": "a+"}, {"json_schema": "{}"}, {"stop": ["x"]}, {"frequency_penalty": 0.5}]
)
def test_what_cannot_be_taken_up_begins_again(params: dict[str, Any]) -> None:
    sample = ResumableGeneration({"input_ids": [1], "sampling_params": params})
    sample.begin()
    sample.arrived(event([5, 6], "1"))
    sample.interrupted()
    assert sample.begin()["input_ids"] == [1]
    assert sample.tokens == []


def test_an_aborted_sample_is_partial() -> None:
    sample = ResumableGeneration({"input_ids": [1], "sampling_params": {"max_new_tokens": 9}})
    sample.begin()
    sample.arrived(event([5, 6], "1", {"type": "abort"}))
    assert sample.is_partial
    sample.interrupted()
    assert sample.begin()["input_ids"] == [1, 5, 6]


def test_spans_of_equal_weights_are_one() -> None:
    parts = [event([1, 2], "3"), event([3], "3"), event([4], "4"), event([], "5")]
    assert spans_of(parts) == [{"version": "3", "start": 0, "end": 3}, {"version": "4", "start": 3, "end": 4}]


def test_one_prompt_only() -> None:
    with pytest.raises(BadInputError, match="one prompt"):
        ResumableGeneration({"input_ids": [[1], [2]]})
    with pytest.raises(BadInputError, match="n=1"):
        ResumableGeneration({"input_ids": [1], "sampling_params": {"n": 2}})
    with pytest.raises(BadInputError, match="one sampling_params"):
        ResumableGeneration({"input_ids": [1], "sampling_params": [{}]})


LOADS = st.lists(
    st.builds(
        ReplicaLoad,
        name=st.sampled_from(list("abcdef")),
        tokens=st.integers(0, 5000),
        requests=st.integers(0, 6),
        version=st.integers(0, 3),
        admitted=st.booleans(),
        suspect=st.booleans(),
    ),
    max_size=6,
    unique_by=lambda load: load.name,
)


VERSIONS = st.none() | st.integers(0, 4)


@given(LOADS, VERSIONS, VERSIONS, st.none() | st.sampled_from("abcdef"), st.integers(0, 500))
def test_a_request_goes_only_where_it_may(
    loads: list[ReplicaLoad], exact: int | None, least: int | None, sticky: str | None, size: int
) -> None:
    need = VersionRequirement(exact, least)
    able = [load for load in loads if load.admitted and need.is_met_by(load.version)]
    if not able:
        with pytest.raises(NotReadyError):
            choose(loads, need, sticky, size, LIMITS)
        return
    found = choose(loads, need, sticky, size, LIMITS)
    assert suitable(loads, need) == able
    healthy = [load for load in able if not load.suspect] or able
    room = {load.name: load for load in healthy if load.requests < LIMITS.requests}
    assert (found is None) == (not room)
    if found is not None:
        assert found in room
        assert found == sticky or room[found].tokens == min(load.tokens for load in room.values())


def test_a_session_stays_until_its_replica_has_far_more_than_its_share() -> None:
    def at(tokens: int, elsewhere: int = 0) -> str | None:
        return choose(
            [ReplicaLoad("a", tokens, 1, 0), ReplicaLoad("b", elsewhere, 0, 0)], VersionRequirement(), "a", 200, LIMITS
        )

    assert at(150) == "a", "moving costs a prefill of 200"
    assert at(250) == "b"
    assert at(3000, 2700) == "a", "that is no more than its share"
    full = [ReplicaLoad("a", 10, 4, 0), ReplicaLoad("b", 500, 1, 0)]
    assert choose(full, VersionRequirement(), "a", 50, LIMITS) == "b"
    assert choose([ReplicaLoad("a", 10, 4, 0)], VersionRequirement(), None, 50, LIMITS) is None


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_skewed_sessions_leave_nobody_with_far_more_than_his_share(replicas: int) -> None:
    """Sessions of very different lengths, many at a time: no replica has more than 1.5 times the mean for long."""
    rng = random.Random(replicas)
    tokens = dict.fromkeys("abcd"[:replicas], 0)
    running: list[tuple[str, int]] = []
    at: dict[int, str] = {}
    lengths = {session: int(rng.paretovariate(1.1) * 40) % 1500 + 20 for session in range(64)}
    worst: list[float] = []
    for _ in range(4000):
        session = rng.randrange(64)
        loads = [ReplicaLoad(name, held, 0, 0) for name, held in tokens.items()]
        name = choose(loads, VersionRequirement(), at.get(session), lengths[session], LIMITS)
        assert name is not None
        at[session] = name
        tokens[name] += lengths[session]
        running.append((name, lengths[session]))
        if len(running) > 48:  # one of them ends
            gone, size = running.pop(rng.randrange(len(running)))
            tokens[gone] -= size
        worst.append(max(tokens.values()) * replicas / sum(tokens.values()))
    assert sum(worst[200:]) / len(worst[200:]) < 1.5


@pytest.mark.parametrize("bad", [-1, "2", 1.5, True])
def test_versions_are_whole_numbers(bad: Any) -> None:
    with pytest.raises(BadInputError, match="weight_version must be a whole number"):
        VersionRequirement(weight_version=bad)


def test_a_full_queue_pushes_back() -> None:
    require_place_in_queue(9, 10)
    with pytest.raises(ServerBusyError):
        require_place_in_queue(10, 10)


RECOVERY = RecoveryConfig(
    stall_timeout_s=10.0, hard_stall_timeout_s=100.0, backoff_s=1.0, max_backoff_s=5.0, max_restarts=4, window_s=60.0
)


@pytest.mark.parametrize(
    ("seen", "state"),
    [
        (Observation(False, 0, 0.0, 0.0), ReplicaState.DEAD),
        (Observation(True, 0, 0.0, 999.0), ReplicaState.HEALTHY),  # nothing to do
        (Observation(True, 3, 999.0, 999.0, paused=True), ReplicaState.HEALTHY),
        (Observation(True, 3, 30.0, 0.1), ReplicaState.HEALTHY),  # a long prefill
        (Observation(True, 3, 6.0, 6.0), ReplicaState.SUSPECT),
        (Observation(True, 3, 11.0, 11.0), ReplicaState.DEAD),
        (Observation(True, 3, 11.0, 2.0), ReplicaState.HEALTHY),
        (Observation(True, 3, 60.0, 0.0), ReplicaState.SUSPECT),
        (Observation(True, 3, 100.0, 0.0), ReplicaState.DEAD),
    ],
)
def test_sick_is_who_makes_no_progress(seen: Observation, state: ReplicaState) -> None:
    assert judged(seen, RECOVERY) is state


def test_restarts_back_off_and_end() -> None:
    deaths: list[float] = []
    waits = []
    for now in range(6):
        deaths.append(float(now))
        waits.append(restart_after(deaths, float(now), RECOVERY))
    assert waits == [0.0, 1.0, 2.0, 4.0, None, None]
    assert restart_after(deaths, 1000.0, RECOVERY) == 0.0, "long ago is forgotten"
    with pytest.raises(BadInputError, match="stall_timeout_s"):
        RecoveryConfig(stall_timeout_s=0)


@pytest.mark.parametrize(
    ("args", "devices"),
    [
        ({}, 1),
        ({"tp_size": 4}, 4),
        ({"tp_size": 4, "ep_size": 2}, 4),
        ({"tp_size": 4, "dp_size": 2, "enable_dp_attention": True}, 4),
        ({"tp_size": 8, "nnodes": 2}, 8),
    ],
)
def test_shapes(args: dict[str, Any], devices: int) -> None:
    shape = parallel_config_of(args, takes_weights=True)
    assert shape.devices == devices
    assert shape.devices_per_node * shape.nnodes == devices
    require_room(shape, 3, 3 * devices)
    with pytest.raises(BadInputError, match=f"3 replicas of {devices} devices each"):
        require_room(shape, 3, 3 * devices - 1)


def test_shapes_of_fixed_weights() -> None:
    """Who takes no weights may have stages and copies."""
    assert parallel_config_of({"tp_size": 2, "pp_size": 2, "dp_size": 3}, takes_weights=False).devices == 12


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"tp_size": 0}, "tp_size must be"),
        ({"pp_size": True}, "pp_size must be"),
        ({"tp_size": "2"}, "tp_size must be"),
        ({"tp_size": 4, "dp_size": 3, "enable_dp_attention": True}, "DP attention divides"),
        ({"tp_size": 4, "ep_size": 3}, "ep_size=3 must divide"),
        ({"tp_size": 3, "nnodes": 2}, "does not spread evenly"),
        ({"dp_size": 2}, "takes no pushed weights"),
        ({"dp_size": 2, "nnodes": 2, "tp_size": 2}, "do not go over nnodes"),
        ({"pp_size": 2}, "pipeline stages"),
    ],
)
def test_impossible_shapes(args: dict[str, Any], words: str) -> None:
    with pytest.raises((BadInputError, UnsupportedError), match=words):
        parallel_config_of(args, takes_weights=True)


def test_modes() -> None:
    assert mode_of("hybrid") is RolloutMode.HYBRID
    with pytest.raises(BadInputError, match="mode must be one of"):
        mode_of("shared")
    assert server_args_for(RolloutMode.STANDALONE, {"a": 1}) == {"a": 1}
    assert server_args_for(RolloutMode.COLOCATED, {}) == {"enable_memory_saver": True}


def test_progress_anywhere_is_progress() -> None:
    assert merged(
        [ReplicaStats(2, 10.0, True), ReplicaStats(1, 30.0, True), ReplicaStats(0, 0.0, True), None]
    ) == ReplicaStats(3, 30.0, True)
    assert not merged([ReplicaStats(0, 0.0, True), ReplicaStats(0, 0.0, False)]).admitted
    assert merged([None]) == ReplicaStats(0, 0.0, True)


def test_a_mailbox_keeps_the_latest() -> None:
    def standing(name: str, version: int, gone: bool = False) -> ReplicaStatus:
        return ReplicaStatus(name, None, version, admitted=True, suspect=False, expected=True, gone=gone)

    mailbox = StatusQueue()
    for version in range(3):
        mailbox.put(standing("a", version))
    mailbox.put(standing("b", 7))
    taken = mailbox.take()
    assert taken is not None
    assert taken[0] == mailbox.number == 4
    assert [(one.name, one.version) for one in taken[1]] == [("a", 2), ("b", 7)]
    mailbox.put(standing("b", 8, gone=True))
    assert mailbox.latest("b") is None
    mailbox.again()
    taken = mailbox.take()
    assert taken is not None
    assert sorted(one.name for one in taken[1]) == ["a", "b"], "that one has gone is not forgotten"
    mailbox.again()
    taken = mailbox.take()
    assert taken is not None
    assert [one.name for one in taken[1]] == ["a"], "a new reader is told of what stands"
    mailbox.close()
    assert mailbox.take() is None
