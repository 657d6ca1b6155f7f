"""A store of torch with a deadline for every operation."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

T = TypeVar("T")

ANSWER_TIMEOUT_S = 10.0
"""Seconds that an operation may take. A process that is alive answers at once."""
OVERDUE_TIMEOUT_S = 0.5
"""Seconds for an operation while an earlier one is overdue."""
CANCEL_INTERVAL_S = 0.5
"""Seconds between two looks at whether what an operation waits for has been abandoned."""

_Calls = queue.SimpleQueue[tuple[Callable[[], Any], "Future[Any]"] | None]


class BoundedStore:
    """The store that `open_store()` returns. Its operations raise ConnectionError if the store does not answer.

    Torch's own deadlines are those of the process that holds the store: a client waits for ever for a process that is
    stopped, or for a machine that has vanished. Therefore one thread makes all operations, in order. After an operation
    that is overdue, the next ones raise soon, but are still made if the store answers again: other ranks must learn
    what this rank wrote.
    """

    def __init__(self, open_store: Callable[[], Any]) -> None:
        self._calls: _Calls = queue.SimpleQueue()
        self._overdue: Future[Any] | None = None
        threading.Thread(target=_make_calls, args=(self._calls,), name="verl-server-store", daemon=True).start()
        weakref.finalize(self, self._calls.put, None)
        self._store = self._within(ANSWER_TIMEOUT_S, open_store)

    def call(
        self,
        operation: Callable[[Any], T],
        timeout_s: float = ANSWER_TIMEOUT_S,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> T:
        """The result of `operation(store)`, which gets torch's own store.

        Raises ConnectionError soon after `is_cancelled()` becomes true, which must not use this store.
        """
        store = self._store
        return self._within(timeout_s, lambda: operation(store), is_cancelled)

    def get(self, key: str) -> bytes:
        """The value of a key, for which torch's store waits as long as its own timeout says."""
        return self.call(lambda store: bytes(store.get(key)), self._store.timeout.total_seconds() + ANSWER_TIMEOUT_S)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Another operation of torch's store: `check`, `set`, `multi_get` and so on."""
        return lambda *args: self.call(lambda store: getattr(store, name)(*args))

    def _within(self, timeout_s: float, call: Callable[[], T], is_cancelled: Callable[[], bool] = lambda: False) -> T:
        outcome: Future[T] = Future()
        self._calls.put((call, outcome))
        is_overdue = self._overdue is not None and not self._overdue.done()
        deadline = time.monotonic() + (OVERDUE_TIMEOUT_S if is_overdue else timeout_s)
        while wait([outcome], min(CANCEL_INTERVAL_S, max(0.0, deadline - time.monotonic()))).not_done:
            if time.monotonic() >= deadline:
                if not is_overdue:
                    self._overdue = outcome
                raise ConnectionError(f"the trainer's machine did not answer within {timeout_s:g} s")
            if is_cancelled():
                raise ConnectionError("the trainer has abandoned the update")
        return outcome.result()


def _make_calls(calls: _Calls) -> None:
    """The thread of a store. It keeps no reference to the store, so that it ends with it."""
    while (item := calls.get()) is not None:
        call, outcome = item
        try:
            outcome.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised by the waiting thread
            outcome.set_exception(error)
        del item, call, outcome
