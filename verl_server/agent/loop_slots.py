"""`LoopSlots`: a number of slots in each event loop. A semaphore of asyncio belongs to one event loop."""

from __future__ import annotations

import asyncio
import threading


class LoopSlots:
    """Semaphores with the same number of slots, one for each event loop that asks. Threads may share the object."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._semaphores = dict[asyncio.AbstractEventLoop, asyncio.Semaphore]()
        self._lock = threading.Lock()

    def of_running_loop(self) -> asyncio.Semaphore:
        """The semaphore of the running event loop."""
        loop = asyncio.get_running_loop()
        if (semaphore := self._semaphores.get(loop)) is None:
            with self._lock:
                # Not a dict of weak keys: a semaphore refers to its event loop, and would keep it.
                for other in [other for other in self._semaphores if other.is_closed()]:
                    del self._semaphores[other]
                semaphore = self._semaphores[loop] = asyncio.Semaphore(self._num_slots)
        return semaphore
