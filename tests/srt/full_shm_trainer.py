"""A trainer that fills /dev/shm after the start of its server. It enters a mount namespace of its own."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from helpers import assert_equals_reference, change_weights, mesh_of, reference_model

from verl_server import VerlEngine

FILLER = Path("/dev/shm/filler")


CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
"""Flags of unshare(2)."""


def mount_own_dev_shm() -> None:
    """Mount a /dev/shm of 64 MiB that only this process and its children see. This process must have one thread."""
    user, group = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWUSER | CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare failed")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", "/dev/shm"], check=True)


def main(folder: str, scratch: str) -> None:
    mount_own_dev_shm()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{scratch}/rendezvous", rank=0, world_size=1)
    model = reference_model(folder)
    with VerlEngine(mesh_of(1), model_path=folder, dtype="float32", max_total_tokens=8192) as engine:
        free = os.statvfs("/dev/shm")
        with FILLER.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize)
        assert os.statvfs("/dev/shm").f_bavail == 0
        for seed in range(3):
            change_weights(model, seed=seed)
            engine.update_weights_from_tensor(model.state_dict().items())
            assert_equals_reference(engine, model)
    FILLER.unlink()
    assert not list(Path("/dev/shm").iterdir())
    print("all updates succeeded and /dev/shm is empty", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
