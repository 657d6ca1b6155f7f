"""`Environment`: state, tools, rewards, setup and teardown of one sample in one class."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import itertools
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, overload

from verl_server.agent.episode import Episode
from verl_server.agent.limits import Phase, measure
from verl_server.agent.loops import AgentLoop, ToolAgentLoop, as_agent_loop, plain_attributes
from verl_server.agent.samples import Sample, Task, Turn
from verl_server.agent.tools.tool import ToolCall, options_of
from verl_server.agent.user_code import as_exception, call_user_function, call_within, wait_despite_cancellation
from verl_server.config import Finite, Positive
from verl_server.errors import BadInputError
from verl_server.trajectory.rendering.chat_renderer import ChatRenderer
from verl_server.trajectory.template_check import ARGUMENTS, NAME, sample_call_turn
from verl_server.types import Json
from verl_server.validation import check_fields, is_list

logger = logging.getLogger(__name__)


# -- Rewards ----------------------------------------------------------------------------------------
# Reward functions of users: a function of a runner, and methods of an environment with the decorator `reward`.

RewardFn = Callable[[Sample], float | Awaitable[float]]
"""Computes a reward of a finished sample, a finite number. A function that is not a coroutine function runs in a
thread."""
Function = TypeVar("Function", bound=Callable[..., Any])
OPTIONS_ATTRIBUTE = "__verl_server_reward__"
DEFAULT_TIMEOUT_S = 600.0


@check_fields()
@dataclass(frozen=True)
class RewardOptions:
    """The options of a reward, see `reward`."""

    weight: Finite = 1.0
    timeout_s: Positive = DEFAULT_TIMEOUT_S


@dataclass(frozen=True)
class Reward:
    """A reward function, bound to the environment of its sample."""

    name: str
    function: RewardFn
    options: RewardOptions


@overload
def reward(function: Function) -> Function: ...


@overload
def reward(*, weight: float = 1.0, timeout_s: float = DEFAULT_TIMEOUT_S) -> Callable[[Function], Function]: ...


def reward(
    function: Callable[..., Any] | None = None, *, weight: float = 1.0, timeout_s: float = DEFAULT_TIMEOUT_S
) -> Any:
    """Decorator, with or without options, for a method `(self, sample)` of an `Environment` that computes a reward, and
    for the function `reward=` of a runner.

    The reward of a sample is the sum of the results, each times its `weight`. With the weight 0 the result is a metric.
    All results are in `Sample.rewards`. `timeout_s`: maximum seconds; after that the sample fails. Raises BadInputError
    for an option of a wrong type or value.
    """
    options = RewardOptions(weight, timeout_s)

    def decorate(decorated: Function) -> Function:
        setattr(decorated, OPTIONS_ATTRIBUTE, options)
        return decorated

    return decorate if function is None else decorate(function)


def reward_of(function: object) -> RewardOptions | None:
    """The options of a function with the decorator `reward`. None for any other object."""
    options = getattr(function, OPTIONS_ATTRIBUTE, None)
    return options if isinstance(options, RewardOptions) else None


async def compute_rewards(rewards: Sequence[Reward], sample: Sample) -> dict[str, float]:
    """The result of each reward by its name. Raises the first exception, and BadInputError for a result that is no
    finite number, and DeadlineError. The rewards are computed one after the other.
    """
    return {item.name: await _compute(item, sample) for item in rewards}


def total_reward(options: Mapping[str, RewardOptions], values: Mapping[str, float]) -> float | None:
    """The weighted sum of the results `values` by name. None if all of them are metrics."""
    if not any(item.weight for item in options.values()):
        return None
    return sum(options[name].weight * value for name, value in values.items())


async def _compute(item: Reward, sample: Sample) -> float:
    _require_one_parameter(item)
    call = call_user_function(item.function, sample)
    value = await call_within(call, item.options.timeout_s, f"the reward {item.name!r}")
    with contextlib.suppress(TypeError, ValueError):
        if not isinstance(value, (str, bytes)) and math.isfinite(number := float(value)):
            return number
    raise BadInputError(f"the reward function {item.name!r} must return a finite number, got {value!r:.80}")


def _require_one_parameter(item: Reward) -> None:
    """Raise BadInputError for a reward that cannot be called with a sample alone, as those of other libraries."""
    try:
        parameters = inspect.signature(item.function)
    except (TypeError, ValueError):  # a builtin
        return
    try:
        parameters.bind(None)
    except TypeError as error:
        raise BadInputError(
            f"the reward function {item.name!r} is called with one argument, the sample (sample.text, "
            f"sample.task.data), but it is {item.name}{parameters}: {error}"
        ) from None


# -- Decorators -------------------------------------------------------------------------------------
# The methods of an environment with the decorators `tool` and `reward`.

Options = TypeVar("Options")


def tools_of(environment: object) -> list[Callable[..., Any]]:
    """The tools of an environment: its methods with the decorator `tool`, in the order of their definition."""
    return [getattr(environment, name) for name in _decorated_methods(type(environment), options_of)]  # type: ignore[arg-type]


def rewards_of(owner: object) -> list[Reward]:
    """The rewards of an environment: its methods with the decorator `reward`, in the order of their definition."""
    return [Reward(name, getattr(owner, name), options) for name, options in reward_options_of(type(owner)).items()]


def reward_options_of(kind: type) -> Mapping[str, RewardOptions]:
    """The options of the rewards of a class by their names."""
    return _decorated_methods(kind, reward_of)


@functools.lru_cache(maxsize=64)  # each sample has an environment, and almost all have the same class
def _decorated_methods(kind: type, read_options: Callable[[object], Options | None]) -> Mapping[str, Options]:
    """The options of the methods of a class that have a decorator, also of static methods and class methods.

    A method without the decorator replaces that of a base. Raises BadInputError for a property, which would be lost,
    and for a method in the place of one of `Environment`: a tool with the name `run` would be the agent loop.
    """
    found: dict[str, Options] = {}
    for base in reversed(kind.__mro__):
        for name, value in vars(base).items():
            found.pop(name, None)
            options = read_options(value) or read_options(getattr(value, "__func__", None))
            if read_options(getattr(value, "fget", None) or getattr(value, "func", None)) is not None:  # a property
                raise BadInputError(f"{base.__name__}.{name} has the decorator of a tool or a reward, but is no method")
            if options is not None:
                if hasattr(Environment, name):
                    raise BadInputError(
                        f"{name!r} is a method of every environment; give the tool or reward another name"
                    )
                if options_of(value) is not None and reward_of(value) is not None:
                    raise BadInputError(f"{base.__name__}.{name} is a tool and a reward: the policy could call it")
                found[name] = options
    return found


# -- Template calls ---------------------------------------------------------------------------------
# Whether `ToolAgentLoop` finds the tool calls that a model writes, according to the chat template of the model.

CURE = (
    "Pass the renderer of the model family, get_renderer(tokenizer, family=...), or define parse_tool_calls in a "
    "subclass of ToolAgentLoop"
)
"""What to do if the calls are not found."""


def find_unread_call(renderer: ChatRenderer) -> str | None:
    """Why the calls that the chat template writes are not found, in one sentence. Empty if they are found.

    The turn is read as `ToolAgentLoop` reads the turns of a policy. None if the template does not show how a call is
    written.
    """
    if (sampled := sample_call_turn(renderer)) is None:
        return None
    turn_ids, tools = sampled
    parsed, decoded = renderer.parse_turn(turn_ids, (), tools), renderer.decode(turn_ids)
    text = renderer.decode_raw(turn_ids, decoded)
    calls = ToolAgentLoop().parse_tool_calls(
        Turn(decoded, turn_ids, 0, "stop", None if parsed is None else parsed.tool_calls, text)
    )
    if calls == [ToolCall(NAME, ARGUMENTS)]:
        return ""
    if not calls:
        return f"the chat template writes the call of a tool as {text!r}, in which ToolAgentLoop finds no call"
    (call, *_) = calls
    found = f"{call.name}({call.arguments})" if isinstance(call, ToolCall) else f"{call.content!r}"
    return f"the chat template writes the call of a tool as {text!r}, which ToolAgentLoop reads as {found}"


# -- Environment ------------------------------------------------------------------------------------

RETRY_DELAY_S = 1.0
"""Seconds before the next attempt at a setup or a sample. The delay doubles with each failure."""


class Environment(AgentLoop):
    """State, tools, rewards, setup and teardown of one sample.

    The runner makes an instance for each attempt at a sample. A subclass has methods with the decorators `tool` and
    `reward`. `run` says how the agent acts: by default it calls tools until a turn has no call. A subclass with a
    constructor of its own calls `super().__init__(task)`; what takes time, for example the start of a container,
    belongs in `setup`.
    """

    setup_timeout_s: ClassVar[float] = 300.0
    """Maximum seconds of one call of `setup`."""
    setup_attempts: ClassVar[int] = 3
    """Maximum number of attempts at the setup, each with a new instance. The sample fails if all of them fail."""
    teardown_timeout_s: ClassVar[float] = 60.0
    """Maximum seconds of `teardown`."""

    def __init__(self, task: Task) -> None:
        super().__init__(tools_of(self))
        self.task = task

    async def setup(self) -> None:
        """Prepare the environment, for example start a container. Called before the first turn of the sample."""

    async def teardown(self) -> None:
        """Release what `setup` made. Always called, also after a `setup` that failed half-way or was cancelled.

        If `teardown` is cancelled because the event loop ends, it is called a second time.
        """

    async def run(self, episode: Episode) -> None:
        """Act until the task is done. By default as `ToolAgentLoop`, with the tools of this environment."""
        await ToolAgentLoop().run(episode)


@dataclass(frozen=True)
class Agent:
    """What a runner runs: an environment class, of which each sample has an instance, or one agent loop for all."""

    environment: type[Environment] | None
    loop: AgentLoop

    @property
    def reward_options(self) -> Mapping[str, RewardOptions]:
        """The options of the rewards of the environment by their names."""
        return {} if self.environment is None else reward_options_of(self.environment)

    @property
    def identity(self) -> Json:
        """The settings of the agent, for the check of a `run_dir`. For an environment: its class attributes."""
        kind = self.environment
        if kind is None or kind.identity is not AgentLoop.identity:
            return dict(self.loop.identity)
        names = {name for base in kind.__mro__ if base not in Environment.__mro__ for name in vars(base)}
        values = {name: inspect.getattr_static(kind, name) for name in sorted(names)}
        return plain_attributes({name: value for name, value in values.items() if name not in vars(Environment)})

    def check_renderer(self, renderer: ChatRenderer) -> None:
        """Render a conversation with the tools. Raises BadInputError if the template refuses them or drops results.

        Logs a warning if the template ignores the tools: the messages of the tasks have to describe them then. Logs a
        warning if the agent loop does not find the calls that the template writes.
        """
        tools = self.loop.tools
        if not tools.names:
            return
        names: list[Json] = [{"role": "user", "content": f"The tools are called {', '.join(tools.names)}."}]
        try:
            prompt = renderer.render_prompt(names)
        except BadInputError:  # the template wants other messages, which the tasks may have
            return
        if renderer.render_prompt(names, tools.schemas) == prompt:
            logger.warning(
                "the chat template ignores the tools %s, so the prompt does not describe them. Describe the tools in "
                "the messages, or set tokenizer.chat_template to a template that renders `tools`",
                tools.names,
            )
        if type(self.loop).run in (ToolAgentLoop.run, Environment.run):  # other agents may use results otherwise
            renderer.render_next_turn(
                [{"role": "tool", "name": tools.names[0], "content": "result"}], [], tools=tools.schemas
            )
        if _uses_default_parser(self.loop) and (problem := find_unread_call(renderer)):
            logger.warning("%s, so no call of the tools %s is executed. %s", problem, tools.names, CURE)

    @contextlib.asynccontextmanager
    async def loop_for(self, task: Task) -> AsyncIterator[AgentLoop]:
        """The agent loop for a sample. An environment is set up before the body and torn down after it in any case.

        Each attempt at the setup has an instance of its own. Raises the exception of the last attempt.
        """
        if self.environment is None:
            yield self.loop
            return
        with measure(Phase.SETUP):
            environment = await _set_up(self.environment, task)
        try:
            yield environment
        finally:
            with measure(Phase.SETUP):
                await _tear_down(environment)


def as_agent(agent: object) -> Agent:
    """The agent of an `Environment` class, an agent loop, the name of an agent loop, or a list of tools.

    Raises BadInputError for anything else.
    """
    if isinstance(agent, Environment):  # all samples would share its state
        name = type(agent).__name__
        raise BadInputError(f"each sample has an environment of its own, so pass the class {name}, not {name}(...)")
    if not (isinstance(agent, type) and issubclass(agent, Environment)):
        return Agent(None, ToolAgentLoop(agent) if is_list(agent) else as_agent_loop(agent))
    example = agent.__new__(agent)  # for the schemas of the tools: no code of the user runs
    AgentLoop.__init__(example, tools_of(example))
    return Agent(agent, example)


def _uses_default_parser(loop: AgentLoop) -> bool:
    """Whether an agent loop reads the calls of a turn with `ToolAgentLoop.parse_tool_calls`."""
    if isinstance(loop, ToolAgentLoop):
        return type(loop).parse_tool_calls is ToolAgentLoop.parse_tool_calls
    return type(loop).run is Environment.run


async def _set_up(kind: type[Environment], task: Task) -> Environment:
    for attempt in itertools.count(1):
        environment = _make(kind, task)
        try:
            await call_within(environment.setup(), kind.setup_timeout_s, f"{kind.__name__}.setup")
        except BaseException as error:
            await _tear_down(environment)
            if not isinstance(error, Exception) or attempt >= kind.setup_attempts:
                raise
            logger.warning("the setup of %s failed and is tried again: %r", kind.__name__, error)
        else:
            return environment
        await asyncio.sleep(RETRY_DELAY_S * 2 ** (attempt - 1))
    raise AssertionError


def _make(kind: type[Environment], task: Task) -> Environment:
    try:
        return kind(task)
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit would end the event loop
        raise as_exception(error) from error


async def _tear_down(environment: Environment) -> None:
    """Call `teardown`, also while this task is being cancelled. A failure is logged: the sample is finished.

    At the end of the event loop all tasks are cancelled, also that of the teardown. It is then called a second time.
    """
    name = f"{type(environment).__name__}.teardown"
    cancelled: asyncio.CancelledError | None = None
    for _ in range(2):
        call = asyncio.ensure_future(call_within(environment.teardown(), type(environment).teardown_timeout_s, name))
        cancelled = await wait_despite_cancellation(call) or cancelled
        if not call.cancelled():
            break
    failure = "it was cancelled twice" if call.cancelled() else call.exception()
    if failure is not None:
        logger.warning("%s failed, so it may have left something behind: %s", name, failure)
    if cancelled is not None:
        raise cancelled
