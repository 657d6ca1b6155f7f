"""The request for one weight update: its options, their validation, and how its outcome is passed to all ranks."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from verl_server.config import PauseMode
from verl_server.errors import BadInputError, TornWeightsError, VerlServerError, from_wire, to_wire
from verl_server.types import Json, WeightUpdateResult
from verl_server.validation import require_bool


@dataclass(frozen=True)
class UpdateOptions:
    """The options of an update as the caller gave them (see `VerlEngine.update_weights_from_tensor`)."""

    weight_version: int | None
    """Version of the new weights. None: the current version plus 1."""
    verify: bool
    """Whether checksums and unwritten parameters are checked."""
    check_finite: bool
    """Whether tensors with NaN or infinity are refused."""
    pause_mode: PauseMode | str
    """What happens to running requests."""
    flush_cache: bool
    """Whether the servers' prefix caches are removed."""


@dataclass(frozen=True)
class ValidatedUpdate:
    """The options of an update after validation, as all ranks use them."""

    weight_version: int
    """Version of the new weights. Greater than the version before."""
    verify: bool
    pause_mode: PauseMode
    flush_cache: bool


def validate_options(options: UpdateOptions, current_version: int) -> ValidatedUpdate:
    """Validate the options of an update. Raises BadInputError.

    `current_version`: the version that the servers last held whole. A weight version must be an int above it: SGLang
    labels tokens with the version, and a version that was used before would name two sets of weights. The version of a
    torn update can be used again, because the servers do not generate with torn weights.
    """
    version = current_version + 1 if options.weight_version is None else options.weight_version
    if not isinstance(version, int) or isinstance(version, bool):
        raise BadInputError(
            f"weight_version must be an int, got {version!r} of type {type(version).__name__}: pass a whole number, "
            "for example the number of the training step"
        )
    if version <= current_version:
        raise BadInputError(f"weight_version must be above the current version {current_version}, got {version}")
    verify, flush_cache = require_bool("verify", options.verify), require_bool("flush_cache", options.flush_cache)
    require_bool("check_finite", options.check_finite)
    if options.pause_mode not in list(PauseMode):
        raise BadInputError(
            f"pause_mode {options.pause_mode!r} does not exist; the modes are {[mode.value for mode in PauseMode]}"
        )
    if options.pause_mode == PauseMode.IN_PLACE and flush_cache:
        raise BadInputError("pause_mode 'in_place' keeps the KV cache of running requests: pass flush_cache=False")
    return ValidatedUpdate(version, verify, PauseMode(options.pause_mode), flush_cache)


def torn_error(error: VerlServerError, validated: ValidatedUpdate) -> TornWeightsError:
    """The error for an update that failed after a server began to load. Keeps the details of `error`."""
    if isinstance(error, TornWeightsError):
        return error
    return TornWeightsError(
        f"the update to weight version {validated.weight_version} failed half-way: {error.message}. "
        "Generation stays paused until an update of all tensors succeeds.",
        cause=type(error).__name__,
        **error.details,
    )


def torn_to_message(error: TornWeightsError) -> Json:
    """The error as rank 0 sends it to all ranks: the arguments of `TornWeightsError`."""
    return {"message": error.message, **error.details}


def outcome_message(
    validated: ValidatedUpdate,
    torn: TornWeightsError | None = None,
    resume_error: VerlServerError | None = None,
    **fields: Any,
) -> Json:
    """What rank 0 tells all ranks after an update: the version of the update, and whether the weights are torn.

    `resume_error`: why generation does not continue, although the servers hold the new weights.
    """
    torn_message = None if torn is None else torn_to_message(torn)
    resume_message = None if resume_error is None else to_wire(resume_error)
    return {"weight_version": validated.weight_version, "torn": torn_message, "resume_error": resume_message, **fields}


def raise_resume_error(outcome: Json) -> None:
    """Raise the error because of which generation does not continue, if there is one in rank 0's message."""
    if outcome["resume_error"] is not None:
        error = from_wire(outcome["resume_error"])
        error.message = (
            f"weight version {outcome['weight_version']} is loaded and verified, but generation does not continue: "
            f"{error.message}"
        )
        raise error


def result_message(**fields: Any) -> Json:
    """A `WeightUpdateResult` as JSON, without `gather_s`, which each rank measures for itself."""
    return asdict(WeightUpdateResult(gather_s=math.nan, **fields))
