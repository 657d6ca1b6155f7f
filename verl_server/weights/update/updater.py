"""The part of weight updates that is the same for all transports, on one trainer rank."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.distributed.tensor import DTensor

from verl_server.errors import (
    BadInputError,
    PeerError,
    ServerDiedError,
    ShutDownError,
    TornWeightsError,
    VerlServerError,
)
from verl_server.ranks.placement import Placement
from verl_server.ranks.shared_meshes import SharedMeshes
from verl_server.types import Json, TensorSpec, WeightUpdateResult
from verl_server.weights.arena import tensor_bytes
from verl_server.weights.manifest import Manifest, check_lora_adapter, missing_fused_parts
from verl_server.weights.update.options import (
    ReplayFn,
    Servers,
    UpdateOptions,
    UpdateOutcome,
    ValidatedUpdate,
    torn_error,
    validate_options,
)
from verl_server.weights.update.source import (
    NamedTensors,
    ShardWriter,
    contribution_of,
    meshes_of,
    read_dense_tensors,
    require_same_names,
    require_same_shards,
)

if TYPE_CHECKING:
    from verl_server.ranks.coordinator import RankCoordinator

R = TypeVar("R")

logger = logging.getLogger(__name__)


def _known_meshes(named_tensors: NamedTensors) -> Collection[frozenset[int]] | None:
    """The device meshes of the DTensors of a collection. None for a collection without tensors, and for a generator.

    A progress bar around a generator also has a length, but can be read only once.
    """
    with suppress(Exception):  # the update itself refuses what is wrong
        if isinstance(named_tensors, (Mapping, list, tuple)) and named_tensors:
            return meshes_of(named_tensors)
    return None


# -- Steps ------------------------------------------------------------------------------------------
# Steps on the servers that staged and streamed updates have.


@contextmanager
def open_session(servers: Servers) -> Iterator[None]:
    """A weight update session on every server during the body, or on none if a server refuses it."""
    try:
        servers.begin_weight_update()
        yield
    except BaseException:
        with suppress(VerlServerError):
            servers.end_weight_update()
        raise
    servers.end_weight_update()  # a session that an interrupt leaves open here is closed by the next `begin`


def leave_out_failed(servers: Servers, error: VerlServerError) -> bool:
    """Tell the servers which of them caused the `error` of an attempt. Returns whether some are left out from now on.

    `details["servers"]` of the error has their names as members of the update.
    """
    failed = error.details.get("servers", ())
    return bool(failed) and servers.leave_out(failed, error)


def resume_twice(servers: Servers, when: str) -> VerlServerError | None:
    """Continue generation. Returns the error if that fails twice."""
    try:
        servers.resume()
    except VerlServerError as first:
        logger.warning("generation does not continue %s: %s", when, first)
        try:
            servers.resume()
        except VerlServerError as second:
            return second
    return None


def resume_unchanged(servers: Servers) -> None:
    """Continue generation after an update that has loaded nothing. Errors are logged: that of the update is raised."""
    if error := resume_twice(servers, "after an update that has loaded nothing"):
        logger.error("generation does not continue: %s", error)


# -- Updater ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EngineRanks:
    """The trainer ranks of one engine, as one of them sees them."""

    coordinator: RankCoordinator
    placement: Placement
    """Placement of this rank."""
    global_ranks: frozenset[int]
    """Global ranks of all of the engine's trainer ranks in the trainer's default process group."""
    servers: Servers | None
    """The servers that are updated. None on trainer ranks that have no connection to a server."""
    timeout_s: float
    """Deadline of one step of an update in seconds."""


class WeightUpdater(ABC):
    """One trainer rank's part in weight updates. Created on all ranks; every method is called on all ranks.

    `weight_version`: version that the servers hold at the start.
    """

    def __init__(self, ranks: EngineRanks, manifest: Manifest, weight_version: int) -> None:
        self.ranks, self.coordinator, self.manifest = ranks, ranks.coordinator, manifest
        self.weight_version = weight_version
        """Version of the weights that the servers last held whole. A torn update does not change it."""
        self.torn: TornWeightsError | None = None
        """Why an update left the served weights partly new and partly old, or None. See also `find_torn`."""
        self._in_doubt: frozenset[str] = frozenset()
        """On rank 0: tensors of the last update, and of failed ones before it: servers may differ in them."""
        self._needed: frozenset[str] = frozenset()
        """On rank 0: tensors without which the update in progress would leave no server with the right weights."""
        self._changed: frozenset[str] = frozenset()
        """On rank 0: tensors that this engine has published. A server that loads its checkpoint again lacks them."""
        self.starts_from_checkpoint = False
        """Whether the servers had the weights of their checkpoint before the first update. Set by the engine."""
        self._is_updating = False
        self.shared = SharedMeshes()
        """The device meshes that the current update shares with ranks of other engines."""
        self._reading_error: BaseException | None = None
        """The exception of the caller's iterator in the current update, on the rank that has read it."""
        self.released_memory: frozenset[str] = frozenset()
        """Parts of the servers' memory that are released. Set by the engine."""

    def update(
        self, named_tensors: NamedTensors, load_format: str | None, options: UpdateOptions
    ) -> WeightUpdateResult:
        """Update the servers' weights. See `VerlEngine.update_weights_from_tensor` for the arguments and errors."""
        refusal: VerlServerError | None = None
        if load_format not in (None, "auto"):
            refusal = BadInputError(
                f"load_format {load_format!r} is not supported: tensors are pushed by name. Leave load_format out"
            )
        elif "weights" in self.released_memory:
            refusal = BadInputError(
                "the memory of the server's weights is released: call resume_memory_occupation(['weights']) first"
            )
        with self.exclusive(named_tensors, options.weight_version):
            return self._update(named_tensors, options, refusal)

    @contextmanager
    def exclusive(self, named_tensors: NamedTensors, weight_version: Any = None) -> Iterator[None]:
        """One update at a time, with `named_tensors`.

        The rank whose iterator has failed raises an error with that exception as its cause, or the exception itself if
        this is no `Exception`, for example KeyboardInterrupt.
        """
        if self._is_updating:
            raise BadInputError(
                "this engine is in another weight update: the generator of an update cannot start an update, and two "
                "threads cannot update at the same time"
            )
        self._is_updating = True
        try:
            self.shared = SharedMeshes(
                self.ranks.global_ranks,
                weight_version,
                self.coordinator.raise_failure,
                self.coordinator.arrival_timeout_s,
                lambda: _known_meshes(named_tensors),
            )
            with self.shared:
                yield
        except VerlServerError as failure:
            if (own := self._reading_error) is None:
                raise
            if not isinstance(own, Exception):
                raise own from failure
            raise failure from own
        finally:
            self._is_updating, self._reading_error = False, None

    @abstractmethod
    def _update(
        self, named_tensors: NamedTensors, options: UpdateOptions, refusal: VerlServerError | None
    ) -> WeightUpdateResult:
        """The update itself. With a `refusal` all ranks raise that error."""

    @abstractmethod
    def staging_tensors(self) -> dict[str, torch.Tensor]:
        """All tensors of the model in staging memory, by name. Raises UnsupportedError if the memory is smaller."""

    @abstractmethod
    def close(self) -> None:
        """Release the staging memory and the transport."""

    def gather_on_cpu(
        self, call_id: str, named_tensors: NamedTensors
    ) -> tuple[dict[str, torch.Tensor], VerlServerError | None]:
        """All tensors, complete and on the CPU, and the error if that fails. For small tensors such as LoRA adapters.

        `call_id`: the call at which the ranks arrive afterwards. Raises on all ranks, before anything is gathered, the
        error of a rank that cannot read its tensors, and BadInputError if the ranks have different DTensors.
        """
        read, error = self.run_reading(lambda: read_dense_tensors(named_tensors))
        tensors = read or {}
        names = [name for name, tensor in tensors.items() if isinstance(tensor, DTensor)]
        self.coordinator.agree(
            self.coordinator.next_call_id("load_lora_adapter"),
            require_same_shards,
            contribution=contribution_of(names, bool(names)),
            error=error,
            action_timeout_s=self.ranks.timeout_s,
        )
        writer = ShardWriter(
            lambda _: None,
            self.manifest,
            frozenset(),
            self.coordinator,
            call_id,
            gather_timeout_s=self.ranks.timeout_s,
            check_finite=False,
            writes_whole_tensors=False,
            shared=self.shared,
        )
        whole, error = self.run_writing(writer, lambda: writer.gather_on_cpu(tensors))
        return whole or {}, error

    def prepare_lora_adapter(
        self, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]
    ) -> tuple[dict[str, torch.Tensor], Json]:
        """The tensors and the configuration of a LoRA adapter as SGLang needs them.

        Raises BadInputError or WeightManifestError for a LoRA adapter that SGLang or the model does not support.
        """
        specs = {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}
        plain_config = check_lora_adapter(specs, config, self.manifest)
        dtype = next(iter(tensors.values())).dtype
        missing = missing_fused_parts(specs, plain_config, self.manifest)
        zeros = {name: torch.zeros(spec.shape, dtype=dtype) for name, spec in missing.items()}
        return {**tensors, **zeros}, plain_config

    def find_torn(self) -> TornWeightsError | None:
        """Why the served weights are not whole, or None: an update failed part-way, or the weights were released.

        Only rank 0 knows that weights were released, because it asks the servers.
        """
        servers = self.ranks.servers
        reason = None if self.torn is not None or servers is None else servers.undefined_weights
        if reason is None:
            return self.torn
        return TornWeightsError(f"{reason}: push all tensors with update_weights_from_tensor")

    # -- for the subclasses -------------------------------------------------------------------------

    @property
    def _lacking(self) -> frozenset[str]:
        """The tensors that a server may lack that starts later: it has only its checkpoint."""
        return self._changed if self.starts_from_checkpoint else self.manifest.required

    @property
    def keeps_published(self) -> bool:
        """Whether a server that starts later gets what it lacks from this trainer, without an update."""
        return False

    @property
    def servers(self) -> Servers:
        """The servers, on ranks that have a connection to them."""
        assert self.ranks.servers is not None
        return self.ranks.servers

    def begin(
        self,
        contributions: Sequence[Json],
        names: Sequence[str] | None,
        options: UpdateOptions,
        writers: Container[int],
    ) -> ValidatedUpdate:
        """On rank 0, before servers are changed: refuse an update that cannot succeed.

        `names`: the tensors of this rank. None: a generator's. `contributions` of all ranks and `writers`: see
        `require_same_names`. Raises BadInputError, TornWeightsError (see `require_loadable`), and ServerError.
        """
        servers = self.servers
        validated = validate_options(options, max(self.weight_version, servers.check_weights()))
        require_same_names(contributions, writers)
        if servers.undefined_weights is not None:
            self._needed = self.manifest.required
        else:
            self._needed = self._in_doubt if self.torn is not None else frozenset()
        members = servers.members
        if members and not self.keeps_published and not any(member.is_current for member in members):
            self._needed |= self._lacking
        if names is not None:
            self.require_loadable(names)
        self._in_doubt = self._needed.union(self.manifest.tensors if names is None else names)
        return validated

    def require_loadable(self, names: Sequence[str]) -> None:
        """Raise BadInputError if the servers would ignore some of the tensors `names`.

        Raise TornWeightsError if no server has whole weights, and an update of `names` would not change that.
        """
        self.manifest.require_served(names)
        self.manifest.require_loaded_together(names)
        if missing := sorted(self._needed.difference(names)):
            torn = self.find_torn() or TornWeightsError("all servers were started again with their checkpoint")
            raise TornWeightsError(
                f"the served weights are torn and this update lacks {len(missing)} parameters, for example "
                f"{missing[0]!r}: push all of them. Cause: {torn.message}",
                **torn.details,
            )

    def publish(self, validated: ValidatedUpdate, names: Sequence[str], replay: ReplayFn | None) -> str | None:
        """On rank 0: tell the servers' owner that all servers have loaded and verified the tensors `names`.

        `replay`: see `Servers.published`. Returns `WeightUpdateResult.missing_from`. Raises ServerDiedError if
        no server has the new weights, and TornWeightsError if the owner did not record them.
        """
        missing_from = self.missing_from(names)
        is_enough = self.manifest.is_whole(names) or self._lacking.issubset(names)
        self._changed = self._changed.union(names)
        before, self.weight_version = self.weight_version, validated.weight_version  # also if an interrupt comes now
        try:
            self.servers.published(validated.weight_version, is_enough, replay)
        except ServerDiedError:
            self.weight_version = before
            raise
        except ShutDownError:
            raise
        except VerlServerError as error:
            raise torn_error(error, validated) from error
        return missing_from

    def resume_with(
        self,
        validated: ValidatedUpdate,
        names: Sequence[str],
        missing_from: str | None,
        *,
        transport: str,
        staging_bytes: int,
        sent_bytes: int,
        paused_at: float,
    ) -> UpdateOutcome:
        """On rank 0: continue generation with the published tensors `names`. Returns the outcome of the update.

        `paused_at`: time of `time.monotonic` at which generation was paused. Others: see `WeightUpdateResult`.
        """
        resume_error = resume_twice(self.servers, f"after weight version {validated.weight_version}")
        if resume_error is not None:
            resume_error.message = (
                f"weight version {validated.weight_version} is loaded and verified, but generation does not continue: "
                f"{resume_error.message}"
            )
        result = WeightUpdateResult(
            weight_version=validated.weight_version,
            num_tensors=len(names),
            num_bytes=sum(tensor_bytes(self.manifest.tensors[name]) for name in names),
            num_missing=self.manifest.num_missing(names),
            transport=transport,
            staging_bytes=staging_bytes,
            sent_bytes=sent_bytes,
            gather_s=math.nan,
            load_s=time.monotonic() - paused_at,
            missing_from=missing_from,
        )
        return UpdateOutcome(validated.weight_version, result, resume_error)

    def missing_from(self, names: Sequence[str]) -> str | None:
        """Where the parameters come from that an update of `names` lacks. See `WeightUpdateResult.missing_from`."""
        missing = self.manifest.required.difference(names) if self.manifest.num_missing(names) else frozenset[str]()
        others = "checkpoint" if self.starts_from_checkpoint else "earlier weights"
        found = {"earlier updates": missing & self._changed, others: missing - self._changed}
        sources = [source for source, parameters in found.items() if parameters]
        for source in sources:
            logger.info(
                "%d parameters stay those of the %s, for example %s", len(found[source]), source, min(found[source])
            )
        return " and ".join(sources) or None

    def adopt(self, outcome: UpdateOutcome) -> None:
        """Take over the version and the state of the served weights that rank 0 sent after an update.

        Raises TornWeightsError for a torn update. It leaves the version as it was, so that the caller can push the same
        version again.
        """
        if outcome.torn is not None:
            self.torn = outcome.torn
            unread = frozenset[str](self.torn.details.get("unread", ()))
            self._in_doubt -= unread  # they have changed nothing
            if unread and self.torn.details["is_whole"]:
                self.manifest = dataclasses.replace(self.manifest, unserved=self.manifest.unserved | unread)
            raise self.torn
        if outcome.result is not None:
            self.torn, self.weight_version = None, outcome.weight_version

    def run_reading(self, read: Callable[[], R]) -> tuple[R | None, VerlServerError | None]:
        """Call `read`, which reads the caller's tensors. Returns its result, or an error that all ranks can raise."""
        try:
            return read(), None
        except VerlServerError as error:
            self.shared.leave(error)
            return None, error
        except BaseException as error:  # noqa: BLE001 - the caller's iterator failed: every rank must learn of it
            self.shared.leave(error)
            self._reading_error, rank = error, self.coordinator.rank
            message = f"reading named_tensors failed on rank {rank}: {type(error).__name__}: {error}"
            return None, PeerError(message, ranks=[rank])

    def run_writing(self, writer: ShardWriter, write: Callable[[], R]) -> tuple[R | None, VerlServerError | None]:
        """`run_reading` for a function that gathers tensors with `writer`.

        If it fails before it has gathered all tensors, the other ranks learn of the error at once: they would wait for
        this rank in a collective operation.
        """
        result, error = self.run_reading(write)
        if error is not None and not writer.has_gathered_all:
            self.coordinator.announce_error(writer.call_id, error)
        return result, error
