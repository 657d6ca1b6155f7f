"""Versions of Python and of the packages that a server consists of, and whether their bytecode is compiled."""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from verl_server.adapter.sglang.capabilities import TESTED_VERSIONS
from verl_server.doctor.finding import Finding, fail, ok, warn

MINIMUM_PYTHON = (3, 11)
#: Modules that every server process imports; if these are compiled, the rest is.
SAMPLE_MODULES = ("sglang/srt/server_args.py", "torch/nn/functional.py", "transformers/modeling_utils.py")


def check_python(version: tuple[int, ...]) -> Finding:
    """`version` is `sys.version_info[:3]`."""
    text = ".".join(map(str, version))
    if version < MINIMUM_PYTHON:
        return fail(
            "Python", text, symptom="SyntaxError or ImportError at the first import", fix="Use Python 3.11 or newer."
        )
    return ok("Python", text)


def check_sglang(installed: str | None) -> Finding:
    """Is SGLang there, in a version whose behaviour is tested?"""
    lowest, highest = TESTED_VERSIONS
    fix = f"pip install 'sglang>={lowest},<={highest}'"
    if installed is None:
        return fail(
            "SGLang", "not installed", symptom="ModuleNotFoundError: No module named 'sglang' in the log", fix=fix
        )
    if Version(lowest).release <= Version(installed).release <= Version(highest).release:
        return ok("SGLang", f"{installed} (tested: {lowest} to {highest})")
    return warn(
        "SGLang",
        f"{installed} is outside the tested range {lowest} to {highest}",
        symptom="404 or 400 on weight update endpoints; unknown server arguments",
        fix=fix,
    )


def check_package(name: str, installed: str | None, wanted: str, *, needed: bool = True) -> Finding:
    """One package against what SGLang's own metadata asks for (`wanted` as in "==2.14.1", or "" for any)."""
    fix = f"pip install '{name}{wanted}'"
    if installed is None:
        if not needed:
            return ok(name, "not installed, not needed without an NVIDIA GPU")
        return fail(name, "not installed", symptom=f"the server's log ends with an ImportError about {name}", fix=fix)
    if wanted and not SpecifierSet(wanted).contains(installed, prereleases=True):
        return warn(
            name,
            f"{installed}, but the installed SGLang asks for {wanted}",
            symptom="ImportError, undefined symbol or wrong results when the server loads a model",
            fix=fix,
        )
    return ok(name, installed)


def check_bytecode(missing: list[str], *, written: bool, site_packages: str) -> Finding:
    """`missing`: sample modules without a .pyc. `written`: Python may write one when it imports them."""
    if not missing:
        return ok("Bytecode", "installed packages are compiled")
    if written:
        return ok("Bytecode", f"{len(missing)} sample modules are not compiled yet; the first start does it")
    return warn(
        "Bytecode",
        f"{', '.join(missing)} are not compiled, and Python may not write bytecode here "
        "(PYTHONDONTWRITEBYTECODE is set or the folder is read-only)",
        symptom="a server takes over 60 s to start instead of 15, every time",
        fix=f"{sys.executable} -m compileall -q -j 0 {site_packages}",
    )


def installed_version(*names: str) -> str | None:
    """Version of the first of these distributions that is installed."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def wanted_by_sglang() -> dict[str, str]:
    """Distribution -> version specifier, from the metadata of the installed SGLang."""
    try:
        lines = metadata.requires("sglang") or []
    except metadata.PackageNotFoundError:
        return {}
    requirements = [Requirement(line) for line in lines]
    here = [item for item in requirements if item.marker is None or item.marker.evaluate({"extra": ""})]
    return {item.name.replace("_", "-"): str(item.specifier) for item in here}


def uncompiled(site_packages: Path) -> list[str]:
    """Sample modules that are installed and have no bytecode."""
    sources = [name for name in SAMPLE_MODULES if (site_packages / name).is_file()]
    return [n for n in sources if not Path(importlib.util.cache_from_source(str(site_packages / n))).exists()]


def examine(*, nvidia: bool) -> list[Finding]:
    """Look at this Python environment. `nvidia`: an NVIDIA GPU will be used, so its kernels are needed."""
    wanted = wanted_by_sglang()
    # The kernel package changed its name between the versions we support.
    kernels = "sgl-kernel" if "sgl-kernel" in wanted else "sglang-kernel"
    site_packages = Path(sysconfig.get_path("purelib"))
    return [
        check_python(sys.version_info[:3]),
        check_sglang(installed_version("sglang")),
        *(check_package(name, installed_version(name), wanted.get(name, "")) for name in ("torch", "transformers")),
        *(
            check_package(name, installed_version(name), wanted.get(name, ""), needed=nvidia)
            for name in ("flashinfer-python", kernels)
        ),
        check_bytecode(
            uncompiled(site_packages),
            written=not sys.dont_write_bytecode and os.access(site_packages, os.W_OK),
            site_packages=str(site_packages),
        ),
    ]
