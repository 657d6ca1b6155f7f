"""The `verl-server` command. It parses, prints and exits; what it does lives in the rooms that it calls.

Imports stay light: torch and SGLang are imported by the commands that need them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from verl_server.cli_arguments import (
    ADMIN_API_KEY,
    API_KEY,
    REPLICA_API_KEY,
    missing_keys,
    parse_server_args,
    take_key,
)
from verl_server.errors import BadInputError, ServerError, VerlServerError

if TYPE_CHECKING:
    from verl_server.adapter import HttpServerEngineAdapter

EXIT_FAILED, EXIT_BAD_INPUT = 1, 2
STATUS_S = 10.0

app = typer.Typer(
    name="verl-server",
    help="The rollout engine for RL post-training: SGLang in its own process.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # its tracebacks may show local variables, keys among them
)


def _log_to_stderr(verbose: bool) -> None:
    if verbose:
        logging.basicConfig(
            level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
        )


Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Show this library's log on standard error.", callback=_log_to_stderr)
]
Tp = Annotated[int, typer.Option("--tp", min=1, help="Tensor parallel ranks.")]


@app.callback()
def _root(verbose: Verbose = False) -> None:
    """The rollout engine for RL post-training: SGLang in its own process."""


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def launch(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder of a model, or its name on the hub.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int | None, typer.Option(help="Port; any free one when left out.", min=1, max=65535)] = None,
    tp: Tp = 1,
    log_dir: Annotated[Path | None, typer.Option(help="Keep the server's log in this folder.")] = None,
    verbose: Verbose = False,
) -> None:
    """Start one supervised server and keep it until Ctrl-C.

    Every other argument goes to SGLang: --mem-fraction-static 0.5, --dtype=bfloat16, --skip-tokenizer-init.

    Keys come from the environment: VERL_SERVER_API_KEY for generation, VERL_SERVER_ADMIN_API_KEY for weights,
    memory and control. Without them random ones are made.
    """
    server_args = {
        **parse_server_args([model, *context.args]),
        "host": host,
        "tp_size": tp,
        **({} if port is None else {"port": port}),
    }
    made = missing_keys([API_KEY, ADMIN_API_KEY], shown=sys.stdout.isatty())
    server_args |= {"api_key": take_key(API_KEY), "admin_api_key": take_key(ADMIN_API_KEY)}
    signals = _StopSignals()
    try:
        with signals, _start(server_args, log_dir) as adapter:
            signals.ready = True
            _show_server(adapter, server_args, made)
            process = adapter.asynchronous.process
            assert process is not None
            process.wait_exit(threading.TIMEOUT_MAX)
            raise process.died(adapter.base_url)
    except _Stop as stop:
        _say("The server and all of its processes have ended.")
        raise typer.Exit(0 if signals.ready else 128 + stop.number) from None


@app.command()
def router(
    replica: Annotated[list[str] | None, typer.Option(help="URL of a server; once for each.", metavar="URL")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; any free one when left out.", min=0, max=65535)] = 0,
    verbose: Verbose = False,
) -> None:
    """Make many servers one: `/generate` and the OpenAI paths, spread over replicas that run already.

    Keys come from the environment: VERL_SERVER_API_KEY is what callers bring, VERL_SERVER_REPLICA_API_KEY what the
    replicas want (the same when left out). Without a key for callers a random one is made.
    """
    from verl_server.config import RemoteServer
    from verl_server.router.process import serve_static

    if not replica:
        raise BadInputError("name at least one replica: --replica http://127.0.0.1:30000")
    made = missing_keys([API_KEY], shown=sys.stdout.isatty())
    key = take_key(API_KEY)
    theirs = os.environ.pop(REPLICA_API_KEY, "") or key

    def ready(url: str) -> None:
        _say(f"Ready: {url}")
        for name in made:
            _say(f"export {name}={key}")

    try:
        servers = [RemoteServer(url, api_key=theirs) for url in replica]
        serve_static(servers, host=host, port=port, api_key=key, on_ready=ready)
    except OSError as error:
        raise BadInputError(f"cannot listen on {host}:{port}: {error}") from error


@app.command()
def status(
    url: Annotated[str, typer.Argument(metavar="URL", help="Of a router.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
    verbose: Verbose = False,
) -> None:
    """Show the replicas behind a router. Its key comes from VERL_SERVER_API_KEY."""
    import json

    import requests
    from rich.table import Table

    try:
        answer = requests.get(
            f"{url.rstrip('/')}/replicas",
            headers={"Authorization": f"Bearer {os.environ.get(API_KEY, '')}"},
            timeout=STATUS_S,
        )
    except (requests.RequestException, ValueError) as error:
        raise ServerError(f"the router at {url} does not answer: {error}") from error
    if answer.status_code != 200:
        raise ServerError(f"the router at {url} answered {answer.status_code}: {answer.text[:200]}")
    rows = answer.json()
    if as_json:
        print(json.dumps(rows))
        return
    table = Table("replica", "serves", "weight version", "requests", "tokens in flight")
    for row in rows:
        serves = "suspect" if row["suspect"] else "yes" if row["admitted"] else "no"
        numbers = (str(row[key]) for key in ("weight_version", "running_requests", "tokens_in_flight"))
        table.add_row(row["name"], serves, *numbers)
    Console(highlight=False).print(table)


@app.command()
def doctor(
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="Folder of a model to check, too.")] = None,
    tp: Tp = 1,
    dtype: Annotated[str, typer.Option(help="The --dtype that the server will get.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print findings as JSON.")] = False,
    verbose: Verbose = False,
) -> None:
    """Check this machine, and whether a model fits it. Exit code 1 when something will not work."""
    from verl_server.doctor import examine, report

    with _working("Looking at this machine"):
        sections = examine(model, tp=tp, dtype=dtype)
    if as_json:
        print(report.as_json(sections))
    else:
        report.show(sections, Console(highlight=False))
    if report.failed(sections):
        raise typer.Exit(EXIT_FAILED)


@app.command()
def version() -> None:
    """Print the versions of this library and of what it drives."""
    from verl_server import __version__
    from verl_server.doctor.packages import installed_version

    print(f"verl-server {__version__}")
    for name in ("sglang", "torch", "transformers"):
        print(f"{name} {installed_version(name) or 'not installed'}")


@app.command()
def demo(
    seed: Annotated[int, typer.Option(help="Seed of the model, the task and the sampling.")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 80,
    output: Annotated[Path, typer.Option(help="Folder for what it writes.")] = Path("demo_output"),
    verbose: Verbose = False,
) -> None:
    """Train a tiny model with GRPO, end to end, on this machine."""
    from verl_server.demo import run

    raise typer.Exit(run(seed=seed, steps=steps, output_dir=output))


class _Stop(BaseException):
    """Somebody wants this command to end. Not an Exception, so that nothing on the way takes it for a failure."""

    def __init__(self, number: int) -> None:
        self.number = number


class _StopSignals:
    """Turns the first signal to stop into `_Stop` and ignores the others, so that the cleanup is not cut short."""

    NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.ready = False

    def __enter__(self) -> None:
        for number in self.NUMBERS:
            signal.signal(number, self._stop)

    def __exit__(self, *_: object) -> None:
        for number in self.NUMBERS:
            signal.signal(number, signal.SIG_DFL)

    def _stop(self, number: int, _: FrameType | None) -> NoReturn:
        for each in self.NUMBERS:
            signal.signal(each, signal.SIG_IGN)
        raise _Stop(number)


def _start(server_args: dict[str, Any], log_dir: Path | None) -> HttpServerEngineAdapter:
    from verl_server.adapter import HttpServerEngineAdapter
    from verl_server.config import AdapterConfig

    with _working(f"Starting a server for {server_args['model_path']}"):
        return HttpServerEngineAdapter(config=AdapterConfig(log_dir=log_dir, use_forkserver=False), **server_args)


def _show_server(adapter: HttpServerEngineAdapter, server_args: dict[str, Any], made: list[str]) -> None:
    _say(f"Ready: {adapter.base_url}")
    keys = {API_KEY: server_args["api_key"], ADMIN_API_KEY: server_args["admin_api_key"]}
    for name in made:
        _say(f"export {name}={keys[name]}")
    prompt = '"input_ids": [1, 2, 3]' if server_args.get("skip_tokenizer_init") else '"text": "Once upon a time"'
    _say(
        f'curl {adapter.base_url}/generate -H "Authorization: Bearer ${API_KEY}" '
        f"-H 'Content-Type: application/json' "
        f'-d \'{{{prompt}, "sampling_params": {{"max_new_tokens": 16}}}}\''
    )
    _say("Ctrl-C ends it.")


@contextlib.contextmanager
def _working(what: str) -> Iterator[None]:
    """A spinner and the time on a terminal; one line elsewhere. On standard error."""
    console = Console(stderr=True)
    if not console.is_terminal:
        print(f"{what} ...", file=sys.stderr, flush=True)
        yield
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(what, total=None)
        yield


def _say(line: str) -> None:
    """One line on standard output, at once and unwrapped: lines are there to be copied or piped."""
    print(line, flush=True)


def main() -> None:
    """Entry point. This library's errors become a message and an exit code: 2 for bad input, else 1."""
    try:
        app()
    except VerlServerError as error:
        print(f"verl-server: {error}", file=sys.stderr)
        if log_path := error.details.get("log_path"):
            print(f"Its log: {log_path}", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT if isinstance(error, BadInputError) else EXIT_FAILED)


if __name__ == "__main__":
    main()
