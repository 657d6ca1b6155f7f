"""Agreement before collectives on a device mesh that also has trainer ranks of other engines.

A collective cannot be cancelled, and one that is left pairs with a later one: shards of two steps would be mixed. So
the ranks of such a mesh agree first, through the store of the trainer's default process group. For each collective, or
for all of an update whose tensors are known before, every rank writes its arrival; the first rank that knows the
outcome writes it, and all ranks take over what was written first. The outcome is an error when a rank has refused its
update, when its process or its last engine has ended, or when the ranks have different tensors.

Updates are paired by a number that each process counts. An update counts unless its tensors are known before and none
of them uses such a mesh. Tensors of a generator are not known before, so each update from a generator counts, also one
without such a mesh and one that fails before its first tensor. A rank that has refused the update of a number refuses
it for all ranks that wait at this number, and all count on.

If ranks wait at different numbers, because only one of them has made an update from a generator, the update is refused
on all of them, and a new round begins: all count from 1 again. This costs one refused update. Which updates belong
together is then known only by order: after a failed update from a generator that only one rank has repeated, a further
one that fails before its first tensor can shift them. A `weight_version` that the caller gives is therefore compared.
A rank without an engine makes no updates: its next engine continues with the numbers of the others.

All operations of the store have a deadline, because the process that holds it can be stopped or vanish as well.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from verl_server.errors import PeerError, VerlServerError
from verl_server.ranks.bounded_store import BoundedStore
from verl_server.ranks.placement import known_machine_id
from verl_server.types import Json

logger = logging.getLogger(__name__)

Mesh = tuple[int, ...]
"""The global ranks of a device mesh, sorted."""
PREFIX = "verl_server"
POLL_S = 0.002
LIVENESS_POLL_S = 0.1


class _Process:
    """What this process counts."""

    engines: ClassVar[set[object]] = set()
    """Engines that can work."""
    lock = threading.Lock()
    """For `engines`, and for what the other ranks know of them."""
    next_update = (0, 1)
    """Round and number of the next update."""
    store: tuple[Any, BoundedStore] | None = None
    """The store of the default process group, and this module's own connection to it."""


def _store(operation: str, *args: Any) -> Any:
    """The result of an operation of the store of the default process group. Raises PeerError if the store is gone.

    Torch's own connection serves one operation at a time: it may wait for a rank that has to create a communicator.
    """
    try:
        original = _get_default_store()
        if _Process.store is None or _Process.store[0] is not original:
            _Process.store = original, BoundedStore(getattr(original, "clone", lambda: original))
        return getattr(_Process.store[1], operation)(*args)
    except (RuntimeError, ConnectionError) as error:
        raise PeerError(
            "the ranks that share a device mesh cannot agree: the process with the store of the trainer's default "
            f"process group (rank 0, or the agent of torchrun) has ended, is stopped or cannot be reached: {error}"
        ) from error


def _has(*keys: str) -> bool:
    return bool(_store("check", [f"{PREFIX}/{key}" for key in keys]))


def _read(key: str) -> Any:
    """The value of a key of the store, or None."""
    return json.loads(_store("multi_get", [f"{PREFIX}/{key}"])[0]) if _has(key) else None


def _write(key: str, value: Any) -> None:
    _store("set", f"{PREFIX}/{key}", json.dumps(value))


def _pair(value: Any) -> tuple[int, int]:
    """A round and a number that were read from the store. (0, 0) for None."""
    return (0, 0) if value is None else (value[0], value[1])


def _decide(name: str, outcome: Json) -> None:
    """Set the outcome of a step, unless another rank has."""
    _store("compare_set", f"{PREFIX}/{name}/decision", "", json.dumps(outcome))


def has_other_ranks(engine_ranks: frozenset[int]) -> bool:
    """Whether the trainer has ranks that are not of this engine."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > len(engine_ranks)


def engine_started(engine: object, engine_ranks: frozenset[int]) -> None:
    """Tell the ranks of other engines that this rank takes part in updates from now on."""
    with _Process.lock:
        _Process.engines.add(engine)
        if has_other_ranks(engine_ranks):
            rank = dist.get_rank()
            _write(f"engine/{rank}", {"machine": known_machine_id(), "pid": os.getpid()})
            _Process.next_update = max(_Process.next_update, _pair(_read(f"missed/{rank}")))


def engine_ended(engine: object, engine_ranks: frozenset[int], error: VerlServerError) -> None:
    """Tell the ranks of other engines why the last engine of this rank cannot work any more.

    May be called in any thread, and again: the last engine of a rank may end while the next one starts.
    """
    with _Process.lock:
        was_started = engine in _Process.engines
        _Process.engines.discard(engine)
        if was_started and not _Process.engines and has_other_ranks(engine_ranks):
            try:
                rank = dist.get_rank()
                _write(f"engine/{rank}", {**(_read(f"engine/{rank}") or {}), "ended": _words(error)})
            except Exception as failure:  # noqa: BLE001 - the trainer ends: its store has ended
                logger.debug("the other ranks were not told of the end of the engine: %s", failure)


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error.message if isinstance(error, VerlServerError) else error}"


def _end_of_engine(rank: int) -> str | None:
    """Why the last engine of a rank cannot work any more, or None."""
    ended = (_read(f"engine/{rank}") or {}).get("ended")
    return None if ended is None else f"its engine cannot be used any more: {ended}"


def _end_of_process(rank: int) -> str | None:
    """Says that the process of a rank has ended, if that is known, or None."""
    state = _read(f"engine/{rank}")
    if state is None or state.get("machine") is None or state["machine"] != known_machine_id():
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
    `timeout_s`: how many seconds a rank waits for another that lives. `find_meshes()`: the meshes of all tensors, or
    None if they are not known.
    """

    def __init__(
        self,
        engine_ranks: frozenset[int] | None = None,
        version: int | None = None,
        raise_failure: Callable[[], None] = lambda: None,
        timeout_s: float = 60.0,
        find_meshes: Callable[[], Iterable[frozenset[int]] | None] = lambda: None,
    ) -> None:
        self._engine_ranks, self._version = engine_ranks or frozenset(), version
        self._raise_failure, self._timeout_s = raise_failure, timeout_s
        self._is_alone = engine_ranks is None or not has_other_ranks(engine_ranks)
        self._round, self._number = _Process.next_update
        self._new_round: int | None = None
        """The round that begins after this update, because the ranks have counted differently."""
        self._find_meshes = find_meshes
        self._has_mesh: bool | None = None
        """Whether this update has a shared mesh. None: not known."""
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
        found = sorted(tuple(sorted(mesh)) for mesh in set(meshes) if rank in mesh and not mesh <= self._engine_ranks)
        if found:
            self._has_mesh = True
        return found

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
        if self._is_alone or self._has_left or self._is_over or self._has_mesh is False:
            return
        self._has_left = True
        try:
            _write(f"left/{self._rank()}/{self._round}.{self._number}", _words(error))
        except Exception as failure:  # noqa: BLE001 - the trainer ends: its store has ended
            logger.debug("the other ranks were not told of an error: %s", failure)

    def __enter__(self) -> None:
        try:
            meshes = None if self._is_alone else self._find_meshes()
            self._has_mesh = None if meshes is None else bool(self.shared(meshes))
        except BaseException as interrupt:
            self.__exit__(None, interrupt, None)
            raise

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """The update has ended on this rank: the next one has the next number."""
        if error is not None:
            self.leave(error)
        if self._is_alone or self._has_mesh is False:
            return
        _Process.next_update = (self._round, self._number + 1) if self._new_round is None else (self._new_round, 1)
        if self._has_left:
            try:
                for rank in range(dist.get_world_size()):
                    if _end_of_engine(rank) is not None:
                        _write(f"missed/{rank}", _Process.next_update)
            except Exception as failure:  # noqa: BLE001 - the trainer ends: its store has ended
                logger.debug("the ranks without an engine were not told of an update: %s", failure)

    def raise_loss(self, mesh: frozenset[int], wait_s: float = 0.0) -> None:
        """Raise PeerError if a rank has left the collectives that the ranks have agreed on, or its process has ended.

        `wait_s`: for so many seconds a rank may still be found: the connections of a process close before it has ended.
        """
        deadline = time.monotonic() + wait_s
        while time.monotonic() > self._next_check or wait_s:
            self._next_check = time.monotonic() + LIVENESS_POLL_S
            for peer in mesh - {self._rank()}:
                if (why := self._why_left(peer) or _end_of_process(peer)) is not None:
                    broken = ". A collective was left, and the trainer's process group cannot be used any more"
                    raise PeerError(_refusal(peer, why) + broken, ranks=[peer])
            if time.monotonic() > deadline:
                return
            time.sleep(LIVENESS_POLL_S)

    # -- one agreement ------------------------------------------------------------------------------

    def _rank(self) -> int:
        return dist.get_rank()

    def _why_left(self, rank: int) -> str | None:
        """Why a rank has left this update, or None."""
        why: str | None = _read(f"left/{rank}/{self._round}.{self._number}")
        return why

    def _agree(self, mesh: Mesh, tensors: str) -> None:
        step = self._steps.setdefault(mesh, 0)
        name = f"{_name_of(mesh)}/{self._round}.{self._number}.{step}"
        deadline, next_check = time.monotonic() + self._timeout_s, 0.0
        try:
            self._raise_failure()
            _write(f"{_name_of(mesh)}/at/{self._rank()}", (self._round, self._number))
            _write(f"{name}/{self._rank()}", {"tensors": tensors, "version": self._version})
            while not _has(f"{name}/decision"):
                outcome = self._complete_outcome(mesh, name)
                if outcome is None and time.monotonic() > next_check:
                    next_check = time.monotonic() + LIVENESS_POLL_S
                    self._raise_failure()
                    outcome = self._early_outcome(mesh, name, time.monotonic() > deadline)
                if outcome is not None:
                    _decide(name, outcome)
                else:
                    time.sleep(POLL_S)
        except BaseException as failure:
            with suppress(VerlServerError):
                _decide(name, {"error": _refusal(self._rank(), _words(failure)), "ranks": [self._rank()]})
            raise
        outcome = _read(f"{name}/decision")
        if outcome["error"] is not None:
            self._new_round = outcome.get("new_round")
            raise PeerError(outcome["error"], ranks=outcome["ranks"])
        self._steps[mesh] = step + 1
        previous, _last_step_of[mesh] = _last_step_of.get(mesh), name
        if previous is not None:  # all ranks have read that outcome, or they would not be here
            _store("delete_key", f"{PREFIX}/{previous}/{self._rank()}")
            _store("delete_key", f"{PREFIX}/{previous}/decision")

    def _complete_outcome(self, mesh: Mesh, name: str) -> Json | None:
        """The outcome when all ranks have arrived, otherwise None."""
        if not _has(*(f"{name}/{rank}" for rank in mesh)):
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
        missing = [rank for rank in mesh if not _has(f"{name}/{rank}")]
        for rank in missing:
            why = self._why_left(rank) or _end_of_engine(rank) or _end_of_process(rank)
            if why is not None:
                return {"error": _refusal(rank, why), "ranks": [rank]}
        at = [_pair(_read(f"{_name_of(mesh)}/at/{rank}")) for rank in missing]
        if any(self._round == other_round and self._number < number for other_round, number in at):
            old = json.dumps(self._round) if self._round else ""
            _store("compare_set", f"{PREFIX}/round", old, json.dumps(self._round + 1))
        if missing and (new_round := _read("round") or 0) > self._round:
            message = (
                "the trainer ranks have made different numbers of updates from generators, so this update is refused "
                "on all ranks; the next one can succeed. Update from a generator on all ranks, or pass a dict"
            )
            return {"error": message, "ranks": missing, "new_round": new_round}
        if is_late and missing:
            message = (
                f"trainer rank(s) {missing}, which share a device mesh with this rank, did not arrive within "
                f"{self._timeout_s:g} s: all ranks of a device mesh must make the same updates"
            )
            return {"error": message, "ranks": missing}
        return None


_last_step_of: dict[Mesh, str] = {}
"""The last step of each mesh on which the ranks have agreed. Its keys in the store are removed at the next step."""


def _name_of(mesh: Mesh) -> str:
    return f"mesh/{','.join(map(str, mesh))}"


def _refusal(rank: int, why: str) -> str:
    return f"trainer rank {rank}, which shares a device mesh with this rank, takes no part in this update: {why}"
