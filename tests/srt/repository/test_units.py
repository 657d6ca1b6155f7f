"""Units without a server: layouts, shards, names, manifests, errors, checksums, patches, and the order of imports."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import copy
import graphlib
import inspect
import itertools
import json
import mmap
import os
import re
import socket
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import verl_server
from verl_server import HttpServerEngineAdapter, Timeouts, errors
from verl_server.adapter.sglang.server_arguments import complete_server_args
from verl_server.agent import RolloutLimits, Task
from verl_server.errors import BadInputError
from verl_server.ranks import placement as machine
from verl_server.ranks.channel import connect_ranks
from verl_server.ranks.coordinator import to_peer_wire
from verl_server.ranks.placement import compute_placement, is_loopback, reachable_address, spans_machines
from verl_server.router.client import RouterClient
from verl_server.server.environment import inherited_environment
from verl_server.server.launch import PortReservation, join_host_port
from verl_server.server.process import WARDEN_SCRIPT
from verl_server.server.warden.warden import BoundedLog
from verl_server.threads import call_in_thread
from verl_server.types import ServerInfo, TensorSpec
from verl_server.validation import require_whole_number
from verl_server.weights.arena import (
    ALIGNMENT,
    TABLE_OFFSET,
    Arena,
    SharedWords,
    compute_checksum,
    order_memory_accesses,
    plan_arena,
    positional_sum,
    tensor_bytes,
)
from verl_server.weights.loader import Coverage, ReadTensors, load_weights
from verl_server.weights.transports import delta, shared_memory
from verl_server.weights.transports.base import SenderSettings, UpdateAttempt
from verl_server.weights.transports.distributed import ReceiverPlacement, group_whole_tensors, split_into_chunks
from verl_server.weights.update.source import shard_slices

PACKAGE = Path(verl_server.__file__).parent
PARAMETER = torch.zeros(2, 3)
"""A parameter that tensors of an update are copied to."""
#: Packages from top to bottom. A package imports only from those below it (ARCHITECTURE.md).
PACKAGES = [
    "cli",
    "conformance",
    "demo",
    "doctor",
    "gateway",
    "cpu",
    "integrations",
    "ray",
    "training",
    "agent",
    "trajectory",
    "rollout",
    "router",
    "engine",
    "vllm_plugin",
    "weights",
    "ranks",
    "adapter",
    "server",
    "platforms",
]
SHARED_MODULES = [
    "types",
    "config",
    "errors",
    "validation",
    "threads",
    "lazy_exports",
    "tracing",
    "pretrained",
]
UNRESTRICTED = ["tiny", "__init__", "__main__"]
#: Files below `cpu/` that import it. The docstring of `cpu/` says when they do.
CPU_SWITCHES = {
    "integrations/trl/__init__.py", "integrations/verl/plugin.py", "platforms/__init__.py", "server/launch.py",
    "vllm_plugin/weights.py",
}  # fmt: skip


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("verl_server."):
            found.add((node.module or "").split(".")[1])
        elif isinstance(node, ast.Import):
            found.update(alias.name.split(".")[1] for alias in node.names if alias.name.startswith("verl_server."))
    return found


def _imported_modules(path: Path) -> set[str]:
    """Modules of the package that a file imports, also inside functions and for type checkers."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("verl_server"):
            assert node.module is not None
            found.update(_as_module(node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names if alias.name.startswith("verl_server."))
    return found


def _as_module(package: str, name: str) -> str:
    """The module of `from package import name`: the submodule of that name, or the package itself."""
    folder = PACKAGE.parent.joinpath(*package.split("."))
    is_module = (folder / f"{name}.py").exists() or (folder / name / "__init__.py").exists()
    return f"{package}.{name}" if is_module else package


def _module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def test_imports_go_one_way() -> None:
    for path in PACKAGE.rglob("*.py"):
        package = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if package in UNRESTRICTED:
            continue
        allowed = set(SHARED_MODULES + UNRESTRICTED)
        if package in PACKAGES:
            allowed.update(PACKAGES[PACKAGES.index(package) :])
        else:
            assert package in SHARED_MODULES, f"{path}: ARCHITECTURE.md does not name this package"
        imported = _imports(path)
        if str(path.relative_to(PACKAGE)) in CPU_SWITCHES:
            imported.discard("cpu")
        assert imported <= allowed, f"{path} imports upwards: {imported - allowed}"


def test_a_server_with_an_accelerator_imports_nothing_of_the_cpu_folder() -> None:
    """`cpu/` is imported inside of functions, except by trainers of TRL, which have a public name from it."""
    for switch in sorted(CPU_SWITCHES - {"integrations/trl/__init__.py"}):
        body = ast.parse((PACKAGE / switch).read_text()).body
        imported = {node.module or "" for node in body if isinstance(node, ast.ImportFrom)}
        assert not any(name.startswith("verl_server.cpu") for name in imported), switch


def test_no_import_cycles() -> None:
    """Neither files nor the entries (files and folders) of any folder import each other in a cycle.

    The package itself is left out: it has the public names, and `__version__`, which a server checks.
    """
    imports = {_module_of(path): _imported_modules(path) - {"verl_server"} for path in PACKAGE.rglob("*.py")}
    _require_no_cycle(imports)
    for folder in {path.parent for path in PACKAGE.rglob("*.py")} - {PACKAGE}:
        prefix = f"{_module_of(folder)}."
        entries: dict[str, set[str]] = {}
        for module, imported in imports.items():
            if module.startswith(prefix):
                targets = entries.setdefault(module.removeprefix(prefix).split(".")[0], set())
                targets.update(name.removeprefix(prefix).split(".")[0] for name in imported if name.startswith(prefix))
        _require_no_cycle({entry: targets - {entry} for entry, targets in entries.items()})


def _require_no_cycle(imports: dict[str, set[str]]) -> None:
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"these import each other in a cycle: {error.args[1]}")


@pytest.mark.parametrize("module", ["adapter.blocking", "cli.app", "gateway", "router.process.router_main"])
def test_processes_without_tensors_import_no_torch(module: str) -> None:
    """Torch takes two seconds and 200 MB."""
    code = f"import sys, verl_server.{module}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_lists_of_the_files_of_a_folder_are_complete() -> None:
    """The docstring of a folder can have a line for each file: its name, at least one space, and what it contains."""
    listed = {}
    for path in PACKAGE.rglob("__init__.py"):
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        if names := re.findall(r"^(\w+\.py) ", docstring, re.MULTILINE):
            listed[path.parent] = names
    assert listed, "no folder lists its files"
    for folder, names in listed.items():
        files = [path.name for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert sorted(names) == sorted(files), f"{folder}/__init__.py must list the files of the folder"


def test_the_cpu_folder_names_the_files_that_import_it() -> None:
    docstring = ast.get_docstring(ast.parse((PACKAGE / "cpu/__init__.py").read_text())) or ""
    named = set(re.findall(r"`(\S+)`", docstring))
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name != "cpu" and any(name.startswith("verl_server.cpu") for name in _imported_modules(path)):
            file = path.relative_to(PACKAGE)
            assert named & {str(file), f"{file.parent}/"}, file
    for path in named:
        assert "/" not in path or (PACKAGE / path).exists() or (PACKAGE.parent / path).exists(), path


def test_every_error_keeps_its_type_and_details_between_ranks() -> None:
    classes = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, errors.VerlServerError)]
    assert len(classes) > 10
    for cls in classes:
        sent = cls("what happened", url="http://x", log_tail="end of the log")
        received = errors.from_wire(errors.to_wire(sent))
        assert type(received) is cls
        assert (received.message, received.details) == (sent.message, sent.details)
        assert "end of the log" in str(received)


def test_a_foreign_exception_keeps_its_type_name() -> None:
    """In samples and session files. Between ranks it is a PeerError that names the failed rank."""
    wire = errors.to_wire(OSError("disk"))
    assert wire == {"type": "OSError", "message": "disk", "details": {}}
    foreign = errors.from_wire(wire)
    assert type(foreign) is errors.VerlServerError
    assert foreign.message == "OSError: disk"
    between_ranks = errors.from_wire(to_peer_wire(OSError("disk"), 3))
    assert type(between_ranks) is errors.PeerError
    assert "rank 3" in between_ranks.message
    assert "OSError: disk" in between_ranks.message
    assert between_ranks.details == {"ranks": [3]}
    own = errors.BadInputError("bad", name="x")
    assert to_peer_wire(own, 3) == errors.to_wire(own)


@settings(max_examples=200)
@given(st.data())
def test_shards_cover_a_tensor_exactly_once(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    mesh = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    dims = [data.draw(st.one_of(st.none(), st.integers(0, len(shape) - 1))) for _ in mesh]
    cover = torch.zeros(shape)
    for coordinate in torch.cartesian_prod(*[torch.arange(n) for n in mesh]).reshape(-1, len(mesh)).tolist():
        if all(index == 0 for index, dim in zip(coordinate, dims, strict=True) if dim is None):
            cover[shard_slices(shape, mesh, coordinate, dims)] += 1
    assert torch.equal(cover, torch.ones(shape))


def test_shards_equal_the_parts_of_torch_chunk() -> None:
    whole = torch.arange(7 * 5).reshape(7, 5)
    for parts in (1, 2, 3, 4, 7):
        for i, chunk in enumerate(whole.chunk(parts, dim=0)):
            assert torch.equal(whole[shard_slices((7, 5), (parts,), (i,), (0,))], chunk)


@settings(max_examples=50)
@given(st.lists(st.lists(st.integers(0, 40), max_size=3), min_size=1, max_size=12))
def test_layout_has_no_overlap(shapes: list[list[int]]) -> None:
    tensors = {f"t{i}": TensorSpec(tuple(shape), "bfloat16") for i, shape in enumerate(shapes)}
    layout = plan_arena(tensors)
    end = TABLE_OFFSET + len(layout.table(tensors))
    for name, spec in tensors.items():
        slot = layout.slots[name]
        assert slot.offset >= end
        assert slot.offset % ALIGNMENT == 0
        end = slot.offset + tensor_bytes(spec)
    assert layout.size_bytes >= end


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 300)), min_size=1, max_size=30), st.integers(1, 1000))
def test_broadcast_ranges_contain_whole_tensors_only(gaps_and_sizes: list[tuple[int, int]], limit: int) -> None:
    tensor_ranges, offset = [], 0
    for gap, size in gaps_and_sizes:
        tensor_ranges.append((offset + gap, offset + gap + size))
        offset += gap + size
    found = group_whole_tensors(tensor_ranges, limit)
    assert sum(count for _, _, count in found) == len(tensor_ranges)
    taken = 0
    for start, stop, count in found:
        inside = tensor_ranges[taken : taken + count]
        assert (inside[0][0], inside[-1][1]) == (start, stop)
        assert stop - start <= limit or count == 1
        taken += count


def test_all_mappings_of_an_arena_share_its_memory() -> None:
    layout = plan_arena({"a": TensorSpec((3, 4), "float32"), "b": TensorSpec((), "bfloat16")})
    mine = Arena.create(layout)
    other = Arena.open(mine.location, layout)
    mine.tensor("a").copy_(torch.arange(12.0).view(3, 4))
    mine.tensor("b").fill_(2.5)
    assert torch.equal(other.tensor("a"), torch.arange(12.0).view(3, 4))
    assert other.tensor("b").item() == 2.5
    assert mine.reports.read(0, "x", 0) is None
    other.close()
    mine.close()


def test_a_word_is_written_after_and_read_before_everything_that_it_speaks_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On processors that change the order of reads and writes. What a process finds then cannot be tested on x86-64."""
    memory = mmap.mmap(-1, 4096)
    words, at_the_barrier = SharedWords(memory, 8, 2), []
    monkeypatch.setattr("verl_server.weights.arena.order_memory_accesses", lambda: at_the_barrier.append(memory[16:24]))
    words[1] = 2**64 - 1
    assert at_the_barrier == [bytes(8)], "before the word is written"
    assert words[1] == 2**64 - 1
    assert memory[:24] == bytes(16) + b"\xff" * 8
    assert len(at_the_barrier) == 2
    words.release()
    memory.close()
    order_memory_accesses()


def test_placement() -> None:
    first, second = (compute_placement(rank, 2, 2, {}) for rank in (0, 1))
    assert (first.node_rank, second.node_rank) == (0, 1)
    assert first.is_node_leader
    assert second.is_node_leader
    assert compute_placement(1, 2, 1, {}).is_node_leader is False
    assert compute_placement(1, 2, 1, {"tp_size": 1}).tp_size == 1
    with pytest.raises(errors.BadInputError):
        compute_placement(0, 3, 2, {})


@pytest.mark.parametrize(
    ("variables", "ranks", "expected"),
    [
        ({"MASTER_ADDR": "10.1.2.3", "LOCAL_WORLD_SIZE": "8"}, range(16), True),
        ({"MASTER_ADDR": "10.1.2.3", "LOCAL_WORLD_SIZE": "8"}, range(8, 16), False),
        ({"MASTER_ADDR": "10.1.2.3", "LOCAL_WORLD_SIZE": "8"}, [6, 7, 8, 9], True),
        ({"MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": "1"}, range(2), False),
        ({"MASTER_ADDR": "10.1.2.3"}, range(2), None),
        ({}, range(2), False),
    ],
)
def test_trainer_ranks_on_several_machines(
    variables: dict[str, str], ranks: Any, expected: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank then listens on an address that other machines can reach."""
    for name in ("MASTER_ADDR", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert spans_machines(ranks) is expected
    try:
        reachable = reachable_address()
    except errors.BadInputError:  # this machine has no network
        reachable = "127.0.0.1"
    told: list[Any] = []
    with pytest.raises(errors.PeerError):
        connect_ranks(0, 2, told.append, spans_machines(ranks), 0.01)
    assert told[0][0] == ("127.0.0.1" if expected is False else reachable)


@pytest.mark.parametrize("master", [None, socket.gethostname(), "no-such-machine.invalid", "192.0.2.77"])
def test_the_address_for_other_nodes_is_no_loopback_address(
    master: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of a machine is often a loopback address on that machine, and another address elsewhere."""
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    if master is not None:
        monkeypatch.setenv("MASTER_ADDR", master)
    with contextlib.suppress(errors.BadInputError):  # this machine has no network
        assert not is_loopback(reachable_address())
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert reachable_address() == "127.0.0.1", "all nodes are on this machine"


def test_all_ranks_are_told_that_the_first_rank_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "no-such-machine.invalid")
    monkeypatch.setattr(machine, "ROUTED_PEERS", ())
    told: list[Any] = []
    for rank, broadcast in ((0, told.append), (1, lambda _: told[0])):
        with pytest.raises(errors.BadInputError, match="pass dist_init_addr, and set MASTER_ADDR to an address that"):
            connect_ranks(rank, 2, broadcast, True, 0.01)


def test_every_error_can_be_sent_as_json() -> None:
    error = errors.BadInputError("no file caf\udce9", value={1}, path="caf\udce9", number=2**70, ranks=[1])
    wire = errors.to_wire(error)
    assert orjson.loads(orjson.dumps(wire)) == wire
    assert wire["message"] == "no file caf\\udce9"
    details = {"value": "{1}", "path": "caf\\udce9", "number": str(2**70), "ranks": [1]}
    assert wire["details"] == details
    assert errors.to_wire(ValueError("caf\udce9"))["message"] == "caf\\udce9"
    assert errors.from_wire(wire).details == details


def test_a_reserved_port_is_refused_to_other_sockets_but_can_be_bound_with_reuse() -> None:
    reservation = PortReservation("127.0.0.1")
    with pytest.raises(OSError, match="in use"), socket.socket() as other:
        other.bind(("127.0.0.1", reservation.port))
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", reservation.port))
        server.listen()
    reservation.release()
    assert join_host_port("::1", 80) == "[::1]:80"


def test_log_is_bounded_and_keeps_the_tail(tmp_path: Path) -> None:
    log = BoundedLog(str(tmp_path / "log"), limit_bytes=100_000, secrets=["open sesame"])
    log.write(b"key='open ses")
    log.write(b"ame' and more\n")
    assert log.tail() == "key='***' and more\n"
    for i in range(20_000):
        log.write(b"line %d\n" % i)
    log.close()
    assert log.tail().endswith("line 19999\n")
    assert len(log.tail()) <= 32 * 1024
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 250_000


def test_log_hides_no_short_secret(tmp_path: Path) -> None:
    """Otherwise a key of one letter would replace this letter in the whole log."""
    log = BoundedLog(str(tmp_path / "log"), limit_bytes=100_000, secrets=["a", "seven77", "eight888"])
    log.write(b"a seven77 eight888\n")
    log.close()
    assert log.tail() == "a seven77 ***\n"


def test_log_hides_secrets_as_texts_print_them(tmp_path: Path) -> None:
    key = "eight\\888\"'key"
    log = BoundedLog(str(tmp_path / "log"), limit_bytes=100_000, secrets=[key])
    log.write(f"{key} {key!r} {json.dumps(key)} {[repr(key)]!r}\n".encode())
    log.close()
    assert "888" not in log.tail()


@pytest.mark.parametrize(
    "key", ["a key of ours\r", "a-key-of-ours\n", "schl\u00fcssel-der-maschine", "a-key\x00of-ours"]
)
def test_a_key_that_no_header_can_carry_is_refused_by_name(key: str) -> None:
    for make in (
        lambda: RouterClient("http://127.0.0.1:1", key),
        lambda: HttpServerEngineAdapter.attach("http://127.0.0.1:1", api_key=key),
        lambda: complete_server_args({"model_path": "Qwen/Qwen3-0.6B", "api_key": key}),
    ):
        with pytest.raises(BadInputError, match=r"api_key must be a string of .*printable ASCII") as raised:
            make()
        assert key.strip() not in str(raised.value)


@pytest.mark.parametrize(
    ("use", "is_read"),
    [
        (lambda t: PARAMETER.copy_(t), True),
        (lambda t: PARAMETER.__setitem__(slice(None), t), True),
        (lambda t: [row for _, row in enumerate(t)], True),
        (lambda t: torch.split(t, 1), True),
        (lambda t: t[[0]].float(), True),
        (lambda t: t.numpy(), True),
        (lambda t: np.asarray(t), True),
        (lambda t: copy.deepcopy(t) + 1, True),
        (lambda t: t.tolist(), True),
        (lambda t: t.untyped_storage(), True),
        (lambda t: t.data_ptr(), True),
        (lambda t: t[0, 0].item(), True),
        (lambda t: (t.shape, t.size(0), t.dim(), t.stride(), len(t), t.dtype, t.device, t.is_contiguous()), False),
        (lambda t: (f"{t.shape} of {t}", t.numel(), t.element_size(), t.is_floating_point(), t.type()), False),
    ],
    ids=[
        "copy", "assignment", "rows", "split", "list of indices", "numpy", "asarray", "deepcopy", "list", "storage",
        "address", "item", "sizes", "text",
    ],
)  # fmt: skip
def test_a_tensor_is_read_when_its_values_are_used(use: Callable[[torch.Tensor], Any], is_read: bool) -> None:
    """In the ways of the loaders of SGLang's and vLLM's models. A size alone is no value."""
    read = ReadTensors()
    use(read.watch("layers.0.weight", torch.ones(2, 3)))
    assert read.unread() == ([] if is_read else ["layers.0.weight"])


@pytest.mark.parametrize("use", [int, bool, torch.Tensor.item, range], ids=["int", "bool", "item", "range"])
def test_a_whole_number_is_read(use: Callable[[torch.Tensor], Any]) -> None:
    read = ReadTensors()
    use(read.watch("layers.0.bits", torch.tensor(4)))
    assert read.unread() == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 2, 7])
def test_coverage_names_unwritten_parameters_and_restores_them(dtype: torch.dtype, width: int) -> None:
    model: Any = torch.nn.ModuleDict({"whole": torch.nn.Linear(width, 3), "rows": torch.nn.Linear(width, 3)}).to(dtype)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    coverage = Coverage(model)
    with torch.no_grad():
        model["whole"].weight.copy_(torch.ones(3, width))
        model["whole"].bias.copy_(torch.ones(3))
        model["rows"].weight[:2].copy_(torch.ones(2, width))
    assert coverage.remove_marks() == ["rows.weight", "rows.bias"]
    assert torch.equal(model["whole"].weight.data, torch.ones(3, width, dtype=dtype))
    assert torch.equal(model["rows"].weight.data[2], before["rows.weight"][2])
    assert torch.equal(model["rows"].bias.data, before["rows.bias"])


class _FailingLinear(torch.nn.Linear):
    """Loads the first tensor and then fails, as a model class does for a shape that it cannot load."""

    def load_weights(self, tensors: Any) -> None:
        _, first = next(iter(tensors))
        self.weight.data.copy_(first)
        raise ValueError("cannot take the second")


def test_a_failed_load_leaves_no_mark_in_the_model() -> None:
    layout = plan_arena({"weight": TensorSpec((3, 4), "float32"), "bias": TensorSpec((3,), "float32")})
    arena = Arena.create(layout)
    arena.tensor("weight").fill_(2.0)
    arena.write_table(["weight", "bias"])
    model, update = _FailingLinear(4, 3), UpdateAttempt("x", ["weight", "bias"], True, [ServerInfo("a", 1)])
    bias = model.bias.data.clone()
    sender = shared_memory.Sender(SenderSettings(arena, layout, 1.0))
    report, _ = load_weights(shared_memory.Receiver(sender.loader_message(update, 0), 0), model, "x", verify=True)
    assert not report.ok
    assert "the second" in str(report.error)
    assert torch.equal(model.weight.data, torch.full((3, 4), 2.0))
    assert torch.equal(model.bias.data, bias)
    arena.close()


class _AddsOneInPlace(torch.nn.Linear):
    """Changes the tensors that it gets, as SGLang's Gemma does, and computes a tensor from all parameters."""

    def load_weights(self, tensors: Any) -> None:
        for name, tensor in tensors:
            tensor += 1.0
            self.get_parameter(name).data.copy_(tensor)
        self.doubled = self.weight.data * 2


def test_loading_changes_neither_the_staged_tensors_nor_computed_tensors() -> None:
    """A model may change the tensors that it loads. A partial update leaves no mark in what a model computes."""
    specs = {"weight": TensorSpec((600, 600), "float32"), "bias": TensorSpec((600,), "float32")}
    layout = plan_arena(specs)
    arena = Arena.create(layout)
    for name in specs:
        arena.tensor(name).fill_(2.0)
    model, sender = _AddsOneInPlace(600, 600), shared_memory.Sender(SenderSettings(arena, layout, 1.0))
    for names in (["weight", "bias"], ["bias"]):
        arena.write_table(names)
        message = sender.loader_message(UpdateAttempt("x", names, True, [ServerInfo("a", 1)]), 0)
        report, _ = load_weights(shared_memory.Receiver(message, 0), model, "x", verify=True)
        assert report.ok, report.error
        assert all(bool((arena.tensor(name) == 2.0).all()) for name in specs)
        assert bool((model.weight == 3.0).all())
        assert bool((model.doubled == 6.0).all())
    arena.close()


@given(st.binary(min_size=0, max_size=70), st.integers(0, 7))
def test_checksums_differ_when_one_bit_changes(data: bytes, bit: int) -> None:
    tensor = torch.tensor(list(data), dtype=torch.uint8)
    unaligned = torch.cat([torch.zeros(3, dtype=torch.uint8), tensor])[3:]
    for checksum in (compute_checksum, positional_sum):
        first = checksum(tensor)
        assert checksum(unaligned) == first, "the checksum does not depend on the alignment"
        for at in range(len(data)):
            other = tensor.clone()
            other[at] ^= 1 << bit
            assert checksum(other) != first


@pytest.mark.parametrize("checksum", [compute_checksum, positional_sum])
@pytest.mark.parametrize("rows", [2, 7, 1200], ids=["one part", "odd size", "several parts"])
def test_checksums_depend_on_the_position(checksum: Callable[[torch.Tensor], int], rows: int) -> None:
    """`positional_sum` is the checksum of tensors on an accelerator. It has the same value on every device."""
    tensor = torch.arange(rows * 2047, dtype=torch.float32).view(torch.uint8)
    word = tensor[8:16].clone()
    swapped = tensor.clone()
    swapped[8:16], swapped[-16:-8] = tensor[-16:-8], word
    shifted = tensor.roll(4 * 2047)
    reversed_rows = tensor.view(rows, -1).flip(0).reshape(-1)
    values = [checksum(other) for other in (tensor, swapped, shifted, reversed_rows)]
    assert values[0] == checksum(torch.cat([torch.zeros(3, dtype=torch.uint8), tensor])[3:])
    assert len(set(values)) == (3 if rows == 2 else 4), "two rows that are shifted by one are also reversed"
    assert all(-(2**63) <= value < 2**63 for value in values)


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 100)), max_size=8), st.integers(1, 64))
def test_chunks_cover_every_tensor_and_do_not_overlap(gaps_and_sizes: list[tuple[int, int]], limit: int) -> None:
    tensor_ranges, offset = [], 0
    for gap, size in gaps_and_sizes:
        tensor_ranges.append((offset + gap, offset + gap + size))
        offset += gap + size
    found = split_into_chunks(tensor_ranges, limit)
    assert all(0 < stop - start <= limit for start, stop in found)
    assert all(chunk[1] <= following[0] for chunk, following in itertools.pairwise(found))
    covered = {byte for start, stop in found for byte in range(start, stop)}
    assert covered >= {byte for start, stop in tensor_ranges for byte in range(start, stop)}


@given(
    st.sampled_from([np.uint8, np.uint16, np.uint32]),
    st.integers(1, 200_000),
    st.lists(st.floats(0, 1, exclude_max=True), max_size=5),
    st.sampled_from([2, 1000, 1 << 22]),
)
def test_a_patch_turns_the_old_tensors_into_the_new_ones(
    kind: Any, size: int, positions: list[float], chunk_elements: int
) -> None:
    size = min(size, 1000 * chunk_elements)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(delta, "CHUNK_ELEMENTS", chunk_elements)
        _check_patches(kind, size, positions)


def test_patches_need_little_memory() -> None:
    """A search for all changed positions at once would need 17 bytes for each changed element."""
    old, new = bytes(2**26), memoryview(b"\x01" * 2**26)
    tracemalloc.start()
    refused = delta.encode([(memoryview(old), new, 1)], max_bytes=2**25)
    assert refused is None
    assert tracemalloc.get_traced_memory()[1] < 2**26 + 64 * delta.CHUNK_ELEMENTS
    tracemalloc.stop()


def _check_patches(kind: Any, size: int, positions: list[float]) -> None:
    old = np.arange(size).astype(kind)
    new = old.copy()
    for position in positions:
        new[int(position * size)] += 1
    element_bytes = old.itemsize
    target = bytearray(old.tobytes())
    patch = delta.encode([(memoryview(old.tobytes()), memoryview(new.tobytes()), element_bytes)] * 2, max_bytes=10**9)
    assert patch is not None
    assert len(patch) <= 2 * (8 + len(positions) * (4 + element_bytes))
    other = bytearray(target)
    delta.apply(memoryview(patch), [(memoryview(target), element_bytes), (memoryview(other), element_bytes)])
    assert bytes(target) == bytes(other) == new.tobytes()
    with pytest.raises(ValueError, match="patch"):
        delta.apply(memoryview(patch + b"x"), [(memoryview(target), element_bytes), (memoryview(other), element_bytes)])
    assert (
        delta.encode([(memoryview(old.tobytes()), memoryview((new + 1).tobytes()), element_bytes)], max_bytes=8) is None
    )


def test_each_machine_has_one_leading_receiver() -> None:
    placement = ReceiverPlacement(["a", "b", "a", "b", "c"])
    assert placement.group_size == 4
    assert [placement.group_rank_of(receiver) for receiver in range(5)] == [1, 2, None, None, 3]
    assert [placement.leader_of(receiver) for receiver in range(5)] == [0, 1, 0, 1, 4]


def test_the_warden_imports_the_standard_library_only() -> None:
    """It must work when installed packages are broken. Its own modules are found by the location of its script."""
    code = (
        "import runpy, sys; before = set(sys.modules); runpy.run_path(sys.argv[1], run_name='__main__');"
        "found = set(sys.modules) - before;"  # what a .pth file of an installed package imports was there before
        "print(sorted(name for name in found if name.partition('.')[0] not in sys.stdlib_module_names))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, str(WARDEN_SCRIPT)],
        stdin=subprocess.DEVNULL,  # the warden ends when its input ends
        capture_output=True,
        check=True,
        timeout=60,
        text=True,
    )
    assert set(ast.literal_eval(done.stdout)) == {
        "verl_server",
        "verl_server.lazy_exports",
        "verl_server.server",
        "verl_server.server.warden",
        "verl_server.server.warden.warden",
        "verl_server.server.warden.processes",
    }


def test_openmp_threads_of_a_server_sleep_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server gets our spin count, unless the user has set it."""
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert inherited_environment()["GOMP_SPINCOUNT"] == "20000"
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert inherited_environment()["GOMP_SPINCOUNT"] == "7"


THREADS_OF_A_SERVER = """
import os, subprocess, sys
os.environ.update(entry.split("=") for entry in sys.argv[2:])  # as torchrun or a worker of Ray does
if int(sys.argv[1]):
    arguments = [str(int(sys.argv[1]) - 1), *sys.argv[2:]]
    subprocess.run([sys.executable, "-c", sys.orig_argv[2], *arguments], check=True)
else:
    from verl_server.server.environment import inherited_environment
    print(inherited_environment().get("OMP_NUM_THREADS"))
"""
RAY, TORCHRUN = f"RAY_RAYLET_PID={os.getpid()}", "TORCHELASTIC_RUN_ID=1"


@pytest.mark.parametrize(
    ("users", "generation", "variables", "expected"),
    [
        ("3", 0, [], "3"),
        ("3", 0, [RAY], "3"),
        ("", 0, [RAY, "OMP_NUM_THREADS=1"], "None"),
        ("3", 1, [RAY], "None"),
        ("3", 1, [TORCHRUN], "3"),
        ("", 1, [TORCHRUN, "OMP_NUM_THREADS=1"], "None"),
        ("3", 2, [TORCHRUN], "None"),
    ],
    ids=["user", "Ray", "Ray sets it", "child of Ray's worker", "torchrun", "torchrun sets it", "child of its worker"],
)
def test_a_server_has_the_users_number_of_threads(
    users: str, generation: int, variables: list[str], expected: str
) -> None:
    """torchrun and Ray set OMP_NUM_THREADS=1 for their workers, unless the user has set another number.

    Servers do not inherit the number of a worker. `generation`: 0 is a child of this process, 1 is its child.
    """
    others = ("OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID", "RAY_RAYLET_PID")
    environment = {name: value for name, value in os.environ.items() if name not in others}
    if users:
        environment["OMP_NUM_THREADS"] = users
    command = [sys.executable, "-c", THREADS_OF_A_SERVER, str(generation), *variables]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.strip() == expected


def test_whole_numbers() -> None:
    assert require_whole_number("replicas", 1) == 1
    assert require_whole_number("weight_version", 0, minimum=0) == 0
    for value in (0, -1, True, 1.0, "1", None):
        with pytest.raises(errors.BadInputError, match=f"replicas must be a whole number of at least 1, got {value!r}"):
            require_whole_number("replicas", value)


@dataclass(frozen=True)
class OwnTask(Task):
    difficulty: int = 0


@dataclass(frozen=True)
class OwnLimits(RolloutLimits):
    name: str = ""


@dataclass(frozen=True)
class OwnTimeouts(Timeouts):
    pass


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OwnTask(5, []), "Task.id must be a valid string, got 5"),  # type: ignore[arg-type]
        (lambda: OwnLimits(max_response_tokens=-5), "RolloutLimits.max_response_tokens must be greater"),
        (lambda: OwnTimeouts(start_s=-1), "Timeouts.start_s must be greater than 0, got -1"),
    ],
)
def test_the_fields_of_a_subclass_are_checked(make: Callable[[], object], message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        make()


def test_a_subclass_has_its_own_fields() -> None:
    task = OwnTask("a", [{"role": "user", "content": "1 + 1"}], difficulty=2)
    assert (task.id, task.difficulty) == ("a", 2)
    steps: Any = np.int64(5)
    assert type(OwnLimits(max_response_tokens=steps, name="short").max_response_tokens) is int


@pytest.mark.parametrize(
    "error", [CancelledError, asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, StopIteration, SystemExit]
)
def test_a_call_in_a_thread_does_not_end_its_caller(error: type[BaseException]) -> None:
    def fail() -> None:
        raise error("stop")

    async def call() -> None:
        with pytest.raises(RuntimeError, match=f"{error.__name__}: stop"):
            await call_in_thread(fail)

    asyncio.run(call())
