"""The fleet of the plugin for verl: its Ray actor, and the engine of the trainer ranks. Needs no verl.

The Ray cluster has two nodes on this machine. One replica is on the node of the actor, the other has an actor of its
own on the other node.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
import torch
from helpers import change_weights, no_new_shared_memory, reference_model, wait_until
from torch.distributed.device_mesh import DeviceMesh

from verl_server.adapter.blocking import EventLoopThread
from verl_server.adapter.client import AsyncHttpServerEngineAdapter
from verl_server.config import AdapterConfig, RolloutMode, Timeouts
from verl_server.cpu.forkserver import prepare_forkserver
from verl_server.errors import BadInputError, DeadlineError, ServerDiedError, UnsupportedError, VerlServerError
from verl_server.integrations.verl.fleet_actor import FleetActor, ReplayJobs
from verl_server.integrations.verl.generation import Generations, make_request, prompt_logprobs, require_no_other_media
from verl_server.integrations.verl.ray_fleet import RayFleet, RayTarget, TrainerEngine, _watch, find_fleet
from verl_server.integrations.verl.settings import FleetSpec, OwnSettings
from verl_server.rollout.fleet import ReplicaState
from verl_server.router.dispatcher import Dispatcher, RolloutRouter
from verl_server.router.replica_status import ReplicaStatus
from verl_server.router.targets import InProcessTarget
from verl_server.types import Json
from verl_server.weights.update.options import Servers

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(600)

NAME, NAMESPACE = "verl_server_hybrid", "test"
PROMPT = [5, 6, 7, 8]
LONG = 1500
RESTART_S = 120.0
TIMEOUTS = {"weights_s": 400.0, "ranks_s": 200.0}


def get(references: Any, timeout: float = RESTART_S) -> Any:
    """`ray.get` with a deadline: no signal of a test's time limit ends it."""
    return ray.get(references, timeout=timeout)


class PlainFleetActor(FleetActor):
    """The actor, whose outputs also come as JSON: verl's own class is not installed here."""

    async def generate_plain(self, *args: Any, **kwargs: Any) -> Json:
        return asdict(await self.generate(*args, **kwargs))

    async def num_running(self) -> int:
        assert self._generations is not None
        return self._generations.num_running


def make_spec(folder: Path, **changes: Any) -> FleetSpec:
    values: dict[str, Any] = {
        "mode": RolloutMode.HYBRID,
        "server_args": {"model_path": str(folder), "dtype": "float32", "max_total_tokens": 8192},
        "own": OwnSettings(AdapterConfig(timeouts=Timeouts(**TIMEOUTS))),
        "prompt_length": 64,
        "response_length": 16,
        "context_length": 2048,
        "frees_memory": True,
        "uses_lora": False,
        "serves_http": False,
    }
    return FleetSpec(**(values | changes))


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[str]]:
    """The ids of the two nodes of a Ray cluster. This process is connected to the first."""
    from ray.cluster_utils import Cluster

    prepare_forkserver()
    resources = {"num_cpus": 2, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**resources, "include_dashboard": False})
    try:
        cluster.add_node(**resources)
        ray.init(address=cluster.address, namespace=NAMESPACE, log_to_driver=False)
        own = ray.get_runtime_context().get_node_id()
        others = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != own]
        yield [own, *others]
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(scope="module")
def actor(nodes: list[str], tiny: Callable[..., Path]) -> Iterator[Any]:
    """The actor of a fleet with one replica on each node."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from verl_server.rollout.launchers.ray_launcher import NodePlace

    with no_new_shared_memory():
        here = NodeAffinitySchedulingStrategy(nodes[0], soft=False)
        handle = (
            ray.remote(PlainFleetActor)
            .options(name=NAME, num_cpus=0, max_concurrency=1000, scheduling_strategy=here)
            .remote(make_spec(tiny("qwen3")))
        )
        get([handle.add_replica.remote(f"replica_{rank}", [NodePlace(node)]) for rank, node in enumerate(nodes)])
        yield handle
        with contextlib.suppress(ray.exceptions.RayError):  # the last test kills it
            get(handle.shutdown.remote())
        ray.kill(handle)


class Trainer:
    """A trainer of one rank: its model, and the engine that pushes the weights of the model."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = reference_model(str(folder))
        self.engine = TrainerEngine(NAME, make_spec(folder))

    def push(self, step: int, seed: int) -> None:
        change_weights(self.model, seed=seed)
        asyncio.run(self.engine.update_weights(self.model.state_dict().items(), step))

    def expected(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Greedy tokens of the model."""
        ids = self.model.generate(torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False)
        return [int(token) for token in ids[0, len(prompt) :]]


@pytest.fixture(scope="module")
def trainer(actor: Any, one_rank: DeviceMesh, tiny: Callable[..., Path]) -> Iterator[Trainer]:
    trainer = Trainer(tiny("qwen3"))
    yield trainer
    trainer.engine.shutdown()


def ask(actor: Any, prompt: Sequence[int] = PROMPT, replica: str = "replica_0", **params: Any) -> Any:
    """A reference to the output of a greedy request, as verl sends it."""
    sampling_params = {"temperature": 0.0, "logprobs": True, "ignore_eos": True, **params}
    return actor.generate_plain.remote("id", list(prompt), sampling_params, replica=replica)


def test_tokens_carry_the_step_of_their_weights(actor: Any, trainer: Trainer) -> None:
    trainer.push(step=3, seed=1)
    outputs = get([ask(actor, max_tokens=12, replica=f"replica_{rank}") for rank in (0, 1)])
    for output in outputs:
        assert output["token_ids"] == trainer.expected(PROMPT, 12)
        assert len(output["log_probs"]) == 12
        assert output["stop_reason"] == "length"
        steps = {name: output["extra_fields"][name] for name in ("global_steps", "min_global_steps")}
        assert steps == {"global_steps": 3, "min_global_steps": 3}
    assert len(get(ask(actor))["token_ids"]) == 16, "without a limit, verl's response length"
    assert get(ask(actor, max_tokens=0))["token_ids"] == []


def test_the_actor_owns_sleep_and_wake(actor: Any, trainer: Trainer) -> None:
    """`sleep` comes from verl's replicas, `resume` and the update from the trainer ranks."""
    trainer.push(step=4, seed=2)
    get([actor.sleep.remote(), actor.sleep.remote()])
    waiting = ask(actor, max_tokens=12)
    asyncio.run(trainer.engine.resume(["weights"]))
    trainer.push(step=5, seed=3)
    done, _ = ray.wait([waiting], timeout=0.3)
    assert not done, f"a request has ended while the KV cache is released: {get(done)}"
    asyncio.run(trainer.engine.resume(["kv_cache"]))
    output = get(waiting, timeout=60)
    assert output["token_ids"] == trainer.expected(PROMPT, 12)
    assert output["extra_fields"]["global_steps"] == 5
    get(actor.resume_kv_cache.remote())  # nothing is released: nothing happens


def test_aborted_requests_return_what_they_have(actor: Any, trainer: Trainer) -> None:
    trainer.push(step=6, seed=4)
    running = [ask(actor, max_tokens=LONG, replica=f"replica_{rank}") for rank in (0, 1)]
    wait_until(lambda: get(actor.num_running.remote()) == 2, 30.0, "the requests do not run")
    time.sleep(0.4)
    get(actor.abort_all_requests.remote())
    whole = trainer.expected(PROMPT, LONG)
    for output in get(running):
        assert output["stop_reason"] == "abort"
        assert len(output["token_ids"]) < LONG
        assert output["token_ids"] == whole[: len(output["token_ids"])]
        assert len(output["log_probs"]) == len(output["token_ids"])
    held = ask(actor, max_tokens=4)
    get(actor.sleep.remote())
    asyncio.run(trainer.engine.resume(["weights"]))
    trainer.push(step=7, seed=5)
    asyncio.run(trainer.engine.resume(["kv_cache"]))
    assert ray.wait([held], timeout=0.3)[0] == [], "requests wait until verl resumes the generation"
    get(actor.abort_all_requests.remote(reject_request=True))
    for rejected in get([held, ask(actor, max_tokens=4)]):
        assert (rejected["token_ids"], rejected["stop_reason"]) == ([], "abort"), "verl asks another replica"
    get(actor.resume_generation.remote())
    assert get(ask(actor, max_tokens=4))["token_ids"] == trainer.expected(PROMPT, 4)


def test_a_finished_request_is_not_aborted(actor: Any, trainer: Trainer) -> None:
    """Otherwise verl would continue behind its last token. Aborts come at all times of short requests."""
    trainer.push(step=7, seed=5)
    whole = trainer.expected(PROMPT, 8)
    outputs: list[Any] = []
    for burst in range(12):
        running = [ask(actor, max_tokens=8, replica=f"replica_{index % 2}") for index in range(24)]
        ray.wait(running, num_returns=2 * burst + 1)
        get(actor.abort_all_requests.remote())
        get(actor.resume_generation.remote())  # requests that came after the abort have waited
        outputs += get(running)
    for output in outputs:
        assert output["token_ids"] == whole[: len(output["token_ids"])]
        assert (output["stop_reason"] == "length") == (len(output["token_ids"]) == 8)
    assert {output["stop_reason"] for output in outputs} == {"length", "abort"}


def main_pids(actor: Any) -> list[int]:
    return [replica["main_pid"] for replica in get(actor.describe.remote())["status"]]


def states(actor: Any) -> list[tuple[str, int]]:
    return [(replica["state"], replica["weight_version"]) for replica in get(actor.describe.remote())["status"]]


@pytest.mark.parametrize("victim", [0, 1], ids=["own_node", "other_node"])
def test_a_killed_server_costs_no_request(actor: Any, trainer: Trainer, victim: int) -> None:
    """Its requests continue on the other server, and the server that is started again gets the trainer's weights."""
    trainer.push(step=8, seed=6)
    running = [ask(actor, max_tokens=LONG, replica=f"replica_{rank}") for rank in (0, 1, 0, 1)]
    assert ray.wait(running, timeout=0.5)[0] == []
    killed = main_pids(actor)[victim]
    os.kill(killed, signal.SIGKILL)
    whole = trainer.expected(PROMPT, LONG)
    for output in get(running, timeout=RESTART_S):
        assert output["token_ids"] == whole
        assert output["extra_fields"]["min_global_steps"] == output["extra_fields"]["global_steps"] == 8
    version = max(weight_version for _, weight_version in states(actor))
    wait_until(lambda: states(actor) == [("healthy", version)] * 2, RESTART_S, "the server has no weights")
    assert killed not in main_pids(actor)
    outputs = get([ask(actor, max_tokens=12, replica=f"replica_{rank}") for rank in (0, 1) for _ in range(4)])
    assert all(output["token_ids"] == whole[:12] for output in outputs)


def test_servers_that_end_asleep_are_started_at_the_resume(actor: Any, trainer: Trainer) -> None:
    """No server runs at the update. They get the weights from the memory of the trainer when they are ready."""
    trainer.push(step=9, seed=7)
    get(actor.sleep.remote())
    for pid in main_pids(actor):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: "healthy" not in dict(states(actor)), RESTART_S, "the end of the servers is not noticed")
    asyncio.run(trainer.engine.resume(["weights"]))
    trainer.push(step=10, seed=8)
    asyncio.run(trainer.engine.resume(["kv_cache"]))
    output = get(ask(actor, max_tokens=12), timeout=RESTART_S)
    assert output["token_ids"] == trainer.expected(PROMPT, 12)
    assert output["extra_fields"]["global_steps"] == 10
    wait_until(lambda: [state for state, _ in states(actor)] == ["healthy"] * 2, RESTART_S, "a server is not started")


def test_a_fleet_that_sleeps_while_a_new_server_gets_the_weights(
    actor: Any, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both servers generate after the next update: none of them stays paused."""
    trainer.push(step=11, seed=9)
    loaded, resume = threading.Event(), RayTarget.resume

    def resume_slowly(target: RayTarget) -> None:
        loaded.set()
        time.sleep(1.0)
        resume(target)

    with monkeypatch.context() as patch:
        patch.setattr(RayTarget, "resume", resume_slowly)
        os.kill(main_pids(actor)[0], signal.SIGKILL)
        assert loaded.wait(RESTART_S), "no new server"
        get(actor.sleep.remote())
    asyncio.run(trainer.engine.resume(["weights"]))
    trainer.push(step=12, seed=10)
    asyncio.run(trainer.engine.resume(["kv_cache"]))
    wait_until(lambda: [state for state, _ in states(actor)] == ["healthy"] * 2, RESTART_S, "a server is not started")
    outputs = get([ask(actor, max_tokens=12, replica=f"replica_{rank}") for rank in (0, 1) for _ in range(4)])
    assert all(output["token_ids"] == trainer.expected(PROMPT, 12) for output in outputs)


def test_wrong_requests_are_refused(actor: Any) -> None:
    with pytest.raises(BadInputError, match=r"3000 tokens, but the context of the model has 2048; lower data.max_pro"):
        get(ask(actor, prompt=[5] * 3000))
    with pytest.raises(UnsupportedError, match="does not support video_data"):
        get(actor.generate_plain.remote("id", PROMPT, {}, video_data=["frames"]))
    fleet = RayFleet(actor, timeout_s=30.0)
    with pytest.raises(BadInputError, match="replica 'replica_0' already"):
        fleet.wait(actor.add_replica.remote("replica_0", []), "add_replica")
    with pytest.raises(BadInputError, match="tags must be a list of"):
        fleet.call("release_memory_occupation", ["nonsense"])
    require_no_other_media({"audio_data": None, "video_data": []})


def test_requests_of_a_teacher(tiny: Callable[..., Path]) -> None:
    request = make_request(make_spec(tiny("qwen3")), PROMPT, {"max_tokens": 1, "prompt_logprobs": 2}, None)
    assert request["top_logprobs_num"] == 2
    assert request["logprob_start_len"] == 0
    assert request["sampling_params"] == {"max_new_tokens": 1}
    meta = {"input_top_logprobs": [None, [[-0.5, 7, None], [-1.5, 8, None]]]}
    rows = prompt_logprobs(meta, 2)
    assert rows == {"prompt_ids": [[7, 8], [0, 0]], "prompt_logprobs": [[-0.5, -1.5], [0.0, 0.0]]}
    rows = prompt_logprobs({"input_token_logprobs": [[None, 5, None], [-0.25, 6, None]]}, 0)
    assert rows == {"prompt_ids": [[6], [0]], "prompt_logprobs": [[-0.25], [0.0]]}


def test_a_trainer_that_does_not_answer_ends_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is no DeadlineError: a fleet starts a server again that does not answer."""
    monkeypatch.setattr("verl_server.integrations.verl.fleet_actor.TAKE_TIMEOUT_S", 0.1)
    jobs = ReplayJobs(timeout_s=0.1)
    servers: Any = object()
    with pytest.raises(VerlServerError, match="did not take the job") as not_taken:
        jobs.run("publication", servers)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(jobs.run, "publication", servers)
        job = jobs.next(wait_s=5.0)
        assert job is not None
        assert jobs.servers_of(job[0]) is servers
        with pytest.raises(VerlServerError, match="did not load") as not_done:
            running.result()
    assert not isinstance(not_taken.value, DeadlineError)
    assert not isinstance(not_done.value, DeadlineError)


def test_a_job_is_offered_until_the_trainer_makes_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer with the job can get lost between the actor and the trainer."""
    monkeypatch.setattr("verl_server.integrations.verl.fleet_actor.OFFER_AGAIN_S", 0.2)
    jobs, servers = ReplayJobs(timeout_s=10.0), cast(Servers, object())
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(jobs.run, "publication", servers)
        lost = jobs.next(wait_s=5.0)
        assert lost is not None
        assert jobs.next(wait_s=0.0) is None, "offered twice at the same time"
        assert jobs.next(wait_s=5.0) == lost
        assert jobs.servers_of(lost[0]) is servers
        assert jobs.next(wait_s=0.5) is None, "offered although the trainer loads"
        jobs.finish(lost[0], None)
        running.result()


class UnavailableActor:
    """An actor of Ray. Each first call of a kind fails, as a call does while a node is busy."""

    def __init__(self) -> None:
        failed: Future[Any] = Future()
        failed.set_exception(ray.exceptions.ActorUnavailableError("busy", None))
        job: Future[Any] = Future()
        job.set_result(("job", "publication"))
        self.answers = [failed, job, failed]
        self.num_reports = 0
        self.finished = threading.Event()
        self.next_job = self.finish_job = self

    def remote(self, *args: Any) -> Any:
        if len(args) == 2:
            self.num_reports += 1
            if self.num_reports == 2:
                self.finished.set()
        return self

    def future(self) -> Future[Any]:
        return self.answers.pop(0) if self.answers else Future()


def test_an_actor_that_was_unavailable_is_asked_again_for_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_server.integrations.verl.ray_fleet.JOB_WAIT_S", 0.05)
    monkeypatch.setattr("verl_server.integrations.verl.ray_fleet.JOB_TIMEOUT_S", 0.05)
    actor = UnavailableActor()
    fleet = RayFleet(actor, timeout_s=1.0)
    threading.Thread(target=fleet._run_jobs, daemon=True).start()
    try:
        assert actor.finished.wait(5.0), "the thread has ended, or waits for the failed call"
    finally:
        fleet._closed.set()


def test_the_end_of_the_engine_ends_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fleet would otherwise wait for the outcome, and no server could release its memory meanwhile."""
    actor = UnavailableActor()
    del actor.answers[0]
    fleet = RayFleet(actor, timeout_s=1.0)

    def run_job(*_: str) -> None:
        fleet._closed.set()

    monkeypatch.setattr(fleet, "_run_job", run_job)
    fleet._run_jobs()
    assert actor.num_reports == 1


def test_requests_wait_while_no_server_has_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """An asynchronous trainer pushes later. The error of a server is raised."""
    monkeypatch.setattr("verl_server.integrations.verl.generation.NOT_READY_DELAY_S", 0.1)

    async def make_dispatcher() -> Dispatcher:
        return Dispatcher(None)

    async def run() -> None:
        adapter = cast(AsyncHttpServerEngineAdapter, object())
        status = ReplicaStatus("replica_0", adapter, 0, admitted=False, suspect=False, will_serve=False, removed=False,
                               reason="has old weights: send an update of all weights")  # fmt: skip
        dispatcher = loop.run(make_dispatcher())
        target = InProcessTarget(dispatcher, loop)
        target.update_statuses([status])
        generations = Generations(RolloutRouter(dispatcher, loop))
        request = asyncio.ensure_future(generations.run({"input_ids": [1]}, None))
        await asyncio.sleep(0.3)
        assert not request.done()
        await generations.abort(reject=True)
        assert (await asyncio.wait_for(request, 5.0))["meta_info"]["finish_reason"] == {"type": "abort"}

    loop = EventLoopThread()
    try:
        asyncio.run(run())
    finally:
        loop.close()


def test_a_fleet_that_sleeps_is_not_lost(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its servers cannot get weights while they sleep, for example between two validations."""
    monkeypatch.setattr("verl_server.integrations.verl.fleet_actor.STALE_TIMEOUT_S", 0.5)
    monkeypatch.setattr("verl_server.integrations.verl.fleet_actor.LOSS_POLL_S", 0.1)
    view = SimpleNamespace(state=ReplicaState.STALE, error=None)
    manager: Any = SimpleNamespace(replicas=[view], backend=SimpleNamespace(released_memory=frozenset({"weights"})))
    owner = FleetActor(make_spec(tiny("qwen3")))

    async def get_manager() -> Any:
        return manager

    async def run() -> None:
        monkeypatch.setattr(owner._replicas, "manager", get_manager)
        assert await owner.wait_for_loss(1.5) is None
        manager.backend.released_memory = frozenset()
        assert await owner.wait_for_loss(5.0) == "its servers have waited for weights for 0.5 s"

    asyncio.run(run())


def test_the_deadlines_of_the_settings_are_those_of_the_trainer(actor: Any, trainer: Trainer) -> None:
    trainer.push(step=90, seed=90)
    assert trainer.engine._engine is not None
    assert trainer.engine._engine._timeouts == Timeouts(**TIMEOUTS)


def test_an_actor_that_does_not_answer_any_more_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    class SilentActor:
        def __getattr__(self, name: str) -> SilentActor:
            return self

        def remote(self, *_: Any) -> SilentActor:
            return self

        def future(self) -> Future[Any]:
            return Future()

    class Ended(BaseException):
        """Ends the thread that watches."""

    def end(message: str) -> None:
        raise Ended(message)

    for name, value in {"WAIT_S": 0.05, "SILENT_S": 0.5, "_end": end}.items():
        monkeypatch.setattr(f"verl_server.integrations.verl.ray_fleet.{name}", value)
    with pytest.raises(Ended, match=r"the fleet policy is lost: its actor has not answered for 1 s"):
        _watch(SilentActor(), "policy")


WATCH = """
import ray, sys, time
from verl_server.integrations.verl import ray_fleet
ray.init(address=sys.argv[1], namespace=sys.argv[2], log_to_driver=False)
ray_fleet.WAIT_S, ray_fleet.GRACE_S = 1.0, 0.1
ray_fleet.watch(ray.get_actor(sys.argv[3]), sys.argv[3])
print("watching", flush=True)
time.sleep(300)
"""


def test_the_end_of_the_actor_is_explained(actor: Any, trainer: Trainer) -> None:
    """Last: it ends the fleet of this file. No server outlives the actor, and verl's task runner does not go on."""
    servers = [psutil.Process(pid) for pid in main_pids(actor)]
    address = ray.get_runtime_context().gcs_address
    runner = subprocess.Popen(
        [sys.executable, "-c", WATCH, address, NAMESPACE, NAME], stdout=PIPE, stderr=PIPE, text=True
    )
    assert runner.stdout is not None
    assert runner.stdout.readline() == "watching\n"
    time.sleep(3.0)
    assert runner.poll() is None, "a fleet that serves is not lost"
    with ThreadPoolExecutor(1) as pool:
        get(actor.sleep.remote())
        os.kill(get(actor.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
        update = pool.submit(asyncio.run, trainer.engine.resume(["weights"]))
        with pytest.raises(ServerDiedError, match="the actor of the fleet has ended"):
            update.result(timeout=60)
    with pytest.raises(ServerDiedError, match="the fleet verl_server_standalone does not run: its actor has ended"):
        find_fleet("verl_server_standalone")
    wait_until(lambda: not any(server.is_running() for server in servers), 30.0, "a server outlives the actor")
    _, said = runner.communicate(timeout=60)
    assert runner.returncode == 1
    assert f"the run cannot go on, because the fleet {NAME} is lost: its actor has ended" in said
