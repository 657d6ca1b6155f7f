"""Servers with different tokenizers behind one gateway: the token ids of one tokenizer mean other texts to another."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from gateway_commands import SHORT, ask, is_ready
from helpers import adapter_of, remote_server_of, wait_until

from verl_server import BadInputError, HttpServerEngineAdapter, VerlEngine
from verl_server.agent import RolloutLimits
from verl_server.gateway import DiscoveredServers, Gateway
from verl_server.gateway.engines.server_tokenizers import ServerTokenizers
from verl_server.tiny import make_tokenizer

LIMITS = RolloutLimits(max_turns=1000)
TEXTS = ("the quick brown fox jumps over the lazy dog " * 50,)


def test_a_server_with_another_tokenizer_gets_no_requests(
    shared_engine: VerlEngine, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    """Both servers have answered before the gateway knows its tokenizer, which is that of one of them."""
    make_tokenizer(tmp_path / "other", texts=TEXTS, vocab_size=400)
    first = remote_server_of(adapter_of(shared_engine))
    folders = {str(tiny("qwen3")), str(tmp_path / "other")}
    with HttpServerEngineAdapter(
        str(tiny("qwen3")), tokenizer_path=str(tmp_path / "other"), dtype="float32", max_total_tokens=8192
    ) as other:
        servers = DiscoveredServers([first, remote_server_of(other)])
        with Gateway(servers, tmp_path / "run", limits=LIMITS) as gateway:
            wait_until(lambda: is_ready(gateway.url), 60, "not ready")
            _, key = gateway.create_session("a", sampling_params=SHORT)
            assert ask(gateway.url, key).status_code == 200
            headers = {"x-api-key": gateway.admin_key}
            rows = httpx.get(f"{gateway.url}/health", headers=headers, timeout=60.0).json()["engine"]["servers"]
            assert sorted(row["admitted"] for row in rows) == [False, True]
            problem = next(row["problem"] for row in rows if not row["admitted"])
            assert all(folder in problem for folder in folders), "the problem names both tokenizers"


def test_tokenizers_are_compared_and_not_their_paths(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a", "copy"):
        make_tokenizer(tmp_path / name)
    make_tokenizer(tmp_path / "other", texts=TEXTS, vocab_size=400)

    def info(name: str) -> dict[str, str]:
        return {"model_path": "any", "tokenizer_path": str(tmp_path / name)}

    async def compare() -> None:
        tokenizers = ServerTokenizers("r0", info("a"))
        await tokenizers.require_same("r1", info("copy"))
        with pytest.raises(BadInputError, match=r"the server r2 has the tokenizer .*/other.*/a' of the server r0"):
            await tokenizers.require_same("r2", info("other"))
        for _ in range(2):
            await tokenizers.require_same("r3", info("missing"))

    with caplog.at_level(logging.WARNING, "verl_server.gateway"):
        asyncio.run(compare())
    named = [record for record in caplog.records if "missing" in record.getMessage()]
    assert len(named) == 1, "a tokenizer that cannot be loaded is named once"
