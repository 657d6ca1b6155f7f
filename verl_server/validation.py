"""Checks of arguments that several folders of this package need."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import os
import re
import reprlib
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ParamSpec, TypeGuard, TypeVar
from urllib.parse import urlsplit

from pydantic import ConfigDict, InstanceOf, TypeAdapter, ValidationError

from verl_server.errors import BadInputError

T = TypeVar("T")

#: Paths of requests to a server or a router. They are often copied into a base URL by mistake.
ENDPOINTS = (
    "/generate", "/health", "/health_generate", "/metrics", "/model_info", "/replicas", "/server_info",
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/messages", "/v1/models", "/v1/responses",
)  # fmt: skip


_JSON_SCALARS = frozenset({type(None), bool, int, float, str})
_JSON_TYPES_WITHOUT_LIST = _JSON_SCALARS | {dict}


def is_whole_number(value: Any) -> TypeGuard[int]:
    """Whether `value` is an int or a whole number of another library, for example `numpy.int64`. False for a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_bool(value: Any) -> TypeGuard[bool]:
    """Whether `value` is True or False, also of numpy."""
    kind = type(value)
    return isinstance(value, bool) or (kind.__module__, kind.__name__) in (("numpy", "bool"), ("numpy", "bool_"))


def is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    """Whether `value` is a list or another sequence, for example a tuple. False for strings and bytes."""
    kind = type(value)
    if kind is list or kind in _JSON_TYPES_WITHOUT_LIST:  # the test of an abstract class takes ten times as long
        return kind is list
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, memoryview))


def is_finite_number(value: Any) -> TypeGuard[float]:
    """Whether `value` is a real number, also of numpy, but neither a bool nor NaN nor infinity.

    False for a whole number that is too large for a float, too.
    """
    try:
        return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)
    except OverflowError:
        return False


def to_plain(value: Any) -> Any:
    """`value` with the types that JSON has. Elements of dicts and lists are converted too.

    Numbers and bools of numpy become int, float or bool, paths become strings, mappings become dicts, tuples and other
    sequences become lists, and a `torch.dtype` becomes its name, for example "bfloat16". Other values are returned as
    they are.
    """
    if type(value) in _JSON_SCALARS or isinstance(value, str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if is_list(value):
        return [to_plain(item) for item in value]
    if is_bool(value):
        return bool(value)
    if (type(value).__module__, type(value).__name__) == ("torch", "dtype"):
        return str(value).removeprefix("torch.")
    return value


def as_pairs(named_values: Mapping[str, T] | Iterable[tuple[str, T]]) -> Iterable[tuple[str, T]]:
    """The pairs of name and value in a mapping. Anything else is returned as it is."""
    return named_values.items() if isinstance(named_values, Mapping) else named_values


def require_bool(name: str, value: object) -> bool:
    """`value` as a bool if it is True or False, also of numpy. Otherwise raise BadInputError."""
    if not is_bool(value):
        raise BadInputError(f"{name} must be True or False, got {value!r:.80}")
    return bool(value)


def require_whole_number(name: str, value: object, minimum: int = 1) -> int:
    """`value` as an int if it is a whole number of at least `minimum`. Otherwise raise BadInputError."""
    if not is_whole_number(value) or value < minimum:
        raise BadInputError(f"{name} must be a whole number of at least {minimum}, got {value!r}")
    return int(value)


def require_seconds(name: str, value: object, *, may_be_zero: bool = False) -> float:
    """`value` as an int or a float if it is a finite number above 0. Otherwise raise BadInputError."""
    if not is_finite_number(value) or value < 0 or (value == 0 and not may_be_zero):
        raise BadInputError(f"{name} must be a positive number of seconds{' or 0' * may_be_zero}, got {value!r}")
    seconds: float = to_plain(value)
    return seconds


def require_list(name: str, value: object, hint: str) -> None:
    """Raise BadInputError unless `value` is a list or another sequence; a string is none. `hint` says what to pass."""
    if not is_list(value):
        raise BadInputError(f"{name} must be a list, got {type(value).__name__}; {hint}")


def require_key(name: str, key: object, min_chars: int = 1) -> str:
    """`key` if a header of HTTP can carry it. Otherwise raise BadInputError. The key is not shown."""
    if isinstance(key, str) and len(key) >= min_chars and all("!" <= character <= "~" for character in key):
        return key
    characters = f"at least {min_chars} printable ASCII characters" if min_chars > 1 else "printable ASCII characters"
    raise BadInputError(f"{name} must be a string of {characters} without spaces and without the end of a line")


def make_writable_folder(name: str, folder: Path | str) -> Path:
    """The absolute path of `folder`, which is created if it is missing. `~` is the home of the user.

    Raises BadInputError if the folder takes no files.
    """
    path = Path(os.path.expanduser(folder)).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError as error:
        raise BadInputError(
            f"{name}: no file can be created in the folder {path}: {error.strerror or error}; pass a folder in which "
            "this user can create files",
            argument=name,
        ) from error


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown name: the most similar known name, or nothing when none is similar.

    Up to three names that begin with `name` and an underscore are all suggested: `fp8_e4m3` and `fp8_e5m2` for `fp8`.
    """
    known = list(known)
    longer = sorted(other for other in known if name and other.startswith(f"{name}_"))
    close = longer if 0 < len(longer) <= 3 else difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def require_model_path(server_args: Mapping[str, Any]) -> str:
    """The argument `model_path` of a server. Otherwise raise BadInputError, which names the arguments that are given.

    The model may have been passed under a name that only the server's engine could refuse.
    """
    model = server_args.get("model_path")
    if isinstance(model, str) and model:
        return model
    given = ", ".join(server_args) or "(none)"
    got = f"got {model!r}" if "model_path" in server_args else f"but it is missing from the arguments: {given}"
    raise BadInputError(f"model_path must be a folder or the name of a model on a hub, {got}", argument="model_path")


def require_http_url(
    name: str,
    url: str,
    example: str = "http://127.0.0.1:30000",
    key_hint: str = "pass a key of the server as api_key",
) -> str:
    """The base URL of the server at `url`. A path is kept: the server may be behind a reverse proxy with a path prefix.

    A slash and `/v1` at the end of `url` are removed: the base URL of an OpenAI client is accepted. Raises
    BadInputError unless `url` is an HTTP URL with a host, for a query or an endpoint of the server at its end, and
    for a user or a password, which the message does not show. `key_hint` says how a key is passed.
    """
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is not a number from 0 to 65535
        is_valid = False
    authority = url.partition("://")[2].partition("/")[0]
    if "@" in authority:
        shown = url.replace(authority, authority.rpartition("@")[2], 1)
        raise BadInputError(
            f"{name} {shown!r} has a user or a password before the host, which servers and routers do not read; write "
            f"the URL without them, and {key_hint}"
        )
    if not is_valid or any(character.isspace() for character in url):
        raise BadInputError(f"{name} {url!r} is not an HTTP URL; write for example {example}")
    path = parts.path.rstrip("/")
    endpoints = [endpoint for endpoint in ENDPOINTS if path.endswith(endpoint)]
    base_path = path.removesuffix(max(endpoints, key=len, default="")).rstrip("/").removesuffix("/v1").rstrip("/")
    base_url = f"{parts.scheme}://{parts.netloc}{base_path}"
    if endpoints or parts.query or parts.fragment:
        raise BadInputError(
            f"{name} {url!r} must be the base URL of the server, without an endpoint or a query; write {base_url}"
        )
    return base_url


# -- Arguments of public constructors and functions -------------------------------------------------
# pydantic checks the values, by annotation, and its errors become BadInputError.

P = ParamSpec("P")
R = TypeVar("R")
Class = TypeVar("Class", bound=type)

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 120


def check_arguments(*, skip: Collection[str] = ()) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: raises BadInputError for an unknown argument, and for one that does not fit its annotation.

    Numbers of numpy are passed on as ints and floats, and `**arguments` as `to_plain` converts them. Not checked: the
    values of the arguments in `skip`, and of those whose annotation is imported for type checkers only. Values of
    arguments whose name ends with `key` are not shown.
    """
    return lambda function: _checked(function, "", skip)


def check_fields(*, skip: Collection[str] = ()) -> Callable[[Class], Class]:
    """Class decorator of a dataclass: `check_arguments` for its constructor. Errors name `Class.field`.

    A subclass that is a dataclass has a constructor of its own: these fields are checked after it.
    """

    def decorate(cls: Class) -> Class:
        constructor, post_init = cls.__init__, getattr(cls, "__post_init__", lambda _: None)  # type: ignore[misc]

        def check_inherited(self: Any) -> None:
            if type(self).__init__ is not cls.__init__:  # type: ignore[misc]
                hints = _argument_types(constructor)
                for name in hints.keys() - {*skip, "return"}:
                    value = getattr(self, name)
                    checked = checked_value(prefix + name, value, hints[name], is_secret=name.endswith("key"))
                    object.__setattr__(self, name, checked)  # a frozen dataclass is not frozen yet
            post_init(self)

        prefix = f"{cls.__name__}."
        cls.__post_init__ = check_inherited  # type: ignore[attr-defined]
        cls.__init__ = _checked(constructor, prefix, skip)  # type: ignore[misc]
        return cls

    return decorate


def _checked(function: Callable[P, R], prefix: str, skip: Collection[str]) -> Callable[P, R]:
    signature = inspect.signature(function)
    variadic = {name for name, item in signature.parameters.items() if item.kind is item.VAR_KEYWORD}
    owner = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        known = signature.parameters.keys()
        for name in () if variadic else kwargs.keys() - known:
            cure = NAMES_OF_OTHER_LIBRARIES.get(owner, {}).get(name)
            hint = f"; {cure}" if cure else did_you_mean(name, known)
            raise BadInputError(f"{owner} has no argument {name!r}{hint}", argument=name)
        given, hints = (bound := signature.bind(*args, **kwargs)).arguments, _argument_types(function)
        for name in given.keys() & hints.keys() - {*skip} - variadic:
            given[name] = checked_value(prefix + name, given[name], hints[name], is_secret=name.endswith("key"))
        given.update((name, to_plain(given[name])) for name in variadic.intersection(given))
        return function(*bound.args, **bound.kwargs)

    return call


def checked_value(name: str, value: object, expected: Any, *, is_secret: bool = False) -> Any:
    """`value` if it fits the annotation `expected`. A number of numpy becomes an int or a float.

    Otherwise raise BadInputError, which does not show a value that `is_secret`, nor the items of dicts and lists.
    """
    value = to_plain(value) if isinstance(value, Real) or is_bool(value) else value
    try:
        checked = _adapter(expected).validate_python(value, strict=True)
    except ValidationError as error:
        first, *others = error.errors(include_url=False)
        given = first["input"]
        is_item = given is not value
        place = "".join(f"[{each!r}]" for each in first["loc"] if is_item and _is_index(value, each))
        wanted = dict.fromkeys(re.sub(r"^(Input|String) should", "must", each["msg"]) for each in (first, *others))
        kind = type(given).__name__
        is_container = isinstance(given, Collection) and not isinstance(given, (str, bytes))  # its items may be keys
        is_hidden = is_secret or is_item or is_container
        got = f"a value of type {kind}" if is_hidden else f"{_SHORT.repr(given)} ({kind})"
        context = first.get("ctx", {})
        keys = (context.get("class", ""), context.get("class_name", ""), name)
        cure = next((f"; {WHAT_TO_PASS[key]}" for key in keys if key in WHAT_TO_PASS), "")
        raise BadInputError(f"{name}{place} {' or '.join(wanted)}, got {got}{cure}", argument=name) from None
    if isinstance(checked, float) and not isinstance(value, Real):  # pydantic calls `__float__`, as of a tensor
        got = type(value).__name__ if is_secret else f"{_SHORT.repr(value)} ({type(value).__name__})"
        raise BadInputError(f"{name} must be a valid number, got {got}", argument=name)
    return value


def _is_index(value: Any, key: object) -> bool:
    """Whether a part of the location of an error is an index of `value`; others name a choice of a union."""
    return key in value if isinstance(value, dict) else isinstance(key, int)


@functools.cache
def _adapter(expected: Any) -> TypeAdapter[Any]:
    if is_dataclass(expected):
        return TypeAdapter(InstanceOf[expected])
    return TypeAdapter(expected, config=ConfigDict(arbitrary_types_allowed=True))


@functools.cache
def _argument_types(function: Callable[..., Any]) -> dict[str, Any]:
    """Annotations of a function by argument, without those whose names are imported for type checkers only."""
    hints = {}
    for name, annotation in inspect.get_annotations(function).items():
        try:
            hints[name] = eval(str(annotation), inspect.unwrap(function).__globals__)  # a string: PEP 563
        except NameError:
            continue
    return hints


WHAT_TO_PASS: Mapping[str, str] = {
    "ChatRenderer": "pass get_renderer(tokenizer)",
    "RolloutLimits": "pass RolloutLimits(max_response_tokens=1024)",
    "TrajectoryGraph": "pass sample.graph or load_session(path)",
    "VisionInputs": "pass VisionInputs(processor, model)",
    "ExpertLayout": "pass ExpertLayout.from_config(model.config)",
    "ForkReason": "write ForkReason.SAMPLE, for example",
    "reward": "write `def reward(sample: Sample) -> float`",
    "group_filter": "write `def keep(group: SampleGroup) -> bool`",
    "callback": "write `def on_turn(turn, info, error)`",
    "servers": "pass a list of generate functions, for example [fleet.router.generate]",
    "the servers by name": 'pass {"r0": RemoteServer("http://10.0.0.1:30000")}, for example',
    "pad_token_id": "pass tokenizer.pad_token_id, or tokenizer.eos_token_id if it is None",
    "Task.id": "pass a text that no other task has, for example str(number)",
    "Task.data": 'pass a dict such as {"answer": 42}',
}
"""What to pass for a value that does not fit, by the class that is expected or by the name of the argument."""

_NUM_SAMPLES = "the number of samples of each task is RolloutRunner(n=...)"
_RESPONSE = "pass max_response_tokens, the number of tokens after the first prompt over all turns"
_CONTEXT = "pass max_context_tokens, the number of tokens of prompt plus response"
_MESSAGES = 'pass messages=[{"role": "user", "content": "..."}]'
_DATA = 'pass data={"answer": ...}, which rewards read as sample.task.data["answer"]'
_REWARD = "pass reward, one function of a finished Sample. For several rewards, use an Environment with methods @reward"
_AGENT = "pass the list of tools, the class of an Environment or an AgentLoop as the first argument"
_ENGINE = "pass what generates as the second argument"
_LIMITS = "pass limits=RolloutLimits(...)"
_RENDERER = "pass renderer=get_renderer(tokenizer)"
_SAMPLING = 'pass sampling_params={"temperature": 1.0}'
_TASKS = "pass the tasks to runner.run(tasks) or to runner.steps(tasks, num_groups)"
_LENGTH = "the run ends with its tasks, or when you leave the loop. A step has num_groups groups"
_GROUPS = "pass num_groups, the number of tasks of a step"
_SECONDS = "pass timeout_s, in seconds"


def _names(cures: Mapping[str, str]) -> Mapping[str, str]:
    """The cure of each name. The keys of `cures` are one or more names with spaces between them."""
    return {name: cure for names, cure in cures.items() for name in names.split()}


NAMES_OF_OTHER_LIBRARIES: Mapping[str, Mapping[str, str]] = {
    "RolloutRunner": _names(
        {
            "num_generations rollouts_per_example group_size num_samples rollout_n": "pass n=8 for 8 samples per task",
            "reward_funcs reward_fn reward_function rewards rubric funcs": _REWARD,
            "tools env environment environment_factory agent_loop": _AGENT,
            "model server client url generate": _ENGINE,
            "max_turns max_tokens max_response_length max_completion_length max_prompt_length max_new_tokens": _LIMITS,
            "max_response_tokens max_context_tokens max_tool_tokens timeout timeout_s": _LIMITS,
            "tokenizer processor processing_class": _RENDERER,
            "sampling_args temperature top_p top_k": _SAMPLING,
            "train_dataset dataset tasks": _TASKS,
            "max_concurrent num_workers": "pass max_concurrency, the number of samples that generate at a time",
        }
    ),
    "RolloutRunner.steps": _names(
        {
            "num_steps max_steps total_training_steps steps total_epochs": _LENGTH,
            "batch_size train_batch_size num_tasks": _GROUPS,
            "gen_batch_size": "rejected groups are replaced; num_extra_groups generates more groups at the same time",
            "n num_generations group_size": _NUM_SAMPLES,
        }
    ),
    "RolloutRunner.run": _names(
        {
            "n num_generations group_size": _NUM_SAMPLES,
            "num_groups": "run yields all groups; runner.steps(tasks, num_groups) yields training steps",
        }
    ),
    "RolloutLimits": _names(
        {
            "max_tokens max_response_length max_completion_length response_length": _RESPONSE,
            "max_new_tokens": f'{_RESPONSE}. For one turn: sampling_params={{"max_new_tokens": ...}}',
            "max_model_len max_seq_len max_length max_context_length": _CONTEXT,
            "max_assistant_turns max_steps max_tool_calling_iterations": "pass max_turns",
            "max_tool_response_length": "pass max_tool_tokens, in tokens",
            "timeout timeout_seconds": _SECONDS,
        }
    ),
    "Task": _names(
        {
            "prompt raw_prompt question": _MESSAGES,
            "answer info ground_truth reward_model extra_info metadata": _DATA,
            "uid example_id task_id name": "pass id, a string that no other task has",
        }
    ),
}
"""What to write for an argument of verl, TRL or verifiers, by our class or function. `docs/migration.md` has tables."""
