"""Measures weight updates of a model of a given size with random weights, from tensors on the trainer's device.

Every method updates the same server. Each method records its result at once, so that a crash loses only the methods
that follow. A method that fails records the reason, and the next method is tried. SGLang's own methods come last: a
failure of theirs can end the server.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from servers import free_port, one_rank_mesh
from weight_update_methods import timed

from gpu_proof.settings import METHOD, device, record, server_args
from verl_server.tiny import make_config, make_tokenizer

#: Sizes of released models: Qwen2.5-1.5B and Qwen3-8B. "0.01B" is for rehearsals.
MODELS: Mapping[str, Mapping[str, Any]] = {
    "0.01B": {"architecture": "qwen2", "hidden_size": 256, "layers": 4, "heads": 4, "kv_heads": 2,
              "intermediate_size": 1024, "vocab_size": 8000, "tie_word_embeddings": True},
    "1.5B": {"architecture": "qwen2", "hidden_size": 1536, "layers": 28, "heads": 12, "kv_heads": 2,
             "intermediate_size": 8960, "vocab_size": 151936, "tie_word_embeddings": True},
    "8B": {"architecture": "qwen3", "hidden_size": 4096, "layers": 36, "heads": 32, "kv_heads": 8,
           "intermediate_size": 12288, "vocab_size": 151936, "tie_word_embeddings": False},
}  # fmt: skip
DEVICE_COPY = "copy on the device"
TRANSPORTS = ("cuda_ipc", "shared_memory", "buckets")
SGLANG_BUCKET_BYTES = 1 << 30
GROUP_TIMEOUT_S = 40.0
"""Seconds for SGLang and the trainer to form a process group, and for each of its broadcasts."""


class Measurement:
    """The methods that are measured, one after the other, until the time is over."""

    def __init__(self, size: str, num_bytes: int, rounds: int, deadline: float) -> None:
        self._size, self._num_bytes, self._rounds, self._deadline = size, num_bytes, rounds, deadline

    def run(self, method: str, update: Callable[[], object]) -> None:
        """Measure `update` after one call that is not measured. Its first call's duration is recorded as well."""
        if time.monotonic() > self._deadline:
            record(METHOD, size=self._size, method=method, status="not run", reason="the time of the item is over")
            return
        seconds: list[float] = []
        fields = {"size": self._size, "method": method, "bytes": self._num_bytes}
        try:
            first_s = timed(update)
            while len(seconds) < self._rounds and (not seconds or time.monotonic() < self._deadline):
                seconds.append(round(timed(update), 5))
        except Exception as error:  # noqa: BLE001 - the reason is recorded, and the next method is measured
            reason = f"{type(error).__name__}: {error}"[:1500]
            record(METHOD, **fields, status="failed", reason=reason, seconds=seconds)
        else:
            record(METHOD, **fields, status="ran", first_s=round(first_s, 5), seconds=seconds)


def synchronize() -> None:
    """Wait for the device."""
    if device() == "cuda":
        torch.cuda.synchronize()


@contextmanager
def model_folder(size: str) -> Iterator[str]:
    """A folder with the configuration and the tokenizer of a model, and without weights."""
    with tempfile.TemporaryDirectory(prefix="gpu-proof-") as folder:
        config = make_config(**{**MODELS[size], "dtype": "bfloat16"})
        config.architectures = [f"{str(MODELS[size]['architecture']).capitalize()}ForCausalLM"]
        config.save_pretrained(folder)
        make_tokenizer(Path(folder))
        yield folder


def random_weights(folder: str, args: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Random tensors on the trainer's device, with the names and shapes that the server takes."""
    from verl_server.weights.manifest import read_manifest

    manifest = read_manifest({**args, "model_path": folder})
    generator = torch.Generator(device()).manual_seed(0)
    return {
        name: torch.randn(spec.shape, dtype=torch.bfloat16, device=device(), generator=generator).mul_(0.02)
        for name, spec in manifest.tensors.items()
        if name in manifest.required
    }


def measure(size: str, rounds: int, budget_s: float) -> None:
    from verl_server import RemoteServer, VerlEngine, WeightsConfig

    deadline = time.monotonic() + budget_s
    args = server_args(load_format="dummy", dtype="bfloat16", max_total_tokens=4096)
    if device() == "cuda":
        args["disable_cuda_graph"] = True
    with ExitStack() as stack:
        folder = stack.enter_context(model_folder(size))
        mesh = stack.enter_context(one_rank_mesh())
        started = time.monotonic()
        first = stack.enter_context(
            VerlEngine(mesh, model_path=folder, tp_size=1, weights=WeightsConfig(transport="buckets"), **args)
        )
        record("server", size=size, start_s=round(time.monotonic() - started, 1))
        weights = random_weights(folder, args)
        measurement = Measurement(size, sum(tensor.nbytes for tensor in weights.values()), rounds, deadline)
        measure_copy(measurement, weights)
        assert first.adapter is not None
        keys = first.adapter.server_args
        server = RemoteServer(first.adapter.base_url, keys["api_key"], keys["admin_api_key"])
        for transport in TRANSPORTS:
            if transport == "cuda_ipc" and device() != "cuda":
                record(METHOD, size=size, method=transport, status="not run", reason="needs an NVIDIA GPU")
                continue

            def start(transport: str = transport) -> Any:
                config = WeightsConfig(transport=transport)
                return VerlEngine(mesh, servers=[server], model_path=folder, weights=config, **args)

            measure_transport(measurement, size, transport, start, weights)
        measure_sglang(measurement, first.adapter, weights)


def measure_copy(measurement: Measurement, weights: Mapping[str, torch.Tensor]) -> None:
    """The lower bound: a copy of all tensors on the trainer's device, into memory that was written before."""
    targets = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}

    def copy() -> None:
        for name, tensor in weights.items():
            targets[name].copy_(tensor)
        synchronize()

    measurement.run(DEVICE_COPY, copy)
    targets.clear()
    if device() == "cuda":
        torch.cuda.empty_cache()


def measure_transport(
    measurement: Measurement,
    size: str,
    transport: str,
    start: Callable[[], Any],
    weights: Mapping[str, torch.Tensor],
) -> None:
    """Updates by a `VerlEngine` through one transport, without and with verification."""
    try:
        started = time.monotonic()
        engine = start()
    except Exception as error:  # noqa: BLE001 - the reason is recorded, and the next transport is measured
        record(METHOD, size=size, method=transport, status="failed", reason=f"{type(error).__name__}: {error}"[:1500])
        return
    with engine:
        record("engine", size=size, transport=transport, start_s=round(time.monotonic() - started, 2))
        for verify in (False, True):
            parts: list[Any] = []

            def update(verify: bool = verify, parts: list[Any] = parts) -> None:
                parts.append(engine.update_weights_from_tensor(weights.items(), verify=verify))

            measurement.run(f"{transport}, verified" if verify else transport, update)
            if parts:
                last = parts[-1]
                record("parts", size=size, transport=transport, verify=verify, gather_s=round(last.gather_s, 5),
                       load_s=round(last.load_s, 5), staging_bytes=last.staging_bytes)  # fmt: skip


# -- SGLang's own methods ----------------------------------------------------------------------------


def measure_sglang(measurement: Measurement, adapter: Any, weights: Mapping[str, torch.Tensor]) -> None:
    """SGLang's methods on the same server: all tensors in one call, buckets, and broadcasts.

    Each is one whole update as ours is: pause, session, load, session, continue.
    """
    if device() == "cuda":
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        monkey_patch_torch_reductions()
    else:  # the server ends with torch's default strategy
        torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]

    def whole_update(load: Callable[[], None]) -> Callable[[], None]:
        def update() -> None:
            adapter.pause_generation("retract")
            adapter.begin_weight_update()
            load()
            adapter.end_weight_update()
            adapter.continue_generation()
            synchronize()

        return update

    measurement.run("SGLang's tensors, one call", whole_update(lambda: _send_tensors(adapter, weights)))
    measurement.run("SGLang's buckets of 1 GiB", whole_update(lambda: _send_buckets(adapter, weights)))
    for backend in ("gloo", "nccl") if device() == "cuda" else ("gloo",):
        group: list[Any] = []

        def broadcast(backend: str = backend, group: list[Any] = group) -> None:
            if not group:  # the first call, which is not measured
                group.append(_form_group(adapter, backend))
            whole_update(lambda: _broadcast(adapter, weights, group[0], backend))()

        measurement.run(f"SGLang's broadcasts, {backend}", broadcast)


def _serialize(value: Any) -> str:
    from sglang.srt.utils import MultiprocessingSerializer

    return str(MultiprocessingSerializer.serialize(value, output_str=True))


def _send_tensors(adapter: Any, weights: Mapping[str, torch.Tensor]) -> None:
    adapter.update_weights_from_tensor([_serialize(list(weights.items()))])


def _send_buckets(adapter: Any, weights: Mapping[str, torch.Tensor]) -> None:
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    def send(tensors: list[tuple[str, torch.Tensor]]) -> None:
        bucket = FlattenedTensorBucket(named_tensors=tensors)
        wire = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
        adapter.update_weights_from_tensor([_serialize(wire)], load_format="flattened_bucket", flush_cache=False)

    pending: list[tuple[str, torch.Tensor]] = []
    num_bytes = 0
    for name, tensor in weights.items():
        if pending and num_bytes + tensor.nbytes > SGLANG_BUCKET_BYTES:
            send(pending)
            pending, num_bytes = [], 0
        pending.append((name, tensor))
        num_bytes += tensor.nbytes
    send(pending)
    adapter.flush_cache()


def _form_group(adapter: Any, backend: str) -> Any:
    """The trainer's process group with the server, formed while the server joins it."""
    from datetime import timedelta

    from sglang.srt.utils import init_custom_process_group

    port, name = free_port(), f"gpu_proof_{backend}"
    errors: list[BaseException] = []

    def join() -> None:
        try:
            adapter.init_weights_update_group("127.0.0.1", port, 1, 2, name, backend)
        except BaseException as error:  # noqa: BLE001 - raised by the waiting thread
            errors.append(error)

    thread = threading.Thread(target=join, daemon=True)
    thread.start()
    group = init_custom_process_group(
        backend=backend, init_method=f"tcp://127.0.0.1:{port}", world_size=2, rank=0, group_name=name,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
    )  # fmt: skip
    thread.join(GROUP_TIMEOUT_S)
    if errors:
        raise errors[0]
    return group


def _broadcast(adapter: Any, weights: Mapping[str, torch.Tensor], group: Any, backend: str) -> None:
    import torch.distributed as dist

    errors: list[BaseException] = []

    def receive() -> None:
        try:
            adapter.update_weights_from_distributed(
                list(weights), [tensor.dtype for tensor in weights.values()],
                [list(tensor.shape) for tensor in weights.values()], f"gpu_proof_{backend}",
            )  # fmt: skip
        except BaseException as error:  # noqa: BLE001 - raised by the waiting thread
            errors.append(error)

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    for tensor in weights.values():
        dist.broadcast(tensor, src=0, group=group)
    synchronize()
    thread.join(GROUP_TIMEOUT_S)
    if errors:
        raise errors[0]
    if thread.is_alive():
        raise TimeoutError(f"the server did not receive the broadcasts within {GROUP_TIMEOUT_S:g} s")


def main() -> None:
    parser = argparse.ArgumentParser(prog="gpu_proof.weight_sync", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=sorted(MODELS), required=True, help="size of the model")
    parser.add_argument("--rounds", type=int, default=5, help="measured updates of each method (default %(default)s)")
    parser.add_argument("--budget-s", type=float, default=120.0, help="seconds for the item (default %(default)g)")
    options = parser.parse_args()
    measure(options.size, options.rounds, options.budget_s)


if __name__ == "__main__":
    main()
