"""Evaluation on tasks, metrics of a run, and checkpoints."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import resource
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from agent_helpers import ScriptedGenerateFn
from transformers import AutoTokenizer

from verl_server.agent import RolloutLimits, RolloutRunner, Sample, SingleTurnLoop, Task
from verl_server.errors import BadInputError, VerlServerError
from verl_server.training import MetricsWriter, draw_curves, evaluate, load_checkpoint, pass_at_k, save_checkpoint
from verl_server.training.metrics import read_metrics
from verl_server.trajectory import ChatRenderer

# -- evaluation --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "correct", "k"), [(5, 2, 1), (5, 2, 3), (4, 0, 2), (4, 4, 4), (6, 1, 6), (7, 3, 5)])
def test_pass_at_k_is_the_fraction_of_all_choices_of_k_samples(n: int, correct: int, k: int) -> None:
    choices = list(itertools.combinations([True] * correct + [False] * (n - correct), k))
    assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, choices)) / len(choices))


@pytest.mark.parametrize(("n", "correct", "k"), [(4, 5, 1), (4, 1, 5), (4, 1, 0), (0, 0, 1)])
def test_pass_at_k_needs_k_samples(n: int, correct: int, k: int) -> None:
    with pytest.raises(BadInputError, match="no estimate"):
        pass_at_k(n, correct, k)


def test_an_evaluation_counts_failed_samples_as_wrong(tmp_path: Path, tiny: Callable[..., Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny("qwen3"))

    def reward(sample: Sample) -> float:
        if sample.task.id == "fails":
            raise ValueError("no reward")
        return {"right": 1.0, "half": 0.5}.get(sample.task.id, 1.0 * (sample.index == 0))

    def make(**settings: Any) -> RolloutRunner:
        return RolloutRunner(
            SingleTurnLoop(), ScriptedGenerateFn(tokenizer, lambda _prompt: "7"), renderer=ChatRenderer(tokenizer),
            limits=RolloutLimits(max_response_tokens=8), n=4, **{"reward": reward, **settings},
        )  # fmt: skip

    runner = make()
    tasks = [Task(name, [{"role": "user", "content": name}]) for name in ("right", "half", "fails", "sometimes")]
    result = asyncio.run(evaluate(runner, tasks))
    assert [group.task.id for group in result.groups] == [task.id for task in tasks]
    assert result.correct == (4 + 0 + 0 + 1) / 16
    assert result.reward == (4 + 2 + 0 + 1) / 16
    assert result.num_failed == 4
    assert result.pass_at(1) == result.correct
    assert result.describe(2).splitlines() == [
        "31.2% of 4 tasks are solved, for example:", f"    'right' -> {result.groups[0].samples[0].text!r}",
        f"    'half' -> {result.groups[1].samples[0].text!r}",
    ]  # fmt: skip
    assert result.pass_at(2) == pytest.approx((1 + 0 + 0 + 0.5) / 4)
    with pytest.raises(BadInputError, match="k=5"):
        result.pass_at(5)
    assert asyncio.run(evaluate(runner, tasks, threshold=0.5)).correct == (4 + 4 + 0 + 1) / 16
    with pytest.raises(BadInputError, match="no tasks"):
        asyncio.run(evaluate(runner, []))
    for refused in ({"run_dir": tmp_path}, {"group_filter": lambda group: False}):
        with pytest.raises(BadInputError, match=f"without {next(iter(refused))}"):
            asyncio.run(evaluate(make(**refused), tasks))
    with pytest.raises(BadInputError, match="needs a runner with reward="):
        asyncio.run(evaluate(make(reward=None), tasks))


# -- metrics -----------------------------------------------------------------------------------------


def test_tensors_are_metrics_and_other_values_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with MetricsWriter(tmp_path, printed=["loss", "accuracy"]) as writer:
        writer.write(1, {"loss": torch.tensor(0.5, requires_grad=True), "count": 3, "step": 9})
        assert capsys.readouterr().out == "step 1: loss 0.5\n"
        for step, metrics, message in [
            (2, {"loss": torch.ones(2)}, "a metric is no number"),
            (2, {"loss": "low"}, "'low'"),
            (2, {"loss": 10**400}, "a metric is no number"),
            ("2", {"loss": 1.0}, "step must be a whole number"),
        ]:
            with pytest.raises(BadInputError, match=message):
                writer.write(step, metrics)  # type: ignore[arg-type]
    assert read_metrics(writer.path) == [{"step": 1, "loss": 0.5, "count": 3.0}]
    writer.path.write_text('{"step": 1\n{"step": 2}\n')
    with pytest.raises(BadInputError, match=r"metrics.jsonl has a damaged line"):
        MetricsWriter(tmp_path)
    with pytest.raises(BadInputError, match="there are no metrics in"):
        draw_curves(tmp_path / "other.jsonl", tmp_path / "curves.png", ["loss"])
    writer.path.write_text('{"step": 1, "loss": 0.5}\n')
    for names in (["los"], "loss"):
        with pytest.raises(BadInputError, match=r"of \['loss', 'step'\], got"):
            draw_curves(writer.path, tmp_path / "curves.png", names)


@pytest.mark.slow
def test_tensorboard_and_wandb_have_the_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorBoard's own reader reads its files. The files of W&B have its records, which `wandb sync` would send."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("WANDB_MODE", "offline")
    for start, values in ((0, [0.0, 0.25, 9.0]), (2, [0.5, 0.75])):  # killed after step 2, which is written again
        with MetricsWriter(tmp_path, start_step=start, tensorboard=True, wandb_project="project") as writer:
            for step, value in enumerate(values, start):
                writer.write(step, {"test/correct": value})
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in board.Scalars("test/correct")] == [
        (0, 0.0), (1, 0.25), (2, 0.5), (3, 0.75),
    ]  # fmt: skip
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert [read_wandb(file) for file in files] == [[(0, 0.0), (1, 0.25), (2, 9.0)], [(2, 0.5), (3, 0.75)]]


def read_wandb(file: Path) -> list[tuple[int, float]]:
    """Step and value of each record of history in an offline file.

    A file has 7 bytes of its own, then blocks of 32 KiB. A record has 4 bytes of checksum, 2 of length, 1 of kind.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, found, parts = file.read_bytes(), 7, [], b""
    while place + 7 <= len(data):
        length, kind = struct.unpack_from("<HB", data, place + 4)
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
        if kind in {1, 4}:  # a whole record, or its last part
            items = Record.FromString(parts).history.item
            values = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
            if values:
                found.append((values["_step"], values["test/correct"]))
            parts = b""
    return found


def test_a_resumed_run_writes_its_steps_once(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        for step in range(4):
            writer.write(step, {"reward/mean": step / 2, "odd": math.nan})
    with writer.path.open("ab") as file:
        file.write(b'{"step": 4, "rewa')  # killed meanwhile
    with MetricsWriter(tmp_path, start_step=2) as writer:
        writer.write(2, {"reward/mean": 7.0})
    lines = [json.loads(line) for line in writer.path.read_text().splitlines()]
    assert [(line["step"], line["reward/mean"]) for line in lines] == [(0, 0.0), (1, 0.5), (2, 7.0)]
    assert lines[0]["odd"] is None
    draw_curves(writer.path, tmp_path / "curves.png", ["reward/mean", "odd"])
    draw_curves([writer.path, writer.path], tmp_path / "two.png", ["odd"])
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "package"), [({"tensorboard": True}, "tensorboard"), ({"wandb_project": "p"}, "wandb")]
)
def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, object], package: str
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard" if package == "tensorboard" else package, None)
    with pytest.raises(BadInputError, match=f"needs the package {package}"):
        MetricsWriter(tmp_path, **arguments)  # type: ignore[arg-type]


# -- checkpoints -------------------------------------------------------------------------------------


def make_trained_model(steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1)
    train(model, optimizer, steps)
    return model, optimizer


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(3, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_training_continues_from_a_checkpoint_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    model, optimizer = make_trained_model(0)
    assert load_checkpoint(tmp_path, model, optimizer) == 0
    train(model, optimizer, 3)
    save_checkpoint(tmp_path, 3, model, optimizer)
    train(model, optimizer, 2)
    resumed, its_optimizer = make_trained_model(0)
    with torch.no_grad():
        resumed.get_parameter("0.bias").fill_(7.0)  # it is not trained, and comes from the checkpoint too
    assert load_checkpoint(tmp_path, resumed, its_optimizer) == 3
    train(resumed, its_optimizer, 2)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[name], value, rtol=0.0, atol=0.0)


def test_an_incomplete_checkpoint_is_not_loaded_and_others_are_removed(tmp_path: Path) -> None:
    model, optimizer = make_trained_model(1)
    save_checkpoint(tmp_path, 1, model, optimizer)
    save_checkpoint(tmp_path, 9, model, optimizer)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-000009"]
    (tmp_path / "step-000012").mkdir()  # a process was killed before it had written everything
    assert load_checkpoint(tmp_path, model, optimizer) == 9
    save_checkpoint(tmp_path, 3, model, optimizer)  # a run that has gone back
    assert load_checkpoint(tmp_path, model, optimizer) == 3
    for wrong in ({"step": -1}, {"step": "1"}, {"step": 1, "keep": 0}):
        with pytest.raises(BadInputError, match=f"{list(wrong)[-1]} must be a whole number"):
            save_checkpoint(tmp_path, **wrong, model=model, optimizer=optimizer)


def test_several_checkpoints_stay_on_request(tmp_path: Path) -> None:
    model, optimizer = make_trained_model(1)
    for step in (1, 2, 3, 4):
        save_checkpoint(tmp_path, step, model, optimizer, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-000003", "step-000004"]


def test_a_folder_whose_last_checkpoint_is_not_known_is_no_new_run(tmp_path: Path) -> None:
    """It would start at step 0, and the next save would remove the checkpoints."""
    model, optimizer = make_trained_model(1)
    save_checkpoint(tmp_path, 11, model, optimizer)
    with pytest.raises(BadInputError, match="is itself a checkpoint"):
        load_checkpoint(tmp_path / "step-000011", model, optimizer)
    (tmp_path / "latest").unlink()
    for call in (load_checkpoint, lambda *_: save_checkpoint(tmp_path, 1, model, optimizer)):
        with pytest.raises(BadInputError, match=r"has the checkpoints step-000011, but no file 'latest'"):
            call(tmp_path, model, optimizer)
    (tmp_path / "latest").write_text("step-000011\n")
    assert load_checkpoint(tmp_path, model, optimizer) == 11


def test_a_save_that_fails_leaves_the_checkpoint_of_the_same_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = make_trained_model(1)
    save_checkpoint(tmp_path, 3, model, optimizer)
    wanted = model.get_parameter("0.weight").detach().clone()
    train(model, optimizer, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))  # as a disk that is full
    try:
        with pytest.raises(VerlServerError, match=r"step-000003-again cannot be written"):
            save_checkpoint(tmp_path, 3, model, optimizer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert load_checkpoint(tmp_path, model, optimizer) == 3
    assert (model.get_parameter("0.weight") == wanted).all()
    for expected in ("step-000003-again", "step-000003"):  # the next saves alternate
        save_checkpoint(tmp_path, 3, model, optimizer)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", expected]
        assert load_checkpoint(tmp_path, model, optimizer) == 3


OTHERS: dict[str, Callable[[], torch.nn.Module]] = {
    "fewer layers": lambda: torch.nn.Sequential(torch.nn.Linear(4, 8)),
    "more layers": lambda: torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2), torch.nn.Linear(2, 2)),
    "no bias": lambda: torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2, bias=False)),
    "other dtype": lambda: torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)).bfloat16(),
    "other shape": lambda: torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_checkpoint_of_another_model_is_refused_by_name(other: str, tmp_path: Path) -> None:
    model, optimizer = make_trained_model(1)
    save_checkpoint(tmp_path, 1, model, optimizer)
    another = OTHERS[other]()
    with pytest.raises(BadInputError, match=r"step-000001 is that of another model: \d parameters differ, for example"):
        load_checkpoint(tmp_path, another, torch.optim.AdamW(another.parameters()))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_parameters_of_the_optimizer_without_a_gradient(kind: Any, tmp_path: Path) -> None:
    """As the vision tower when a batch has no image. They get a gradient later, on both sides."""

    def make() -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.ModuleDict({"text": torch.nn.Linear(4, 4), "vision": torch.nn.Linear(4, 4)})
        groups = [{"params": model[name].parameters(), "lr": lr} for name, lr in (("text", 0.1), ("vision", 0.3))]
        return model, kind(groups, momentum=0.9) if kind is torch.optim.SGD else kind(groups)

    def step(model: Any, optimizer: torch.optim.Optimizer, *names: str) -> None:
        torch.stack([model[name](torch.ones(2, 4)).square().sum() for name in names]).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = make()
    save_checkpoint(tmp_path / "untrained", 0, model, optimizer)
    step(model, optimizer, "text")
    optimizer.param_groups[0]["lr"] = 0.05  # as a schedule does
    save_checkpoint(tmp_path, 1, model, optimizer)
    step(model, optimizer, "text", "vision")
    resumed, its_optimizer = make()
    step(resumed, its_optimizer, "text", "vision")  # it has states already, and a gradient
    resumed["text"](torch.ones(2, 4)).sum().backward()
    assert load_checkpoint(tmp_path, resumed, its_optimizer) == 1
    its_optimizer.zero_grad()
    step(resumed, its_optimizer, "text", "vision")
    for name, value in model.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[name], value, rtol=0.0, atol=0.0)
    assert load_checkpoint(tmp_path / "untrained", resumed, its_optimizer) == 0
    other = torch.optim.RMSprop(resumed.parameters())
    with pytest.raises(BadInputError, match="another optimizer"):
        load_checkpoint(tmp_path, resumed, other)


def test_other_files_beside_checkpoints_stay(tmp_path: Path) -> None:
    (tmp_path / "step-notes.txt").touch()
    for export in ("step-10-hf", "step-000010"):  # models that a user has written
        (tmp_path / export).mkdir()
        (tmp_path / export / "model.safetensors").touch()
    model, optimizer = make_trained_model(1)
    save_checkpoint(tmp_path, 1, model, optimizer)
    assert (tmp_path / "step-notes.txt").exists()
    assert len(list(tmp_path.glob("*/model.safetensors"))) == 2


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    model, optimizer = make_trained_model(1)
    save_checkpoint(tmp_path, 1, model, optimizer)
    metadata = tmp_path / "step-000001" / ".metadata"
    metadata.write_bytes(metadata.read_bytes()[:50])
    with pytest.raises(BadInputError, match="step-000001 is damaged"):
        load_checkpoint(tmp_path, model, optimizer)


SAVING = """
import sys, torch
from verl_server.training import save_checkpoint
model = torch.nn.Linear(512, 512); optimizer = torch.optim.AdamW(model.parameters())
for step in range(1, 10**6):
    with torch.no_grad():
        model.weight.fill_(step)
    save_checkpoint(sys.argv[1], step, model, optimizer)
    print(step, flush=True)
"""


@pytest.mark.slow
def test_a_killed_process_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    saved = 0
    for attempt in range(4):
        process = subprocess.Popen([sys.executable, "-c", SAVING, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.05 + 0.03 * attempt)
        os.kill(process.pid, signal.SIGKILL)
        saved = int(["1", *process.stdout.read().split()][-1])
        process.wait()
        model = torch.nn.Linear(512, 512)
        step = load_checkpoint(tmp_path, model, torch.optim.AdamW(model.parameters()))
        assert step >= saved
        assert (model.weight == step).all()
        subprocess.run(["rm", "-rf", *map(str, tmp_path.iterdir())], check=True)
