"""Placement of the trainer ranks of one engine on nodes: which ranks start a server process. Pure functions."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from verl_server.errors import BadInputError
from verl_server.validation import require_whole_number

# -- Machine ----------------------------------------------------------------------------------------

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


def known_machine_id() -> str | None:
    """`machine_id`, or None in a sandbox without the files of /proc that have it."""
    try:
        return machine_id()
    except OSError:
        return None


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


# -- Placement --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Placement:
    """The role of one trainer rank in starting a server that may span several nodes."""

    node_rank: int
    """Number of this rank's node, from 0."""
    is_node_leader: bool
    """Whether this rank is the first rank of its node, which starts the node's server process."""
    tp_size: int
    """Number of TP ranks of the whole server."""
    ranks_per_node: int
    """Number of TP ranks of the server on each node."""
    nnodes: int
    """Number of nodes that the server spans."""


def compute_placement(rank: int, mesh_size: int, nnodes: int, server_args: Mapping[str, Any]) -> Placement:
    """The placement of trainer rank `rank`, which is between 0 and `mesh_size - 1`.

    The ranks of one node are consecutive. The server's `tp_size` is `mesh_size` unless `server_args` contains it.
    Raises BadInputError if the ranks or the TP ranks cannot be divided evenly among the nodes.
    """
    nnodes = require_whole_number("nnodes", nnodes)
    tp_size = server_args.get("tp_size")
    tp_size = mesh_size if tp_size is None else require_whole_number("tp_size", tp_size)
    if mesh_size % nnodes:
        raise BadInputError(
            f"the {mesh_size} trainer ranks of device_mesh_cpu cannot be divided evenly among nnodes={nnodes} nodes; "
            f"nnodes is the number of machines that one server spans: use 1, or another divisor of {mesh_size}"
        )
    if tp_size % nnodes:
        raise BadInputError(
            f"tp_size={tp_size} cannot be divided evenly among nnodes={nnodes} nodes; use a multiple of {nnodes}"
        )
    trainer_ranks_per_node = mesh_size // nnodes
    return Placement(
        node_rank=rank // trainer_ranks_per_node,
        is_node_leader=rank % trainer_ranks_per_node == 0,
        tp_size=tp_size,
        ranks_per_node=tp_size // nnodes,
        nnodes=nnodes,
    )
