"""`verl-server gateway`: agents act over HTTP through a server or a router that already runs."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from verl_server.cli import arguments as options
from verl_server.cli.arguments import API_KEY, LOOPBACK
from verl_server.cli.output import print_line, show_progress
from verl_server.cli.signals import exit_after_cleanup
from verl_server.cli.tokenizer import load_tokenizer
from verl_server.errors import BadInputError
from verl_server.validation import require_http_url

if TYPE_CHECKING:
    from verl_server.gateway import Gateway

GATEWAY_KEY = "VERL_SERVER_GATEWAY_ADMIN_KEY"
EXAMPLE = "http://127.0.0.1:30000"


def gateway(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Folder for the records of the sessions.")],
    server: Annotated[str | None, typer.Option(help="URL of a running server.", metavar="URL")] = None,
    router: Annotated[str | None, typer.Option(help="URL of a running router.", metavar="URL")] = None,
    model: Annotated[
        str | None, typer.Option(help="Folder or Hub name with the tokenizer. Needed for a router.", metavar="MODEL")
    ] = None,
    max_context_tokens: Annotated[
        int | None,
        typer.Option(min=16, help="Maximum number of tokens of a prompt with its reply. Default: the server's."),
    ] = None,
    host: options.Host = LOOPBACK,
    port: options.RouterPort = 0,
    is_open: Annotated[
        bool, typer.Option("--open", help="Serve requests without a key, in one session. For a laptop only.")
    ] = False,
) -> None:
    """Let unmodified agents act through a server or a router, and record every token.

    Agents reach the gateway as OpenAI's or Anthropic's API, with the key of a session. Sessions are created with
    POST /admin/sessions.

    Keys are read from the environment: VERL_SERVER_API_KEY is the key of the server or router,
    VERL_SERVER_GATEWAY_ADMIN_KEY the key of the admin API. On a terminal, a missing admin key is generated and printed.

    Examples:
      verl-server gateway runs/a --server http://127.0.0.1:30000
      verl-server gateway runs/a --router http://127.0.0.1:8000 --model ./model --max-context-tokens 32000
    """
    generated = options.missing_keys([GATEWAY_KEY], shown=sys.stdout.isatty())
    options.require_long_keys([GATEWAY_KEY])
    admin_key = options.take_key(GATEWAY_KEY)
    with exit_after_cleanup():
        with show_progress("Starting the gateway"):
            opened = _open(run_dir, server, router, model, max_context_tokens, host, port, is_open, admin_key)
        with opened:
            print_line(f"Ready: {opened.url} (Anthropic), {opened.openai_url} (OpenAI)")
            for name in generated:
                print_line(f"export {name}={admin_key}")
            threading.Event().wait()


def _open(
    run_dir: Path,
    server: str | None,
    router: str | None,
    model: str | None,
    max_context_tokens: int | None,
    host: str,
    port: int,
    is_open: bool,
    admin_key: str | None,
) -> Gateway:
    from verl_server.adapter import HttpServerEngineAdapter
    from verl_server.agent import RolloutLimits
    from verl_server.gateway import Gateway
    from verl_server.router.client import RouterClient
    from verl_server.trajectory import get_renderer

    if (server is None) == (router is None):
        raise BadInputError(f"pass either --server URL or --router URL, for example --server {EXAMPLE}")
    key, hint = os.environ.get(API_KEY), f"set {API_KEY} to its key"
    renderer = None if model is None else get_renderer(load_tokenizer(model, "pass --model with the model's folder"))
    if server is not None:
        url = require_http_url("--server", server, f"--server {EXAMPLE}", hint)
        engine: HttpServerEngineAdapter | RouterClient = HttpServerEngineAdapter.attach(url, api_key=key)
    else:
        engine = RouterClient(require_http_url("--router", str(router), "--router http://127.0.0.1:8000", hint), key)
        if renderer is None or max_context_tokens is None:
            raise BadInputError("a router does not tell its model; add --model MODEL and --max-context-tokens N")
    limits = RolloutLimits(max_turns=1_000_000, max_context_tokens=max_context_tokens)
    return Gateway(
        engine, run_dir, renderer=renderer, limits=limits, host=host, port=port, admin_key=admin_key, is_open=is_open
    )
