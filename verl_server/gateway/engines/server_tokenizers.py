"""`ServerTokenizers`: whether all servers behind one gateway have the same tokenizer."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os

from verl_server.agent.engine_access import load_named_by_server
from verl_server.errors import BadInputError
from verl_server.gateway.hanging_calls import CallThatMayHang
from verl_server.trajectory.rendering.tokenizer import IDENTITY_TEXT
from verl_server.types import Json

logger = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 5.0
"""Seconds that a probe waits for a tokenizer to load. A later probe uses a tokenizer that takes longer."""
FIRST_LOAD_TIMEOUT_S = 60.0
"""Seconds in which the tokenizer of the first server must load."""

Stamp = tuple[tuple[str, int, int, int], ...]
"""Name, inode, size and time of change of each file of a folder."""


class ServerTokenizers:
    """Compares the tokenizers of servers with that of the first server, with which the gateway makes all prompts.

    A server has the tokenizer that was in its folder when the server started. So the folder is looked at when the
    server begins to answer, and read if its files have changed. Equal paths on different machines are the same folder
    here: this machine reads both.
    """

    def __init__(self, name: str, server_info: Json) -> None:
        """`name`, `server_info`: the first server, and SGLang's `/server_info` of it. Call `read_first` next."""
        self._name, self._path = name, tokenizer_path(server_info)
        self._first: str | None = None
        """Digest of the tokenizer of the first server. None: nothing can be compared."""
        self._digests = dict[str, tuple[Stamp, str | None]]()
        """The files at a path, and the digest of their tokenizer. None if the path cannot be read here."""
        self._compared = dict[str, tuple[float, str]]()
        """For each server, the time since which it answered when it was compared, and the difference that was found."""
        self._load = CallThatMayHang("loading the tokenizer", self._read)

    async def read_first(self) -> None:
        """Read the tokenizer of the first server. If it cannot be read, nothing is compared. The log names it."""
        try:
            self._first = await self._load.result(FIRST_LOAD_TIMEOUT_S, self._path, None)
        except TimeoutError:
            message = "the tokenizer %r has not loaded in %g s, so no tokenizer is compared with it"
            logger.warning(message, self._path, FIRST_LOAD_TIMEOUT_S)

    async def require_same(self, name: str, model_info: Json, answering_since: float) -> None:
        """Raise BadInputError if a server has another tokenizer. `model_info`: SGLang's `/model_info` of the server.

        `answering_since`: time at which the server began to answer. The server is compared once for each such time.

        A tokenizer that cannot be read on this machine is not compared. The log names it. Raises TimeoutError if a
        tokenizer does not load in `LOAD_TIMEOUT_S` seconds, for example because its file system hangs.
        """
        if self._compared.get(name, (None, ""))[0] != answering_since:
            self._compared[name] = (
                answering_since,
                await self._compare(name, tokenizer_path(model_info), answering_since),
            )
        if difference := self._compared[name][1]:
            raise BadInputError(difference)

    async def _compare(self, name: str, path: str, answering_since: float) -> str:
        """How the tokenizer of a server differs from that of the first server. Empty if nothing is known of it."""
        if self._first is None:
            return ""
        try:
            digest = await self._load.result(LOAD_TIMEOUT_S, path, answering_since)
        except TimeoutError:
            raise TimeoutError(
                f"the tokenizer {path!r} has not loaded in {LOAD_TIMEOUT_S:g} s, so the tokenizer of the "
                f"server {name} cannot be compared with that of the server {self._name}"
            ) from None
        if digest in (None, self._first):
            return ""
        hint = "the files have changed since the gateway read them: start the gateway again to use the new files"
        changed = f"; {hint}" if path == self._path else ""
        return (
            f"the server {name} has the tokenizer {path!r}, which differs from the tokenizer {self._path!r} of the "
            f"server {self._name}{changed}; servers behind one gateway need the same tokenizer"
        )

    def _read(self, path: str, answering_since: float | None) -> str | None:
        """The digest of the tokenizer at a path. Files that have not changed are not read again.

        `answering_since`: of the server. A call for an earlier time may have read earlier files.
        """
        del answering_since
        stamp, known = stamp_of(path), self._digests.get(path)
        if known is None or known[0] != stamp:
            known = self._digests[path] = stamp, self._digest(path)
        return known[1]

    def _digest(self, path: str) -> str | None:
        """The digest of a tokenizer. None if it cannot be loaded."""
        from transformers import AutoTokenizer

        try:
            tokenizer = load_named_by_server(AutoTokenizer, path)
        except Exception as error:  # noqa: BLE001 - code of another library: the folder is on another machine, for example
            logger.warning("the tokenizer %r of a server cannot be loaded, so it is not compared: %s", path, error)
            return None
        vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
        return hashlib.sha256(repr((vocabulary, tokenizer.encode(IDENTITY_TEXT))).encode()).hexdigest()


def tokenizer_path(info: Json) -> str:
    """Path of a server's tokenizer. `info`: SGLang's `/server_info` or `/model_info`."""
    return str(info.get("tokenizer_path") or info.get("model_path"))


def stamp_of(path: str) -> Stamp:
    """What changes if a file of a folder is written. Empty for a path that is no folder here, for example a name of
    Hugging Face's hub.
    """
    files = list[tuple[str, int, int, int]]()
    with contextlib.suppress(OSError):
        for entry in os.scandir(path):
            with contextlib.suppress(OSError):  # a link to a file that is gone
                found = entry.stat()
                files.append((entry.name, found.st_ino, found.st_size, found.st_mtime_ns))
    return tuple(sorted(files))
