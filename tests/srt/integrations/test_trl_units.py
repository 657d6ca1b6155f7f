"""TRL's integration without TRL and without servers."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from model_families import make_family_model, save_family_model

from verl_server import (
    AdapterConfig,
    BadInputError,
    DeadlineError,
    LocalLauncher,
    ShutDownError,
    Timeouts,
    UnsupportedError,
)
from verl_server.errors import NotReadyError, ServerError, VerlServerError
from verl_server.integrations.trl import (
    FleetRolloutFunc,
    FleetRolloutWorker,
    FleetWeightTransfer,
    RolloutServers,
    async_grpo,
    grpo,
    servers,
    start_servers,
    weights,
)
from verl_server.integrations.trl.async_grpo import RewardFunctions
from verl_server.integrations.trl.grpo import fit_into_context, parse_completion, trainer_params
from verl_server.integrations.trl.servers import require_one_gpu
from verl_server.integrations.trl.weights import named_weights
from verl_server.types import TensorSpec
from verl_server.weights.manifest import read_manifest

MAX_TOKENS = 10


def _reward_of_nothing() -> list[float]:
    return []


@pytest.fixture(autouse=True)
def trl_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The version check passes, and TRL's class of a sample takes any fields."""
    for module in (async_grpo, grpo, servers, weights):
        monkeypatch.setattr(module, "require_trl", lambda: None)
    module = ModuleType("async_rollout_worker")
    module.RolloutSample = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trl.experimental.async_grpo.async_rollout_worker", module)


# -- start of the servers ------------------------------------------------------------------------------


class Recorder:
    """Takes the place of a manager or an engine, and keeps its arguments."""

    adapter = None

    def __init__(self) -> None:
        self.arguments: dict[str, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Recorder:
        self.arguments = kwargs
        return self

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> tuple[Recorder, Recorder]:
    """The manager and the engine that `start_servers` makes."""
    manager, engine = Recorder(), Recorder()
    mesh = SimpleNamespace(get_local_rank=lambda: 0, size=lambda: 1)
    monkeypatch.setattr(servers, "trainer_mesh", lambda: contextlib.nullcontext(mesh))
    monkeypatch.setattr(servers, "RolloutManager", manager)
    monkeypatch.setattr(servers, "VerlEngine", engine)
    return manager, engine


def test_the_arguments_of_the_fleet_do_not_go_to_the_engine(started: tuple[Recorder, Recorder]) -> None:
    manager, engine = started
    events: list[Any] = []
    of_fleet: dict[str, Any] = {
        "mode": "standalone",
        "launcher": LocalLauncher(),
        "router_process": True,
        "on_event": events.append,
        "env": {"CUDA_VISIBLE_DEVICES": "1"},
    }
    with start_servers("model", 2, context_length=64, **of_fleet):
        pass
    assert {name: manager.arguments[name] for name in of_fleet} == of_fleet
    assert not of_fleet.keys() & engine.arguments.keys()
    assert engine.arguments["fleet"] is manager
    assert manager.arguments["context_length"] == engine.arguments["context_length"] == 64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "colocated"}, "mode='colocated' takes no weights"),
        ({"replicas": 0}, "replicas must be greater than or equal to 1, got 0"),
        ({"weights": "disk"}, "weights must be an instance of WeightsConfig"),
        ({"base_gpu_id": 1}, "leave base_gpu_id=1 out"),
    ],
)
def test_arguments_are_refused_on_every_rank_before_a_server_starts(
    started: tuple[Recorder, Recorder], arguments: dict[str, Any], message: str
) -> None:
    """The fleet of rank 0 is a fake here, so that this is what another rank does."""
    with pytest.raises(BadInputError, match=message), start_servers("model", **arguments):
        pass
    assert not started[0].arguments


@pytest.mark.parametrize(("given", "expected"), [(Timeouts(), 1800.0), (Timeouts(ranks_s=20.0), 20.0)])
def test_ranks_wait_as_long_as_trl(started: tuple[Recorder, Recorder], given: Timeouts, expected: float) -> None:
    with start_servers("model", config=AdapterConfig(given)):
        pass
    assert started[1].arguments["timeouts"].ranks_s == expected


# -- what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["temperature", "n", "max_new_tokens", "sampling_seed"])
def test_sampling_params_cannot_replace_those_of_the_trainer(name: str) -> None:
    with pytest.raises(BadInputError, match=f"sampling_params must not have {name}: "):
        trainer_params(GRPOConfig(), [1], {name: 1})
    with pytest.raises(BadInputError, match=f"sampling_params must not have {name}: "):
        _worker(FakeRouter(), sampling_params={name: 1})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sampling_params": ["x"]}, "sampling_params must be a valid dictionary, got a value of type list"),
        ({"sampling_params": "top_k=3"}, "sampling_params must be a valid dictionary, got 'top_k=3'"),
        ({"seed": "3"}, "seed must be a valid integer, got '3'"),
    ],
)
def test_arguments_of_the_generation(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        FleetRolloutFunc(_servers(FakeRouter()), **arguments)
    with pytest.raises(BadInputError, match=message):
        FleetRolloutWorker(_servers(FakeRouter()), **(_worker_arguments() | arguments))


def test_the_class_is_no_rollout_func() -> None:
    """TRL calls a `rollout_func` with the prompts and the trainer."""
    make: Any = FleetRolloutFunc
    with pytest.raises(TypeError, match="too many positional arguments"):
        make(["a prompt"], SimpleNamespace())


class GRPOConfig:
    """The arguments of TRL's other trainer."""

    n_gpu = 1


class AsyncGRPOConfig(GRPOConfig):
    """TRL's default."""

    token_budget = None


class RewardModel:
    """A model of transformers: it is callable."""

    def __call__(self, **_: Any) -> None:
        pass

    def from_pretrained(self) -> None:
        pass


FUNCTIONS = "reward_funcs must be a function or a list of functions.* For a reward model"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reward_funcs": "org/rm"}, FUNCTIONS),
        ({"reward_funcs": RewardModel()}, FUNCTIONS),
        ({"reward_funcs": []}, FUNCTIONS),
        ({"args": AsyncGRPOConfig()}, "without a token_budget"),
        ({"start_index": "3"}, "start_index must be a valid integer, got '3'"),
        ({"start_index": -1}, "start_index must be greater than or equal to 0, got -1"),
    ],
)
def test_arguments_of_the_worker(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        FleetRolloutWorker(_servers(FakeRouter()), **(_worker_arguments() | arguments))


def test_one_trainer_process_on_several_gpus() -> None:
    require_one_gpu(SimpleNamespace(n_gpu=1))
    with pytest.raises(UnsupportedError, match="one trainer process sees 2 GPUs"):
        _worker(FakeRouter(), n_gpu=2)


def test_replies_without_tokens() -> None:
    meta = {"output_token_logprobs": [], "weight_version": 1, "finish_reason": {"type": "abort"}}
    with pytest.raises(ServerError, match=r"a completion without tokens .*abort"):
        parse_completion({"output_ids": [], "meta_info": meta})


# -- the room in the context ---------------------------------------------------------------------------


def test_a_completion_gets_the_room_that_the_prompt_leaves() -> None:
    params = {"max_new_tokens": 8, "temperature": 1.0}
    assert fit_into_context(params, 7, None) == params
    assert fit_into_context(params, 2, MAX_TOKENS) == params
    assert fit_into_context(params, 7, MAX_TOKENS) == {"max_new_tokens": 3, "temperature": 1.0}
    with pytest.raises(BadInputError, match=r"a prompt has 10 tokens.* and the servers take 10 tokens"):
        fit_into_context(params, 10, MAX_TOKENS)


def test_the_worker_asks_a_server_for_the_context() -> None:
    router = FakeRouter()
    with running(_worker(router, rows=[{"prompt": "1234567"}])) as worker:
        sample = worker.rollout_buffer.get(timeout=30.0)
    assert sample.input_ids.tolist() == [49, 50, 51, 52, 53, 54, 55, 65]
    assert router.params[0]["max_new_tokens"] == 3


def test_a_sample_is_as_old_as_its_oldest_token() -> None:
    """In TRL's count: the engine has pushed before."""

    class UpdatedRouter(FakeRouter):
        async def generate(self, **request: Any) -> dict[str, Any]:
            reply = await super().generate(**request)
            spans = [{"version": 7, "start": 0, "end": 3}, {"version": 9, "start": 3, "end": 4}]
            return {**reply, "meta_info": {**reply["meta_info"], "weight_versions": spans}}

    worker = _worker(UpdatedRouter())
    worker._engine.weight_version = 7  # type: ignore[misc]
    worker.update_model_version(1)
    with running(worker):
        sample = worker.rollout_buffer.get(timeout=30.0)
    assert sample.model_version == sample.metrics["policy_version/oldest_token"] == 1
    assert sample.metrics["policy_version/newest_token"] == 3


# -- the worker ----------------------------------------------------------------------------------------


class FakeRouter:
    """Answers each request with the token 65."""

    def __init__(self) -> None:
        self.params: list[dict[str, Any]] = []

    async def generate(self, *, sampling_params: dict[str, Any], **_: Any) -> dict[str, Any]:
        self.params.append(sampling_params)
        return {"output_ids": [65], "meta_info": {"output_token_logprobs": [[-1.0, 65, None]], "weight_version": 1}}


class FakeTokenizer:
    """A token for each byte."""

    eos_token_id, pad_token_id = 1, 0

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def decode(self, token_ids: list[int], **_: Any) -> str:
        return bytes(token_ids).decode()


def _servers(router: FakeRouter) -> RolloutServers:
    adapter = SimpleNamespace(get_server_info=lambda: {"max_req_input_len": MAX_TOKENS})
    engine: Any = SimpleNamespace(adapter=adapter, weight_version=1)
    fleet: Any = SimpleNamespace(router=router)
    mesh: Any = SimpleNamespace(size=lambda: 1)
    return RolloutServers(engine, fleet, mesh)


def _reward(completions: list[str], **_: Any) -> list[float]:
    return [1.0] * len(completions)


def _worker_arguments(**settings: Any) -> dict[str, Any]:
    """Arguments of a worker. `settings`: changes of the trainer's arguments."""
    of_trainer = {
        "n_gpu": 1, "token_budget": 0, "queue_maxsize": 4, "num_generations": 2, "max_inflight_tasks": 2,
        "request_timeout": 60, "max_completion_length": 8, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None,
        "repetition_penalty": 1.0, "chat_template_kwargs": None, **settings,
    }  # fmt: skip
    return {
        "args": SimpleNamespace(**of_trainer),
        "train_dataset": [{"prompt": "1"}],
        "reward_funcs": _reward,
        "processing_class": FakeTokenizer(),
    }


def _worker(
    router: FakeRouter,
    *,
    rows: list[dict[str, Any]] | None = None,
    reward: Callable[..., Any] = _reward,
    sampling_params: dict[str, Any] | None = None,
    **more: Any,
) -> FleetRolloutWorker:
    arguments = _worker_arguments(**more) | {"reward_funcs": reward, "sampling_params": sampling_params}
    if rows is not None:
        arguments["train_dataset"] = rows
    return FleetRolloutWorker(_servers(router), **arguments)


@contextlib.contextmanager
def running(worker: FleetRolloutWorker) -> Iterator[FleetRolloutWorker]:
    worker.start()
    try:
        yield worker
    finally:
        worker.stop()


def _health_error(worker: FleetRolloutWorker, stale_after_s: float = 30.0) -> VerlServerError:
    """The error that `check_health` raises in the next seconds."""
    deadline = time.monotonic() + 30.0
    while time.monotonic() < deadline:
        try:
            worker.check_health(stale_after_s)
        except VerlServerError as error:
            return error
        time.sleep(0.02)
    raise AssertionError("the worker is healthy")


class RestartedRouter(FakeRouter):
    """Is not ready at first, and then answers."""

    def __init__(self, error: VerlServerError) -> None:
        super().__init__()
        self.error, self.timeouts_s = error, list[float]()

    async def generate(self, *, sampling_params: dict[str, Any], **more: Any) -> dict[str, Any]:
        self.timeouts_s.append(more["timeout_s"])
        if len(self.timeouts_s) <= 2:
            raise self.error
        return await super().generate(sampling_params=sampling_params)


def test_training_goes_on_after_servers_that_were_not_ready() -> None:
    router = RestartedRouter(NotReadyError("no replica serves requests at the moment"))
    with running(_worker(router)) as worker:
        worker.rollout_buffer.get(timeout=30.0)
        worker.check_health(30.0)
    assert min(router.timeouts_s) < 60.0 - async_grpo.REPEAT_S / 2 < max(router.timeouts_s) <= 60.0


@pytest.mark.parametrize(
    ("error", "settings"),
    [
        (NotReadyError("no replica serves requests at the moment"), {"request_timeout": 0.5}),
        (ServerError("the server has no such adapter"), {}),
    ],
    ids=["no time left", "final error"],
)
def test_errors_that_end_the_training(error: VerlServerError, settings: dict[str, Any]) -> None:
    with running(_worker(RestartedRouter(error), **settings)) as worker:
        assert _health_error(worker) is error


def test_completions_are_not_cut_off_by_pushes() -> None:
    with pytest.raises(
        BadInputError, match=r"pause_mode must be one of \['retract', 'in_place', 'wait'\], got 'abort'"
    ):
        FleetWeightTransfer(_servers(FakeRouter()), pause_mode="abort")


def test_a_stopped_worker_is_not_healthy() -> None:
    """A second `train()` would otherwise wait for samples without end."""
    with running(_worker(FakeRouter())) as worker:
        worker.rollout_buffer.get(timeout=30.0)
        worker.check_health(30.0)
    with pytest.raises(ShutDownError, match="this FleetRolloutWorker was stopped: make a new trainer and worker"):
        worker.check_health(30.0)
    with pytest.raises(ShutDownError):
        worker.start()


def test_a_thread_that_has_ended_is_not_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FleetRolloutWorker, "_run", lambda self: None)
    with running(_worker(FakeRouter())) as worker:
        assert "has ended without an error" in str(_health_error(worker))


def test_a_reward_function_that_never_returns_is_named() -> None:
    returns = threading.Event()

    def judge(completions: list[str], **_: Any) -> list[float]:
        assert threading.current_thread().daemon, "it does not hold up the end of the process"
        returns.wait()
        return [0.0] * len(completions)

    with running(_worker(FakeRouter(), reward=judge)) as worker:
        error = _health_error(worker, stale_after_s=1.0)
    returns.set()
    assert isinstance(error, DeadlineError)
    assert error.message.startswith("reward function judge has not returned for 1 s"), error


def test_a_row_without_a_prompt() -> None:
    with running(_worker(FakeRouter(), rows=[{"question": "1"}])) as worker:
        error = _health_error(worker)
    assert isinstance(error, BadInputError)
    assert error.message == "a row of train_dataset has no prompt; its columns are ['question']"


# -- reward functions ----------------------------------------------------------------------------------


def _call(function: Callable[..., Any]) -> list[list[float | None]]:
    """The rewards of two completions."""
    columns = {"completions": ["a", "b"], "answer": ["c", "c"]}
    return asyncio.run(RewardFunctions([function]).compute(columns))


def test_rewards_can_be_arrays() -> None:
    assert _call(lambda **_: np.array([1, 2])) == [[1.0, 2.0]]
    assert _call(lambda **_: (np.float32(0.5), None)) == [[0.5, None]]
    assert _call(lambda **_: torch.tensor([1.0, 0.0])) == [[1.0, 0.0]]


def test_each_reward_function_has_a_name_of_its_own() -> None:
    def score(**_: Any) -> list[float]:
        return []

    def score_2(**_: Any) -> list[float]:
        return []

    assert RewardFunctions([score, score, score_2]).names == ["score", "score_2", "score_2_2"]


@pytest.mark.parametrize("wrap", [lambda judge: judge, functools.partial])
def test_no_limit_for_calls_of_an_object_with_an_async_call(wrap: Callable[..., Any]) -> None:
    barrier = asyncio.Barrier(32)

    class Judge:
        async def __call__(self, **_: Any) -> list[float]:
            await asyncio.wait_for(barrier.wait(), 10.0)
            return [1.0]

    async def run() -> None:
        rewards = RewardFunctions([wrap(Judge())])
        await asyncio.gather(*(rewards.compute({"completions": ["a"]}) for _ in range(32)))

    asyncio.run(run())


@pytest.mark.parametrize(
    "result",
    [
        1.0, None, np.array(1.0), "ab", "10", {"a": 1.0, "b": 2.0}, {0: 0.5, 1: 0.7}, ["x", "y"], [[1.0], [2.0]],
        np.ones((2, 2)), [1.0], ["nan", "1"], [b"2", b"3"], np.array(["1", "2"]),
    ],
)  # fmt: skip
def test_results_that_are_no_rewards(result: Any) -> None:
    def judge(**_: Any) -> Any:
        return result

    with pytest.raises(VerlServerError, match=r"^reward function judge (failed: (Type|Value)Error|returned 1 rewards)"):
        _call(judge)


@pytest.mark.parametrize("error", [KeyError("x"), TypeError("unsupported operand")], ids=repr)
@pytest.mark.parametrize("is_async", [False, True])
def test_errors_of_reward_functions_have_their_names(error: Exception, is_async: bool) -> None:
    def judge(**_: Any) -> list[float]:
        raise error

    async def async_judge(**_: Any) -> list[float]:
        raise error

    name = "async_judge" if is_async else "judge"
    with running(_worker(FakeRouter(), reward=async_judge if is_async else judge)) as worker:
        found = _health_error(worker)
    assert found.message == f"reward function {name} failed: {type(error).__name__}: {error}"
    assert found.__cause__ is error


# -- weights -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "glm4_moe_lite", "qwen3_moe"])
def test_buffers_that_checkpoints_have_are_pushed(family: str, tmp_path: Path) -> None:
    """Biases of routers are buffers, and no gradient changes them. Tables of rotary embeddings are no part of them."""
    model = make_family_model(family)
    manifest = read_manifest({"model_path": str(save_family_model(model, family, tmp_path))})
    pushed = [(name, TensorSpec.of(tensor)) for name, tensor in named_weights(model)]
    assert len(dict(pushed)) == len(pushed)
    names = [new for name, spec in pushed for new in manifest.checkpoint_specs(name, spec)]
    assert sorted(names) == sorted(manifest.tensors)
