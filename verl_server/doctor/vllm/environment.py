"""Checks of a Python environment in which vLLM servers will run."""

from __future__ import annotations

from collections.abc import Mapping

from verl_server.adapter.sglang.launch import SGLANG
from verl_server.adapter.vllm.launch import VLLM
from verl_server.doctor.finding import Finding, fail, ok, warn
from verl_server.doctor.packages import check_package, parse_requirements
from verl_server.server.interpreter.report import InterpreterReport
from verl_server.vllm_server.start_checks import (
    DISTRIBUTIONS,
    MINIMUM_VERSION,
    NEWEST_VERSION,
    TESTED_VERSION,
    explain_version,
    is_newer_than_checked,
)

#: Distributions whose versions are shown beside that of vLLM.
SHOWN = ("torch", "transformers")
PROJECT, CPU_BUILD = DISTRIBUTIONS
OLDEST, NEWEST = (".".join(map(str, numbers)) for numbers in (MINIMUM_VERSION, NEWEST_VERSION))
SUPPORTED = f"tested: {TESTED_VERSION}; supported: {OLDEST} to {NEWEST}"
#: Variable that makes vLLM select its CPU platform, whatever its version is called.
TARGET_DEVICE = "VLLM_TARGET_DEVICE"
OTHER_ENVIRONMENT = (
    "this environment has SGLang, which cannot share one with vLLM: pass --server-python PATH with the Python "
    "interpreter of an environment with vLLM (`make setup-vllm` makes .venv-vllm/bin/python)"
)


def installed_distribution(versions: Mapping[str, str | None]) -> str | None:
    """The distribution from which vLLM reads its version, as vLLM itself chooses it. None if it is not installed."""
    return next((name for name in DISTRIBUTIONS if versions.get(name) is not None), None)


def check_version(report: InterpreterReport, *, pip: str, has_accelerator: bool) -> Finding:
    """Check that vLLM is installed in a supported version. `pip`: the command that installs packages there."""
    name = installed_distribution(report.versions)
    if name is None and report.folders.get(PROJECT) is not None:
        return ok(VLLM.name, "sources without an installed version")
    if name is None:
        return fail(
            VLLM.name,
            "not installed",
            symptom="StartupError when a server starts: no package vllm",
            fix=OTHER_ENVIRONMENT
            if report.versions.get(SGLANG.distribution)
            else _install(pip, has_accelerator=has_accelerator),
        )
    version = report.versions[name] or ""
    if (refusal := explain_version(name, version)) is not None:
        return fail(
            VLLM.name,
            refusal.rpartition("; ")[0],
            symptom="BadInputError when a server starts: vLLM refuses the server arguments",
            fix=_install(pip, has_accelerator=name == PROJECT),
        )
    if is_newer_than_checked(version):
        return warn(
            VLLM.name,
            f"{name} {version} is newer than all versions that were tried ({SUPPORTED})",
            symptom="the server may not start, or answer in another form",
            fix=_install(pip, has_accelerator=name == PROJECT),
        )
    return ok(VLLM.name, f"{name} {version} ({SUPPORTED})")


def _install(pip: str, *, has_accelerator: bool) -> str:
    modules = " ".join(name for name in VLLM.modules if name != PROJECT)
    if has_accelerator:
        return f"{pip} install {PROJECT}=={TESTED_VERSION} {modules}"
    return (
        f"`make setup-vllm` in a clone of verl-server, or: {pip} install {CPU_BUILD}=={TESTED_VERSION} {modules}. Both "
        "need the wheel of torch for CPUs, which is not on PyPI: set PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL to a place "
        "that has it"
    )


def check_platform(
    versions: Mapping[str, str | None], environment: Mapping[str, str], *, python: str, has_accelerator: bool
) -> Finding:
    """Check which platform vLLM selects. It selects the CPU only if `cpu` is in its version, or by a variable.

    `environment`: the variables that servers inherit.
    """
    title, name = "vLLM platform", installed_distribution(versions)
    forced = environment.get(TARGET_DEVICE) == "cpu"
    is_cpu_build = name == CPU_BUILD or (name is not None and "cpu" in (versions[name] or ""))
    if has_accelerator and (forced or is_cpu_build):
        return warn(
            title,
            "CPU, but this machine has an accelerator",
            symptom="generation is slow, and no memory of the accelerator is used",
            fix=f"unset {TARGET_DEVICE}" if forced else f"{python} -m pip install {PROJECT}=={TESTED_VERSION}",
        )
    if has_accelerator or forced or is_cpu_build or name is None:
        return ok(title, "that of the accelerator" if has_accelerator else "CPU")
    has_cpu_build = versions.get(CPU_BUILD) is not None
    return fail(
        title,
        f"none: this machine has no accelerator, and vLLM takes its version {versions[name]} for a build that needs one"
        + (f", although {CPU_BUILD} is installed: another distribution is called {name}" if has_cpu_build else ""),
        symptom="the server ends during its start: UnspecifiedPlatform, or Failed to infer device type",
        fix=f"export {TARGET_DEVICE}=cpu, or let the version of the distribution {name} end with +cpu"
        if has_cpu_build
        else f"Install the build for CPUs into another environment: {_install('pip', has_accelerator=False)}",
    )


def check_console_script(versions: Mapping[str, str | None], *, python: str) -> Finding | None:
    """Report that the program `vllm` does not run. None if it does. Servers of this library do not use it."""
    if installed_distribution(versions) != CPU_BUILD:
        return None
    return ok(
        "Program vllm",
        f"ends with PackageNotFoundError, because the distribution is called {CPU_BUILD}; servers of this library do "
        f"not use it. By hand: {python} -m vllm.entrypoints.openai.api_server --model MODEL",
    )


def check_packages(report: InterpreterReport, here: Mapping[str, str | None], *, pip: str) -> list[Finding]:
    """Check the packages of the server. `here`: versions of this process's environment."""
    wanted, findings = parse_requirements(report.requirements), []
    for name in SHOWN:
        installed, other = report.versions.get(name), here.get(name)
        finding = check_package(name, installed, wanted.get(name, ""), pip=pip, engine=VLLM.name)
        if finding.level == "ok" and other not in (None, installed):
            finding = ok(name, f"{finding.detail} ({other} on this side)")
        findings.append(finding)
    others = [name for name in VLLM.modules if name != PROJECT]
    missing = [name for name in others if report.folders.get(name) is None]
    return findings + [check_package(name, None, "", pip=pip) for name in missing]


def examine(
    python: str,
    report: InterpreterReport,
    here: Mapping[str, str | None],
    environment: Mapping[str, str],
    *,
    has_accelerator: bool,
) -> list[Finding]:
    """Check what an interpreter has for vLLM servers. `python`: its path, for commands.

    `report` has the modules of `VLLM` and the versions of `DISTRIBUTIONS`, `SHOWN` and SGLang.
    """
    pip = f"{python} -m pip"
    version = check_version(report, pip=pip, has_accelerator=has_accelerator)
    if report.folders.get(PROJECT) is None:
        return [version]
    script = check_console_script(report.versions, python=python)
    return [
        version,
        *check_packages(report, here, pip=pip),
        check_platform(report.versions, environment, python=python, has_accelerator=has_accelerator),
        *([script] if script else []),
    ]
