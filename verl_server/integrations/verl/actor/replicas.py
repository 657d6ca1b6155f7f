"""`FleetReplicas`: starts the manager of a fleet and its replicas, one at a time or together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from urllib.parse import urlsplit

from verl_server.config import RolloutMode
from verl_server.errors import BadInputError, StartupError, VerlServerError
from verl_server.integrations.verl.fleet_spec import FleetSpec
from verl_server.rollout.fleet import Event
from verl_server.rollout.launchers.ray_placed_launcher import NodePlace, PlacedLauncher
from verl_server.rollout.manager import RolloutManager
from verl_server.validation import require_key

T = TypeVar("T")
logger = logging.getLogger(__name__)

KEY_VARIABLE = "VERL_SERVER_API_KEY"
"""Environment variable with the key for requests to a reward model."""
OTHER_ENVIRONMENT = (
    "Do not install an engine into the environment of verl, which needs other versions of its packages: set the "
    "environment variable VERL_SERVER_PYTHON, or engine_kwargs.verl_server.server_python, to the interpreter of an "
    "environment with the engine"
)
MAX_THREADS = 64
"""Maximum number of blocking calls at the same time."""


class Threads:
    """Runs blocking calls of an event loop."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="verl-server-actor")

    def run(self, call: Callable[..., T], *args: Any) -> Coroutine[Any, Any, T]:
        async def wait() -> T:
            return await asyncio.get_running_loop().run_in_executor(self._pool, lambda: call(*args))

        return wait()


class FleetReplicas:
    """The manager of the fleet, which is made with the first replica. Must be used in one event loop."""

    def __init__(self, spec: FleetSpec, threads: Threads) -> None:
        self._spec, self._threads = spec, threads
        self._launcher = PlacedLauncher()
        self._manager: asyncio.Future[RolloutManager] | None = None

    async def manager(self) -> RolloutManager:
        """The manager, which has no replicas at first. Raises the error of its start."""
        if self._manager is None:
            self._manager = asyncio.ensure_future(self._threads.run(self._make_manager))
        return await asyncio.shield(self._manager)

    def _make_manager(self) -> RolloutManager:
        spec = self._spec
        # The fleet's own mode `standalone` always broadcasts. With `hybrid`, servers on the machine of the trainer read
        # the weights in place, also when they have devices of their own.
        mode = RolloutMode.HYBRID if spec.mode is RolloutMode.STANDALONE else spec.mode
        key = {"api_key": _require_key()} if spec.serves_http else {}
        return RolloutManager(
            0,
            mode=mode,
            launcher=self._launcher,
            config=spec.own.adapter_config,
            router_process=spec.serves_http,
            on_event=_log_event,
            env=spec.own.env,
            **spec.server_args | key,
        )

    async def add(self, name: str, places: Sequence[NodePlace]) -> str:
        """Start the replica `name` at `places`. Returns the address at which it is known to verl, as HOST:PORT."""
        manager = await self.manager()
        if any(view.name == name for view in manager.replicas):
            raise BadInputError(f"there is a replica {name!r} already; the name of a replica contains its rank")
        self._launcher.assign(name, places)
        try:
            await self._threads.run(manager.add_replica, name)
        except StartupError as error:
            if self._spec.own.server_python is None:
                raise StartupError(f"{error.message}. {OTHER_ENVIRONMENT}", **error.details) from error
            raise
        if self._spec.serves_http:
            return urlsplit(manager.router_url).netloc
        view = next(view for view in manager.replicas if view.name == name)
        return urlsplit(view.base_url or f"//{name}").netloc

    @property
    def machines(self) -> frozenset[str]:
        """Machine ids of the nodes of all servers."""
        return self._launcher.machines

    async def shutdown(self) -> None:
        """End all servers."""
        if self._manager is not None:
            with contextlib.suppress(VerlServerError):
                await self._threads.run((await self._manager).shutdown)


def _require_key() -> str:
    """The key for requests over HTTP. Raises BadInputError if the environment has none."""
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not key:
        raise BadInputError(
            "verl asks a reward model over HTTP, and a server of this library answers only requests with a key: set "
            f"the environment variable {KEY_VARIABLE} in all processes of the run to a random text, and let the reward "
            f"function send it as the header `Authorization: Bearer KEY`"
        )
    return require_key(KEY_VARIABLE, key)


def _log_event(event: Event) -> None:
    """Write changes that a user must know into the log of the actor, which Ray shows in the log of the trainer."""
    change = f"{event['replica']}: {event['before']} -> {event['after']}"
    if event["error"]:
        logger.warning("verl_server: %s: %s", change, event["error"])
    elif event["after"] == "healthy":
        logger.warning("verl_server: %s, weight version %s", change, event["version"])
