"""Start a supervised server: reserve a port, wait until the server is ready, retry when the port was taken."""

from __future__ import annotations

import contextlib
import http.client
import logging
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from verl_server.config import AdapterConfig
from verl_server.errors import BadInputError, StartupError
from verl_server.server.environment import (
    ANSWER_TIMEOUT_S,
    EngineProfile,
    ServerPython,
    find_server_python,
    may_have_accelerator,
)
from verl_server.server.process import AbortCheck, ServerProcess, WardenFactory, never_abort, spawn_warden
from verl_server.validation import is_whole_number, make_writable_folder

logger = logging.getLogger(__name__)


# -- Ports ------------------------------------------------------------------------------------------
# Reservation of free ports, `host:port` in URLs, and sockets that notice the loss of the other machine.

KEEPALIVE_S = 30
"""Seconds without data before the kernel asks whether the other machine is still there, and between two questions."""
LOST_MACHINE_S = 120
"""Seconds without an answer of the other machine after which the kernel closes a connection."""


BACKLOG = 2048
"""Number of connections that wait until the server accepts them."""


class PortReservation:
    """A port that is reserved until the server binds it.

    The reservation is a bound socket that never listens. On Linux a second socket with SO_REUSEADDR may bind the same
    port as long as no socket listens on it. So the server can bind the port, and the kernel gives the port to no
    program that requests any free port. A program that requests this port number can still take it; callers then try
    another.
    """

    def __init__(self, host: str, port: int | None = None) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port or 0))
        except (OSError, OverflowError) as error:
            self._socket.close()
            raise BadInputError(
                f"cannot bind {host} port {port or 'any'}: {getattr(error, 'strerror', error)}. "
                "Choose another `port` (or leave it out) and a `host` of this machine."
            ) from error
        self.port: int = self._socket.getsockname()[1]

    def release(self) -> None:
        """Release the port. May be called more than once."""
        self._socket.close()


def bind(host: str, port: int) -> socket.socket:
    """A socket that is bound to `host`, for `listen`. `port` 0: a free port.

    Raises BadInputError for a port that is in use, and for a host that is no address of this machine.
    """
    if not is_whole_number(port) or not 0 <= port <= 65535:
        raise BadInputError(f"port must be a whole number from 0 to 65535, got {port!r}")
    with _explain_failure(host, port):
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except BaseException:
            bound.close()
            raise
    return bound


def listen(bound: socket.socket) -> None:
    """Let a socket of `bind` listen. Raises BadInputError if another program has taken the port meanwhile."""
    host, port = bound.getsockname()[:2]
    with _explain_failure(host, port):
        bound.listen(BACKLOG)


@contextlib.contextmanager
def _explain_failure(host: str, port: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BadInputError(
            f"cannot listen on port {port} of {host}: {error.strerror or error}; choose another port (--port), 0 for a "
            "free port, or another host (--host) of this machine"
        ) from error


def join_host_port(host: str, port: int) -> str:
    """`host:port` for a URL. IPv6 addresses are put in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def notice_lost_machine(connection: socket.socket, timeout_s: float) -> None:
    """Let the kernel close a connection whose other machine answers nothing for `timeout_s` seconds."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * timeout_s))


def open_socket(address: tuple[Any, ...]) -> socket.socket:
    """A socket for an entry of `socket.getaddrinfo`, for example as the `socket_factory` of aiohttp's TCPConnector.

    A machine that has vanished closes no connection: without `LOST_MACHINE_S`, a call would wait for ever.
    """
    family, kind, protocol = address[:3]
    opened = socket.socket(family, kind, protocol)
    notice_lost_machine(opened, LOST_MACHINE_S)
    return opened


# -- Launch -----------------------------------------------------------------------------------------

PROBE_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class LaunchedServer:
    """A server that is ready. `repr` does not show the keys."""

    process: ServerProcess
    base_url: str
    api_key: str = field(repr=False)
    admin_api_key: str = field(repr=False)
    server_args: Mapping[str, Any] = field(repr=False, default_factory=dict)
    """Arguments that the server was started with, its port included."""


def launch_server(
    server_args: Mapping[str, Any],
    profile: EngineProfile,
    config: AdapterConfig,
    env: Mapping[str, str],
    check_abort: AbortCheck = never_abort,
) -> LaunchedServer:
    """Start a server as a child of a new warden and wait until the server is ready.

    `server_args` must contain `host`, `api_key` and `admin_api_key`. Without a `port` a free port is chosen; if another
    program takes that port before the server listens, the start is retried with another port. The server is forked by
    a forkserver of this process where `forkserver.py` allows it, unless `config.use_forkserver` is False.

    Raises the error that `check_abort` returns, StartupError, DeadlineError or BadInputError (`config.log_dir` takes no
    files, `config.server_python` is no interpreter, or the engine refuses an argument). All processes that were started
    are ended before the error is raised.
    """
    if config.log_dir is not None:
        config = replace(config, log_dir=make_writable_folder("log_dir", config.log_dir))
    python = find_server_python(config.server_python, env, profile, min(ANSWER_TIMEOUT_S, config.timeouts.start_s))
    start_warden: WardenFactory = spawn_warden
    if config.use_forkserver and not may_have_accelerator({**os.environ, **env}):
        from verl_server.cpu.forkserver import warden_factory

        start_warden = warden_factory(profile, env, config.timeouts.start_s / 2, check_abort, python)
    requested_port = server_args.get("port")
    for attempt in range(1, config.max_start_attempts + 1):
        reservation = PortReservation(server_args["host"], requested_port)
        args = {**server_args, "port": reservation.port}
        try:
            return _launch_once(args, profile, config, env, check_abort, start_warden, python)
        except StartupError as error:
            log_tail = str(error.details.get("log_tail", "")).lower()
            is_port_taken = any(phrase in log_tail for phrase in profile.port_taken_phrases)
            if not is_port_taken or requested_port is not None or attempt == config.max_start_attempts:
                raise
            logger.warning("another program took port %d; starting the server on another port", reservation.port)
        finally:
            reservation.release()
    raise AssertionError("unreachable: the last attempt returns or raises")


def _launch_once(
    args: dict[str, Any],
    profile: EngineProfile,
    config: AdapterConfig,
    env: Mapping[str, str],
    check_abort: AbortCheck,
    start_warden: WardenFactory,
    python: ServerPython | None,
) -> LaunchedServer:
    host = _connect_host(args["host"])
    process = ServerProcess(
        args,
        profile,
        env=env,
        log_dir=config.log_dir,
        start_timeout_s=config.timeouts.start_s,
        warden_factory=start_warden,
        python=python,
    )
    try:
        is_main_node = int(args.get("node_rank") or 0) == 0
        paths = profile.ready_paths if is_main_node else profile.worker_node_ready_paths
        process.wait_ready(
            lambda: _is_ready(host, args["port"], paths),
            config.timeouts.start_s,
            fatal_log_phrases=profile.port_taken_phrases,
            check_abort=check_abort,
        )
        if is_main_node:
            _require_own_server(host, args["port"], args["api_key"], profile)
    except BaseException:
        process.stop(config.timeouts.stop_s)
        raise
    return LaunchedServer(
        process=process,
        base_url=f"http://{join_host_port(host, args['port'])}",
        api_key=args["api_key"],
        admin_api_key=args["admin_api_key"],
        server_args=args,
    )


def _require_own_server(host: str, port: int, api_key: str, profile: EngineProfile) -> None:
    """Raise StartupError when another server answers on the port: that server does not accept our API key."""
    if _get_status(host, port, profile.authenticated_path, api_key) == 401:
        raise StartupError(f"another server answers on port {port}", log_tail=profile.port_taken_phrases[0])


def _connect_host(bind_host: str) -> str:
    """The address at which this machine reaches a server that binds `bind_host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bind_host, bind_host)


def _is_ready(host: str, port: int, paths: tuple[str, ...]) -> bool:
    """Whether the server is ready. `paths` are requested in order; a path that answers 404 is skipped."""
    for path in paths:
        status = _get_status(host, port, path)
        if status != 404:
            return status == 200
    return False


def _get_status(host: str, port: int, path: str, api_key: str = "") -> int | None:
    """The HTTP status of one GET request, or None when no server answers."""
    connection = http.client.HTTPConnection(host, port, timeout=PROBE_TIMEOUT_S)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {api_key}"})
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
