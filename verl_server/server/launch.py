"""Start a supervised server: keys, port, readiness, one more try when the port was snatched."""

from __future__ import annotations

import http.client
import json
import logging
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_server.adapter import sglang as api
from verl_server.config import AdapterConfig
from verl_server.errors import BadInputError, StartupError
from verl_server.server.ports import PortReservation, authority
from verl_server.server.process import GiveUp, ServerProcess, Wardens, never, spawn_warden

logger = logging.getLogger(__name__)

#: The loader that runs inside the server and reads weights from shared memory (see `weights/loader.py`).
WEIGHT_LOADER = "verl_server.weights.loader.load"
PORT_TAKEN = ("address already in use", "port is already in use", "is not available", "errno 98")


@dataclass(frozen=True)
class LaunchedServer:
    """A server that is ready. Keys are never shown by `repr`."""

    process: ServerProcess
    base_url: str
    api_key: str = field(repr=False)
    admin_api_key: str = field(repr=False)
    server_args: Mapping[str, Any] = field(repr=False, default_factory=dict)


def complete_server_args(server_args: Mapping[str, Any]) -> dict[str, Any]:
    """The caller's arguments with what we always add: loopback, random keys, our weight loader.

    `tp` and `dp` style short names are not translated: these are the fields of SGLang's `ServerArgs`.
    """
    args = checked_server_args(server_args)
    args["host"] = args.get("host") or "127.0.0.1"
    args["api_key"] = args.get("api_key") or secrets.token_urlsafe(32)
    args["admin_api_key"] = args.get("admin_api_key") or secrets.token_urlsafe(32)
    loaders = args.get("custom_weight_loader") or []
    loaders = [loaders] if isinstance(loaders, str) else list(loaders)
    args["custom_weight_loader"] = [*loaders, *([] if WEIGHT_LOADER in loaders else [WEIGHT_LOADER])]
    return args


def checked_server_args(server_args: Mapping[str, Any]) -> dict[str, Any]:
    """A copy in plain JSON values, as they travel to the server's process. Raises BadInputError otherwise."""
    args = {**server_args, "model_path": _model_path(server_args.get("model_path"))}
    for name, value in args.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise BadInputError(
                f"server argument {name!r} must be a plain JSON value to travel to the server process, "
                f"got {type(value).__name__}: {error}",
                argument=name,
            ) from error
    return args


def _model_path(given: Any) -> str:
    """Refuse what is surely no model before a process is spawned. A name without a root may be a hub's."""
    if not isinstance(given, (str, os.PathLike)) or not str(given):
        raise BadInputError(f"model_path must name a folder or a model of a hub, got {given!r}")
    path = str(given)
    if path.startswith(("/", "./", "../", "~")) and not Path(path).exists():
        raise BadInputError(f"there is no model at {path}")
    return path


def launch(
    server_args: Mapping[str, Any],
    config: AdapterConfig,
    env: Mapping[str, str],
    give_up: GiveUp = never,
    warden: Wardens = spawn_warden,
) -> LaunchedServer:
    """Start a server below a new `warden` and wait until it is ready.

    Raises what `give_up` returns meanwhile, StartupError, BadInputError (an argument that SGLang refuses) or
    DeadlineError; whatever was started is ended first.
    """
    chosen_port = server_args.get("port")
    for attempt in range(1, config.start_attempts + 1):
        args = complete_server_args(server_args)
        reservation = PortReservation(args["host"], chosen_port)
        args["port"] = reservation.port
        try:
            return _start_once(args, config, env, give_up, warden)
        except StartupError as error:
            words = str(error.details.get("log_tail", "")).lower()
            taken = any(phrase in words for phrase in PORT_TAKEN)
            if not taken or chosen_port is not None or attempt == config.start_attempts:
                raise
            logger.warning("port %d was taken by another program; trying another", reservation.port)
        finally:
            reservation.release()
    raise AssertionError("unreachable: the last attempt returns or raises")


def _start_once(
    args: dict[str, Any], config: AdapterConfig, env: Mapping[str, str], give_up: GiveUp, warden: Wardens
) -> LaunchedServer:
    host = _connect_host(args["host"])
    process = ServerProcess(args, env=env, log_dir=config.log_dir, deadline_s=config.timeouts.start_s, warden=warden)
    try:
        head = int(args.get("node_rank") or 0) == 0
        paths = (api.READY.path, api.HEALTH.path) if head else (api.PING.path, api.HEALTH.path)
        process.wait_ready(
            lambda: _answers(host, args["port"], paths),
            config.timeouts.start_s,
            fatal_words=PORT_TAKEN,
            give_up=give_up,
        )
        if head:
            _require_our_own(host, args["port"], args["api_key"])
    except BaseException:
        process.stop(config.timeouts.stop_s)
        raise
    return LaunchedServer(
        process=process,
        base_url=f"http://{authority(host, args['port'])}",
        api_key=args["api_key"],
        admin_api_key=args["admin_api_key"],
        server_args=args,
    )


def _require_our_own(host: str, port: int, api_key: str) -> None:
    """Raise StartupError when it is somebody else's server that answers: it does not know our key."""
    if _status(host, port, api.MODEL_INFO.path, api_key) == 401:
        raise StartupError("another server answers on this port", log_tail=PORT_TAKEN[0])


def _connect_host(bind_host: str) -> str:
    """Where to reach a server of this machine that binds `bind_host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bind_host, bind_host)


def _answers(host: str, port: int, paths: tuple[str, str]) -> bool:
    """Whether the server is ready; the second path is asked where the first does not exist (old versions)."""
    for path in paths:
        status = _status(host, port, path)
        if status != 404:
            return status == 200
    return False


def _status(host: str, port: int, path: str, api_key: str = "") -> int | None:
    """The status of one GET, or None when nobody answers."""
    connection = http.client.HTTPConnection(host, port, timeout=5.0)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {api_key}"})
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
