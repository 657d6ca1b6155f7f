"""`bench_weight_sync.py --engine vllm`: updates of a vLLM server, against one memcpy and against vLLM's own reload.

vLLM's own reload is a bare server with the minimal weight transfer backend of the conformance suite. It reads the
tensors from a safetensors file in shared memory, which is written before the time is taken.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from common import CONSOLE, Options, Target, named_after, show_targets, write_result
from safetensors.torch import save_file
from servers import ProcessLeakCheck, one_rank_mesh
from weight_sync_report import NAME, Configuration, plot, show_samples
from weight_update_methods import (
    ARENA,
    ARENA_VERIFIED,
    UpdateMethod,
    arena_and_state_dict_methods,
    memcpy_method,
)

from verl_server.conformance.other_processes import find_vllm_python

VLLM_RELOAD = "vLLM's own reload"
SERVER: dict[str, Any] = {"dtype": "bfloat16", "context_length": 2048, "max_running_requests": 4}
OPTIONS = {"dtype": "bfloat16", "max_model_len": 2048, "max_num_seqs": 4}
"""The same arguments for the bare server."""
MEMCPY_TARGET, RELOAD_TARGET = 4.0, 1.15
TARGET_MODEL = "0.5 B"

RunRounds = Callable[[list[UpdateMethod], int], dict[str, list[float]]]


def run(
    options: Options,
    machine: dict[str, Any],
    folders: Callable[[Mapping[str, Any]], Any],
    models: Mapping[str, Mapping[str, Any]],
    rounds: int,
    run_rounds: RunRounds,
) -> None:
    """Measure `models` with one TP rank, print the tables, and write the result file."""
    machine["versions"]["vllm"] = find_vllm_python(None).version
    configurations = []
    for model, sizes in models.items():
        with folders(sizes) as folder:
            started = time.monotonic()
            samples, size = _measure(folder, rounds, run_rounds)
            configurations.append(Configuration(model, 1, size, samples))
            CONSOLE.print(f"{configurations[-1].name}: {time.monotonic() - started:.0f} s", style="dim")
    targets: list[Target] = []
    for configuration in configurations:
        show_samples(configuration)
        if configuration.model == TARGET_MODEL:
            targets += _targets(configuration)
    show_targets(targets)
    options = named_after(options, NAME, f"{NAME}_vllm")
    plot(options, machine, configurations, f"vLLM {machine['versions']['vllm']}")
    write_result(
        options,
        f"{NAME} --engine vllm",
        machine,
        settings={"server_args": SERVER, "rounds": rounds},
        figures={
            each.name: {
                "bytes": each.bytes,
                "ratio_to_memcpy": {method: asdict(each.ratio(method)) for method in each.samples},
                "ratio_to_reload": {method: asdict(each.ratio(method, VLLM_RELOAD)) for method in each.samples},
            }
            for each in configurations
        },
        targets=targets,
        samples=[asdict(configuration) for configuration in configurations],
    )


def _targets(configuration: Configuration) -> list[Target]:
    name = configuration.name
    return [
        *(
            Target(f"{name}, {method}: duration over one memcpy", configuration.ratio(method).median, limit, False)
            for method, limit in ((ARENA, MEMCPY_TARGET), (ARENA_VERIFIED, MEMCPY_TARGET))
        ),
        *(
            Target(
                f"{name}, {method}: duration over vLLM's own reload",
                configuration.ratio(method, VLLM_RELOAD).median,
                RELOAD_TARGET,
                False,
            )
            for method in (ARENA, ARENA_VERIFIED)
        ),
    ]


def _measure(folder: Path, rounds: int, run_rounds: RunRounds) -> tuple[dict[str, list[float]], int]:
    from bench_weight_sync import weights_of

    from verl_server import VerlEngine
    from verl_server.conformance.systems.vllm import VllmSystem

    python = find_vllm_python(None).path
    weights = weights_of(folder)
    size = sum(tensor.nbytes for tensor in weights.values())
    leak_check = ProcessLeakCheck()
    with ExitStack() as stack:
        mesh = stack.enter_context(one_rank_mesh())
        engine = stack.enter_context(
            VerlEngine(mesh, model_path=str(folder), tp_size=1, engine_kind="vllm", server_python=python, **SERVER)
        )
        bare = stack.enter_context(closing(VllmSystem(folder, python, options=OPTIONS)))
        leak_check.record()
        shared = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="verl-bench-", dir="/dev/shm")))
        save_file(weights, shared / "weights.safetensors")
        methods = [
            memcpy_method(size),
            *arena_and_state_dict_methods(engine, weights),
            UpdateMethod(VLLM_RELOAD, lambda: bare.update_from_file(shared / "weights.safetensors", "?mode=keep")),
        ]
        torch.set_num_threads(2)
        samples = run_rounds(methods, rounds)
    leak_check.check()
    return samples, size
