"""Servers with different tokenizers behind one gateway: the token ids of one tokenizer mean other texts to another."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from gateway_commands import SHORT, ask, forward, is_ready
from helpers import adapter_of, reference_model, remote_server_of, wait_until
from tokenizers.normalizers import Lowercase
from transformers import AutoTokenizer

from verl_server import BadInputError, HttpServerEngineAdapter, RemoteServer, VerlEngine
from verl_server.agent import RolloutLimits
from verl_server.agent.engines import EngineAccess
from verl_server.gateway import DiscoveredServers, Gateway
from verl_server.gateway.engines import ServerTokenizers
from verl_server.tiny import make_tokenizer
from verl_server.trajectory import ChatRenderer

LIMITS = RolloutLimits(max_turns=1000)
TEXTS = ("the quick brown fox jumps over the lazy dog " * 50,)


@pytest.fixture(scope="module")
def other_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of another tokenizer than that of the shared engine."""
    folder = tmp_path_factory.mktemp("tokenizers") / "other"
    make_tokenizer(folder, texts=TEXTS, vocab_size=400)
    return str(folder)


@pytest.fixture(scope="module")
def other_server(tiny: Callable[..., Path], other_path: str) -> Iterator[RemoteServer]:
    """A server with the tokenizer `other_path`."""
    with HttpServerEngineAdapter(
        str(tiny("qwen3")), tokenizer_path=other_path, dtype="float32", max_total_tokens=8192
    ) as adapter:
        yield remote_server_of(adapter)


def report_of(gateway: Gateway) -> Any:
    """What `/health` says about the engine."""
    headers = {"x-api-key": gateway.admin_key}
    return httpx.get(f"{gateway.url}/health", headers=headers, timeout=60.0).json()["engine"]


def problems_of(gateway: Gateway) -> dict[str, str]:
    """The problem of each server that gets no requests, by name, and an empty text for the others."""
    return {row["name"]: "" if row["admitted"] else str(row["problem"]) for row in report_of(gateway)["servers"]}


def test_a_server_with_another_tokenizer_gets_no_requests(
    shared_engine: VerlEngine, tiny: Callable[..., Path], other_server: RemoteServer, other_path: str, tmp_path: Path
) -> None:
    """Both servers have answered before the gateway knows its tokenizer, which is that of one of them.

    One server has newer weights, too: an update does not end the difference of the tokenizers, which is the one named.
    """
    shared_engine.update_weights_from_tensor(reference_model(tiny("qwen3")).state_dict())
    servers = DiscoveredServers([remote_server_of(adapter_of(shared_engine)), other_server])
    with Gateway(servers, tmp_path / "run", limits=LIMITS) as gateway:
        wait_until(lambda: is_ready(gateway.url), 60, "not ready")
        _, key = gateway.create_session("a", sampling_params=SHORT)
        assert ask(gateway.url, key).status_code == 200
        problems = sorted(problems_of(gateway).values())
        assert [bool(problem) for problem in problems] == [False, True]
        assert all(path in problems[1] for path in (str(tiny("qwen3")), other_path)), "it names both tokenizers"


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch, other_path: str) -> Iterator[threading.Event]:
    """The tokenizer `other_path` does not load before this is set: its files are on a disk that hangs."""
    load, go = AutoTokenizer.from_pretrained, threading.Event()

    def hang(path: str, **options: Any) -> Any:
        if path == other_path:
            go.wait()
        return load(path, **options)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", hang)
    monkeypatch.setattr("verl_server.gateway.engines.FIND_INTERVAL_S", 0.1)
    monkeypatch.setattr("verl_server.gateway.engines.FIND_TIMEOUT_S", 1.0)
    monkeypatch.setattr("verl_server.gateway.engines.LOAD_TIMEOUT_S", 0.1, raising=False)
    yield go
    go.set()


def test_a_server_whose_tokenizer_does_not_load_stops_neither_the_other_servers_nor_the_search(
    shared_engine: VerlEngine, other_server: RemoteServer, released: threading.Event, tmp_path: Path
) -> None:
    """The server comes while another server serves."""
    good = remote_server_of(adapter_of(shared_engine))
    found = {"good": good}
    with Gateway(DiscoveredServers(lambda: dict(found)), tmp_path, limits=LIMITS) as gateway:
        wait_until(lambda: is_ready(gateway.url), 60, "not ready")
        found["hung"] = other_server
        wait_until(lambda: "has not loaded in 0.1 s" in problems_of(gateway).get("hung", ""), 20, "it is not named")
        assert is_ready(gateway.url)
        del found["hung"]
        wait_until(lambda: list(problems_of(gateway)) == ["good"], 20, "the removed server is still listed")
        found["hung"] = other_server
        released.set()
        wait_until(lambda: "which differs from" in problems_of(gateway).get("hung", ""), 20, "it is not compared")
        _, key = gateway.create_session("a", sampling_params=SHORT)
        assert ask(gateway.url, key).status_code == 200


@pytest.mark.parametrize("is_removed", [False, True])
def test_the_gateway_takes_the_tokenizer_of_the_first_server_whose_tokenizer_loads(
    shared_engine: VerlEngine, other_server: RemoteServer, released: threading.Event, tmp_path: Path, is_removed: bool
) -> None:
    """The server that answers first has a tokenizer that does not load. `is_removed`: it ends when another comes."""
    found = {"hung": other_server}
    with Gateway(DiscoveredServers(lambda: dict(found)), tmp_path, limits=LIMITS) as gateway:
        wait_until(lambda: "took more than 1 s" in str(report_of(gateway)["problem"]), 60, "the problem is not named")
        if is_removed:
            found.clear()
        found["good"] = remote_server_of(adapter_of(shared_engine))
        wait_until(lambda: is_ready(gateway.url), 60, "not ready")
        released.set()
        if not is_removed:
            wait_until(lambda: "which differs from" in problems_of(gateway)["hung"], 20, "it is not compared")
        assert problems_of(gateway)["good"] == ""
        vocab_size = len(AutoTokenizer.from_pretrained(adapter_of(shared_engine).get_model_info()["tokenizer_path"]))
        assert len(gateway._engine.parts().renderer.tokenizer) == vocab_size
        _, key = gateway.create_session("a", sampling_params=SHORT)
        assert ask(gateway.url, key).status_code == 200


def test_tokenizers_are_compared_and_not_their_paths(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a", "copy"):
        make_tokenizer(tmp_path / name)
    make_tokenizer(tmp_path / "other", texts=TEXTS, vocab_size=400)
    lower = make_tokenizer(tmp_path / "lower")
    lower.backend_tokenizer.normalizer = Lowercase()  # the same vocabulary, and other token ids of a text
    lower.save_pretrained(tmp_path / "lower")

    def info(name: str) -> dict[str, str]:
        return {"model_path": "any", "tokenizer_path": str(tmp_path / name)}

    async def compare() -> None:
        tokenizers = ServerTokenizers("r0", info("a"))
        await tokenizers.read_first()
        await tokenizers.require_same("r1", info("copy"), 1.0)
        with pytest.raises(BadInputError, match=r"the server r2 has the tokenizer .*/other.*/a' of the server r0"):
            await tokenizers.require_same("r2", info("other"), 1.0)
        with pytest.raises(BadInputError, match=r"the server r4 has the tokenizer .*/lower"):
            await tokenizers.require_same("r4", info("lower"), 1.0)
        for since in (1.0, 2.0):
            await tokenizers.require_same("r3", info("missing"), since)

    with caplog.at_level(logging.WARNING, "verl_server.gateway"):
        asyncio.run(compare())
    named = [record for record in caplog.records if "missing" in record.getMessage()]
    assert len(named) == 1, "a tokenizer that cannot be loaded is named once"


@pytest.mark.parametrize("folder", ["first", "copy"])
def test_a_folder_is_read_again_for_a_server_that_was_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    """A server keeps the tokenizer that it has loaded at its start. Files that are the same are not read again."""
    for name in ("first", "copy"):
        make_tokenizer(tmp_path / name)
    info, loaded, load = {"model_path": str(tmp_path / folder)}, list[str](), AutoTokenizer.from_pretrained

    def count(path: str, **options: Any) -> Any:
        loaded.append(path)
        return load(path, **options)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", count)

    async def compare() -> None:
        tokenizers = ServerTokenizers("r0", {"model_path": str(tmp_path / "first")})
        await tokenizers.read_first()
        for since in (1.0, 2.0):
            await tokenizers.require_same("r1", info, since)
        make_tokenizer(tmp_path / folder, texts=TEXTS, vocab_size=400)
        await tokenizers.require_same("r1", info, 2.0)
        for _ in range(2):
            with pytest.raises(BadInputError, match="the server r1 has the tokenizer"):
                await tokenizers.require_same("r1", info, 3.0)
        with pytest.raises(BadInputError, match="the files have changed" if folder == "first" else "which differs"):
            await tokenizers.require_same("r2", info, 3.0)
        make_tokenizer(tmp_path / folder)
        await tokenizers.require_same("r1", info, 4.0)

    asyncio.run(compare())
    assert len(loaded) == (3 if folder == "first" else 4)


def test_a_server_that_comes_back_with_another_tokenizer_gets_no_requests(
    other_server: RemoteServer, other_path: str, tmp_path: Path
) -> None:
    """The server is behind a port that is closed and opened again, as by a server that is started again."""
    key = other_server.api_key
    with contextlib.ExitStack() as ports:
        url, cut = ports.enter_context(forward(other_server.base_url))
        with Gateway(DiscoveredServers([RemoteServer(url, key)]), tmp_path, limits=LIMITS) as gateway:
            wait_until(lambda: is_ready(gateway.url), 60, "not ready")
            cut()
            wait_until(lambda: not is_ready(gateway.url), 30, "the lost server is not noticed")
            make_tokenizer(Path(other_path), texts=("another text " * 50,), vocab_size=380)
            ports.enter_context(forward(other_server.base_url, int(url.rpartition(":")[2])))
            wait_until(lambda: "the files have changed" in problems_of(gateway)[url], 30, "it is not refused")
            assert not is_ready(gateway.url)


def test_a_tokenizer_that_loads_late_is_not_that_of_a_server_that_was_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files have changed since the load has begun."""
    for name in ("first", "other"):
        make_tokenizer(tmp_path / name)
    info, load, may_end = {"model_path": str(tmp_path / "other")}, AutoTokenizer.from_pretrained, threading.Event()
    has_ended = threading.Event()

    def load_slowly(path: str, **options: Any) -> Any:
        loaded = load(path, **options)
        if path == info["model_path"] and not may_end.is_set():
            assert may_end.wait(60)
            has_ended.set()
        return loaded

    async def compare() -> None:
        tokenizers = ServerTokenizers("r0", {"model_path": str(tmp_path / "first")})
        await tokenizers.read_first()
        with pytest.raises(TimeoutError, match=r"has not loaded in 0\.2 s"):
            await tokenizers.require_same("r1", info, 1.0)
        monkeypatch.setattr("verl_server.gateway.engines.LOAD_TIMEOUT_S", 60.0)
        make_tokenizer(tmp_path / "other", texts=TEXTS, vocab_size=400)
        may_end.set()
        assert await asyncio.to_thread(has_ended.wait, 60)
        with pytest.raises(BadInputError, match="the server r1 has the tokenizer"):
            await tokenizers.require_same("r1", info, 2.0)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", load_slowly)
    monkeypatch.setattr("verl_server.gateway.engines.LOAD_TIMEOUT_S", 0.2)
    asyncio.run(compare())


def test_a_tokenizer_that_changes_while_it_is_read_is_read_again(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer of the gateway and the tokenizer that servers are compared with are read one after the other."""
    folder = shutil.copytree(tiny("qwen3"), tmp_path / "model")
    make, num_calls = EngineAccess.make_renderer, 0

    def make_and_change(access: EngineAccess) -> ChatRenderer:
        nonlocal num_calls
        num_calls += 1
        renderer = make(access)
        if num_calls == 1:
            (folder / "tokenizer.json").touch()
        return renderer

    monkeypatch.setattr(EngineAccess, "make_renderer", make_and_change)
    found, probed = DiscoveredServers(dict), SimpleNamespace(infos={"r0": {"model_path": str(folder)}}, adapters={})
    probed.probe_all = lambda: asyncio.sleep(0)

    async def find() -> None:
        with pytest.raises(BadInputError, match="has changed while the gateway has read it"):
            await found._find_parts(probed)  # type: ignore[arg-type]
        await found._find_parts(probed)  # type: ignore[arg-type]

    asyncio.run(find())
    assert found.parts().renderer is not None


def test_no_code_is_executed_because_a_server_says_so(tmp_path: Path) -> None:
    """Whoever has the port of a server that has not started yet can answer in its place, and name any folder."""
    folder, marker = tmp_path / "model", tmp_path / "executed"
    make_tokenizer(folder)
    code = f"open({str(marker)!r}, 'w').close()\nfrom transformers import PreTrainedTokenizerFast as Mine\n"
    (folder / "mine.py").write_text(code)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": [None, "mine.Mine"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    info = {"model_path": str(folder), "tokenizer_path": str(folder), "trust_remote_code": True}
    with contextlib.suppress(BadInputError):
        EngineAccess(generate_nothing, info).make_renderer()
    asyncio.run(ServerTokenizers("first", info).read_first())
    assert not marker.exists()


async def generate_nothing(**_: Any) -> Any:
    raise AssertionError("nothing is generated")
