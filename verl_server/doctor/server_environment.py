"""Checks of another Python environment, in which servers will run (`--server-python`)."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from verl_server import __version__
from verl_server.adapter.sglang.launch import SGLANG
from verl_server.doctor.finding import Finding, fail, ok
from verl_server.doctor.packages import (
    check_package,
    check_python,
    check_sglang,
    installed_version,
    parse_requirements,
)
from verl_server.errors import VerlServerError
from verl_server.platforms import ENTRY_POINTS
from verl_server.server.interpreter.report import DISTRIBUTION, InterpreterReport, interpreter_path
from verl_server.server.interpreter.server_python import read_environment

#: Distributions of both sides that may differ. Differences are shown, because they explain different results.
SHOWN = ("torch", "transformers")
KERNELS = ("flashinfer-python", "sgl-kernel", "sglang-kernel")


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


def examine(server_python: Path | str, *, nvidia: bool) -> list[Finding]:
    """Check the environment of an interpreter, which is started for this with a deadline."""
    try:
        path = interpreter_path(server_python)
        report = read_environment(path, {}, SGLANG, distributions=[*SHOWN, *KERNELS])
    except VerlServerError as error:
        return [
            fail(
                "Interpreter",
                error.message,
                symptom=f"{type(error).__name__} when a server starts",
                fix="Pass the path of a Python interpreter, 3.11 or newer, for example /opt/sglang/bin/python.",
            )
        ]
    python = shlex.quote(path)
    return [
        check_python(report.python),
        check_own_package(python, report),
        *check_packages(python, report, {name: installed_version(name) for name in SHOWN}, nvidia=nvidia),
        check_plugin(python, report),
    ]
