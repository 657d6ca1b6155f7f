"""The parts of the messages about one call of all trainer ranks: arrival, outcome and missing ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_server.errors import DeadlineError, PeerError, VerlServerError, from_wire, to_wire
from verl_server.types import Json


def arrival_message(contribution: Json | None, error: VerlServerError | None, *, blocks: bool) -> Json:
    """What a rank sends when it arrives at a call. `blocks`: its main thread waits in the call."""
    arrival = {"contribution": contribution or {}} if error is None else {"error": to_wire(error)}
    return {**arrival, "blocks": blocks}


def result_of(outcome: Json) -> Any:
    """The result of a call. Raises the call's error."""
    if "error" in outcome:
        raise from_wire(outcome["error"])
    return outcome["result"]


def operation_of(call_id: str) -> str:
    """The name of the operation that a call id counts."""
    return call_id.partition("#")[0]


def call_number(call_id: str) -> int:
    """Which call of its operation a call id names, from 1. An update has further ids, for example `NAME#1/load`."""
    return int(call_id.partition("#")[2].partition("/")[0])


SAME_CALLS = "all ranks of an engine must make the same calls in the same order"


def not_arrived(missing: Sequence[int], call_id: str, timeout_s: float, elsewhere: Mapping[int, str]) -> PeerError:
    """The error about the ranks that are `missing` at a call. `elsewhere`: the calls in which some of them wait."""
    waits = "".join(f"; rank {rank} waits in {operation_of(call)}" for rank, call in elsewhere.items())
    return PeerError(
        f"rank(s) {list(missing)} did not arrive at {operation_of(call_id)} within {timeout_s:g} s{waits}; "
        f"{SAME_CALLS}",
        ranks=list(missing),
        operation=call_id,
    )


def different_calls(calls: Mapping[int, str]) -> PeerError:
    """The error about ranks that wait for each other in different calls. `calls`: the call of each of them."""
    waits = " and ".join(f"rank {rank} waits in {operation_of(call)}" for rank, call in sorted(calls.items()))
    return PeerError(f"{waits}: {SAME_CALLS}", ranks=sorted(calls))


def left_alone(waiting: int, name: str, done: int, count: int) -> PeerError:
    """The error about a rank that gathers the tensor `name` with a rank that has gathered its `count` tensors."""
    return PeerError(
        f"trainer rank {waiting} gathers {name!r} with rank {done}, but named_tensors of rank {done} ended before it, "
        f"after {count} gathered tensors: all ranks must push the same DTensors in the same order. A collective was "
        "left, and the trainer's process group cannot be used any more",
        ranks=[done],
    )


def not_finished(call_id: str, timeout_s: float) -> DeadlineError:
    """The error about a call whose outcome rank 0 did not send in time."""
    return DeadlineError(
        f"the other ranks did not finish {operation_of(call_id)} within {timeout_s:g} s",
        operation=call_id,
        seconds=timeout_s,
    )
