"""Agreement before collectives on a device mesh that also has trainer ranks of other engines.

A collective cannot be cancelled, and one that is left pairs with a later one: shards of two steps would be mixed. So
the ranks of such a mesh agree first, through the store of the trainer's default process group. For each collective, or
for all of an update whose tensors are known before, every rank writes its arrival; the first rank that knows the
outcome writes it, and all ranks take over what was written first. The outcome is an error when a rank has refused its
update, when its process or its last engine has ended, or when the ranks have different tensors.

Updates are paired by a number that each process counts, also updates that it refuses. It does not count updates that
use no such mesh. A rank without an engine makes no updates: its next engine continues with the numbers of the others.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from verl_server.errors import PeerError, VerlServerError
from verl_server.ranks.machine import machine_id
from verl_server.types import Json

logger = logging.getLogger(__name__)

Mesh = tuple[int, ...]
"""The global ranks of a device mesh, sorted."""
PREFIX = "verl_server"
POLL_S = 0.002
LIVENESS_POLL_S = 0.1


class _Process:
    """What this process counts."""

    num_engines = 0
    """Engines that can work."""
    update_number = 1
    """Number of the next update."""


def _store() -> Any:
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def _read(key: str) -> Any:
    """The value of a key of the store, or None."""
    store, key = _store(), f"{PREFIX}/{key}"
    return json.loads(store.get(key)) if store.check([key]) else None


def _write(key: str, value: Any) -> None:
    _store().set(f"{PREFIX}/{key}", json.dumps(value))


def has_other_ranks(engine_ranks: frozenset[int]) -> bool:
    """Whether the trainer has ranks that are not of this engine."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > len(engine_ranks)


def engine_started(engine_ranks: frozenset[int]) -> None:
    """Tell the ranks of other engines that this rank takes part in updates from now on."""
    import torch.distributed as dist

    _Process.num_engines += 1
    if has_other_ranks(engine_ranks):
        rank = dist.get_rank()
        try:
            machine = machine_id()
        except OSError:  # a sandbox without these files of /proc: no rank can see whether this process lives
            machine = None
        _write(f"engine/{rank}", {"machine": machine, "pid": os.getpid()})
        _Process.update_number = max(_Process.update_number, _read(f"missed/{rank}") or 1)


def engine_ended(engine_ranks: frozenset[int], error: VerlServerError) -> None:
    """Tell the ranks of other engines why the last engine of this rank cannot work any more."""
    import torch.distributed as dist

    _Process.num_engines -= 1
    if _Process.num_engines == 0 and has_other_ranks(engine_ranks):
        try:
            _write(f"engine/{dist.get_rank()}", {"ended": _words(error)})
        except Exception as failure:  # noqa: BLE001 - the trainer ends: its store has ended
            logger.debug("the other ranks were not told of the end of the engine: %s", failure)


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error.message if isinstance(error, VerlServerError) else error}"


def _loss_of(rank: int) -> str | None:
    """Why a rank makes no more updates, or None."""
    state = _read(f"engine/{rank}")
    if state is None:
        return None
    if "ended" in state:
        return f"its engine cannot be used any more: {state['ended']}"
    try:
        if state["machine"] != machine_id():
            return None
    except OSError:
        return None
    try:
        is_gone = Path(f"/proc/{state['pid']}/stat").read_bytes().rpartition(b")")[2].split()[0] in b"ZX"
    except OSError:
        is_gone = True
    return "its process has ended" if is_gone else None


class SharedMeshes:
    """One update of one rank, and the device meshes that it shares with ranks of other engines.

    `engine_ranks`: global ranks of this rank's engine; None: no mesh is shared. `version`: the weight version that the
    caller gave, or None. `raise_failure` raises an error when the engine of this rank cannot work any more.
    `timeout_s`: how many seconds a rank waits for another that lives.
    """

    def __init__(
        self,
        engine_ranks: frozenset[int] | None = None,
        version: int | None = None,
        raise_failure: Callable[[], None] = lambda: None,
        timeout_s: float = 60.0,
    ) -> None:
        self._engine_ranks, self._version = engine_ranks or frozenset(), version
        self._raise_failure, self._timeout_s = raise_failure, timeout_s
        self._is_alone = engine_ranks is None or not has_other_ranks(engine_ranks)
        self._number = _Process.update_number
        self._steps: dict[Mesh, int] = {}
        """For each mesh: on how many steps of this update the ranks have agreed."""
        self._next_check = 0.0
        self._has_left = self._is_over = False

    @property
    def in_use(self) -> bool:
        """Whether this update has collectives with ranks of other engines."""
        return bool(self._steps)

    def shared(self, meshes: Iterable[frozenset[int]]) -> list[Mesh]:
        """Those of the meshes that have this rank and ranks of other engines, in the same order everywhere."""
        if self._is_alone:
            return []
        rank = self._rank()
        return sorted(tuple(sorted(mesh)) for mesh in set(meshes) if rank in mesh and not mesh <= self._engine_ranks)

    def enter(self, meshes: Iterable[frozenset[int]], tensors: str) -> None:
        """Agree with all ranks of the meshes on the next collectives, those for `tensors`.

        Raises PeerError with the words of the rank that does not take part, and this rank's own error.
        """
        for mesh in self.shared(meshes):
            self._agree(mesh, tensors)

    def end(self, agree: bool) -> None:
        """This rank has finished the collectives of this update. `agree`: the other ranks may wait for further ones."""
        for mesh in sorted(self._steps if agree else ()):
            self._agree(mesh, "no further tensor")
        self._is_over = bool(self._steps)

    def leave(self, error: BaseException) -> None:
        """Tell the ranks of other engines that this rank takes no part in this update any more. Never raises."""
        if self._is_alone or self._has_left or self._is_over:
            return
        self._has_left = True
        try:
            _write(f"left/{self._rank()}/{self._number}", _words(error))
        except Exception as failure:  # noqa: BLE001 - the trainer ends: its store has ended
            logger.debug("the other ranks were not told of an error: %s", failure)

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """The update has ended on this rank: the next one has the next number."""
        if error is not None:
            self.leave(error)
        if self._is_alone or not (self._steps or self._has_left):
            return
        _Process.update_number = self._number + 1
        if self._has_left:
            import torch.distributed as dist

            try:
                for rank in range(dist.get_world_size()):
                    if "ended" in (_read(f"engine/{rank}") or {}):
                        _write(f"missed/{rank}", self._number + 1)
            except Exception as failure:  # noqa: BLE001 - the trainer ends: its store has ended
                logger.debug("the ranks without an engine were not told of an update: %s", failure)

    def raise_loss(self, mesh: frozenset[int]) -> None:
        """Raise PeerError if a rank of another engine has left the collectives that the ranks have agreed on."""
        if time.monotonic() > self._next_check:
            self._next_check = time.monotonic() + LIVENESS_POLL_S
            for peer in mesh - {self._rank()}:
                if (why := _read(f"left/{peer}/{self._number}")) is not None:
                    broken = ". A collective was left, and the trainer's process group cannot be used any more"
                    raise PeerError(_refusal(peer, why) + broken, ranks=[peer])

    # -- one agreement ------------------------------------------------------------------------------

    def _rank(self) -> int:
        import torch.distributed as dist

        return dist.get_rank()

    def _agree(self, mesh: Mesh, tensors: str) -> None:
        step = self._steps.setdefault(mesh, 0)
        store, name = _store(), f"mesh/{','.join(map(str, mesh))}/{self._number}"
        decision = f"{PREFIX}/{name}.{step}/decision"
        deadline, next_check = time.monotonic() + self._timeout_s, 0.0
        try:
            self._raise_failure()
            _write(f"{name}.{step}/{self._rank()}", {"tensors": tensors, "version": self._version})
            while not store.check([decision]):
                outcome = self._complete_outcome(mesh, f"{name}.{step}")
                if outcome is None and time.monotonic() > next_check:
                    next_check = time.monotonic() + LIVENESS_POLL_S
                    self._raise_failure()
                    outcome = self._early_outcome(mesh, f"{name}.{step}", time.monotonic() > deadline)
                if outcome is not None:
                    store.compare_set(decision, "", json.dumps(outcome))
                else:
                    time.sleep(POLL_S)
        except BaseException as failure:
            own = {"error": _refusal(self._rank(), _words(failure)), "ranks": [self._rank()]}
            store.compare_set(decision, "", json.dumps(own))
            raise
        outcome = json.loads(store.get(decision))
        if outcome["error"] is not None:
            raise PeerError(outcome["error"], ranks=outcome["ranks"])
        self._steps[mesh] = step + 1
        previous = f"{PREFIX}/{name}.{step - 1}" if step else _last_step_of.get(mesh)
        _last_step_of[mesh] = f"{PREFIX}/{name}.{step}"
        if previous is not None:  # all ranks have read that outcome, or they would not be here
            store.delete_key(f"{previous}/{self._rank()}")
            store.delete_key(f"{previous}/decision")

    def _complete_outcome(self, mesh: Mesh, name: str) -> Json | None:
        """The outcome when all ranks have arrived, otherwise None."""
        if not _store().check([f"{PREFIX}/{name}/{rank}" for rank in mesh]):
            return None
        arrivals = {rank: _read(f"{name}/{rank}") for rank in mesh}
        first = arrivals[mesh[0]]
        for rank, arrival in arrivals.items():
            versions = arrival["version"], first["version"]
            if arrival["tensors"] != first["tensors"] or (None not in versions and versions[0] != versions[1]):
                message = (
                    f"trainer rank {rank} pushes {arrival['tensors']} (version {versions[0]}), but rank {mesh[0]} "
                    f"{first['tensors']} (version {versions[1]}): all ranks of a device mesh must push tensors of the "
                    "same names in the same order, of the same step"
                )
                return {"error": message, "ranks": [mesh[0], rank]}
        return {"error": None}

    def _early_outcome(self, mesh: Mesh, name: str, is_late: bool) -> Json | None:
        """The outcome when a rank will not arrive, otherwise None."""
        missing = [rank for rank in mesh if not _store().check([f"{PREFIX}/{name}/{rank}"])]
        for rank in missing:
            if (why := _read(f"left/{rank}/{self._number}") or _loss_of(rank)) is not None:
                return {"error": _refusal(rank, why), "ranks": [rank]}
        if is_late and missing:
            message = (
                f"trainer rank(s) {missing}, which share a device mesh with this rank, did not arrive within "
                f"{self._timeout_s:g} s: all ranks of a device mesh must make the same updates"
            )
            return {"error": message, "ranks": missing}
        return None


_last_step_of: dict[Mesh, str] = {}
"""The last step of each mesh on which the ranks have agreed. Its keys in the store are removed at the next step."""


def _refusal(rank: int, why: str) -> str:
    return f"trainer rank {rank}, which shares a device mesh with this rank, takes no part in this update: {why}"
