"""`ServerTokenizers`: whether all servers behind one gateway have the same tokenizer."""

from __future__ import annotations

import hashlib
import logging

from verl_server.errors import BadInputError
from verl_server.gateway.hanging_calls import CallThatMayHang
from verl_server.trajectory.rendering.tokenizer import IDENTITY_TEXT
from verl_server.types import Json

logger = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 5.0
"""Seconds that a probe waits for a tokenizer to load. A later probe uses a tokenizer that takes longer."""


class ServerTokenizers:
    """Compares the tokenizers of servers with that of the first server, with which the gateway makes all prompts.

    Each tokenizer is loaded once, and only if its path differs from that of the first server.
    """

    def __init__(self, name: str, server_info: Json) -> None:
        """`name`, `server_info`: the first server, and SGLang's `/server_info` of it."""
        self._name, self._path = name, tokenizer_path(server_info)
        self._trusts_code = bool(server_info.get("trust_remote_code"))
        self._digests = dict[str, str | None]()
        """Digest of the vocabulary and of the token ids of a text, by path. None if the path cannot be read here."""
        self._load = CallThatMayHang("loading the tokenizer", self._digest)

    async def require_same(self, name: str, model_info: Json) -> None:
        """Raise BadInputError if a server has another tokenizer. `model_info`: SGLang's `/model_info` of the server.

        A tokenizer that cannot be read on this machine is not compared. The log names it. Raises TimeoutError if a
        tokenizer does not load in `LOAD_TIMEOUT_S` seconds, for example because its file system hangs.
        """
        path = tokenizer_path(model_info)
        if path == self._path:
            return
        for each in (self._path, path):
            if each not in self._digests:
                try:
                    self._digests[each] = await self._load.result(LOAD_TIMEOUT_S, each)
                except TimeoutError:
                    raise TimeoutError(
                        f"the tokenizer {each!r} has not loaded in {LOAD_TIMEOUT_S:g} s, so the tokenizer of the "
                        f"server {name} cannot be compared with that of the server {self._name}"
                    ) from None
        first, other = self._digests[self._path], self._digests[path]
        if first is not None and other is not None and first != other:
            raise BadInputError(
                f"the server {name} has the tokenizer {path!r}, which differs from the tokenizer {self._path!r} of the "
                f"server {self._name}; servers behind one gateway need the same tokenizer"
            )

    def _digest(self, path: str) -> str | None:
        """The digest of a tokenizer. None if it cannot be loaded."""
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=self._trusts_code)
        except Exception as error:  # noqa: BLE001 - code of another library: the folder is on another machine, for example
            logger.warning("the tokenizer %r of a server cannot be loaded, so it is not compared: %s", path, error)
            return None
        vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
        return hashlib.sha256(repr((vocabulary, tokenizer.encode(IDENTITY_TEXT))).encode()).hexdigest()


def tokenizer_path(info: Json) -> str:
    """Path of a server's tokenizer. `info`: SGLang's `/server_info` or `/model_info`."""
    return str(info.get("tokenizer_path") or info.get("model_path"))
