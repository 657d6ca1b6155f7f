"""What all weight updates have: their options, their outcome, and the servers that they are sent to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from verl_server.config import PauseMode
from verl_server.errors import BadInputError, TornWeightsError, UnsupportedError, VerlServerError, from_wire, to_wire
from verl_server.types import Json, ServerInfo, WeightUpdateResult
from verl_server.validation import require_bool

if TYPE_CHECKING:
    from verl_server.adapter import HttpServerEngineAdapter


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


def torn_error(error: BaseException, validated: ValidatedUpdate) -> TornWeightsError:
    """The error for an update that failed after a server began to load. Keeps the details of `error`."""
    if isinstance(error, TornWeightsError):
        return error
    if not isinstance(error, VerlServerError):  # for example KeyboardInterrupt, or an OSError of the transport
        error = VerlServerError(f"{type(error).__name__}: {error}")
    return TornWeightsError(
        f"the update to weight version {validated.weight_version} failed half-way: {error.message}. "
        "Generation stays paused until an update of all tensors succeeds.",
        cause=type(error).__name__,
        **error.details,
    )


# -- Outcome ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UpdateOutcome:
    """What rank 0 tells all ranks about an update that the servers have begun to load.

    An outcome without `result` and without `torn` is not the last one: the ranks still have to confirm the update.
    """

    weight_version: int
    """Version of the new weights."""
    result: WeightUpdateResult | None = None
    """The result of a published update. Each rank measures its own `gather_s`."""
    resume_error: VerlServerError | None = None
    """Why generation does not continue, although the servers hold the new weights. None if it continues."""
    torn: TornWeightsError | None = None
    """Why the servers hold a part of the update. None if they hold all of it."""
    update_id: str = ""
    """Id of the attempt that has succeeded, for ranks that read reports of their own."""
    verify: bool = False
    """Whether these ranks compare checksums."""

    def to_message(self) -> Json:
        """The outcome as JSON."""
        return {
            **vars(self),
            "result": None if self.result is None else asdict(self.result),
            "resume_error": None if self.resume_error is None else to_wire(self.resume_error),
            "torn": None if self.torn is None else to_wire(self.torn),
        }

    @classmethod
    def from_message(cls, message: Json) -> Self:
        """The outcome that `to_message` described."""
        result, resume_error, torn = message["result"], message["resume_error"], message["torn"]
        made = {
            "result": result and WeightUpdateResult(**result),
            "resume_error": resume_error and from_wire(resume_error),
            "torn": torn and from_wire(torn),
        }
        return cls(**{**message, **made})

    def result_of_rank(self, gather_s: float) -> WeightUpdateResult:
        """The result of a published update on a rank that needed `gather_s`. Raises `resume_error`."""
        if self.resume_error is not None:
            raise self.resume_error
        assert self.result is not None
        return replace(self.result, gather_s=gather_s)


# -- Servers ----------------------------------------------------------------------------------------


class Servers(ABC):
    """One or more inference servers, or an engine in this process, that behave as one. Used by trainer rank 0.

    This is what a weight update, an engine and a fleet need of them. Servers that only take weights, for example one
    that was started again, have the abstract methods alone. A weight update calls them in this order: `pause`,
    `begin_weight_update`, `load`, `end_weight_update`, `published`, `resume`. Every method raises a `VerlServerError`
    when a server fails. ServerDiedError and ShutDownError mean that no server is left.
    """

    # -- weight updates -----------------------------------------------------------------------------

    @property
    @abstractmethod
    def members(self) -> Sequence[ServerInfo]:
        """The servers that take part in the next attempt at an update.

        Empty if there is none now, but servers that start later get the weights by `replay`. Otherwise raises
        ServerDiedError if there is none.
        """

    @property
    def undefined_weights(self) -> str | None:
        """Why the members' weights are undefined, or None. Not None from a resume of released weights, or the notice
        that a server was started again, until an update of all tensors is published. None while the weights are
        released: then no update is possible.
        """
        return None

    def check_weights(self) -> int:
        """Ask the members, before an update, whether they still hold the weights that they were given last.

        Returns a weight version that the next one must exceed; 0 where no other client reaches the weights.
        `undefined_weights` is not None afterwards if a member was started again. Raises ServerError, once, if another
        client has changed the weights.
        """
        return 0

    def find_lost(self) -> Collection[str]:
        """Names of the members of the attempt whose processes have ended, or are being ended. Sends no request."""
        return ()

    @abstractmethod
    def pause(self, mode: PauseMode) -> None:
        """Pause generation on every member. `mode` says what happens to running requests."""

    @abstractmethod
    def resume(self) -> None:
        """Continue generation on every member."""

    @abstractmethod
    def begin_weight_update(self) -> None:
        """Open a weight update session on every member."""

    @abstractmethod
    def load(self, messages: Sequence[Json], weight_version: int | None, flush_cache: bool) -> None:
        """Make every TP rank of every member call the weight loader (`verl_server.weights.loader.load`).

        `messages` holds the loader's JSON message for each member, in the order of `members`. The method returns when
        all loaders have returned. Requests that start afterwards carry `weight_version`; None: the messages change no
        weights. `flush_cache` removes the prefix cache, which was computed with the old weights.
        """

    @abstractmethod
    def end_weight_update(self) -> None:
        """Close the weight update session on every member."""

    @property
    def can_leave_out(self) -> bool:
        """Whether `leave_out` can leave members out."""
        return False

    def leave_out(self, failed: Collection[str], error: VerlServerError) -> bool:
        """Called when an attempt failed because of the members named `failed`, with the `error` of the attempt.

        Returns whether a member that fails repeatedly is left out of the next attempt, so that another attempt can
        succeed.
        """
        return False

    @abstractmethod
    def published(self, version: int, whole: bool, replay: ReplayFn | None) -> None:
        """Record that all members have loaded and verified weight version `version`. Generation is still paused.

        `whole`: the update contained every parameter in which a member that was started again may differ from the other
        members, so that its earlier weights do not matter. `replay`: loads all published parameters into other servers
        later, for example into a server that was started again. None if the trainer does not keep them.
        """

    # -- use by an engine ---------------------------------------------------------------------------

    def attach(self) -> None:
        """Begin to use servers that belong to a fleet. Raises BadInputError when another `VerlEngine` uses them."""
        return

    @property
    def adapter(self) -> HttpServerEngineAdapter | None:
        """The adapter of one server. None for an engine in this process, and for servers of another process."""
        return None

    @property
    def weight_version(self) -> int:
        """Version of the weights that the servers have when the trainer starts to use them."""
        return 0

    def parameter_dtypes(self) -> Sequence[Json | None]:
        """The report of each server on the dtypes of its parameters. None for one that does not tell."""
        return [None for _ in self.members]

    def nearest_transport(self) -> str:
        """Name of the cheapest weight transport that reaches all servers, for as long as they are used."""
        return "shared_memory"

    @property
    def trainer_host(self) -> str:
        """Address of this machine as the servers reach it."""
        return "127.0.0.1"

    def fail(self, error: VerlServerError) -> None:
        """Make calls of this trainer that are in flight, and all later calls, raise `error`."""
        return

    def shutdown(self) -> None:
        """End the use of the servers. Ends servers that were started for it; other servers keep running."""
        return

    # -- generation, LoRA adapters and memory -------------------------------------------------------

    def generate(self, **request: Any) -> Any:
        """Generate for one prompt or many. `request` holds the arguments of `HttpServerEngineAdapter.generate`."""
        raise _takes_weights_only()

    async def async_generate(self, **request: Any) -> Any:
        raise _takes_weights_only()

    def generate_stream(self, **request: Any) -> Iterator[Json]:
        raise _takes_weights_only()

    def async_generate_stream(self, **request: Any) -> AsyncIterator[Json]:
        raise _takes_weights_only()

    def flush_cache(self) -> None:
        raise _takes_weights_only()

    def load_lora_adapter(self, name: str, tensors: Mapping[str, Any], config: Json) -> None:
        raise _takes_weights_only()

    def unload_lora_adapter(self, name: str) -> None:
        raise _takes_weights_only()

    def list_lora_adapters(self) -> frozenset[str]:
        """Names of the LoRA adapters that all servers have, whoever loaded them."""
        raise _takes_weights_only()

    def release_memory_occupation(self, tags: Sequence[str] | None) -> None:
        raise _takes_weights_only()

    def resume_memory_occupation(self, tags: Sequence[str] | None) -> None:
        raise _takes_weights_only()

    @property
    def released_memory(self) -> frozenset[str]:
        """Memory tags (`MemoryTag`) that are released."""
        return frozenset()


def _takes_weights_only() -> UnsupportedError:
    return UnsupportedError("these servers take weights, and nothing else, from this process")


ReplayFn = Callable[[Servers], None]
"""Loads the weights that were published last into servers that missed the update. Raises VerlServerError."""
