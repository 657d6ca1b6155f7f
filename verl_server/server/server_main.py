"""Main module of an SGLang server process: read the server arguments from standard input, then run SGLang's server.

Standard input has one line of JSON: the version of this package that the trainer has, and the arguments. So API
keys appear on no command line. Another version than this process's ends the process before it imports SGLang. SGLang's
subprocesses import this module again, as `__mp_main__`; therefore it imports only the standard library at module level.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import inspect
import json
import os
import platform
import secrets
import signal
import sys
import tempfile
from collections.abc import Collection, Mapping
from importlib.metadata import version
from typing import Any, NoReturn

from verl_server import __version__
from verl_server.validation import did_you_mean

# -- Argument check ---------------------------------------------------------------------------------
# Server arguments that SGLang refuses: names that it does not have, and values that its own parser refuses.
#
# The server process, which has imported SGLang and its plugins, asks SGLang before it loads a model.

#: Names of vLLM for arguments that SGLang has under another name.
FROM_VLLM = {
    "max_model_len": "context_length",
    "gpu_memory_utilization": "mem_fraction_static",
    "max_num_seqs": "max_running_requests",
}
BOOLS = (True, False)  # the text "False" would be true


def find_refusal(server_args: Mapping[str, Any]) -> str | None:
    """Why SGLang refuses these fields of its `ServerArgs`, in one line. None if no name and no value is wrong.

    Imports SGLang.
    """
    return parse_arguments(server_args)[1]


def parse_arguments(server_args: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """The arguments with the types that SGLang's command line gives them, and `find_refusal`. Imports SGLang."""
    from sglang.srt.server_args import ServerArgs

    parser = _OptionsParser(add_help=False, allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    names = list(inspect.signature(ServerArgs).parameters)
    parsed, problems = dict(server_args), []
    for name, value in server_args.items():
        if name not in names:
            other = FROM_VLLM.get(name) or parser.find_field(name)
            similar = f"; did you mean {other!r}?" if other in names else did_you_mean(name, names)
            problems.append(f"SGLang {version('sglang')} has no argument {name!r}{similar}")
            continue
        try:
            value = parsed[name] = parser.parse_value(name, value)
        except (_RefusedError, AssertionError) as error:  # SGLang's actions assert
            problems.append(str(error))
            continue
        choices = parser.choices(name)
        if choices and isinstance(value, (str, int)) and value not in choices:
            similar = did_you_mean(str(value), [choice for choice in choices if isinstance(choice, str)])
            problems.append(f"{name} must be one of {', '.join(map(str, choices))}, got {value!r}{similar}")
    return parsed, "; ".join(problems) or None


class _RefusedError(Exception):
    """SGLang's parser refuses a value."""


class _OptionsParser(argparse.ArgumentParser):
    """Parses the values of single options that are added to it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.options: dict[str, argparse.Action] = {}
        """Options by field. The first option of a field counts; later ones are deprecated."""

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        action = super().add_argument(*args, **kwargs)
        action.required = False
        self.options.setdefault(action.dest, action)
        return action

    def error(self, message: str) -> NoReturn:
        raise _RefusedError(message)

    def find_field(self, name: str) -> str | None:
        """The field that the option `--name` sets."""
        action = self._option_string_actions.get(f"--{name.replace('_', '-')}")
        return None if action is None else action.dest

    def choices(self, field: str) -> Collection[Any] | None:
        action = self.options.get(field)
        found = None if action is None else BOOLS if action.nargs == 0 else action.choices
        return None if found is None else list(found)

    def parse_value(self, field: str, value: Any) -> Any:
        """`value` if it has the type of its option. The text of a command line is parsed. Raises _RefusedError."""
        action = self.options.get(field)
        values = value if isinstance(value, list) else [] if value is True else [value]
        if action is None or action.nargs == 0 or not all(type(each) in (str, int, float) for each in values):
            return value
        has_type = all(isinstance(each, str) == (action.type in (None, str)) for each in values)
        is_list, takes_list = isinstance(value, list), action.nargs in ("+", "*")
        has_form = type(action) is argparse._StoreAction and value is not True and is_list == takes_list
        if is_list and action.nargs is None and action.type in (None, str, int, float):
            raise _RefusedError(f"{field} takes one value, got a list of {len(values)}")
        if (has_type and has_form) or (is_list and not takes_list):
            return value
        return getattr(self.parse_args([action.option_strings[0], *map(str, values)]), field)


# -- Process header ---------------------------------------------------------------------------------
# The header by which each HTTP reply of a server names the process that has answered.
#
# An address does not say which server answers: a server that was started again has the address of the one before, and
# a host name or a load balancer may lead to several servers.

PROCESS_HEADER = "x-verl-server-process"


class ProcessHeader:
    """ASGI class that adds `PROCESS_HEADER` to each reply of `app`. The value is random and belongs to this object."""

    def __init__(self, app: Any) -> None:
        self._app, self._header = app, (PROCESS_HEADER.encode(), secrets.token_hex(8).encode())

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def send_named(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), self._header]}
            await send(message)

        await self._app(scope, receive, send_named)


# -- Server main ------------------------------------------------------------------------------------

PR_SET_PDEATHSIG = 1
#: Exit code when SGLang does not know a server argument or refuses its value.
EXIT_BAD_ARGUMENT = 64
#: Begin of the log line with the reason of that exit.
REFUSAL = "SGLang refuses the server arguments: "
#: Exit code when the trainer has another version of this package.
EXIT_OTHER_VERSION = 65
#: Begin of the log line with the reason of that exit.
OTHER_VERSION = "verl_server: "
#: Server argument with the domains of media, and a domain that does not exist (RFC 2606).
MEDIA_DOMAINS, NO_DOMAIN = "allowed_media_domains", "none-by-default.invalid"
#: Libraries of GPU kernels that SGLang imports where they are installed. Nothing uses them without an accelerator, and
#: their imports (with CUTLASS) take a tenth of the time of all imports.
GPU_LIBRARIES = ("flashinfer",)


def load() -> None:
    """Import the modules that every server needs. Starts no thread, because `scheduler_hooks.py` forks later."""
    if platform.machine() == "x86_64":
        # numpy's BLAS would start threads, which a server does not need: torch has its own BLAS on this architecture.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    _skip_gpu_libraries()
    gc.disable()  # collections during the imports find no garbage, and take a quarter of the time of the imports
    try:
        from sglang.srt.plugins import load_plugins

        load_plugins()
        import sglang.launch_server  # noqa: F401
    finally:
        gc.enable()


def _skip_gpu_libraries() -> None:
    """Let SGLang find `GPU_LIBRARIES` not installed, where our platform for machines without an accelerator is used."""
    from verl_server import platforms

    if not os.environ.get("SGLANG_PLATFORM") and platforms.activate() is not None:
        for name in GPU_LIBRARIES:
            sys.modules.setdefault(name, None)  # type: ignore[arg-type]


def serve(server_args: dict[str, Any]) -> None:
    """Run SGLang's server until the process is killed. `server_args` are fields of SGLang's `ServerArgs`."""
    from sglang.launch_server import run_server
    from sglang.srt.server_args import ServerArgs

    server_args, refusal = parse_arguments(server_args)
    if refusal is None:
        try:
            parsed = ServerArgs(**limit_media_domains(server_args))
        except TypeError as error:
            refusal = " ".join(str(error).split())
    if refusal is not None:
        print(REFUSAL + refusal, flush=True)
        sys.exit(EXIT_BAD_ARGUMENT)
    _add_middlewares(server_args)
    set_environment(server_args)
    run_server(parsed)


def _add_middlewares(server_args: Mapping[str, Any]) -> None:
    """Name this process in each reply, keep the secrets of the arguments out of it, and end generations with clients.

    SGLang checks the keys of requests before the filter.
    """
    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    from verl_server.platforms.scheduler_hooks import SECRETS, EndsWithClient, KeyFilter

    if hasattr(TokenizerManager, "_release_req_states_on_failure"):
        app.add_middleware(EndsWithClient)
    app.add_middleware(ProcessHeader)
    app.add_middleware(KeyFilter, secrets=[server_args[name] for name in SECRETS if server_args.get(name)])


def set_environment(server_args: Mapping[str, Any]) -> None:
    """Set the variables of SGLang that follow from its arguments. The processes that it starts inherit them.

    A server with `enable_memory_saver` shares its GPUs with a trainer, whose ranks do not use the same amount of memory
    on each. SGLang would refuse to start with a difference of 10 %.

    The processes of a server on one machine find each other through a file in its folder. torch's store would listen
    on every interface, and take data from everybody.
    """
    if server_args.get("enable_memory_saver"):
        os.environ.setdefault("SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK", "false")
    is_one_group = (server_args.get("dp_size") or 1) == 1 or server_args.get("enable_dp_attention")
    if is_one_group and (server_args.get("nnodes") or 1) == 1 and not server_args.get("dist_init_addr"):
        store = f"file://{tempfile.mkdtemp(prefix='store-', dir=os.environ.get('TMPDIR'))}/store"
        os.environ.setdefault("SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE", store)


def limit_media_domains(server_args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with a list of domains from which requests may load images, videos and audio: none by default.

    SGLang's own default is every domain: callers could reach addresses that only the server's machine reaches. Imports
    SGLang; its earlier versions have no such list.
    """
    from sglang.srt.server_args import ServerArgs

    limited = dict(server_args)
    if not limited.get(MEDIA_DOMAINS) and MEDIA_DOMAINS in inspect.signature(ServerArgs).parameters:
        limited[MEDIA_DOMAINS] = [NO_DOMAIN]
    return limited


def make_payload(server_args: Mapping[str, Any]) -> str:
    """What the trainer writes to the standard input of a server: one line of JSON."""
    return json.dumps({"version": __version__, "server_args": dict(server_args)}) + "\n"


def explain_other_version(python: str, version: str, trainer_version: str) -> str:
    """The error of an environment with another version of this package than the trainer's."""
    return (
        f"the trainer has verl_server {trainer_version}, but the environment of the server's interpreter {python} has "
        f"verl_server {version}. Both must have the same version: run `{python} -m pip uninstall verl-server`, and the "
        f"server uses the trainer's copy; or run `{python} -m pip install --no-deps verl-server=={trainer_version}`"
    )


def read_arguments() -> dict[str, Any]:
    """Read the server arguments from standard input, which is then replaced by `/dev/null`.

    From here on the kernel kills this process when its parent, the warden, ends. Exits with `EXIT_OTHER_VERSION` if the
    trainer has another version of this package.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    with open(0, "rb", closefd=False) as pipe:
        message: dict[str, Any] = json.loads(pipe.readline())
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    trainer_version = str(message.get("version", "of an earlier protocol"))
    if trainer_version != __version__:
        print(OTHER_VERSION + explain_other_version(sys.executable, __version__, trainer_version), flush=True)
        sys.exit(EXIT_OTHER_VERSION)
    server_args: dict[str, Any] = message["server_args"]
    return server_args


def main() -> None:
    server_args = read_arguments()
    load()
    serve(server_args)


if __name__ == "__main__":
    main()
