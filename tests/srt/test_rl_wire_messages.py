"""What callers of the vLLM-RL wire are told, and what the router logs, over servers that only remember their calls."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from rl_wire_fakes import FakeServer

from verl_server.errors import BadInputError
from verl_server.router.dispatcher import Dispatcher
from verl_server.router.rl_wire.models import ServedModels

NO_MODEL = Path("/no/model")


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 30.0))


def served_models(owner: str) -> ServedModels:
    """The models of one server: a base model and an adapter."""

    async def get_json(*_: Any) -> Any:
        base = {"id": "base", "owned_by": owner, "max_model_len": 9}
        return {"data": [base, {"id": "policy", "owned_by": owner, "parent": "base"}]}

    dispatcher = Dispatcher()
    server: Any = FakeServer("a", NO_MODEL)
    dispatcher.pool.add_replica("a", server, 0)
    return ServedModels(dispatcher.pool, get_json)


@pytest.mark.parametrize(("owner", "adapter"), [("sglang", {"lora_path": "policy"}), ("vllm", {})])
def test_a_forwarded_body_names_the_adapter_for_its_engine(owner: str, adapter: Any) -> None:
    async def scenario() -> None:
        models, path = served_models(owner), "/v1/chat/completions"
        for body in ({}, {"model": None}, {"model": "base"}, {"model": "base:policy"}, {"model": "default"}):
            assert await models.with_adapter(path, body) is body
        assert await models.with_adapter(path, {"model": "policy"}) == {"model": "policy", **adapter}
        for name in ("polciy", "base:polciy"):
            with pytest.raises(BadInputError, match=f"The model `{name}` does not exist"):
                await models.with_adapter(path, {"model": name})

    run(scenario())
