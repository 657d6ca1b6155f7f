"""The temporary folder of one server: its working folder and, without a `log_dir`, its log.

The warden removes the working folder when the server ends. A crashed server leaves its log for the user. At most
`MAX_KEPT_LOGS` such logs of one user are kept on a machine: a replica that crashes for weeks would fill the disk.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from verl_server.errors import StartupError

PREFIX = "verl-server-"
LOG_NAME = "server.log"
WORKING_FOLDER = "tmp"
MAX_KEPT_LOGS = 20


def temporary_folder() -> Path:
    """The folder for temporary files of this process. Raises StartupError if no such folder is writable."""
    try:
        return Path(tempfile.gettempdir())
    except OSError as error:
        raise _not_writable(error) from error


def make_server_folder() -> Path:
    """A new folder with a working folder in it. Removes the oldest logs of crashed servers. Raises StartupError."""
    parent = temporary_folder()
    try:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        (folder / WORKING_FOLDER).mkdir()
    except OSError as error:
        raise _not_writable(error) from error
    for old in kept_logs(folder.parent)[MAX_KEPT_LOGS:]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def _not_writable(error: OSError) -> StartupError:
    return StartupError(
        f"the server needs a folder for temporary files, and none can be written: {error}. Set the environment "
        "variable TMPDIR to a writable folder"
    )


def kept_logs(parent: Path) -> list[Path]:
    """The folders of this user's servers that have ended and left a log, the latest first."""
    found: list[tuple[float, Path]] = []
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another process removes it
            log = (folder / LOG_NAME).stat()
            if log.st_uid == os.geteuid() and not (folder / WORKING_FOLDER).exists():
                found.append((log.st_mtime, folder))
    return [folder for _, folder in sorted(found, reverse=True)]
