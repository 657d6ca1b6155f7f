"""Two clients of one server: what one of them releases, the other one knows, because the server decides."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import GREEDY, wait_until

from verl_server import HttpServerEngineAdapter
from verl_server.adapter.sglang.replies import count_requests
from verl_server.config import MemoryTag
from verl_server.errors import BadInputError, NotReadyError, ServerBusyError
from verl_server.platforms import memory_hooks
from verl_server.platforms.http_hooks import RELEASED_MEMORY, add_released_memory

KV_CACHE = MemoryTag.KV_CACHE.value


@pytest.fixture
def other(adapter: HttpServerEngineAdapter) -> Iterator[HttpServerEngineAdapter]:
    """Another connection to the server of `adapter`."""
    with HttpServerEngineAdapter.attach(
        adapter.base_url, api_key=adapter.api_key, admin_api_key=adapter.admin_api_key
    ) as attached:
        yield attached


def test_one_client_releases_and_the_other_one_resumes(
    adapter: HttpServerEngineAdapter, other: HttpServerEngineAdapter
) -> None:
    expected = adapter.generate(input_ids=[1, 2], sampling_params=GREEDY)["output_ids"]
    adapter.release_memory_occupation([KV_CACHE])
    with pytest.raises(BadInputError, match="released already"):
        other.release_memory_occupation([KV_CACHE])
    with pytest.raises(NotReadyError, match="resume_memory_occupation first"):
        other.continue_generation()
    with pytest.raises(NotReadyError, match="resume_memory_occupation first"):
        other.generate(input_ids=[1, 2], sampling_params=GREEDY)
    other.resume_memory_occupation()
    for client in (other, adapter):
        assert client.generate(input_ids=[1, 2], sampling_params=GREEDY)["output_ids"] == expected
    with pytest.raises(BadInputError, match="nothing is released"):
        adapter.resume_memory_occupation()


def test_generation_does_not_continue_without_memory(
    adapter: HttpServerEngineAdapter, other: HttpServerEngineAdapter
) -> None:
    """One client releases memory between the pause of another one and the end of that pause."""
    expected = adapter.generate(input_ids=[1, 2], sampling_params=GREEDY)["output_ids"]
    adapter.pause_generation("retract")
    other.release_memory_occupation([KV_CACHE])
    adapter.continue_generation()
    replies: list[Any] = []

    def ask() -> None:
        try:
            replies.append(adapter.generate(input_ids=[1, 2], sampling_params=GREEDY)["output_ids"])
        except NotReadyError:
            replies.append("refused")

    request = threading.Thread(target=ask)
    request.start()
    request.join(1.0)
    assert replies in ([], ["refused"]), "the request waits, or the server refuses it"
    other.resume_memory_occupation()
    request.join(30.0)
    assert not request.is_alive()
    assert adapter.generate(input_ids=[1, 2], sampling_params=GREEDY)["output_ids"] == expected


def test_a_release_that_is_prepared_can_be_cancelled(
    adapter: HttpServerEngineAdapter, other: HttpServerEngineAdapter
) -> None:
    """A fleet pauses all of its servers, or none, before it releases the memory of the first one."""
    adapter.prepare_release()
    replies: list[Any] = []
    request = threading.Thread(
        target=lambda: replies.append(other.generate(input_ids=[1, 2], sampling_params=GREEDY)["output_ids"])
    )
    request.start()
    request.join(0.5)
    assert not replies, "a request that arrives later waits"
    adapter.cancel_release()
    request.join(30.0)
    assert len(replies) == 1
    long = {"max_new_tokens": 500, "ignore_eos": True}
    request = threading.Thread(target=lambda: other.generate(input_ids=[1, 2], sampling_params=long))
    request.start()
    wait_until(lambda: count_requests(adapter.get_loads()), 10.0, "the request does not run")
    with pytest.raises(ServerBusyError):
        adapter.prepare_release()
    adapter.cancel_release()
    request.join(60.0)
    assert not request.is_alive(), "it was not paused"


def test_schedulers_run_no_batch_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hooks of all platforms, with an object in place of SGLang's scheduler."""
    monkeypatch.setattr(memory_hooks, "without_batch", lambda arguments: ("nothing", arguments["running_batch"]))
    updater = SimpleNamespace(offload_tags={"weights", KV_CACHE})
    scheduler = SimpleNamespace(weight_updater=updater, server_args=SimpleNamespace(enable_dp_attention=False))
    reply = SimpleNamespace(internal_state={})
    add_released_memory(reply, SimpleNamespace(scheduler=scheduler))
    assert reply.internal_state == {RELEASED_MEMORY: [KV_CACHE, "weights"]}

    def original(_: Any, **kwargs: Any) -> str:
        return "a batch"

    def run() -> Any:
        return memory_hooks.hold_requests(original, scheduler, running_batch="running", last_batch=None)

    assert run() == ("nothing", "running")
    scheduler.server_args.enable_dp_attention = True
    assert run() == "a batch", "the ranks must call SGLang's function together"
    scheduler.server_args.enable_dp_attention = False
    updater.offload_tags.clear()
    assert run() == "a batch"
