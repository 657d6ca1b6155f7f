"""Updates through double buffers: the servers load the first tensors while the ranks write the next ones.

    open      all ranks agree; rank 0 pauses the servers and begins the session; TP ranks that have not done it yet
              open the double buffers; rank 0 starts the loaders
    fill      every rank writes its part of the tensors into the buckets
    end       rank 0 waits until the servers have loaded, and ends the session
    verify    the leader of each double buffer checks the reports of its TP ranks
    confirm   rank 0 publishes the version and resumes generation

A failure after `open` leaves the weights torn: no copy of the tensors is kept for a second attempt.
"""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from verl_server.errors import ServerDiedError, ShutDownError, UnsupportedError, VerlServerError, from_wire, to_wire
from verl_server.types import Json, ServerInfo, WeightUpdateResult
from verl_server.weights.double_buffer.layout import NUM_BUCKETS
from verl_server.weights.layout import tensor_bytes
from verl_server.weights.manifest import Manifest
from verl_server.weights.update.buffer_filler import BufferFiller, BufferRole
from verl_server.weights.update.contributions import contribution_of, require_same_names, require_tensors
from verl_server.weights.update.opening import DoubleBuffers
from verl_server.weights.update.report_checks import first_error
from verl_server.weights.update.request import (
    UpdateOptions,
    outcome_message,
    raise_resume_error,
    result_message,
    torn_error,
    validate_options,
)
from verl_server.weights.update.server_session import OpenedUpdate, ServerSession
from verl_server.weights.update.shard_writer import ShardWriter, enter_meshes
from verl_server.weights.update.tensor_source import NamedTensors, TensorSource
from verl_server.weights.update.updater import EngineRanks, WeightUpdater

if TYPE_CHECKING:
    import torch


class StreamedUpdater(WeightUpdater):
    """The weight updater for transports that take tensors as they come.

    `role`: this rank's role at a double buffer, or None for a rank that only takes part in gathering. `writer_ranks`:
    global ranks that write the same double buffer as this rank. `buffers`: the double buffers of all ranks.
    """

    def __init__(
        self,
        ranks: EngineRanks,
        manifest: Manifest,
        weight_version: int,
        buffers: DoubleBuffers,
        role: BufferRole | None,
        writer_ranks: frozenset[int],
    ) -> None:
        super().__init__(ranks, manifest, weight_version)
        self._buffers, self._role, self._writer_ranks = buffers, role, writer_ranks
        self._own_buffer_ranks = range(len(buffers.descriptions) if len(buffers.descriptions) > 1 else 0)
        self._opened_members: Sequence[ServerInfo] = ()
        """The servers whose TP ranks have opened the double buffers, on rank 0."""
        self._update_number = 0
        """Number of the last update through the double buffers. Equal on all ranks."""
        self._filler: BufferFiller | None = None
        self._session: ServerSession | None = None
        """The servers' session during an update, on rank 0."""

    def staging_tensors(self) -> dict[str, torch.Tensor]:
        raise UnsupportedError(
            f"with the transport {self._buffers.transport!r} there is no memory that holds the whole model"
        )

    def close(self) -> None:
        if self._role is not None:
            self._role.double_buffer.close()

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
                lambda contributions: self._open(contributions, options),
                contribution=None if source is None else source.contribution,
                error=error,
                action_timeout_s=4 * self.ranks.timeout_s,
            )
            assert source is not None
            opened = OpenedUpdate.from_message(message)
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
        raise_resume_error(outcome)
        return dataclasses.replace(WeightUpdateResult(**outcome["result"]), gather_s=gather_s)

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
            cause = error
            if not isinstance(cause, VerlServerError):
                cause = VerlServerError(f"{type(error).__name__}: {error}")
            self.torn = torn_error(cause, opened.validated)

    def _stop_filling(self, message: str) -> None:
        """Make the servers and the other writers of this rank's double buffer stop waiting for this rank."""
        if self._role is not None:
            self._role.fail(self._update_number, message)

    def _fill_and_finish(
        self, call_id: str, source: TensorSource, opened: OpenedUpdate, check_finite: bool
    ) -> tuple[Json, float]:
        """The steps after `open`. Returns rank 0's message about the outcome, and the seconds that reading took."""
        load_id = f"{call_id}/load"
        names, has_shards, error = self._fill(load_id, source, opened, check_finite)
        gather_s = time.monotonic() - opened.opened_at
        action_timeout_s = 2 * self.ranks.timeout_s
        end_outcome = self.coordinator.agree(
            load_id,
            self._end,
            contribution=contribution_of(names, has_shards) | _error_field(error),
            action_timeout_s=action_timeout_s,
        )
        self._raise_if_torn(end_outcome)
        report_error = None
        if self._filler is not None:
            report_error = self._filler.report_error(names, self.manifest, self.ranks.timeout_s)
        outcome = self.coordinator.agree(
            f"{call_id}/confirm",
            lambda contributions: self._confirm(contributions, opened, names),
            contribution=_error_field(report_error),
            action_timeout_s=action_timeout_s,
        )
        self._raise_if_torn(outcome)
        self.adopt_outcome(outcome)
        return outcome, gather_s

    def _raise_if_torn(self, outcome: Json) -> None:
        """Raise the TornWeightsError that rank 0 sent, if there is one."""
        if outcome["torn"] is not None:
            self.adopt_outcome(outcome)
            assert self.torn is not None
            raise self.torn

    def _fill(
        self, load_id: str, source: TensorSource, opened: OpenedUpdate, check_finite: bool
    ) -> tuple[list[str], bool, VerlServerError | None]:
        """Write this rank's part of all tensors. Returns their names, whether there were shards, and the error if any.

        An error is passed to the servers at once, and to all ranks in the next step, the call `load_id`.
        """
        role = self._role
        if role is not None:
            self._filler = BufferFiller(
                role,
                opened,
                self.coordinator.raise_failure,
                self._require_peers,
                time.monotonic() + self.ranks.timeout_s,
            )
        filler = self._filler

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
            partial(self.coordinator.raise_failure, load_id),
            gather_timeout_s=self.ranks.timeout_s,
            check_finite=check_finite and not source.is_checked,
            writes_whole_tensors=role is not None and role.is_lead_writer,
            on_bad_tensor=lambda error: self._stop_filling(error.message),
            copies=None if filler is None else filler.copies,
            shared=self.shared,
            tell_gathers=partial(self.coordinator.tell_gathers, load_id),
        )
        names, error = self.run_writing(writer, load_id, write)
        if error is not None:
            self._stop_filling(error.message)
        return names or [], writer.has_shards, error

    def _require_peers(self) -> None:
        """Raise if the trainer ranks cannot work together any more, or, on rank 0, if the servers stopped loading."""
        self.coordinator.raise_failure()
        if self._session is not None:
            self._session.require_loading()

    # -- the steps on rank 0 ------------------------------------------------------------------------

    def _open(self, contributions: list[Json], options: UpdateOptions) -> Json:
        """Refuse what can be refused now. Then pause the servers and start their loaders."""
        assert self.ranks.servers is not None
        validated = validate_options(options, max(self.weight_version, self.ranks.servers.check_weights()))
        names = contributions[0]["names"]
        require_tensors(contributions)
        if all(contribution["is_checked"] for contribution in contributions):
            require_same_names(contributions, writers=self._own_buffer_ranks)
        self.begin(names)
        opened = OpenedUpdate(
            validated, uuid.uuid4().hex, self._update_number + 1, self.ranks.servers.members, time.monotonic()
        )
        self._session = session = ServerSession(self.ranks.servers, opened)

        def open_buffers() -> None:
            """Open the double buffers on servers that have not done it yet: an error here does not tear weights."""
            if session.members != self._opened_members:
                session.call_loaders(self._buffers.opening_message(opened))
                self._buffers.require_opened(opened)
                self._opened_members = session.members

        session.open(self.find_torn() is not None, open_buffers, self._buffers.loader_message(opened))
        return opened.to_message()

    def _end(self, contributions: list[Json]) -> Json:
        """Wait until the servers have loaded, and end their session. Returns the outcome if that failed."""
        assert self._session is not None
        errors = [from_wire(item["error"]) for item in contributions if item["error"] is not None]
        try:
            try:
                for error in errors:
                    raise error
                require_same_names(contributions, writers=self._own_buffer_ranks)
            except VerlServerError as error:
                self._stop_filling(error.message)
                raise
            finally:
                self._session.end()
        except (ServerDiedError, ShutDownError):
            raise  # no server is left whose weights could be torn
        except VerlServerError as error:
            return self._session.torn_outcome(error, cause=errors[0] if errors else error)
        return {"torn": None}

    def _confirm(self, contributions: list[Json], opened: OpenedUpdate, names: list[str]) -> Json:
        """Publish the version and resume generation, if the reports of all double buffers are good."""
        specs, validated = self.manifest.tensors, opened.validated
        assert self._session is not None
        try:
            if errors := [from_wire(item["error"]) for item in contributions if item["error"] is not None]:
                raise first_error(errors)
            self.require_loadable(names)
            self.weight_version = validated.weight_version  # also when an interrupt comes before the outcome
            missing_from = self.missing_from(names)
            resume_error = self._session.publish_and_resume(whole=self.record_published(names))
        except (ServerDiedError, ShutDownError):
            raise
        except VerlServerError as error:
            return self._session.torn_outcome(error, cause=error)
        result = result_message(
            weight_version=validated.weight_version,
            num_tensors=len(names),
            num_bytes=sum(tensor_bytes(specs[name]) for name in names),
            num_missing=self.manifest.num_missing(names),
            transport=self._buffers.transport,
            staging_bytes=len(self._buffers.descriptions) * NUM_BUCKETS * self._buffers.layout.bucket_bytes,
            sent_bytes=0,
            load_s=time.monotonic() - self._session.pause_started,
            missing_from=missing_from,
        )
        return outcome_message(validated, resume_error=resume_error, result=result)


def _error_field(error: VerlServerError | None) -> Json:
    """The part of a rank's contribution that carries its error."""
    return {"error": None if error is None else to_wire(error)}
