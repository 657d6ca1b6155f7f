"""The steps of one staged weight update on trainer rank 0, after all ranks have written their tensors.

    prepare          the transport does what can be done before generation is paused
    pause            every server pauses generation
    begin            every server opens a weight update session
    open             new servers: every TP rank opens what the transport needs, for example the arena
    load             every server's TP ranks load, while the transport delivers the tensors
    end              every server closes the session
    verify reports   every TP rank has loaded all tensors and has read the bytes that are staged
    publish          the new weight version and its checksums are recorded
    resume           every server continues generation

With several nodes, the last two steps wait until the other nodes have verified their reports, see `staged`.

A failure up to `open` has no effect. After a failure up to `verify reports` the served weights are torn, and the
update is tried once more with the staged tensors; a third time if servers that fail repeatedly are left out. If that
fails too, generation stays paused until an update of all tensors succeeds. When `resume` fails, the servers hold the
new weights, and their version counts.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

from verl_server.errors import ServerDiedError, ShutDownError, TornWeightsError, VerlServerError
from verl_server.types import Json
from verl_server.weights.layout import tensor_bytes
from verl_server.weights.manifest import Manifest
from verl_server.weights.transports.base import Sender, UpdateAttempt
from verl_server.weights.update.report_checks import require_opened, verify_reports
from verl_server.weights.update.request import ValidatedUpdate, result_message, torn_error
from verl_server.weights.update.servers import UpdatableServers
from verl_server.weights.update.staged_checksums import StagedChecksums

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StagedUpdate:
    """Tensors that are staged in the sender's arena, and the servers that have to load them."""

    servers: UpdatableServers
    sender: Sender
    validated: ValidatedUpdate
    names: Sequence[str]
    """Names of the tensors, in the order of the layout."""
    checksums: Sequence[int]
    """Checksum of each staged tensor. Empty without verification."""
    manifest: Manifest
    """The model. An update of the whole model must write every parameter of the servers."""
    load_started: threading.Event = field(default_factory=threading.Event)
    """Event that is set when a server may hold a part of the update."""

    def new_attempt(self) -> UpdateAttempt:
        """An attempt at this update, on the servers that take part now."""
        return UpdateAttempt(uuid.uuid4().hex, self.names, self.validated.verify, self.servers.members)


def commit(
    servers: UpdatableServers,
    sender: Sender,
    names: Sequence[str],
    checksums: Sequence[int],
    validated: ValidatedUpdate,
    publish: Callable[[Sequence[int]], None],
    *,
    manifest: Manifest,
    weights_are_torn: bool,
    load_started: threading.Event | None = None,
    resumes: bool = True,
) -> tuple[Json, UpdateAttempt, VerlServerError | None]:
    """Make the servers load the tensors `names`, in the order of the layout, which are staged in the sender's arena.

    `checksums`: checksum of each of them, empty without verification. `publish` is called with the checksums when all
    servers have verified the update and before generation continues. `manifest`: that of the model.
    `weights_are_torn`: the servers held torn weights before the update. `load_started` is set when a server may hold a
    part of the update. `resumes`: whether generation continues after a success. If False, the caller calls
    `resume_published`.

    Returns the result as JSON, the successful attempt, and the error if generation does not continue on all servers.
    Raises TornWeightsError when a server may hold a part of the update. An exception that is not of this library, for
    example KeyboardInterrupt, is raised unchanged: the weights are torn if `load_started` is set. Generation continues
    only with whole weights: after a success, or when nothing was loaded and the weights were whole before.
    """
    load_started = load_started or threading.Event()
    update = StagedUpdate(servers, sender, validated, names, checksums, manifest, load_started)
    attempt = update.new_attempt()
    started = time.monotonic()
    try:
        if not attempt.members:  # all servers of a fleet are started again, and then get the weights by `replay`
            publish(checksums)
        else:
            with prepare(update, attempt):
                started = time.monotonic()
                servers.pause(validated.pause_mode)
                load_and_verify(update, attempt)
                publish(checksums)
    except TornWeightsError as error:
        leave_out_failed(servers, error)
        logger.warning("%s The update is tried once more.", error.message)
        attempt = retry(update, publish)
    except (ServerDiedError, ShutDownError):
        raise
    except BaseException as error:
        if not weights_are_torn and not load_started.is_set():
            resume_unchanged(servers)
        elif isinstance(error, VerlServerError):
            raise torn_error(error, validated) from error
        raise
    resume_error = resume_published(servers, validated) if resumes else None
    return _result_of(update, load_s=time.monotonic() - started), attempt, resume_error


def retry(update: StagedUpdate, publish: Callable[[Sequence[int]], None]) -> UpdateAttempt:
    """Repeat an update that left torn weights, on the servers that are left. They are still paused.

    If a part of the servers fails again, and these servers are left out, the update is repeated once more. Raises
    TornWeightsError if it fails.
    """
    try:
        return repeat(update, publish)
    except TornWeightsError as error:
        if not leave_out_failed(update.servers, error):
            raise
        logger.warning("%s The update is tried without the servers %s.", error.message, error.details["servers"])
    return repeat(update, publish)


def repeat(update: StagedUpdate, publish: Callable[[Sequence[int]], None]) -> UpdateAttempt:
    """One more attempt at an update that left torn weights. Raises TornWeightsError if it fails."""
    attempt = update.new_attempt()
    if not attempt.members:
        publish(update.checksums)
        return attempt
    try:
        with prepare(update, attempt):
            load_and_verify(update, attempt)
            publish(update.checksums)
    except (TornWeightsError, ServerDiedError, ShutDownError):
        raise
    except VerlServerError as error:
        raise torn_error(error, update.validated) from error
    return attempt


def leave_out_failed(servers: UpdatableServers, error: VerlServerError) -> bool:
    """Tell the servers which of them caused the `error` of an attempt. Returns whether some are left out from now on.

    `details["servers"]` of the error has their names as members of the update.
    """
    failed = error.details.get("servers", ())
    return bool(failed) and servers.leave_out(failed, error)


def replay(
    servers: UpdatableServers,
    sender: Sender,
    validated: ValidatedUpdate,
    published_checksums: Mapping[str, int],
    manifest: Manifest,
) -> None:
    """Load the published weights into servers that missed their update, if the same weights are still staged.

    `published_checksums`: checksum of each published tensor. Raises VerlServerError; the servers then hold no whole
    weights.
    """
    names = sender.layout.in_order(list(published_checksums))
    expected = [published_checksums[name] for name in names]
    update = StagedUpdate(servers, sender, validated, names, expected, manifest)
    attempt = UpdateAttempt(uuid.uuid4().hex, names, verify=True, members=servers.members)
    with prepare(update, attempt):
        servers.pause(validated.pause_mode)
        load_and_verify(update, attempt)
        # A trainer rank may stage the next update in the meantime, perhaps just behind the reader.
        if StagedChecksums(sender.arena.tensor, sender.settings.checksum).values(names) != expected:
            raise VerlServerError("the staged weights have changed while a server loaded the published weights")
        servers.resume()


# -- the steps ---------------------------------------------------------------------------------------


def resume_published(servers: UpdatableServers, validated: ValidatedUpdate) -> VerlServerError | None:
    """Continue generation after an update was published. Returns the error if that fails twice."""
    return _resume_twice(servers, f"after weight version {validated.weight_version}")


def resume_unchanged(servers: UpdatableServers) -> None:
    """Continue generation after an update that has loaded nothing. Errors are logged: that of the update is raised."""
    if error := _resume_twice(servers, "after an update that has loaded nothing"):
        logger.error("generation does not continue: %s", error)


def _resume_twice(servers: UpdatableServers, when: str) -> VerlServerError | None:
    try:
        servers.resume()
    except VerlServerError as first:
        logger.warning("generation does not continue %s: %s", when, first)
        try:
            servers.resume()
        except VerlServerError as second:
            return second
    return None


@contextmanager
def prepare(update: StagedUpdate, attempt: UpdateAttempt) -> Iterator[None]:
    """Prepare the transport before the body, and finish the attempt after the body in any case."""
    sender = update.sender
    try:
        sender.prepare(attempt)
        yield
    except BaseException:
        sender.finish(attempt, succeeded=False)
        raise
    sender.finish(attempt, succeeded=True)


def load_and_verify(update: StagedUpdate, attempt: UpdateAttempt) -> None:
    """The steps begin, open, load, end and verify reports. Raises TornWeightsError for any failure after `open`.

    With several servers of which some can be left out, for any failure after `begin`.
    """
    servers, sender, validated = update.servers, update.sender, update.validated
    messages = [
        {
            "transport": sender.name,
            "update_id": attempt.id,
            "verify": attempt.verify,
            "checksum": sender.settings.checksum,
            **sender.loader_message(attempt, member_index),
        }
        for member_index in range(len(attempt.members))
    ]
    try:
        with open_session(servers):
            if servers.can_leave_out and len(attempt.members) > 1:  # it is repeated, without those that fail again
                update.load_started.set()
            if attempt.members != sender.opened_members:
                servers.load([{**message, "opens_only": True} for message in messages], None, flush_cache=False)
                opening = replace(attempt, verify=False)
                ranks = sender.receiving_ranks(opening)
                require_opened(sender.name, [(rank, sender.read_report(opening, rank.receiver)) for rank in ranks])
                sender.opened_members = attempt.members
            update.load_started.set()
            load_and_deliver(update, attempt, messages)
        verify_reports(
            sender.reports(attempt),
            attempt,
            update.checksums,
            is_whole=update.manifest.is_whole(update.names),
            optional=update.manifest.not_required,
        )
    except (ServerDiedError, ShutDownError):
        raise  # no server is left whose weights could be torn
    except VerlServerError as error:
        if not update.load_started.is_set():
            raise
        raise torn_error(error, validated) from error


@contextmanager
def open_session(servers: UpdatableServers) -> Iterator[None]:
    """A weight update session on every server during the body, or on none if a server refuses it."""
    try:
        servers.begin_weight_update()
        yield
    except BaseException:
        with suppress(VerlServerError):
            servers.end_weight_update()
        raise
    servers.end_weight_update()  # a session that an interrupt leaves open here is closed by the next `begin`


def load_and_deliver(update: StagedUpdate, attempt: UpdateAttempt, messages: Sequence[Json]) -> None:
    """Make the servers load while the transport delivers, and wait for both.

    The servers' error is raised rather than that of the transport, because it says more than an error that follows from
    it. An interrupt such as KeyboardInterrupt is raised unchanged. Whenever it comes, the servers learn of it before
    anything waits for them.
    """
    servers, validated = update.servers, update.validated
    loading: Future[None] | None = None
    pool = ThreadPoolExecutor(1, thread_name_prefix="verl-server-load")
    try:
        loading = started = pool.submit(servers.load, messages, validated.weight_version, validated.flush_cache)
        update.sender.deliver(attempt, is_loading=lambda: not started.done())
        loading.result()
    except BaseException as error:
        update.sender.abandon(error)
        if loading is not None and isinstance(error, Exception):
            loading.result()
        raise
    finally:
        pool.shutdown()


def _result_of(update: StagedUpdate, load_s: float) -> Json:
    slots = update.sender.layout.slots
    return result_message(
        weight_version=update.validated.weight_version,
        num_tensors=len(update.names),
        num_bytes=sum(tensor_bytes(slots[name].spec) for name in update.names),
        num_missing=update.manifest.num_missing(update.names),
        transport=update.sender.name,
        staging_bytes=update.sender.layout.size_bytes,
        sent_bytes=update.sender.sent_bytes,
        load_s=load_s,
    )
