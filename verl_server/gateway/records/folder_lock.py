"""The lock of the folder of the records: one gateway at a time serves a folder."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from verl_server.trajectory.locked_files import open_locked
from verl_server.validation import make_writable_folder

LOCK_FILE = ".gateway.lock"
"""File in the folder of the records that a running gateway holds locked. It has the URL of the gateway."""


def lock_folder(run_dir: Path, url: str) -> int:
    """Lock the folder for the gateway at `url`. Returns a descriptor of `open_locked`.

    Raises ServerBusyError if another gateway serves the folder, and BadInputError if the folder takes no files.
    """
    with contextlib.suppress(OSError):  # the next line raises the error
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = make_writable_folder("run_dir", run_dir) / LOCK_FILE
    owner = path.read_text().strip() if path.exists() else ""
    lock = open_locked(
        path,
        f"another gateway serves the folder {run_dir}: {owner or 'it is starting'}; "
        "use that gateway, or pass another folder",
    )
    with contextlib.suppress(OSError):  # the disk is full: the text is a hint only
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{url}, process {os.getpid()}".encode(), 0)
    return lock
