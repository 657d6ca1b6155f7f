"""Settings and arguments of constructors: a wrong value is refused before anything is started. Needs no server."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import json
import pkgutil
import re
import threading
from collections import UserDict, UserList
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import pytest
import torch

from verl_server import (
    AdapterConfig,
    AsyncHttpServerEngineAdapter,
    BadInputError,
    LocalLauncher,
    RecoveryConfig,
    RemoteServer,
    RolloutManager,
    RolloutMode,
    RouterClient,
    RouterConfig,
    Timeouts,
    UnsupportedError,
    VerlEngine,
    WeightsConfig,
)
from verl_server.adapter.client import tags_to_release
from verl_server.adapter.sglang.replies import error_from_reply
from verl_server.adapter.sglang.requests import (
    REQUEST_FIELDS,
    ROUTER_FIELDS,
    PromptLimits,
    SamplingParams,
    explain_refusal,
    generate_payload,
    require_known_fields,
    unlisted_fields,
)
from verl_server.adapter.sglang.server_arguments import WEIGHT_LOADER, validate_server_args
from verl_server.adapter.vllm import server_arguments as vllm_arguments
from verl_server.config import TRANSPORTS
from verl_server.engine.servers import connect_servers
from verl_server.engine.start import BackendSource
from verl_server.ranks.placement import compute_placement
from verl_server.rollout.fleet import restart_delay_s
from verl_server.rollout.modes import ParallelConfig, parse_mode
from verl_server.router.resumable_generation import ResumableGeneration
from verl_server.trajectory.recorder import Recorder, list_sessions, load_session, session_file
from verl_server.types import encode_json
from verl_server.validation import check_arguments, make_writable_folder
from verl_server.weights import transports
from verl_server.weights.update.options import UpdateOptions, validate_options

ADAPTER = AsyncHttpServerEngineAdapter
WRONG: list[tuple[Any, tuple[Any, ...], dict[str, Any], str]] = [
    (WeightsConfig, (), {"transport": "share_memory"}, "got 'share_memory'; did you mean 'shared_memory'?"),
    (
        WeightsConfig,
        (),
        {"folder": 5},
        "folder must be an instance of Path or must be a valid string, got 5 (int)",
    ),
    (
        WeightsConfig,
        (),
        {"max_staging_bytes": 0},
        "max_staging_bytes must be greater than or equal to 1, got 0",
    ),
    (AdapterConfig, (30,), {}, "AdapterConfig.timeouts must be an instance of Timeouts, got 30 (int)"),
    (AdapterConfig, (), {"max_retries": -1}, "AdapterConfig.max_retries must be greater than or equal to 0, got -1"),
    (AdapterConfig, (), {"use_forkserver": "no"}, "use_forkserver must be a valid boolean, got 'no' (str)"),
    (Timeouts, (), {"control_s": "3"}, "Timeouts.control_s must be a valid number, got '3' (str)"),
    (Timeouts, (), {"start_s": float("inf")}, "Timeouts.start_s must be a finite number, got inf"),
    (AdapterConfig, (), {"router_ip": "http://a", "router_port": 3}, "router_ip must be a host name or an IP address"),
    (AdapterConfig, (), {"router_ip": "", "router_port": 3}, "router_ip must be a host name or an IP address"),
    (
        AdapterConfig,
        (),
        {"router_ip": "a", "router_port": 99999},
        "router_port must be less than or equal to 65535",
    ),
    (WeightsConfig, ("disk",), {}, "weight transport 'disk' needs WeightsConfig(folder=...): a folder that trainer"),
    (
        RemoteServer,
        ("http://h:1/generate",),
        {},
        "'http://h:1/generate' must be the base URL of the server, without an endpoint or a query; write http://h:1",
    ),
    (
        RemoteServer,
        ("http://h:1?x=3",),
        {},
        "'http://h:1?x=3' must be the base URL of the server, without an endpoint or a query; write http://h:1",
    ),
    (ADAPTER.attach, ("http://h/a/v1/chat/completions/",), {}, "without an endpoint or a query; write http://h/a"),
    (ADAPTER.attach, ("http://h/a/v1/models?x=3#y",), {}, "without an endpoint or a query; write http://h/a"),
    (
        RemoteServer,
        ("http://u:pw@h:1/a",),
        {},
        "'http://h:1/a' has a user or a password before the host, which servers",
    ),
    (ADAPTER.attach, ("http://u:p@w@h:x",), {}, "'http://h:x' has a user or a password before the host"),
    (
        RolloutManager,
        (1,),
        {"model_path": "/tmp", "port": 30000},
        "each replica chooses a free port: leave port out, and",
    ),
    (
        RolloutManager,
        (1,),
        {"model_path": "/tmp", "preferred_sampling_params": {"max_new_tokens": 500}},
        "preferred_sampling_params is refused: the server adds these parameters to each request, but the router",
    ),
    (
        RolloutManager,
        (1,),
        {"model_path": "/tmp", "gpu_id_step": 2},
        "a fleet places its replicas itself: leave gpu_id_step=2 out. Choose GPUs with env={'CUDA_VISIBLE_DEVICES'",
    ),
    (
        RolloutManager,
        (1,),
        {"model": "secret", "tp_size": 1},
        "a model on a hub, but it is missing from the arguments: model, tp_size",
    ),
    (RolloutManager, (1,), {}, "a model on a hub, but it is missing from the arguments: (none)"),
    (RolloutManager, (1,), {"model_path": None}, "a model on a hub, got None"),
    (RolloutManager, (1,), {"model_path": "/tmp", "base_gpu_id": 4}, "leave base_gpu_id=4 out. Choose GPUs with"),
    (RemoteServer, ("http://h:1\n",), {}, r"'http://h:1\n' is not an HTTP URL"),
    (RouterClient, ("http://h:1/generate", None), {}, "url 'http://h:1/generate' must be the base URL of the"),
    (tags_to_release, (5, ()), {}, "tags must be a list of ['weights', 'kv_cache', 'cuda_graph'], got 5"),
    (validate_options, (UpdateOptions(None, "no", False, "retract", True), 0), {}, "verify must be True or False, got"),  # type: ignore[arg-type]
    (validate_options, (UpdateOptions(None, True, False, "retract", 1), 0), {}, "flush_cache must be True or False"),  # type: ignore[arg-type]
    (RemoteServer, ({"url": "secret"},), {}, "base_url must be a valid string, got a value of type dict"),
    (RemoteServer, (["secret"],), {}, "base_url must be a valid string, got a value of type list"),
    (RemoteServer, (("http://a", "secret"),), {}, "base_url must be a valid string, got a value of type tuple"),
    (AdapterConfig, (), {"timeouts": {"key": "secret"}}, "got a value of type dict"),
    (RemoteServer, ("127.0.0.1:30000",), {}, "RemoteServer.base_url '127.0.0.1:30000' is not an HTTP URL"),
    (
        RemoteServer,
        ("http://a", b"secret"),
        {},
        "api_key must be a valid string, got a value of type bytes",
    ),
    (RouterClient, ("nowhere", None), {}, "url 'nowhere' is not an HTTP URL"),
    (RouterClient, ("http://a", b"secret"), {}, "api_key must be a valid string, got a value of type bytes"),
    (RouterClient, ("http://a", None, "1"), {}, "reconnect_timeout_s must be a valid number, got '1' (str)"),
    (ADAPTER.attach, ("a:1",), {}, "base_url 'a:1' is not an HTTP URL"),
    (ADAPTER, ("/m",), {"config": 30}, "config must be an instance of AdapterConfig, got 30 (int)"),
    (ADAPTER, ("/m",), {"env": {"A": b"secret"}}, "env['A'] must be a valid string, got a value of type bytes"),
    (ADAPTER, (5,), {}, "model_path must be a valid string or must be an instance of PathLike, got 5 (int)"),
    (ADAPTER, ("/tmp",), {"nnodes": 2}, "nnodes=2 needs dist_init_addr (host:port of the first node, the same on"),
    (VerlEngine, ("cpu",), {"model_path": "m"}, "device_mesh_cpu must be a DeviceMesh with one dimension"),
    (VerlEngine, (None,), {"weights": "buckets"}, "weights must be an instance of WeightsConfig, got 'buckets' (str)"),
    (VerlEngine, (None,), {"timeouts": 30}, "timeouts must be an instance of Timeouts, got 30 (int)"),
    (VerlEngine, (None,), {"nnodes": "2"}, "nnodes must be a valid integer, got '2' (str)"),
    (VerlEngine, (None,), {"launch_server": "no"}, "launch_server must be a valid boolean, got 'no' (str)"),
    (RolloutManager, ("2",), {}, "replicas must be a valid integer, got '2' (str)"),
    (RolloutManager, (2,), {"mode": "hybird"}, "'colocated'], got 'hybird'; did you mean 'hybrid'?"),
    (
        RolloutManager,
        (2,),
        {"model_path": "m", "timeout": Timeouts()},
        "'timeout' is not meant for the server, check the",
    ),
    (
        RolloutManager,
        (2,),
        {"mode": 1},
        "must be an instance of RolloutMode or must be a valid string, got 1 (int)",
    ),
    (RolloutManager, (2,), {"launcher": "ray"}, "launcher must be an instance of Launcher, got 'ray' (str)"),
    (
        RolloutManager,
        (2,),
        {"launcher": Path},
        "must be an instance of Launcher, got <class 'pathlib.Path'> (type)",
    ),
    (RolloutManager, (2,), {"config": AdapterConfig}, "must be an instance of AdapterConfig, got <class"),
    (
        RolloutManager,
        (2,),
        {"recovery": RouterConfig()},
        "recovery must be an instance of RecoveryConfig, got RouterC",
    ),
    (
        LocalLauncher().reserve,
        (ParallelConfig(nnodes=2), 1, {}),
        {},
        "nnodes=2, but LocalLauncher starts servers on this",
    ),
    (
        compute_placement,
        (0, 3, 2, {}),
        {},
        "the 3 trainer ranks of device_mesh_cpu cannot be divided evenly",
    ),
    (compute_placement, (0, 2, 2, {"tp_size": 3}), {}, "tp_size=3 cannot be divided evenly among nnodes=2 nodes"),
    (RolloutManager, (2,), {"on_event": None}, "on_event must be callable, got None"),
    (
        WeightsConfig,
        ("nccl",),
        {},
        "got 'nccl'; NCCL is not a transport of its own: 'distributed_buckets' broadcasts with",
    ),
    (RecoveryConfig, (), {"max_restarts": -1}, "max_restarts must be greater than or equal to 0, got -1"),
    (RecoveryConfig, (), {"backoff_s": -1}, "backoff_s must be greater than or equal to 0, got -1"),
    (
        RecoveryConfig,
        (),
        {"stall_timeout_s": 3600, "hard_stall_timeout_s": 10},
        "RecoveryConfig.hard_stall_timeout_s must be at least stall_timeout_s (3600), got 10",
    ),
    (RecoveryConfig, (), {"stall_timeout_s": 3600}, "must be at least stall_timeout_s (3600), got 1800; pass both"),
    (
        RecoveryConfig,
        (),
        {"backoff_s": 100, "max_backoff_s": 1},
        "RecoveryConfig.max_backoff_s must be at least backoff_s (100), got 1",
    ),
    (RouterConfig, (), {"overload_factor": 0}, "overload_factor must be greater than 0, got 0"),
    (
        ADAPTER,
        ("/tmp",),
        {"dtype": float},
        "'dtype' must be a plain JSON value to travel to the server process, got type",
    ),
    (ADAPTER, ("/tmp",), {"tp_size": 0}, "tp_size must be greater than or equal to 1, got 0"),
    (ADAPTER, ("/tmp",), {"dp_size": "two"}, "dp_size must be a valid integer, got 'two'"),
    (RolloutManager, (1,), {"model_path": "/tmp", "tp_size": 0}, "tp_size must be greater than or equal to 1, got 0"),
    (RolloutManager, (1,), {"model_path": "/tmp", "pp_size": True}, "pp_size must be a valid integer, got True"),
    (RolloutManager, (1,), {"model_path": "/tmp", "ep_size": "x"}, "ep_size must be a valid integer, got 'x'"),
    (ADAPTER, ("/tmp",), {"gpu_id_step": 0}, "gpu_id_step must be greater than or equal to 1, got 0"),
    (ADAPTER, ("/tmp",), {"port": True}, "port must be a valid integer, got True"),
    (ADAPTER, ("/tmp",), {"enable_memory_saver": "no"}, "enable_memory_saver must be a valid boolean, got 'no'"),
]


@pytest.mark.parametrize(("make", "args", "kwargs", "message"), WRONG)
def test_wrong_values_are_refused_before_anything_starts(
    make: Any, args: tuple[Any, ...], kwargs: dict[str, Any], message: str
) -> None:
    """The error names the argument, the expected type, the value and its type. The values of keys are not shown."""
    with pytest.raises(BadInputError, match=re.escape(message)) as caught:
        make(*args, **kwargs)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "server_args",
    [{"disaggregation_mode": "prefill"}, {"encoder_only": True}, {"smg_grpc_mode": True}, {"grpc_mode": True}],
)
def test_servers_that_do_not_generate_by_themselves_are_refused(server_args: dict[str, Any]) -> None:
    ((name, value),) = server_args.items()
    for start in (ADAPTER, functools.partial(RolloutManager, 1, mode="colocated")):
        with pytest.raises(UnsupportedError, match=f"{name}={value!r} starts a server that does not") as caught:
            start(model_path="/tmp", **server_args)
        assert caught.value.details == {"argument": name}
    default = {"model_path": "/tmp", name: "null" if isinstance(value, str) else False}
    assert validate_server_args(default) == default


def test_local_paths_are_absolute_because_the_server_has_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for folder in ("models/policy", "adapter", "chatml"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "chat.jinja").touch()
    for path in ("models/policy", "./models/policy", "~/models/policy"):
        files = {"chat_template": "chat.jinja", "crash_dump_folder": "dumps"}
        given = {"model_path": path, "tokenizer_path": path, **files}
        assert validate_server_args(given) == {
            "model_path": f"{tmp_path}/models/policy", "tokenizer_path": f"{tmp_path}/models/policy",
            "chat_template": f"{tmp_path}/chat.jinja", "crash_dump_folder": f"{tmp_path}/dumps",
        }  # fmt: skip
    names = {"model_path": "Org/Model", "speculative_draft_model_path": "Org/Draft", "chat_template": "chatml"}
    assert validate_server_args(names) == names
    named = {"lora_name": "a", "lora_path": f"{tmp_path}/adapter"}
    for given_loras, expected in (
        ({"a": "adapter"}, [named]),
        (["adapter", "a=~/adapter", "org/c"], [
            {**named, "lora_name": "adapter"}, named, {"lora_name": "org/c", "lora_path": "org/c"}
        ]),
        ("a=adapter", [named]),
        ('{"lora_name": "a", "lora_path": "adapter"}', [named]),
        ([{"lora_name": "a", "lora_path": "adapter", "pinned": True}], [{**named, "pinned": True}]),
    ):  # fmt: skip
        assert validate_server_args({"model_path": "Org/Model", "lora_paths": given_loras})["lora_paths"] == expected


def test_numbers_that_this_library_computes_with_may_be_texts() -> None:
    """As on SGLang's command line."""
    args = validate_server_args({"model_path": "Org/Model", "tp_size": "+2", "port": "030000", "context_length": "1k"})
    assert args == {"model_path": "Org/Model", "tp_size": 2, "port": 30000, "context_length": "1k"}


def test_numbers_paths_and_types_of_other_libraries_are_accepted() -> None:
    """They are converted, because they travel as JSON."""
    two: Any = np.int64(2)
    three: Any = np.float32(3)
    timeouts = Timeouts(start_s=two, control_s=three)
    assert (timeouts, type(timeouts.start_s), type(timeouts.control_s)) == (Timeouts(2, control_s=3), int, float)
    assert compute_placement(0, 4, two, {"tp_size": two}) == compute_placement(0, 4, 2, {"tp_size": 2})
    folder = Path(__file__).parents[1]
    given = {
        "model_path": folder, "tokenizer_path": folder, "lora_paths": {"a": folder}, "dtype": torch.bfloat16,
        "mem_fraction_static": np.float32(0.5), "tp_size": two, "json": MappingProxyType({"sizes": (1, 2)}),
    }  # fmt: skip
    assert json.loads(json.dumps(validate_server_args(given))) == {
        "model_path": str(folder), "tokenizer_path": str(folder),
        "lora_paths": [{"lora_name": "a", "lora_path": str(folder)}],
        "dtype": "bfloat16", "mem_fraction_static": 0.5, "tp_size": 2, "json": {"sizes": [1, 2]},
    }  # fmt: skip

    @check_arguments()
    def construct(nnodes: int, **server_args: Any) -> Any:
        return nnodes, server_args

    nnodes, server_args = construct(two, **given)
    assert (type(nnodes), server_args["dtype"]) == (int, "bfloat16")


@pytest.mark.parametrize(
    "wrong", [True, np.True_, torch.tensor(1.5), torch.tensor(True), np.array(1.5), Decimal("1.5")]
)
def test_a_number_of_seconds_is_a_number(wrong: Any) -> None:
    """Not what Python can convert to one: it would stay a tensor, or become True."""
    with pytest.raises(BadInputError, match=r"Timeouts.start_s must be a valid number, got .* \("):
        Timeouts(start_s=wrong)
    assert AdapterConfig(use_forkserver=np.False_).use_forkserver is False  # type: ignore[arg-type]


def test_defaults_and_zeros_may_be_given() -> None:
    assert compute_placement(0, 4, 2, {"tp_size": None}).tp_size == 4
    assert parse_mode(None) is RolloutMode.HYBRID
    assert RecoveryConfig(max_restarts=0, backoff_s=0.0, max_backoff_s=0).max_restarts == 0
    assert restart_delay_s([1.0], 1.0, RecoveryConfig(max_restarts=0)) is None


def test_folders_in_the_home_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    for folder in ("~/x", Path("~/x")):
        assert AdapterConfig(log_dir=folder).log_dir == Path("/home/someone/x")
        assert WeightsConfig("disk", folder).folder == Path("/home/someone/x")
        assert session_file(folder, "s") == Path("/home/someone/x/s.jsonl")


def test_created_folders_in_the_home_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No folder with the name `~` is made."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert make_writable_folder("output", "~/x") == tmp_path / "home" / "x"
    with Recorder("~/x", "s") as recorder:
        recorder.add_node(None, [1], sampled=False)
    (path,) = list_sessions("~/x")
    assert path == tmp_path / "home" / "x" / "s.jsonl"
    assert load_session("~/x/s.jsonl") == recorder.graph
    assert [folder.name for folder in tmp_path.iterdir()] == ["home"]


def test_the_url_of_an_openai_client_is_accepted() -> None:
    for url in ("http://a:1/v1", "http://a:1/v1/", "http://a:1/"):
        assert RemoteServer(url).base_url == ADAPTER.attach(url).base_url == "http://a:1"


def test_the_path_prefix_of_a_reverse_proxy_is_kept() -> None:
    for url in ("http://a/x/server-1", "http://a/x/server-1/", "http://a/x/server-1/v1"):
        assert RemoteServer(url).base_url == ADAPTER.attach(url).base_url == "http://a/x/server-1"


def _sampling_params(params: Any) -> Any:
    """The parameters in the body of a request, as the server receives them."""
    prompt = ["a"] if isinstance(params, list) else "a"
    body = generate_payload(PromptLimits(), {"prompt": prompt, "sampling_params": params})
    return json.loads(encode_json(body))["sampling_params"]


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({"stop_token_ids": [5, None]}, {"stop_token_ids": [5]}),
        ({"stop_token_ids": {7, np.int64(5)}}, {"stop_token_ids": [5, 7]}),
        (
            {"logit_bias": {42: 5.0, np.int64(3): np.float32(1), "4": -1}},
            {"logit_bias": {"42": 5.0, "3": 1.0, "4": -1}},
        ),
        (MappingProxyType({"temperature": np.float32(0.5)}), {"temperature": 0.5}),
        (UserDict({"n": np.int64(2), "temperature": None}), {"n": 2, "temperature": None}),
        ({"custom_params": UserDict({"a": (1, 2)})}, {"custom_params": {"a": [1, 2]}}),
        (
            {"stop": UserList(["a"]), "stop_token_ids": UserList([5]), "ignore_eos": np.True_},
            {"stop": ["a"], "stop_token_ids": [5], "ignore_eos": True},
        ),
    ],
)
def test_sampling_params_are_converted(given: Any, sent: Any) -> None:
    assert _sampling_params(given) == sent
    assert _sampling_params([given]) == [sent]
    attempt = ResumableGeneration({"sampling_params": UserDict({**given, "n": 1})}).begin_attempt()
    assert attempt["sampling_params"] == {**sent, "n": 1}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"top_k": 2**31}, "['top_k'] must be less than 2147483648, got 2147483648"),
        ({"stop_token_ids": [-1]}, "['stop_token_ids'] must be greater than or equal to 0, got [-1]"),
        ({"stop_regex": ["a", "("]}, "be a regular expression of Python (missing )"),
        ({"stop_token_ids": "5"}, "['stop_token_ids'] must be a valid list, got '5'"),
        ({"logit_bias": {42: float("-inf")}}, "['logit_bias'] must be a finite number, got {42: -inf}"),
        ({"logit_bias": {"4": "high"}}, "['logit_bias'] must be a valid number"),
        ({"stop_token_ids": torch.tensor([5])}, "must be a valid list, got tensor([5]); convert it with .tolist()"),
        ({"return_logprob": True}, "'return_logprob' is no sampling parameter but an argument of generate"),
        ({"rid": "a"}, "'rid' is no sampling parameter but an argument of generate: pass it as generate(..., rid=...)"),
        ({"weight_version": 1}, "'weight_version' is no sampling parameter but an argument of generate"),
    ],
)
def test_sampling_params_that_no_server_accepts(params: Any, message: str) -> None:
    with pytest.raises(BadInputError, match=re.escape(message)):
        _sampling_params(params)


def _body(limits: PromptLimits, request: dict[str, Any]) -> dict[str, Any]:
    """The body of a request, as the server receives it."""
    body: dict[str, Any] = json.loads(encode_json(generate_payload(limits, request)))
    return body


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({"input_ids": UserList([1, 2])}, {"input_ids": [1, 2]}),
        ({"input_ids": UserList([(1,), UserList([2])])}, {"input_ids": [[1], [2]]}),
        ({"prompt": UserList(["a"])}, {"text": ["a"]}),
        ({"prompt": "a", "return_logprob": np.True_}, {"text": "a", "return_logprob": True}),
        (
            {"prompt": ("a", "b"), "sampling_params": UserList([{}, None]), "return_logprob": [True, None]},
            {"text": ["a", "b"], "sampling_params": [{}, {}], "return_logprob": [True, False]},
        ),
        (
            {"prompt": ["a", "b"], "token_ids_logprob": [[3], None]},
            {"text": ["a", "b"], "token_ids_logprob": [[3], []]},
        ),
        ({"prompt": ["a", "b"], "token_ids_logprob": (3, 4)}, {"text": ["a", "b"], "token_ids_logprob": [3, 4]}),
        ({"prompt": "a", "image_data": ["x", "y"]}, {"text": "a", "image_data": ["x", "y"]}),
        (
            {"prompt": ["a", "b"], "image_data": [None, "x"], "modalities": ["image"], "video_data": []},
            {"text": ["a", "b"], "image_data": [[], ["x"]]},
        ),
        ({"prompt": ["a", "b"], "extra_key": [None, "x"]}, {"text": ["a", "b"], "extra_key": ["", "x"]}),
    ],
)
def test_requests_are_converted(given: dict[str, Any], sent: dict[str, Any]) -> None:
    assert _body(PromptLimits(), given) == sent


#: Values that end the scheduler of SGLang 0.5.23, and lists whose length it does not check.
ENDS_A_SERVER: list[tuple[dict[str, Any], str]] = [
    ({"logprob_start_len": -5}, "logprob_start_len must be greater than or equal to -1"),
    ({"top_logprobs_num": -1}, "top_logprobs_num must be greater than or equal to 0"),
    ({"top_logprobs_num": 321}, "top_logprobs_num is 321, but the model's vocabulary has 320 token ids"),
    ({"sampling_params": {"stop_token_ids": [320]}}, "token id 320, but the model's vocabulary ends at 319"),
    ({"custom_logit_processor": "abc"}, "custom_logit_processor must be the text that SGLang's"),
    ({"custom_logit_processor": "{}"}, "custom_logit_processor must be the text that SGLang's"),
    ({"custom_logit_processor": '{"callable": "00"}'}, "custom_logit_processor must be the text that SGLang's"),
    ({"logprob_start_len": [0]}, "logprob_start_len is a list with one value for each prompt, but the request has one"),
    ({"return_hidden_states": [True]}, "return_hidden_states is a list with one value for each prompt"),
    ({"token_ids_logprob": [[1]]}, "token_ids_logprob is a list with one value for each prompt"),
    ({"sampling_params": [{}]}, "sampling_params is a list with one value for each prompt, but the request has one"),
    ({"rid": ["a"]}, "rid is a list with one value for each prompt"),
    ({"prompt": ["a", "b"], "return_logprob": [True, False, True]}, "3 return_logprob for 2 prompts"),
    ({"prompt": ["a", "b"], "token_ids_logprob": [[1]]}, "1 token_ids_logprob for 2 prompts"),
    ({"prompt": ["a", "b"], "image_data": ["x"]}, "1 image_data for 2 prompts"),
    ({"prompt": ["a", "b"], "logprob_start_len": [0, -2]}, "be greater than or equal to -1"),
    ({"prompt": []}, "prompt is empty"),
]


@pytest.mark.parametrize(("given", "message"), ENDS_A_SERVER, ids=[repr(given)[:60] for given, _ in ENDS_A_SERVER])
def test_requests_that_end_a_server_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInputError, match=re.escape(message)):
        _body(PromptLimits(vocab_size=320), {"prompt": "a", **given})


@pytest.mark.parametrize(
    "name",
    [
        "lora_id", "multi_item_delimiter_indices", "positional_embed_overrides", "session_params",
        "token_indices_to_pool",
    ],
)  # fmt: skip
def test_fields_that_end_a_server_or_use_earlier_weights_are_no_arguments(name: str) -> None:
    assert unlisted_fields({name: "x"}) == [name]
    with pytest.raises(BadInputError, match=f"there is no argument '{name}'"):
        require_known_fields([name], {name})


def test_names_of_sampling_parameters_are_no_names_of_arguments() -> None:
    assert not SamplingParams.__annotations__.keys() & {*REQUEST_FIELDS, *ROUTER_FIELDS}


def test_a_field_that_has_one_value_for_all_prompts_of_a_request() -> None:
    """A router takes a session id for each prompt, a server one for the whole request."""
    with pytest.raises(BadInputError, match=r"session_id must be a valid string, got \['s', 't'\]"):
        _body(PromptLimits(), {"prompt": ["a", "b"], "session_id": ["s", "t"]})


@pytest.mark.parametrize("request_", [{"prompt": ["a", "b"]}, {"input_ids": [[1]]}])
def test_a_stream_takes_one_prompt(request_: Any) -> None:
    assert generate_payload(PromptLimits(), request_)
    with pytest.raises(BadInputError, match="a stream takes one prompt, got a list"):
        generate_payload(PromptLimits(), request_, stream=True)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (BackendSource(None, cast(Any, ["http://a"]), None), r"servers\[0\] must be an instance of RemoteServer, got"),
        (
            BackendSource(None, cast(Any, "http://a"), None),
            r"servers .* not allowed as a Sequence value, got 'http://a'",
        ),
        (BackendSource(None, (), cast(Any, "a fleet")), r"fleet must be an instance of RolloutFleet, got 'a fleet'"),
    ],
)
def test_wrong_servers_and_fleets(source: BackendSource, message: str) -> None:
    """The error is returned, so that all ranks can raise it."""
    error = source.validate()
    assert isinstance(error, BadInputError)
    assert re.search(message, error.message)
    servers = BackendSource(None, [RemoteServer("http://a")], None)
    assert servers.validate() is None
    assert re.match(r"nnodes=2 is for a server that VerlEngine starts; use nnodes=1", str(servers.validate(nnodes=2)))
    assert BackendSource(None, (), None).validate(nnodes=2) is None


class ServerOnTwoNodes(BaseHTTPRequestHandler):
    """Answers each request with the description of a server that spans two nodes."""

    def do_GET(self) -> None:
        body = json.dumps({"custom_weight_loader": [WEIGHT_LOADER], "tp_size": 16, "nnodes": 2}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """No log."""


def test_a_server_on_several_nodes_needs_an_address_that_they_reach() -> None:
    """The weights would stay in the shared memory of the first node."""
    with ThreadingHTTPServer(("127.0.0.1", 0), ServerOnTwoNodes) as http_server:
        threading.Thread(target=http_server.serve_forever).start()
        try:
            with pytest.raises(BadInputError, match="spans several nodes: pass the URL with an address that the other"):
                connect_servers([RemoteServer(f"http://127.0.0.1:{http_server.server_port}")], AdapterConfig(), 0)
        finally:
            http_server.shutdown()


def test_every_transport_is_listed() -> None:
    modules = [
        importlib.import_module(f"{transports.__name__}.{item.name}")
        for item in pkgutil.iter_modules(transports.__path__)
    ]
    receivers = {module.__name__.rpartition(".")[2]: getattr(module, "Receiver", None) for module in modules}
    assert {name for name, receiver in receivers.items() if receiver and not inspect.isabstract(receiver)} == {
        *TRANSPORTS
    }


@pytest.mark.parametrize("start", [ADAPTER, functools.partial(RolloutManager, 1)], ids=["adapter", "fleet"])
def test_a_tp_size_that_the_model_cannot_have(start: Any, tmp_path: Path) -> None:
    """It is refused from the model's `config.json`, before a process is started."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 100}))
    arguments = {"model_path": str(tmp_path), "tp_size": 3}
    with pytest.raises(BadInputError, match=r"tp_size=3 cannot divide the 4 attention heads.*; use one of 1, 2, 4\."):
        start(**arguments)
    for engine in (validate_server_args, vllm_arguments.validate_server_args):
        with pytest.raises(BadInputError, match="tp_size=8 cannot divide the 4 attention heads"):
            engine({**arguments, "tp_size": 8})
        engine({**arguments, "tp_size": 4})  # a GPU replicates KV heads
    validate_server_args({**arguments, "enable_dp_attention": True})
    config.write_text("{")
    validate_server_args(arguments)


@pytest.mark.parametrize(
    ("status", "text"), [(400, "Unexpected keyword argument 'temprature'"), (500, "Internal Server Error")]
)
def test_a_misspelled_parameter_is_no_failure_of_the_server(status: int, text: str) -> None:
    """SGLang 0.5.15 answers 500, which would count against the replica."""
    error = explain_refusal(error_from_reply(status, "http://a/generate", text), {"temprature": 1.0, "top_p": 1.0})
    assert isinstance(error, BadInputError)
    assert "no sampling parameter 'temprature'; did you mean 'temperature'?" in error.message


def test_a_failure_of_the_server_stays_one() -> None:
    error = error_from_reply(500, "http://a/generate", "Internal Server Error")
    assert explain_refusal(error, {"temperature": 1.0, "a_parameter_of_the_future": 1}) is error
