"""Updates through the arena: all tensors are staged and checked on all ranks before any server is paused.

A dict or a list is checked completely on each rank before that rank stages its first tensor. A refusal then leaves the
published weights in the arena, so they can still be replayed into a server that was started again. Tensors of a
generator are checked as they come.

With several nodes, rank 0 sees the reports of the TP ranks on its own node only. After the load, the first rank of each
node checks the reports of that node. Rank 0 publishes the update and resumes generation when all of them are good.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence, Sized
from functools import partial
from typing import TYPE_CHECKING

from verl_server.errors import (
    BadInputError,
    ServerDiedError,
    ShutDownError,
    TornWeightsError,
    VerlServerError,
    to_wire,
)
from verl_server.types import Json, WeightUpdateResult
from verl_server.weights.arena import Arena
from verl_server.weights.device.staging_copies import StagingCopies
from verl_server.weights.device.streams import accelerator, as_current
from verl_server.weights.layout import Layout
from verl_server.weights.manifest import Manifest
from verl_server.weights.transports.base import Sender, UpdateAttempt
from verl_server.weights.update.commit import commit, replay, resume_published
from verl_server.weights.update.contributions import contribution_of, require_same_names
from verl_server.weights.update.report_checks import verify_reports
from verl_server.weights.update.request import (
    UpdateOptions,
    ValidatedUpdate,
    outcome_message,
    raise_resume_error,
    torn_error,
    torn_to_message,
    validate_options,
)
from verl_server.weights.update.servers import ReplayFn, UpdatableServers
from verl_server.weights.update.shard_writer import ShardWriter
from verl_server.weights.update.staged_checksums import StagedChecksums
from verl_server.weights.update.tensor_source import NamedTensors, TensorSource
from verl_server.weights.update.updater import EngineRanks, WeightUpdater
from verl_server.weights.update.whole_modules import complete_modules

if TYPE_CHECKING:
    import torch


class StagedUpdater(WeightUpdater):
    """The weight updater for transports that send what is staged in an arena.

    `arena`: the arena that this rank writes. `writer_ranks`: global ranks that map the same arena as this rank.
    `sender`: the trainer's end of the transport, on the first rank of each node; None on other ranks. `checksum`: name
    of the algorithm of all updates.
    """

    def __init__(
        self,
        ranks: EngineRanks,
        manifest: Manifest,
        weight_version: int,
        layout: Layout,
        arena: Arena,
        writer_ranks: frozenset[int],
        sender: Sender | None,
        checksum: str,
    ) -> None:
        super().__init__(ranks, manifest, weight_version)
        self._layout, self._arena, self._writer_ranks, self._sender = layout, arena, writer_ranks, sender
        self._checksum = checksum
        self._is_node_leader = ranks.placement.is_node_leader
        self._sender_lock = threading.Lock()
        """Held while the sender is used: by an update, or by the replay of an update into another server."""
        self._published_checksums: dict[str, int] = {}
        """Checksum of each published tensor, on rank 0."""
        self._publish_and_resume: Callable[[], VerlServerError | None] = lambda: None
        """On rank 0 of several nodes: the last steps of the update that all servers have loaded."""

    def _update(
        self, named_tensors: NamedTensors, options: UpdateOptions, refusal: VerlServerError | None
    ) -> WeightUpdateResult:
        started = time.monotonic()
        call_id = self.coordinator.next_call_id("update_weights_from_tensor")
        checksums = StagedChecksums(self._arena.tensor, self._checksum)
        writer = ShardWriter(
            self._arena.tensor,
            self.manifest,
            self._writer_ranks,
            partial(self.coordinator.raise_failure, call_id),
            gather_timeout_s=self.ranks.timeout_s,
            check_finite=options.check_finite and not isinstance(named_tensors, Sized),
            writes_whole_tensors=self._is_node_leader,
            copies=StagingCopies(self._arena.pin),
            checksums=checksums if options.verify else None,
            shared=self.shared,
            tell_gathers=partial(self.coordinator.tell_gathers, call_id),
        )

        def check_and_write() -> list[str]:
            if refusal is not None:
                raise refusal
            if not isinstance(named_tensors, Sized):
                return writer.write(named_tensors)
            try:
                source = TensorSource(named_tensors, self.manifest, options.check_finite)
            except BadInputError as error:
                writer.refuse(named_tensors, error)  # the other ranks do not wait for this rank to arrive
                raise
            return writer.write(source.pairs)

        written, error = self.run_writing(writer, call_id, check_and_write)
        names = written or []
        gather_s = time.monotonic() - started
        if self._is_node_leader and self.coordinator.rank != 0 and names:  # the arena of another node
            self._arena.write_table(self._layout.in_order(names))
        outcome = self.coordinator.agree(
            call_id,
            lambda contributions: self._commit(contributions, names, options, checksums),
            contribution=contribution_of(names, writer.has_shards),
            error=error,
            action_timeout_s=4 * self.ranks.timeout_s,
        )
        if self.ranks.placement.nnodes > 1 and outcome["torn"] is None:
            outcome = self._confirm_on_all_nodes(outcome, names, checksums, f"{call_id}/confirm")
        self.adopt_outcome(outcome)
        if self.torn is not None:
            raise self.torn
        raise_resume_error(outcome)
        return dataclasses.replace(WeightUpdateResult(**outcome["result"]), gather_s=gather_s)

    # -- rank 0 -------------------------------------------------------------------------------------

    def _commit(
        self, contributions: list[Json], names: list[str], options: UpdateOptions, staged_checksums: StagedChecksums
    ) -> Json:
        """On rank 0: check that all ranks pushed the same tensors, then make the servers load them.

        With one node, the update is published and generation continues. With several nodes, `_publish_and_resume` does
        both later.
        """
        servers, sender = self.ranks.servers, self._sender
        assert servers is not None
        validated = validate_options(options, max(self.weight_version, servers.check_weights()))
        nnodes = self.ranks.placement.nnodes
        node_leaders = range(0, len(contributions), len(contributions) // nnodes) if nnodes > 1 else ()
        require_same_names(contributions, writers=node_leaders)
        self.begin(names)
        assert sender is not None
        ordered_names = self._layout.in_order(names := self._complete_modules(names, servers))

        def publish(checksums: Sequence[int]) -> None:
            self._publish(servers, validated, ordered_names, checksums)

        def publish_later(checksums: Sequence[int]) -> None:
            def publish_and_resume() -> VerlServerError | None:
                publish(checksums)
                return resume_published(servers, validated)

            self._publish_and_resume = publish_and_resume

        load_started = threading.Event()
        missing_from = self.missing_from(ordered_names)
        try:
            with self._sender_lock:
                self._arena.write_table(ordered_names)
                result, attempt, resume_error = commit(
                    servers,
                    sender,
                    ordered_names,
                    staged_checksums.values(ordered_names) if validated.verify else [],
                    validated,
                    publish if nnodes == 1 else publish_later,
                    manifest=self.manifest,
                    weights_are_torn=self.find_torn() is not None,
                    load_started=load_started,
                    resumes=nnodes == 1,
                )
        except TornWeightsError as error:
            return outcome_message(validated, error, update_id=None, verify=validated.verify)
        except VerlServerError:
            raise
        except BaseException as failure:  # for example KeyboardInterrupt, or an OSError of the transport
            if load_started.is_set():
                self.torn = torn_error(VerlServerError(f"{type(failure).__name__}: {failure}"), validated)
            raise
        if nnodes > 1:
            self.torn = TornWeightsError("the weight update was loaded, but not all nodes have confirmed it")
        result["missing_from"] = missing_from
        return outcome_message(
            validated, resume_error=resume_error, result=result, update_id=attempt.id, verify=validated.verify
        )

    @property
    def keeps_published(self) -> bool:
        return self._lacking.issubset(self._published_checksums)

    def _complete_modules(self, names: list[str], servers: UpdatableServers) -> list[str]:
        checksums = StagedChecksums(self._arena.tensor, self._checksum)
        return complete_modules(names, servers.members, self.manifest, self._published_checksums, checksums.values)

    def _publish(
        self,
        servers: UpdatableServers,
        validated: ValidatedUpdate,
        ordered_names: Sequence[str],
        checksums: Sequence[int],
    ) -> None:
        """Record the checksums of the new weights, and tell the servers' owner of the new version.

        Without verification there are no checksums. Then the weights cannot be replayed until the next update of all
        tensors with verification.
        """
        published = (
            {**self._published_checksums, **dict(zip(ordered_names, checksums, strict=True))} if checksums else {}
        )
        keeps_all = self._lacking.union(ordered_names).issubset(published)
        replay = self._replay_of(validated, published) if keeps_all else None
        before, self.weight_version = self.weight_version, validated.weight_version  # also if an interrupt comes now
        is_enough = self.record_published(ordered_names)
        try:
            servers.published(validated.weight_version, is_enough, replay)
        except ServerDiedError:  # no server has the new weights
            self.weight_version = before
            raise
        self._published_checksums = published

    def _replay_of(self, validated: ValidatedUpdate, checksums: Mapping[str, int]) -> ReplayFn:
        """A function that loads the weights published now into other servers, while the weights are still staged.

        Another thread may call the function. It uses the device that is current in the present thread.
        """
        device = accelerator()

        def load_published(servers: UpdatableServers) -> None:
            assert self._sender is not None
            with self._sender_lock, as_current(device):
                self._arena.write_table(self._layout.in_order(list(checksums)))
                replay(servers, self._sender, validated, checksums, self.manifest)

        return load_published

    # -- several nodes ------------------------------------------------------------------------------

    def _confirm_on_all_nodes(self, outcome: Json, names: list[str], checksums: StagedChecksums, call_id: str) -> Json:
        """With several nodes, the first rank of each node checks the reports of the TP ranks on its node.

        If all are good, rank 0 publishes the update and resumes generation. Returns the outcome of the update.
        """
        error = None
        if self._is_node_leader and self.coordinator.rank != 0:  # `commit` has checked the reports of the first node
            error = self._report_error(outcome["update_id"], outcome["verify"], names, checksums)

        def publish_and_resume(_: list[Json]) -> Json:
            resume_error = self._publish_and_resume()
            return outcome | {"resume_error": None if resume_error is None else to_wire(resume_error)}

        try:
            confirmed: Json = self.coordinator.agree(
                call_id, publish_and_resume, error=error, action_timeout_s=2 * self.ranks.timeout_s
            )
        except (ServerDiedError, ShutDownError):
            raise  # no server is left whose weights could be torn
        except VerlServerError as failure:
            torn = TornWeightsError(f"the weight update failed on a node: {failure.message}", **failure.details)
            return outcome | {"torn": torn_to_message(torn)}
        return confirmed

    def _report_error(
        self, update_id: str, verify: bool, names: list[str], checksums: StagedChecksums
    ) -> VerlServerError | None:
        """On the first rank of a node: the error that a TP rank of this node reported, or None."""
        assert self._sender is not None
        assert self.ranks.servers is not None
        attempt = UpdateAttempt(update_id, self._layout.in_order(names), verify, self.ranks.servers.members)
        try:
            values = checksums.values(attempt.names) if verify else []
            verify_reports(
                self._sender.reports(attempt),
                attempt,
                values,
                is_whole=self.manifest.is_whole(attempt.names),
                optional=self.manifest.not_required,
            )
        except VerlServerError as error:
            return error
        except Exception as failure:  # noqa: BLE001 - raised on all ranks: this rank has to take part in the call
            return VerlServerError(f"the reports could not be checked: {type(failure).__name__}: {failure}")
        return None

    # -- memory -------------------------------------------------------------------------------------

    def staging_tensors(self) -> dict[str, torch.Tensor]:
        return {name: self._arena.tensor(name) for name in self._layout.slots}

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
        self._arena.close()
