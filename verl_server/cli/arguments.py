"""Options of the `verl-server` command, SGLang's arguments of `verl-server launch`, and the keys in the environment."""

from __future__ import annotations

import ctypes
import json
import os
import re
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from verl_server.config import ENGINE, SERVER_PYTHON, EngineKind
from verl_server.errors import BadInputError
from verl_server.server.warden.warden import MIN_SECRET_CHARACTERS
from verl_server.validation import require_key

API_KEY, ADMIN_API_KEY = "VERL_SERVER_API_KEY", "VERL_SERVER_ADMIN_API_KEY"
REPLICA_API_KEY, REPLICA_ADMIN_API_KEY = "VERL_SERVER_REPLICA_API_KEY", "VERL_SERVER_REPLICA_ADMIN_API_KEY"

LOOPBACK = "127.0.0.1"
Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="Folder of a model, its name on the Hugging Face Hub, or a GGUF file.")
]
OptionalModel = Annotated[
    str | None, typer.Argument(metavar="[MODEL]", help="Folder or Hub name of a model to check as well.")
]
GatewayUrl = Annotated[
    str | None, typer.Option("--gateway", help="Check the chain behind the gateway at this URL.", metavar="URL")
]
Host = Annotated[
    str, typer.Option(help="Address to listen on. With 0.0.0.0 other machines can reach the server.", metavar="ADDRESS")
]
ServerPort = Annotated[
    int | None, typer.Option(help="Port to listen on. Default: a free port.", min=1, max=65535, metavar="PORT")
]
RouterPort = Annotated[
    int, typer.Option(help="Port to listen on. 0 chooses a free port.", min=0, max=65535, metavar="PORT")
]
DrainTimeout = Annotated[
    float,
    typer.Option(
        "--drain-timeout", min=0.1, metavar="SECONDS", help="Seconds that running requests may continue after SIGTERM."
    ),
]
TensorParallel = Annotated[
    int,
    typer.Option(
        "--tp",
        "--tp-size",
        "--tensor-parallel-size",
        min=1,
        metavar="N",
        help="Number of tensor parallel ranks of the server.",
    ),
]
ServerPython = Annotated[
    Path | None,
    typer.Option(
        envvar=SERVER_PYTHON,
        help="Python interpreter of the server, for example that of another virtual environment.",
        metavar="PATH",
    ),
]
Engine = Annotated[EngineKind, typer.Option("--engine", envvar=ENGINE, help="Inference engine of the server.")]
OptionalEngine = Annotated[
    EngineKind | None,
    typer.Option(
        "--engine", help="Engine of the server: sglang or vllm. Default: the engine that its environment has."
    ),
]
LogDir = Annotated[Path | None, typer.Option(help="Folder in which to keep the server's log.", metavar="FOLDER")]
Replicas = Annotated[
    list[str] | None, typer.Option(help="URL of a running server. Repeat the option for each server.", metavar="URL")
]
DemoOutput = Annotated[Path, typer.Option(help="Folder for reward.png, metrics.json and the logs.", metavar="FOLDER")]
Dtype = Annotated[
    Literal["auto", "half", "float16", "bfloat16", "float", "float32"],
    typer.Option(help="The --dtype with which the server will be started."),
]
Engines = Annotated[
    list[str] | None,
    typer.Option(
        help="Engine to check: verl_server, sglang, verl_server_vllm, vllm, or a URL. Repeat the option to compare.",
        metavar="ENGINE",
    ),
]
Cases = Annotated[
    list[str] | None, typer.Option(help="Run only this case. Repeat the option for more cases.", metavar="NAME")
]
VllmPython = Annotated[
    Path | None,
    typer.Option(
        help="Python interpreter of servers with vLLM. Default: .venv-vllm/bin/python of the current folder.",
        metavar="PATH",
    ),
]
Updates = Annotated[int, typer.Option(min=2, help="Number of updates of the case `repeated`.", metavar="N")]
ConformanceOutput = Annotated[Path, typer.Option(help="Folder for the results and the logs.", metavar="FOLDER")]

#: Arguments of SGLang that this command has under another name.
RENAMED_ARGUMENTS = {
    "model_path": "the first argument, MODEL",
    "tp_size": "--tp",
    "host": "--host",
    "port": "--port",
    "config": "the options of the file, written on the command line",
}
#: Arguments of SGLang that hold keys, and the environment variables with which this command sets them.
KEY_ARGUMENTS = {"api_key": API_KEY, "admin_api_key": ADMIN_API_KEY}
NEGATIVE_NUMBER = re.compile(r"-[0-9.]")


def split_options(args: Sequence[str]) -> tuple[str, dict[str, list[str]]]:
    """MODEL, and the texts behind each option of a command line. The last occurrence of an option counts."""
    model, *rest = args
    model = _find_model(model)
    values: dict[str, list[str]] = {}
    name = ""
    for argument in rest:
        if argument.startswith("--"):
            name, has_value, value = argument.partition("=")
            values.pop(name, None)
            values[name] = [value] if has_value else []
        elif not name or (argument.startswith("-") and not NEGATIVE_NUMBER.match(argument)):
            raise BadInputError(
                f"{argument!r} does not follow an option; write the server's arguments as --name value, "
                "for example --mem-fraction-static 0.5"
            )
        else:
            values[name].append(argument)
    return model, values


def use_servers(engine: EngineKind, server_python: Path | None) -> None:
    """Set engine and interpreter of the servers that this command and its processes start."""
    os.environ[ENGINE] = engine.value
    if server_python is not None:
        os.environ[SERVER_PYTHON] = str(server_python)


def _find_model(model: str) -> str:
    """The absolute path of a local model, because clients of the server read it. Otherwise `model` as it is.

    Raises BadInputError when `model` is neither a folder nor a possible name on the Hugging Face Hub.
    """
    if model.startswith("-"):
        raise BadInputError(f"MODEL must come before the options: verl-server launch MODEL {model} ...")
    is_hub_name = model.count("/") <= 1 and not model.startswith(("/", ".", "~"))
    is_remote_url = "://" in model  # SGLang reads object stores, for example s3://
    path = Path(model).expanduser()
    is_model = path.is_dir() or (path.is_file() and path.suffix == ".gguf")
    if not is_hub_name and not is_remote_url and not is_model:
        raise BadInputError(
            f"MODEL {model} is not a folder; pass the folder that holds config.json and the weights, a GGUF file, "
            "or a name on the Hugging Face Hub such as Qwen/Qwen3-0.6B"
        )
    return str(path.absolute()) if is_model else model


def key_on_command_line(written: str, field: str) -> BadInputError:
    """The error for an option that holds a key."""
    return BadInputError(
        f"{written} is not accepted, because all users of this machine can read a command line; "
        f"put the key into the environment variable {KEY_ARGUMENTS[field]}"
    )


def missing_keys(variables: Sequence[str], *, shown: bool, alternative: str = "") -> list[str]:
    """The environment variables without a key; a random key will be generated for each of them.

    `alternative`: what can be done instead of setting them. Raises BadInputError when keys are missing and `shown` is
    False, because then no user would see the random keys.
    """
    missing = [name for name in variables if not os.environ.get(name, "").strip()]
    if missing and not shown:
        raise BadInputError(
            f"set {' and '.join(missing)}{alternative}: random keys are printed on a terminal only, and the standard "
            f"output is not a terminal, so no client would know the keys. For example: {_example_of_keys(missing)}"
        )
    return missing


def require_long_keys(variables: Sequence[str]) -> None:
    """Raise BadInputError for a key in the environment that is too short for a server to hide in its log."""
    lengths = {name: len(os.environ.get(name, "").strip()) for name in variables}
    short = {name: length for name, length in lengths.items() if 0 < length < MIN_SECRET_CHARACTERS}
    if short:
        got = " and ".join(f"{name} has {length}" for name, length in short.items())
        raise BadInputError(
            f"a key must have at least {MIN_SECRET_CHARACTERS} characters, but {got}. "
            f"For example: {_example_of_keys(short)}"
        )


def _example_of_keys(variables: Iterable[str]) -> str:
    return " ".join(f"export {name}=$(openssl rand -hex 32);" for name in variables)


def read_key_file(option: str, path: Path) -> str:
    """The key in a file, without the white space around it. Raises BadInputError for a file without a key."""
    try:
        key = path.expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"{option} {path} cannot be read: {error}; pass a file with the key only") from error
    if not key or any(character.isspace() for character in key):
        raise BadInputError(f"{option} {path} must have one key and nothing else")
    return require_key(f"the key in {option} {path}", key)


def take_key(variable: str) -> str:
    """`pop_key`. Without a key in the environment the result is a random key."""
    return pop_key(variable) or secrets.token_urlsafe(32)


def pop_key(variable: str) -> str | None:
    """Remove the key from the environment and return it without the white space around it. None without a key.

    Child processes do not inherit the key, and `/proc/PID/environ` does not show the key to other programs. Raises
    BadInputError for a key that no request can carry.
    """
    _wipe(variable)
    key = os.environ.pop(variable, "").strip()  # files that `echo` has written end with a line break
    return require_key(variable, key) if key else None


def _wipe(variable: str) -> None:
    """Overwrite the value where the kernel has put it: `/proc/PID/environ` shows that memory, also after `unsetenv`."""
    getenv = ctypes.CDLL(None).getenv
    getenv.argtypes, getenv.restype = [ctypes.c_char_p], ctypes.c_void_p
    address = getenv(variable.encode())
    if address:
        ctypes.memset(address, 0, len(ctypes.string_at(address)))


# -- Launch arguments -------------------------------------------------------------------------------
# The server arguments of `verl-server launch`, for each engine.

#: Other names of the options `--pp-size`, `--dp-size` and `--ep-size` on SGLang's own command line.
PARALLEL_SIZE = re.compile(r"(pipeline|data|expert)_parallel_size|[pde]p")


def read_server_args(engine: EngineKind, args: Sequence[str]) -> dict[str, Any]:
    """Read MODEL and the engine's arguments from a command line: `--name value`, `--name=value`, `--name v1 v2`.

    A bool is True as `--name` or `--name true`, and False as `--no-name` or `--name false`. Numbers are parsed if they
    lose no digit. The server, which has the engine's own parser, reads all other texts and refuses names that the
    engine does not have. vLLM's arguments are parsed as JSON. Raises BadInputError for an argument that cannot be read,
    and for keys, because other users of the machine can read a command line.
    """
    model, options = split_options(args)
    server_args: dict[str, Any] = {"model_path": model}
    for written, texts in options.items():
        name = written.removeprefix("--").replace("-", "_")
        if engine is EngineKind.SGLANG and PARALLEL_SIZE.fullmatch(name):
            name = f"{name[0]}p_size"
        if name in KEY_ARGUMENTS:
            raise key_on_command_line(written, name)
        if name in RENAMED_ARGUMENTS:
            raise BadInputError(f"{written} is not an option of this command; use {RENAMED_ARGUMENTS[name]}")
        values = [_read_value(engine, text) for text in texts]
        if not values and name.startswith("no_"):
            server_args[name.removeprefix("no_")] = False
        else:
            server_args[name] = values if len(values) > 1 else (values[0] if values else True)
    if engine is EngineKind.VLLM:
        from verl_server.adapter.vllm.server_arguments import validate_server_args

        server_args = validate_server_args(server_args)
        if "tp_size" in server_args:
            raise BadInputError(
                f"the number of workers is an option of this command: use {RENAMED_ARGUMENTS['tp_size']}"
            )
    return server_args


def _read_value(engine: EngineKind, text: str) -> Any:
    """`text` as JSON, or `text` itself if it is no JSON. For SGLang only bools and numbers, see `read_server_args`."""
    try:
        value = json.loads(text.lower() if text.lower() in ("true", "false") else text)
    except ValueError:
        return text
    is_plain = isinstance(value, bool) or (isinstance(value, (int, float)) and str(value) == text)
    return value if is_plain or engine is EngineKind.VLLM else text
