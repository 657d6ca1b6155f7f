"""Messages between the trainer ranks of one engine: order, ranks that do not read, failures and the end."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest
from helpers import wait_until

from verl_server import errors
from verl_server.engine.verl_engine import RankGeneration
from verl_server.ranks.channel import (
    Channel,
    connect_ranks,
    connect_to_rank_0,
    receive_frame,
    send_frame,
    wait_until_all_sent,
)
from verl_server.ranks.coordinator import PendingCalls, RankCoordinator, to_peer_wire


def connected_despite(strangers: Callable[[tuple[str, int], bytes], Any], timeout_s: float = 5.0) -> float:
    """Seconds until rank 0 has connected with ranks 1 and 2, while `strangers(address, key)` disturbs it."""
    started = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        calls: list[Any] = []

        def connect(address: tuple[str, int], key: bytes) -> list[Any]:
            return [strangers(address, key), *(connect_to_rank_0(address, key, rank, timeout_s) for rank in (1, 2))]

        def broadcast(value: Any) -> Any:
            calls.append(pool.submit(connect, (value[0], value[1]), bytes.fromhex(value[2])))

        channels = connect_ranks(0, 3, broadcast, False, timeout_s)
        seconds = time.monotonic() - started
        assert sorted(channels) == [1, 2]
        for channel in [*channels.values(), *calls[0].result()[1:]]:
            channel.close()
        return seconds


def test_a_channel_accepts_only_ranks_that_know_the_key() -> None:
    def strangers(address: tuple[str, int], key: bytes) -> Any:
        for wrong_key, rank in ((b"wrong", 1), (key, 7)):  # there is no rank 7
            with pytest.raises(ConnectionError):
                connect_to_rank_0(address, wrong_key, rank, 0.3)

    assert connected_despite(strangers) < 3.0


def test_a_rank_whose_handshake_is_lost_connects_again() -> None:
    """Rank 1 reaches rank 0 through a host that drops its first connection after the challenge."""
    ranks: list[Channel] = []

    def drop_one(address: tuple[str, int], key: bytes) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(5.0)
            pool = ThreadPoolExecutor(1)
            call = pool.submit(connect_to_rank_0, listener.getsockname(), key, 1, 5.0)
            for is_second in (False, True):
                outer, inner = listener.accept()[0], socket.create_connection(address)
                outer.sendall(inner.recv(1024))
                answer = outer.recv(1024)
                if is_second:
                    inner.sendall(answer)
                    outer.sendall(inner.recv(1024))
                    ranks.append(call.result(5.0))
                outer.close()
                inner.close()
            pool.shutdown()

    assert connected_despite(drop_one) < 4.0
    ranks[0].close()


def test_strangers_neither_delay_the_ranks_nor_take_memory() -> None:
    """One announces a frame of 3 GiB, others send nothing, more than the files that rank 0 keeps open for them."""

    def strangers(address: tuple[str, int], _: bytes) -> list[socket.socket]:
        silent = [socket.create_connection(address) for _ in range(20)]
        silent[0].sendall((3 * 2**30).to_bytes(8, "big") + b"x" * 2**16)
        return silent

    assert connected_despite(strangers) < 3.0


def test_a_stranger_that_sends_slowly_does_not_hold_rank_0_beyond_its_deadline() -> None:
    ended = threading.Event()

    def drip(address: tuple[str, int]) -> None:
        with contextlib.suppress(OSError), socket.create_connection(address) as connection:
            while not ended.wait(0.2):
                connection.sendall(b"\0")

    def broadcast(value: Any) -> Any:
        threading.Thread(target=drip, args=((value[0], value[1]),), daemon=True).start()
        return value

    started = time.monotonic()
    with pytest.raises(errors.PeerError, match=r"rank\(s\) \[1\] did not connect"):
        connect_ranks(0, 2, broadcast, False, 1.0)
    ended.set()
    assert time.monotonic() - started < 2.5


def coordinator_of_rank_0(other_ranks: int) -> tuple[RankCoordinator, list[socket.socket]]:
    """Rank 0's coordinator, and the sockets of the other ranks."""
    channels, sockets = {}, []
    with socket.create_server(("127.0.0.1", 0)) as server:
        for rank in range(1, other_ranks + 1):
            sockets.append(socket.create_connection(server.getsockname()))
            channels[rank] = Channel(server.accept()[0], rank)
    return RankCoordinator(0, other_ranks + 1, channels, 5.0), sockets


def received(connection: socket.socket) -> Any:
    frame = receive_frame(connection)
    return None if frame is None else orjson.loads(frame)


def test_a_message_to_all_ranks_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoding a reply of 20,000 tokens takes milliseconds, and there may be a hundred ranks."""
    encoded: list[Any] = []

    def dumps(message: Any, **options: Any) -> bytes:
        encoded.append(message)
        return orjson.dumps(message, **options)

    counting = SimpleNamespace(dumps=dumps, loads=orjson.loads, OPT_SERIALIZE_NUMPY=orjson.OPT_SERIALIZE_NUMPY)
    monkeypatch.setattr("verl_server.ranks.channel.orjson", counting)
    coordinator, sockets = coordinator_of_rank_0(3)
    coordinator.publish_event("stream#1", {"output_ids": [1, 2]})
    coordinator.send_outcome("generate#1", {"result": 3})
    messages: list[Any] = [
        {"call_id": "stream#1", "event": {"output_ids": [1, 2]}},
        {"call_id": "generate#1", "outcome": {"result": 3}},
    ]
    assert [[received(one), received(one)] for one in sockets] == [messages] * 3
    RankCoordinator(0, 1, {}, 5.0).publish_event("stream#1", {})  # without other ranks, nothing is encoded
    assert encoded == messages
    coordinator.close()
    assert [received(one) for one in sockets] == [{"closing": True}] * 3


def test_a_small_message_is_in_the_kernel_when_send_returns() -> None:
    """A process that ends at once has sent it, also a child of multiprocessing, which calls no `atexit` functions."""
    left, right = connected_sockets()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(10.0)  # no other thread runs between the two calls
    try:
        assert Channel(left, 1).send({"outcome": 1})
        assert right.recv(1000, socket.MSG_DONTWAIT)[8:] == b'{"outcome":1}'
    finally:
        sys.setswitchinterval(interval)
        left.close()
        right.close()


def test_a_rank_that_does_not_read_stops_neither_the_event_loop_of_rank_0_nor_other_ranks() -> None:
    """The outcomes are larger than the buffers of the connection."""
    coordinator, (rank_1, rank_2) = coordinator_of_rank_0(2)
    outcomes: list[Any] = ["x" * 2**24, errors.BadInputError("too long"), "short"]
    longest_gap_s = 0.0

    async def action(outcome: Any, _: list[Any]) -> Any:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def watch() -> None:
        nonlocal longest_gap_s
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.01)
            longest_gap_s = max(longest_gap_s, time.monotonic() - before)

    async def run() -> None:
        watching = asyncio.create_task(watch())
        for number, outcome in enumerate(outcomes, 1):
            for rank in (rank_1, rank_2):
                arrive(rank, f"async_generate#{number}")
            call = coordinator.agree_async(f"async_generate#{number}", functools.partial(action, outcome))
            with contextlib.suppress(errors.BadInputError):
                assert await asyncio.wait_for(call, 5.0) == outcome
        coordinator.publish_event("stream#1", {"output_ids": [1]})
        watching.cancel()

    with ThreadPoolExecutor(1) as pool:  # rank 1 reads nothing until rank 2 has received everything
        reading = pool.submit(lambda: [received(rank_2) for _ in range(4)])
        asyncio.run(run())
        messages = reading.result(10.0)
    assert longest_gap_s < 3.0
    assert [message.get("outcome", {}).get("result") for message in messages] == [outcomes[0], None, "short", None]
    assert messages[1]["outcome"]["error"]["message"] == "too long"
    assert [received(rank_1) for _ in range(4)] == messages
    coordinator.close()


def test_messages_to_a_rank_that_reads_slowly_arrive_complete_and_in_order() -> None:
    left, right = connected_sockets()
    channel = Channel(left, 1)
    sizes = [1, 2**22, 3, 2**20, *range(50), 2**23, 7]
    received_sizes: list[int] = []

    def read() -> None:
        while (message := received(right)) is not None:
            time.sleep(0.005)
            received_sizes.append(len(message["text"]))

    reading = threading.Thread(target=read)
    reading.start()
    for size in sizes:
        assert channel.send({"text": "x" * size})
        time.sleep(0.002)
    wait_until_all_sent([channel])
    channel.close()
    reading.join(10.0)
    assert received_sizes == sizes
    assert not channel.send({"text": ""})


def test_an_engine_that_was_shut_down_twice_does_not_delay_the_end_of_the_process() -> None:
    left, right = connected_sockets()
    channel = Channel(left, 1)
    channel.close()
    channel.close()
    started = time.monotonic()
    wait_until_all_sent([channel])
    assert time.monotonic() - started < 5.0
    right.close()


def test_a_rank_that_does_not_read_delays_neither_a_failure_nor_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_server.ranks.channel.STALL_S", 1.0)
    coordinator, (rank_1, rank_2) = coordinator_of_rank_0(2)
    coordinator.publish_event("stream#1", {"text": "x" * 2**24})
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(lambda: (received(rank_2), received(rank_2)))
        started = time.monotonic()
        coordinator.fail_all(errors.ServerDiedError("the server ended"))
        assert time.monotonic() - started < 1.0
        assert reading.result(3.0)[1]["failure"]["message"] == "the server ended"
    coordinator.close()
    assert time.monotonic() - started < 4.0
    assert received(rank_2) == {"closing": True}
    deadline = time.monotonic() + 5.0
    while any(one.name == "verl-server-rank-1-send" for one in threading.enumerate()):
        assert time.monotonic() < deadline, "the thread that sends to rank 1 has not ended"
        time.sleep(0.01)
    rank_1.close()


def test_the_last_outcome_reaches_a_rank_that_reads_slowly() -> None:
    """Rank 0 shuts its engine down at once, as at the end of a script."""
    coordinator, (rank_1,) = coordinator_of_rank_0(1)
    arrive(rank_1, "generate#1")
    result = "x" * 2**24
    with ThreadPoolExecutor(1) as pool:
        assert coordinator.agree("generate#1", lambda _: result) == result
        closing = pool.submit(coordinator.close)
        time.sleep(2.0)
        assert received(rank_1)["outcome"] == {"result": result}
        assert received(rank_1) == {"closing": True}
        closing.result(3.0)


def test_a_process_that_stood_still_sends_its_last_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example while C code held the lock of the interpreter. The other rank reads all the time."""
    monkeypatch.setattr("verl_server.ranks.channel.STALL_S", 1.0)
    left, right = connected_sockets()
    channel = Channel(left, 1)
    channel.send({"text": "x" * 2**24})
    time.sleep(1.5)  # nothing is read, so there is no progress
    with ThreadPoolExecutor(1) as pool:
        message = pool.submit(received, right)
        wait_until_all_sent([channel])
        channel.close()
        assert message.result(3.0) == {"text": "x" * 2**24}


LAST_WORDS = """
import socket, sys
from verl_server.ranks.channel import Channel
channel = Channel(socket.create_connection(("127.0.0.1", int(sys.argv[1]))), 1)
channel.send({"text": "x" * 2**24})
"""


def test_messages_are_sent_before_the_process_ends() -> None:
    """A program may end without a shutdown of its engine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        process = subprocess.Popen([sys.executable, "-c", LAST_WORDS, str(server.getsockname()[1])])
        connection = server.accept()[0]
    time.sleep(2.0)
    assert received(connection) == {"text": "x" * 2**24}
    assert process.wait(10.0) == 0
    connection.close()


FORK = """
import os
pid = os.fork()
if pid:
    os.waitpid(pid, 0)
    print("the child has ended", flush=True)
"""


def test_a_forked_child_does_not_wait_for_the_messages_of_its_parent() -> None:
    """It has no thread that sends them. Its end came after `STALL_S` seconds."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [sys.executable, "-c", LAST_WORDS + FORK, str(server.getsockname()[1])]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        connection = server.accept()[0]
    started = time.monotonic()
    assert process.stdout is not None
    assert process.stdout.readline() == b"the child has ended\n"
    assert time.monotonic() - started < 5.0
    assert received(connection) == {"text": "x" * 2**24}, "the parent sends its message after that"
    assert process.wait(10.0) == 0
    process.stdout.close()
    connection.close()


def test_all_ranks_receive_an_outcome_although_the_first_of_them_shuts_down_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    coordinator, sockets = coordinator_of_rank_0(3)
    others = [RankCoordinator(rank, 4, {0: Channel(one, 0)}, 5.0) for rank, one in enumerate(sockets, 1)]
    send_encoded = Channel.send_encoded

    def send_slowly(channel: Channel, encoded: bytes) -> bool:
        if channel.peer > 1 and b"outcome" in encoded:
            time.sleep(0.2)
        return send_encoded(channel, encoded)

    def call(other: RankCoordinator) -> Any:
        try:
            return other.agree("generate#1", lambda _: None, action_timeout_s=5.0)
        finally:
            other.close()

    monkeypatch.setattr(Channel, "send_encoded", send_slowly)
    with ThreadPoolExecutor(len(others)) as pool:
        calls = pool.map(call, others)
        assert coordinator.agree("generate#1", lambda _: "reply", action_timeout_s=5.0) == "reply"
        assert list(calls) == ["reply"] * len(others)
    coordinator.close()


def test_the_ranks_name_the_rank_that_shut_down() -> None:
    for _ in range(10):
        coordinator, sockets = coordinator_of_rank_0(6)
        others = [RankCoordinator(rank, 7, {0: Channel(one, 0)}, 5.0) for rank, one in enumerate(sockets, 1)]
        with ThreadPoolExecutor(len(others)) as pool:
            calls = [
                pool.submit(error_of, functools.partial(one.agree, "generate#1", lambda _: None)) for one in others
            ]
            time.sleep(0.05)
            coordinator.close()
            found = [call.result(5.0) for call in calls]
        assert [error.details["ranks"] for error in found] == [[0]] * len(others), found
        for one in others:
            one.close()


def test_each_call_of_failed_ranks_raises_an_error_of_its_own() -> None:
    """Python adds the frames of each caller to an error: a shared one keeps all of them in memory."""
    coordinator, _ = coordinator_of_rank_0(1)
    alone = RankCoordinator(0, 1, {}, 5.0)
    failure, found = errors.ServerDiedError("the server ended", exit_code=-9), []

    def call(make_call: Callable[[], Any]) -> None:
        with pytest.raises(errors.ServerDiedError, match="the server ended") as caught:
            make_call()
        found.append(caught.value)

    waiting = threading.Thread(target=call, args=(lambda: coordinator.agree("update#1", lambda _: None),))
    waiting.start()
    time.sleep(0.1)
    for one in (coordinator, alone):
        one.fail_all(failure)
    waiting.join()
    for _ in range(2):
        call(coordinator.raise_failure)
        call(lambda: coordinator.agree("update#2", lambda _: None))
        call(lambda: alone.agree("update#1", lambda _: None))
    assert len({id(error) for error in (failure, *found)}) == 8
    assert all(error.details == {"exit_code": -9} for error in found)
    assert failure.__traceback__ is None


def arrive(rank: socket.socket, call_id: str) -> None:
    send_frame(rank, orjson.dumps({"call_id": call_id, "arrival": {"contribution": {}, "blocks": False}}))


def two_coordinators(arrival_timeout_s: float = 5.0) -> tuple[RankCoordinator, RankCoordinator]:
    """The connected coordinators of two ranks."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = socket.create_connection(server.getsockname())
        first = RankCoordinator(0, 2, {1: Channel(server.accept()[0], 1)}, arrival_timeout_s)
        return first, RankCoordinator(1, 2, {0: Channel(connection, 0)}, arrival_timeout_s)


def error_of(call: Callable[[], Any]) -> errors.VerlServerError:
    with pytest.raises(errors.VerlServerError) as caught:
        call()
    return caught.value


@pytest.mark.parametrize("arrives_first", [True, False])
def test_other_ranks_learn_that_rank_0_cancelled_a_call_before_all_ranks_had_arrived(arrives_first: bool) -> None:
    coordinator, (rank_1, rank_2) = coordinator_of_rank_0(2)
    rank_1.settimeout(3.0)
    expected = to_peer_wire(asyncio.CancelledError(), 0)

    async def action(_: list[Any]) -> None:
        raise AssertionError("rank 2 has not arrived")

    async def run() -> None:
        if arrives_first:
            arrive(rank_1, "async_generate#1")
        call = asyncio.create_task(coordinator.agree_async("async_generate#1", action))
        await asyncio.sleep(0.2)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    started = time.monotonic()
    asyncio.run(run())  # waits for the threads that wait for the other ranks
    assert time.monotonic() - started < 3.0, "no thread waits for rank 2 any more"
    if not arrives_first:
        arrive(rank_1, "async_generate#1")
    assert received(rank_1)["outcome"] == {"error": expected}
    arrive(rank_2, "async_generate#1")
    assert received(rank_2)["outcome"] == {"error": expected}
    coordinator.close()


def test_a_rank_learns_of_each_call_that_rank_0_cancelled_before_it_made_it() -> None:
    """Rank 0 cancels thousands of calls at once, and the other rank makes them later."""
    first, second = two_coordinators(arrival_timeout_s=30.0)
    ids = [f"async_generate#{number}" for number in range(1, 2501)]

    async def nothing(_: Any) -> None:
        return None

    async def cancel_all() -> None:
        calls = [asyncio.create_task(first.agree_async(call, nothing)) for call in ids]
        await asyncio.sleep(0.2)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    async def make_all() -> list[Any]:
        calls = [second.agree_async(call, nothing) for call in ids]
        return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10.0)

    asyncio.run(cancel_all())
    first.announce_error("last", errors.PeerError("the last message"))
    wait_until(lambda: second._calls.first_error("last") is not None, 10.0, "a message is missing")
    assert {type(outcome) for outcome in asyncio.run(make_all())} == {errors.PeerError}
    assert not first._calls._early_errors
    assert not second._calls._early_errors
    for coordinator in (first, second):
        coordinator.close()


def test_a_rank_that_is_stopped_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of a stopped process answers, so the connection stays open."""
    monkeypatch.setattr("verl_server.ranks.channel.SEND_TIMEOUT_S", 3.0)
    coordinator, (rank_1,) = coordinator_of_rank_0(1)  # rank 1 does not read
    arrive(rank_1, "generate#1")
    assert coordinator.agree("generate#1", lambda _: "x" * 2**25) == "x" * 2**25
    deadline = time.monotonic() + 20.0
    while coordinator.failure is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert isinstance(coordinator.failure, errors.PeerError)
    assert coordinator.failure.details["ranks"] == [1]
    coordinator.close()


def test_the_connections_of_ranks_notice_a_machine_that_is_gone() -> None:
    left, right = connected_sockets()
    channel = Channel(left, 1)
    assert left.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert left.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30
    channel.close()
    right.close()


def connected_sockets() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = socket.create_connection(server.getsockname())
        return server.accept()[0], connection


def test_an_outcome_is_ignored_when_the_call_was_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = PendingCalls(2)
    future = calls.expect_outcome("generate#1")
    future.cancel()
    monkeypatch.setattr(future, "done", lambda: False)  # the event loop cancels after this question
    calls.set_outcome("generate#1", {"result": None})
    arrivals = calls.add_own_arrival("generate#2", {})
    arrivals.complete.cancel()
    calls.add_arrival("generate#2", 1, {})


def test_a_call_that_was_cancelled_before_its_thread_arrives_ends() -> None:
    """It would occupy a thread of the event loop for ever."""
    first, second = two_coordinators(arrival_timeout_s=0.5)
    call_id = first.next_call_id("generate")
    first._leave(call_id, asyncio.CancelledError())  # as the event loop does; the thread of the call begins later
    thread = ThreadPoolExecutor(1).submit(first.agree, call_id, lambda _: None)
    try:
        with pytest.raises(concurrent.futures.CancelledError, match="generate#1 was cancelled"):
            thread.result(3.0)
    finally:
        first._calls.fail_all(errors.PeerError("the test ends"))
        first.close()
        second.close()


def test_a_receiving_thread_that_fails_is_a_disconnect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    left, right = connected_sockets()
    disconnected = threading.Event()
    Channel(left, 1).listen(lambda *_: None, lambda _: disconnected.set())
    send_frame(right, b"no JSON")
    assert disconnected.wait(3.0)
    right.settimeout(3.0)
    assert right.recv(1) == b"", "the other rank learns of it"


@pytest.mark.parametrize("is_async", [False, True])
def test_the_other_ranks_learn_of_a_result_that_cannot_be_sent(is_async: bool) -> None:
    first, second = two_coordinators()

    def call(coordinator: RankCoordinator) -> Any:
        if not is_async:
            return coordinator.agree("generate#1", lambda _: 2**70)

        async def action(_: list[Any]) -> int:
            return 2**70

        return asyncio.run(coordinator.agree_async("generate#1", action))

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(call, second)
        with pytest.raises(TypeError, match="64-bit"):
            call(first)
        assert "trainer rank 0 failed: " in error_of(lambda: other.result(3.0)).message
    first.close()


def test_a_rank_names_rank_0_when_rank_0_does_not_make_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for generation without a deadline. The call fails on all ranks, also on rank 0 when it arrives."""
    monkeypatch.setattr("verl_server.ranks.coordinator.OUTCOME_SLACK_S", 0.2)
    first, second = two_coordinators(0.5)
    no_backend = cast(Any, None)
    ranks = [RankGeneration(one, no_backend, lambda: None, None) for one in (first, second)]

    async def read_stream() -> list[Any]:
        return [event async for event in ranks[1].async_stream({})]

    calls: dict[str, Callable[[], Any]] = {
        "generate": lambda: ranks[1].generate({}),
        "async_generate": lambda: asyncio.run(ranks[1].async_generate({})),
        "stream": lambda: list(ranks[1].stream({})),
        "async_stream": lambda: asyncio.run(read_stream()),
    }
    for name, call in calls.items():
        error = error_of(call)
        assert isinstance(error, errors.PeerError)
        assert error.message.startswith(f"rank(s) [0] did not arrive at {name} within 0.5 s")
    assert "rank(s) [0] did not arrive at generate" in error_of(lambda: ranks[0].generate({})).message
    # Rank 0 has made the call: the other rank waits for the action.
    call_id = first.next_call_id("generate")
    second.next_call_id("generate")

    def action(_: list[Any]) -> str:
        time.sleep(1.5)
        return "reply"

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(second.agree, call_id, action)
        assert first.agree(call_id, action) == other.result(3.0) == "reply"
    first.close()


def both(first: Callable[[], Any], second: Callable[[], Any]) -> tuple[float, list[str]]:
    """Seconds until both calls have ended, the first in the main thread; and their errors."""
    started = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(error_of, second)
        found = [error_of(first), other.result(10.0)]
    return time.monotonic() - started, [f"{type(error).__name__}: {error.message}" for error in found]


IN_MAIN_THREAD = """
import socket, sys
from verl_server.ranks.channel import Channel
from verl_server.ranks.coordinator import RankCoordinator
other = RankCoordinator(1, 2, {0: Channel(socket.create_connection(("127.0.0.1", int(sys.argv[1]))), 0)}, 30.0)
try:
    other.agree("update_weights_from_tensor#1", lambda _: None, action_timeout_s=30.0)
except Exception as error:
    print(type(error).__name__, error)
"""


def test_ranks_in_different_calls_learn_it_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [sys.executable, "-c", IN_MAIN_THREAD, str(server.getsockname()[1])]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        first = RankCoordinator(0, 2, {1: Channel(server.accept()[0], 1)}, 30.0)
    started = time.monotonic()
    error = error_of(lambda: first.agree("generate#1", lambda _: None))
    assert time.monotonic() - started < 3.0
    waits = "rank 0 waits in generate and rank 1 waits in update_weights_from_tensor: all ranks of an engine must"
    assert error.message.startswith(waits)
    assert process.communicate(timeout=10.0)[0].startswith(f"PeerError {waits}")
    first.close()


def test_the_deadline_names_the_call_in_which_another_rank_waits() -> None:
    """Calls of other threads may come later, so they are not an error at once."""
    first, second = two_coordinators(1.0)
    seconds, found = both(
        lambda: first.agree("generate#1", lambda _: None),
        lambda: second.agree("flush_cache#1", lambda _: None, action_timeout_s=0.0),
    )
    assert 0.9 < seconds < 8.0
    assert found[0].startswith("PeerError: rank(s) [1] did not arrive at generate within 1 s"), found
    first.close()


@pytest.mark.parametrize("is_stream", [False, True])
def test_ranks_with_different_requests_get_an_error_instead_of_the_reply_to_rank_0(is_stream: bool) -> None:
    first, second = two_coordinators()
    backend = SimpleNamespace(
        generate=lambda **request: request, generate_stream=lambda **request: iter([request]), async_generate=None
    )
    ranks = [RankGeneration(one, lambda _: cast(Any, backend), lambda: None, 5.0) for one in (first, second)]

    def call(rank: int, request: Any) -> Any:
        return list(ranks[rank].stream(request)) if is_stream else ranks[rank].generate(request)

    def replies(mine: Any, other: Any) -> list[Any]:
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(call, 1, other)
            return [call(0, mine), future.result(5.0)]

    request = {"prompt": "a", "sampling_params": {"max_new_tokens": 2}}
    for other in (request, {**request, "rid": "mine"}, {"sampling_params": {"max_new_tokens": 9}}, {}):
        first_reply, second_reply = replies(request, other)
        assert first_reply == second_reply
    differing: list[dict[str, Any]] = [
        {"prompt": "b"},
        {**request, "sampling_params": {"max_new_tokens": 3}},
        {"input_ids": [1]},
    ]
    for other in differing:
        _, found = both(functools.partial(call, 0, request), functools.partial(call, 1, other))
        assert found[0] == found[1]
        assert found[0].startswith("BadInputError: rank 1 passed another request to generate than rank 0")
    first.close()
