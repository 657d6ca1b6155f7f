"""Loopback, IPv6, ports and proxies: all that stands between a trainer and its own server."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

from verl_server.doctor.finding import Finding, fail, ok, warn

PROXIES = ("http_proxy", "https_proxy", "all_proxy")
EPHEMERAL_MINIMUM = 4096


def check_loopback(problem: str) -> Finding:
    """`problem`: why a connection over 127.0.0.1 failed; "" when it worked."""
    if not problem:
        return ok("Loopback", "a server can listen on 127.0.0.1")
    return fail(
        "Loopback",
        problem,
        symptom="cannot bind 127.0.0.1, or the server is never ready",
        fix="Bring the loopback device up (ip link set lo up); in a sandbox, allow local sockets.",
    )


def check_ipv6(available: bool) -> Finding:
    """IPv6 is wanted by those who bind `::` only."""
    return ok("IPv6", "available" if available else "not available: do not use --host ::")


def check_ephemeral(lowest: int, highest: int) -> Finding:
    """The range of ports for outgoing connections and for servers without a chosen port."""
    detail = f"{lowest} to {highest}"
    if highest - lowest >= EPHEMERAL_MINIMUM:
        return ok("Ports", detail)
    return warn(
        "Ports",
        f"only {detail}",
        symptom="Cannot assign requested address, with thousands of requests in flight",
        fix="sysctl net.ipv4.ip_local_port_range='32768 60999'",
    )


def check_proxies(env: Mapping[str, str]) -> Finding:
    """Proxy variables without an exception for loopback. Their values may hold passwords and are not shown."""
    names = [name for name in env if name.lower() in PROXIES and env[name]]
    if not names:
        return ok("Proxies", "no proxy variables")
    exceptions = ",".join(env.get(name, "") for name in ("no_proxy", "NO_PROXY"))
    hosts = {host.strip() for host in exceptions.split(",")}
    if "*" in hosts or ("localhost" in hosts and hosts & {"127.0.0.1", "127.0.0.0/8", "127."}):
        return ok("Proxies", f"{', '.join(names)}, with an exception for loopback")
    return warn(
        "Proxies",
        f"{', '.join(names)} set, and no_proxy does not name both localhost and 127.0.0.1",
        symptom="curl, requests or an agent gets 403, 502 or 504 from a proxy instead of the server "
        "(this library's own adapters ignore proxies)",
        fix='export no_proxy="localhost,127.0.0.1,::1${no_proxy:+,$no_proxy}"; export NO_PROXY="$no_proxy"',
    )


def probe_loopback() -> str:
    """Listen, connect, accept on 127.0.0.1."""
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
    """Lowest and highest port; Linux's default where the file cannot be read."""
    try:
        lowest, highest = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    except (OSError, ValueError):
        return 32768, 60999
    return int(lowest), int(highest)


def examine() -> list[Finding]:
    """Look at the network of this machine."""
    return [
        check_loopback(probe_loopback()),
        check_ipv6(probe_ipv6()),
        check_ephemeral(*probe_ephemeral()),
        check_proxies(os.environ),
    ]
