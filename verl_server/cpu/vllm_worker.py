"""The worker of a vLLM server that was forked."""

from __future__ import annotations

import os
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from verl_server.cpu import vllm_fork


class ForkedCPUWorker(CPUWorker):  # type: ignore[misc]
    """vLLM's worker on a CPU, with the OpenMP threads of a spawned worker. It changes nothing if it was spawned."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if vllm_fork.is_forking():
            vllm_fork.stop_forking()  # this process is about to start threads
            threads = vllm_fork.wanted_threads(os.environ, sorted(os.sched_getaffinity(0)))
            vllm_fork.start_threads(*threads)
        super().__init__(*args, **kwargs)
