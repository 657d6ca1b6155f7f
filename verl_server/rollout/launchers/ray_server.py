"""One server that Ray actors run: `ServerActor` on each node of the server, and `RayServer`, which supervises them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RaySystemError

from verl_server.adapter.engine import get_engine
from verl_server.config import AdapterConfig, shares_forkservers
from verl_server.errors import ServerDiedError, ShutDownError, VerlServerError, to_wire
from verl_server.ranks.placement import machine_id
from verl_server.server.launch import PortReservation, join_host_port
from verl_server.server.process import ExitNotifier, ExitStatus, SchedulerCpu, ServerPids
from verl_server.types import Json

POLL_INTERVAL_S = 0.5
ANSWER_TIMEOUT_S = 30.0
"""Seconds within which an actor on a living node answers a short call."""
ACTOR_OPTIONS = {"max_concurrency": 8, "max_task_retries": -1}
"""Ray options of a `ServerActor`. When the connection to it breaks, Ray sends the calls in flight again, until it knows
that the actor is dead: a link that is cut for a moment, and a reply that is lost, say nothing about the server."""


class ServerActor:
    """Ray actor that starts the server of one node, watches it and ends it.

    Its methods run in threads, so the actor answers while one method waits. Each of them is short, and may be called
    again: the reply to the first call may have been lost.
    """

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self._started = threading.Event()
        """Set when the start has succeeded or failed."""
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._server: Any = None
        self._outcome: Json = {}

    def describe_node(self) -> Json:
        """The node's address, its machine id, and a free address on it for SGLang's distributed initialization."""
        host = ray.util.get_node_ip_address()
        reservation = PortReservation(host)
        reservation.release()
        return {"host": host, "machine": machine_id(), "free_address": join_host_port(host, reservation.port)}

    def start(self, server_args: Json, config: AdapterConfig, env: Mapping[str, str]) -> Json:
        """Start the server, unless an earlier call has done so.

        Returns URL, process id and keys when it is ready, an error as JSON when it has failed, and {} before that.
        """
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, args=(server_args, config, env), daemon=True)
                self._thread.start()
        self._started.wait(POLL_INTERVAL_S)
        return self._outcome

    def _run(self, server_args: Json, config: AdapterConfig, env: Mapping[str, str]) -> None:
        """Start the server, and end it when `stop` is called. A server cannot outlive the thread that has forked it."""

        def check_abort() -> VerlServerError | None:
            return ShutDownError("the replica was stopped while it started") if self._stopped.is_set() else None

        try:
            # An actor starts one server: a forkserver of its own would be of no use.
            own_config = replace(config, use_forkserver=config.use_forkserver and shares_forkservers())
            self._server = server = get_engine(own_config.engine_kind).launch(server_args, own_config, env, check_abort)
        except Exception as error:  # noqa: BLE001 - the process that starts the replica raises it
            self._outcome = {"error": to_wire(error)}
        else:
            keys = {"api_key": server.api_key, "admin_api_key": server.admin_api_key}
            self._outcome = {"base_url": server.base_url, "pid": server.process.pids.main, **keys}
        self._started.set()
        self._stopped.wait()
        if self._server is not None:
            self._server.process.stop()

    def remote_server(self) -> Json | None:
        """The fields of a `RemoteServer`, for other jobs. None while the server is not ready or has ended."""
        server = self._server
        if server is None or server.process.exit is not None:
            return None
        return {"base_url": server.base_url, "api_key": server.api_key, "admin_api_key": server.admin_api_key}

    def watch(self, timeout_s: float) -> Json:
        """How the server ended, if it ends within `timeout_s` seconds, and the CPU time of its schedulers."""
        exit_status = self._server.process.wait_exit(timeout_s)
        return {
            "exit": None if exit_status is None else asdict(exit_status),
            "cpu": None if exit_status is not None else asdict(self._server.process.scheduler_cpu()),
        }

    def keep_log(self) -> None:
        """Keep the server's log on this node when the server is ended."""
        if self._server is not None:
            self._server.process.keep_log()

    def stop(self) -> None:
        """End the server."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()


class RayServer(ExitNotifier):
    """A `Supervisor` of a server that Ray actors run. It holds the handles of the actors."""

    log_path: Path | None = None
    """The log files are on the nodes of the actors."""

    def __init__(self, name: str, actors: Sequence[Any], free_resources: Callable[[], None], pid: int) -> None:
        """`pid`: process id of the server main on the first node. `free_resources` returns the devices to Ray."""
        super().__init__()
        self._name, self._actors, self._free_resources = name, list(actors), free_resources
        self._pids = ServerPids(main=pid, warden=None, workers=())
        self._cpu = SchedulerCpu(0.0, 0.0)
        threading.Thread(target=self._watch, name=f"verl-server-{name}-watch", daemon=True).start()

    @property
    def pids(self) -> ServerPids:
        """Process id of the server main on the machine of the first node."""
        return self._pids

    def _watch(self) -> None:
        """Ask all actors repeatedly. The first end that an actor reports is the end of the server."""
        while self.exit is None:
            try:
                calls = call_actors(self._actors, "watch", POLL_INTERVAL_S)
                done, waiting = wait(calls, ANSWER_TIMEOUT_S, FIRST_EXCEPTION)
                reports = [call.result() for call in done]
            except RayError as error:
                self.note_exit(ExitStatus(f"its Ray actor: {first_line(error)}", None, ""))
                return
            except (Exception, SystemExit) as error:  # noqa: BLE001 - Ray itself was shut down
                self.note_exit(ExitStatus(f"Ray: {first_line(error)}", None, ""))
                return
            if waiting:  # a busy node, or one that cannot be reached now; a call to a dead one raises RayError
                continue
            nodes = [SchedulerCpu(**report["cpu"]) for report in reports if report["cpu"] is not None]
            self._cpu = SchedulerCpu(sum(node.own_s for node in nodes), sum(node.helpers_s for node in nodes))
            for report in reports:
                if report["exit"] is not None:
                    self.note_exit(ExitStatus(**report["exit"]))

    def died(self, url: str) -> ServerDiedError:
        exit_status = self.exit
        assert exit_status is not None
        return ServerDiedError(
            f"the server of {self._name} at {url} ended ({exit_status.describe()}) while it was needed",
            exit_code=exit_status.code,
            log_tail=exit_status.log_tail,
            url=url,
        )

    def scheduler_cpu(self) -> SchedulerCpu:
        return self._cpu

    def keep_log(self) -> None:
        with contextlib.suppress(Exception):  # an actor that has ended has kept its log, or cannot
            call_actors(self._actors, "keep_log")

    def stop(self, deadline_s: float = 10.0) -> None:
        end_actors(self._actors, self._free_resources, deadline_s)
        self.note_exit(ExitStatus("stop", None, ""))


def call_actors(actors: Sequence[Any], method: str, *args: Any) -> list[Future[Any]]:
    """Call a method of all actors. Wait for the futures, not in `ray.get`: Ray may be shut down meanwhile, and a thread
    that is in `ray.get` then crashes the process.

    Raises RaySystemError if Ray was shut down: a call would connect this process again.
    """
    if not ray.is_initialized():
        raise RaySystemError("Ray was shut down in this process")
    return [getattr(actor, method).remote(*args).future() for actor in actors]


def end_actors(actors: Sequence[Any], free_resources: Callable[[], None], deadline_s: float) -> None:
    """End the servers of the actors within `deadline_s` seconds, then the actors, and return the devices to Ray.

    If Ray was shut down, it has done all of this, and a call would connect this process again.
    """
    if not ray.is_initialized():
        return
    with contextlib.suppress(Exception):  # an actor that is dead or too slow: its server ends with it
        wait(call_actors(actors, "stop"), deadline_s)
    for actor in actors:
        with contextlib.suppress(Exception):
            ray.kill(actor)
    with contextlib.suppress(Exception):
        free_resources()


def node_arguments(server_args: Mapping[str, Any], node: int, nodes: Sequence[Json]) -> Json:
    """The server arguments of one node. `nodes`: what `ServerActor.describe_node` returned on each node."""
    args = {**server_args, "host": server_args.get("host") or nodes[node]["host"]}
    if len(nodes) > 1:
        args.update(nnodes=len(nodes), node_rank=node, dist_init_addr=nodes[0]["free_address"])
    return args


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
