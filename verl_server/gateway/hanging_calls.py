"""`CallThatMayHang`: calls a function that may block for ever, for example on a disk that hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from verl_server.agent.user_code import call_user_function


class CallThatMayHang:
    """Calls a function in a daemon thread, one call at a time: callers wait for the call that runs already."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        """`name`: what the function does, for the error."""
        self._name, self._function = name, function
        self._task: asyncio.Task[Any] | None = None
        self._deadline = 0.0

    async def result(self, timeout_s: float, *args: Any) -> Any:
        """Call the function, or wait for the call that still runs.

        Raises TimeoutError when the call has run for `timeout_s` seconds, and the exceptions of the function.
        """
        now = asyncio.get_running_loop().time()
        if self._task is None:
            self._task = asyncio.create_task(call_user_function(self._function, *args))
            self._deadline = now + timeout_s
        task = self._task
        await asyncio.wait((task,), timeout=max(self._deadline - now, 0.0))
        if not task.done():
            raise TimeoutError(f"{self._name} took more than {timeout_s:g} s")
        if self._task is task:
            self._task = None
        return task.result()

    async def cancel(self) -> None:
        """Stop waiting for the call. A function that hangs does so in its daemon thread."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
