"""Fleets of real servers of each engine, and servers of both engines behind one router."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from both_engines import KINDS, SharedEngines, adapter_config, assert_computed_by, model_of, server_settings
from fleet_helpers import RECOVERY, RESTART_S, busy_replica, healthy, states, until_tokens
from helpers import (
    PROMPTS,
    adapter_of,
    assert_equals_reference,
    change_weights,
    greedy_with_logprobs,
    reference_model,
    remote_server_of,
    server_pid,
    wait_until,
)
from torch.distributed.device_mesh import DeviceMesh
from vllm_helpers import needs_vllm

from verl_server import HttpServerEngineAdapter, RolloutManager, VerlEngine
from verl_server.errors import ServerError
from verl_server.router.dispatcher import Dispatcher
from verl_server.router.process.static_replicas import ProbedServers

pytestmark = pytest.mark.timeout(900)

NUM_TOKENS = 1600
LONG = {"temperature": 0.0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
"""Sampling parameters of a request that is still running when its server is killed."""


# -- a fleet of one engine ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 model: tied embeddings and biases."""
    return model_of(tmp_path_factory.mktemp("tied"), "qwen2", tie_word_embeddings=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fleet(kind: str, one_rank: DeviceMesh, tied_model: Path) -> None:
    """Pushes reach both replicas. A request survives the death of its replica, which gets the weights again."""
    folder, model = str(tied_model), reference_model(tied_model)
    with (
        RolloutManager(
            2, model_path=folder, config=adapter_config(kind), recovery=RECOVERY, **server_settings(kind)
        ) as fleet,
        VerlEngine(one_rank, fleet=fleet, model_path=folder, dtype="float32") as engine,
    ):
        change_weights(model, seed=5)
        assert engine.update_weights_from_tensor(model.state_dict().items()).num_missing == 0
        assert_equals_reference(engine, model)
        some = {name: tensor + 0.01 for name, tensor in model.state_dict().items() if "layers.1.self_attn" in name}
        model.load_state_dict({**model.state_dict(), **some})
        engine.update_weights_from_tensor(some.items())
        for replica in fleet.replicas:
            assert_equals_reference(replica.adapter, model)
        expected, _ = greedy_with_logprobs(model, PROMPTS[0], NUM_TOKENS)
        reply = asyncio.run(_survive(fleet))
        assert reply["output_ids"] == expected
        assert reply["meta_info"]["attempts"] == 2
        (span,) = reply["meta_info"]["weight_versions"]
        assert span == {"version": engine.weight_version, "start": 0, "end": NUM_TOKENS}
        assert_computed_by({engine.weight_version: model}, PROMPTS[0], reply, tolerance=1e-4)
        wait_until(lambda: healthy(fleet) == 2, RESTART_S, f"not healthy: {states(fleet)}")
        assert {replica.weight_version for replica in fleet.replicas} == {engine.weight_version}
        for replica in fleet.replicas:
            assert_equals_reference(replica.adapter, model)


async def _survive(fleet: RolloutManager) -> Any:
    """The reply to a request whose server is killed while it generates."""
    request = asyncio.ensure_future(
        fleet.router.generate(input_ids=PROMPTS[0], sampling_params=LONG, return_logprob=True, rid="survivor")
    )
    await until_tokens(fleet, len(PROMPTS[0]) + 30, request)
    os.kill(server_pid(busy_replica(fleet)), signal.SIGKILL)
    return await request


# -- servers of both engines -------------------------------------------------------------------------


@needs_vllm
def test_one_engine_pushes_to_servers_of_both_engines(one_rank: DeviceMesh, shared_engines: SharedEngines) -> None:
    adapters = [adapter_of(shared_engines.of(kind)) for kind in ("sglang", "vllm")]
    original, changed = reference_model(shared_engines.model), reference_model(shared_engines.model)
    change_weights(changed, seed=8)
    settings: dict[str, Any] = {"model_path": str(shared_engines.model), "dtype": "float32"}
    version = 1 + max(shared_engines.of(kind).weight_version for kind in ("sglang", "vllm"))
    with VerlEngine(one_rank, servers=[remote_server_of(adapter) for adapter in adapters], **settings) as engine:
        engine.update_weights_from_tensor(changed.state_dict().items(), weight_version=version)
        tokens = [assert_equals_reference(adapter, changed) for adapter in adapters]
        assert tokens[0] == tokens[1]
        assert [adapter.get_model_info()["weight_version"] for adapter in adapters] == [version] * 2
        assert_equals_reference(engine, changed)
    for kind in ("sglang", "vllm"):
        own, tensors = shared_engines.of(kind), original.state_dict()
        with pytest.raises(
            ServerError, match="another VerlEngine of this process has changed"
        ):  # the next update takes over
            own.update_weights_from_tensor(tensors.items(), weight_version=version + 1)
        own.update_weights_from_tensor(tensors.items(), weight_version=version + 1)
        assert_equals_reference(own, original)


@pytest.fixture(scope="module")
def expert_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 model with mixtures of experts."""
    return model_of(tmp_path_factory.mktemp("experts"), "qwen3_moe")


@contextlib.contextmanager
def _server(kind: str, folder: Path) -> Iterator[HttpServerEngineAdapter]:
    with HttpServerEngineAdapter(str(folder), config=adapter_config(kind), **server_settings(kind)) as adapter:
        yield adapter


async def _continue_on(dispatcher: Dispatcher, servers: ProbedServers, own: Any, other: Any) -> Any:
    """The reply to a request that runs on the server `own`, which is killed, while only `other` is left."""
    await servers.set_servers({"own": remote_server_of(own)})
    request = asyncio.ensure_future(
        dispatcher.generate(
            {"input_ids": PROMPTS[0], "sampling_params": LONG, "return_logprob": True}, rid=f"on {own.base_url}"
        )
    )
    while max(replica.tokens_in_flight for replica in dispatcher.snapshot().replicas) < len(PROMPTS[0]) + 30:
        await asyncio.sleep(0.005)
        assert not request.done(), request.result()
    adding = asyncio.ensure_future(
        servers.set_servers({"own": remote_server_of(own), "other": remote_server_of(other)})
    )
    os.kill(own.pids.main, signal.SIGKILL)
    await adding
    return await request


@needs_vllm
def test_a_generation_continues_on_a_server_of_the_other_engine(one_rank: DeviceMesh, expert_model: Path) -> None:
    """From SGLang to vLLM, and from vLLM to another server of SGLang, with the tokens of Hugging Face."""
    model, folder = reference_model(expert_model), expert_model
    with _server("vllm", folder) as vllm, _server("sglang", folder) as first, _server("sglang", folder) as second:
        adapters = [first, vllm, second]
        with VerlEngine(
            one_rank, servers=[remote_server_of(each) for each in adapters], model_path=str(folder), dtype="float32"
        ) as engine:
            change_weights(model, seed=6)
            engine.update_weights_from_tensor(model.state_dict().items(), weight_version=7)
            tokens = [assert_equals_reference(adapter, model) for adapter in adapters]
            assert tokens[0] == tokens[1] == tokens[2]

        async def run() -> list[Any]:
            dispatcher = Dispatcher()
            servers = ProbedServers(dispatcher)
            try:
                replies = [await _continue_on(dispatcher, servers, first, vllm)]
                return [*replies, await _continue_on(dispatcher, servers, vllm, second)]
            finally:
                await dispatcher.close()
                await servers.close()

        expected, _ = greedy_with_logprobs(model, PROMPTS[0], NUM_TOKENS)
        for reply in asyncio.run(run()):
            assert reply["output_ids"] == expected
            assert reply["meta_info"]["attempts"] == 2
            assert reply["meta_info"]["weight_versions"] == [{"version": 7, "start": 0, "end": NUM_TOKENS}]
            assert_computed_by({7: model}, PROMPTS[0], reply, tolerance=1e-4)
