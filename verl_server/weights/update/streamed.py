"""Updates by way of two buckets: the servers load the first tensors while the ranks bring the next ones.

Open (all agree, the servers are paused and begin) -> every rank fills its part of the buckets -> end (the
servers have loaded) -> every rank that leads a lane looks at its reports -> confirm (generation goes on). What
fails once it is open leaves the weights torn: nothing is kept to try again with.
"""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from verl_server.errors import (
    BadInputError,
    ServerDiedError,
    ShutDownError,
    TornWeightsError,
    UnsupportedError,
    VerlServerError,
    from_wire,
    to_wire,
)
from verl_server.types import Member, WeightUpdateResult
from verl_server.weights.buckets import LET_GO_S, Reader, Writer
from verl_server.weights.checksum import checksum_of
from verl_server.weights.double_buffer import COUNT, SUMMING, DoubleBuffer, DoubleBufferLayout
from verl_server.weights.layout import MAX_TP_RANKS, nbytes
from verl_server.weights.manifest import Manifest
from verl_server.weights.transports.base import Update, receivers
from verl_server.weights.update.commit import check_reports, session
from verl_server.weights.update.shard_writer import ShardWriter, check_same_names, digest
from verl_server.weights.update.tensor_source import Source
from verl_server.weights.update.updater import (
    Ranks,
    UpdateOptions,
    ValidatedUpdate,
    WeightUpdater,
    result_wire,
    torn_by,
    torn_wire,
)

if TYPE_CHECKING:
    import torch

Json = dict[str, Any]


@dataclass(frozen=True)
class Seat:
    """This rank's place at a lane."""

    lane: DoubleBuffer
    index: int
    """Its number among the lane's writers."""
    writers: int
    """How many there are."""
    leads: bool
    """It writes what is whole, takes checksums and reads the reports."""
    number: int
    """The lane's number: it serves the TP ranks whose number is this one modulo `lanes`."""


class StreamedUpdater(WeightUpdater):
    """`seat`: None on a rank that only takes part in gathering. `described`: how servers open each lane.

    `writers`: the ranks, by number in the trainer's world, that write the same lane as this one.
    """

    def __init__(
        self,
        ranks: Ranks,
        manifest: Manifest,
        version: int,
        transport: str,
        layout: DoubleBufferLayout,
        seat: Seat | None,
        writers: frozenset[int],
        described: Sequence[Json],
    ) -> None:
        super().__init__(ranks, manifest, version)
        self._transport, self._layout, self._seat, self._writers = transport, layout, seat, writers
        self._described = described
        self._members: Sequence[Member] = ()
        self._number = 0
        self._open_session: ExitStack | None = None
        self._loading: Future[None] | None = None
        self._sums: Future[list[int]] | None = None

    def tensors(self) -> dict[str, torch.Tensor]:
        raise UnsupportedError(f"with the transport {self._transport!r} there is no memory that holds the whole model")

    def close(self) -> None:
        if self._seat is not None:
            self._seat.lane.close()

    # -- the steps ----------------------------------------------------------------------------------

    def _update(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], options: UpdateOptions, refusal: VerlServerError | None
    ) -> WeightUpdateResult:
        call = self.group.next_call_id("update_weights")
        source, failure = (
            (None, refusal)
            if refusal
            else self.reading(lambda: Source(named_tensors, self.manifest, options.check_finite))
        )
        opened = self.group.agree(
            call,
            lambda brought: self._open(brought, options),
            contribution=None if source is None else source.bring,
            error=failure,
            action_timeout_s=4 * self.ranks.timeout_s,
        )
        assert source is not None
        started = time.monotonic()
        validated, self._number = ValidatedUpdate(**opened["order"]), opened["number"]
        self._members = [Member(name, tp_size) for name, tp_size in opened["members"]]
        try:
            return self._stream(call, source, validated, opened["update_id"], options.check_finite, started)
        except BaseException as error:
            self._fail("the trainer gave the update up")  # whoever still waits for this rank
            if self.torn is None and not isinstance(error, (ServerDiedError, ShutDownError)):
                cause = (
                    error if isinstance(error, VerlServerError) else VerlServerError(f"{type(error).__name__}: {error}")
                )
                self.torn = torn_by(cause, validated)
            raise
        finally:
            with suppress(VerlServerError):
                self._close_session()
            if self._sums is not None:
                wait([self._sums], LET_GO_S)  # it uses the lane

    def _stream(
        self, call: str, source: Source, validated: ValidatedUpdate, update_id: str, finite: bool, started: float
    ) -> WeightUpdateResult:
        names, error, sharded = self._fill(source, validated, finite)
        gather_s = time.monotonic() - started
        bring = {
            "tensors": len(names),
            "digest": digest(names),
            "sharded": sharded,
            "error": None if error is None else to_wire(error),
        }
        action_s = 2 * self.ranks.timeout_s
        self._require_whole(
            self.group.agree(
                f"{call}/load",
                lambda brought: self._end(brought, validated),
                contribution=bring,
                action_timeout_s=action_s,
            )
        )
        problem = self._problem(update_id, names, validated)
        wire = self.group.agree(
            f"{call}/confirm",
            lambda brought: self._confirm(brought, validated, names, started),
            contribution={"error": None if problem is None else to_wire(problem)},
            action_timeout_s=action_s,
        )
        self._require_whole(wire)
        self.settled(wire)
        return dataclasses.replace(WeightUpdateResult(**wire["result"]), gather_s=gather_s)

    def _require_whole(self, wire: Json) -> None:
        """Raises the TornWeightsError that rank 0 tells of."""
        if wire["torn"] is not None:
            self.settled(wire)
            assert self.torn is not None
            raise self.torn

    def _open(self, brought: list[Json], options: UpdateOptions) -> Json:
        """On rank 0: everything that can be refused is; then the servers are held and begin to load."""
        validated = self.validate(options)
        names = brought[0]["names"]
        if not brought[0]["tensors"]:
            raise BadInputError("named_tensors is empty on rank 0: there is nothing to push")
        if all(one["checked"] for one in brought):
            check_same_names(brought, all_bring=len(self._described) > 1)
        if names is not None:
            self.require_whole_if_torn(names)
        backend = self.ranks.servers
        assert backend is not None
        members = backend.members
        sizes = [member.tp_size for member in members]
        if sum(sizes) > MAX_TP_RANKS:
            raise UnsupportedError(f"{sum(sizes)} TP ranks are more than {MAX_TP_RANKS} for one trainer")
        number, update_id = self._number + 1, uuid.uuid4().hex
        try:
            backend.pause(validated.pause_mode)
            backend.begin_weight_update()
        except VerlServerError:
            if self.torn is None:
                with suppress(VerlServerError):
                    backend.resume()
            raise
        wire = {
            "transport": self._transport,
            "update_id": update_id,
            "verify": validated.verify,
            "number": number,
            "lanes": list(self._described),
            "layout": asdict(self._layout),
            "writers": 1 if self._seat is None else self._seat.writers,
            "timeout_s": self.ranks.timeout_s,
        }
        wires = [{**wire, "first": sum(sizes[:server])} for server in range(len(sizes))]
        self._open_session = ExitStack()
        self._loading = self._open_session.enter_context(session(backend, wires, validated))
        return {
            "order": asdict(validated),
            "update_id": update_id,
            "number": number,
            "members": [[member.name, member.tp_size] for member in members],
        }

    def _fill(
        self, source: Source, validated: ValidatedUpdate, finite: bool
    ) -> tuple[list[str], VerlServerError | None, bool]:
        """Bring this rank's part of all tensors. Whatever fails is told to the servers, and to all ranks by the end.

        When a lane fails the tensors are still read to their end: other ranks may be gathering them with this one.
        """
        deadline = time.monotonic() + self.ranks.timeout_s
        seat = self._seat
        writer = None if seat is None else self._writer(seat, validated)
        self._sums = None if seat is None or not (seat.leads and validated.verify) else self._summing(seat, deadline)
        lane_errors: list[VerlServerError] = []

        def place(name: str) -> torch.Tensor | None:
            if writer is None or lane_errors:
                return None
            try:
                return writer.place(name, self.manifest.tensors[name], deadline)
            except VerlServerError as error:
                lane_errors.append(error)
                return None

        def write() -> list[str]:
            written = stage.write(source.pairs)
            for error in lane_errors:
                raise error
            if writer is not None:
                writer.end()
            return written

        stage = ShardWriter(
            place,
            self.manifest,
            self._writers,
            self.group,
            self.ranks.timeout_s,
            finite=finite and not source.checked,
            leads=seat is not None and seat.leads,
        )
        names, error = self.reading(write)
        if error is not None:
            self._fail(error.message)
        return names or [], error, stage.sharded

    def _end(self, brought: list[Json], validated: ValidatedUpdate) -> Json:
        """On rank 0: wait until the servers have loaded."""
        errors = [from_wire(one["error"]) for one in brought if one["error"] is not None]
        try:
            try:
                for error in errors:
                    raise error
                check_same_names(brought, all_bring=len(self._described) > 1)
            except VerlServerError as error:
                self._fail(error.message)
                raise
            finally:
                self._close_session()
        except (ServerDiedError, ShutDownError):
            raise  # there is no server left whose weights could be torn
        except VerlServerError as error:
            return self._torn_wire(errors[0] if errors else error, validated)
        return {"torn": None}

    def _problem(self, update_id: str, names: list[str], validated: ValidatedUpdate) -> VerlServerError | None:
        """On a rank that leads a lane: what is wrong with what the lane's TP ranks report, or None."""
        seat = self._seat
        if seat is None or not seat.leads:
            return None
        update = Update(update_id, names, validated.verify, self._members)
        count = len(names) if validated.verify else 0
        reports = {who: seat.lane.reports.read(number, update_id, count) for number, who in self._readers(seat)}
        try:
            expected = [] if self._sums is None else self._expected(self._sums)
            check_reports(reports, update, expected, len(self.manifest.tensors))
        except VerlServerError as error:
            return error
        return None

    def _expected(self, sums: Future[list[int]]) -> list[int]:
        try:
            return sums.result(self.ranks.timeout_s)
        except VerlServerError:
            raise
        except Exception as error:
            raise VerlServerError(f"checksums could not be taken: {type(error).__name__}: {error}") from error

    def _confirm(self, brought: list[Json], validated: ValidatedUpdate, names: list[str], started: float) -> Json:
        """On rank 0: every lane's reports are good, so generation goes on."""
        backend, specs = self.ranks.servers, self.manifest.tensors
        assert backend is not None
        try:
            for one in brought:
                if one["error"] is not None:
                    raise from_wire(one["error"])
            self.require_whole_if_torn(names)
            backend.published(int(validated.weight_version), len(names) == len(specs), None)
            backend.resume()
        except (ServerDiedError, ShutDownError):
            raise
        except VerlServerError as error:
            return self._torn_wire(error, validated)
        result = result_wire(
            weight_version=validated.weight_version,
            tensors=len(names),
            bytes=sum(nbytes(specs[name]) for name in names),
            missing=len(specs) - len(names),
            transport=self._transport,
            staging_bytes=len(self._described) * COUNT * self._layout.bucket_bytes,
            sent_bytes=0,
            load_s=time.monotonic() - started,
        )
        return {"version": int(validated.weight_version), "torn": None, "result": result}

    # -- parts --------------------------------------------------------------------------------------

    def _readers(self, seat: Seat) -> Iterator[tuple[int, str]]:
        """The TP ranks that this lane serves: number, and who it is for people."""
        for number, _, who in receivers(self._members):
            if number % len(self._described) == seat.number:
                yield number, who

    def _writer(self, seat: Seat, validated: ValidatedUpdate) -> Writer:
        readers = [number for number, _ in self._readers(seat)]
        if validated.verify:
            readers.append(SUMMING)
        return Writer(seat.lane, self._number, seat.index, seat.leads, readers, self._check)

    def _summing(self, seat: Seat, deadline: float) -> Future[list[int]]:
        """The checksums of what passes through the lane, taken as one more reader."""
        reader = Reader(seat.lane, self._number, SUMMING, seat.writers, self._check_group, deadline)
        turns = seat.lane.turns(self._number)

        def sums() -> list[int]:
            try:
                return [checksum_of(tensor) for _, tensor in reader.tensors()]
            except Exception as error:
                turns.fail(f"checksums could not be taken: {error}")
                raise

        pool = ThreadPoolExecutor(1, thread_name_prefix="verl-server-checksums")
        try:
            return pool.submit(sums)
        finally:
            pool.shutdown(wait=False)

    def _check_group(self) -> None:
        if self.group.failure is not None:
            raise self.group.failure

    def _check(self) -> None:
        self._check_group()
        if self._loading is not None and self._loading.done():
            raise VerlServerError("the servers stopped loading before all tensors had come")

    def _fail(self, words: str) -> None:
        if self._seat is not None:
            self._seat.lane.turns(self._number).fail(words)

    def _close_session(self) -> None:
        stack, self._open_session = self._open_session, None
        self._loading = None
        if stack is not None:
            stack.close()

    def _torn_wire(self, error: VerlServerError, validated: ValidatedUpdate) -> Json:
        torn = error if isinstance(error, TornWeightsError) else torn_by(error, validated)
        return {"version": int(validated.weight_version), "torn": torn_wire(torn)}
