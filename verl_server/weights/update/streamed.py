"""Updates through pairs of buckets: the servers load the first tensors while the ranks write the next ones.

    open      all ranks agree; rank 0 pauses the servers and begins the session; TP ranks that have not done it yet
              open the buckets; rank 0 starts the loaders
    fill      every rank writes its part of the tensors into the buckets
    end       rank 0 waits until the servers have loaded, and ends the session
    verify    the leader of each pair of buckets checks the reports of its TP ranks
    confirm   rank 0 publishes the version and resumes generation

A failure after `open` leaves the weights torn: no copy of the tensors is kept for a second attempt.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass

import torch
from pydantic import TypeAdapter

from verl_server.errors import ServerDiedError, ShutDownError, UnsupportedError, VerlServerError, from_wire, to_wire
from verl_server.types import Json, ServerInfo, TensorSpec, WeightUpdateResult
from verl_server.weights.arena import Checksums, choose_algorithm
from verl_server.weights.buckets import (
    CHECKSUM_READER,
    NUM_BUCKETS,
    RECLAIM_TIMEOUT_S,
    BucketReader,
    Buckets,
    BucketsLayout,
    BucketWriter,
)
from verl_server.weights.device import StagingCopies, accelerator, as_current
from verl_server.weights.manifest import Manifest
from verl_server.weights.transports.base import ReceivingRank, UpdateAttempt, receiving_ranks, require_few_receivers
from verl_server.weights.update.options import (
    Servers,
    UpdateOptions,
    UpdateOutcome,
    ValidatedUpdate,
    torn_error,
)
from verl_server.weights.update.source import (
    NamedTensors,
    ShardWriter,
    TensorSource,
    contribution_of,
    enter_meshes,
    require_same_names,
)
from verl_server.weights.update.staged import first_error, require_opened, verify_reports
from verl_server.weights.update.updater import (
    EngineRanks,
    WeightUpdater,
    leave_out_failed,
    open_session,
    resume_unchanged,
)

# -- Server session ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class OpenedUpdate:
    """A streamed update for which the servers are loading, as rank 0 tells it to all ranks."""

    validated: ValidatedUpdate
    update_id: str
    update_number: int
    """Number of the update through the buckets, from 1."""
    members: Sequence[ServerInfo]
    """The servers that load the update."""

    def attempt(self, names: Sequence[str] = ()) -> UpdateAttempt:
        """The update of the tensors `names`, in the order in which they are written."""
        return UpdateAttempt(self.update_id, names, self.validated.verify, self.members)


_OPENED_UPDATE = TypeAdapter(OpenedUpdate)


class ServerSession:
    """The weight update session of all servers during one streamed update.

    Raises UnsupportedError if the servers have more TP ranks than a pair of buckets serves.
    """

    def __init__(self, servers: Servers, opened: OpenedUpdate) -> None:
        self._servers, self.opened = servers, opened
        self._steps = ExitStack()
        """What `end` has to end: the session of the servers, and their loaders."""
        self._loading: Future[None] | None = None
        self.may_have_loaded = False
        """Whether a server may hold a part of the update."""
        self.paused_at = math.nan
        """Time of `time.monotonic` just before the servers were paused."""
        if not opened.members:
            raise ServerDiedError("no server runs now, and this transport does not keep the weights for later")
        require_few_receivers(opened.members)

    def open(self, weights_are_torn: bool, prepare: Callable[[], None], message: Json) -> None:
        """Pause generation, open the session, call `prepare` and start the loaders of all servers with `message`.

        `prepare` must not change the weights. The loaders run in a background thread until `end`. After an error before
        a loader was started, generation continues unless the weights were torn.
        """
        validated = self.opened.validated
        self.paused_at = time.monotonic()
        try:
            self._servers.pause(validated.pause_mode)
            self._steps.enter_context(open_session(self._servers))
            prepare()
            self.may_have_loaded = True
            pool = self._steps.enter_context(ThreadPoolExecutor(1, thread_name_prefix="verl-server-load"))
            self._loading = pool.submit(
                self._servers.load, self._messages(message), validated.weight_version, validated.flush_cache
            )
        except BaseException as error:  # also KeyboardInterrupt
            if not self.may_have_loaded:
                with suppress(VerlServerError):
                    self.end()
                if isinstance(error, VerlServerError):
                    leave_out_failed(self._servers, error)
                if not weights_are_torn:
                    resume_unchanged(self._servers)
            raise

    def call_loaders(self, message: Json) -> None:
        """Call the loaders of all servers with a message that changes no weights, and wait for them."""
        self._servers.load(self._messages(message), None, flush_cache=False)

    def _messages(self, message: Json) -> list[Json]:
        """The message for the loaders of each server."""
        attempt = self.opened.attempt()
        return [
            {**message, "first_receiver": first, "tp_size": member.tp_size}
            for first, member in zip(attempt.first_receivers, attempt.members, strict=False)
        ]

    def require_loading(self) -> None:
        """Raise VerlServerError if the servers are not loading any more."""
        if self._loading is not None and self._loading.done():
            raise VerlServerError("the servers stopped loading before they had received all tensors")

    def end(self) -> None:
        """Wait until the servers have loaded, and end the session. Raises the servers' error. Safe to call twice."""
        loading, self._loading = self._loading, None
        with self._steps:
            if loading is not None:
                loading.result()

    def torn_outcome(self, error: VerlServerError, cause: VerlServerError) -> UpdateOutcome:
        """The outcome of an update that failed with `error`. A server that fails repeatedly is left out of the next.

        `cause`: the error that the caller receives.
        """
        torn = torn_error(cause, self.opened.validated)
        if (failed := error.details.get("servers")) is not None:
            torn.details["servers"] = failed
        leave_out_failed(self._servers, torn)
        return UpdateOutcome(self.opened.validated.weight_version, torn=torn)


# -- Buckets ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankBuckets:
    """The buckets of all trainer ranks, and the part of this rank."""

    transport: str
    layout: BucketsLayout
    descriptions: Sequence[Json]
    """What a server needs to open each pair of buckets."""
    num_writers: int
    """Number of trainer ranks that write each pair of buckets."""
    timeout_s: float
    """Deadline of one update in seconds."""
    own: Buckets | None = None
    """The buckets that this rank writes. None for a rank that only takes part in gathering."""
    writer_index: int = 0
    """Number of this rank among the writers of its buckets."""
    is_lead_writer: bool = False
    """Whether this rank writes tensors that are not sharded, computes checksums, and reads the reports."""
    own_index: int = 0
    """Number of this rank's pair of buckets. It serves the TP ranks with this number modulo the number of pairs."""

    def loader_message(self, opened: OpenedUpdate) -> Json:
        """The message for the loaders of all servers."""
        return {
            "transport": self.transport,
            "update_id": opened.update_id,
            "verify": opened.validated.verify,
            "update_number": opened.update_number,
            "buckets": list(self.descriptions),
            "layout": asdict(self.layout),
            "num_writers": self.num_writers,
            "timeout_s": self.timeout_s,
            "checksum": choose_algorithm(),
        }

    def require_opened(self, opened: OpenedUpdate) -> None:
        """Raise UnsupportedError unless every TP rank has opened its buckets, after a message `opens_only`.

        A TP rank that cannot open it, for example because it does not see the GPU, is found before weights change.
        Rank 0 opens the buckets of all trainer ranks, because they contain the reports.
        """
        with ExitStack() as stack:
            buckets = [stack.enter_context(closing(self._open(rank))) for rank in range(len(self.descriptions))]
            require_opened(
                self.transport,
                (
                    (rank, buckets[rank.receiver % len(buckets)].reports.read(rank.receiver, opened.update_id, 0))
                    for rank in receiving_ranks(opened.members)
                ),
            )

    def _open(self, rank: int) -> Buckets:
        """The buckets of a trainer rank, opened on rank 0. Raises UnsupportedError."""
        try:
            return Buckets.open(self.descriptions[rank]["location"], self.layout)
        except OSError as error:
            raise UnsupportedError(
                f"rank 0 cannot open the staging memory of trainer rank {rank}: {error}. "
                f"The transport {self.transport!r} needs all trainer ranks on one machine"
            ) from error

    def receiving_ranks(self, members: Sequence[ServerInfo]) -> Iterator[ReceivingRank]:
        """The TP ranks of the servers that this rank's buckets serve."""
        for rank in receiving_ranks(members):
            if rank.receiver % len(self.descriptions) == self.own_index:
                yield rank

    def fail(self, update_number: int, message: str) -> None:
        """Make the readers and the other writers of this rank's buckets stop waiting in one update."""
        if self.own is not None:
            self.own.progress(update_number).fail(message)


class BucketFiller:
    """Fills this rank's buckets with its part of the update `opened`, and checks the reports.

    `require_ranks` raises when the trainer ranks cannot work together any more. `require_peers` raises in addition when
    the servers are not loading any more. `deadline` is a time of `time.monotonic`.
    """

    def __init__(
        self,
        buckets: RankBuckets,
        opened: OpenedUpdate,
        require_ranks: Callable[[], None],
        require_peers: Callable[[], None],
        deadline: float,
    ) -> None:
        assert buckets.own is not None
        self._buckets, self._own, self._opened, self._deadline = buckets, buckets.own, opened, deadline
        self.copies = StagingCopies(self._own.memory.pin)
        """Makes the copies into the memory that `reserve` returns."""
        readers = [rank.receiver for rank in buckets.receiving_ranks(opened.members)]
        if opened.validated.verify:
            readers.append(CHECKSUM_READER)
        self._writer = BucketWriter(
            self._own,
            opened.update_number,
            buckets.writer_index,
            buckets.is_lead_writer,
            readers,
            require_peers,
            self.copies.wait,
        )
        self._error: VerlServerError | None = None
        """Why the buckets could not be filled, or None."""
        self._checksums: Future[list[int]] | None = None
        if buckets.is_lead_writer and opened.validated.verify:
            self._checksums = self._start_checksums(require_ranks)

    def reserve(self, name: str, spec: TensorSpec) -> torch.Tensor | None:
        """Memory for the next tensor in a bucket. None if the buckets have failed; `finish` raises the error.

        The caller continues to read its tensors then, because other ranks may be gathering them together with this
        rank.
        """
        if self._error is None:
            try:
                return self._writer.reserve(name, spec, self._deadline)
            except VerlServerError as error:
                self._error = error
        return None

    def finish(self) -> None:
        """Hand the last bucket to the readers. Raises the error of an earlier `reserve`."""
        if self._error is not None:
            raise self._error
        self._writer.finish()

    def report_error(self, names: Sequence[str], manifest: Manifest, timeout_s: float) -> VerlServerError | None:
        """On the leader: what is wrong with the reports of the TP ranks that this rank's buckets serve, or None.

        `names`: the tensors in the order in which they were written. `timeout_s`: seconds to wait for the
        checksums.
        """
        if not self._buckets.is_lead_writer:
            return None
        attempt = self._opened.attempt(names)
        num_checksums = len(names) if attempt.verify else 0
        reports = {
            rank.label: self._own.reports.read(rank.receiver, attempt.id, num_checksums)
            for rank in self._buckets.receiving_ranks(attempt.members)
        }
        try:
            checksums = [] if self._checksums is None else self._checksums.result(timeout_s)
            is_whole = manifest.is_whole(names)
            verify_reports(reports, attempt, checksums, is_whole=is_whole, optional=manifest.not_required)
        except VerlServerError as error:
            return error
        except Exception as error:  # noqa: BLE001 - every rank has to arrive at the next step
            return VerlServerError(f"the checksums could not be compared: {type(error).__name__}: {error}")
        return None

    def close(self) -> None:
        """Wait for the thread that computes checksums, which uses the buckets."""
        if self._checksums is not None:
            wait([self._checksums], RECLAIM_TIMEOUT_S)

    def _start_checksums(self, require_ranks: Callable[[], None]) -> Future[list[int]]:
        """Start a thread that reads the buckets as one more reader and computes the checksum of each tensor."""
        number, num_writers = self._opened.update_number, self._buckets.num_writers
        reader = BucketReader(self._own, number, CHECKSUM_READER, num_writers, require_ranks, self._deadline)
        device = accelerator()
        checksums = Checksums(choose_algorithm(), device)

        def compute_checksums() -> list[int]:
            try:
                with as_current(device):
                    for _, tensor in reader.tensors():
                        checksums.add(tensor)
                        del tensor
                    return checksums.values()
            except Exception as error:
                self._buckets.fail(number, f"the checksums could not be computed: {error}")
                raise

        pool = ThreadPoolExecutor(1, thread_name_prefix="verl-server-checksums")
        try:
            return pool.submit(compute_checksums)
        finally:
            pool.shutdown(wait=False)


# -- Streamed ---------------------------------------------------------------------------------------


class StreamedUpdater(WeightUpdater):
    """The weight updater for transports that take tensors as they come.

    `writer_ranks`: global ranks that write the same buckets as this rank.
    """

    def __init__(
        self,
        ranks: EngineRanks,
        manifest: Manifest,
        weight_version: int,
        buckets: RankBuckets,
        writer_ranks: frozenset[int],
    ) -> None:
        super().__init__(ranks, manifest, weight_version)
        self._buckets, self._writer_ranks = buckets, writer_ranks
        self._own_bucket_ranks = range(len(buckets.descriptions) if len(buckets.descriptions) > 1 else 0)
        self._opened_members: Sequence[ServerInfo] = ()
        """The servers whose TP ranks have opened the buckets, on rank 0."""
        self._update_number = 0
        """Number of the last update through the buckets. Equal on all ranks."""
        self._filler: BucketFiller | None = None
        self._session: ServerSession | None = None
        """The servers' session during an update, on rank 0."""

    def staging_tensors(self) -> dict[str, torch.Tensor]:
        raise UnsupportedError(
            f"with the transport {self._buckets.transport!r} there is no memory that holds the whole model"
        )

    def close(self) -> None:
        if self._buckets.own is not None:
            self._buckets.own.close()

    # -- the steps on every rank --------------------------------------------------------------------

    def _update(
        self, named_tensors: NamedTensors, options: UpdateOptions, refusal: VerlServerError | None
    ) -> WeightUpdateResult:
        call_id = self.coordinator.next_call_id("update_weights_from_tensor")
        source, error = self.run_reading(lambda: self._read(named_tensors, options.check_finite, refusal))
        opened: OpenedUpdate | None = None
        try:
            message = self.coordinator.agree(
                call_id,
                lambda contributions: self._open(contributions, None if source is None else source.names, options),
                contribution=None if source is None else source.contribution,
                error=error,
                action_timeout_s=4 * self.ranks.timeout_s,
            )
            assert source is not None
            opened = _OPENED_UPDATE.validate_python(message)
            self._update_number = opened.update_number
            outcome, gather_s = self._fill_and_finish(call_id, source, opened, options.check_finite)
        except BaseException as failure:
            if opened is None and self._session is not None and self._session.may_have_loaded:
                opened = self._session.opened  # interrupted before the other ranks were told
            if opened is not None:
                self._mark_torn(failure, opened)
            raise
        finally:
            if self._session is not None:
                with suppress(VerlServerError):
                    self._session.end()
            if self._filler is not None:
                self._filler.close()
            self._session = self._filler = None
        return outcome.result_of_rank(gather_s)

    def _read(self, named_tensors: NamedTensors, check_finite: bool, refusal: VerlServerError | None) -> TensorSource:
        """Check the tensors. If the ranks of other engines have refused theirs, no server is paused."""
        if refusal is not None:
            raise refusal
        source = TensorSource(named_tensors, self.manifest, check_finite)
        if source.is_checked:
            enter_meshes(self.shared, source.pairs)
        return source

    def _mark_torn(self, error: BaseException, opened: OpenedUpdate) -> None:
        """Make everything that waits for this rank stop, and record that the served weights are torn."""
        self._update_number = opened.update_number
        self._stop_filling("the trainer abandoned the update")
        if self.torn is None and not isinstance(error, (ServerDiedError, ShutDownError)):
            self.torn = torn_error(error, opened.validated)

    def _stop_filling(self, message: str) -> None:
        """Make the servers and the other writers of this rank's buckets stop waiting for this rank."""
        self._buckets.fail(self._update_number, message)

    def _fill_and_finish(
        self, call_id: str, source: TensorSource, opened: OpenedUpdate, check_finite: bool
    ) -> tuple[UpdateOutcome, float]:
        """The steps after `open`. Returns the outcome, and the seconds that reading took. Raises TornWeightsError."""
        load_id, started = f"{call_id}/load", time.monotonic()
        names, has_shards, error = self._fill(load_id, source, opened, check_finite)
        gather_s = time.monotonic() - started
        self._agree_and_adopt(
            load_id,
            lambda contributions: self._end(contributions, opened),
            contribution_of(names, has_shards),
            error,
        )
        if self._filler is not None:
            error = self._filler.report_error(names, self.manifest, self.ranks.timeout_s)
        outcome = self._agree_and_adopt(
            f"{call_id}/confirm", lambda contributions: self._confirm(contributions, opened, names), {}, error
        )
        return outcome, gather_s

    def _agree_and_adopt(
        self,
        call_id: str,
        action: Callable[[list[Json]], UpdateOutcome],
        contribution: Json,
        error: VerlServerError | None,
    ) -> UpdateOutcome:
        """The outcome of a step that rank 0 makes when all ranks have arrived. Raises TornWeightsError.

        The `error` of a rank is a part of its contribution: rank 0 has to end the servers' session in any case.
        """
        message = self.coordinator.agree(
            call_id,
            lambda contributions: action(contributions).to_message(),
            contribution={**contribution, "error": None if error is None else to_wire(error)},
            action_timeout_s=2 * self.ranks.timeout_s,
        )
        outcome = UpdateOutcome.from_message(message)
        self.adopt(outcome)
        return outcome

    def _fill(
        self, load_id: str, source: TensorSource, opened: OpenedUpdate, check_finite: bool
    ) -> tuple[list[str], bool, VerlServerError | None]:
        """Write this rank's part of all tensors. Returns their names, whether there were shards, and the error if any.

        An error is passed to the servers at once, and to all ranks in the next step, the call `load_id`.
        """
        filler = None
        if self._buckets.own is not None:
            deadline = time.monotonic() + self.ranks.timeout_s
            filler = self._filler = BucketFiller(
                self._buckets, opened, self.coordinator.raise_failure, self._require_peers, deadline
            )

        def staging_tensor(name: str) -> torch.Tensor | None:
            return None if filler is None else filler.reserve(name, self.manifest.tensors[name])

        def write() -> list[str]:
            names = writer.write(source.pairs)
            if filler is not None:
                filler.finish()
            return names

        writer = ShardWriter(
            staging_tensor,
            self.manifest,
            self._writer_ranks,
            self.coordinator,
            load_id,
            gather_timeout_s=self.ranks.timeout_s,
            check_finite=check_finite and not source.is_checked,
            writes_whole_tensors=self._buckets.is_lead_writer,
            on_bad_tensor=lambda error: self._stop_filling(error.message),
            copies=None if filler is None else filler.copies,
            shared=self.shared,
        )
        names, error = self.run_writing(writer, write)
        if error is not None:
            self._stop_filling(error.message)
        return names or [], writer.has_shards, error

    def _require_peers(self) -> None:
        """Raise if the trainer ranks cannot work together any more, or, on rank 0, if the servers stopped loading."""
        self.coordinator.raise_failure()
        if self._session is not None:
            self._session.require_loading()

    # -- the steps on rank 0 ------------------------------------------------------------------------

    def _open(self, contributions: list[Json], names: Sequence[str] | None, options: UpdateOptions) -> Json:
        """Refuse what can be refused now. Then pause the servers and start their loaders."""
        validated = self.begin(contributions, names, options, self._own_bucket_ranks)
        opened = OpenedUpdate(validated, uuid.uuid4().hex, self._update_number + 1, self.servers.members)
        self._session = session = ServerSession(self.servers, opened)
        message = self._buckets.loader_message(opened)

        def open_buckets() -> None:
            """Open the buckets on servers that have not done it yet: an error here does not tear weights."""
            if opened.members != self._opened_members:
                session.call_loaders({**message, "opens_only": True})
                self._buckets.require_opened(opened)
                self._opened_members = opened.members

        session.open(self.find_torn() is not None, open_buckets, message)
        sent: Json = _OPENED_UPDATE.dump_python(opened, mode="json")
        return sent

    def _end(self, contributions: list[Json], opened: OpenedUpdate) -> UpdateOutcome:
        """Wait until the servers have loaded, and end their session. Returns a torn outcome if that failed."""
        assert self._session is not None
        errors = _errors_of(contributions)
        try:
            try:
                for error in errors:
                    raise error
                require_same_names(contributions, writers=self._own_bucket_ranks)
            except VerlServerError as error:
                self._stop_filling(error.message)
                raise
            finally:
                self._session.end()
        except (ServerDiedError, ShutDownError):
            raise  # no server is left whose weights could be torn
        except VerlServerError as error:
            return self._session.torn_outcome(error, cause=errors[0] if errors else error)
        return UpdateOutcome(opened.validated.weight_version)

    def _confirm(self, contributions: list[Json], opened: OpenedUpdate, names: list[str]) -> UpdateOutcome:
        """Publish the version and resume generation, if the reports of all buckets are good."""
        assert self._session is not None
        try:
            if errors := _errors_of(contributions):
                raise first_error(errors)
            self.require_loadable(names)
            missing_from = self.publish(opened.validated, names, None)
        except (ServerDiedError, ShutDownError):
            raise
        except VerlServerError as error:
            return self._session.torn_outcome(error, cause=error)
        return self.resume_with(
            opened.validated,
            names,
            missing_from,
            transport=self._buckets.transport,
            staging_bytes=len(self._buckets.descriptions) * NUM_BUCKETS * self._buckets.layout.bucket_bytes,
            sent_bytes=0,
            paused_at=self._session.paused_at,
        )


def _errors_of(contributions: Sequence[Json]) -> list[VerlServerError]:
    """The errors that ranks have contributed."""
    return [from_wire(item["error"]) for item in contributions if item["error"] is not None]
