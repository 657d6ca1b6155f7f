"""Python environments beside that of the suite, made in a fraction of a second from links to its packages."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

SITE_PACKAGES = Path(sysconfig.get_path("purelib"))
#: How the names of the files of this package and of its editable installation begin.
OWN_FILES = ("verl_server", "__editable__")


def make_environment(folder: Path, *, without: Iterable[str] = (), fake_version: str | None = None) -> Path:
    """Make a virtual environment with links to the packages of the suite, and return its interpreter.

    It does not have this package, nor what begins with a name in `without`. `fake_version`: the environment says that
    this version of this package is installed.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
    python = folder / "bin" / "python"
    site_packages = next(folder.glob("lib/python*/site-packages"))
    hidden = (*OWN_FILES, *without)
    for entry in SITE_PACKAGES.iterdir():
        if not entry.name.startswith(hidden) and entry.suffix != ".pth":
            (site_packages / entry.name).symlink_to(entry)
    if fake_version is not None:
        info = site_packages / f"verl_server-{fake_version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: verl-server\nVersion: {fake_version}\n")
    return python
