"""The servers of a TRL trainer: a fleet on rank 0, and the engine on every rank that pushes the weights."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_server.adapter.engine import get_engine
from verl_server.adapter.sglang.replies import max_request_tokens
from verl_server.config import (
    AdapterConfig,
    PositiveInt,
    RecoveryConfig,
    RolloutMode,
    RouterConfig,
    Timeouts,
    WeightsConfig,
)
from verl_server.engine.verl_engine import VerlEngine
from verl_server.errors import BadInputError, UnsupportedError
from verl_server.rollout.fleet import Event
from verl_server.rollout.launchers.local import Launcher
from verl_server.rollout.manager import RolloutManager
from verl_server.rollout.modes import capabilities_of, parse_mode
from verl_server.validation import check_arguments

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


# -- Mesh -------------------------------------------------------------------------------------------
# The mesh of the trainer ranks, which `VerlEngine` needs. TRL has none: Accelerate makes the process group.


@contextlib.contextmanager
def trainer_mesh() -> Iterator[DeviceMesh]:
    """All trainer ranks as a mesh with a gloo group of its own.

    Under `accelerate launch` and `torchrun`, Accelerate makes the default process group as it does for the trainer. A
    script that is started as `python script.py` has no process group: it gets one of a single rank until the end of
    the context.
    """
    import torch.distributed as dist
    from accelerate import PartialState
    from torch._C._distributed_c10d import HashStore
    from torch.distributed.device_mesh import DeviceMesh

    PartialState()
    owns_group = not dist.is_initialized()
    if owns_group:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup)  # this rank is a member
        yield DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    finally:
        if owns_group:
            dist.destroy_process_group()


def require_one_gpu(args: Any) -> None:
    """Raise UnsupportedError if this rank trains on several GPUs. `args`: the arguments of the trainer."""
    if args.n_gpu > 1:
        raise UnsupportedError(
            f"one trainer process sees {args.n_gpu} GPUs, so that transformers would use nn.DataParallel, which "
            "cannot work here: set CUDA_VISIBLE_DEVICES=0 for one trainer rank, or start several ranks with "
            "`accelerate launch`. Give the servers their GPUs with start_servers(env={'CUDA_VISIBLE_DEVICES': '1'})"
        )


# -- Version ----------------------------------------------------------------------------------------
# The version of TRL that this folder works with.
#
# TRL calls `rollout_func` and the asynchronous trainer experimental and changes them between its versions, so that
# other versions are refused.

TRL_VERSION = "1.16.0"


def require_trl() -> None:
    """Raise UnsupportedError, with the version to install, unless `TRL_VERSION` is installed."""
    try:
        installed = importlib.metadata.version("trl")
    except importlib.metadata.PackageNotFoundError:
        installed = None
    if installed != TRL_VERSION:
        found = "trl is not installed" if installed is None else f"trl {installed} is installed"
        raise UnsupportedError(
            f"verl_server.integrations.trl works with trl {TRL_VERSION}, and {found}: pip install trl=={TRL_VERSION}"
        )


# -- Servers ----------------------------------------------------------------------------------------

RANKS_S = 1800.0
"""Default of `Timeouts.ranks_s` under TRL, in seconds: that of `ddp_timeout`. A rank that saves arrives late."""


@dataclass(frozen=True)
class RolloutServers:
    """What generates for a trainer. `start_servers` makes it; make it yourself for an engine that you have."""

    engine: VerlEngine
    """Engine that pushes the weights, on every trainer rank."""
    fleet: RolloutManager | None
    """Fleet of the engine, on rank 0. None on the other ranks."""
    mesh: DeviceMesh
    """Mesh of the engine: all trainer ranks, with a group that can send objects between CPUs."""
    max_tokens: int | None = dataclasses.field(init=False)
    """Maximum number of tokens of a prompt with its completion. A server tells it when this object is made. None: no
    server on this rank, or the server does not tell it."""

    def __post_init__(self) -> None:
        adapter = self.engine.adapter
        max_tokens = None if adapter is None else max_request_tokens(adapter.get_server_info())
        object.__setattr__(self, "max_tokens", max_tokens)


@contextlib.contextmanager
@check_arguments()
def start_servers(
    model_path: str | Path,
    replicas: PositiveInt = 1,
    *,
    mode: RolloutMode | str | None = RolloutMode.HYBRID,
    launcher: Launcher | None = None,
    config: AdapterConfig | None = None,
    weights: WeightsConfig | None = None,
    recovery: RecoveryConfig | None = None,
    router: RouterConfig | None = None,
    router_process: bool = False,
    on_event: Callable[[Event], None] = lambda event: None,
    env: Mapping[str, str] | None = None,
    **server_args: Any,
) -> Iterator[RolloutServers]:
    """Start servers for a TRL trainer, and end them at the end of the context. Call it on all trainer ranks.

    Args:
        model_path: Checkpoint that the trainer starts from.
        replicas: Number of servers. A server that ends is started again with the current weights.
        mode: `"hybrid"` for servers on the trainer's GPUs, `"standalone"` for servers with GPUs of their own.
        launcher: Starts the servers, for example a `verl_server.ray.RayLauncher` on other machines. None: this machine.
        config: Settings of each server, for example `AdapterConfig(server_python=...)` for servers in another
            environment than the trainer, and `engine_kind="vllm"`. A `Timeouts.ranks_s` that is not set is `RANKS_S`.
        weights: How weights travel to the servers.
        recovery: When a server counts as stalled, and how often it is started again.
        router: How requests are distributed over the servers.
        router_process: Also serve the router over HTTP, see `RolloutManager`.
        on_event: Called on rank 0 with each change of a server's state, see `RolloutManager`.
        env: Environment variables of the servers: `{"CUDA_VISIBLE_DEVICES": "1,2"}` chooses their GPUs.
        server_args: Arguments of the engine's server, for example `dtype="bfloat16"` and `context_length=8192`.

    Raises UnsupportedError for another version of TRL, BadInputError, StartupError, DeadlineError.
    """
    require_trl()
    config = config or AdapterConfig()
    server_args = {"model_path": str(model_path), **server_args}
    if not capabilities_of(parse_mode(mode)).takes_weights:
        raise BadInputError(f"a fleet of mode={str(mode)!r} takes no weights: use 'hybrid' or 'standalone'")
    get_engine(config.engine_kind).validate_fleet_args(server_args)  # on all ranks: otherwise they wait for rank 0
    with trainer_mesh() as mesh, contextlib.ExitStack() as stack:
        fleet = None
        if mesh.get_local_rank() == 0:
            manager = RolloutManager(
                replicas, mode=mode, launcher=launcher, config=config, recovery=recovery, router=router,
                router_process=router_process, on_event=on_event, env=env, **server_args)  # fmt: skip
            fleet = stack.enter_context(manager)
        engine = VerlEngine(
            mesh, fleet=fleet, weights=weights, timeouts=rank_timeouts(config.timeouts), engine_kind=config.engine_kind,
            **server_args)  # fmt: skip
        yield RolloutServers(stack.enter_context(engine), fleet, mesh)


def rank_timeouts(timeouts: Timeouts) -> Timeouts:
    """The timeouts of the engine: a `ranks_s` that has its default becomes `RANKS_S`."""
    is_set = timeouts.ranks_s != Timeouts().ranks_s
    return timeouts if is_set else dataclasses.replace(timeouts, ranks_s=RANKS_S)
