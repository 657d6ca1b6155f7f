"""`Replica`: one member of a fleet. Its server is replaced when it ends; the replica and its name stay."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from verl_server.adapter import HttpServerEngineAdapter
from verl_server.adapter.sglang.replies import num_data_parallel_ranks
from verl_server.config import AdapterConfig, EngineKind
from verl_server.errors import NotReadyError, ServerDiedError, ShutDownError, VerlServerError
from verl_server.rollout.health import Observation, ReplicaState
from verl_server.rollout.launchers.base import Launcher
from verl_server.rollout.signs_of_life import SignsOfLife
from verl_server.types import ServerInfo


class StartPreempted(NotReadyError):
    """The start of a server was ended because the fleet released its memory."""


class Replica:
    """One server of a fleet, its state and its history.

    The public attributes are written under the fleet's lock only.
    """

    def __init__(
        self,
        name: str,
        launcher: Launcher,
        server_args: Mapping[str, Any],
        config: AdapterConfig,
        env: Mapping[str, str],
    ) -> None:
        self.name, self._launcher, self._server_args, self._config = name, launcher, dict(server_args), config
        self._env = dict(env)
        self.state = ReplicaState.STARTING
        self.weight_version = 0
        """Version of the weights that its server has."""
        self.adapter: HttpServerEngineAdapter | None = None
        """Adapter of its running server. None without a server."""
        self.deaths: list[float] = []
        """Times at which its servers ended (`time.monotonic`)."""
        self.failed_starts = 0
        """Number of starts in a row after which the replica did not become healthy."""
        self.num_servers = 0
        """Number of servers that were taken into use."""
        self.failed_updates = 0
        """Number of attempts at weight updates that its server has failed since the last published update."""
        self.restarts = 0
        """Number of times that a new server replaced an ended server."""
        self.error: VerlServerError | None = None
        """The reason of the states DEAD, RESTARTING and FAILED, and of STALE if it waits for the next update."""
        self.failed_replays = 0
        """Number of attempts at loading the published weights that its server has failed since they were published."""
        self.replay_after = 0.0
        """Time before which the next attempt does not begin (`time.monotonic`)."""
        self.needs_update = False
        """Whether the published weights cannot be loaded into its server, so that it waits for the next update."""
        self._stopped = threading.Event()
        self._preempted = threading.Event()
        self.end_lock = threading.Lock()
        """Held while a server is being ended."""
        self._start_lock = threading.Lock()
        """Held while a server is being started."""
        self._fused_modules: tuple[tuple[str, ...], ...] | None = None
        """See `ServerInfo.fused_modules`."""
        self._signs: SignsOfLife | None = None
        """Signs of life of its server."""
        self._last_idle_at = 0.0
        """Time at which it last had no requests or was paused."""
        self._observed_at = time.monotonic()

    def use_server(self, adapter: HttpServerEngineAdapter) -> None:
        """Take a new server into use."""
        self.adapter, self.failed_updates = adapter, 0
        self.num_servers += 1
        self.forget_failed_replays()

    def forget_failed_replays(self) -> None:
        """The replica has a new server, or other weights were published."""
        self.failed_replays, self.replay_after, self.needs_update = 0, 0.0, False

    @property
    def member(self) -> ServerInfo:
        """Its server as a member of weight updates. The name changes when a new server takes over."""
        tp_size = int(self._server_args.get("tp_size") or 1)
        is_current = self.state is not ReplicaState.STALE
        return ServerInfo(f"{self.name}/{self.num_servers}", tp_size, self._fused_modules, is_current)

    @property
    def dp_size(self) -> int:
        """Number of data parallel ranks of its server."""
        return num_data_parallel_ranks(self._server_args)

    def start(self, on_ready: Callable[[Replica, HttpServerEngineAdapter], None]) -> None:
        """Start a new server and call `on_ready` when the server is ready. The server is ended when `on_ready` fails.

        Raises StartupError, StartPreempted, and ShutDownError when the replica was stopped meanwhile.
        """
        with self._start_lock:
            if (error := self._check_abort()) is not None:
                raise error
            adapter = self._launcher.start_server(
                self.name, self._server_args, self._config, self._env, self._check_abort
            )
            try:
                self._signs = SignsOfLife(adapter)
                if self._config.engine_kind == EngineKind.VLLM:
                    self._fused_modules = adapter.fused_modules()
                on_ready(self, adapter)
            except BaseException:
                adapter.shutdown()
                raise

    def _check_abort(self) -> VerlServerError | None:
        """The reason to end a start that is in progress, or None."""
        if self._stopped.is_set():
            return ShutDownError(f"replica {self.name} was stopped while its server started")
        if self._preempted.is_set():
            return StartPreempted(f"the fleet released its memory while the server of {self.name} started")
        return None

    def preempt_start(self) -> None:
        """End a start that is in progress, and refuse further starts. Returns when no start is in progress."""
        self._preempted.set()
        with self._start_lock:
            pass

    def allow_start(self) -> None:
        """Allow starts again after `preempt_start`."""
        self._preempted.clear()

    def observe(self, running_requests: int, last_progress_at: float, look_interval_s: float) -> Observation:
        """Observe the server now. The routers provide the number of requests and the time of the last new token.

        Signs of life are looked for, every `look_interval_s` seconds, only while no token arrives.
        """
        now = time.monotonic()
        adapter = self.adapter
        process = None if adapter is None else adapter.process
        if process is None or process.wait_exit(0.0) is not None:
            return Observation(is_alive=False, running_requests=running_requests, no_progress_s=0.0, no_sign_s=0.0)
        assert adapter is not None
        assert self._signs is not None
        is_paused = adapter.paused or bool(adapter.released_memory)
        was_suspended = (
            now - self._observed_at > 4 * look_interval_s
        )  # this process itself: nobody has looked meanwhile
        self._observed_at = now
        if is_paused or not running_requests or was_suspended:
            self._last_idle_at = now
        last_sign_at = quiet_since = max(last_progress_at, self._last_idle_at)
        if now - quiet_since >= look_interval_s:
            last_sign_at = max(quiet_since, self._signs.last_sign_at(now, look_interval_s))
        return Observation(
            is_alive=True,
            running_requests=running_requests,
            no_progress_s=now - quiet_since,
            no_sign_s=now - last_sign_at,
            is_paused=is_paused,
        )

    def death_error(self, reason: str) -> VerlServerError:
        """The error that describes the end of its server; `reason` describes a server that still runs."""
        adapter = self.adapter
        process = None if adapter is None else adapter.process
        if adapter is not None and process is not None and process.wait_exit(0.0) is not None:
            return process.died(adapter.base_url)
        return ServerDiedError(f"replica {self.name} {reason}", replica=self.name)

    def refuse_starts(self) -> None:
        """Refuse further starts permanently, and end a start that is in progress."""
        self._stopped.set()

    def free_devices(self) -> None:
        """Give the devices back to the launcher. The replica starts no more servers."""
        self._launcher.forget_replica(self.name)
