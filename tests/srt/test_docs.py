"""The documentation: examples run or are type-checked, and what the pages name exists."""

from __future__ import annotations

import ast
import asyncio
import builtins
import importlib
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
from torch.distributed.device_mesh import DeviceMesh

from verl_server import AsyncHttpServerEngineAdapter, HttpServerEngineAdapter, RolloutManager, VerlEngine
from verl_server.cli import app
from verl_server.cli_arguments import parse_server_args

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
MAX_README_WORDS = 700
PUBLIC_PACKAGES = ("verl_server", "verl_server.agent", "verl_server.trajectory", "verl_server.ray")
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


def readme_examples() -> list[str]:
    """The Python examples of the README: one engine, a fleet, agents."""
    return [block.text for block in blocks("python") if block.page.name == "README.md"]


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


@pytest.mark.timeout(600)
def test_every_python_example_has_correct_types(tmp_path: Path) -> None:
    modules = {block.name: as_module(block) for block in blocks("python")}
    assert len(modules) > 20
    for name, text in modules.items():
        (tmp_path / f"{name}.py").write_text(text)
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "--no-error-summary"]
    checked = subprocess.run(
        [*command, *sorted(map(str, tmp_path.glob("*.py")))], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert checked.returncode in (0, 1), checked.stderr
    errors = [line for line in checked.stdout.splitlines() if Path(line.split(":")[0]).stem in modules]
    assert not errors, "\n".join(errors)


def test_the_first_example_of_the_readme_runs_on_two_ranks(tiny: Callable[..., Path], tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(readme_examples()[0])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(script), str(tiny("qwen3"))], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("served now: 1") == 2


def test_the_fleet_and_the_agents_of_the_readme_run(
    tiny: Callable[..., Path], one_rank: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agents act through the fleet of the example before, so both run as one program."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _, fleet_example, agent_example = readme_examples()
    program = fleet_example + textwrap.indent(agent_example, "    ")
    model = tiny("qwen3")
    names = {
        "mesh": one_rank,
        "policy": AutoModelForCausalLM.from_pretrained(model),
        "tokenizer": AutoTokenizer.from_pretrained(model),
    }
    monkeypatch.chdir(tmp_path)
    code = compile(
        program.replace("/models/policy", str(model)), "README.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    )
    asyncio.run(eval(code, names))
    assert len(names["reply"]["output_ids"]) == 8
    assert [span["version"] for span in names["reply"]["meta_info"]["weight_versions"]] == [1]
    assert names["batch"]["responses"].shape[0] == 8
    assert len(list((tmp_path / "sessions").glob("sum-*.jsonl"))) == 8


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= MAX_README_WORDS


def shell_commands() -> Iterator[tuple[Block, list[str]]]:
    """All commands of the shell examples, without comments and variables of the environment."""
    for block in blocks("bash"):
        for line in block.text.splitlines():
            if words := shlex.split(line, comments=True):
                yield block, words


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
        elif program in ("python", "pytest", "torchrun"):
            for word in words[1:]:
                assert not word.startswith(("examples/", "benchmarks/", "tests/")) or (ROOT / word).exists(), where
        else:
            assert program in ("export", "pip", "git", "curl", "ruff", "mypy", "flock"), where
    assert {"make", "verl-server", "torchrun"} <= seen


def check_verl_server(words: list[str], where: str) -> None:
    """Every command and option of `verl-server` exists. Other options of `launch` are SGLang's server arguments."""
    commands: dict[str, Any] = vars(typer.main.get_command(app))["commands"]
    assert words[0] in commands, where
    own = {option for parameter in commands[words[0]].params for option in parameter.opts}
    others = [word for word in words[1:] if word.startswith("-") and word.partition("=")[0] not in {*own, "--help"}]
    if others:
        assert words[0] == "launch", where
        from sglang.srt.server_args import ServerArgs

        fields = set(inspect.signature(ServerArgs).parameters)
        given = set(parse_server_args(["model", *others])) - {"model_path"}
        assert given <= fields, f"{where}: {sorted(given - fields)}"


def test_every_file_that_a_page_names_exists() -> None:
    named = 0
    for page in PAGES:
        for path in REPOSITORY_PATH.findall(page.read_text()):
            named += 1
            assert (ROOT / path).exists(), f"{page} names {path}"
    assert named > 30


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
    source = "".join((ROOT / "verl_server" / room / "metrics.py").read_text() for room in ("router", "rollout"))
    prefixes = set(re.findall(r"verl_(?:router|replica|fleet)_", source))
    named = set(re.findall(r"verl_(?:router|replica|fleet)_\w+", (ROOT / "docs" / "operations.md").read_text()))
    assert len(named) > 15
    for metric in sorted(named):
        prefix = next(prefix for prefix in prefixes if metric.startswith(prefix))
        name = metric.removeprefix(prefix).removesuffix("_total")
        assert f'"{name}"' in source or f"{prefix}{name}" in source, metric


def test_the_performance_page_has_every_missed_target() -> None:
    sections = re.split(r"^## ", (ROOT / "docs" / "performance.md").read_text(), flags=re.MULTILINE)
    results = sorted((ROOT / "benchmarks" / "results").glob("*-2cpu.json"))
    assert len(results) >= 7
    for result in results:
        benchmark = result.name.removesuffix("-2cpu.json")
        (section,) = (text for text in sections if f"`benchmarks/{benchmark}.py`" in text)
        missed = [target["name"] for target in json.loads(result.read_text())["targets"] if not target["met"]]
        assert section.count("MISS") == len(missed), f"{benchmark}: {missed}"


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
