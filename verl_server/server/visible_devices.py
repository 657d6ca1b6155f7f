"""Which GPUs and cores a server may use. Trainer ranks often have one GPU each, while their server needs several.

Workers of Ray, and ranks of launchers that isolate processes, have a `CUDA_VISIBLE_DEVICES` of their own. A server
inherits the environment of one rank. Without a translation, it would see the GPU of that rank only. In the same way,
launchers such as srun give each rank the cores next to its GPU.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_server.errors import BadInputError

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
"""Environment variable with the GPUs that a process sees, by number or UUID. Not set: all GPUs of the machine."""
MIG_PREFIX = "MIG-"
"""How the names of MIG devices begin: parts of a GPU that NVIDIA's driver shows as devices."""


@dataclass(frozen=True)
class SeenByRank:
    """What one trainer rank may use."""

    visible: str | None
    """Value of its `CUDA_VISIBLE_DEVICES`. None: not set."""
    num_gpus: int
    """Number of GPUs that torch finds in the process of the rank."""
    cores: Sequence[int]
    """Numbers of the cores that the rank may use. Empty: not known."""
    machine: str | None
    """Id of the machine of the rank, see `machine_id`. None: not known."""


def seen_by_server(ranks: Sequence[SeenByRank], needed: int, chosen: str | None = None) -> tuple[str | None, list[int]]:
    """The `CUDA_VISIBLE_DEVICES` of a server on the machine of the first of these ranks, and the cores of the server.

    They are those of the ranks on this machine together. A rank on another machine may have GPUs and cores with the
    same numbers. `needed`: number of GPUs that the server needs. `chosen`: the caller's `CUDA_VISIBLE_DEVICES` for the
    server. Raises BadInputError if the server would see too few GPUs.
    """
    beside = [rank for rank in ranks if rank.machine == ranks[0].machine]
    visible = devices_of_ranks([rank.visible for rank in beside]) if chosen is None else chosen
    require_gpus(needed, visible, ranks[0].num_gpus)
    return visible, sorted({core for rank in beside for core in rank.cores})


def allowed_cores() -> set[int]:
    """The cores that this thread may use. Empty if a sandbox forbids to read them."""
    try:
        return os.sched_getaffinity(0)
    except OSError:
        return set()


def parse_devices(value: str) -> list[str]:
    """The devices that a value of `CUDA_VISIBLE_DEVICES` names. As in CUDA, -1 and what follows it name no device."""
    names = [device for part in value.split(",") if (device := part.strip())]
    return names[: names.index("-1")] if "-1" in names else names


def devices_of_ranks(values: Sequence[str | None]) -> str | None:
    """The `CUDA_VISIBLE_DEVICES` of a server, from those of the trainer ranks on its machine.

    These are the GPUs that the ranks see together, in the order of the ranks. None, which means all GPUs of the
    machine, if the first rank sees all GPUs.
    """
    if values[0] is None:
        return None
    return ",".join(dict.fromkeys(device for value in values for device in parse_devices(value or "")))


def gpus_needed(server_args: Mapping[str, Any], ranks_on_machine: int) -> int:
    """Number of GPUs that a server with these SGLang arguments must see to have `ranks_on_machine` TP ranks there."""
    first, step = (int(server_args.get(name) or default) for name, default in (("base_gpu_id", 0), ("gpu_id_step", 1)))
    return first + step * (ranks_on_machine - 1) + 1


def require_gpus(needed: int, visible: str | None, num_gpus: int) -> None:
    """Raise BadInputError if a server sees fewer GPUs than it needs, or if it needs several and sees a MIG device.

    `visible`: its `CUDA_VISIBLE_DEVICES`. `num_gpus`: number of GPUs of the machine if that is None; 0 on a machine
    without GPUs, whose servers run on the CPU.
    """
    if num_gpus == 0:
        return
    found = num_gpus if visible is None else len(parse_devices(visible))
    if found < needed:
        where = "this machine has" if visible is None else f"{VISIBLE_DEVICES}={visible} makes visible"
        raise BadInputError(
            f"the server needs {needed} GPUs on this machine (its TP ranks; with SGLang also base_gpu_id and "
            f"gpu_id_step), but {where} {found}: use a smaller tp_size, nnodes=... (SGLang) if the trainer ranks are "
            f"on several machines, or pass env={{'{VISIBLE_DEVICES}': ...}} with GPUs for the server"
        )
    if needed > 1 and (mig := [name for name in parse_devices(visible or "") if name.startswith(MIG_PREFIX)]):
        raise BadInputError(
            f"the server needs {needed} GPUs on this machine (its TP ranks, base_gpu_id and gpu_id_step), but "
            f"{VISIBLE_DEVICES} has {', '.join(mig)}, and a process of CUDA can use only one MIG device: use "
            f"tp_size=1, or pass env={{'{VISIBLE_DEVICES}': ...}} with whole GPUs for the server"
        )
