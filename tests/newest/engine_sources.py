"""Check what this library uses of an inference engine against the sources of that engine, without importing them.

A build for GPUs cannot be imported on a machine without one, and a new version may have moved a module. So this reads
the Python files of `verl_server` and those of an unpacked wheel, and reports

* imports of modules and names that the engine does not have (one branch of a `try` that catches ImportError suffices),
* attributes of imported modules, and dotted names in strings, that it does not have,
* calls of its functions and classes whose arguments do not fit,
* methods of our subclasses whose parameters do not fit those of the method that they override,
* HTTP routes and options of the command line that it does not have.

`python engine_sources.py vllm sglang` downloads the newest wheels; `vllm==0.33.0` names a version.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "verl_server"
ROUTES = {"vllm": "adapter/vllm/requests.py", "sglang": "adapter/sglang/replies.py"}
#: Routes that FastAPI adds, and ways in which an engine writes a parameter into a route.
BUILT_IN_ROUTES = ("/openapi.json",)

Definition = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.expr
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Sources:
    """The Python files of one engine below `root`, which has a folder with the name of the engine."""

    def __init__(self, root: Path, engine: str) -> None:
        self.root, self.engine = root, engine

    @functools.cache  # noqa: B019 - one object for each run
    def tree(self, module: str) -> ast.Module | None:
        """The parsed file of a module. None if there is no such module, an empty one for a namespace package."""
        path = self.root.joinpath(*module.split("."))
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if file.exists():
                return ast.parse(file.read_text(encoding="utf-8"))
        return ast.parse("") if path.is_dir() or list(path.parent.glob(f"{path.name}.*.so")) else None

    def find(self, module: str, name: str, depth: int = 0) -> tuple[str, Definition] | None:
        """The module that defines a name of a module, and its definition. Follows imports of the engine."""
        if depth > 8 or (tree := self.tree(module)) is None:
            return None
        found: tuple[str, Definition] | None = None
        for node in _statements(tree.body):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
                return module, node
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        source = self._absolute(module, node)
                        found = self.find(source, alias.name, depth + 1) or found or (module, tree)
                    elif alias.name == "*":
                        found = self.find(self._absolute(module, node), name, depth + 1) or found
            elif isinstance(node, ast.Import):
                if any((alias.asname or alias.name).partition(".")[0] == name for alias in node.names):
                    found = found or (module, tree)
            elif any(isinstance(target, ast.Name) and target.id == name for target in _targets(node)):
                found = found or (module, tree)
        if found is None and (submodule := self.tree(f"{module}.{name}")) is not None:
            return f"{module}.{name}", submodule
        if found is None and any(isinstance(n, ast.FunctionDef) and n.name == "__getattr__" for n in tree.body):
            return module, tree  # names that the module makes when they are asked for
        return found

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        is_package = self.root.joinpath(*module.split("."), "__init__.py").exists()
        parts = module.split(".")
        base = parts[: len(parts) - node.level + is_package]
        return ".".join([*base, *(node.module or "").split(".")]).rstrip(".")

    def has_dotted(self, dotted: str) -> bool:
        """Whether `package.module.Class.method` exists, as far as files and class bodies say it."""
        parts = dotted.split(".")
        for split in range(len(parts), 0, -1):
            module = ".".join(parts[:split])
            if self.tree(module) is None:
                continue
            if split == len(parts):
                return True
            found = self.find(module, parts[split])
            if found is None:
                return False
            where, definition = found
            rest = parts[split + 1 :]
            if not rest or not isinstance(definition, ast.ClassDef):
                return True
            return self.method(where, definition, rest[0]) is not None or self.has_unknown_base(where, definition)
        return False

    def method(self, module: str, cls: ast.ClassDef, name: str) -> Function | None:
        """The method of a class or of those of its bases that the engine defines."""
        for node in _statements(cls.body):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
                return node
        for base_module, base in self._bases(module, cls):
            if (found := self.method(base_module, base, name)) is not None:
                return found
        return None

    def _bases(self, module: str, cls: ast.ClassDef) -> Iterator[tuple[str, ast.ClassDef]]:
        for base in cls.bases:
            found = self.find(module, ast.unparse(base).partition("[")[0]) if isinstance(base, ast.Name) else None
            if found is not None and isinstance(found[1], ast.ClassDef):
                yield found[0], found[1]

    def has_unknown_base(self, module: str, cls: ast.ClassDef) -> bool:
        """Whether some base of a class is outside of the engine, so that its methods are not known here."""
        bases = list(self._bases(module, cls))
        outside = [base for base in cls.bases if ast.unparse(base) not in ("ABC", "object")]
        return len(bases) < len(outside) or any(self.has_unknown_base(*base) for base in bases)

    @functools.cached_property
    def strings(self) -> frozenset[str]:
        """All string constants of the files with routes."""
        found: set[str] = set()
        for path in (self.root / self.engine).glob("**/entrypoints/**/*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 100:
                    found.add(node.value)
        return frozenset(found)


@dataclass(frozen=True)
class Import:
    """A name of an engine in one of our files."""

    module: str
    name: str
    """Empty for `import module`."""
    line: int
    has_alternative: bool
    """Whether the import stands in a `try` that catches its failure, or in the handler."""


def find_problems(sources: Sources, package: Path = PACKAGE) -> list[str]:
    """What `package` uses and the engine does not have, one line each."""
    problems: list[str] = []
    for path in sorted(package.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        where = path.relative_to(package.parent)
        imports = list(_imports(tree, sources.engine))
        problems += [f"{where}:{line}: {text}" for line, text in _missing_imports(sources, imports)]
        problems += [f"{where}:{line}: {text}" for line, text in _misuse(sources, tree, imports)]
        problems += [f"{where}:{line}: {text}" for line, text in _missing_strings(sources, tree)]
    if (routes := package / ROUTES[sources.engine]).exists():
        problems += [f"no route {route}" for route in _routes(routes) if not _has_route(sources, route)]
    return problems


def _imports(tree: ast.Module, engine: str) -> Iterator[Import]:
    guarded = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.Try)
        and any("Import" in ast.unparse(h) or "NotFound" in ast.unparse(h) for h in node.handlers)
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == engine:
            for alias in node.names:
                yield Import(node.module or "", alias.name, node.lineno, id(node) in guarded)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == engine:
                    yield Import(alias.name, "", node.lineno, id(node) in guarded)


def _missing_imports(sources: Sources, imports: list[Import]) -> Iterator[tuple[int, str]]:
    guarded = [found for found in imports if found.has_alternative]
    one_exists = any(_exists(sources, found) for found in guarded)
    for found in imports:
        if not _exists(sources, found) and not (found.has_alternative and one_exists):
            yield found.line, f"{sources.engine} has no {'.'.join(filter(None, (found.module, found.name)))}"


def _exists(sources: Sources, found: Import) -> bool:
    if not found.name:
        return sources.tree(found.module) is not None
    return sources.find(found.module, found.name) is not None


def _misuse(sources: Sources, tree: ast.Module, imports: list[Import]) -> Iterator[tuple[int, str]]:
    """Attributes of imported modules, arguments of calls, and overridden methods."""
    names: dict[str, tuple[str, Definition]] = {}
    for found in imports:
        if found.name and (place := sources.find(found.module, found.name)) is not None:
            names[found.name] = place
    for alias in [a for n in ast.walk(tree) if isinstance(n, (ast.Import, ast.ImportFrom)) for a in n.names]:
        if alias.asname and alias.name in names:
            names[alias.asname] = names[alias.name]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in names:
            module, definition = names[node.value.id]
            is_submodule = isinstance(definition, ast.Module) and module.endswith(f".{node.value.id}")
            if is_submodule and sources.find(module, node.attr) is None:
                yield node.lineno, f"{module} has no {node.attr}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
            module, definition = names[node.func.id]
            if (reason := _refuses(sources, module, definition, node)) is not None:
                yield node.lineno, f"{module}.{node.func.id}: {reason}"
        elif isinstance(node, ast.ClassDef):
            yield from _wrong_overrides(sources, node, names)


def _refuses(sources: Sources, module: str, definition: Definition, call: ast.Call) -> str | None:
    """Why a call does not fit. None if it does, or if the parameters are not known."""
    function: Function | None = None
    skipped = 0
    if isinstance(definition, ast.ClassDef):
        function, skipped = sources.method(module, definition, "__init__"), 1
    elif isinstance(definition, (ast.FunctionDef, ast.AsyncFunctionDef)) and not definition.decorator_list:
        function = definition
    if function is None or any(isinstance(argument, ast.Starred) for argument in call.args):
        return None
    parameters = function.args
    positional = [p.arg for p in [*parameters.posonlyargs, *parameters.args]][skipped:]
    given = set(positional[: len(call.args)]) | {k.arg for k in call.keywords if k.arg}
    if len(call.args) > len(positional) and parameters.vararg is None:
        return f"{len(call.args)} positional arguments, it takes {len(positional)}"
    known = {*positional, *(p.arg for p in parameters.kwonlyargs)}
    if parameters.kwarg is None and (unknown := sorted(given - known)):
        return f"it has no parameter {', '.join(unknown)}"
    if any(keyword.arg is None for keyword in call.keywords):
        return None
    required = positional[: len(positional) - len(parameters.defaults)]
    required += [
        p.arg for p, default in zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True) if default is None
    ]
    missing = [name for name in required if name not in given]
    return f"it needs {', '.join(missing)}" if missing else None


def _wrong_overrides(
    sources: Sources, cls: ast.ClassDef, names: dict[str, tuple[str, Definition]]
) -> Iterator[tuple[int, str]]:
    bases = [names[name] for base in cls.bases if (name := ast.unparse(base).partition("[")[0]) in names]
    own = {node.name: node for node in cls.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
    for module, base in bases:
        if not isinstance(base, ast.ClassDef):
            continue
        for name, method in own.items():
            theirs = sources.method(module, base, name)
            if (
                theirs is None
                or method.args.vararg
                or theirs.args.vararg
                or (name.startswith("__") and name != "__init__")
            ):
                continue
            mine = [p.arg for p in [*method.args.posonlyargs, *method.args.args]]
            asked = [p.arg for p in [*theirs.args.posonlyargs, *theirs.args.args]]
            if len(mine) < len(asked) or len(mine) - len(method.args.defaults) > len(asked):
                yield method.lineno, f"{module}.{base.name}.{name} has the parameters {', '.join(asked)}"
        abstract = {
            node.name
            for node in base.body
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            and any("abstractmethod" in ast.unparse(decorator) for decorator in node.decorator_list)
        }
        if missing := sorted(abstract - own.keys() - _assigned(cls)):
            yield cls.lineno, f"{module}.{base.name} has the abstract methods {', '.join(missing)}"


def _missing_strings(sources: Sources, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Dotted names of the engine in strings, such as targets of hooks. `f"{PREFIX}.name"` is put together."""
    constants: dict[str, str] = {}
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            constants[statement.targets[0].id] = _text(statement.value, constants) or ""
    docstrings = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)}
    inside = {id(part) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) for part in n.values}
    optional = {
        id(child)
        for n in ast.walk(tree)
        if isinstance(n, ast.Call) and ast.unparse(n.func) == "_exists"
        for child in n.args
    } | {
        id(c) for n in ast.walk(tree) if isinstance(n, ast.If) and "_exists" in ast.unparse(n.test) for c in ast.walk(n)
    }
    for node in ast.walk(tree):
        if id(node) in docstrings | inside | optional or not isinstance(node, (ast.Constant, ast.JoinedStr)):
            continue
        text = _text(node, constants) or ""
        parts = text.split(".")
        is_name = parts[0] == sources.engine and len(parts) > 1 and all(part.isidentifier() for part in parts)
        is_ours = len(parts) > 1 and parts[1] == "verl_server"  # the loggers of our plugin
        if is_name and not is_ours and not sources.has_dotted(text):
            yield node.lineno, f"{sources.engine} has no {text}"


def _text(node: ast.expr, constants: dict[str, str]) -> str | None:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        parts = [_text(v.value if isinstance(v, ast.FormattedValue) else v, constants) for v in node.values]
        return None if None in parts else "".join(filter(None, parts))
    return constants.get(node.id) if isinstance(node, ast.Name) else None


def _routes(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Endpoint":
            is_optional = any(k.arg == "is_optional" and ast.unparse(k.value) == "True" for k in node.keywords)
            if isinstance(node.args[0], ast.Constant) and not is_optional:
                yield str(node.args[0].value)


def _has_route(sources: Sources, route: str) -> bool:
    if route in BUILT_IN_ROUTES or route in sources.strings:
        return True
    prefix, _, last = route.rpartition("/")  # a router with a prefix
    return bool(prefix) and prefix in sources.strings and f"/{last}" in sources.strings


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a body, also those inside of `if`, `try`, `with` and loops."""
    for node in body:
        yield node
        for field in ("body", "orelse", "finalbody"):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                yield from _statements(getattr(node, field, []))
        for handler in getattr(node, "handlers", []):
            yield from _statements(handler.body)


def _targets(node: ast.stmt) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return [t for target in node.targets for t in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return [node.target] if isinstance(node, (ast.AnnAssign, ast.AugAssign)) else []


def _assigned(cls: ast.ClassDef) -> set[str]:
    return {target.id for node in cls.body for target in _targets(node) if isinstance(target, ast.Name)}


def unpack_wheel(requirement: str, folder: Path) -> Path:
    """Download a wheel from the package index and unpack its Python files. Returns the folder with the packages."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", requirement]
    subprocess.run([*command, "--dest", str(folder)], check=True, timeout=900)
    wheel = next(folder.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.endswith(".py")])
    print(wheel.name)
    wheel.unlink()
    return folder


def main() -> int:
    failed = False
    for requirement in sys.argv[1:] or ["vllm", "sglang"]:
        with tempfile.TemporaryDirectory() as folder:
            engine = requirement.partition("=")[0]
            problems = find_problems(Sources(unpack_wheel(requirement, Path(folder)), engine))
        print("\n".join(problems) or f"{requirement}: everything that verl_server uses is there")
        failed |= bool(problems)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
