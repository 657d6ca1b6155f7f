"""Cases of updates that cannot be loaded: the mistake is in the middle of the tensors."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch

from verl_server.conformance.case import Case, Trial
from verl_server.conformance.messages import CheckFailedError
from verl_server.conformance.other_processes import is_running
from verl_server.conformance.reference import describe_gap
from verl_server.conformance.served import ServedWeights
from verl_server.conformance.systems.base import NotOfferedError

END_S = 10.0
"""Maximum number of seconds to wait for the end of a server that does not take a whole update any more."""
POLL_S = 0.1
NamedTensors = dict[str, torch.Tensor]


def with_unknown_name(tensors: NamedTensors) -> NamedTensors:
    """The tensors, one of them under a name that no model has."""
    name = _middle(tensors)
    return {key if key != name else "model.layers.0.no_such_tensor.weight": value for key, value in tensors.items()}


def with_wrong_shape(tensors: NamedTensors) -> NamedTensors:
    """The tensors, one of them with a missing row."""
    name = _middle(tensors)
    return {**tensors, name: tensors[name][:-1].clone()}


def with_nan(tensors: NamedTensors) -> NamedTensors:
    """The tensors, one of them with one NaN."""
    name = _middle(tensors)
    changed = tensors[name].clone()
    changed.view(-1)[-1] = torch.nan
    return {**tensors, name: changed}


def _middle(tensors: NamedTensors) -> str:
    return list(tensors)[len(tensors) // 2]


def bad_update(spoil: Callable[[NamedTensors], NamedTensors], check_finite: bool, trial: Trial) -> str:
    """Push spoiled weights over whole weights, look at what is served, and repair it with whole weights."""
    old, repaired = trial.reference.weights(81), trial.reference.weights(83)
    trial.system.update(old)
    trial.reference.require(trial.system, old, "before the bad update")
    pids = trial.system.server_pids()
    try:
        trial.system.update(spoil(trial.reference.weights(82)), check_finite=check_finite)
    except NotOfferedError:
        raise
    except Exception as error:  # noqa: BLE001 - boundary to the system under test: any error is a refusal
        refusal = type(error).__name__
    else:
        raise CheckFailedError("the update returned without an error")
    request = ServedWeights(trial)
    served = request.describe({"the old weights": old})
    try:
        trial.system.update(repaired)
    except Exception as error:
        ended = _count_ended(pids)
        raise CheckFailedError(
            f"{refusal}; served afterwards: {served}; {ended} of {len(pids)} processes of the server have ended, and a "
            f"whole update raises {type(error).__name__}"
        ) from error
    request.require_answer()
    gap = trial.reference.require(trial.system, repaired, "after a whole update")
    return f"{refusal}; served afterwards: {served}; after a whole update {describe_gap(gap)}"


def _count_ended(pids: list[int]) -> int:
    """Number of processes of a server that have ended. A server that dies of a request needs seconds for that."""
    deadline = time.monotonic() + END_S
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return sum(not is_running(pid) for pid in pids)


_CLAIM = (
    "An update {} is refused with an error; the old weights or none are served, and a whole update repairs the server."
)

CASES = (
    Case(
        "unknown-name",
        _CLAIM.format("with an unknown name"),
        ("https://github.com/vllm-project/vllm/pull/57854",),
        functools.partial(bad_update, with_unknown_name, False),
    ),
    Case(
        "wrong-shape",
        _CLAIM.format("with a wrong shape"),
        ("https://github.com/sgl-project/sglang/issues/17107",),
        functools.partial(bad_update, with_wrong_shape, False),
    ),
    Case(
        "nan",
        _CLAIM.format("with NaN"),
        ("https://github.com/NVIDIA-NeMo/RL/issues/2180",),
        functools.partial(bad_update, with_nan, True),
    ),
)
