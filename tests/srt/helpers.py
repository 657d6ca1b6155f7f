"""What several test modules need: reference tokens from Hugging Face, trainer ranks, process accounting."""

from __future__ import annotations

import contextlib
import copy
import os
import queue
import runpy
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import requests
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from tqdm import tqdm

from verl_server import HttpServerEngineAdapter, RemoteServer, VerlEngine
from verl_server.errors import VerlServerError
from verl_server.rollout.manager import ReplicaView
from verl_server.server.launch import PortReservation
from verl_server.tiny import make_tokenizer

PROMPTS = [[1, 2, 3, 4, 5], [200, 17, 64], list(range(40, 75))]
NEW_TOKENS = 12
GREEDY = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
MARK = "VERL_SERVER_TEST_MARK"

# The lock of progress bars is a named semaphore by default. A trainer rank that a test kills would leave the semaphore
# in /dev/shm, where other tests would find it.
tqdm.set_lock(threading.RLock())


def reference_model(folder: Path | str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def in_float64(model: Any) -> Any:
    """A copy of the model that computes in float64."""
    exact = copy.deepcopy(model).double()
    exact.config._experts_implementation = "eager"  # the grouped kernel of experts knows no float64
    return exact


def greedy_with_logprobs(model: Any, prompt: list[int], new_tokens: int = NEW_TOKENS) -> tuple[list[int], list[float]]:
    """Hugging Face `generate`, greedy, and the log probability of each of its tokens.

    The log probabilities are computed in float64: in float32 Hugging Face itself is up to 1.1e-5 away from them.
    """
    ids = torch.tensor([prompt])
    with torch.no_grad():
        whole = model.generate(ids, do_sample=False, max_new_tokens=new_tokens, eos_token_id=None, pad_token_id=0)
        logprobs = torch.log_softmax(in_float64(model)(whole).logits, dim=-1)[0]
    tokens = whole[0, len(prompt) :].tolist()
    values = [float(logprobs[len(prompt) - 1 + i, token]) for i, token in enumerate(tokens)]
    return tokens, values


def assert_equals_reference(engine: Any, model: Any, tolerance: float = 1e-5) -> list[list[int]]:
    """Greedy tokens of `engine` equal Hugging Face's, their logprobs within `tolerance`; returns the tokens."""
    replies = engine.generate(input_ids=PROMPTS, sampling_params=GREEDY, return_logprob=True)
    gap = 0.0
    for prompt, reply in zip(PROMPTS, replies, strict=True):
        tokens, logprobs = greedy_with_logprobs(model, prompt)
        assert reply["output_ids"] == tokens
        got = [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]
        gap = max(gap, *(abs(a - b) for a, b in zip(got, logprobs, strict=True)))
    assert gap < tolerance, f"largest logprob difference {gap}"
    return [reply["output_ids"] for reply in replies]


def raised(call: Callable[[], Any]) -> tuple[str, str]:
    """Type and message of the error of this library that `call` raises."""
    try:
        call()
    except VerlServerError as error:
        return type(error).__name__, error.message
    return "nothing", ""


def change_weights(model: Any, seed: int, scale: float = 0.05) -> None:
    """Move every parameter, reproducibly on every rank."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)


def adapter_of(engine: VerlEngine) -> HttpServerEngineAdapter:
    """The adapter of the engine's server, on a rank that has one."""
    assert engine.adapter is not None
    return engine.adapter


def remote_server_of(adapter: HttpServerEngineAdapter, url: str | None = None) -> RemoteServer:
    """The server of an adapter as another trainer would describe it. `url`: an address in front of the server."""
    args = adapter.server_args
    return RemoteServer(url or adapter.base_url, args["api_key"], args["admin_api_key"])


# -- trainer ranks -----------------------------------------------------------------------------------


_reservations: list[PortReservation] = []


def free_port() -> int:
    """A port of 127.0.0.1 on which nothing listens. It stays reserved for a server until the process ends.

    Without the reservation, the kernel may give the port to a connection of another test before the server binds it.
    """
    _reservations.append(PortReservation("127.0.0.1"))
    return _reservations[-1].port


def _rank_main(rank: int, world: int, port: int, bodies: Any, results: Any) -> None:
    """A trainer rank: runs one body after the other until it is told None."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    try:
        while (task := bodies.get()) is not None:
            body, args = task
            try:
                results.put((rank, "ok", body(rank, world, *args)))
            except BaseException:  # noqa: BLE001 - carried to the test, which fails with it
                results.put((rank, "error", traceback.format_exc()))
    finally:
        dist.destroy_process_group()


def processes() -> Any:
    """A context whose processes are forked from a process that has imported what trainers use."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([
        "helpers",
        "verl_server.engine.verl_engine",
        "transformers.models.auto",
        "transformers.models.qwen2.modeling_qwen2",
        "transformers.models.qwen3.modeling_qwen3",
    ])  # fmt: skip
    return context


def _run_as_program(script: Path, arguments: Sequence[str], output_folder: Path) -> None:
    """Main function of a process of `processes()`: runs a Python file as `python FILE ARGUMENTS` does.

    Standard output and standard error go to the files `stdout` and `stderr` in `output_folder`.
    """
    mp.set_start_method("fork", force=True)  # the default of a program
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(output_folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


def run_in_fork(script: Path, arguments: Sequence[str], output_folder: Path, timeout_s: float) -> str:
    """Run a Python file as a program, in a fork of a process that has imported torch. Returns its standard output."""
    process = processes().Process(target=_run_as_program, args=(script, arguments, output_folder))
    process.start()
    process.join(timeout_s)
    process.kill()
    process.join()
    assert process.exitcode == 0, (output_folder / "stderr").read_text()[-4000:]
    return (output_folder / "stdout").read_text()


class Ranks:
    """`world` spawned trainer ranks in one process group."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._start()

    def _start(self) -> None:
        context, port = processes(), free_port()
        self._results = context.Queue()
        self._bodies = [context.Queue() for _ in range(self.world)]
        self._ranks = [
            context.Process(target=_rank_main, args=(rank, self.world, port, bodies, self._results))
            for rank, bodies in enumerate(self._bodies)
        ]
        for rank in self._ranks:
            rank.start()

    def run(self, body: Callable[..., Any], *args: Any, timeout_s: float = 240.0, dying: int = 0) -> list[Any]:
        """Run `body(rank, world, *args)` on every rank; returns what each returned, by rank.

        `dying`: how many ranks end without a result on purpose (their entry is None).
        """
        if not all(rank.is_alive() for rank in self._ranks):  # an earlier test failed in the middle
            self.close()
            self._start()
        for bodies in self._bodies:
            bodies.put((body, args))
        found: list[Any] = [None] * self.world
        deadline = time.monotonic() + timeout_s
        try:
            for _ in range(self.world - dying):
                rank, how, value = self._next_result(deadline, dying)
                assert how == "ok", f"rank {rank} failed:\n{value}"
                found[rank] = value
        except BaseException:
            for one in self._ranks:
                one.kill()
                one.join()
            raise
        return found

    def _next_result(self, deadline: float, dying: int) -> Any:
        while True:
            try:
                return self._results.get(timeout=1.0)
            except queue.Empty:
                dead = [one.exitcode for one in self._ranks if not one.is_alive()]
                assert len(dead) <= dying, f"{len(dead)} trainer ranks ended by themselves, exit codes {dead}"
                assert time.monotonic() < deadline, "the trainer ranks did not finish in time"

    def close(self) -> None:
        for bodies in self._bodies:
            bodies.put(None)
        for rank in self._ranks:
            rank.join(15.0)
            if rank.is_alive():
                rank.kill()


@contextlib.contextmanager
def trainer_ranks(world: int) -> Iterator[Ranks]:
    ranks = Ranks(world)
    try:
        yield ranks
    finally:
        ranks.close()


@contextlib.contextmanager
def all_at_once(*starts: Callable[[], contextlib.AbstractContextManager[Any]]) -> Iterator[list[Any]]:
    """Enter contexts (servers, mostly) in threads at the same time; leave them in turn."""
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(starts)) as pool:
        yield list(pool.map(lambda start: stack.enter_context(start()), starts))


def mesh_of(world: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))


def is_listening(port: int) -> bool:
    """Whether a process of this machine accepts connections at the port."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection:
            # A client whose own port is this port by chance is connected with itself.
            return bool(connection.getsockname() != connection.getpeername())
    except ConnectionRefusedError:
        return False


def workers_of(port: int) -> set[str]:
    """URLs of the workers of the `sglang-router` at `port`."""
    with requests.Session() as session:
        session.trust_env = False
        return {
            worker["url"] for worker in session.get(f"http://127.0.0.1:{port}/workers", timeout=10).json()["workers"]
        }


# -- process accounting ------------------------------------------------------------------------------


def marked_processes(mark: str) -> dict[int, str]:
    """Living processes that inherited the environment variable MARK=`mark`, with their command lines."""
    wanted = f"{MARK}={mark}".encode()
    found = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError):
            if wanted in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                state = Path(f"/proc/{entry}/stat").read_bytes().rpartition(b")")[2].split()[0]
                if state != b"Z":
                    found[int(entry)] = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def wait_until(condition: Callable[[], Any], timeout_s: float, what: str) -> float:
    """Seconds until `condition` is true; fails after `timeout_s`."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout_s, f"{what} after {timeout_s} s"
        time.sleep(0.05)
    return time.monotonic() - started


def server_pid(replica: ReplicaView) -> int:
    """Process id of a running replica's server."""
    pid = pid_of(replica)
    assert pid is not None
    return pid


def pid_of(replica: ReplicaView) -> int | None:
    """Process id of a replica's server. None if none runs."""
    return None if (pids := replica.pids) is None else pids.main


def open_files(pid: int | str = "self") -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def resident_bytes(pid: int | str = "self") -> int:
    """Resident memory; anonymous pages only, so that shared staging memory is not counted twice."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def tree_of(pid: int) -> list[int]:
    import psutil

    process = psutil.Process(pid)
    return [pid, *(child.pid for child in process.children(recursive=True))]


def mapped_inodes() -> set[int]:
    """Inodes of the files in /dev/shm that any living process has mapped."""
    found: set[int] = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                lines = Path(f"/proc/{entry}/maps").read_text(errors="replace").splitlines()
                found.update(int(line.split()[4]) for line in lines if "/dev/shm/" in line)
    return found


@contextlib.contextmanager
def no_new_shared_memory() -> Iterator[None]:
    """The body leaves no file in /dev/shm: every new file belongs to a process that still runs.

    Other processes of the suite run at the same time. A file that a living process has mapped is not left behind.
    """

    def files() -> dict[str, int]:
        """Name and inode of each file."""
        return {entry.name: entry.inode() for entry in os.scandir("/dev/shm")}

    def left_behind() -> set[str]:
        new = {name: inode for name, inode in files().items() if name not in before}
        mapped = mapped_inodes() if new else set()
        return {name for name, inode in new.items() if inode not in mapped}

    before = files()
    yield
    wait_until(lambda: not left_behind(), 30.0, f"new in /dev/shm, and no process uses it: {left_behind()}")


QWEN = (
    "{%- for t in tools or [] %}{{ t.function.name + ' ' }}{%- endfor %}"
    "{%- for m in messages %}{%- set last = loop.index0 > (messages | map(attribute='role') | list)"
    ".index('user') and loop.last %}<|im_start|>{{ m.role + '\n' }}"
    "{%- if m.role == 'assistant' and '</think>' in m.content and not last %}{{ m.content.split('</think>')[-1] }}"
    "{%- else %}{{ m.content }}{%- endif %}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As Qwen's: earlier turns lose their thoughts."""
LLAMA = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}"
    "<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)


def chat_tokenizer(folder: Path) -> Any:
    """Bytes, and the marks that these templates use: fits the vocabulary of the tiny models."""
    made = make_tokenizer(folder)
    names = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<think>", "</think>"]
    names += ["<|end_of_text|>", "<|eom_id|>", "<|python_tag|>"]
    names += ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
    made.add_special_tokens({"additional_special_tokens": names})
    return made
