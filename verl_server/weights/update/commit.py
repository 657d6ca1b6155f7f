"""The protocol of one weight update, on rank 0, once everything is staged.

Prepare -> pause -> begin -> load (while the transport delivers) -> end -> look at what every TP rank of every
server reports -> continue. Until the load begins a failure does no harm. After that the served weights are
torn when it fails, it is tried once more with what is staged, and then nothing is generated until a whole
update has landed.
"""

from __future__ import annotations

import dataclasses
import logging
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

from verl_server.errors import ServerDiedError, ShutDownError, TornWeightsError, VerlServerError
from verl_server.weights.arena import Arena
from verl_server.weights.layout import nbytes
from verl_server.weights.reports import Received
from verl_server.weights.transports.base import Sender, Update, in_layout_order
from verl_server.weights.update.servers import UpdatableServers
from verl_server.weights.update.updater import ValidatedUpdate, result_wire, torn_by

logger = logging.getLogger(__name__)

Json = dict[str, Any]


def commit(
    backend: UpdatableServers,
    sender: Sender,
    names: Sequence[str],
    validated: ValidatedUpdate,
    torn: bool,
    publish: Callable[[Sequence[int]], None],
) -> tuple[Json, Update]:
    """Make the servers take what is staged for `names`. `torn`: whether the served weights are torn before.

    `publish` is called with the checksums of `names` when all servers have verified, before generation goes on.

    Raises TornWeightsError when a server may hold parts of the update. It goes on only with whole weights:
    after a success, or when nothing was loaded and the weights were not torn before.
    """
    slots = sender.layout.slots
    update = Update(uuid.uuid4().hex, in_layout_order(sender.layout, names), validated.verify, backend.members)
    sums = checksums(sender.arena, update)
    started = time.monotonic()
    try:
        with _prepared(sender, update):
            started = time.monotonic()
            backend.pause(validated.pause_mode)
            _take(backend, sender, update, validated, sums)
            publish(sums)
            backend.resume()
    except TornWeightsError as error:
        logger.warning("%s Trying once more.", error.message)
        update = _once_more(backend, sender, update, validated, sums, publish)
    except (ServerDiedError, ShutDownError):
        raise
    except VerlServerError as error:  # no session was opened
        if torn:
            raise torn_by(error, validated) from error
        with suppress(VerlServerError):
            backend.resume()
        raise
    result = result_wire(
        weight_version=validated.weight_version,
        tensors=len(names),
        bytes=sum(nbytes(slots[name].spec) for name in names),
        missing=len(slots) - len(names),
        transport=sender.name,
        staging_bytes=sender.layout.size,
        sent_bytes=sender.sent_bytes,
        load_s=time.monotonic() - started,
    )
    return result, update


@contextmanager
def _prepared(sender: Sender, update: Update) -> Iterator[None]:
    """Prepare an update before the body and settle it after it, whatever happens."""
    try:
        sender.prepare(update)
        yield
    except BaseException:
        sender.settle(update, whole=False)
        raise
    sender.settle(update, whole=True)


def replay(backend: UpdatableServers, sender: Sender, validated: ValidatedUpdate, sums: Mapping[str, int]) -> None:
    """Bring servers that were not there to what was published, if that is still what is staged.

    `sums`: the published checksum of each tensor. Raises VerlServerError; then these servers hold nothing whole.
    """
    names = in_layout_order(sender.layout, list(sums))
    update = Update(uuid.uuid4().hex, names, True, backend.members)
    with _prepared(sender, update):
        backend.pause(validated.pause_mode)
        expected = [sums[name] for name in names]
        _take(backend, sender, update, validated, expected)
        if checksums(sender.arena, update) != expected:  # a rank stages the next update, perhaps just behind the reader
            raise VerlServerError("what is staged has changed while a server caught up")
        backend.resume()


def _once_more(
    backend: UpdatableServers,
    sender: Sender,
    update: Update,
    validated: ValidatedUpdate,
    sums: Sequence[int],
    publish: Callable[[Sequence[int]], None],
) -> Update:
    """The same again, from the arena, to the servers that are left; they are paused."""
    update = dataclasses.replace(update, id=uuid.uuid4().hex, members=backend.members)
    try:
        with _prepared(sender, update):
            _take(backend, sender, update, validated, sums)
            publish(sums)
            backend.resume()
    except (TornWeightsError, ServerDiedError, ShutDownError):
        raise
    except VerlServerError as error:
        raise torn_by(error, validated) from error
    return update


def _take(
    backend: UpdatableServers, sender: Sender, update: Update, validated: ValidatedUpdate, sums: Sequence[int]
) -> None:
    """One session: begin, load, end, look at the reports. TornWeightsError for any failure once it has begun.

    `sums`: what is staged. Every TP rank must have read the same.
    """
    wires = [
        {"transport": sender.name, "update_id": update.id, "verify": update.verify, **sender.wire(update, server)}
        for server in range(len(update.members))
    ]
    backend.begin_weight_update()
    try:
        with session(backend, wires, validated) as loading:
            sender.deliver(update, loading=lambda: not loading.done())
        check_reports(sender.reports(update), update, sums, len(sender.layout.slots))
    except (ServerDiedError, ShutDownError):
        raise  # there is no server left whose weights could be torn
    except VerlServerError as error:
        raise torn_by(error, validated) from error


@contextmanager
def session(backend: UpdatableServers, wires: Sequence[Json], validated: ValidatedUpdate) -> Iterator[Future[None]]:
    """The session is open. The servers load what `wires` tell them during the body; it ends when they have.

    Raises their error rather than the body's.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="verl-server-load") as pool:
        loading = pool.submit(backend.load, wires, validated.weight_version, validated.flush_cache)
        try:
            yield loading
        finally:
            try:
                loading.result()  # a server's own words say more than a broken transport's
            finally:
                backend.end_weight_update()


def checksums(arena: Arena, update: Update) -> list[int]:
    """Of what is staged, for the servers' to be compared with."""
    return [arena.checksum(name) for name in update.names] if update.verify else []


def check_reports(reports: Mapping[str, Received | None], update: Update, sums: Sequence[int], slots: int) -> None:
    """Every TP rank must say that it loaded this update, and have read what was staged. Raises VerlServerError."""
    for who, received in reports.items():
        if received is None:
            raise VerlServerError(
                f"{who} did not report on the update: it could not reach the staged weights; the server's log says why"
            )
        report = received.report
        if not report.ok:
            raise VerlServerError(f"{who} could not load the weights: {report.error}", log_tail=report.trace)
        if report.tensors != len(update.names):
            raise VerlServerError(f"{who} took {report.tensors} of the update's {len(update.names)} tensors")
        if not update.verify:
            continue
        wrong = [name for name, ours, theirs in zip(update.names, sums, received.sums, strict=True) if ours != theirs]
        if wrong:
            raise VerlServerError(
                f"{who} read {len(wrong)} tensors that differ from what was staged, {wrong[0]!r} first: "
                "were the weights written while they were pushed?"
            )
        if report.unwritten_count and len(update.names) == slots:
            raise VerlServerError(
                f"{who} did not write {report.unwritten_count} of its parameters in a whole update, "
                f"{report.unwritten[0]!r} among them; its model class passes over some names (verify=False lets it)"
            )
