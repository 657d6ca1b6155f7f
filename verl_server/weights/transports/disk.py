"""Transport for servers that share only a file system with the trainer: a safetensors file in a shared folder.

The file gets its name when it is complete. The TP ranks write their reports as small files beside it. All files are
removed at the end of the update.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from verl_server.errors import BadInputError, VerlServerError
from verl_server.types import Json
from verl_server.weights.arena import ELEMENT_BYTES, ReceivedReport, Report, tensor_bytes
from verl_server.weights.manifest import SAFETENSORS_DTYPES
from verl_server.weights.transports import base
from verl_server.weights.transports.base import SenderSettings, UpdateAttempt

HEADER_ALIGNMENT = 64
FILE_NAME = re.compile(r"update-[0-9a-f]{32}\.safetensors")
_SAFETENSORS_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}


class Sender(base.Sender):
    """Writes the tensors to a safetensors file, and reads the reports beside it."""

    name = "disk"

    def __init__(self, settings: SenderSettings) -> None:
        super().__init__(settings)
        if settings.folder is None:
            raise BadInputError(
                "weight transport 'disk' needs WeightsConfig(folder=...): a folder that trainer and servers share"
            )
        self._folder = Path(settings.folder).absolute()

    def _path(self, attempt: UpdateAttempt) -> Path:
        return self._folder / f"update-{attempt.id}.safetensors"

    def prepare(self, attempt: UpdateAttempt) -> None:
        """Write the file. Raises VerlServerError if the folder cannot be written."""
        path = self._path(attempt)
        incomplete = path.with_suffix(".part")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with incomplete.open("wb") as file:
                self.sent_bytes = self._write(file, attempt)
                file.flush()
                os.fsync(file.fileno())
            incomplete.rename(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                incomplete.unlink(missing_ok=True)
            raise VerlServerError(f"cannot write the weights to {path}: {error}") from error

    def _write(self, file: Any, attempt: UpdateAttempt) -> int:
        """Write a safetensors file. Returns the number of tensor bytes.

        Tensors with the largest elements come first, so that every tensor begins at a multiple of its element size.
        """
        specs = {name: self.layout.slots[name].spec for name in attempt.names}
        header: Json = {}
        length = 0
        ordered_names = sorted(attempt.names, key=lambda name: -ELEMENT_BYTES[specs[name].dtype])
        for name in ordered_names:
            size = tensor_bytes(specs[name])
            header[name] = {
                "dtype": _SAFETENSORS_NAMES[specs[name].dtype],
                "shape": specs[name].shape,
                "data_offsets": [length, length + size],
            }
            length += size
        raw_header = json.dumps(header).encode()
        raw_header += b" " * (-(len(raw_header) + 8) % HEADER_ALIGNMENT)
        file.write(len(raw_header).to_bytes(8, "little") + raw_header)
        for name in ordered_names:
            offset = self.layout.slots[name].offset
            file.write(self.arena.memory[offset : offset + tensor_bytes(specs[name])])
        return length

    def loader_message(self, attempt: UpdateAttempt, member_index: int) -> Json:
        return {
            "file_path": str(self._path(attempt)),
            "first_receiver": attempt.first_receivers[member_index],
        }

    def read_report(self, attempt: UpdateAttempt, receiver: int) -> ReceivedReport | None:
        try:
            raw = json.loads(_report_path(self._path(attempt), receiver).read_text())
        except (OSError, ValueError):
            problem = (
                f"the server has written no report to {self._folder}. Its machine does not see this folder of the "
                "trainer, or may not write there: mount one file system at this path on both machines"
            )
            return ReceivedReport(Report(attempt.id, ok=False, error=problem), [])
        report = Report.from_json(raw["report"])
        by_name: dict[str, int] = raw["checksums"]
        has_all_checksums = report.ok and by_name  # a load that failed part-way has checksums of some tensors only
        checksums = [by_name[name] for name in attempt.names] if has_all_checksums else []
        return ReceivedReport(report, checksums)

    def finish(self, attempt: UpdateAttempt, succeeded: bool) -> None:
        path = self._path(attempt)
        report_paths = [_report_path(path, rank.receiver) for rank in self.receiving_ranks(attempt)]
        for unneeded in [path, *report_paths]:
            with contextlib.suppress(OSError):
                unneeded.unlink(missing_ok=True)


def _report_path(weights_path: Path, receiver: int) -> Path:
    return weights_path.with_suffix(f".{receiver}.json")


class Receiver(base.Receiver):
    """Reads the tensors from the safetensors file."""

    def __init__(self, message: Json, tp_rank: int) -> None:
        super().__init__(message, tp_rank)
        if not FILE_NAME.fullmatch(Path(message["file_path"]).name):
            raise PermissionError(f"{message['file_path']} is not a file that the transport 'disk' writes")
        self._names: list[str] = []

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        from safetensors import safe_open

        with safe_open(self.message["file_path"], framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - the file object is no dict
                self._names.append(name)
                yield name, file.get_tensor(name)

    def send_report(self, report: Report, checksums: list[int]) -> None:
        path = _report_path(Path(self.message["file_path"]), self.message["first_receiver"] + self.tp_rank)
        incomplete = path.with_suffix(".part")
        by_name = dict(zip(self._names, checksums, strict=False))
        incomplete.write_text(json.dumps({"report": asdict(report), "checksums": by_name}))
        incomplete.rename(path)
