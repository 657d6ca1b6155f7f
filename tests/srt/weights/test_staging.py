"""Failures while weights travel to servers that serve: who is named, who goes on, and what ends each wait."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from model_servers import ModelServers, push, staged_updater

from verl_server.errors import DeadlineError, TornWeightsError, UnsupportedError, VerlServerError
from verl_server.types import Json, ServerInfo
from verl_server.weights.arena import Report
from verl_server.weights.transports import disk, distributed

WEIGHTS = {"a": torch.ones(1000)}


class Fleet(ModelServers):
    """Two servers. The second one never takes part in a transfer: `fault` is called with its message instead."""

    can_leave_out = True

    def __init__(self, fault: Callable[[Json], None]) -> None:
        super().__init__({"a": 1000})
        self.members = [ServerInfo("first", 1), ServerInfo("second", 1)]
        self.fault = fault
        self.blamed: list[list[str]] = []
        self.lost: list[str] = []

    def find_lost(self) -> Collection[str]:
        return {member.name for member in self.members if member.name in self.lost}

    def leave_out(self, failed: Collection[str], error: VerlServerError) -> bool:
        """The second failure of a server leaves it out."""
        self.blamed.append(sorted(failed))
        is_left_out = len(self.blamed) == 2 and len(failed) < len(self.members)
        if is_left_out:
            self.members = [member for member in self.members if member.name not in failed]
        return is_left_out

    def load(self, messages: Sequence[Json], weight_version: int | None, flush_cache: bool) -> None:
        for member, message in zip(self.members, messages, strict=True):
            if member.name == "first":
                super().load([message], weight_version, flush_cache)
            else:
                self.fault(message)


def refuse(message: Json) -> None:
    """What a TP rank does that has no memory for the mirror."""
    group, update_id = message["group_name"], message["update_id"]
    store = distributed.connect_to_store(*message["store_address"])
    report = Report(distributed.staged_id(update_id), ok=False, error="VerlServerError: no memory for the mirror")
    key = distributed.report_key(group, report.update_id, message["first_receiver"])
    store.set(key, json.dumps({"report": asdict(report), "checksums": []}))
    store.set(distributed.failure_key(group, update_id), "")


def impatient(monkeypatch: pytest.MonkeyPatch, timeout_s: float = 2.0) -> None:
    """Let the trainer wait for receivers for `timeout_s` only."""
    waiting = functools.partial(distributed.wait_for_receivers, timeout_s=timeout_s)
    monkeypatch.setattr(distributed, "wait_for_receivers", waiting)


@pytest.mark.parametrize("is_torn", [False, True])
@pytest.mark.parametrize("fault", [refuse, lambda message: None], ids=["refuses", "does not arrive"])
def test_a_server_that_cannot_be_reached_is_left_out(
    fault: Callable[[Json], None], is_torn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the other one, which waits for it. Also when the weights were torn before."""
    impatient(monkeypatch)
    servers = Fleet(fault)
    updater = staged_updater("distributed", servers, {"a": 1000})
    if is_torn:
        updater.torn = TornWeightsError("an earlier update failed")
    assert push(updater, WEIGHTS).weight_version == 1
    assert servers.blamed == [["second"], ["second"]]
    assert torch.equal(servers.models[0].tensors["a"], WEIGHTS["a"])
    updater.close()


def test_a_server_that_ends_while_the_weights_travel_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer would wait for its report until the deadline, 20 s here."""
    servers = Fleet(lambda message: servers.lost.append("second"))
    updater = staged_updater("distributed", servers, {"a": 1000})
    started = time.monotonic()
    assert push(updater, WEIGHTS).weight_version == 1
    assert time.monotonic() - started < 10.0
    assert servers.blamed == [["second"], ["second"]]
    updater.close()


def test_a_machine_without_the_folder_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(disk, "OPENING_TIMEOUT_S", 0.5)
    servers = Fleet(lambda message: None)
    updater = staged_updater("disk", servers, {"a": 1000}, folder=str(tmp_path))
    assert push(updater, WEIGHTS).weight_version == 1
    assert servers.blamed == [["second"], ["second"]]
    assert not list(tmp_path.iterdir())
    updater.close()


def test_a_report_that_cannot_be_written_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The disk of the server's machine is full, for example."""

    def fail(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(disk, "OPENING_TIMEOUT_S", 0.5)
    servers = ModelServers({"a": 1000})
    updater = staged_updater("disk", servers, {"a": 1000}, folder=str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(disk.Receiver, "_write_report", fail)
        started = time.monotonic()
        with pytest.raises(UnsupportedError, match="has written no report"):
            push(updater, WEIGHTS)
        assert time.monotonic() - started < 10.0
    assert push(updater, WEIGHTS).weight_version == 1
    assert not list(tmp_path.iterdir())
    updater.close()


@pytest.mark.parametrize("transport", ["distributed", "delta", "disk"])
def test_servers_of_an_earlier_trainer_are_not_continued_before_they_have_whole_weights(
    transport: str, tmp_path: Path
) -> None:
    """It may have left torn weights, and then it has left the servers paused. A trainer that knows them lets them
    serve while the weights travel."""
    servers = ModelServers({"a": 1000})
    updater = staged_updater(transport, servers, {"a": 1000}, folder=str(tmp_path))
    session = ["begin", "end"]
    push(updater, WEIGHTS)
    assert servers.steps == ["pause", *session, *session, "published", "resume"]
    servers.steps.clear()
    push(updater, WEIGHTS)
    assert servers.steps == ["pause", *session, "resume", "pause", *session, "published", "resume"]
    updater.close()


def test_an_interrupt_at_the_end_of_the_short_pause_leaves_no_server_paused() -> None:
    servers = ModelServers({"a": 1000})
    updater = staged_updater("distributed", servers, {"a": 1000})
    push(updater, WEIGHTS)
    servers.steps.clear()
    resume, calls = servers.resume, 0

    def interrupted() -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise KeyboardInterrupt
        resume()

    servers.resume = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        push(updater, WEIGHTS)
    assert servers.steps == ["pause", "begin", "end", "resume"]
    assert updater.find_torn() is None
    assert push(updater, WEIGHTS).weight_version == 2
    updater.close()


def test_a_receiver_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    impatient(monkeypatch)
    servers = Fleet(lambda message: None)
    servers.leave_out = lambda failed, error: False  # type: ignore[method-assign]
    updater = staged_updater("distributed", servers, {"a": 1000})
    with pytest.raises(DeadlineError, match=r"receivers \[1\] of 2 did not join") as raised:
        push(updater, WEIGHTS)
    assert raised.value.details["servers"] == ["second"]
    updater.close()
