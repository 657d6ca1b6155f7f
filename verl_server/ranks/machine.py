"""Identity and network address of this machine."""

from __future__ import annotations

import os
import socket


def machine_id() -> str:
    """An id that is equal for processes that can open each other's files in /proc.

    These processes have the same boot of the kernel, the same PID namespace and the same user.
    """
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot_id = file.read().strip()
    return f"{boot_id}:{os.readlink('/proc/self/ns/pid')}:{os.getuid()}"


def own_address(peer: str) -> str:
    """This machine's address on the route to `peer`. A datagram socket is connected; no packet is sent."""
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))
        return str(probe.getsockname()[0])
