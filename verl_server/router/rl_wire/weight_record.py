"""`WeightRecord`: the weights that the servers of a router must have, and which servers have them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from verl_server.errors import BadInputError, NotReadyError, TornWeightsError
from verl_server.router.replica_pool import ReplicaPool
from verl_server.router.rl_wire.pauses import leave_out
from verl_server.router.rl_wire.server_calls import is_lost
from verl_server.validation import is_whole_number

logger = logging.getLogger(__name__)


class WeightRecord:
    """The updates of the weights through one router.

    After an update, only the servers that have loaded it may receive requests. Before the first one, a server may not
    receive requests if another server has a higher weight version: the router may have been started after an update.
    """

    def __init__(self) -> None:
        self.version: int | None = None
        """Version of the last update through this router. None before the first one."""
        self.torn: str | None = None
        """Why the served weights are not whole."""
        self._folder: tuple[Any, Any] | None = None
        """Folder of the last update, and its signature."""
        self._servers: frozenset[str] | None = None
        """Names of the servers that load the weights now, or have loaded the last ones. None: all servers may serve."""
        self._versions: dict[str, int] = {}
        """Version of each server at its last answer, without those of lost servers."""

    def begin(self, servers: Iterable[str]) -> None:
        """An update begins on these servers."""
        self.torn = "an update of the weights has not come to its end"
        self._servers = frozenset(servers)

    def end(self, folder: tuple[Any, Any], version: int, outcomes: Mapping[str, Any]) -> set[str]:
        """The update has ended; returns the servers that have loaded the weights.

        `folder`: the folder and its signature. `outcomes`: exceptions by server.

        Servers that were lost meanwhile are left out, if another one has loaded the weights. Raises TornWeightsError
        if no server has, or if one has refused. Then all requests wait, and each server may take part in the next one.
        """
        failed = {name: error for name, error in outcomes.items() if isinstance(error, BaseException)}
        refused = {name: error for name, error in failed.items() if not is_lost(error)}
        if refused or len(failed) == len(outcomes):
            name, error = next(iter((refused or failed).items()))
            self.torn = f"the last update of the weights failed on {len(failed)} of {len(outcomes)} servers"
            self._servers = None
            raise TornWeightsError(f"{self.torn}; {name}: {error}", cause=type(error).__name__) from error
        for name in failed:
            logger.warning("replica %s was lost during the update to weight version %d", name, version)
        self.torn, self._servers = None, frozenset(outcomes.keys() - failed.keys())
        self.version, self._folder = version, folder
        return set(self._servers)

    def is_repeated(self, folder: Any, signature: Any, version: Any) -> bool:
        """Whether an update with these arguments has succeeded already, and no other one has begun since.

        `signature`: that of the folder now. None if it cannot be read any more.
        """
        if self.torn or self._folder is None or version is None or (folder, version) != (self._folder[0], self.version):
            return False
        return signature in (None, self._folder[1])

    def next_version(self, given: Any, largest: int) -> int:
        """The version of the next update; `largest`: that of all servers. Raises BadInputError.

        An update after a failed one may have the same version again.
        """
        largest = max(self.version or 0, largest)
        if given is None:
            return largest + 1
        if not (is_whole_number(given) and given >= (largest if self.torn else largest + 1)):
            raise BadInputError(f"weight_version must be a whole number above {largest}, got {given!r:.100}")
        return int(given)

    def note_version(self, pool: ReplicaPool, server: str, version: int) -> None:
        """Note the version of a server. Servers with a lower one receive no requests until they are checked again.

        The version of a server that does not answer counts until it is lost: others may have missed its update.
        """
        before, self._versions[server] = self._highest, version
        if self.version is None and not self.torn and version > before:
            leave_out(pool, [name for name, replica in pool.replicas.items() if replica.weight_version < version])

    def forget_version(self, server: str) -> None:
        """A server is lost: nobody waits for it any more. It may be started again with other weights."""
        self._versions.pop(server, None)

    @property
    def _highest(self) -> int:
        return max(self._versions.values(), default=0)

    def require_current(self, server: str, version: int) -> None:
        """Raise NotReadyError for a server that does not have the weights of the last update."""
        cure = "it receives requests again after an update that it takes part in"
        if self._servers is not None and server not in self._servers:
            raise NotReadyError(f"the server has not taken part in the last update of the weights: {cure}")
        if self.torn:
            return  # all requests wait
        if self.version is not None and version != self.version:
            raise NotReadyError(
                f"the server has weight version {version}, and the last update through this router was version "
                f"{self.version}: {cure}"
            )
        if self.version is None and version < self._highest:
            raise NotReadyError(
                f"the server has weight version {version}, and another server has version {self._highest}: {cure}"
            )
