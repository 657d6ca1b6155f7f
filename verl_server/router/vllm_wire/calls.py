"""Calls of a trainer to all servers of a router, and the folders that such a call names."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from verl_server.adapter.client import AsyncHttpServerEngineAdapter
from verl_server.adapter.model_files import CONFIG_FILE, TENSORS_FILE
from verl_server.errors import (
    BadInputError,
    DeadlineError,
    NotReadyError,
    ServerDiedError,
    ServerError,
    VerlServerError,
)
from verl_server.threads import call_in_thread
from verl_server.types import Json

if TYPE_CHECKING:
    from verl_server.weights.manifest import Manifest


# -- Server calls -----------------------------------------------------------------------------------
# Calls of all servers of a router that answer.

ANSWER_TIMEOUT_S = 5.0
"""Seconds within which a server must answer to take part in an operation."""
Servers = Mapping[str, AsyncHttpServerEngineAdapter]
"""The adapters of servers by the names of their replicas."""
Call = Callable[[str, AsyncHttpServerEngineAdapter], Awaitable[Any]]
"""Calls a server; its name comes first."""


class AwaitedError(NotReadyError):
    """A server must receive no requests now. The router itself lets it receive requests later."""


async def find_answering(servers: Servers) -> dict[str, AsyncHttpServerEngineAdapter]:
    """The servers that answer now, which take part in the operation. Raises NotReadyError if none does.

    A server that answers again later has missed the operation.
    """
    servers = dict(servers)

    async def answers(server: AsyncHttpServerEngineAdapter) -> bool:
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await server.get_model_info()
        except (VerlServerError, TimeoutError):
            return False
        return True

    answering = await asyncio.gather(*(answers(server) for server in servers.values()))
    found = {name: server for (name, server), is_there in zip(servers.items(), answering, strict=True) if is_there}
    if not found:
        raise NotReadyError("no server of this router answers")
    return found


def is_lost(error: BaseException) -> bool:
    """Whether the error says that the server has ended. A server that refuses a call, or hangs, still runs."""
    return isinstance(error, ServerDiedError) or (isinstance(error, ServerError) and "status" not in error.details)


def is_lost_or_silent(error: BaseException) -> bool:
    """Whether the server has ended or does not answer."""
    return is_lost(error) or isinstance(error, DeadlineError)


async def call_each(answering: Servers, call: Call, may_miss: Callable[[BaseException], bool] = is_lost) -> set[str]:
    """Call all of these servers; returns the names of those where the call has succeeded.

    A server with an error that `may_miss` accepts is left out, unless it is the last one. Other errors are raised
    when all calls have ended.
    """
    outcomes = await asyncio.gather(*(call(name, server) for name, server in answering.items()), return_exceptions=True)
    errors = {
        name: outcome for name, outcome in zip(answering, outcomes, strict=True) if isinstance(outcome, BaseException)
    }
    if refusals := [error for error in errors.values() if not may_miss(error)]:
        raise refusals[0]
    if errors and len(errors) == len(answering):
        raise next(iter(errors.values()))
    return answering.keys() - errors.keys()


# -- Folders ----------------------------------------------------------------------------------------

T = TypeVar("T")
FOLDER_TIMEOUT_S = 60.0
"""Seconds within which the files of a folder must be read. A network file system may hang."""
USE_FILES = "with prime-rl, set weight_broadcast.type='filesystem'"
"""What to do when a trainer does not write its weights into files."""


@dataclass(frozen=True)
class LoraFiles:
    """The files of a LoRA adapter in PEFT's form."""

    tensors: dict[str, Any]
    config: Json
    signature: Any
    """Equal for two reads of the same files. Another one if a file was written in between."""


async def in_thread(work: Callable[[], T], folder: Any) -> T:
    """The result of `work`, which reads `folder`, in a thread. Raises DeadlineError after `FOLDER_TIMEOUT_S`."""
    try:
        async with asyncio.timeout(FOLDER_TIMEOUT_S):
            return await call_in_thread(work)
    except TimeoutError as error:
        raise DeadlineError(
            f"{folder!r:.200} could not be read within {FOLDER_TIMEOUT_S:g} s",
            operation="read",
            seconds=FOLDER_TIMEOUT_S,
        ) from error


def folder_signature(folder: Any) -> Any:
    """Names, sizes and times of the files of a checkpoint or an adapter. Equal as long as nobody writes the files.

    None for a folder that cannot be read. Blocking.
    """
    if not isinstance(folder, str):
        return None
    signature = []
    try:
        for path in sorted(Path(folder).iterdir()):
            if path.suffix in (".safetensors", ".json"):
                stat = path.stat()
                signature.append((path.name, stat.st_ino, stat.st_size, stat.st_mtime_ns))
    except (OSError, ValueError):
        return None
    return signature


def require_checkpoint_folder(folder: Any) -> None:
    """Raise BadInputError unless `folder` is an absolute path of a folder with files of safetensors.

    The servers read the folder, and the router reads its headers: both must see it at the same path. Blocking.
    """
    path = _absolute(folder, "weight_dir")
    try:
        has_files = any(path.glob("*.safetensors"))
    except (OSError, ValueError) as error:  # for example a name that is too long
        raise BadInputError(f"weight_dir {folder!r:.200} cannot be read: {error!s:.200}") from error
    if not has_files:
        raise BadInputError(
            f"weight_dir {str(path)!r:.300} has no file *.safetensors, or the router cannot see the folder. A "
            f"broadcast by NCCL or NIXL writes no such file: {USE_FILES}"
        )


def read_served_manifest(server_args: Mapping[str, Any]) -> Manifest:
    """The tensors that a server with these reported arguments accepts. Raises BadInputError. Blocking. Imports torch.

    Code in the folder of the model is never executed, whatever the server has reported.
    """
    from verl_server.weights.manifest import read_manifest

    return read_manifest({**server_args, "trust_remote_code": False})


def require_whole_checkpoint(folder: str, manifest: Manifest) -> None:
    """Raise BadInputError unless the headers of a checkpoint have all tensors of the model, with its shapes. Blocking.

    SGLang's scheduler ends when a tensor has another shape, and keeps the old tensor when the folder has none.
    """
    from verl_server.weights.manifest import checkpoint_tensors

    tensors = checkpoint_tensors({"model_path": folder})
    for name, spec in tensors.items():
        manifest.check(name, spec.shape, spec.dtype)
    if missing := sorted(manifest.required - tensors.keys()):
        raise BadInputError(
            f"weight_dir {folder!r} lacks {len(missing)} tensors of the served model, for example {missing[0]}"
        )


def read_lora_adapter(folder: Any) -> LoraFiles:
    """The files of a LoRA adapter in PEFT's form. Raises BadInputError.

    Blocking. Imports torch.
    """
    path = _absolute(folder, "lora_path")
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        stats = [(path / name).stat() for name in (CONFIG_FILE, TENSORS_FILE)]
        config = json.loads((path / CONFIG_FILE).read_text(encoding="utf-8"))
        tensors = load_file(path / TENSORS_FILE)
    except (OSError, ValueError, SafetensorError) as error:
        raise BadInputError(
            f"lora_path {folder!r:.200} is no LoRA adapter in PEFT's form: {error!s:.200}", status=404
        ) from error
    return LoraFiles(tensors, config, tuple((each.st_ino, each.st_size, each.st_mtime_ns) for each in stats))


def _absolute(folder: Any, name: str) -> Path:
    if not (isinstance(folder, str) and Path(folder).is_absolute()):
        raise BadInputError(f"{name} must be the absolute path of a folder, got {folder!r:.200}; {USE_FILES}")
    return Path(folder)
