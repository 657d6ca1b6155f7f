"""Transport for servers that share only a file system with the trainer: a safetensors file in a shared folder.

The file gets its name when it is complete. While the servers serve, a thread of each server reads it once: it is then
in the page cache of the server's machine, and its checksums are known. The TP ranks write their reports as small files
beside it. All files are removed at the end of the update.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import torch

from verl_server.errors import BadInputError, UnsupportedError, VerlServerError
from verl_server.types import Json
from verl_server.weights.arena import (
    ELEMENT_BYTES,
    XXH3,
    ReceivedReport,
    Report,
    compute_checksum,
    error_text,
    tensor_bytes,
)
from verl_server.weights.manifest import SAFETENSORS_DTYPES
from verl_server.weights.transports import base
from verl_server.weights.transports.base import SenderSettings, UpdateAttempt

logger = logging.getLogger(__name__)
HEADER_ALIGNMENT = 64
POLL_INTERVAL_S = 0.02
OPENING_TIMEOUT_S = 10.0
"""Seconds until the trainer must see that a server has begun to read: a network file system may show it late."""
BEGUN = ".part"
"""Suffix of a report that is not finished, and of one on a file that is being read."""
STAGED = "-staged"
"""Part of the name of a report on what was read before the pause."""
FILE_NAME = re.compile(r"update-[0-9a-f]{32}\.safetensors")
_SAFETENSORS_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}


class Sender(base.Sender):
    """Writes the tensors to a safetensors file, and reads the reports beside it."""

    name = "disk"
    stages = True

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

    def deliver(self, attempt: UpdateAttempt, checksums: Sequence[int], is_wanted: Callable[[], bool]) -> None:
        """Wait until each server has read the file, and compare the checksums."""
        started = time.monotonic()
        for rank in self.receiving_ranks(attempt):
            path = _report_path(self._path(attempt), rank.receiver, STAGED)
            while not path.exists():
                is_begun = path.with_suffix(BEGUN).exists() or path.exists()
                if not is_wanted():
                    raise VerlServerError("a server has ended while it read the weights")
                kind, timeout_s = VerlServerError, self.settings.timeout_s
                if not is_begun:
                    kind, timeout_s = UnsupportedError, OPENING_TIMEOUT_S
                if time.monotonic() > started + timeout_s:
                    raise kind(
                        f"{rank.label}: {self._no_report()}. The server keeps its weights", servers=[rank.server]
                    )
                time.sleep(POLL_INTERVAL_S)
                with contextlib.suppress(OSError):
                    os.listdir(self._folder)  # a client of a network file system asks its server again
            try:
                received = _read_report(path, attempt)
            except (OSError, ValueError, KeyError) as error:
                raise VerlServerError(f"the report of {rank.label} cannot be read: {error}") from error
            if not received.report.ok:
                reason = received.report.error
                raise VerlServerError(f"{rank.label} could not stage the weights: {reason}", servers=[rank.server])
            if received.checksums and received.checksums != list(checksums):
                raise VerlServerError(f"{rank.label} read other weights than were written", servers=[rank.server])

    def _no_report(self) -> str:
        return (
            f"the server has written no report to {self._folder}. Its machine does not see this folder of the "
            "trainer, or may not write there: mount one file system at this path on both machines"
        )

    def read_report(self, attempt: UpdateAttempt, receiver: int) -> ReceivedReport | None:
        try:
            return _read_report(_report_path(self._path(attempt), receiver), attempt)
        except (OSError, ValueError):
            return ReceivedReport(Report(attempt.id, ok=False, error=self._no_report()), [])

    def finish(self, attempt: UpdateAttempt, succeeded: bool) -> None:
        path = self._path(attempt)
        receivers = [rank.receiver for rank in self.receiving_ranks(attempt)]
        reports = [_report_path(path, receiver, kind) for receiver in receivers for kind in (STAGED, "")]
        for unneeded in [path, path.with_suffix(BEGUN), *reports, *(report.with_suffix(BEGUN) for report in reports)]:
            with contextlib.suppress(OSError):
                unneeded.unlink(missing_ok=True)


def _report_path(weights_path: Path, receiver: int, kind: str = "") -> Path:
    return weights_path.with_suffix(f".{receiver}{kind}.json")


def _read_report(path: Path, attempt: UpdateAttempt) -> ReceivedReport:
    raw = json.loads(path.read_text())
    report = Report.from_json(raw["report"])
    by_name: dict[str, int] = raw["checksums"]
    has_all_checksums = report.ok and by_name  # a load that failed part-way has checksums of some tensors only
    return ReceivedReport(report, [by_name[name] for name in attempt.names] if has_all_checksums else [])


class Receiver(base.Receiver):
    """Reads the tensors from the safetensors file, which `open_only` has mapped and read."""

    _staging: ClassVar[Receiver | None] = None
    """The update that this TP rank has staged last, or is staging now."""

    def __init__(self, message: Json, tp_rank: int) -> None:
        super().__init__(message, tp_rank)
        if not FILE_NAME.fullmatch(Path(message["file_path"]).name):
            raise PermissionError(f"{message['file_path']} is not a file that the transport 'disk' writes")
        self._tensors: list[tuple[str, torch.Tensor]] = []
        self._names: list[str] = []
        staging = Receiver._staging
        if staging is not None and staging.message["update_id"] == message["update_id"]:
            self._tensors, Receiver._staging = staging._tensors, None

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._tensors)

    def close(self) -> None:
        self._names, self._tensors = [name for name, _ in self._tensors], []

    @classmethod
    def open_only(cls, message: Json, tp_rank: int) -> None:
        """Stage the update in a thread, while the server serves: every page of the file is in its memory then."""
        Receiver._staging = receiver = cls(message, tp_rank)
        receiver._report_path(STAGED).with_suffix(BEGUN).touch()
        threading.Thread(target=receiver._stage, name="verl-server-stage", daemon=True).start()

    def _stage(self) -> None:
        from safetensors import safe_open

        report, checksums = Report(self.message["update_id"], ok=True), list[int]()
        try:
            with safe_open(self.message["file_path"], framework="pt") as file:
                self._tensors = [(name, file.get_tensor(name)) for name in file.keys()]  # noqa: SIM118 - no dict
            checksums = [compute_checksum(tensor) for _, tensor in self._tensors]
            if not self.message["verify"] or self.message["checksum"] != XXH3:
                checksums = []
            self._names = [name for name, _ in self._tensors]
        except Exception as error:  # noqa: BLE001 - the error goes into the report
            report = Report(self.message["update_id"], ok=False, error=error_text(error))
        begun = self._report_path(STAGED).with_suffix(BEGUN)
        try:
            if Path(self.message["file_path"]).exists():  # else the trainer has given up
                self._write_report(report, checksums, STAGED)
        except OSError:
            logger.exception("the report on the weights in %s cannot be written", self.message["file_path"])
        with contextlib.suppress(OSError):  # the trainer does not wait for a report that does not come
            begun.unlink(missing_ok=True)

    def _report_path(self, kind: str) -> Path:
        return _report_path(Path(self.message["file_path"]), self.message["first_receiver"] + self.tp_rank, kind)

    def send_report(self, report: Report, checksums: list[int]) -> None:
        self._write_report(report, checksums)

    def _write_report(self, report: Report, checksums: list[int], kind: str = "") -> None:
        path = self._report_path(kind)
        incomplete = path.with_suffix(BEGUN)
        by_name = dict(zip(self._names, checksums, strict=False))
        incomplete.write_text(json.dumps({"report": asdict(report), "checksums": by_name}))
        incomplete.rename(path)
