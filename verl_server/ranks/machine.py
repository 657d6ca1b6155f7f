"""Identity and network address of this machine."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterable

from verl_server.errors import BadInputError

ROUTED_PEERS = ("192.0.2.1", "2001:db8::1")
"""Addresses of documentation networks (RFC 5737, RFC 3849): the route to them is the default route of the machine."""


def boot_id() -> str:
    """An id of the running kernel. Containers of a machine have the same id."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def machine_id() -> str:
    """An id that is equal for processes that can open each other's files in /proc.

    These processes have the same boot of the kernel, the same PID namespace and the same user.
    """
    return f"{boot_id()}:{os.readlink('/proc/self/ns/pid')}:{os.getuid()}"


def own_address(peer: str) -> str:
    """This machine's address on the route to `peer`, an address or a name. IPv4 is preferred.

    A datagram socket is connected; no packet is sent. Raises OSError without a route, or for a name without an address.
    """
    found = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)
    failure = OSError(f"{peer} has no address")
    for family, kind, _, _, address in sorted(found, key=lambda entry: entry[0] != socket.AF_INET):
        try:
            with socket.socket(family, kind) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
        except OSError as error:
            failure = error
    raise failure


def is_loopback(host: str) -> bool:
    """Whether `host` is a loopback address or "localhost". Other names are not resolved."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def reachable_address() -> str:
    """This machine's address for the other nodes of the trainer: on the route to MASTER_ADDR, or on the default route.

    A MASTER_ADDR that is a loopback address means that all nodes are on this machine. A name can be a loopback address
    on this machine only: Debian gives its own name the address 127.0.1.1. Raises BadInputError without such an address.
    """
    master = os.environ.get("MASTER_ADDR")
    if master and is_loopback(master):
        return own_address(master)
    for peer in (master, *ROUTED_PEERS):
        try:
            address = own_address(peer) if peer else None
        except OSError:  # no route, or a name that does not resolve
            continue
        if address is not None and not is_loopback(address):
            return address
    raise BadInputError(
        "this machine's address for other nodes is not known: pass dist_init_addr, and set MASTER_ADDR to an address "
        "that other nodes reach"
    )


def spans_machines(global_ranks: Iterable[int]) -> bool | None:
    """Whether these global ranks of the trainer run on several machines. None when that is not known.

    LOCAL_WORLD_SIZE, which torchrun sets, is the number of consecutive ranks on a machine. A MASTER_ADDR that is a
    loopback address means that all ranks are on this machine. So do both variables if they are not set.
    """
    master, ranks_per_machine = os.environ.get("MASTER_ADDR"), os.environ.get("LOCAL_WORLD_SIZE", "")
    if master and is_loopback(master):
        return False
    if ranks_per_machine.isdigit() and int(ranks_per_machine) > 0:
        return len({rank // int(ranks_per_machine) for rank in global_ranks}) > 1
    return None if master else False
