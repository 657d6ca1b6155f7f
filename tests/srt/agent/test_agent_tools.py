"""Tools: schemas, failures, and parsing of tool calls."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import functools
import random
import runpy
import threading
import types
import typing
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pydantic
import pytest
import torch
from agent_helpers import (
    add,
    block_forever,
    exit_process,
    raise_runtime_error,
    raise_stop_iteration,
    return_long_text,
    wait_a_minute,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field
from transformers import AutoTokenizer

from verl_server.agent import (
    FunctionTool,
    Tool,
    ToolAgentLoop,
    ToolCall,
    ToolRegistry,
    ToolResult,
    parse_hermes_tool_calls,
)
from verl_server.agent.user_code import _LEFT_RUNNING, wait_until_done
from verl_server.errors import BadInputError
from verl_server.trajectory import ChatRenderer


@pytest.mark.parametrize(
    ("call", "error_type", "expected"),
    [
        (
            ToolCall("unknown", {}),
            "unknown_tool",
            "available tools: add, block_forever, exit_process",
        ),
        (ToolCall("add", {"a": "x"}), "bad_arguments", "wrong arguments: a:"),
        (ToolCall("add", {"a": 1, "c": 2}), "bad_arguments", "c:"),
        (ToolCall("add", {}), "bad_arguments", "a: Field required"),
        (ToolCall("wait_a_minute", {}), "timeout", "no result within 0.2 s"),
        (ToolCall("block_forever", {}), "timeout", "no result within 0.2 s"),
        (ToolCall("raise_runtime_error", {}), "raised", "RuntimeError: no"),
        (ToolCall("exit_process", {}), "raised", "SystemExit: 3"),
        (ToolCall("raise_stop_iteration", {}), "raised", "StopIteration"),
    ],
)
def test_failing_tools_return_errors_as_results(call: ToolCall, error_type: str, expected: str) -> None:
    slow = (FunctionTool(function, timeout_s=0.2) for function in (wait_a_minute, block_forever))
    tools = ToolRegistry([add, *slow, raise_runtime_error, exit_process, raise_stop_iteration, return_long_text])
    result = asyncio.run(tools.call(call))
    assert result.error_type == error_type
    assert expected in result.content


def test_a_tool_that_ignores_its_cancellation_does_not_block_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_server.agent.user_code.CANCEL_TIMEOUT_S", 0.1)

    async def run() -> tuple[ToolResult, bool]:
        end = asyncio.Event()

        async def stubborn() -> str:
            """Goes on after its cancellation."""
            while not end.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await end.wait()
            return "late"

        result = await asyncio.wait_for(FunctionTool(stubborn, timeout_s=0.1).call({}), 10.0)
        is_running = not end.is_set()
        end.set()
        return result, is_running

    result, is_running = asyncio.run(run())
    assert is_running
    assert (result.error_type, result.content) == ("timeout", "Error: no result within 0.1 s")


def test_a_task_that_is_left_running_is_kept_also_after_a_second_cancellation(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The event loop refers to tasks weakly: the garbage collector would end the task."""
    monkeypatch.setattr("verl_server.agent.user_code.CANCEL_TIMEOUT_S", 0.3)

    async def run() -> None:
        end = asyncio.Event()

        async def stubborn() -> None:
            while not end.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await end.wait()

        task = asyncio.create_task(stubborn())
        waiting = asyncio.create_task(wait_until_done(task, 60.0, "the tool 'a'"))
        for _ in range(2):
            await asyncio.sleep(0.05)
            waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert task in _LEFT_RUNNING
        end.set()
        await task
        await asyncio.sleep(0)
        assert task not in _LEFT_RUNNING

    asyncio.run(asyncio.wait_for(run(), 20.0))
    assert "the tool 'a' has ignored its cancellation for 0.3 s" in caplog.text


def test_tools_return_results_and_schemas(tiny: Callable[..., Path]) -> None:
    renderer = ChatRenderer(AutoTokenizer.from_pretrained(tiny("qwen3")))
    tools = ToolRegistry([add, return_long_text])
    assert asyncio.run(tools.call(ToolCall("add", {"a": 2}))) == ToolResult("add", "3")
    schema = tools.schemas[0]["function"]
    assert (schema["name"], schema["description"]) == ("add", "The sum of two numbers.")
    assert schema["parameters"]["required"] == ["a"]
    text = asyncio.run(tools.call(ToolCall("return_long_text", {}))).content
    assert renderer.truncate(text, 50) == "x" * 50 + " [cut]"
    image = {"type": "image", "image": "https://example.org/a.png"}
    parts = [{"type": "text", "text": "y" * 20}, image, {"type": "text", "text": text}, {"type": "text", "text": "z"}]
    assert renderer.truncate_content(parts, 50) == [
        {"type": "text", "text": "y" * 20}, image, {"type": "text", "text": "x" * 30 + " [cut]"},
        {"type": "text", "text": " [cut]"},
    ]  # fmt: skip
    assert renderer.truncate_content(parts[:2], 20) == parts[:2]
    assert renderer.truncate_content("short", 50) == "short"
    with pytest.raises(BadInputError, match="two tools"):
        ToolRegistry([add, add])


def without_annotation(query) -> str:  # type: ignore[no-untyped-def]
    """Search."""
    return str(query)


def without_docstring(query: str) -> str:
    return query


def with_unknown_annotation(query: Query) -> str:  # type: ignore[name-defined] # noqa: F821
    """Search."""
    return str(query)


def with_annotation_without_schema(lock: threading.Thread) -> str:
    """Search."""
    return str(lock)


def with_tensor(query: str, values: torch.Tensor) -> str:
    """Search."""
    return f"{query} {values}"


class Point(typing.TypedDict):
    x: int


def with_typed_dict(point: Point) -> str:
    """Search."""
    return str(point)


def with_words_as_annotation(query: "list of ints") -> str:  # type: ignore[valid-type] # noqa: F722
    """Search."""
    return str(query)


def yield_results(query: str) -> Iterator[str]:
    """Search."""
    yield query


async def yield_later(query: str) -> AsyncIterator[str]:
    """Search."""
    yield query


def with_underscore(_query: str) -> str:
    """Search."""
    return _query


def with_name_of_pydantic(model_config: str) -> str:
    """Search."""
    return model_config


def with_names_of_pydantic(schema: str, json: str, copy: str, model_dump: str = "d") -> str:
    """Search."""
    return schema + json + copy + model_dump


def with_none_as_default(
    limit: int = None,  # type: ignore[assignment] # noqa: RUF013
    page: Annotated[int, Field(ge=1), "Number of the page."] = None,  # type: ignore[assignment] # noqa: RUF013
    query: str | None = None,
) -> str:
    """Search."""
    return f"{limit} {page} {query}"


def with_any_number(*queries: str) -> str:
    """Search."""
    return " ".join(queries)


class SearchTool:
    """An index of documents."""

    def __call__(self, query: str) -> str:
        """Search."""
        return query

    def find(self, query: str) -> str:
        """Find a document."""
        return query


class AsyncSearchTool:
    """An index of documents on another machine."""

    async def __call__(self, query: str) -> str:
        return f"remote {query}"


def with_annotated_parameters(
    limit: Annotated[int, Field(ge=1)],
    query: Annotated[str, "What to search for."] = "x",
    page: Annotated[int, "not this text", Field(description="Number of the page.")] = 0,
) -> str:
    """Search."""
    return query * limit


def with_result_for_type_checkers(query: str) -> Thread:  # type: ignore[name-defined] # noqa: F821
    """Search."""
    return query


def search_in(index: threading.Thread, query: str, limit: int = 1) -> str:
    """Search an index."""
    return f"{index.name} {query} {limit}"


def collect_results(function: Callable[..., Iterator[str]]) -> Callable[..., list[str]]:
    """A decorator that makes a usable tool from a function with `yield`."""

    @functools.wraps(function)
    def collect(*args: Any, **kwargs: Any) -> list[str]:
        return list(function(*args, **kwargs))

    return collect


def log_calls(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def log(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return log


class Retry:
    """A decorator that is an object."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


class RetryLater(Retry):
    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(0)
        return self._function(*args, **kwargs)


def named_partial(function: Callable[..., Any], *args: Any, **kwargs: Any) -> functools.partial[Any]:
    partial = functools.partial(function, *args, **kwargs)
    functools.update_wrapper(partial, function)
    return partial


INDEX = threading.Thread(name="index")


@pytest.mark.parametrize(
    ("function", "name", "expected"),
    [
        (collect_results(yield_results), "yield_results", '["x"]'),
        (Retry(with_result_for_type_checkers), "with_result_for_type_checkers", "x"),
        (RetryLater(with_result_for_type_checkers), "with_result_for_type_checkers", "x"),
        (Retry(collect_results(yield_results)), "yield_results", '["x"]'),
        (functools.lru_cache(with_result_for_type_checkers), "with_result_for_type_checkers", "x"),
        (named_partial(search_in, INDEX, limit=2), "search_in", "index x 2"),
        (Retry(named_partial(search_in, INDEX, limit=2)), "search_in", "index x 2"),
        (log_calls(named_partial(search_in, index=INDEX, limit=2)), "search_in", "index x 2"),
    ],
)
def test_decorated_functions_are_tools(function: Any, name: str, expected: str) -> None:
    """Name, docstring and parameters are those of the function behind the decorators."""
    (schema,) = ToolRegistry([function]).schemas
    assert schema["function"]["name"] == name
    assert schema["function"]["description"].startswith("Search")
    assert list(schema["function"]["parameters"]["properties"]) == ["query"]
    assert asyncio.run(ToolRegistry([function]).call(ToolCall(name, {"query": "x"}))).content == expected


def test_unnamed_partial_behind_a_decorator_needs_a_name() -> None:
    partial = functools.partial(search_in, INDEX, limit=2)
    with pytest.raises(BadInputError, match=r"pass FunctionTool\(..., name="):
        ToolRegistry([Retry(partial)])
    tool = FunctionTool(Retry(partial), name="search")
    assert tool.schema["function"]["description"] == "Search an index."
    assert asyncio.run(tool.call({"query": "x"})).content == "index x 2"


@pytest.mark.parametrize("function", [yield_results, yield_later, log_calls(yield_results), log_calls(yield_later)])
def test_iterator_as_a_result_is_raised(function: Any) -> None:
    """The policy cannot avoid the mistake, so the episode fails."""
    with pytest.raises(
        BadInputError,
        match=r"tool '.*' returned <(async_)?generator object .*, which is an iterator",
    ):
        asyncio.run(FunctionTool(function).call({"query": "x"}))


def call_through(method: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator without `functools.wraps`."""

    def call(*args: Any) -> Any:
        return method(*args)

    return call


def call_documented(method: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator without `functools.wraps` that has a docstring of its own."""

    def call(*args: Any) -> Any:
        """Calls."""
        return method(*args)

    return call


class CallLater:
    """A decorator that is an object with an asynchronous call. It has no `__wrapped__`."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def __get__(self, owner: Any, _: type) -> Callable[..., Any]:
        return functools.partial(self, owner)

    async def __call__(self, *args: Any) -> Any:
        return await self._method(*args)


class EchoTool(Tool):
    def __init__(self) -> None:
        super().__init__("echo", "Repeat a text.", {"type": "object"}, 5.0)

    async def run(self, arguments: Any) -> Any:
        return arguments["text"]


class DecoratedTool(EchoTool):
    run = call_through(EchoTool.run)


class LaterTool(EchoTool):
    run = CallLater(EchoTool.run)


class DelegatingTool(EchoTool):
    def run(self, arguments: Any) -> Coroutine[Any, Any, Any]:
        return super().run(arguments)


@pytest.mark.parametrize("kind", [DecoratedTool, LaterTool, DelegatingTool])
def test_run_of_a_tool_may_return_a_coroutine(kind: type[EchoTool]) -> None:
    assert asyncio.run(kind().call({"text": "x"})) == ToolResult("echo", "x")
    assert asyncio.run(kind().call({})).error_type == "raised"


class ReturningTool(EchoTool):
    run = call_through(lambda self, arguments: "x")


def test_run_of_a_tool_that_returns_no_coroutine_is_raised() -> None:
    with pytest.raises(BadInputError, match=r"ReturningTool.run must be a coroutine function: write `async def run`"):
        asyncio.run(ReturningTool().call({}))


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (without_annotation, "'without_annotation': .*the parameter 'query' has no annotation"),
        (without_docstring, "'without_docstring' has no docstring"),
        (with_unknown_annotation, "name 'Query' is not defined. .*imported at run time"),
        (with_annotation_without_schema, "parameters have no JSON schema.*threading.Thread"),
        (with_tensor, "parameters have no JSON schema.*Tensor.*with a type of JSON"),
        (with_typed_dict, "parameters have no JSON schema.*typing_extensions.TypedDict"),
        (with_words_as_annotation, r"parameters have no JSON schema.*list of ints"),
        (with_underscore, "parameters have no JSON schema.*_query"),
        (with_name_of_pydantic, "a parameter cannot have the name 'model_config'"),
        (with_any_number, "parameter 'queries' cannot be passed by name"),
        (call_through(add), "tool 'call' has no docstring.*needs @functools.wraps"),
        (call_documented(add), "parameter 'args' .*needs @functools.wraps"),
        (len, "parameter 'obj' has no annotation"),
        (lambda query: query, "has no docstring"),
        (functools.partial(add, 1), r"got functools.partial.*; .*pass FunctionTool\(..., name="),
        (SearchTool, "got <class '.*SearchTool'>"),
        (SearchTool(), r"got <.*SearchTool object.*; .*pass FunctionTool\(..., name="),
        (SearchTool.find, "'find': .*the parameter 'self' has no annotation"),
        ("add", "a tool must be a function, a method or a Tool, got 'add'"),
    ],
)
def test_functions_that_cannot_be_tools_are_refused(function: Any, expected: str) -> None:
    with pytest.raises(BadInputError, match=expected):
        ToolAgentLoop([function])


def test_annotated_parameters_have_bounds_and_descriptions() -> None:
    tool = FunctionTool(with_annotated_parameters)
    limit, query, page = tool.schema["function"]["parameters"]["properties"].values()
    assert limit["minimum"] == 1
    assert (query["description"], page["description"]) == ("What to search for.", "Number of the page.")
    assert asyncio.run(tool.call({"limit": 0})).error_type == "bad_arguments"


@pytest.mark.parametrize(
    ("function", "description", "parameters", "expected"),
    [
        (with_result_for_type_checkers, "Search.", ["query"], "x"),
        (SearchTool(), "Search.", ["query"], "x"),
        (SearchTool().find, "Find a document.", ["query"], "x"),
        (AsyncSearchTool(), "An index of documents on another machine.", ["query"], "remote x"),
        (
            functools.partial(search_in, threading.Thread(name="index")),
            "Search an index.",
            ["query", "limit"],
            "index x 1",
        ),
        (
            functools.partial(search_in, index=threading.Thread(name="b"), limit=3),
            "Search an index.",
            ["query"],
            "b x 3",
        ),
    ],
)
def test_functions_that_can_be_tools(function: Any, description: str, parameters: list[str], expected: str) -> None:
    """Only annotations of parameters that the policy sets are needed. Parameters of a partial are hidden."""
    tool = FunctionTool(function, name="tool")
    schema = tool.schema["function"]
    assert (schema["name"], schema["description"]) == ("tool", description)
    assert list(schema["parameters"]["properties"]) == parameters
    assert asyncio.run(tool.call({"query": "x"})).content == expected


@pytest.mark.filterwarnings("error")
def test_parameters_may_have_names_of_pydantic_and_none_as_default() -> None:
    result = asyncio.run(FunctionTool(with_names_of_pydantic).call({"schema": "a", "json": "b", "copy": "c"}))
    assert result.content == "abcd"
    tool = FunctionTool(with_none_as_default)
    assert asyncio.run(tool.call({"limit": None, "page": None, "query": None})).content == "None None None"
    assert asyncio.run(tool.call({"page": 0})).error_type == "bad_arguments"
    limit, page, query = tool.schema["function"]["parameters"]["properties"].values()
    assert limit["anyOf"] == [{"type": "integer"}, {"type": "null"}]
    assert page["description"] == "Number of the page."
    assert query["anyOf"] == [{"type": "string"}, {"type": "null"}]


class Found(pydantic.BaseModel):
    title: str
    day: datetime.date


FOUND = Found(title="a", day=datetime.date(2026, 1, 2))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"length": np.float64(2.5)}, '{"length":2.5}'),
        (FOUND, '{"title":"a","day":"2026-01-02"}'),
        ([FOUND], '[{"title":"a","day":"2026-01-02"}]'),
        ({1: "a", 2: {"b"}}, '{"1":"a","2":["b"]}'),
        (b"a\xff", "a\\xff"),
        ([b"a"], '["a"]'),
        (torch.arange(2), "[0,1]"),
        ([2**80], "[1208925819614629174706176]"),
        ("a\udcff", "a\\udcff"),
        (["a\udcff"], '["a\\udcff"]'),
        (Path("/a"), "/a"),
        (None, "null"),
        ({"price": Decimal("1.50")}, '{"price":"1.50"}'),
        (Decimal("1.50"), "1.50"),
        (np.float32(1.5), "1.5"),
        ({1: "a"}.values(), '["a"]'),
        (range(3), "[0,1,2]"),
        (deque([1]), "[1]"),
        ([types.MappingProxyType({"a": 1})], '[{"a":1}]'),
    ],
)
def test_results_are_json_text(value: Any, expected: str) -> None:
    def measure() -> Any:
        """Measure."""
        return value

    result = asyncio.run(FunctionTool(measure).call({}))
    assert (result.content, result.error_type) == (expected, None)
    result.content.encode()


def test_lone_surrogate_in_an_error_is_escaped() -> None:
    def open_file() -> str:
        """Open a file."""
        raise FileNotFoundError("a\udcff")

    assert asyncio.run(FunctionTool(open_file).call({})).content == "Error: FileNotFoundError: a\\udcff"


def test_tools_need_a_positive_timeout() -> None:
    for timeout_s in (0, -1.0, float("nan"), "5"):
        with pytest.raises(BadInputError, match=r"^timeout_s must be (greater|a finite|a valid) .*, got "):
            FunctionTool(add, timeout_s=timeout_s)  # type: ignore[arg-type]


def use_unknown_name() -> str:
    """A tool with a mistake in its source."""
    return unknown_name  # type: ignore[name-defined, no-any-return] # noqa: F821


def evaluate(expression: str) -> str:
    """Evaluate an expression of the policy."""
    return str(eval(expression))


def test_mistake_in_the_source_of_a_tool_is_raised() -> None:
    """The policy cannot avoid it. A mistake in the policy's own code is a result, and other calls end first."""
    finished = []

    async def finish_later() -> str:
        """Finishes after the failing call."""
        await asyncio.sleep(0.05)
        finished.append(True)
        return "done"

    tools = ToolRegistry([use_unknown_name, evaluate, finish_later])
    with pytest.raises(NameError, match="unknown_name"):
        asyncio.run(tools.call_all([ToolCall("use_unknown_name", {}), ToolCall("finish_later", {})]))
    assert finished == [True]
    result = asyncio.run(tools.call(ToolCall("evaluate", {"expression": "unknown_name + 1"})))
    assert (result.error_type, result.content) == ("raised", "Error: NameError: name 'unknown_name' is not defined")


def test_a_mistake_in_the_class_of_a_tool_is_raised() -> None:
    class UsesUnknownName(Tool):
        async def run(self, arguments: Mapping[str, Any]) -> Any:
            return unknown_name  # type: ignore[name-defined]  # noqa: F821

    parameters: dict[str, Any] = {"type": "object", "properties": {}}
    with pytest.raises(NameError, match="unknown_name"):
        asyncio.run(UsesUnknownName("look", "Look.", parameters, 5.0).call({}))


@pytest.mark.parametrize("error", [NameError("name 'foo' is not defined"), ImportError("os is not allowed")])
def test_an_error_that_a_tool_raises_by_itself_is_an_answer(error: Exception) -> None:
    class Interprets(Tool):
        async def run(self, arguments: Mapping[str, Any]) -> Any:
            raise error

    def interpret() -> str:
        """Interpret."""
        raise error

    for one in (
        Interprets("interpret", "Interpret.", {"type": "object", "properties": {}}, 5.0),
        FunctionTool(interpret),
    ):
        result = asyncio.run(one.call({}))
        assert (result.error_type, result.content) == ("raised", f"Error: {type(error).__name__}: {error}")


def test_a_tool_may_set_its_attributes_by_itself() -> None:
    class Own(Tool):
        def __init__(self) -> None:
            self.name, self.timeout_s = "own", 5.0
            self.schema = {"type": "function", "function": {"name": "own", "parameters": {"type": "object"}}}

        async def run(self, arguments: Mapping[str, Any]) -> Any:
            raise ValueError("no such item")

    result = asyncio.run(ToolRegistry([Own()]).call(ToolCall("own", {})))
    assert (result.error_type, result.content) == ("raised", "Error: ValueError: no such item")


def test_a_synchronous_decorator_around_a_coroutine_function_is_awaited() -> None:
    async def greet(name: str) -> str:
        """Greet."""
        return f"hello {name}"

    @functools.wraps(greet)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return greet(*args, **kwargs)

    result = asyncio.run(ToolRegistry([wrapper]).call(ToolCall("greet", {"name": "you"})))
    assert (result.error_type, result.content) == (None, "hello you")


class UnknownColumnError(NameError):
    """As of libraries for tables: the policy has named a column that does not exist."""


def query(column: str) -> str:
    """Query a column of a table."""
    raise UnknownColumnError(column)


def run_program(path: str) -> str:
    """Run a Python file of the policy."""
    return str(runpy.run_path(path))


def test_mistake_of_the_policy_in_a_file_is_a_result(tmp_path: Path) -> None:
    (tmp_path / "solution.py").write_text("print(unknown_name)")
    tools = ToolRegistry([query, run_program])
    for call in (ToolCall("query", {"column": "age"}), ToolCall("run_program", {"path": f"{tmp_path}/solution.py"})):
        assert asyncio.run(tools.call(call)).error_type == "raised"


def test_the_calls_of_a_long_turn_are_those_of_its_parts() -> None:
    """A long text is parsed in parts. A string of a call may contain the marks of calls and thoughts."""
    good = '<tool_call>\n{"name": "add", "arguments": {"a": "</tool_call><think>"}}\n</tool_call>'
    bad = [*(f"<tool_call>{text}</tool_call>" for text in ("{", "x", "[1]")), f"<think>{good}</think>", "</tool_call>"]
    rng = random.Random(0)
    parts = [rng.choice([good, *bad]) for _ in range(5000)]
    expected = [call for part in parts for call in parse_hermes_tool_calls(part)]
    assert parse_hermes_tool_calls("".join(parts)) == expected
    assert len(expected) > 1000
    assert parse_hermes_tool_calls("".join(parts) + "</think>" + good) == parse_hermes_tool_calls(good)


@settings(max_examples=200)
@given(st.text() | st.text().map(lambda text: f"<tool_call>{text}</tool_call>") | st.just("<tool_call>{}</tool_call>"))
def test_any_text_can_be_parsed_for_tool_calls(text: str) -> None:
    for call in parse_hermes_tool_calls(text):
        result = asyncio.run(ToolRegistry([add]).call(call)) if isinstance(call, ToolCall) else call
        assert isinstance(result.content, str)
