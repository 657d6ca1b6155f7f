"""Metrics of a training run: JSON lines, TensorBoard, Weights & Biases, and a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, SupportsFloat

import orjson

from verl_server.errors import BadInputError
from verl_server.types import Json
from verl_server.validation import make_writable_folder, require_whole_number

FILE_NAME = "metrics.jsonl"


class MetricsWriter:
    """Writes the metrics of each step to `run_dir/metrics.jsonl`, and to TensorBoard and Weights & Biases.

    `tensorboard`: also write event files to `run_dir/tensorboard` (needs the package `tensorboard`). `wandb_project`:
    also log to this project of Weights & Biases (needs the package `wandb`); its environment variables apply, and
    `WANDB_MODE=offline` needs no account. `printed`: names of the metrics that are also printed. `start_step`: the
    first step of this process. Lines of later steps, which a killed run has written and which this run writes again,
    are removed from the file. `config`: settings of the run, for Weights & Biases. Raises BadInputError for a package
    that is missing, and for a `run_dir` in which no file can be created.
    """

    def __init__(
        self,
        run_dir: Path | str,
        *,
        start_step: int = 0,
        tensorboard: bool = False,
        wandb_project: str | None = None,
        config: Mapping[str, Any] | None = None,
        printed: Sequence[str] = (),
    ) -> None:
        folder = make_writable_folder("run_dir", run_dir)
        self.path = folder / FILE_NAME
        kept = [line for line in read_metrics(self.path) if line["step"] < start_step]
        partial = self.path.with_suffix(".partial")
        partial.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in kept))
        partial.replace(self.path)
        self._board = _open_tensorboard(folder / "tensorboard", start_step) if tensorboard else None
        self._printed = printed
        self._wandb = None if wandb_project is None else _open_wandb(wandb_project, folder, config)

    def write(self, step: int, metrics: Mapping[str, SupportsFloat]) -> None:
        """Write the metrics of a step: numbers, or tensors and arrays of one number.

        Values that are not finite are null in the file. May be called repeatedly. Raises BadInputError for other types.
        """
        require_whole_number("step", step, minimum=0)
        try:
            numbers = {str(name): _number(value) for name, value in metrics.items()}
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise BadInputError(f"a metric is no number: {error}; metrics: {dict(metrics)!r:.200}") from error
        with self.path.open("ab") as file:
            file.write(orjson.dumps({**numbers, "step": step}, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")
        if figures := [f"{name} {numbers[name]:.3g}" for name in self._printed if name in numbers]:
            print(f"step {step}: {', '.join(figures)}", flush=True)
        if self._board is not None:
            for name, value in numbers.items():
                self._board.add_scalar(name, value, step)
            self._board.flush()
        if self._wandb is not None:
            self._wandb.log(numbers, step=step)

    def close(self) -> None:
        """End the run in TensorBoard and Weights & Biases."""
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _number(value: SupportsFloat) -> float:
    if isinstance(value, (str, bytes)):
        raise TypeError(f"{value!r} is a text")
    return float(value)


def _open_tensorboard(folder: Path, start_step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise BadInputError(
            f"tensorboard=True needs the package tensorboard ({error})", argument="tensorboard"
        ) from None
    return SummaryWriter(str(folder), purge_step=start_step)


def _open_wandb(project: str, folder: Path, config: Mapping[str, Any] | None) -> Any:
    try:
        import wandb
    except ImportError as error:
        raise BadInputError(f"wandb_project needs the package wandb ({error})", argument="wandb_project") from None
    return wandb.init(project=project, dir=str(folder), config=dict(config or {}))


def read_metrics(path: Path) -> list[Json]:
    """The lines of a file of metrics. A last line that a killed process has not finished is left out."""
    if not path.exists():
        return []
    *lines, _ = path.read_bytes().split(b"\n")
    try:
        return [orjson.loads(line) for line in lines]
    except orjson.JSONDecodeError as error:
        raise BadInputError(f"{path} has a damaged line: {error}") from error


def draw_curves(path: Path | str | Sequence[Path | str], png: Path | str, names: Sequence[str]) -> None:
    """Draw metrics over the steps into a PNG file, one panel for each of `names`.

    `path`: the file of a run, or of several runs, whose curves have the names of their folders. Raises BadInputError
    for a file that is missing, and for a name that no file has.
    """
    from matplotlib.figure import Figure

    paths = [Path(path)] if isinstance(path, (Path, str)) else [Path(one) for one in path]
    if missing := [str(one) for one in paths if not one.exists()]:
        raise BadInputError(f"there are no metrics in {', '.join(missing)}", argument="path")
    runs = [(read_metrics(one), one.parent.name) for one in paths]
    known = sorted({name for lines, _ in runs for line in lines for name in line})
    if isinstance(names, str) or (known and not set(names) <= set(known)):
        raise BadInputError(f"names must be a list of metrics, of {known}, got {names!r}", argument="names")
    figure = Figure(figsize=(4.5 * len(names), 3.4), layout="constrained")
    panels = figure.subplots(1, len(names), squeeze=False)[0]
    for lines, label in runs:
        for axes, name in zip(panels, names, strict=True):
            points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
            axes.plot([step for step, _ in points], [value for _, value in points], marker=".", label=label)
    for axes, name in zip(panels, names, strict=True):
        axes.set(title=name, xlabel="step")
        axes.grid(alpha=0.3)
    if len(paths) > 1:
        panels[0].legend()
    figure.savefig(png, dpi=120)
