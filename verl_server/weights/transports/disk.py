"""Servers that share only a file system with the trainer: a safetensors file, written whole before it has its name.

The reports are small files beside it. All of them go when the update is over.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_server.errors import BadInputError, VerlServerError
from verl_server.weights.layout import ITEM_BYTES, nbytes
from verl_server.weights.manifest import SAFETENSORS_DTYPES
from verl_server.weights.reports import Received, Report
from verl_server.weights.transports import base
from verl_server.weights.transports.base import Json, Settings, Update

if TYPE_CHECKING:
    import torch

HEADER_ALIGNMENT = 64


class Sender(base.Sender):
    name = "disk"

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        if settings.folder is None:
            raise BadInputError("weight transport 'disk' needs WeightsConfig(folder=...), which the servers see too")
        self._folder = Path(settings.folder).absolute()
        self._sent = 0

    @property
    def sent_bytes(self) -> int:
        return self._sent

    def _file(self, update: Update) -> Path:
        return self._folder / f"update-{update.id}.safetensors"

    def prepare(self, update: Update) -> None:
        file = self._file(update)
        unfinished = file.with_suffix(".part")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with unfinished.open("wb") as stream:
                self._sent = self._write(stream, update)
                stream.flush()
                os.fsync(stream.fileno())
            unfinished.rename(file)
        except OSError as error:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            raise VerlServerError(f"cannot write the weights to {file}: {error}") from error

    def _write(self, stream: Any, update: Update) -> int:
        """Widest elements first, so that every tensor stands where its elements are aligned."""
        specs = {name: self.layout.slots[name].spec for name in update.names}
        header: Json = {}
        length = 0
        order = sorted(update.names, key=lambda name: -ITEM_BYTES[specs[name].dtype])
        for name in order:
            size = nbytes(specs[name])
            header[name] = {
                "dtype": _DTYPE_NAMES[specs[name].dtype],
                "shape": specs[name].shape,
                "data_offsets": [length, length + size],
            }
            length += size
        raw = json.dumps(header).encode()
        raw += b" " * (-(len(raw) + 8) % HEADER_ALIGNMENT)
        stream.write(len(raw).to_bytes(8, "little") + raw)
        for name in order:
            offset = self.layout.slots[name].offset
            stream.write(self.arena.memory[offset : offset + nbytes(specs[name])])
        return length

    def wire(self, update: Update, server: int) -> Json:
        return {"file": str(self._file(update)), "first": self.first_receiver(update, server)}

    def received(self, update: Update, receiver: int) -> Received | None:
        try:
            raw = json.loads(_report_file(self._file(update), receiver).read_text())
        except (OSError, ValueError):
            return None
        by_name: dict[str, int] = raw["sums"]
        return Received(Report(**raw["report"]), [by_name[name] for name in update.names] if by_name else [])

    def settle(self, update: Update, whole: bool) -> None:
        file = self._file(update)
        for path in [file, *(_report_file(file, receiver) for receiver, *_ in self.receivers(update))]:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def _report_file(file: Path, receiver: int) -> Path:
    return file.with_suffix(f".{receiver}.json")


_DTYPE_NAMES = {ours: theirs for theirs, ours in SAFETENSORS_DTYPES.items()}


class Receiver(base.Receiver):
    def __init__(self, wire: Json, rank: int) -> None:
        super().__init__(wire, rank)
        self._names: list[str] = []

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        from safetensors import safe_open

        with safe_open(self.wire["file"], framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - no dict
                self._names.append(name)
                yield name, file.get_tensor(name)

    def report(self, report: Report, sums: list[int]) -> None:
        path = _report_file(Path(self.wire["file"]), self.wire["first"] + self.rank)
        unfinished = path.with_suffix(".part")
        named = dict(zip(self._names, sums, strict=False))
        unfinished.write_text(json.dumps({"report": asdict(report), "sums": named}))
        unfinished.rename(path)
