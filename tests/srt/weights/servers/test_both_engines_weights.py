"""Pushes of weights through `VerlEngine` into real servers of both engines, compared with Hugging Face."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from both_engines import KINDS, RunningStream, SharedEngines, assert_computed_by, until_idle
from helpers import (
    GREEDY,
    PROMPTS,
    Ranks,
    adapter_of,
    assert_equals_reference,
    change_weights,
    mesh_of,
    reference_model,
    remote_server_of,
)

from verl_server import PauseMode, RemoteServer, VerlEngine
from verl_server.errors import BadInputError, NotReadyError, ServerError, WeightManifestError

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def original(shared_engines: SharedEngines) -> Any:
    return reference_model(shared_engines.model)


@pytest.fixture
def changed(shared_engines: SharedEngines) -> Any:
    model = reference_model(shared_engines.model)
    change_weights(model, seed=3)
    return model


@pytest.fixture(params=KINDS)
def engine(request: pytest.FixtureRequest, shared_engines: SharedEngines, original: Any) -> Iterator[VerlEngine]:
    """An engine whose server has the weights of `original`, before and after the test."""
    engine = shared_engines.of(request.param)
    until_idle(adapter_of(engine))
    yield engine
    until_idle(adapter_of(engine))
    engine.update_weights_from_tensor(original.state_dict().items())
    assert_equals_reference(engine, original)


def test_whole_and_partial_pushes_are_exact(engine: VerlEngine, original: Any, changed: Any) -> None:
    """Also a part of fused modules: queries without keys and values, a gate without its projection upwards.

    A vLLM server gets whole modules: the other tensors of the module come from the last update, and are not missing.
    """
    is_vllm = adapter_of(engine).get_server_info().get("engine_kind") == "vllm"
    assert_equals_reference(engine, original)
    before = engine.weight_version
    result = engine.update_weights_from_tensor(changed.state_dict().items())
    assert (result.weight_version, result.num_missing) == (before + 1, 0)
    assert_equals_reference(engine, changed)
    #: Parts of the names of tensors, and the number of other tensors in the same module of vLLM.
    parts = {
        "model.norm.weight": 0,
        "layers.0.self_attn.": 0,
        "1.self_attn.q_proj": 2,
        "1.mlp.gate_proj": 1,
        "embed": 0,
    }
    for version, (part, num_added) in enumerate(parts.items(), before + 2):
        tensors = {name: tensor for name, tensor in original.state_dict().items() if part in name}
        state = changed.state_dict()
        changed.load_state_dict({**state, **tensors})
        result = engine.update_weights_from_tensor(tensors.items())
        num_missing = len(state) - len(tensors) - (num_added if is_vllm else 0)
        assert (result.weight_version, result.num_missing) == (version, num_missing)
        assert_equals_reference(engine, changed)
    assert adapter_of(engine).get_model_info()["weight_version"] == before + 1 + len(parts)


def test_an_update_in_the_middle_of_a_generation(engine: VerlEngine, original: Any, changed: Any) -> None:
    """Tokens before the update have the log probabilities of the old weights, and those after it of the new weights."""
    before = engine.weight_version
    stream = RunningStream(adapter_of(engine), input_ids=PROMPTS[0], rid="across")
    stream.until_tokens(8)
    engine.update_weights_from_tensor(changed.state_dict().items(), pause_mode=PauseMode.RETRACT)
    assert stream.is_running
    count = stream.num_tokens
    stream.until_tokens(count + 8)
    adapter_of(engine).abort_request("across")
    reply = stream.result()
    spans = reply["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == [before, before + 1]
    assert (spans[0]["start"], spans[0]["end"], spans[1]["end"]) == (0, spans[1]["start"], len(reply["output_ids"]))
    assert_computed_by({before: original, before + 1: changed}, PROMPTS[0], reply)


def test_no_request_is_answered_from_the_cache_of_earlier_weights(
    engine: VerlEngine, original: Any, changed: Any
) -> None:
    """A pause in place keeps the cache. The same long prompt gets the answer of the present weights."""
    prompt = [1 + (7 * k) % 249 for k in range(300)]
    for model in (changed, original):
        engine.generate(input_ids=prompt, sampling_params=GREEDY)
        engine.update_weights_from_tensor(model.state_dict().items(), pause_mode=PauseMode.IN_PLACE, flush_cache=False)
        for _ in range(2):
            reply = engine.generate(input_ids=prompt, sampling_params=GREEDY, return_logprob=True)
            assert_computed_by({engine.weight_version: model}, prompt, reply)


@pytest.mark.parametrize(
    ("spoil", "error", "cause"),
    [
        (lambda w: w | {"model.no_such.weight": torch.zeros(2)}, WeightManifestError, "no_such"),
        (lambda w: w | {"model.norm.weight": torch.zeros(63)}, WeightManifestError, r"\[63\].*\[64\]"),
        (lambda w: w | {"model.norm.weight": torch.full((64,), float("nan"))}, BadInputError, "NaN|finite"),
        (lambda w: w | {"model.norm.weight": torch.zeros(64, dtype=torch.int64)}, BadInputError, "int64"),
        (lambda w: {}, BadInputError, "empty"),
    ],
    ids=["unknown name", "wrong shape", "NaN", "wrong type", "nothing"],
)
def test_wrong_tensors_are_refused_before_the_servers_are_involved(
    engine: VerlEngine, changed: Any, spoil: Callable[[Any], Any], error: type[Exception], cause: str
) -> None:
    """A request that runs meanwhile is not interrupted, and the version stays."""
    version = engine.weight_version
    rid = uuid.uuid4().hex  # SGLang would abort a request with the id of a stream of the test before
    stream = RunningStream(adapter_of(engine), input_ids=[1, 2], rid=rid)
    stream.until_tokens(2)
    with pytest.raises(error, match=cause):
        engine.update_weights_from_tensor(spoil(dict(changed.state_dict())), check_finite=True)
    count = stream.num_tokens
    stream.until_tokens(count + 2)
    adapter_of(engine).abort_request(rid)
    assert [span["version"] for span in stream.result()["meta_info"]["weight_versions"]] == [version]
    assert adapter_of(engine).get_model_info()["weight_version"] == engine.weight_version == version


def test_weights_after_a_release_of_all_memory(engine: VerlEngine, changed: Any) -> None:
    engine.release_memory_occupation()
    with pytest.raises(NotReadyError):
        engine.generate(input_ids=[1], sampling_params=GREEDY)
    engine.resume_memory_occupation()
    engine.update_weights_from_tensor(changed.state_dict().items())
    assert_equals_reference(engine, changed)


@pytest.mark.timeout(120)
def test_generation_continues_after_an_update_during_a_release(engine: VerlEngine, changed: Any) -> None:
    """An update that has failed leaves the server paused. The next update ends the pause, also without a KV cache."""
    adapter_of(engine).pause_generation(PauseMode.RETRACT)
    engine.release_memory_occupation()
    engine.resume_memory_occupation(["weights"])
    engine.update_weights_from_tensor(changed.state_dict().items())
    engine.resume_memory_occupation()
    assert_equals_reference(engine, changed)


def _push_shards(rank: int, world: int, server: RemoteServer, folder: str, version: int) -> list[list[int]]:
    """Push shards of rows and of columns, and replicated tensors, of which each rank has its part."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    model = reference_model(folder)
    change_weights(model, seed=11)
    mesh = mesh_of(world)
    placements = [Shard(0), Shard(1), Replicate()]
    with VerlEngine(mesh, model_path=folder, dtype="float32", servers=[server]) as engine:
        placed = {
            name: distribute_tensor(tensor, mesh, [placements[index % 3 if tensor.dim() == 2 else 2]])
            for index, (name, tensor) in enumerate(model.state_dict().items())
        }
        engine.update_weights_from_tensor(placed.items(), weight_version=version)
        assert engine.weight_version == version
        return assert_equals_reference(engine, model)


def test_two_trainer_ranks_push_shards(
    engine: VerlEngine, shared_engines: SharedEngines, two_ranks: Ranks, original: Any
) -> None:
    server, version = remote_server_of(adapter_of(engine)), engine.weight_version + 1
    first, second = two_ranks.run(_push_shards, server, str(shared_engines.model), version)
    assert first == second, "both ranks get the same tokens"
    assert adapter_of(engine).get_model_info()["weight_version"] == version
    reply = adapter_of(engine).generate(input_ids=PROMPTS[0], sampling_params=GREEDY)
    assert reply["output_ids"] == first[0]
    with pytest.raises(ServerError, match="another client has changed the weights"):  # the next update takes over
        engine.update_weights_from_tensor(original.state_dict().items())


def test_many_requests_run_across_updates(engine: VerlEngine, original: Any, changed: Any) -> None:
    """Eight requests, three updates: each token has the log probability of the version that its span names."""
    adapter, models = adapter_of(engine), {engine.weight_version: original}
    streams = [RunningStream(adapter, input_ids=[index + 1, 9], rid=f"many-{index}") for index in range(8)]
    for model in (changed, original, changed):
        for stream in streams:
            count = stream.num_tokens
            stream.until_tokens(count + 4)
        engine.update_weights_from_tensor(model.state_dict().items())
        models[engine.weight_version] = model
    for stream in streams:
        count = stream.num_tokens
        stream.until_tokens(count + 4)
    adapter.abort_request(abort_all=True)
    for index, stream in enumerate(streams):
        reply = stream.result()
        assert [span["version"] for span in reply["meta_info"]["weight_versions"]] == list(models)
        assert_computed_by(models, [index + 1, 9], reply)
