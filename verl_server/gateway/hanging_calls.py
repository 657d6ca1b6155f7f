"""`CallThatMayHang`: calls a function that may block for ever, for example on a disk that hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import Any

from verl_server.agent.user_code import call_user_function


class CallThatMayHang:
    """Calls a function in a daemon thread. Callers with equal arguments wait for the call that runs already."""

    def __init__(self, name: str, function: Callable[..., Any], *, uses_late_results: bool = True) -> None:
        """`name`: what the function does, for the error.

        `uses_late_results`: a result that came after the timeout of its callers goes to the next caller. Otherwise, the
        next caller calls the function again.
        """
        self._name, self._function, self._uses_late_results = name, function, uses_late_results
        self._calls = dict[tuple[Hashable, ...], tuple[asyncio.Task[Any], float]]()
        """By arguments, the call whose result nobody has got yet, and the end of its timeout (`loop.time`)."""

    async def result(self, timeout_s: float, *args: Hashable) -> Any:
        """Call the function, or wait for the call with equal arguments that still runs.

        Raises TimeoutError when the call has run for `timeout_s` seconds, and the exceptions of the function.
        """
        now = asyncio.get_running_loop().time()
        task, deadline = self._calls.get(args, (None, 0.0))
        if task is not None and task.done() and not self._uses_late_results:
            task.exception()  # so that asyncio does not log it
            task = None
        if task is None:
            task, deadline = asyncio.create_task(call_user_function(self._function, *args)), now + timeout_s
            self._calls[args] = task, deadline
        await asyncio.wait((task,), timeout=max(deadline - now, 0.0))
        if not task.done():
            raise TimeoutError(f"{self._name} took more than {timeout_s:g} s")
        if self._calls.get(args, (None,))[0] is task:
            del self._calls[args]
        return task.result()

    async def cancel(self) -> None:
        """Stop waiting for all calls. A function that hangs does so in its daemon thread."""
        tasks = [task for task, _ in self._calls.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
