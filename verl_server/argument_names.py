"""Errors for calls with other arguments than those of a function: misspelled names, and names of other libraries.

`verl_server/type_checks.py` checks the values of arguments. Imports the standard library only.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from verl_server.errors import BadInputError
from verl_server.validation import did_you_mean

P = ParamSpec("P")
R = TypeVar("R")
Class = TypeVar("Class", bound=type)

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
    "tool": {"timeout": _SECONDS},
    "reward": {"timeout": _SECONDS},
}
"""What to write for an argument of verl, TRL or verifiers, by our class or function. `docs/migration.md` has tables."""
_ENVIRONMENT = "a runner makes the environments, so pass it the class CLASS, not CLASS(...)"
_MISSING = {
    "Environment": f"{_ENVIRONMENT}. In a constructor of your own, write `super().__init__(task)`",
    "RolloutRunner": "write RolloutRunner(agent, engine, ...)",
    "RolloutRunner.steps": "write runner.steps(tasks, num_groups)",
    "Task": 'write Task("sum-0", [{"role": "user", "content": "What is 19 + 23?"}], {"answer": 42})',
}
"""What to write in a call without a needed argument, by class or function. CLASS stands for the called class."""


def explain_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: a call with an unknown argument, or without a needed one, raises BadInputError that says the cure.

    Python's TypeError names what is wrong, but not what is right.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except TypeError:
            if (error := find_argument_error(function, args, kwargs)) is not None:
                raise error from None
            raise  # from the body of the function

    return call


def explain_constructor(cls: Class) -> Class:
    """Class decorator, for a dataclass: `explain_arguments` for its constructor."""
    cls.__init__ = explain_arguments(cls.__init__)  # type: ignore[misc]
    return cls


def find_argument_error(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> BadInputError | None:
    """The error of a call whose arguments are not those of the function. None if they are."""
    signature = inspect.signature(function)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        reason = str(error)
    else:
        return None
    owner = function.__qualname__.removesuffix(".__init__")
    shown = type(args[0]).__name__ if args and owner != function.__qualname__ else owner
    named = [item.name for item in signature.parameters.values() if item.kind is not item.VAR_KEYWORD]
    known = [name for name in named if name != "self"]
    accepts_any = len(named) < len(signature.parameters)
    unknown = [name for name in kwargs if name not in known]
    if accepts_any or not unknown:
        cure = _MISSING.get(owner, f"its arguments are {', '.join(known)}").replace("CLASS", shown)
        return BadInputError(f"{shown}: {reason}; {cure}", function=shown)
    name = unknown[0]
    cure = NAMES_OF_OTHER_LIBRARIES.get(owner, {}).get(name, "")
    hint = f"; {cure}" if cure else did_you_mean(name, known) or f"; its arguments are {', '.join(known)}"
    return BadInputError(f"{shown} has no argument {name!r}{hint}", argument=name)
