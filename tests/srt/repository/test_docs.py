"""The documentation: examples run or are type-checked, and what the pages name exists."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import typer

from verl_server import (
    AsyncHttpServerEngineAdapter,
    HttpServerEngineAdapter,
    RecoveryConfig,
    RolloutManager,
    RouterConfig,
    Timeouts,
    VerlEngine,
    VerlServerError,
)
from verl_server.agent import RolloutLimits
from verl_server.cli.app import app
from verl_server.cli.arguments import read_server_args
from verl_server.config import TRANSPORTS, EngineKind
from verl_server.rollout.fleet import Fleet, fleet_metrics
from verl_server.router.dispatcher import Dispatcher
from verl_server.router.http import router_metrics
from verl_server.router.targets import RoutingTargets
from verl_server.weights.transports.base import is_streamed

ROOT = Path(__file__).parents[3]
PAGES = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
MAX_README_WORDS = 550
PUBLIC_PACKAGES = (
    "verl_server",
    "verl_server.agent",
    "verl_server.trajectory",
    "verl_server.training",
    "verl_server.ray",
    "verl_server.integrations.trl",
)
EXTERNAL_PROGRAMS = ("export", "source", "pip", "git", "curl", "ruff", "mypy", "flock", "npm")
FROM_AGENT = "from verl_server.agent import Sample, Task"
FROM_TYPING = "from collections.abc import Callable\nfrom typing import Any"
#: Names that an example may use without defining them: the type, and the import that the type needs.
PREAMBLE = {
    "mesh": ("DeviceMesh", "from torch.distributed.device_mesh import DeviceMesh"),
    "policy": ("torch.nn.Module", "import torch"),
    "lora_tensors": ("dict[str, torch.Tensor]", "import torch"),
    "tokenizer": ("Any", FROM_TYPING),
    "engine": ("VerlEngine", "from verl_server import VerlEngine"),
    "fleet": ("RolloutManager", "from verl_server import RolloutManager"),
    "tasks": ("list[Task]", FROM_AGENT),
    "add": ("Callable[[int, int], int]", FROM_TYPING),
    "reward": ("Callable[[Sample], float]", f"{FROM_TYPING}\n{FROM_AGENT}"),
    "train": ("Callable[[TensorDict], None]", f"{FROM_TYPING}\nfrom tensordict import TensorDict"),
}
#: A path of this repository in back quotes.
REPOSITORY_PATH = re.compile(
    r"`((?:verl_server|docs|examples|benchmarks|tests)/[\w./-]*|[\w.-]+\.(?:md|toml|lock|yml))`"
)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    """Number of the block's first line in the page."""
    language: str
    text: str

    @property
    def name(self) -> str:
        """A module name that says where the block stands."""
        page = str(self.page.relative_to(ROOT).with_suffix("")).replace(os.sep, "_").replace("-", "_").replace(".", "_")
        return f"example_{page}_line_{self.line}"


def blocks(language: str) -> Iterator[Block]:
    """All fenced blocks of a language, in all pages."""
    for page in PAGES:
        content = page.read_text()
        for match in re.finditer(r"^( *)```(\w+)\n(.*?)^ *```$", content, re.DOTALL | re.MULTILINE):
            if match[2] == language:
                line = content.count("\n", 0, match.start(3)) + 1
                yield Block(page, line, language, textwrap.dedent(match[3]))


def names_from_outside(tree: ast.Module) -> set[str]:
    """The names that a block uses and does not define."""
    used, defined = set(), set(dir(builtins))
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                used.add(name)
            case ast.Name(id=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                defined.add(name)
            case ast.ClassDef(name=name) | ast.arg(arg=name):
                defined.add(name)
            case ast.alias(name=name, asname=asname):
                defined.add(asname or name.split(".")[0])
    return used - defined


def awaits_at_top_level(tree: ast.Module) -> bool:
    """Whether a block needs an event loop: it awaits outside of its functions."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.Await, ast.AsyncFor, ast.AsyncWith)):
            return True
        if isinstance(node, ast.comprehension) and node.is_async:
            return True
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            pending.extend(ast.iter_child_nodes(node))
    return False


def as_module(block: Block) -> str:
    """A block as a module of its own, in which the names of `PREAMBLE` are declared."""
    tree = ast.parse(block.text)
    names = sorted(names_from_outside(tree))
    unknown = [name for name in names if name not in PREAMBLE]
    assert not unknown, f"{block.page}:{block.line}: the example uses {unknown} without defining them"
    imports = sorted({PREAMBLE[name][1] for name in names})
    declarations = [f"{name}: {PREAMBLE[name][0]}" for name in names]
    body = block.text
    if awaits_at_top_level(tree):
        body = "async def example() -> None:\n" + textwrap.indent(body, "    ")
    return "\n".join(["from __future__ import annotations", *imports, *declarations, body])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_python_example_has_correct_types(tmp_path: Path) -> None:
    modules = {block.name: as_module(block) for block in blocks("python")}
    assert len(modules) > 20
    for name, text in modules.items():
        (tmp_path / f"{name}.py").write_text(text)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        str(ROOT / "pyproject.toml"),
        "--no-error-summary",
        "--allow-untyped-calls",
    ]
    checked = subprocess.run(
        [*command, *sorted(map(str, tmp_path.glob("*.py")))], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert checked.returncode in (0, 1), checked.stderr
    errors = [line for line in checked.stdout.splitlines() if Path(line.split(":")[0]).stem in modules]
    assert not errors, "\n".join(errors)


def programs() -> Iterator[Block]:
    """The examples that run as they stand, with the folder of a model. All others are parts of a program."""
    return (block for block in blocks("python") if "sys.argv" in block.text)


def test_a_program_uses_no_name_that_it_does_not_define() -> None:
    for block in programs():
        tree = ast.parse(block.text)
        where = f"{block.page}:{block.line}"
        assert not names_from_outside(tree), where
        assert not awaits_at_top_level(tree), where


def test_a_guide_begins_with_a_program() -> None:
    found = list(programs())
    assert [block for block in found if block.page.name == "README.md"] == [
        block for block in blocks("python") if block.page.name == "README.md"
    ]
    first = {block.page.stem: block for block in reversed(list(blocks("python")))}
    for page in ("quickstart", "training", "agents", "fleet", "gateway", "vllm"):
        assert first[page] in found, page


def test_the_readme_is_short() -> None:
    prose = re.sub(r"^```.*?^```$", "", (ROOT / "README.md").read_text(), flags=re.DOTALL | re.MULTILINE)
    assert len(prose.split()) <= MAX_README_WORDS


def shell_commands() -> Iterator[tuple[Block, list[str]]]:
    """All commands of the shell examples, without comments and variables of the environment."""
    for block in blocks("bash"):
        for line in block.text.splitlines():
            words = shlex.split(line, comments=True)
            if command := list(itertools.dropwhile(lambda word: re.match(r"\w+=|nohup$", word), words)):
                yield block, command


def test_every_shell_example_names_a_command_that_exists() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    seen = set()
    for block, words in shell_commands():
        where, program = f"{block.page}:{block.line}: {' '.join(words)}", Path(words[0]).name
        seen.add(program)
        if program == "make":
            assert words[1] in targets, where
        elif program == "verl-server":
            check_verl_server(words[1:], where)
        elif program in ("python", "python3", "python3.12", "pytest", "torchrun"):
            for word in words[1:]:
                assert not word.startswith(("examples/", "benchmarks/", "tests/")) or (ROOT / word).exists(), where
        else:
            assert program in EXTERNAL_PROGRAMS, where
    assert {"make", "verl-server", "torchrun"} <= seen


def check_verl_server(words: list[str], where: str) -> None:
    """Every command and option of `verl-server` exists. Other options of `launch` are SGLang's server arguments."""
    commands: dict[str, Any] = vars(typer.main.get_command(app))["commands"]
    assert words[0] in commands, where
    while subcommands := vars(commands[words[0]]).get("commands"):
        commands, words = subcommands, words[1:]
        assert words[0] in commands, where
    own = {option for parameter in commands[words[0]].params for option in parameter.opts}
    others = [word for word in words[1:] if word.startswith("-") and word.partition("=")[0] not in {*own, "--help"}]
    if others:
        assert words[0] == "launch", where
        context = commands["launch"].make_context("launch", words[1:])
        given = read_server_args(EngineKind.SGLANG, ["Org/Model", *context.args])
        program = "import sys, json, verl_server.server.server_main as c; print(c.find_refusal(json.load(sys.stdin)))"
        done = subprocess.run(
            [sys.executable, "-c", program], input=json.dumps(given), capture_output=True, text=True, timeout=120
        )
        assert done.stdout.splitlines()[-1:] == ["None"], (where, done.stdout, done.stderr)


def test_every_file_that_a_page_names_exists() -> None:
    named = 0
    for page in PAGES:
        for path in REPOSITORY_PATH.findall(page.read_text()):
            named += 1
            assert (ROOT / path).exists(), f"{page} names {path}"
    assert named > 30


def test_the_table_of_folders_has_every_folder_and_module() -> None:
    architecture = (ROOT / "ARCHITECTURE.md").read_text()
    named = set(re.findall(r"`([\w/]+/|\w+\.py)`", architecture[architecture.index("\n## Folders") :]))
    package = ROOT / "verl_server"
    folders = {
        f"{path.parent.relative_to(package)}/" for path in package.rglob("__init__.py") if path.parent != package
    }
    modules = {path.name for path in package.glob("*.py")} - {"__init__.py"}
    assert folders | modules <= named, sorted((folders | modules) - named)


def test_every_link_of_the_pages_outside_the_site_leads_somewhere() -> None:
    """Links inside `docs/` are checked when the site is built."""
    for page in PAGES:
        if page.parent != ROOT:
            continue
        for target in LINK.findall(page.read_text()):
            assert target.startswith("https://") or (page.parent / target).exists(), f"{page} links to {target}"


def test_the_reference_has_every_public_name() -> None:
    documented = set()
    for page in (ROOT / "docs" / "reference").glob("*.md"):
        documented.update(re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE))
    public = {f"{name}.{item}" for name in PUBLIC_PACKAGES for item in importlib.import_module(name).__all__}
    assert public <= documented, sorted(public - documented)


def test_every_metric_that_a_page_names_exists() -> None:
    source = "".join((ROOT / "verl_server" / path).read_text() for path in ("router/http.py", "rollout/fleet.py"))
    prefixes = set(re.findall(r"verl_(?:router|replica|fleet)_", source))
    named = set(re.findall(r"verl_(?:router|replica|fleet)_\w+", (ROOT / "docs" / "operations.md").read_text()))
    assert len(named) > 15
    for metric in sorted(named):
        prefix = next(prefix for prefix in prefixes if metric.startswith(prefix))
        name = metric.removeprefix(prefix).removesuffix("_total")
        assert f'"{name}"' in source or f"{prefix}{name}" in source, metric


def test_every_metric_is_on_the_operations_page() -> None:
    fleet = Fleet(_no_replica, 0, RoutingTargets([]), print)
    try:
        text = (router_metrics(Dispatcher()) + fleet_metrics(fleet)).decode()
    finally:
        fleet.close()
    metrics = set(re.findall(r"^# TYPE (\w+)", text, re.MULTILINE))
    named = set(re.findall(r"`(verl_\w+)`", (ROOT / "docs" / "operations.md").read_text()))
    assert len(metrics) > 15
    assert metrics <= named, sorted(metrics - named)


def _no_replica(name: str) -> Any:
    raise AssertionError(f"no replica {name} is created")


def test_the_errors_page_has_every_exception_and_says_which_are_retryable() -> None:
    rows = re.findall(
        r"^\| \[`(\w+)`\]\S* (\(retryable\) )?\|", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE
    )
    documented = {name: bool(retryable) for name, retryable in rows}
    assert len(rows) == len(documented)
    assert documented == {kind.__name__: kind.retryable for kind in _subclasses(VerlServerError)}


def _subclasses(kind: type[VerlServerError]) -> Iterator[type[VerlServerError]]:
    """The public exceptions below `kind`. Other modules have internal subclasses."""
    for subclass in kind.__subclasses__():
        if subclass.__module__ == VerlServerError.__module__:
            yield subclass
            yield from _subclasses(subclass)


def test_the_pages_name_the_streaming_transports() -> None:
    streamed = {name for name in TRANSPORTS if is_streamed(name)}
    transports = (ROOT / "docs" / "transports.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", transports, re.MULTILINE)) == set(TRANSPORTS)
    glossary = (ROOT / "docs" / "glossary.md").read_text()
    decision = (ROOT / "docs" / "decisions" / "whole-model-arena.md").read_text()
    for text, sentence in (
        (transports, r"The streaming transports are ([^.]+)\."),
        (glossary, r"A transport that does not stage the whole model: ([^.]+)\."),
        (decision, r"Available as the transports ([^.]+)\."),
    ):
        (listed,) = re.findall(sentence, text)
        assert set(re.findall(r"`(\w+)`", listed)) == streamed, listed


#: Units of defaults in the pages.
UNITS = {"": 1, "s": 1, "MiB": 1 << 20}


def test_the_defaults_that_the_pages_name_are_those_of_the_settings() -> None:
    """A page names a default as: `orphan_timeout_s` (default 10 s)."""
    settings = (Timeouts, RouterConfig, RecoveryConfig, RolloutLimits)
    defaults = {item.name: item.default for kind in settings for item in fields(kind) if item.default is not MISSING}
    named: set[str] = set()
    for page in PAGES:
        for name, number, unit in re.findall(r"`(\w+)`\s+\(default ([\d.]+) ?(\w*)\)", page.read_text()):
            named.add(name)
            assert float(number) * UNITS[unit] == defaults[name], f"{page} names {number} {unit} for {name}"
    for kind in settings:
        assert named & {item.name for item in fields(kind)}, f"no page names a default of {kind.__name__}"


#: Signatures of SGLang's historical `VerlEngine`: names and defaults of the parameters.
_GENERATE = {
    "prompt": None,
    "sampling_params": None,
    "input_ids": None,
    "image_data": None,
    "return_logprob": False,
    "logprob_start_len": None,
    "top_logprobs_num": None,
    "token_ids_logprob": None,
    "lora_path": None,
    "custom_logit_processor": None,
}
_NO_DEFAULT = inspect.Parameter.empty
HISTORICAL_SIGNATURES: dict[str, dict[str, Any]] = {
    "__init__": {"device_mesh_cpu": None, "nnodes": 1},  # it was required
    "generate": _GENERATE,
    "update_weights_from_tensor": {"named_tensors": _NO_DEFAULT, "load_format": None},
    "release_memory_occupation": {},
    "resume_memory_occupation": {},
    "shutdown": {},
}


@pytest.mark.parametrize("method", HISTORICAL_SIGNATURES)
def test_historical_calls_of_verl_engine_fit_its_signatures(method: str) -> None:
    """The historical parameters come first, in the same order and with the same defaults. All others are optional."""
    _, *parameters = inspect.signature(getattr(VerlEngine, method)).parameters.values()
    historical = HISTORICAL_SIGNATURES[method]
    first, further = parameters[: len(historical)], parameters[len(historical) :]
    # None switches an option off, as False does.
    assert [one.default or None for one in first] == [default or None for default in historical.values()]
    assert [one.name for one in first] == list(historical)
    assert all(one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for one in first)
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    assert all(one.default is not _NO_DEFAULT or one.kind in variadic for one in further)
    assert method != "__init__" or further[-1].kind is inspect.Parameter.VAR_KEYWORD


def test_make_bench_runs_every_benchmark() -> None:
    (commands,) = re.findall(r"^bench:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    benchmarks = {path.name for path in (ROOT / "benchmarks").glob("bench_*.py")}
    assert set(re.findall(r"benchmarks/(\w+\.py)", commands)) == benchmarks


def test_every_extra_of_the_package_is_in_the_table_of_dependencies() -> None:
    call = ast.parse((ROOT / "setup.py").read_text()).body[-1]
    assert isinstance(call, ast.Expr)
    assert isinstance(call.value, ast.Call)
    (extras,) = (ast.literal_eval(one.value) for one in call.value.keywords if one.arg == "extras_require")
    documented = re.findall(r"^\| .*\(extra `(\w+)`\)", (ROOT / "ARCHITECTURE.md").read_text(), re.MULTILINE)
    assert sorted(documented) == sorted(extras)


@dataclass(frozen=True)
class TargetRow:
    """A target as the performance page shows it."""

    at_least: bool
    limit: float
    measured: str
    met: bool

    def agrees_with(self, target: dict[str, Any]) -> bool:
        """Whether the row shows a target of a result file, rounded to the digits of the page."""
        number = self.measured.removesuffix(" ms")
        scale = 100 if number.endswith("%") else 1
        number = number.removesuffix("%").strip()
        digits = len(number.partition(".")[2])
        return (
            self.at_least == target["at_least"]
            and self.met == target["met"]
            and self.limit == pytest.approx(target["limit"])
            and abs(float(number) - scale * target["value"]) <= 0.5000001 * 10**-digits
        )


def parse_limit(text: str) -> tuple[bool, float]:
    """Direction and value of a limit such as `>= 0.95`, `<= 1 ms` or `<= 5 %`."""
    sign, number, percent = re.findall(r"([<>])= ([\d.]+)( %)?", text)[0]
    return sign == ">", float(number) / (100 if percent else 1)


def target_rows(section: str) -> Iterator[TargetRow]:
    """The targets of a section in their order, from tables with a column for limits, or with limits in the header."""
    header: list[str] = []
    for line in section.splitlines():
        if not line.startswith("|"):
            header = []
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not header:
            header = cells
        elif header[1] == "Limit" and not cells[0].startswith("---"):
            at_least, limit = parse_limit(cells[1])
            assert cells[3] in ("PASS", "MISS"), line
            yield TargetRow(at_least, limit, cells[2], cells[3] == "PASS")
        elif "target" in header[-1] and not cells[0].startswith("---"):
            for title, cell in zip(header, cells, strict=True):
                if "target" in title:
                    yield TargetRow(*parse_limit(title), cell.removesuffix(" MISS"), "MISS" not in cell)


def test_the_performance_page_shows_every_target_as_it_was_measured() -> None:
    sections = re.split(r"^## ", (ROOT / "docs" / "performance.md").read_text(), flags=re.MULTILINE)
    results = sorted((ROOT / "benchmarks" / "results").glob("bench_*-2cpu.json"))
    assert len(results) >= 7
    for path in results:
        result = json.loads(path.read_text())
        benchmark = result["benchmark"]
        name, *arguments = benchmark.split()
        command = " ".join([f"benchmarks/{name}.py", *arguments])
        (section,) = (text for text in sections if f"`{command}`" in text)
        rows = list(target_rows(section))
        assert len(rows) == len(result["targets"]), benchmark
        for row, target in zip(rows, result["targets"], strict=True):
            assert row.agrees_with(target), f"{benchmark}: {row} is not {target}"
        environment, settings = result["environment"], result["settings"]
        conditions = f"`{command}`, {environment['date']}, load {environment['load_1min']}"
        conditions += f", {settings['rounds']} rounds" if "rounds" in settings else ""
        assert conditions in section, conditions


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_loads_nothing_from_a_network(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    built = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"([^\"]+)\"", page.read_text())
        assert not [url for url in loaded if url.startswith(("http:", "https:", "//"))], page
    reference = (tmp_path / "reference" / "verl_server.html").read_text()
    documented = {anchor.rpartition(".")[2] for anchor in re.findall(r'id="(verl_server\.[\w.]+)"', reference)}
    for engine_class in (VerlEngine, RolloutManager, HttpServerEngineAdapter, AsyncHttpServerEngineAdapter):
        public = {name for name in dir(engine_class) if not name.startswith("_")}
        assert public <= documented, f"{engine_class.__name__}: {sorted(public - documented)}"
