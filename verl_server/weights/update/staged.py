"""Updates by way of the arena: everything is staged and checked on all ranks before the servers hear of it."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from verl_server.errors import TornWeightsError, VerlServerError
from verl_server.types import WeightUpdateResult
from verl_server.weights.arena import Arena
from verl_server.weights.layout import Layout
from verl_server.weights.manifest import Manifest
from verl_server.weights.transports.base import Sender, Update, in_layout_order
from verl_server.weights.update.commit import check_reports, checksums, commit, replay
from verl_server.weights.update.servers import ReplayFn, UpdatableServers
from verl_server.weights.update.shard_writer import ShardWriter, check_same_names, digest
from verl_server.weights.update.updater import Ranks, UpdateOptions, ValidatedUpdate, WeightUpdater, torn_wire

if TYPE_CHECKING:
    import torch

Json = dict[str, Any]


class StagedUpdater(WeightUpdater):
    """The arena that this rank writes, and on node leaders the sender.

    `writers`: the ranks, by number in the trainer's world, that map the same arena as this one.
    """

    def __init__(
        self,
        ranks: Ranks,
        manifest: Manifest,
        version: int,
        layout: Layout,
        arena: Arena,
        writers: frozenset[int],
        sender: Sender | None,
    ) -> None:
        super().__init__(ranks, manifest, version)
        self._layout, self._arena, self._writers, self._sender = layout, arena, writers, sender
        self._leads = ranks.placement.is_node_leader
        self._sending = threading.Lock()
        """Held by who uses the sender: an update, or a server that catches up."""
        self._sums: dict[str, int] = {}
        """Of what is published, by tensor; on rank 0."""

    def _update(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], options: UpdateOptions, refusal: VerlServerError | None
    ) -> WeightUpdateResult:
        started = time.monotonic()
        call = self.group.next_call_id("update_weights")
        stage = ShardWriter(
            self._arena.tensor,
            self.manifest,
            self._writers,
            self.group,
            self.ranks.timeout_s,
            finite=options.check_finite,
            leads=self._leads,
        )
        names, error = (None, refusal) if refusal else self.reading(lambda: stage.write(named_tensors))
        names = names or []
        gather_s = time.monotonic() - started
        if self._leads and self.group.rank != 0 and names:  # another node's arena
            self._arena.write_table(in_layout_order(self._layout, names))
        wire = self.group.agree(
            call,
            lambda brought: self._commit(brought, names, options),
            contribution={"tensors": len(names), "digest": digest(names), "sharded": stage.sharded},
            error=error,
            action_timeout_s=4 * self.ranks.timeout_s,
        )
        self.settled(wire)
        self._confirm(wire, names)
        if self.torn is not None:
            raise self.torn
        return dataclasses.replace(WeightUpdateResult(**wire["result"]), gather_s=gather_s)

    def _commit(self, brought: list[Json], names: list[str], options: UpdateOptions) -> Json:
        """On rank 0: check that the ranks brought the same, then make the servers load it."""
        validated = self.validate(options)
        check_same_names(brought)
        self.require_whole_if_torn(names)
        wire: Json = {
            "version": int(validated.weight_version),
            "torn": None,
            "update_id": None,
            "verify": validated.verify,
        }
        try:
            return wire | self._committed(names, validated)
        except TornWeightsError as error:
            return wire | {"torn": torn_wire(error)}

    def _committed(self, names: list[str], validated: ValidatedUpdate) -> Json:
        assert self._sender is not None
        assert self.ranks.servers is not None
        backend, sender = self.ranks.servers, self._sender
        ordered = in_layout_order(self._layout, names)

        def publish(sums: Sequence[int]) -> None:
            self._sums.update(zip(ordered, sums, strict=False))  # no sums without verification
            if not sums:
                self._sums.clear()
            staged = self._sums.keys() == self._layout.slots.keys()
            whole = len(ordered) == len(self._layout.slots)
            backend.published(int(validated.weight_version), whole, self._replay_of(validated) if staged else None)

        with self._sending:
            self._arena.write_table(ordered)
            result, update = commit(backend, sender, names, validated, self.torn is not None, publish)
        return {"result": result, "update_id": update.id}

    def _replay_of(self, validated: ValidatedUpdate) -> ReplayFn:
        """For servers that were not there: loads what this order has published, while it is still staged."""
        sums = dict(self._sums)

        def bring(backend: UpdatableServers) -> None:
            assert self._sender is not None
            with self._sending:
                self._arena.write_table(in_layout_order(self._layout, list(sums)))
                replay(backend, self._sender, validated, sums)

        return bring

    def _confirm(self, wire: Json, names: list[str]) -> None:
        """With several nodes: every node's leader looks at the reports of its own node."""
        if self.ranks.placement.nnodes == 1 or wire["update_id"] is None:
            return
        error = self._check(wire["update_id"], wire["verify"], names) if self._leads else None
        try:
            self.group.agree(self.group.next_call_id("confirm"), lambda _: None, error=error, action_timeout_s=10.0)
        except VerlServerError as failure:
            self.torn = TornWeightsError(f"the weight update failed on a node: {failure.message}", **failure.details)

    def _check(self, update_id: str, verify: bool, names: list[str]) -> VerlServerError | None:
        """On a node's leader: the error that a TP rank of this node reported, or None."""
        assert self._sender is not None
        assert self.ranks.servers is not None
        update = Update(update_id, in_layout_order(self._layout, names), verify, self.ranks.servers.members)
        try:
            check_reports(self._sender.reports(update), update, checksums(self._arena, update), len(self._layout.slots))
        except VerlServerError as error:
            return error
        return None

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: self._arena.tensor(name) for name in self._layout.slots}

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
        self._arena.close()
