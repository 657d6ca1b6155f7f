"""Checks of another Python environment, in which servers will run (`--server-python`)."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from verl_server import __version__
from verl_server.adapter.sglang.launch import SGLANG
from verl_server.adapter.vllm.launch import VLLM
from verl_server.doctor.finding import Finding, fail, ok
from verl_server.doctor.hardware import Hardware
from verl_server.doctor.packages import (
    check_package,
    check_python,
    check_sglang,
    installed_version,
    parse_requirements,
)
from verl_server.doctor.vllm import environment as vllm_environment
from verl_server.errors import BadInputError, VerlServerError
from verl_server.platforms import ENTRY_POINTS
from verl_server.server.engine_profile import EngineProfile
from verl_server.server.interpreter.report import DISTRIBUTION, InterpreterReport, interpreter_path
from verl_server.server.interpreter.server_python import is_own_interpreter, read_environment
from verl_server.validation import did_you_mean
from verl_server.vllm_server.start_checks import DISTRIBUTIONS

#: Engines whose environments are checked.
ENGINE_KINDS = ("sglang", "vllm")
#: Distributions of both sides that may differ. Differences are shown, because they explain different results.
SHOWN = ("torch", "transformers")
KERNELS = ("flashinfer-python", "sgl-kernel", "sglang-kernel")


@dataclass(frozen=True)
class InstalledEngine:
    """The engine of the servers."""

    kind: str
    """One of `ENGINE_KINDS`."""
    folder: Path | None = None
    """Folder of the engine's package. None if it is not known."""


def check_own_package(python: str, report: InterpreterReport) -> Finding:
    """Check the version of this package on both sides."""
    title, version = "verl_server", report.versions.get(DISTRIBUTION)
    if version is None:
        return ok(title, f"{__version__} on this side; not installed there, so servers use the copy of this side")
    if version != __version__:
        return fail(
            title,
            f"{version} there, but {__version__} on this side",
            symptom="StartupError: both must have the same version",
            fix=f"{python} -m pip uninstall verl-server  # servers then use the copy of this side",
        )
    if not report.has_package:
        return ok(title, f"{version} on both sides; its files are not there, so servers use the copy of this side")
    return ok(title, f"{version} on both sides")


def check_plugin(python: str, report: InterpreterReport) -> Finding:
    """Check that SGLang finds the platform for machines without an accelerator."""
    title, wanted = "SGLang platform", {entry.partition(" = ")[2] for entry in ENTRY_POINTS.values()}
    if not report.has_package:
        return ok(title, "servers get our plugin from the copy of this side")
    if missing := wanted - set(report.plugins):
        return fail(
            title,
            f"the entry points {', '.join(sorted(missing))} are not installed there",
            symptom="without an accelerator, the server ends during its start because it finds no device",
            fix=f"{python} -m pip install --no-deps --force-reinstall verl-server=={__version__}",
        )
    return ok(title, "our plugin is installed there")


def check_packages(
    python: str, report: InterpreterReport, here: Mapping[str, str | None], *, nvidia: bool
) -> list[Finding]:
    """Check the engine and its packages there. `here`: versions of this process's environment."""
    pip, wanted = f"{python} -m pip", parse_requirements(report.requirements)
    sglang = report.versions.get(SGLANG.distribution)
    if sglang is None and report.folders.get(SGLANG.distribution) is not None:
        engine = ok("SGLang", "sources without an installed version")
    else:
        engine = check_sglang(sglang, pip=pip)
    findings = [engine]
    for name in SHOWN:
        finding = check_package(name, report.versions.get(name), wanted.get(name, ""), pip=pip)
        other = here.get(name)
        if finding.level == "ok" and other is not None and other != report.versions.get(name):
            finding = ok(name, f"{finding.detail} ({other} on this side)")
        findings.append(finding)
    kernels = [name for name in KERNELS if name in wanted]
    findings += [
        check_package(name, report.versions.get(name), wanted[name], needed=nvidia, pip=pip) for name in kernels
    ]
    others = [name for name in SGLANG.modules if name != SGLANG.distribution and report.folders.get(name) is None]
    findings += [check_package(name, None, "", pip=pip) for name in others]
    return findings


def examine(
    server_python: Path | str, hardware: Hardware, *, engine_kind: str | None = None
) -> tuple[list[Finding], InstalledEngine]:
    """Check the environment of an interpreter, which is started for this with a deadline.

    `engine_kind`: the engine of the servers; None is the engine that the environment has. Returns the engine as well.
    """
    try:
        path = interpreter_path(server_python)
        report = _read(path, SGLANG)
        kind = engine_kind or find_engine_kind(report)
        if kind == "vllm":
            distribution = vllm_environment.installed_distribution(report.versions) or VLLM.distribution
            report = _read(path, replace(VLLM, distribution=distribution))
    except VerlServerError as error:
        finding = fail(
            "Interpreter",
            error.message,
            symptom=f"{type(error).__name__} when a server starts",
            fix="Pass the path of a Python interpreter, 3.11 or newer, for example /opt/sglang/bin/python.",
        )
        return [finding], InstalledEngine(engine_kind or SGLANG.distribution)
    python = shlex.quote(path)
    here = {name: installed_version(name) for name in SHOWN}
    found = [check_python(report.python)]
    if not is_own_interpreter(path):
        found.append(check_own_package(python, report))
    if kind == "vllm":
        has_accelerator = hardware.accelerator is not None or (hardware.nvidia_device and not hardware.hidden)
        found += vllm_environment.examine(python, report, here, os.environ, has_accelerator=has_accelerator)
    else:
        nvidia = hardware.accelerator == "cuda"
        found += [*check_packages(python, report, here, nvidia=nvidia), check_plugin(python, report)]
    folder = report.folders.get(kind)
    return found, InstalledEngine(kind, None if folder is None else Path(folder))


def require_engine_kind(kind: str) -> None:
    """Raise BadInputError for an engine that this library does not have."""
    if kind not in ENGINE_KINDS:
        raise BadInputError(
            f"engine_kind must be {' or '.join(ENGINE_KINDS)}, got {kind!r}{did_you_mean(kind, ENGINE_KINDS)}",
            argument="engine_kind",
        )


def find_engine_kind(report: InterpreterReport) -> str:
    """The engine that an environment has. SGLang if it has none."""
    has_sglang = report.folders.get("sglang") is not None or report.versions.get("sglang") is not None
    has_vllm = report.folders.get("vllm") is not None or vllm_environment.installed_distribution(report.versions)
    return "vllm" if has_vllm and not has_sglang else "sglang"


def find_own_engine_kind() -> str:
    """The engine of this process's environment. SGLang if it has none."""
    has_sglang = find_spec("sglang") is not None
    return "vllm" if not has_sglang and installed_version(*DISTRIBUTIONS) is not None else "sglang"


def _read(path: str, profile: EngineProfile) -> InterpreterReport:
    """What an interpreter has of both engines, with the requirements of the distribution of `profile`."""
    both = replace(profile, modules={**SGLANG.modules, **VLLM.modules})
    distributions = [*SHOWN, *KERNELS, SGLANG.distribution, *DISTRIBUTIONS]
    return read_environment(path, {}, both, distributions=distributions)
