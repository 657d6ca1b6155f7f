"""A program without a server: SGLang's models on a CPU, loaded from a checkpoint, and pushed into by a real update.

For each family of models and each number of TP ranks it builds SGLang's model from checkpoint A, as a scheduler does,
pushes the tensors of checkpoint B with the updater of a trainer, and compares every tensor of the model, byte for byte,
with a model that SGLang has loaded from the files of checkpoint B. It then pushes parts of layers of A, and every other
tensor of one layer of A in an update of its own, and compares with checkpoints that are mixed in the same way. Prints a
JSON object with the differences.

Arguments: a folder for the checkpoints, and the families. The ranks are forked, so that SGLang is imported once.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from helpers import free_port
from model_families import IGNORING_FAMILY, make_family_model, save_family_model
from safetensors.torch import load_file, save_file

from verl_server.config import PauseMode
from verl_server.errors import VerlServerError
from verl_server.ranks.coordinator import RankCoordinator
from verl_server.ranks.placement import compute_placement
from verl_server.types import Json, ServerInfo
from verl_server.weights import loader
from verl_server.weights.arena import XXH3, Arena, plan_arena
from verl_server.weights.manifest import read_manifest
from verl_server.weights.transports.base import SenderSettings, message_as_named_tensors
from verl_server.weights.transports.shared_memory import Sender
from verl_server.weights.update.options import ReplayFn, Servers, UpdateOptions
from verl_server.weights.update.staged import StagedUpdater
from verl_server.weights.update.updater import EngineRanks

TP_SIZES = (1, 2)
LAYER = ".layers.1."
"""Part of the names of the tensors that partial updates have."""
FIELDS = ("q_proj", "in_proj_ba", "_a_proj", "post_attention_layernorm", "experts.1.up_proj", "experts.1.w3")
"""Parts of the names of the tensors that one partial update has. Most are a part of a parameter that SGLang fuses."""


class SGLangModel(Servers):
    """SGLang's model in this process and in the other TP ranks, as the servers of an update."""

    def __init__(self, model: Any, tp_size: int) -> None:
        from sglang.srt.model_loader.loader import DefaultModelLoader

        self._model, self._loader, self._tp_size = model, DefaultModelLoader, tp_size

    @property
    def members(self) -> Sequence[ServerInfo]:
        return [ServerInfo("model", self._tp_size)]

    def pause(self, mode: PauseMode) -> None:
        pass

    def resume(self) -> None:
        pass

    def begin_weight_update(self) -> None:
        self._on_all_ranks("restore")

    def load(self, messages: Sequence[Json], weight_version: int | None, flush_cache: bool) -> None:
        self._on_all_ranks(messages[0])

    def end_weight_update(self) -> None:
        self._on_all_ranks("postprocess")

    def published(self, version: int, whole: bool, replay: ReplayFn | None) -> None:
        self._on_all_ranks(None)

    def _on_all_ranks(self, task: Any) -> None:
        dist.broadcast_object_list([task])
        self._run(task)
        dist.barrier()

    def follow(self) -> None:
        """On the TP ranks after the first: do what the first rank does, until an update is published."""
        while True:
            tasks: list[Any] = [None]
            dist.broadcast_object_list(tasks)
            self._run(tasks[0])
            dist.barrier()
            if tasks[0] is None:
                return

    def _run(self, task: Any) -> None:
        """One step on this TP rank, as SGLang's `WeightUpdater` does it in a session in which weights are loaded."""
        if task == "restore":
            self._loader.restore_weights_before_loading(self._model, torch.device("cpu"))
        elif task == "postprocess":
            self._loader.postprocess_weights(self._model, torch.device("cpu"))
        elif task is not None:
            loader.load(self._model, message_as_named_tensors(task))


def start_tp_rank(folder: Path, rank: int, tp_size: int, port: int) -> Callable[[Path], Any]:
    """Make this process a TP rank of SGLang. Returns a function that loads SGLang's model of a checkpoint folder.

    `folder`: any checkpoint that a CPU serves; the arguments of the rank are made for it.
    """
    from sglang.benchmark import one_batch
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader import get_model
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(
        model_path=str(folder), device="cpu", dtype="bfloat16", tp_size=tp_size, max_total_tokens=4096, host="127.0.0.1"
    )
    args.resolve_once()
    world_rank = one_batch.spawn_world_rank(args, tp_rank=rank, pp_rank=0)
    one_batch.publish(args, role="scheduler", ranks=one_batch.SpawnRanks(world_rank=world_rank, gpu_id=0))
    one_batch._init_process_global_configs()
    one_batch.bootstrap.init_parallel_runtime(server_args=args, device="cpu", dist_port=port)

    def load(checkpoint: Path) -> Any:
        config = ModelConfig(str(checkpoint), dtype="bfloat16")
        one_batch.bootstrap.init_layer_runtime(model_config=config)
        return get_model(model_config=config, load_config=LoadConfig(), device_config=DeviceConfig("cpu", gpu_id=0))

    return load


def tensors_of(model: Any) -> dict[str, torch.Tensor]:
    """All tensors that a model holds: parameters, buffers, and tensors in attributes of its modules, by name."""
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    for module_name, module in model.named_modules():
        for name, value in vars(module).items():
            for index, item in enumerate(value if isinstance(value, (list, tuple)) else [value]):
                if isinstance(item, torch.Tensor):
                    tensors[f"{module_name}.{name}[{index}]"] = item
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def differences(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> list[str]:
    """What differs between two sets of tensors, bit for bit."""
    lines = [f"only one has {name}" for name in expected.keys() ^ found.keys()]
    for name in expected.keys() & found.keys():
        one, other = expected[name], found[name]
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            lines.append(f"{name}: {one.dtype} {list(one.shape)} and {other.dtype} {list(other.shape)}")
        elif not torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)):
            gap = (one.double() - other.double()).abs().max().item()
            lines.append(f"{name}: {one.dtype} {list(one.shape)} differ by up to {gap}")
    return sorted(lines)


def push(model: SGLangModel, folder: Path, *pushes: list[tuple[str, torch.Tensor]]) -> list[Any]:
    """Push tensors from a trainer of one rank into SGLang's model, in one or several updates.

    Returns the number of missing parameters of each update, or its error.
    """
    manifest = read_manifest({"model_path": str(folder), "dtype": "bfloat16"})
    layout = plan_arena(manifest.tensors)
    arena = Arena.create(layout)
    ranks = EngineRanks(RankCoordinator(0, 1, {}, 60.0), compute_placement(0, 1, 1, {}), frozenset({0}), model, 60.0)
    sender = Sender(SenderSettings(arena, layout, 60.0))
    updater = StagedUpdater(ranks, manifest, 0, layout, arena, frozenset({0}), sender, XXH3)
    try:
        options = UpdateOptions(None, verify=True, check_finite=True, pause_mode=PauseMode.RETRACT, flush_cache=True)
        outcomes: list[Any] = []
        for tensors in pushes:
            try:
                outcomes.append(updater.update(tensors, None, options).num_missing)
            except VerlServerError as error:
                outcomes.append(f"{type(error).__name__}: {error}")
        return outcomes
    finally:
        updater.close()


def checkpoints(folder: Path, families: Sequence[str]) -> dict[str, tuple[Any, Any, list[str]]]:
    """Save the checkpoints A, B and mixed of each family. Returns the models A and B, and the names of the part."""
    models: dict[str, tuple[Any, Any, list[str]]] = {}
    for family in families:
        a, b = (make_family_model(family, seed) for seed in (1, 2))
        for name, model in (("a", a), ("b", b)):
            save_family_model(model, family, folder / family / name)
        saved_a, saved_b = (load_file(folder / family / name / "model.safetensors") for name in ("a", "b"))
        layer = [name for name in saved_a if LAYER in name]
        part = [name for name in layer if any(field in name for field in FIELDS)]
        for checkpoint, names in (("part", part), ("layer", layer)):
            shutil.copytree(folder / family / "b", folder / family / checkpoint)
            mixed = saved_b | {name: saved_a[name] for name in names}
            save_file(mixed, folder / family / checkpoint / "model.safetensors", metadata={"format": "pt"})
        models[family] = (a, b, part)
    return models


def compare(
    load: Callable[[Path], Any], folder: Path, rank: int, tp_size: int, models: tuple[Any, Any, list[str]]
) -> Json:
    """On one TP rank: the differences after a whole and after a partial update of one family."""
    _, b, part = models
    expected = {name: tensors_of(load(folder / name)) for name in ("b", "part", "layer")}
    model = load(folder / "a")
    servers = SGLangModel(model, tp_size)
    saved_a = load_file(folder / "a" / "model.safetensors")
    alone = [name for name in saved_a if LAYER in name and name not in part]
    outcome: Json = {"before": len(differences(expected["b"], tensors_of(model))), "parts": [len(part), len(alone)]}
    updates: dict[str, list[list[tuple[str, torch.Tensor]]]] = {
        "b": [list(b.state_dict().items())],
        "part": [[(name, saved_a[name]) for name in part]],
        "layer": [[(name, saved_a[name])] for name in alone],
    }
    outcome["missing"] = {}
    for key, pushes in updates.items():
        outcome["missing"][key] = [update(servers, folder / "a", rank, tensors) for tensors in pushes]
        outcome[key] = differences(expected[key], tensors_of(model))
    return outcome


def update(servers: SGLangModel, folder: Path, rank: int, tensors: list[tuple[str, torch.Tensor]]) -> int:
    """One update on a TP rank. Returns the number of missing parameters, on the first rank."""
    if rank == 0:
        (outcome,) = push(servers, folder, tensors)
        if isinstance(outcome, str):
            raise RuntimeError(outcome)
        return int(outcome)
    servers.follow()
    return 0


def push_what_is_ignored(load: Callable[[Path], Any], folder: Path) -> list[Any]:
    """The outcomes of updates of a model with biases that SGLang's model class ignores."""
    model = make_family_model(IGNORING_FAMILY)
    servers = SGLangModel(load(save_family_model(model, IGNORING_FAMILY, folder)), 1)
    tensors = list(model.state_dict().items())
    biases = [(name, tensor) for name, tensor in tensors if "mlp" in name and name.endswith(".bias")]
    others = [(name, tensor) for name, tensor in tensors if name not in dict(biases)]
    return push(servers, folder, biases, others, tensors, tensors, others)


def run_rank(folder: Path, rank: int, tp_size: int, port: int, all_models: dict[str, Any], results: Path) -> None:
    """Main function of a TP rank. Writes the outcome of each family into the file `results`."""
    outcomes: dict[str, Json] = {}
    try:
        load = start_tp_rank(folder / next(iter(all_models)) / "a", rank, tp_size, port)
        if tp_size == 1:
            outcomes[IGNORING_FAMILY] = {"pushes": push_what_is_ignored(load, folder / IGNORING_FAMILY)}
        for family, models in all_models.items():
            outcomes[family] = {"error": "not finished"}
            try:
                outcomes[family] = compare(load, folder / family, rank, tp_size, models)
            except Exception:
                outcomes[family] = {"error": traceback.format_exc()}
                if tp_size > 1:
                    raise  # the other rank waits in a collective operation
    finally:
        results.write_text(json.dumps(outcomes))


def main(folder: Path, families: Sequence[str]) -> None:
    import sglang.benchmark.one_batch  # noqa: F401 - imported once, for all forks

    all_models = checkpoints(folder, families)
    outcomes: dict[str, list[Json]] = {}
    for tp_size in TP_SIZES:
        port, children = free_port(), []
        for rank in range(tp_size):
            results = folder / f"tp{tp_size}_rank{rank}.json"
            if (pid := os.fork()) == 0:
                try:
                    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(["0"] * tp_size)
                    run_rank(folder, rank, tp_size, port, all_models, results)
                except BaseException:  # noqa: BLE001 - the process ends
                    traceback.print_exc()
                finally:
                    os._exit(0)
            children.append((pid, results))
        for pid, results in children:
            os.waitpid(pid, 0)
            outcomes[f"tp{tp_size}"] = [*outcomes.get(f"tp{tp_size}", []), json.loads(results.read_text())]
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
