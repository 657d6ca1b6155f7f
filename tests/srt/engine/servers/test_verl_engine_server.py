"""`VerlEngine` with a real server: tokens, log probabilities and pushed weights, on every rank."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    GREEDY,
    PROMPTS,
    Ranks,
    all_at_once,
    assert_equals_reference,
    change_weights,
    mesh_of,
    reference_model,
)
from torch.distributed.device_mesh import DeviceMesh

from verl_server import RemoteServer, VerlEngine
from verl_server.errors import BadInputError, ServerError

ARCHITECTURES = ["qwen2", "qwen3", "llama", "qwen3_moe"]


@pytest.fixture(scope="module")
def engines(one_rank: DeviceMesh, shared_engine: VerlEngine, tiny: Callable[..., Path]) -> Iterator[dict[str, Any]]:
    """An engine for each architecture, and one in bfloat16. Qwen3 uses the shared engine. The others start together."""
    models: dict[str, tuple[Path, Any]] = {name: (tiny(name), "float32") for name in ARCHITECTURES if name != "qwen3"}
    models["bfloat16"] = (tiny("llama", dtype="bfloat16", tie_word_embeddings=True), torch.bfloat16)

    def start(folder: Path, dtype: Any) -> Callable[[], Any]:
        return lambda: VerlEngine(one_rank, servers=None, model_path=folder, dtype=dtype, max_total_tokens=8192)

    with all_at_once(*(start(*model) for model in models.values())) as started:
        yield {"qwen3": shared_engine, **dict(zip(models, started, strict=True))}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tp1_equals_hugging_face_before_and_after_updates(
    architecture: str, engines: dict[str, Any], tiny: Callable[..., Path]
) -> None:
    engine = engines[architecture]
    model = reference_model(tiny(architecture))
    first = assert_equals_reference(engine, model)
    old = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    change_weights(model, seed=1)
    changed = engine.update_weights_from_tensor(iter(model.state_dict().items()))
    assert changed.num_missing == 0
    assert assert_equals_reference(engine, model) != first
    restored = engine.update_weights_from_tensor(old.items())
    assert restored.weight_version == changed.weight_version + 1 == engine.weight_version
    again = engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)
    assert [reply["output_ids"] for reply in again] == first
    assert {reply["meta_info"]["weight_version"] for reply in again} == {restored.weight_version}


def _tp2_rank(rank: int, world: int, folder: str) -> list[list[list[int]]]:
    from torch.distributed.fsdp import fully_shard

    model = reference_model(folder)
    mesh = mesh_of(world)
    with VerlEngine(mesh, model_path=folder, dtype="float32", max_total_tokens=8192) as engine:
        first = assert_equals_reference(engine, model)
        change_weights(model, seed=1)
        changed = reference_model(folder)
        change_weights(changed, seed=1)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        result = engine.update_weights_from_tensor(model.state_dict().items())
        assert (result.weight_version, result.num_missing) == (1, 0)
        assert engine.weight_version == 1, "the version is known on every rank"
        second = assert_equals_reference(engine, changed)
        # the old weights as a full state dict on rank 0 only, as FSDP1 provides it
        old = reference_model(folder).state_dict() if rank == 0 else {}
        engine.update_weights_from_tensor(old.items())
        third = [r["output_ids"] for r in engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)]
    return [first, second, third]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tp2_with_two_fsdp2_ranks_equals_hugging_face(
    architecture: str, two_ranks: Ranks, tiny: Callable[..., Path]
) -> None:
    ranks = two_ranks.run(_tp2_rank, str(tiny(architecture)))
    assert ranks[0] == ranks[1], "every rank gets the same result"
    first, second, third = ranks[0]
    assert first == third != second


def test_bfloat16_serves_and_takes_float32_weights(engines: dict[str, Any], tiny: Callable[..., Path]) -> None:
    model = reference_model(tiny("llama", dtype="bfloat16", tie_word_embeddings=True))
    change_weights(model, seed=3)
    engines["bfloat16"].update_weights_from_tensor(model.state_dict().items())
    model.to(torch.bfloat16)
    reply = engines["bfloat16"].generate(input_ids=PROMPTS[2], sampling_params=GREEDY, return_logprob=True)
    tokens = reply["output_ids"]
    with torch.no_grad():
        logits = model.double()(torch.tensor([[*PROMPTS[2], *tokens]])).logits[0, len(PROMPTS[2]) - 1 : -1]
    expected = torch.log_softmax(logits, dim=-1)
    for row, token, entry in zip(expected, tokens, reply["meta_info"]["output_token_logprobs"], strict=True):
        assert entry[0] == pytest.approx(float(row[token]), abs=0.1)
        assert float(row[token]) > float(row.max()) - 0.1, "greedy, up to the rounding of bfloat16"


@pytest.mark.smoke
def test_text_prompts_and_batches(shared_engine: VerlEngine) -> None:
    one = shared_engine.generate("hello", sampling_params=GREEDY)
    many = shared_engine.generate(["hello", "you"], sampling_params=[GREEDY, {**GREEDY, "max_new_tokens": 3}])
    assert isinstance(one, dict)
    assert many[0]["output_ids"] == one["output_ids"]
    assert len(many[1]["output_ids"]) == 3


@pytest.mark.smoke
def test_each_prompt_of_a_batch_has_its_own_values(shared_engine: Any) -> None:
    replies = shared_engine.generate(
        input_ids=((1, 2), [3, 4]),
        sampling_params=(GREEDY, {**GREEDY, "max_new_tokens": 3}),
        return_logprob=[True, False],
        logprob_start_len=[0, -1],
        token_ids_logprob=[[5], None],
    )
    assert ["output_token_logprobs" in reply["meta_info"] for reply in replies] == [True, False]
    assert ["input_token_ids_logprobs" in reply["meta_info"] for reply in replies] == [True, False]
    assert len(replies[1]["output_ids"]) == 3


@pytest.mark.smoke
def test_a_stream_grows_to_the_whole_reply(shared_engine: VerlEngine) -> None:
    whole = shared_engine.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)["output_ids"]
    pieces = [
        event["output_ids"]
        for event in shared_engine.generate(input_ids=PROMPTS[0], sampling_params=GREEDY, stream=True)
    ]
    assert len(pieces) > 1
    assert pieces[-1] == whole
    assert all(whole[: len(piece)] == piece for piece in pieces)


@pytest.mark.smoke
def test_many_async_generate_calls_at_once(shared_engine: VerlEngine) -> None:
    async def gather() -> list[Any]:
        calls = [shared_engine.async_generate(input_ids=[i, i + 1], sampling_params=GREEDY) for i in range(20)]
        replies = await asyncio.gather(*calls)
        stream = await shared_engine.async_generate(input_ids=[3, 4], sampling_params=GREEDY, stream=True)
        events = [event async for event in stream]
        assert events[-1]["output_ids"] == replies[3]["output_ids"]
        return replies

    alone = [shared_engine.generate(input_ids=[i, i + 1], sampling_params=GREEDY) for i in range(20)]
    assert [r["output_ids"] for r in asyncio.run(gather())] == [r["output_ids"] for r in alone]


@pytest.mark.smoke
def test_request_ids(shared_engine: VerlEngine) -> None:
    """One id for one prompt, and a list of ids for a batch; the replies have them."""
    one = shared_engine.generate(input_ids=[1, 2], sampling_params=GREEDY, rid="single")
    assert one["meta_info"]["id"] == "single"
    many = asyncio.run(
        shared_engine.async_generate(input_ids=[[1, 2], [3, 4]], sampling_params=GREEDY, rid=["first", "second"])
    )
    assert [reply["meta_info"]["id"] for reply in many] == ["first", "second"]


@pytest.mark.parametrize("launch_server", [True, False])
def test_launch_server_and_servers_exclude_each_other(
    launch_server: bool, one_rank: DeviceMesh, tiny: Callable[..., Path]
) -> None:
    message = rf"launch_server={launch_server} and servers \(1 of them\) were given.*starts a server process"
    with pytest.raises(BadInputError, match=message):
        VerlEngine(
            one_rank,
            launch_server=launch_server,
            servers=[RemoteServer("http://127.0.0.1:1")],
            model_path=str(tiny("qwen3")),
        )


def test_a_wrong_admin_key_of_a_running_server_is_refused_at_once(
    shared_engine: VerlEngine, one_rank: DeviceMesh, tiny: Callable[..., Path]
) -> None:
    """Without the check, the first weight update would be the first request with this key."""
    adapter = shared_engine.adapter
    assert adapter is not None
    adapter.check_keys()
    server = RemoteServer(adapter.base_url, adapter.api_key, "wrong-admin-key")
    with pytest.raises(ServerError, match=rf"the server at {adapter.base_url} refused the admin_api_key for"):
        VerlEngine(one_rank, servers=[server], model_path=tiny("qwen3"))


def test_mappings_and_numbers_of_numpy_are_accepted(shared_engine: VerlEngine, tiny: Callable[..., Path]) -> None:
    expected = shared_engine.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)["output_ids"]
    version: Any = np.int64(shared_engine.weight_version + 1)
    weights = MappingProxyType(reference_model(tiny("qwen3")).state_dict())
    result = shared_engine.update_weights_from_tensor(weights, weight_version=version)
    assert (result.weight_version, type(result.weight_version)) == (int(version), int)
    params: Any = MappingProxyType({**GREEDY, "temperature": np.float32(0), "max_new_tokens": np.int64(6)})
    assert shared_engine.generate(input_ids=PROMPTS[0], sampling_params=params)["output_ids"] == expected[:6]
    assert shared_engine.adapter is not None
    forced = {"logit_bias": {expected[0]: 100.0}, "stop_token_ids": {expected[0], 5}, "max_new_tokens": 6}
    reply = shared_engine.adapter.generate(input_ids=PROMPTS[0], sampling_params=forced, stream=False)
    assert reply["output_ids"] == expected[:1]


@pytest.mark.smoke
def test_log_probabilities_are_after_temperature_and_before_top_k(
    shared_engine: VerlEngine, tiny: Callable[..., Path]
) -> None:
    """Trainers compute `log_softmax(logits / temperature)` over the whole vocabulary, as the served policy does."""
    temperature, prompt, model = 0.5, PROMPTS[2], reference_model(tiny("qwen3"))
    params = {"temperature": temperature, "top_k": 5, "max_new_tokens": 24, "ignore_eos": True}
    reply = shared_engine.generate(input_ids=prompt, sampling_params=params, return_logprob=True)
    tokens, entries = reply["output_ids"], reply["meta_info"]["output_token_logprobs"]
    with torch.no_grad():
        logits = model.double()(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    expected = torch.log_softmax(logits / temperature, dim=-1)
    assert [entry[1] for entry in entries] == tokens
    for position, (token, entry) in enumerate(zip(tokens, entries, strict=True)):
        assert abs(entry[0] - float(expected[position, token])) < 1e-4
        assert token in expected[position].topk(5).indices, "the token was sampled among the top 5"
    top_5_mass = expected.topk(5).values.exp().sum(-1)
    assert float(top_5_mass.min()) < 0.9, "log probabilities after top-k would be visibly larger"
