"""A folder that brings this package to another interpreter: a link to the package, and its entry points.

The folder is an entry of the other interpreter's `PYTHONPATH`. The folder above this package would not do: it can be
the `site-packages` of the trainer, whose other packages must not reach the server. SGLang finds our platform for
machines without an accelerator by the entry points of an installed distribution, so the folder has one.

The content depends on the path and on the version of this package only. All servers of a user share the folder, and it
stays: a forkserver and its servers import from it as long as they live.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
from pathlib import Path

from verl_server import __version__
from verl_server.errors import StartupError
from verl_server.platforms import ENTRY_POINTS
from verl_server.server.server_folder import temporary_folder

PACKAGE_PATH = Path(__file__).resolve().parents[2]


def make_package_folder() -> Path:
    """The folder, which is made if it is not there. Raises StartupError if it cannot be made."""
    parent = temporary_folder() / f"verl_server_packages_{os.getuid()}"
    name = hashlib.sha256(f"{PACKAGE_PATH}\n{__version__}\n{sorted(ENTRY_POINTS.items())}".encode()).hexdigest()[:16]
    folder = parent / name
    try:
        parent.mkdir(mode=0o700, exist_ok=True)
        _require_own_folder(parent)
        if not _is_complete(folder):
            shutil.rmtree(folder, ignore_errors=True)  # a program that removes old temporary files has been here
            _write(folder)
    except OSError as error:
        raise StartupError(
            f"the server needs a link to this package in {parent}, which cannot be written: {error}. Set the "
            "environment variable TMPDIR to a writable folder, or install verl_server for server_python"
        ) from error
    return folder


def _require_own_folder(folder: Path) -> None:
    """Raise StartupError for a folder in which another user could replace the package."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise StartupError(
            f"{folder} must be a folder of this user with the mode 0700, because servers import this package from it; "
            "remove it, or set the environment variable TMPDIR to another folder"
        )


def _info(folder: Path) -> Path:
    return folder / f"{PACKAGE_PATH.name}-{__version__}.dist-info"


def _is_complete(folder: Path) -> bool:
    link, info = folder / PACKAGE_PATH.name, _info(folder)
    return link.is_symlink() and all((info / name).is_file() for name in ("METADATA", "entry_points.txt"))


def _write(folder: Path) -> None:
    """Write the folder under another name and rename it, because several processes may make it at the same time."""
    draft = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        (draft / PACKAGE_PATH.name).symlink_to(PACKAGE_PATH)
        info = _info(draft)
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: verl-server\nVersion: {__version__}\n")
        sections = [f"[{group}]\n{entry}\n" for group, entry in ENTRY_POINTS.items()]
        (info / "entry_points.txt").write_text("\n".join(sections))
        draft.rename(folder)
    except OSError:
        shutil.rmtree(draft, ignore_errors=True)
        if not _is_complete(folder):  # otherwise another process was faster
            raise
