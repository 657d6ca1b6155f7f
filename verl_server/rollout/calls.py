"""`FleetCalls`: calls to all servers of a fleet at the same time. No server can block the others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from verl_server.adapter import HttpServerEngineAdapter
from verl_server.errors import DeadlineError, ServerBusyError, ServerDiedError, ShutDownError, VerlServerError
from verl_server.rollout.fleet import Fleet, Server
from verl_server.rollout.recovery import RecoveryLoop
from verl_server.rollout.replica import Replica

Call = Callable[[HttpServerEngineAdapter], object]

MAX_FAILED_UPDATES = 2
"""A server that has failed this number of attempts at updates, while other servers did not fail, is started again."""


class FleetCalls:
    """Calls the servers of a fleet, and starts those again that fail although others succeed."""

    def __init__(self, fleet: Fleet, recovery: RecoveryLoop) -> None:
        self._fleet, self._recovery = fleet, recovery

    def call_all(
        self, servers: Sequence[Server], call: Call, restart_on: type[VerlServerError] = DeadlineError
    ) -> None:
        """Call `call` for all `servers` at the same time. Returns when all calls have ended.

        A server that has died or is being ended needs no call. A server whose error is of type `restart_on` is started
        again; by default that is a server that does not answer. The call of any other server that fails, although it
        succeeded on another one, is repeated once; then that server is started again. Raises the first error when the
        call succeeded on no server, and ServerBusyError in any case: the server is well.
        """
        num_succeeded, errors = self._call_each([server for server in servers if self._fleet.is_used(server)], call)
        answers: list[tuple[Server, VerlServerError]] = []
        for server, error in errors:
            if isinstance(error, restart_on):
                self._recovery.recover(*server, error)
            else:
                answers.append((server, error))
        for _, error in answers:
            if not num_succeeded or isinstance(error, ServerBusyError):
                raise error
        repeated = self._call_each([server for server, _ in answers], call)[1]
        for server, error in repeated:
            if not isinstance(error, ServerBusyError):
                self._recovery.recover(*server, error)
        for _, error in repeated:
            if isinstance(error, ServerBusyError):
                raise error

    def _call_each(self, servers: Sequence[Server], call: Call) -> tuple[int, list[tuple[Server, VerlServerError]]]:
        """The number of servers on which a call has succeeded, and the errors of the others that have not died."""
        calls = [(server, self._fleet.executor.submit(call, server[1])) for server in servers]
        num_succeeded = 0
        errors: list[tuple[Server, VerlServerError]] = []
        for server, future in calls:
            try:
                future.result()
                num_succeeded += 1
            except (ServerDiedError, ShutDownError):
                continue
            except VerlServerError as error:
                errors.append((server, error))
        return num_succeeded, errors

    def restart(self, replica: Replica, adapter: HttpServerEngineAdapter, error: VerlServerError) -> None:
        """Start the server of a replica again. Does nothing when `adapter` is not its server any more."""
        self._recovery.recover(replica, adapter, error)

    def leave_out_failed(self, members: Mapping[str, Server], failed: Collection[str], error: VerlServerError) -> bool:
        """Start the servers again that fail updates repeatedly, while other members of the update do not fail.

        `members` are the servers of the attempt that failed with `error`, by their names as members. `failed` are the
        names of those that caused the error. Returns whether a server is left out of the next attempt.
        """
        if len(failed) == len(members):
            return False  # the fault is in the update
        left_out = False
        for name in failed:
            replica, adapter = members[name]
            with self._fleet.lock:
                replica.failed_updates += 1
                is_broken = replica.failed_updates >= MAX_FAILED_UPDATES
            if is_broken:
                self._recovery.recover(replica, adapter, error)
                left_out = True
        return left_out
