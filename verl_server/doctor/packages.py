"""Checks of the versions of Python and of the packages of a server, and of their compiled bytecode."""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from verl_server.adapter.sglang.capabilities import SUPPORTED_VERSIONS, TESTED_VERSION
from verl_server.doctor.finding import Finding, fail, ok, warn

MINIMUM_PYTHON = (3, 11)
#: Modules that every server process imports. If their bytecode exists, the check assumes that of all others.
SAMPLE_MODULES = ("sglang/srt/server_args.py", "torch/nn/functional.py", "transformers/modeling_utils.py")


def check_python(version: tuple[int, ...]) -> Finding:
    """Check the version of Python. `version` is `sys.version_info[:3]`."""
    text = ".".join(map(str, version))
    if version < MINIMUM_PYTHON:
        return fail(
            "Python", text, symptom="SyntaxError or ImportError at the first import", fix="Use Python 3.11 or newer."
        )
    return ok("Python", text)


def check_sglang(installed: str | None, *, pip: str = "pip") -> Finding:
    """Check that SGLang is installed in a supported version. `pip`: the command that installs packages there."""
    lowest, highest = SUPPORTED_VERSIONS
    versions = f"tested: {TESTED_VERSION}; supported, with probed capabilities: {lowest} to {highest}"
    fix = f"{pip} install 'sglang>={lowest},<={highest}'"
    if installed is None:
        return fail(
            "SGLang",
            "not installed",
            symptom="StartupError when a server starts: SGLang is not installed",
            fix=fix,
        )
    if Version(lowest).release <= Version(installed).release <= Version(highest).release:
        return ok("SGLang", f"{installed} ({versions})")
    return warn(
        "SGLang",
        f"{installed} is not a supported version ({versions})",
        symptom="weight updates fail with status 404 or 400, or SGLang refuses server arguments",
        fix=fix,
    )


def check_package(
    name: str, installed: str | None, wanted: str, *, needed: bool = True, pip: str = "pip", engine: str = "SGLang"
) -> Finding:
    """Check one package against the requirement in the metadata of the engine.

    `wanted` is a version specifier such as "==2.14.1", or "" for any version. `needed` is False for a package that
    this machine can do without. `pip`: the command that installs packages there.
    """
    fix = f"{pip} install '{name}{wanted}'"
    if installed is None:
        if not needed:
            return ok(name, "not installed; only an NVIDIA GPU needs it")
        return fail(
            name, "not installed", symptom=f"the server's log ends with an ImportError that names {name}", fix=fix
        )
    if wanted and not SpecifierSet(wanted).contains(installed, prereleases=True):
        return warn(
            name,
            f"{installed}, but the installed {engine} requires {wanted}",
            symptom="the server ends with an ImportError or an undefined symbol, or its results are wrong",
            fix=fix,
        )
    return ok(name, installed)


def check_bytecode(missing: list[str], *, written: bool, site_packages: str) -> Finding:
    """Check for compiled bytecode.

    `missing` are the sample modules without a .pyc file. `written` is True if Python writes the file on import.
    """
    if not missing:
        return ok("Bytecode", "installed packages are compiled")
    if written:
        return ok(
            "Bytecode", f"{len(missing)} sample modules are not compiled yet; the first start of a server compiles them"
        )
    return warn(
        "Bytecode",
        f"{', '.join(missing)} are not compiled, and Python does not write bytecode "
        "(PYTHONDONTWRITEBYTECODE is set or the folder is read-only)",
        symptom="every start of a server takes more than 60 s instead of 15 s",
        fix=f"{sys.executable} -m compileall -q -j 0 {site_packages}",
    )


def installed_version(*names: str) -> str | None:
    """Version of the first installed distribution among `names`. None if none is installed."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def wanted_by_sglang() -> dict[str, str]:
    """Version specifiers by distribution name, from the metadata of the installed SGLang."""
    try:
        lines = metadata.requires("sglang") or []
    except metadata.PackageNotFoundError:
        return {}
    return parse_requirements(lines)


def parse_requirements(lines: Iterable[str]) -> dict[str, str]:
    """Version specifiers by distribution name, from the requirements of a distribution's metadata."""
    requirements = [Requirement(line) for line in lines]
    here = [item for item in requirements if item.marker is None or item.marker.evaluate({"extra": ""})]
    return {item.name.replace("_", "-"): str(item.specifier) for item in here}


def uncompiled(site_packages: Path) -> list[str]:
    """The installed sample modules without bytecode."""
    sources = [name for name in SAMPLE_MODULES if (site_packages / name).is_file()]
    return [n for n in sources if not Path(importlib.util.cache_from_source(str(site_packages / n))).exists()]


def examine_trainer() -> list[Finding]:
    """Check the environment of a trainer whose servers have an environment of their own."""
    return [
        check_python(sys.version_info[:3]),
        *(check_package(name, installed_version(name), "") for name in ("torch", "transformers")),
    ]


def examine(*, nvidia: bool) -> list[Finding]:
    """Check this Python environment. `nvidia` is True if servers use an NVIDIA GPU and need its kernel packages."""
    wanted = wanted_by_sglang()
    # The kernel package has different names in the supported versions of SGLang.
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
