"""Invalid input to every public method raises a typed error that names the cause, and the server keeps serving."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from helpers import GREEDY, PROMPTS, reference_model
from torch.distributed.device_mesh import DeviceMesh

from verl_server import Timeouts, VerlEngine
from verl_server.adapter.sglang.requests import REQUEST_FIELDS
from verl_server.config import AdapterConfig
from verl_server.errors import BadInputError, PeerError, WeightManifestError


@pytest.fixture
def untouched(shared_engine: VerlEngine) -> Iterator[Any]:
    """The shared engine. After the test it must still serve the same tokens with the same weight version."""
    before = shared_engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)
    yield shared_engine
    after = shared_engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)
    assert [r["output_ids"] for r in after] == [r["output_ids"] for r in before]
    versions = {r["meta_info"]["weight_version"] for r in before + after}
    assert len(versions) == 1, "a refused update must not change the version"


BAD_REQUESTS: list[tuple[dict[str, Any], str]] = [
    ({}, "either `prompt` or `input_ids`"),
    ({"prompt": "a", "input_ids": [1]}, "either `prompt` or `input_ids`"),
    ({"input_ids": []}, "empty"),
    ({"input_ids": [[1], []]}, r"input_ids\[1\] is empty"),
    ({"input_ids": "abc"}, "must be a list"),
    ({"input_ids": ["a", "b"]}, "whole numbers"),
    ({"input_ids": [1.5]}, "whole numbers"),
    ({"input_ids": [1, None]}, "whole numbers"),
    ({"input_ids": [[1], 2]}, r"input_ids\[1\]"),
    ({"input_ids": [-1]}, "negative value"),
    ({"input_ids": [5, 320]}, "token id 320.*ends at 319"),
    ({"input_ids": [2**70]}, "too large"),
    ({"input_ids": [1] * 5000}, "5000 tokens"),
    ({"prompt": ""}, "non-empty"),
    ({"prompt": 5}, "non-empty string"),
    ({"prompt": ["ok", None]}, r"prompt\[1\]"),
    ({"input_ids": [1], "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
    ({"input_ids": [1], "sampling_params": {"max_new_tokens": 2.5}}, "max_new_tokens"),
    ({"input_ids": [1], "sampling_params": {"max_new_tokens": "3"}}, "max_new_tokens"),
    ({"input_ids": [1], "sampling_params": {"temperature": -1.0}}, "temperature"),
    ({"input_ids": [1], "sampling_params": {"top_p": 7.0}}, "top_p"),
    ({"input_ids": [1], "sampling_params": {"top_k": 0}}, "top_k"),
    ({"input_ids": [1], "sampling_params": {"no_such": 1}}, "no_such"),
    ({"input_ids": [1], "sampling_params": 3}, "must be a dict"),
    ({"input_ids": [1], "sampling_params": {3: 4}}, "strings as keys"),
    ({"input_ids": [[1], [2]], "sampling_params": [{}]}, "1 sampling_params for 2 prompts"),
    ({"input_ids": [1], "sampling_params": {"regex": "["}}, "regex|grammar"),
    ({"input_ids": [1], "sampling_params": {"json_schema": "{nonsense"}}, "grammar|json|JSON"),
    ({"input_ids": [1], "rid": ""}, "rid"),
    ({"input_ids": [1], "lora_path": "nothing"}, "(?i)lora"),
    ({"input_ids": [1], "logprob_start_len": 77, "return_logprob": True}, "logprob_start_len"),
    ({"input_ids": torch.tensor([1, 2])}, r"input_ids must be a list.*Tensor.*\.tolist\(\)"),
    ({"input_ids": np.array([1, 2])}, r"input_ids must be a list.*ndarray.*\.tolist\(\)"),
    ({"input_ids": [torch.tensor(1), torch.tensor(2)]}, "cannot be sent as JSON.*Tensor"),
    ({"input_ids": [1, torch.tensor(2)]}, r"cannot be sent as JSON.*Tensor.*\.tolist\(\)"),
    ({"input_ids": [torch.tensor([1, 2])]}, "whole numbers"),
    ({"prompt": [1, 2, 3]}, "pass token ids as `input_ids=`"),
    ({"prompt": torch.tensor([1])}, "pass token ids as `input_ids=`"),
    ({"input_ids": [1], "rid": 5}, "rid must be a non-empty string"),
    ({"input_ids": [1], "return_logprobs": True}, "no request field 'return_logprobs'; did you mean 'return_logprob'"),
    ({"input_ids": [1], "no_such": 1}, "no request field 'no_such'.*GenerateReqInput"),
    ({"input_ids": [1], "temperature": 1.0}, r"sampling_params=\{'temperature': \.\.\.\}"),
    ({"input_ids": [1], "text": "a"}, "the argument is called `prompt`"),
    ({"input_embeds": [[0.5, 0.5]]}, r"input_embeds.*as text \(`prompt`\) and as token ids \(`input_ids`\) only"),
    ({"input_ids": [1], "sampling_params": {"return_logprob": True}}, r"pass it as generate\(\.\.\., return_logprob="),
    ({"input_ids": [1], "weight_version": 0}, "'weight_version' is a field of routers.*RolloutManager"),
    ({"input_ids": [1], "min_weight_version": 0}, "'min_weight_version' is a field of routers.*RolloutManager"),
    ({"input_ids": [1], "timeout_s": 5.0}, "'timeout_s' is a field of routers.*RolloutManager"),
    ({"input_ids": [1], "return_logprob": "yes"}, "return_logprob must be a valid boolean"),
    ({"input_ids": [1], "priority": "high"}, "priority must be a valid integer"),
    ({"input_ids": [1], "image_data": {1, 2}}, "cannot be sent as JSON"),
    ({"input_ids": [1], "sampling_params": {"max_tokens": 4}}, "'max_tokens'; did you mean 'max_new_tokens'"),
    ({"input_ids": [1], "sampling_params": {"temperature": "hot"}}, r"\['temperature'\] must be a valid number"),
    ({"input_ids": [1], "sampling_params": {"temperature": float("nan")}}, r"\['temperature'\] must be a finite"),
    ({"input_ids": [1], "sampling_params": {"top_k": 0.5}}, r"\['top_k'\] must be a valid integer"),
    ({"input_ids": [1], "sampling_params": {"ignore_eos": 1}}, r"\['ignore_eos'\] must be a valid boolean"),
    ({"input_ids": [1], "sampling_params": {"stop": 5}}, r"\['stop'\] must be a valid string or be a valid list"),
    ({"input_ids": [1], "sampling_params": {"stop_token_ids": [0.5]}}, r"\['stop_token_ids'\] must be a valid integer"),
    (
        {"input_ids": [1], "sampling_params": {"json_schema": {"type": "object"}}},
        "json_schema.* must be a valid string",
    ),
    (
        {"input_ids": [1, 2], "return_logprob": True, "logprob_start_len": -5},
        "logprob_start_len must be greater than or equal to -1",
    ),
    ({"input_ids": [1, 2], "return_logprob": True, "logprob_start_len": [0]}, "has one prompt, which is not in a list"),
    ({"input_ids": [1], "return_logprob": True, "top_logprobs_num": 321}, "vocabulary has 320 token ids"),
    ({"input_ids": [1], "sampling_params": {"min_new_tokens": 1, "stop_token_ids": [-1]}}, "stop_token_ids"),
    ({"input_ids": [1], "sampling_params": {"min_new_tokens": 1, "stop_token_ids": [999]}}, "vocabulary ends at 319"),
    ({"input_ids": [1], "sampling_params": {"top_k": 2**40}}, "top_k"),
    ({"input_ids": [1], "positional_embed_overrides": 5}, "no argument 'positional_embed_overrides'"),
    ({"input_ids": [[1], [2]], "return_logprob": [True]}, "1 return_logprob for 2 prompts"),
    ({"input_ids": [1], "sampling_params": [{}]}, "sampling_params is a list with one value for each prompt"),
    ({"prompt": []}, "prompt is empty"),
]


@pytest.mark.parametrize(("request_", "cause"), BAD_REQUESTS, ids=[repr(r)[:60] for r, _ in BAD_REQUESTS])
def test_generate_refuses(untouched: Any, request_: dict[str, Any], cause: str) -> None:
    with pytest.raises(BadInputError, match=cause):
        untouched.generate(**request_)


@pytest.mark.parametrize(
    ("request_", "cause"),
    [
        ({"return_logprobs": True}, "did you mean 'return_logprob'"),
        ({"min_weight_version": 0}, "is a field of routers"),
        ({"sampling_params": {"max_tokens": 4}}, "did you mean 'max_new_tokens'"),
    ],
)
def test_stream_refuses(shared_engine: VerlEngine, request_: dict[str, Any], cause: str) -> None:
    with pytest.raises(BadInputError, match=cause):
        next(shared_engine.generate(input_ids=[1], stream=True, **request_))


def test_fields_of_the_server_that_are_not_listed_here_are_accepted(shared_engine: Any) -> None:
    """The server says which fields it has, so that fields of later versions of SGLang can be used."""
    expected = shared_engine.generate(input_ids=[1, 2], sampling_params=GREEDY)["output_ids"]
    assert "cache_salt" not in REQUEST_FIELDS
    for fields in ({"cache_salt": "salt"}, {"session_id": "session"}):
        assert shared_engine.generate(input_ids=[1, 2], sampling_params=GREEDY, **fields)["output_ids"] == expected


def _weights(engine_folder: Any) -> dict[str, torch.Tensor]:
    return dict(reference_model(engine_folder).state_dict())


@pytest.mark.parametrize(
    ("spoil", "cause"),
    [
        (lambda w: w | {"model.no_such.weight": torch.zeros(2)}, "no_such"),
        (lambda w: w | {"model.norm.weight": torch.zeros(63)}, r"model.norm.weight.*\[63\].*\[64\]"),
        (lambda w: w | {"model.norm.weight": torch.zeros(64, dtype=torch.int64)}, "model.norm.weight.*int64"),
        (lambda w: w | {"model.norm.weight": torch.zeros(64).to(torch.float8_e4m3fn)}, "model.norm.weight.*float8"),
        (lambda w: w | {"model.norm.weight": [0.0]}, "model.norm.weight.*list"),
        (lambda w: {}, "empty"),
        (lambda w: iter(()), "empty"),
        (lambda w: 5, "pairs of name and tensor"),
        (lambda w: [5], "pairs of name and tensor"),
        (lambda w: [(1, torch.zeros(2))], "pairs of name and tensor"),
        (lambda w: [*w.items(), next(iter(w.items()))], "comes twice"),
    ],
)
def test_weight_update_refuses_before_a_byte_moves(
    untouched: Any, tiny: Callable[..., Any], spoil: Callable[[Any], Any], cause: str
) -> None:
    with pytest.raises(BadInputError, match=cause):
        untouched.update_weights_from_tensor(spoil(_weights(tiny("qwen3"))))


def test_failing_iterator_changes_nothing(untouched: Any, tiny: Callable[..., Any]) -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(_weights(tiny("qwen3")).items())[:5]
        raise OSError("the disk is gone")

    with pytest.raises(PeerError, match="the disk is gone"):
        untouched.update_weights_from_tensor(broken())


def test_manifest_errors_carry_the_facts(untouched: Any) -> None:
    with pytest.raises(WeightManifestError) as caught:
        untouched.update_weights_from_tensor([("model.norm.weight", torch.zeros(3, 3))])
    assert caught.value.details == {"name": "model.norm.weight", "expected": [64], "got": [3, 3]}
    with pytest.raises(WeightManifestError, match=r"did you mean 'model\.norm\.weight'"):
        untouched.update_weights_from_tensor([("norm.weight", torch.zeros(64))])


def test_control_calls_refuse(untouched: Any) -> None:
    adapter = untouched.adapter
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: untouched.release_memory_occupation(["no_such"]), "no_such"),
        (lambda: untouched.release_memory_occupation("weights"), "list"),
        (lambda: untouched.release_memory_occupation([]), "empty"),
        (lambda: untouched.release_memory_occupation(["weights", "weights"]), "twice"),
        (lambda: untouched.resume_memory_occupation(["weights"]), "weights"),
        (lambda: untouched.resume_memory_occupation(), "nothing"),
        (lambda: adapter.pause_generation("no_such"), "pause mode"),
        (lambda: adapter.abort_request(), "rid"),
        (lambda: adapter.abort_request(""), "rid"),
        (lambda: adapter.update_weights_from_tensor([]), "0 payloads for 1 TP ranks"),
        (lambda: adapter.update_weights_from_tensor(["a", "b"]), "2 payloads"),
        (lambda: adapter.update_weights_from_tensor("abc"), "3 payloads"),
        (lambda: adapter.update_weights_from_tensor([b"abc"]), "not the base64 text"),
        (lambda: adapter.update_weights_from_tensor(["bm90IGEgcGlja2xl"]), "pickle"),
        (lambda: adapter.update_weights_from_distributed([], [], []), "not none"),
        (lambda: adapter.update_weights_from_distributed(["a"], ["float32"], []), "equally many"),
        (lambda: adapter.weights_checker("no_such"), "no_such"),
    ]
    for call, cause in refused:
        with pytest.raises(BadInputError, match=cause):
            call()


def test_constructors_refuse(one_rank: DeviceMesh, tiny: Callable[..., Any]) -> None:
    folder = str(tiny("qwen3"))
    refused: list[tuple[dict[str, Any], str]] = [
        ({"model_path": folder, "nnodes": 0}, "nnodes"),
        ({"model_path": folder, "nnodes": 2}, "divided evenly"),
        ({"model_path": folder, "tp_size": 0}, "tp_size"),
        ({"model_path": folder, "tp_size": "2"}, "tp_size"),
        ({"model_path": folder, "router_ip": "127.0.0.1"}, "router_port"),
        ({"model_path": folder, "attention_backend": {1, 2}}, "attention_backend"),
        ({"model_path": "/no/such/folder"}, "/no/such/folder"),
        ({"model_path": folder, "api_key": "x"}, "api_key must be a string of at least 8 printable ASCII"),
        ({"model_path": folder, "admin_api_key": 12345678}, "admin_api_key must be a string"),
        ({}, "model_path"),
    ]
    for arguments, cause in refused:
        with pytest.raises(BadInputError, match=cause):
            VerlEngine(one_rank, **arguments)
    with pytest.raises(BadInputError, match="control_s"):
        Timeouts(control_s=0)
    with pytest.raises(BadInputError, match="router_port"):
        AdapterConfig(router_ip="127.0.0.1")
