"""Checks of the environment in which servers run: its interpreter, the engine and its packages, vLLM's variables."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from verl_server import __version__
from verl_server.adapter.sglang.server_arguments import SGLANG, SUPPORTED_VERSIONS, TESTED_VERSION
from verl_server.adapter.vllm.server_arguments import VLLM
from verl_server.config import EngineKind
from verl_server.doctor.machine import Hardware
from verl_server.doctor.report import Finding, fail, gib, ok, warn
from verl_server.errors import VerlServerError
from verl_server.platforms import ENTRY_POINTS
from verl_server.server.environment import (
    DISTRIBUTION,
    EngineProfile,
    InterpreterReport,
    interpreter_path,
    is_own_interpreter,
    read_environment,
)
from verl_server.vllm_plugin.start import (
    DISTRIBUTIONS,
    FIXED_VARIABLES,
    MINIMUM_VERSION,
    NEWEST_VERSION,
    explain_version,
    is_newer_than_checked,
)
from verl_server.vllm_plugin.start import TESTED_VERSION as VLLM_TESTED_VERSION

#: Distributions whose versions are always shown.
SHOWN = ("torch", "transformers")
#: Distributions that SGLang needs on an NVIDIA GPU only. Its own kernels have different names in its versions.
KERNELS = ("flashinfer-python", "sgl-kernel", "sglang-kernel")
PROJECT, CPU_BUILD = DISTRIBUTIONS
#: Variable that makes vLLM select its CPU platform, whatever its version is called.
TARGET_DEVICE = "VLLM_TARGET_DEVICE"
KV_CACHE, PORT = "VLLM_CPU_KVCACHE_SPACE", "VLLM_PORT"


def installed_version(name: str) -> str | None:
    """Version of a distribution in the environment of this process. None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def examine_environment(
    server_python: Path | str, hardware: Hardware, engine_kind: EngineKind | None
) -> tuple[list[Finding], EngineKind, Path | None]:
    """Check the environment of an interpreter, which is started for this with a deadline.

    `engine_kind`: the engine of the servers; None is the engine that the environment has, SGLang if it has none.
    Returns the engine and the folder of its package as well.
    """
    try:
        path = interpreter_path(server_python)
        is_own = is_own_interpreter(path)
        report = _read(path, SGLANG, is_own=is_own)
        has_vllm = report.folders.get(PROJECT) is not None or _vllm_distribution(report.versions) is not None
        has_sglang = report.folders.get("sglang") is not None or report.versions.get("sglang") is not None
        kind = engine_kind or (EngineKind.VLLM if has_vllm and not has_sglang else EngineKind.SGLANG)
        if kind is EngineKind.VLLM:
            distribution = _vllm_distribution(report.versions) or PROJECT
            report = _read(path, replace(VLLM, distribution=distribution), is_own=is_own)
    except VerlServerError as error:
        finding = fail(
            "Interpreter",
            error.message,
            symptom=f"{type(error).__name__} when a server starts",
            fix="Pass the path of a Python interpreter, 3.11 or newer, for example /opt/sglang/bin/python.",
        )
        return [finding], engine_kind or EngineKind.SGLANG, None
    python = shlex.quote(path)
    pip = f"{python} -m pip"
    place = report.folders.get(kind.value)
    folder = None if place is None else Path(place)
    found = [ok("Python", ".".join(map(str, report.python)))]
    if folder is not None:
        found.append(check_bytecode(folder, os.environ, python=python))
    if not is_own:
        found.append(check_own_package(report, pip=pip))
    if kind is EngineKind.VLLM:
        has_accelerator = hardware.accelerator is not None or (hardware.nvidia_device and not hardware.hidden)
        found.append(check_vllm(report, pip=pip))
        if report.folders.get(PROJECT) is not None:
            found += check_packages(VLLM, report, pip=pip, nvidia=True)
            found.append(check_vllm_platform(report.versions, os.environ, has_accelerator=has_accelerator))
        return found, kind, folder
    sglang = report.versions.get("sglang")
    has_sources = sglang is None and report.folders.get("sglang") is not None
    found.append(ok("SGLang", "sources without an installed version") if has_sources else check_sglang(sglang, pip=pip))
    found += check_packages(SGLANG, report, pip=pip, nvidia=hardware.accelerator == "cuda")
    is_here = is_own or report.has_package  # otherwise servers get the plugin from the copy of this side
    plugins = report.plugins if is_here else _our_plugins()
    return [*found, check_sglang_platform(plugins, os.environ, accelerator=hardware.accelerator)], kind, folder


def _read(path: str, profile: EngineProfile, *, is_own: bool) -> InterpreterReport:
    """What an interpreter has of both engines, with the requirements of the distribution of `profile`."""
    both = replace(profile, modules={**SGLANG.modules, **VLLM.modules})
    distributions = [*SHOWN, *KERNELS, SGLANG.distribution, *DISTRIBUTIONS]
    env = {"PYTHONPATH": os.environ["PYTHONPATH"]} if is_own and os.environ.get("PYTHONPATH") else {}
    return read_environment(path, env, both, distributions=distributions)


def _vllm_distribution(versions: Mapping[str, str | None]) -> str | None:
    """The distribution from which vLLM reads its version, as vLLM itself chooses it. None if it is not installed."""
    return next((name for name in DISTRIBUTIONS if versions.get(name) is not None), None)


def check_own_package(report: InterpreterReport, *, pip: str) -> Finding:
    """Check the version of this package on both sides."""
    title, version = "verl_server", report.versions.get(DISTRIBUTION)
    if version is not None and version != __version__:
        return fail(
            title,
            f"{version} there, but {__version__} on this side",
            symptom="StartupError: both must have the same version",
            fix=f"{pip} uninstall verl-server  # servers then use the copy of this side",
        )
    return ok(title, f"{__version__} " + ("on both sides" if report.has_package else "on this side, used by servers"))


def check_sglang(installed: str | None, *, pip: str = "pip") -> Finding:
    """Check that SGLang is installed in a supported version. `pip`: the command that installs packages there."""
    lowest, highest = SUPPORTED_VERSIONS
    versions = f"tested: {TESTED_VERSION}; supported, with probed capabilities: {lowest} to {highest}"
    fix = f"{pip} install 'sglang>={lowest},<={highest}'"
    if installed is None:
        symptom = "StartupError when a server starts: SGLang is not installed"
        return fail("SGLang", "not installed", symptom=symptom, fix=fix)
    if Version(lowest).release <= Version(installed).release <= Version(highest).release:
        return ok("SGLang", f"{installed} ({versions})")
    return warn(
        "SGLang",
        f"{installed} is not a supported version ({versions})",
        symptom="weight updates fail with status 404 or 400, or SGLang refuses server arguments",
        fix=fix,
    )


def check_vllm(report: InterpreterReport, *, pip: str) -> Finding:
    """Check that vLLM is installed in a supported version. `pip`: the command that installs packages there."""
    name = _vllm_distribution(report.versions)
    if name is None and report.folders.get(PROJECT) is not None:
        return ok("vLLM", "sources without an installed version")
    if name is None:
        symptom = "StartupError when a server starts: vLLM is not installed"
        return fail("vLLM", "not installed", symptom=symptom, fix=VLLM.installation)
    version, fix = report.versions[name] or "", f"{pip} install {name}=={VLLM_TESTED_VERSION}"
    oldest, newest = (".".join(map(str, numbers)) for numbers in (MINIMUM_VERSION, NEWEST_VERSION))
    supported = f"tested: {VLLM_TESTED_VERSION}; supported: {oldest} to {newest}"
    if (refusal := explain_version(name, version)) is not None:
        symptom = "BadInputError when a server starts: vLLM refuses the server arguments"
        return fail("vLLM", refusal.rpartition("; ")[0], symptom=symptom, fix=fix)
    if is_newer_than_checked(version):
        return warn(
            "vLLM",
            f"{name} {version} is newer than all versions that were tried ({supported})",
            symptom="the server may not start, or answer in another form",
            fix=fix,
        )
    return ok("vLLM", f"{name} {version} ({supported})")


def check_bytecode(folder: Path, environment: Mapping[str, str], *, python: str) -> Finding:
    """Check that the modules of an engine's package are compiled, or will be. `environment`: that of its servers."""
    if (folder / "__pycache__").is_dir():
        return ok("Bytecode", "the modules of the engine are compiled")
    if os.access(folder, os.W_OK) and not environment.get("PYTHONDONTWRITEBYTECODE"):
        return ok("Bytecode", "the first start of a server compiles the modules of the engine")
    return warn(
        "Bytecode",
        "the modules of the engine are not compiled, and Python does not write bytecode (PYTHONDONTWRITEBYTECODE is "
        "set, or the folder is read-only)",
        symptom="every start of a server takes more than 60 s instead of 15 s",
        fix=f"{python} -m compileall -q -j 0 {shlex.quote(str(folder.parent))}",
    )


def check_packages(profile: EngineProfile, report: InterpreterReport, *, pip: str, nvidia: bool) -> list[Finding]:
    """Check the packages of an engine. `nvidia`: whether its servers need the kernels for NVIDIA GPUs."""
    wanted = parse_requirements(report.requirements)
    names = [*SHOWN, *(name for name in KERNELS if name in wanted and profile is SGLANG)]
    missing = [name for name in profile.modules if name != profile.distribution and report.folders.get(name) is None]
    found = []
    for name in names:
        installed, here = report.versions.get(name), installed_version(name)
        finding = check_package(name, installed, wanted.get(name, ""), needed=nvidia or name in SHOWN, pip=pip)
        is_other = name in SHOWN and here not in (None, installed)  # can explain different results of both sides
        found.append(replace(finding, detail=f"{finding.detail} ({here} on this side)") if is_other else finding)
    return found + [check_package(name, None, "", pip=pip) for name in missing]


def check_package(name: str, installed: str | None, wanted: str, *, needed: bool = True, pip: str = "pip") -> Finding:
    """Check one package against the requirement in the metadata of the engine.

    `wanted` is a version specifier such as "==2.14.1", or "" for any version. `needed` is False for a package that
    this machine can do without. `pip`: the command that installs packages there.
    """
    fix = f"{pip} install '{name}{wanted}'"
    if installed is None and not needed:
        return ok(name, "not installed; only an NVIDIA GPU needs it")
    if installed is None:
        symptom = f"the server's log ends with an ImportError that names {name}"
        return fail(name, "not installed", symptom=symptom, fix=fix)
    if wanted and not SpecifierSet(wanted).contains(installed, prereleases=True):
        return warn(
            name,
            f"{installed}, but the installed engine requires {wanted}",
            symptom="the server ends with an ImportError or an undefined symbol, or its results are wrong",
            fix=fix,
        )
    return ok(name, installed)


def parse_requirements(lines: Iterable[str]) -> dict[str, str]:
    """Version specifiers by distribution name, from the requirements of a distribution's metadata."""
    requirements = [Requirement(line) for line in lines]
    here = [item for item in requirements if item.marker is None or item.marker.evaluate({"extra": ""})]
    return {item.name.replace("_", "-"): str(item.specifier) for item in here}


def _our_plugins() -> list[str]:
    return [entry.partition(" = ")[2] for entry in ENTRY_POINTS.values()]


def check_sglang_platform(
    plugins: Iterable[str], environment: Mapping[str, str], *, accelerator: str | None
) -> Finding:
    """Check which platform SGLang selects.

    `plugins`: objects that installed plugins name in their entry points. `environment`: the variables that servers
    inherit.
    """
    title, symptom = "SGLang platform", "the server ends during its start, or finds no device"
    chosen = {"SGLANG_PLATFORM": environment.get("SGLANG_PLATFORM", "")}
    chosen["SGLANG_USE_CPU_ENGINE"] = environment.get("SGLANG_USE_CPU_ENGINE", "").replace("0", "")
    ours = "" if accelerator else "verl_server_cpu"
    for name, value in chosen.items():
        if value and value != ours:
            return warn(title, f"chosen by {name}={value}", symptom=symptom, fix=f"unset {name}")
    if accelerator:
        return ok(title, f"SGLang's own platform for {accelerator}")
    if missing := {*_our_plugins()} - {*plugins}:
        return fail(
            title,
            f"this machine has no accelerator, and the entry points {', '.join(sorted(missing))} are not installed",
            symptom=symptom,
            fix="Reinstall verl-server in this environment: pip install verl-server, or pip install -e . in a clone.",
        )
    return ok(title, "verl_server_cpu (torch-native, any CPU)")


def check_vllm_platform(
    versions: Mapping[str, str | None], environment: Mapping[str, str], *, has_accelerator: bool
) -> Finding:
    """Check which platform vLLM selects. It selects the CPU only if `cpu` is in its version, or by a variable.

    `environment`: the variables that servers inherit.
    """
    title, name = "vLLM platform", _vllm_distribution(versions)
    forced = environment.get(TARGET_DEVICE) == "cpu"
    is_cpu = forced or name is None or name == CPU_BUILD or "cpu" in (versions[name] or "")
    if is_cpu and not has_accelerator:
        return ok(title, "CPU")
    if is_cpu and name is not None:
        return warn(
            title,
            "CPU, but this machine has an accelerator",
            symptom="generation is slow, and no memory of the accelerator is used",
            fix=f"unset {TARGET_DEVICE}" if forced else f"pip install {PROJECT}=={VLLM_TESTED_VERSION}",
        )
    if has_accelerator:
        return ok(title, "that of the accelerator")
    has_cpu_build = versions.get(CPU_BUILD) is not None
    return fail(
        title,
        f"none: this machine has no accelerator, and vLLM takes its version {versions[name or PROJECT]} for a build "
        "that needs one"
        + (f", although {CPU_BUILD} is installed: another distribution is called {name}" if has_cpu_build else ""),
        symptom="the server ends during its start: UnspecifiedPlatform, or Failed to infer device type",
        fix=f"export {TARGET_DEVICE}=cpu, or let the version of the distribution {name} end with +cpu"
        if has_cpu_build
        else f"Install the build for CPUs: {VLLM.installation}.",
    )


def check_variables(environment: Mapping[str, str], *, tp: int, free: int, on_cpu: bool) -> list[Finding]:
    """Check the variables of vLLM that a server would inherit. `free`: bytes of free memory of the machine."""
    size, port = environment.get(KV_CACHE, ""), environment.get(PORT, "")
    problems = (
        (
            KV_CACHE,
            on_cpu and size.isdigit() and int(size) * 2**30 * tp > free,
            f"{size} GiB for each of {tp} workers, free memory {gib(free)}",
            "out of memory or `killed by SIGKILL`: the cache is resident at once",
        ),
        (
            PORT,
            PORT in environment and not port.isdigit(),
            f"{port!r} is not a port; Kubernetes sets it in all containers beside a service that is called vllm",
            "VLLM_PORT appears to be a URI",
        ),
    )
    found = [
        fail(name, detail, symptom=f"the server ends during its start: {end}", fix=f"unset {name}")
        for name, is_wrong, detail, end in problems
        if is_wrong
    ]
    replaced = sorted(name for name in FIXED_VARIABLES if name in environment)
    inherited = sorted(name for name in environment if name.startswith("VLLM_") and name not in replaced)
    texts = [
        f"inherited by servers: {', '.join(inherited)}" if inherited else "",
        f"replaced in servers: {', '.join(replaced)}" if replaced else "",
    ]
    return [*found, ok("Variables", "; ".join(filter(None, texts)) or "no variable of vLLM is set")]
