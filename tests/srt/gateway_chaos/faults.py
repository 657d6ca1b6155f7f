"""Faults under load: replicas that are killed while weights are updated, and a gateway that is killed."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

from verl_server import RolloutManager, VerlEngine

ADMIN_KEY = "sk-admin-of-the-chaos-test"
START_TIMEOUT_S = 120.0


class FleetFaults:
    """Updates the weights of a fleet again and again, and kills a process of a replica while two are healthy."""

    def __init__(self, fleet: RolloutManager, engine: VerlEngine, weights: Callable[[int], Any], seed: int) -> None:
        """`weights`: the tensors of a version, as `update_weights_from_tensor` takes them."""
        self._fleet, self._engine, self._weights = fleet, engine, weights
        self._rng = random.Random(seed)
        self.num_kills = self.num_updates = 0
        self.errors = list[str]()

    @contextlib.contextmanager
    def running(self, kill_interval_s: float, update_interval_s: float) -> Iterator[None]:
        """The faults go on until the end of the block."""
        stop = threading.Event()
        threads = [
            threading.Thread(target=self._repeat, args=(self._kill, kill_interval_s, stop)),
            threading.Thread(target=self._repeat, args=(self._update, update_interval_s, stop)),
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join()

    def _repeat(self, fault: Callable[[], None], interval_s: float, stop: threading.Event) -> None:
        while not stop.wait(interval_s):
            try:
                fault()
            except Exception as error:  # noqa: BLE001 - reported as a violation
                self.errors.append(f"{fault.__name__}: {type(error).__name__}: {error}")

    def _kill(self) -> None:
        healthy = [one for one in self._fleet.status().replicas if one.state.value == "healthy" and one.pids]
        if len(healthy) < 2:
            return
        pids = self._rng.choice(healthy).pids
        assert pids is not None
        with contextlib.suppress(psutil.Error, ProcessLookupError):  # it has just ended
            victims = [
                pid for pid in pids.workers if any("scheduler" in part for part in psutil.Process(pid).cmdline())
            ]
            os.kill(self._rng.choice([pids.main, *victims]), signal.SIGKILL)
            self.num_kills += 1

    def _update(self) -> None:
        version = self._engine.weight_version + 1
        self._engine.update_weights_from_tensor(self._weights(version), weight_version=version)
        self.num_updates += 1


class GatewayProcess:
    """`verl-server gateway` in a process of its own, always with the same folder and port."""

    def __init__(self, run_dir: Path, port: int, router_url: str, router_key: str, model: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._command = [
            sys.executable, "-m", "verl_server.cli", "gateway", str(run_dir), "--router", router_url,
            "--model", str(model), "--max-context-tokens", "2000", "--port", str(port),
        ]  # fmt: skip
        self._environment = {
            **os.environ, "VERL_SERVER_API_KEY": router_key, "VERL_SERVER_GATEWAY_ADMIN_KEY": ADMIN_KEY
        }  # fmt: skip
        self._log = run_dir.parent / "gateway.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.num_kills = 0

    def start(self) -> None:
        """Start the gateway and wait until it answers. Raises RuntimeError if it ends or does not answer in time.

        After an exception, no process is left.
        """
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        try:
            self._wait_until_alive(self._process)
        except BaseException:
            self.kill()
            raise

    def _wait_until_alive(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise RuntimeError(f"the gateway ended: {self._log.read_text()[-2000:]}")
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health/liveliness", timeout=5.0).status_code == 200:
                    return
            time.sleep(0.1)
        raise RuntimeError(f"the gateway did not start in {START_TIMEOUT_S:g} s: {self._log.read_text()[-2000:]}")

    def create_session(self, session_id: str, sampling_params: Any) -> str:
        """The key of a new session."""
        reply = httpx.post(
            f"{self.url}/admin/sessions",
            json={"session_id": session_id, "sampling_params": sampling_params},
            headers={"x-api-key": ADMIN_KEY},
            timeout=30.0,
        )
        return str(reply.raise_for_status().json()["key"])

    def kill(self) -> None:
        """End the process with SIGKILL."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def kill_and_restart(self, interval_s: float, max_kills: int, stop: threading.Event) -> None:
        """Kill the gateway and start it again, until `stop` is set or the gateway was killed `max_kills` times."""
        while self.num_kills < max_kills and not stop.wait(interval_s):
            self.kill()
            self.num_kills += 1
            self.start()
