"""A trainer and a server on two hosts: network namespaces with a slow cable, which is cut while weights travel."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers import wait_until
from hosts import two_hosts

ADDRESSES = ("10.79.0.1", "10.79.0.2")
RATE, CUT_S = "20mbit", 20.0
TRAINER = """
import json, os, sys, torch
from transformers import AutoModelForCausalLM
from verl_server import RemoteServer, VerlEngine, WeightsConfig
folder, url, host = sys.argv[1:]
remote = RemoteServer(url, os.environ["VERL_SERVER_API_KEY"], os.environ["VERL_SERVER_ADMIN_API_KEY"])
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
weights = WeightsConfig(transport="distributed", host=host)
with VerlEngine(servers=[remote], model_path=folder, dtype="float32", weights=weights) as engine:
    engine.update_weights_from_tensor(model.state_dict().items())
    print("ready", flush=True)
    result = engine.update_weights_from_tensor(model.state_dict().items())
    print(json.dumps({"version": result.weight_version, "pause_s": result.load_s}), flush=True)
"""
CLIENT = """
import json, os, sys, time
from verl_server import HttpServerEngineAdapter
adapter = HttpServerEngineAdapter.attach(sys.argv[1], api_key=os.environ["VERL_SERVER_API_KEY"])
while True:
    started = time.time()
    reply = adapter.generate(input_ids=[5, 6, 7], sampling_params={"max_new_tokens": 8, "ignore_eos": True})
    print(json.dumps([started, time.time(), reply["meta_info"]["weight_version"]]), flush=True)
"""


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    with two_hosts(ADDRESSES, RATE) as names:
        yield names


def test_a_cut_of_the_network_while_weights_travel_stops_no_server(
    hosts: tuple[str, str], tiny: Callable[..., Path], tmp_path: Path
) -> None:
    """Requests on the server's host are answered all the time, with the old weights. The update arrives later."""
    folder = str(tiny("qwen3", hidden_size=256, layers=4, vocab_size=8000))
    keys = {name: secrets.token_hex(32) for name in ("VERL_SERVER_API_KEY", "VERL_SERVER_ADMIN_API_KEY")}
    url, log = f"http://{ADDRESSES[1]}:30000", tmp_path / "server.log"
    answers = tmp_path / "answers.jsonl"

    with contextlib.ExitStack() as stack:

        def start(host: str, *command: str, output: Path) -> subprocess.Popen[bytes]:
            file = stack.enter_context(output.open("wb"))
            process = subprocess.Popen(
                ["ip", "netns", "exec", host, sys.executable, *command], stdout=file, stderr=subprocess.STDOUT,
                env={**os.environ, **keys},
            )  # fmt: skip
            stack.callback(process.wait, 60)
            stack.callback(process.terminate)
            return process

        options = ["--host", ADDRESSES[1], "--port", "30000", "--dtype", "float32", "--max-total-tokens", "4096"]
        start(hosts[1], "-m", "verl_server.cli", "launch", folder, *options, output=log)
        wait_until(lambda: "eady" in log.read_text(), 120.0, "the server did not start")
        trainer_log = tmp_path / "trainer.log"
        arguments = [folder, url, ADDRESSES[0]]
        trainer = start(hosts[0], "-c", TRAINER, *arguments, output=trainer_log)
        wait_until(lambda: "ready\n" in trainer_log.read_text(), 120.0, "no first update")
        start(hosts[1], "-c", CLIENT, url, output=answers)
        time.sleep(1.5)  # the second update takes some seconds
        subprocess.run(["ip", "-n", hosts[0], "link", "set", "e0", "down"], check=True)
        time.sleep(CUT_S)
        subprocess.run(["ip", "-n", hosts[0], "link", "set", "e0", "up"], check=True)
        assert trainer.wait(150) == 0, trainer_log.read_text()[-3000:]
        time.sleep(1.0)
    result = json.loads(trainer_log.read_text().splitlines()[-1])
    assert result["version"] == 2
    replies = [json.loads(line) for line in answers.read_text().splitlines() if line.startswith("[")]
    assert {version for *_, version in replies} == {1, 2}
    before = [begin for begin, _, version in replies if version == 1]
    assert before[-1] - before[0] > 0.8 * CUT_S, "the update was not cut"
    assert max(end - begin for begin, end, _ in replies) < 5.0, "a request waited for the network"
    assert result["pause_s"] < 5.0
