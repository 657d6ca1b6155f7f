"""Settings and arguments of constructors: a wrong value is refused before anything is started. Needs no server."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest

from verl_server import (
    AdapterConfig,
    AsyncHttpServerEngineAdapter,
    BadInputError,
    LocalLauncher,
    RemoteServer,
    RolloutManager,
    RouterClient,
    RouterConfig,
    Timeouts,
    VerlEngine,
    WeightsConfig,
)
from verl_server.adapter.sglang.requests import PromptLimits, generate_payload
from verl_server.adapter.sglang.tensor_parallel import require_divisible_model
from verl_server.config import TRANSPORTS
from verl_server.engine.start_backend import BackendSource
from verl_server.ranks.placement import compute_placement
from verl_server.rollout.parallel_config import ParallelConfig
from verl_server.weights import transports

ADAPTER = AsyncHttpServerEngineAdapter
WRONG: list[tuple[Any, tuple[Any, ...], dict[str, Any], str]] = [
    (WeightsConfig, (), {"transport": "share_memory"}, "got 'share_memory'; did you mean 'shared_memory'?"),
    (WeightsConfig, (), {"folder": 5}, "WeightsConfig.folder must be a path or a string or None, got 5 (int)"),
    (
        WeightsConfig,
        (),
        {"max_staging_bytes": 0},
        "max_staging_bytes must be a whole number of at least 1",
    ),
    (AdapterConfig, (30,), {}, "AdapterConfig.timeouts must be a Timeouts, got 30 (int)"),
    (AdapterConfig, (), {"max_retries": -1}, "AdapterConfig.max_retries must be a whole number of at least 0, got -1"),
    (AdapterConfig, (), {"use_forkserver": "no"}, "use_forkserver must be True or False, got 'no' (str)"),
    (Timeouts, (), {"control_s": "3"}, "Timeouts.control_s must be a positive number of seconds, got '3' (str)"),
    (Timeouts, (), {"start_s": float("inf")}, "Timeouts.start_s must be a positive number of seconds, got inf"),
    (RemoteServer, ("127.0.0.1:30000",), {}, "RemoteServer.base_url '127.0.0.1:30000' is not an HTTP URL"),
    (
        RemoteServer,
        ("http://a", b"secret"),
        {},
        "api_key must be a string or None, got a value of type bytes",
    ),
    (RouterClient, ("nowhere", None), {}, "url 'nowhere' is not an HTTP URL"),
    (RouterClient, ("http://a", b"secret"), {}, "api_key must be a string or None, got a value of type bytes"),
    (RouterClient, ("http://a", None, "1"), {}, "reconnect_timeout_s must be a number of seconds, got '1' (str)"),
    (ADAPTER.attach, ("a:1",), {}, "base_url 'a:1' is not an HTTP URL"),
    (ADAPTER, ("/m",), {"config": 30}, "config must be an AdapterConfig or None, got 30 (int)"),
    (ADAPTER, ("/m",), {"env": {"A": b"secret"}}, "env['A'] must be a string, got a value of type bytes"),
    (ADAPTER, (5,), {}, "model_path must be a string or a path, got 5 (int)"),
    (ADAPTER, ("/tmp",), {"max_total_tokens": -5}, "max_total_tokens must be a whole number of at least 1, got -5"),
    (ADAPTER, ("/tmp",), {"port": 70000}, "server argument port must be at most 65535, got 70000"),
    (ADAPTER, ("/tmp",), {"mem_fraction_static": 1.5}, "mem_fraction_static must be a number between 0 and 1, got 1.5"),
    (VerlEngine, (None,), {"model_path": "m"}, "device_mesh_cpu must be a DeviceMesh with one dimension"),
    (VerlEngine, (None,), {"weights": "buckets"}, "weights must be a WeightsConfig or None, got 'buckets' (str)"),
    (VerlEngine, (None,), {"timeouts": 30}, "timeouts must be a Timeouts or None, got 30 (int)"),
    (VerlEngine, (None,), {"nnodes": "2"}, "nnodes must be a whole number, got '2' (str)"),
    (VerlEngine, (None,), {"launch_server": "no"}, "launch_server must be True or False or None, got 'no' (str)"),
    (RolloutManager, ("2",), {}, "replicas must be a whole number, got '2' (str)"),
    (RolloutManager, (2,), {"mode": "hybird"}, "'colocated'], got 'hybird'; did you mean 'hybrid'?"),
    (
        RolloutManager,
        (2,),
        {"model_path": "m", "timeout": Timeouts()},
        "'timeout' is not meant for SGLang, check the",
    ),
    (RolloutManager, (2,), {"mode": 1}, "mode must be a RolloutMode or a string, got 1 (int)"),
    (RolloutManager, (2,), {"launcher": "ray"}, "launcher must be a Launcher or None, got 'ray' (str)"),
    (
        RolloutManager,
        (2,),
        {"recovery": RouterConfig()},
        "recovery must be a RecoveryConfig or None, got RouterC",
    ),
    (LocalLauncher().reserve, (ParallelConfig(nnodes=2), 1), {}, "nnodes=2, but LocalLauncher starts servers on this"),
    (
        compute_placement,
        (0, 3, 2, {}),
        {},
        "the 3 trainer ranks of device_mesh_cpu cannot be divided evenly",
    ),
    (compute_placement, (0, 2, 2, {"tp_size": 3}), {}, "tp_size=3 cannot be divided evenly among nnodes=2 nodes"),
    (RolloutManager, (2,), {"on_event": None}, "on_event must be a function, got None"),
]


@pytest.mark.parametrize(("make", "args", "kwargs", "message"), WRONG)
def test_wrong_values_are_refused_before_anything_starts(
    make: Any, args: tuple[Any, ...], kwargs: dict[str, Any], message: str
) -> None:
    """The error names the argument, the expected type, the value and its type. The values of keys are not shown."""
    with pytest.raises(BadInputError, match=re.escape(message)) as caught:
        make(*args, **kwargs)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("prompts", [{"prompt": ["a", "b"], "input_ids": None}, {"prompt": None, "input_ids": [[1]]}])
def test_a_stream_takes_one_prompt(prompts: Any) -> None:
    arguments: Any = {"sampling_params": None, "rid": None, "fields": {}}
    assert generate_payload(PromptLimits(), **prompts, **arguments, stream=False)
    with pytest.raises(BadInputError, match="a stream takes one prompt, got a list"):
        generate_payload(PromptLimits(), **prompts, **arguments, stream=True)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (BackendSource(None, ["http://a"], None), r"servers\[0\] must be a RemoteServer, got 'http://a' \(str\)"),  # type: ignore[list-item]
        (BackendSource(None, "http://a", None), r"servers must be a list of RemoteServer, got 'http://a' \(str\)"),  # type: ignore[arg-type]
        (BackendSource(None, (), "a fleet"), r"fleet must be a RolloutManager or None, got 'a fleet' \(str\)"),  # type: ignore[arg-type]
    ],
)
def test_wrong_servers_and_fleets(source: BackendSource, message: str) -> None:
    """The error is returned, so that all ranks can raise it."""
    error = source.validate()
    assert isinstance(error, BadInputError)
    assert re.search(message, error.message)
    assert BackendSource(None, [RemoteServer("http://a")], None).validate() is None


def test_every_transport_is_listed() -> None:
    modules = [
        importlib.import_module(f"{transports.__name__}.{item.name}")
        for item in pkgutil.iter_modules(transports.__path__)
    ]
    receivers = {module.__name__.rpartition(".")[2]: getattr(module, "Receiver", None) for module in modules}
    assert {name for name, receiver in receivers.items() if receiver and not inspect.isabstract(receiver)} == {
        *TRANSPORTS
    }


@pytest.fixture
def four_heads(tmp_path: Path) -> Path:
    """The `config.json` of a model with 4 attention heads and 2 KV heads."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 100}))
    return file


@pytest.mark.parametrize("start", [ADAPTER, functools.partial(RolloutManager, 1)], ids=["adapter", "fleet"])
def test_a_tp_size_that_the_model_cannot_have(start: Any, four_heads: Path) -> None:
    """It is refused from the model's `config.json`, before a process is started."""
    with pytest.raises(BadInputError, match=r"tp_size=3 cannot divide 4 attention heads.*; use tp_size=2\."):
        start(model_path=str(four_heads.parent), tp_size=3)


def test_models_and_arguments_for_which_the_number_of_ranks_is_not_checked(four_heads: Path) -> None:
    arguments = {"model_path": str(four_heads.parent), "tp_size": 8}
    with pytest.raises(BadInputError, match="tp_size=8 cannot divide 4 attention heads"):
        require_divisible_model(arguments)
    require_divisible_model({**arguments, "tp_size": 4})  # a GPU replicates KV heads
    require_divisible_model({**arguments, "enable_dp_attention": True})
    four_heads.write_text("{")
    require_divisible_model(arguments)
    four_heads.unlink()
    require_divisible_model(arguments)
