"""Which GPUs a server sees. Trainer ranks often see one GPU each, while their server needs several. Pure functions.

Workers of Ray, and ranks of launchers that isolate processes, have a `CUDA_VISIBLE_DEVICES` of their own. A server
inherits the environment of one rank. Without a translation, it would see the GPU of that rank only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_server.errors import BadInputError

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
"""Environment variable with the GPUs that a process sees, by number or UUID. Not set: all GPUs of the machine."""


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
    """Raise BadInputError if a server sees fewer GPUs than it needs.

    `visible`: its `CUDA_VISIBLE_DEVICES`. `num_gpus`: number of GPUs of the machine if that is None; 0 on a machine
    without GPUs, whose servers run on the CPU.
    """
    if num_gpus == 0:
        return
    found = num_gpus if visible is None else len(parse_devices(visible))
    if found < needed:
        where = "this machine has" if visible is None else f"{VISIBLE_DEVICES}={visible} makes visible"
        raise BadInputError(
            f"the server needs {needed} GPUs on this machine (its TP ranks, base_gpu_id and gpu_id_step), but "
            f"{where} {found}: use a smaller tp_size, or pass env={{'{VISIBLE_DEVICES}': ...}} with GPUs for the server"
        )
