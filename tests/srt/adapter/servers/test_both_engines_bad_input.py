"""Invalid requests to real servers of both engines: each gives BadInputError, and the server keeps serving."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
from both_engines import KINDS, SharedEngines, serving_as_before, until_idle
from helpers import adapter_of

from verl_server import HttpServerEngineAdapter
from verl_server.errors import BadInputError

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", params=KINDS)
def adapter(request: pytest.FixtureRequest, shared_engines: SharedEngines) -> Iterator[HttpServerEngineAdapter]:
    """A server that serves as before when the tests have ended."""
    engine = shared_engines.of(request.param)
    with serving_as_before(engine):
        yield adapter_of(engine)
    until_idle(adapter_of(engine))


#: Sampling parameters that no engine can have.
BAD_PARAMS: list[tuple[Any, str]] = [
    ({"max_new_tokens": -1}, "max_new_tokens"),
    ({"max_new_tokens": 2.5}, "max_new_tokens"),
    ({"max_new_tokens": "3"}, "max_new_tokens"),
    ({"min_new_tokens": 9, "max_new_tokens": 3}, "min_(new_)?tokens"),
    ({"temperature": -1.0}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"top_p": 7.0}, "top_p"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 0.5}, "top_k"),
    ({"min_p": 2.0}, "min_p"),
    ({"frequency_penalty": 5.0}, "frequency_penalty"),
    ({"presence_penalty": -3.0}, "presence_penalty"),
    ({"repetition_penalty": 0.0}, "repetition_penalty"),
    ({"n": 0}, "'n'"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"stop": 5}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [0.5]}, "stop_token_ids"),
    ({"logit_bias": {"5": "much"}}, "logit_bias"),
    ({"logit_bias": {"999": 1.0}}, "999"),
    ({"regex": "["}, "regex|grammar"),
    ({"json_schema": "{nonsense"}, "grammar|json|JSON"),
    ({"no_such": 1}, "no_such"),
    ({"max_tokens": 4}, "max_tokens"),
    ({"return_logprob": True}, r"pass it as generate\(\.\.\., return_logprob="),
    (3, "must be a dict"),
    ({3: 4}, "strings as keys"),
]
#: Other requests that no engine can answer.
BAD_REQUESTS: list[tuple[dict[str, Any], str]] = [
    ({}, "either `prompt` or `input_ids`"),
    ({"prompt": "a", "input_ids": [1]}, "either `prompt` or `input_ids`"),
    ({"prompt": ""}, "non-empty"),
    ({"prompt": []}, "empty"),
    ({"input_ids": []}, "empty"),
    ({"input_ids": [[1], []]}, r"input_ids\[1\] is empty"),
    ({"input_ids": ["a", "b"]}, "whole numbers"),
    ({"input_ids": [-1]}, "negative value"),
    ({"input_ids": [5, 320]}, "token id 320.*ends at 319"),
    ({"input_ids": [2**70]}, "too large"),
    ({"input_ids": [1] * 40_000}, "40000 tokens"),
    ({"input_ids": [[1], [2]], "sampling_params": [{}]}, "1 sampling_params for 2 prompts"),
    ({"input_ids": [[1], [2]], "rid": ["a"]}, "1 rid for 2 prompts"),
    ({"input_ids": [[1], [2]], "rid": ["a", "a"]}, "(?i)duplicate|twice|same|running"),
    ({"input_ids": [1], "rid": ""}, "rid"),
    ({"input_ids": [1], "rid": 5}, "rid must be a non-empty string"),
    ({"input_ids": [1], "return_logprobs": True}, "did you mean 'return_logprob'"),
    ({"input_ids": [1], "no_such": 1}, "no request field 'no_such'"),
    ({"input_ids": [1], "temperature": 1.0}, r"sampling_params=\{'temperature': \.\.\.\}"),
    ({"input_ids": [1], "return_logprob": "yes"}, "return_logprob must be a valid boolean"),
    ({"input_ids": [1], "return_logprob": True, "top_logprobs_num": -1}, "top_logprobs_num"),
    ({"input_ids": [1], "priority": "high"}, "priority"),
    ({"input_ids": [1], "lora_path": "nothing"}, "(?i)lora|nothing"),
    ({"input_ids": [1], "min_weight_version": 0}, "is a field of routers"),
    ({"input_ids": [1], "cache_salt": 5}, "cache_salt"),
]
CASES = [*BAD_REQUESTS, *(({"input_ids": [1], "sampling_params": params}, cause) for params, cause in BAD_PARAMS)]


@pytest.mark.parametrize(("request_", "cause"), CASES, ids=[repr(case)[:70] for case, _ in CASES])
def test_generate_refuses(adapter: HttpServerEngineAdapter, request_: dict[str, Any], cause: str) -> None:
    with pytest.raises(BadInputError, match=cause):
        adapter.generate(**request_)
    assert len(adapter.generate(input_ids=[1], sampling_params={"max_new_tokens": 1})["output_ids"]) == 1


@pytest.mark.parametrize(
    ("request_", "cause"),
    [
        ({"no_such": 1}, "no_such"),
        ({"sampling_params": {"no_such": 4}}, "no_such"),
        ({"sampling_params": {"top_p": 7.0}}, "top_p"),
        ({"sampling_params": {"regex": "["}}, "regex|grammar"),
        ({"rid": ""}, "rid"),
    ],
)
def test_streams_refuse(adapter: HttpServerEngineAdapter, request_: dict[str, Any], cause: str) -> None:
    with pytest.raises(BadInputError, match=cause):
        next(adapter.generate_stream(input_ids=[1], **request_))
    assert len(adapter.generate(input_ids=[1], sampling_params={"max_new_tokens": 1})["output_ids"]) == 1


def test_control_requests_refuse(adapter: HttpServerEngineAdapter) -> None:
    refused: list[tuple[Any, str]] = [
        (lambda: adapter.pause_generation("no_such"), "pause mode"),
        (lambda: adapter.pause_generation("wait"), "one server cannot wait"),
        (lambda: adapter.abort_request(), "rid"),
        (lambda: adapter.abort_request(""), "rid"),
        (lambda: adapter.release_memory_occupation(["no_such"]), "no_such"),
        (lambda: adapter.release_memory_occupation([]), "empty"),
        (lambda: adapter.release_memory_occupation(["weights", "weights"]), "twice"),
        (lambda: adapter.resume_memory_occupation(["weights"]), "weights"),
        (lambda: adapter.resume_memory_occupation(), "nothing"),
        (lambda: adapter.update_weight_version(cast(Any, "new")), "new"),
        (lambda: adapter.update_weights_from_tensor([]), "0 payloads"),
        (lambda: adapter.update_weights_from_tensor(["bm90IGEgcGlja2xl"]), "pickle|load_format"),
    ]
    for call, cause in refused:
        with pytest.raises(BadInputError, match=cause):
            call()
    assert adapter.is_ready()
