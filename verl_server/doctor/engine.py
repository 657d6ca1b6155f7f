"""Checks of the environments of servers: packages of SGLang and of vLLM, and variables that disturb them."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from verl_server import __version__
from verl_server.adapter.sglang.server_arguments import SGLANG, SUPPORTED_VERSIONS, TESTED_VERSION
from verl_server.adapter.vllm.server_arguments import VLLM
from verl_server.doctor.machine import Hardware
from verl_server.doctor.report import Finding, fail, gib, ok, warn
from verl_server.errors import BadInputError, VerlServerError
from verl_server.platforms import ENTRY_POINTS
from verl_server.server.environment import (
    DISTRIBUTION,
    EngineProfile,
    InterpreterReport,
    interpreter_path,
    is_own_interpreter,
    read_environment,
)
from verl_server.validation import did_you_mean
from verl_server.vllm_server.start import (
    DISTRIBUTIONS,
    FIXED_VARIABLES,
    MINIMUM_VERSION,
    NEWEST_VERSION,
    explain_version,
    is_newer_than_checked,
)
from verl_server.vllm_server.start import TESTED_VERSION as VLLM_TESTED_VERSION

# -- Packages ---------------------------------------------------------------------------------------
# Checks of the versions of Python and of the packages of a server, and of their compiled bytecode.

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


def examine_packages(*, nvidia: bool) -> list[Finding]:
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


# -- Environment ------------------------------------------------------------------------------------
# Checks of a Python environment in which vLLM servers will run.

#: Distributions whose versions are shown beside that of vLLM.
SHOWN = ("torch", "transformers")
PROJECT, CPU_BUILD = DISTRIBUTIONS
OLDEST, NEWEST = (".".join(map(str, numbers)) for numbers in (MINIMUM_VERSION, NEWEST_VERSION))
SUPPORTED = f"tested: {VLLM_TESTED_VERSION}; supported: {OLDEST} to {NEWEST}"
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
        return f"{pip} install {PROJECT}=={VLLM_TESTED_VERSION} {modules}"
    return (
        "`make setup-vllm` in a clone of verl-server, or: "
        f"{pip} install {CPU_BUILD}=={VLLM_TESTED_VERSION} {modules}. Both "
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
            fix=f"unset {TARGET_DEVICE}" if forced else f"{python} -m pip install {PROJECT}=={VLLM_TESTED_VERSION}",
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


def check_vllm_packages(report: InterpreterReport, here: Mapping[str, str | None], *, pip: str) -> list[Finding]:
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


def examine_vllm_environment(
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
        *check_vllm_packages(report, here, pip=pip),
        check_platform(report.versions, environment, python=python, has_accelerator=has_accelerator),
        *([script] if script else []),
    ]


# -- Server environment -----------------------------------------------------------------------------

#: Engines whose environments are checked.
ENGINE_KINDS = ("sglang", "vllm")
#: Distributions of both sides that may differ. Differences are shown, because they explain different results.

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


def examine_server_environment(
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
            distribution = installed_distribution(report.versions) or VLLM.distribution
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
        found += examine_vllm_environment(python, report, here, os.environ, has_accelerator=has_accelerator)
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
    has_vllm = report.folders.get("vllm") is not None or installed_distribution(report.versions)
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


# -- Variables --------------------------------------------------------------------------------------
# Checks of the environment variables of vLLM. A server inherits those of the process that starts it.

KV_CACHE, CPU_BINDING, PORT, RPC_FOLDER = (
    "VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_PORT", "VLLM_RPC_BASE_PATH",
)  # fmt: skip
GIB = 2**30


def check_kv_cache(value: str, *, tp: int, free: int) -> Finding | None:
    """Check the KV cache of each worker on a CPU. `value`: GiB as text; `free`: bytes of the machine."""
    size = None
    with contextlib.suppress(ValueError):
        size = int(value)
    if size is None or size < 0:
        return fail(
            KV_CACHE,
            f"{value!r} is not a whole number of GiB",
            symptom="the server ends during its start: ValueError, invalid literal for int()",
            fix=f"unset {KV_CACHE}, or export {KV_CACHE}=1",
        )
    if size * GIB * tp > free:
        return fail(
            KV_CACHE,
            f"{size} GiB for each of {tp} workers, free memory {gib(free)}",
            symptom="the server ends during its start with out of memory or `killed by SIGKILL`: the cache is resident "
            "at once",
            fix=f"unset {KV_CACHE}, or export {KV_CACHE}=1",
        )
    return None


def check_cpu_binding(value: str, *, tp: int) -> Finding | None:
    """Check the binding of threads to CPUs: one list of CPUs for each worker."""
    parts = len(value.split("|"))
    if value == "nobind" or (value == "auto" and tp == 1) or (value != "auto" and parts == tp):
        return None
    detail = f"auto with {tp} workers" if value == "auto" else f"{parts} lists of CPUs for {tp} workers"
    return (warn if value == "auto" else fail)(
        CPU_BINDING,
        detail,
        symptom="the server ends during its start: Not enough allowed NUMA nodes (with fewer NUMA nodes than workers)"
        if value == "auto"
        else "the server ends during its start: Given number of CPU id list doesn't match local world size",
        fix=f"unset {CPU_BINDING}: the CPUs are then divided among the workers",
    )


def check_port(value: str) -> Finding | None:
    """Check the first port of vLLM's internal sockets."""
    if value.isdigit():
        return None
    return fail(
        PORT,
        f"{value!r} is not a port; Kubernetes sets it in all containers beside a service that is called vllm",
        symptom="the server ends during its start: VLLM_PORT appears to be a URI",
        fix=f"unset {PORT}, or rename the service",
    )


def check_rpc_folder(value: str) -> Finding:
    """Report a folder of vLLM's sockets that the warden does not know."""
    return warn(
        RPC_FOLDER,
        f"{value}: the sockets of servers stay there when a server ends",
        symptom="the folder fills with sockets whose names are UUIDs",
        fix=f"unset {RPC_FOLDER}: the sockets are then in a folder that is removed with the server",
    )


def examine_variables(environment: Mapping[str, str], *, tp: int, free: int, on_cpu: bool) -> list[Finding]:
    """Check the variables that a server would inherit. `free`: bytes of free memory of the machine."""
    found = [
        check_kv_cache(environment[KV_CACHE], tp=tp, free=free) if on_cpu and environment.get(KV_CACHE) else None,
        check_cpu_binding(environment[CPU_BINDING], tp=tp) if on_cpu and environment.get(CPU_BINDING) else None,
        check_port(environment[PORT]) if PORT in environment else None,
        check_rpc_folder(environment[RPC_FOLDER]) if RPC_FOLDER in environment else None,
    ]
    problems = [finding for finding in found if finding is not None]
    replaced = sorted(name for name in FIXED_VARIABLES if name in environment)
    named = {problem.title for problem in problems}
    inherited = sorted(
        name for name in environment if name.startswith("VLLM_") and name not in replaced and name not in named
    )
    texts = [
        f"inherited by servers: {', '.join(inherited)}" if inherited else "",
        f"replaced in servers: {', '.join(replaced)}" if replaced else "",
    ]
    return [*problems, ok("Variables", "; ".join(filter(None, texts)) or "no variable of vLLM is set")]
