"""Checks of the network between a trainer and its own server: loopback, IPv6, ports and proxies."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

from verl_server.doctor.finding import Finding, fail, ok, warn

PROXIES = ("http_proxy", "https_proxy", "all_proxy")
EPHEMERAL_MINIMUM = 4096


def check_loopback(problem: str) -> Finding:
    """Check connections over 127.0.0.1. `problem` is the error of such a connection, or "" if it worked."""
    if not problem:
        return ok("Loopback", "connections over 127.0.0.1 work")
    return fail(
        "Loopback",
        problem,
        symptom="a server cannot bind 127.0.0.1, or never becomes ready",
        fix="Enable the loopback device (ip link set lo up). In a sandbox, allow local sockets.",
    )


def check_ipv6(available: bool) -> Finding:
    """Check for IPv6, which only servers with `--host ::` need."""
    return ok("IPv6", "available" if available else "not available; only --host :: needs it")


def check_ephemeral(lowest: int, highest: int) -> Finding:
    """Check the range of ports for outgoing connections and for servers without a fixed port."""
    detail = f"{lowest} to {highest}"
    if highest - lowest >= EPHEMERAL_MINIMUM:
        return ok("Ports", detail)
    return warn(
        "Ports",
        f"only {highest - lowest + 1} ports, {detail}",
        symptom="with thousands of requests in flight: Cannot assign requested address",
        fix="sysctl net.ipv4.ip_local_port_range='32768 60999'",
    )


def check_proxies(env: Mapping[str, str]) -> Finding:
    """Check for proxy variables without an exception for loopback.

    The values can contain passwords, so the finding shows only the names of the variables.
    """
    names = [name for name in env if name.lower() in PROXIES and env[name]]
    if not names:
        return ok("Proxies", "no proxy variables")
    exceptions = ",".join(env.get(name, "") for name in ("no_proxy", "NO_PROXY"))
    hosts = {host.strip() for host in exceptions.split(",")}
    if "*" in hosts or ("localhost" in hosts and hosts & {"127.0.0.1", "127.0.0.0/8", "127."}):
        return ok("Proxies", f"{', '.join(names)}, with an exception for loopback")
    return warn(
        "Proxies",
        f"{', '.join(names)} set, but no_proxy does not contain both localhost and 127.0.0.1",
        symptom="curl, requests or an agent receives 403, 502 or 504 from the proxy instead of a reply of the server "
        "(the adapters of this library ignore proxies)",
        fix='export no_proxy="localhost,127.0.0.1,::1${no_proxy:+,$no_proxy}"; export NO_PROXY="$no_proxy"',
    )


def probe_loopback() -> str:
    """Open a connection over 127.0.0.1. Returns the error, or "" if it worked."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=5.0),
        ):
            server.settimeout(5.0)
            server.accept()[0].close()
    except OSError as error:
        return str(error)
    return ""


def probe_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def probe_ephemeral() -> tuple[int, int]:
    """Lowest and highest port of the range; the default of Linux if the range cannot be read."""
    try:
        lowest, highest = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    except (OSError, ValueError):
        return 32768, 60999
    return int(lowest), int(highest)


def examine() -> list[Finding]:
    """Check the network of this machine."""
    return [
        check_loopback(probe_loopback()),
        check_ipv6(probe_ipv6()),
        check_ephemeral(*probe_ephemeral()),
        check_proxies(os.environ),
    ]
