"""Two hosts on this machine: network namespaces with a cable between them."""

from __future__ import annotations

import contextlib
import subprocess
import uuid
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def two_hosts(addresses: tuple[str, str], rate: str | None = None) -> Iterator[tuple[str, str]]:
    """The names of two namespaces with these addresses. `rate`: of the cable, for example "20mbit".

    Skips the test where the kernel forbids namespaces.
    """
    names = [f"vshost{uuid.uuid4().hex[:6]}{side}" for side in "ab"]
    commands = [f"ip netns add {name}" for name in names]
    commands += [f"ip link add e0 netns {names[0]} type veth peer name e0 netns {names[1]}"]
    for address, name in zip(addresses, names, strict=True):
        commands += [f"ip -n {name} addr add {address}/24 dev e0"]
        commands += [f"ip -n {name} link set {device} up" for device in ("lo", "e0")]
        if rate is not None:
            commands += [f"ip netns exec {name} tc qdisc add dev e0 root tbf rate {rate} burst 64kb latency 100ms"]
    try:
        for command in commands:
            try:
                subprocess.run(command.split(), capture_output=True, check=True)
            except (subprocess.CalledProcessError, FileNotFoundError):
                pytest.skip(f"this machine forbids network namespaces or has no iproute2: {command}")
        yield names[0], names[1]
    finally:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
