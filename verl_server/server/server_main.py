"""Main module of an SGLang server process: read the server arguments from standard input, then run SGLang's server.

Standard input has one line of JSON: the version of this package that the trainer has, and the arguments. So API
keys appear on no command line. Another version than this process's ends the process before it imports SGLang. SGLang's
subprocesses import this module again, as `__mp_main__`; therefore it imports only the standard library at module level.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import json
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from verl_server import __version__

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
    """Import the modules that every server needs. Starts no thread, because `platforms/workers.py` forks later."""
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

    from verl_server.server.argument_check import parse_arguments

    server_args, refusal = parse_arguments(server_args)
    if refusal is None:
        try:
            parsed = ServerArgs(**limit_media_domains(server_args))
        except TypeError as error:
            refusal = explain_bad_argument(server_args, error)
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

    from verl_server.platforms.request_gate import SECRETS, EndsWithClient, KeyFilter
    from verl_server.server.process_header import ProcessHeader

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


def explain_bad_argument(server_args: Mapping[str, Any], error: TypeError) -> str:
    """In one line, why SGLang's `ServerArgs` raised `error` for `server_args`. Imports SGLang."""
    from verl_server.server.argument_check import find_refusal

    return find_refusal(server_args) or " ".join(str(error).split())


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
