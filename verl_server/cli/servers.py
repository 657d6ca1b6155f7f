"""`verl-server gateway`: agents act over HTTP through servers, a router or a fleet, which may start later."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verl_server.cli import arguments as options
from verl_server.cli.arguments import API_KEY, LOOPBACK
from verl_server.cli.common import (
    StopRequested,
    StopSignals,
    exit_after_cleanup,
    load_tokenizer,
    print_line,
    print_server,
    show_progress,
)
from verl_server.errors import BadInputError
from verl_server.tracing import collect_garbage_rarely
from verl_server.validation import require_http_url

if TYPE_CHECKING:
    from verl_server.adapter import HttpServerEngineAdapter
    from verl_server.agent.engines import Engine
    from verl_server.gateway import Gateway
    from verl_server.gateway.engines import EngineSource
    from verl_server.trajectory import ChatRenderer


# -- Server -----------------------------------------------------------------------------------------
# The server of `verl-server launch`: it runs until the command receives a signal, or until it ends by itself.


def run_server(
    server_args: Mapping[str, Any], log_dir: Path | None, server_python: Path | None, generated_keys: list[str]
) -> int:
    """Start a server, print its URL and the generated keys, and wait for SIGINT, SIGTERM or SIGHUP.

    Returns the exit code: 0 if the server was ready when the signal came, otherwise 128 plus the signal's number.
    Raises the errors of the start, and ServerDiedError when the server ends by itself.
    """
    signals = StopSignals()
    try:
        with signals, _start(server_args, log_dir, server_python) as adapter:
            signals.is_server_ready = True
            print_server(adapter, server_args, generated_keys)
            process = adapter.process
            assert process is not None
            process.wait_exit(threading.TIMEOUT_MAX)
            raise process.died(adapter.base_url)
    except StopRequested as stop:
        print_line("The server and all of its processes have ended.")
        return 0 if signals.is_server_ready else 128 + stop.number


def _start(server_args: Mapping[str, Any], log_dir: Path | None, server_python: Path | None) -> HttpServerEngineAdapter:
    from verl_server.adapter import HttpServerEngineAdapter
    from verl_server.config import AdapterConfig, shares_forkservers

    # A forkserver of its own would serve only one server.
    config = AdapterConfig(log_dir=log_dir, use_forkserver=shares_forkservers(), server_python=server_python)
    with show_progress(f"Starting a server for {server_args['model_path']}"):
        return HttpServerEngineAdapter(config=config, **server_args)


# -- Gateway ----------------------------------------------------------------------------------------

GATEWAY_KEY = "VERL_SERVER_GATEWAY_ADMIN_KEY"
EXAMPLE = "http://127.0.0.1:30000"

Model = Annotated[
    str | None, typer.Option(help="Folder or Hub name with the tokenizer. Needed for a router.", metavar="MODEL")
]
MaxContextTokens = Annotated[
    int | None, typer.Option(min=16, help="Maximum number of tokens of a prompt with its reply. Default: the server's.")
]
SessionExpiry = Annotated[
    float | None,
    typer.Option(min=1, help="Seconds after which a session ends by itself. Default: never.", metavar="SECONDS"),
]
ChatTemplateKwargs = Annotated[
    str | None,
    typer.Option(
        help="Variables of the chat template as JSON. Agents and sessions may replace them.",
        metavar="JSON",
    ),
]


def gateway(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Folder for the records of the sessions.")],
    server: Annotated[
        list[str] | None, typer.Option(help="URL of a server. Repeat the option for each server.", metavar="URL")
    ] = None,
    router: Annotated[str | None, typer.Option(help="URL of a router.", metavar="URL")] = None,
    fleet: Annotated[
        str | None, typer.Option(help="Ray namespace of a fleet, usually verl_server.", metavar="NAME")
    ] = None,
    model: Model = None,
    max_context_tokens: MaxContextTokens = None,
    host: options.Host = LOOPBACK,
    port: options.RouterPort = 0,
    is_open: Annotated[
        bool, typer.Option("--open", help="Serve requests without a key, or with the key open. For a laptop only.")
    ] = False,
    admin_key_file: Annotated[
        Path | None, typer.Option(help="File with the key of the admin API, instead of the environment.")
    ] = None,
    session_expiry: SessionExpiry = None,
    chat_template_kwargs: ChatTemplateKwargs = None,
) -> None:
    """Let unmodified agents act through servers, a router or a fleet, and record every token.

    Agents reach the gateway as OpenAI's or Anthropic's API, with the key of a session. Sessions are created with
    POST /admin/sessions. Servers may start after the gateway and restart: until one answers, agents get the error
    503 or 529, and /health/readiness has the reason.

    Keys are read from the environment: VERL_SERVER_API_KEY is the key of the servers or of the router,
    VERL_SERVER_GATEWAY_ADMIN_KEY the key of the admin API. On a terminal, a missing admin key is generated and printed.
    Without a terminal (systemd, Docker, nohup, a pipe), set the variable or pass --admin-key-file.

    Examples:
      verl-server gateway runs/a --server http://127.0.0.1:30000
      verl-server gateway runs/a --server http://10.0.0.2:30000 --server http://10.0.0.3:30000
      verl-server gateway runs/a --router http://127.0.0.1:8000 --model ./model --max-context-tokens 32000
      verl-server gateway runs/a --fleet verl_server
      verl-server gateway runs/a --server http://127.0.0.1:30000 --chat-template-kwargs '{"enable_thinking": false}'
    """
    admin_key, generated = _take_admin_key(admin_key_file)
    with exit_after_cleanup():
        with show_progress("Starting the gateway"):
            opened = _open(
                run_dir,
                server,
                router,
                fleet,
                model,
                max_context_tokens,
                host=host,
                port=port,
                is_open=is_open,
                admin_key=admin_key,
                session_expiry_s=session_expiry,
                chat_template_kwargs=_parse_template_kwargs(chat_template_kwargs),
            )
        with opened:
            collect_garbage_rarely()
            print_line(f"Ready: {opened.url} (Anthropic), {opened.openai_url} (OpenAI)")
            for name in generated:
                print_line(f"export {name}={admin_key}")
            threading.Event().wait()


def _parse_template_kwargs(text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise BadInputError("--chat-template-kwargs must be a JSON object, for example '{\"enable_thinking\": false}'")
    return found


def _take_admin_key(file: Path | None) -> tuple[str, list[str]]:
    """The key of the admin API, and the names of the environment variables whose keys are generated."""
    if file is not None:
        os.environ[GATEWAY_KEY] = options.read_key_file("--admin-key-file", file)
    generated = options.missing_keys(
        [GATEWAY_KEY], shown=sys.stdout.isatty(), alternative=", or pass --admin-key-file FILE"
    )
    options.require_long_keys([GATEWAY_KEY])
    return options.take_key(GATEWAY_KEY), generated


def _open(
    run_dir: Path,
    servers: list[str] | None,
    router: str | None,
    fleet: str | None,
    model: str | None,
    max_context_tokens: int | None,
    **options: Any,
) -> Gateway:
    """The gateway. `options`: further arguments of `Gateway`."""
    from verl_server.agent import RolloutLimits
    from verl_server.gateway import Gateway
    from verl_server.trajectory import get_renderer

    if sum((bool(servers), router is not None, fleet is not None)) != 1:
        raise BadInputError(
            f"pass one of --server URL, --router URL and --fleet NAME, for example --server {EXAMPLE}; --server may be "
            "repeated"
        )
    renderer = None if model is None else get_renderer(load_tokenizer(model, "pass --model with the model's folder"))
    if router is not None and (renderer is None or max_context_tokens is None):
        raise BadInputError("a router does not tell its model; add --model MODEL and --max-context-tokens N")
    engine = _engine(servers, router, fleet, renderer)
    limits = RolloutLimits(max_turns=1_000_000, max_context_tokens=max_context_tokens)
    return Gateway(engine, run_dir, renderer=renderer, limits=limits, **options)


def _engine(
    servers: list[str] | None, router: str | None, fleet: str | None, renderer: ChatRenderer | None
) -> Engine | EngineSource:
    """What generates. None of them has to run already."""
    from verl_server.config import RemoteServer
    from verl_server.gateway import DiscoveredServers
    from verl_server.router.client import RouterClient

    key, hint = options.pop_key(API_KEY), f"set {API_KEY} to its key"
    if router is not None:
        return RouterClient(require_http_url("--router", router, "--router http://127.0.0.1:8000", hint), key)
    if fleet is not None:
        from verl_server.rollout.launchers.ray_discovery import RayDiscovery

        return DiscoveredServers(RayDiscovery(fleet), renderer)
    urls = [require_http_url("--server", url, f"--server {EXAMPLE}", hint) for url in servers or ()]
    return DiscoveredServers([RemoteServer(url, api_key=key) for url in urls], renderer)
