"""Errors for arguments that other libraries have: what to write for the names of verl, TRL and verifiers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

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
}
"""What to write for an argument of verl, TRL or verifiers, by our class or function. `docs/migration.md` has tables."""


def explain_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: a call with an unknown argument raises BadInputError with the argument that was meant."""
    owner, known = function.__qualname__.removesuffix(".__init__"), inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs.keys() - known.keys():
            cure = NAMES_OF_OTHER_LIBRARIES[owner].get(name)
            raise BadInputError(
                f"{owner} has no argument {name!r}{f'; {cure}' if cure else did_you_mean(name, known)}", argument=name
            )
        return function(*args, **kwargs)

    return call


def explain_constructor(cls: Class) -> Class:
    """Class decorator, for a dataclass: `explain_arguments` for its constructor."""
    cls.__init__ = explain_arguments(cls.__init__)  # type: ignore[misc]
    return cls
