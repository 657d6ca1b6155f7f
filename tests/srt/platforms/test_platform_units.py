"""Pure parts of the CPU platform: core lists, memory budget, page arithmetic, hashed noise."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import subprocess
import sys
from typing import Any

import pytest
import torch
import uvicorn

from verl_server.cpu import hooks, memory, seeds
from verl_server.platforms import PLATFORM_CLASS, activate
from verl_server.platforms.limits import split_cores
from verl_server.platforms.scheduler_hooks import EndsWithClient

cpu_only = pytest.mark.skipif(torch.accelerator.is_available(), reason="an accelerator is present")


@cpu_only
def test_activates_on_a_plain_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    assert activate() == PLATFORM_CLASS


def test_does_not_activate_with_sglangs_own_cpu_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert activate() is None


def test_does_not_activate_with_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert activate() is None


def test_importing_the_plugin_imports_neither_torch_nor_sglang() -> None:
    code = "import sys, verl_server.platforms; sys.exit('torch' in sys.modules or 'sglang' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("ranks", "cores", "expected"),
    [
        (2, [0, 1, 2, 3], "0,1|2,3"),
        (2, [0, 1], "0|1"),
        (3, [4, 5, 6, 7], "4|5|6"),
        (2, [5], "5|5"),
        (2, [0, 1, 4, 5], "0,1|4,5"),
    ],
)
def test_cores_are_split_between_ranks(ranks: int, cores: list[int], expected: str) -> None:
    assert split_cores(ranks, cores) == expected


def test_core_lists_are_parsed_as_sglang_writes_them() -> None:
    assert hooks.parse_cores("0,1,4-6") == {0, 1, 4, 5, 6}


def test_kv_budget_is_bounded_by_length_memory_and_from_below() -> None:
    assert memory.pool_tokens(2048, bytes_per_token=512, free_bytes=16 << 30) == 16 * 2048
    assert memory.pool_tokens(131_072, bytes_per_token=131_072, free_bytes=8 << 30) == (1 << 30) // 131_072
    assert memory.pool_tokens(131_072, bytes_per_token=131_072, free_bytes=1 << 20) == 2048


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(not memory.is_supported(), reason="Linux only")
def test_dropped_pages_leave_the_process_and_stay_usable() -> None:
    layer = torch.nn.Linear(4096, 4096)  # 64 MiB
    twin = torch.nn.Linear(4096, 4096)
    twin.weight = layer.weight
    regions = memory.weight_regions([layer, twin])
    size = layer.weight.nbytes
    assert sum(region.size for region in regions) < size + (1 << 20), "tied weights counted twice"
    before = _resident_bytes()
    assert memory.drop(regions) >= size - 2 * os.sysconf("SC_PAGE_SIZE")
    assert before - _resident_bytes() > 0.95 * size
    memory.allocate_again(regions)
    assert before - _resident_bytes() < 0.05 * size
    assert torch.count_nonzero(twin.weight[1:-1]) == 0
    layer.weight.data.fill_(1.5)
    assert twin.weight.min() == 1.5


def test_foreign_bytes_on_shared_pages_are_never_dropped() -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    region = memory.Region(address=10 * page + 1, size=3 * page)
    assert list(memory.whole_pages([region])) == [memory.Region(11 * page, 2 * page)]
    assert list(memory.whole_pages([memory.Region(10 * page + 1, page)])) == []


def _murmur3_of_words(words: list[int]) -> int:
    """MurmurHash3 x86 32 bit of 4-byte words, seed 0, straight from its specification."""
    state = 0
    for word in words:
        mixed = (word * 0xCC9E2D51) & 0xFFFFFFFF
        mixed = ((mixed << 15) | (mixed >> 17)) & 0xFFFFFFFF
        state ^= (mixed * 0x1B873593) & 0xFFFFFFFF
        state = ((state << 13) | (state >> 19)) & 0xFFFFFFFF
        state = (state * 5 + 0xE6546B64) & 0xFFFFFFFF
    state ^= 4 * len(words)
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return state ^ (state >> 16)


def test_hash_is_murmur3() -> None:
    seed = (7 << 32) + 0xFFFFFFF0
    hashed = seeds.murmur_hash32(torch.tensor([seed]), torch.tensor([99]), torch.tensor([[0, 5, 151_935]]))
    expected = [_murmur3_of_words([seed & 0xFFFFFFFF, seed >> 32, 99, token]) for token in (0, 5, 151_935)]
    assert hashed.tolist() == [expected]


def test_seeded_draws_follow_the_distribution() -> None:
    weights = torch.tensor([0.5, 0.3, 0.15, 0.05]).repeat(8192, 1)
    drawn = seeds.sample(
        lambda *_, **__: pytest.fail("seeded rows only"), weights, torch.arange(8192), torch.zeros(8192).long()
    )
    share = torch.bincount(drawn.long(), minlength=4) / 8192
    assert torch.allclose(share, weights[0], atol=0.02)


def test_only_a_new_program_with_one_thread_forks_workers() -> None:
    script = (
        "import os, sys, threading\n"
        "from verl_server.cpu.hooks import can_fork\n"
        "fresh = can_fork()\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "print(fresh, can_fork(), flush=True)\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    print(can_fork(), flush=True)\n"
        "    os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["True", "False", "False"]


@pytest.mark.parametrize("http", ["h11", "httptools"])
def test_a_generation_ends_with_its_client_and_not_after_its_reply(http: Any) -> None:
    """A client that closes its connection after the reply takes nothing from the work that follows the reply."""
    events: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            while (message := await receive())["more_body"]:
                pass
            await asyncio.sleep(float(message["body"]))
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"hi"})
            await asyncio.sleep(0.3)
            events.append("done")
        except asyncio.CancelledError:
            events.append("cancelled")
            raise

    async def call(port: int, seconds: float, *, reads: bool) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = f"{seconds}".encode()
        writer.write(b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        if reads:
            assert (await reader.readuntil(b"hi")).endswith(b"hi")
        else:
            await asyncio.sleep(0.2)
        writer.close()
        await asyncio.sleep(0.6)

    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            config = uvicorn.Config(EndsWithClient(app), log_level="error", http=http, lifespan="off")
            server = uvicorn.Server(config)
            serving = asyncio.create_task(server.serve([listener]))
            await call(listener.getsockname()[1], 0.1, reads=True)
            await call(listener.getsockname()[1], 5.0, reads=False)
            server.should_exit = True
            await serving

    asyncio.run(run())
    assert events == ["done", "cancelled"]
