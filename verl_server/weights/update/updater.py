"""What each trainer rank has for pushing weights, whatever way they travel."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from verl_server.config import PauseMode
from verl_server.errors import BadInputError, PeerError, TornWeightsError, VerlServerError
from verl_server.ranks.placement import Placement
from verl_server.types import TensorSpec, WeightUpdateResult
from verl_server.weights.lora import check_adapter
from verl_server.weights.manifest import Manifest
from verl_server.weights.update.servers import UpdatableServers
from verl_server.weights.update.shard_writer import ShardWriter

if TYPE_CHECKING:
    import torch

    from verl_server.ranks.coordinator import RankCoordinator

Json = dict[str, Any]
R = TypeVar("R")


@dataclass(frozen=True)
class UpdateOptions:
    """What the caller asks of an update (see `VerlEngine.update_weights_from_tensor`)."""

    weight_version: int | str | None
    verify: bool
    check_finite: bool
    pause_mode: PauseMode | str
    flush_cache: bool


@dataclass(frozen=True)
class ValidatedUpdate:
    """What was asked, checked."""

    weight_version: str
    verify: bool
    pause_mode: PauseMode
    flush_cache: bool


@dataclass(frozen=True)
class Ranks:
    """The ranks of one engine and this one among them."""

    group: RankCoordinator
    placement: Placement
    numbers: frozenset[int]
    """Their numbers in the trainer's whole world."""
    servers: UpdatableServers | None
    """The servers that are updated. None on trainer ranks that have no connection to a server."""
    timeout_s: float
    """Deadline of one step of an update."""


class WeightUpdater(ABC):
    """One rank's part in weight updates, and what it knows of the served weights."""

    def __init__(self, ranks: Ranks, manifest: Manifest, version: int) -> None:
        self.ranks, self.group, self.manifest = ranks, ranks.group, manifest
        self.version = version
        self.torn: TornWeightsError | None = None
        self.asleep: frozenset[str] = frozenset()

    def update(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], load_format: str | None, options: UpdateOptions
    ) -> WeightUpdateResult:
        """One update; called on all ranks."""
        refusal: VerlServerError | None = None
        if load_format not in (None, "auto"):
            refusal = BadInputError(
                f"load_format {load_format!r} is not needed: tensors are pushed by name (leave it out)"
            )
        elif "weights" in self.asleep:
            refusal = BadInputError("the server's weights are released: resume_memory_occupation(['weights']) first")
        return self._update(named_tensors, options, refusal)

    @abstractmethod
    def _update(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], options: UpdateOptions, refusal: VerlServerError | None
    ) -> WeightUpdateResult: ...

    @abstractmethod
    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor of the model in the staging memory, in place, by name. Raises UnsupportedError."""

    @abstractmethod
    def close(self) -> None: ...

    def validate(self, options: UpdateOptions) -> ValidatedUpdate:
        """Raises BadInputError for what cannot be had."""
        given = options.weight_version
        version = str(self.version + 1) if given is None else str(given)
        if not version.isdecimal() or int(version) <= self.version:
            raise BadInputError(f"weight_version must be a number above {self.version}, got {given!r}")
        if options.pause_mode not in list(PauseMode):
            raise BadInputError(f"pause_mode {options.pause_mode!r} is none of {[mode.value for mode in PauseMode]}")
        if options.pause_mode == PauseMode.IN_PLACE and options.flush_cache:
            raise BadInputError(
                "pause_mode 'in_place' keeps the KV cache of running requests: it needs flush_cache=False"
            )
        return ValidatedUpdate(str(int(version)), options.verify, PauseMode(options.pause_mode), options.flush_cache)

    def require_whole_if_torn(self, names: Iterable[str]) -> None:
        """Raises TornWeightsError when the served weights are torn and an update with `names` would leave them so."""
        missing = sorted(self.manifest.tensors.keys() - set(names))
        if missing and self.torn is not None:
            raise TornWeightsError(
                f"the served weights are torn and this update lacks {len(missing)} parameters, {missing[0]!r} "
                "among them: push all of them"
            )

    def settled(self, wire: Json) -> None:
        """Take over what rank 0 says of the served weights after an update: `version` and `torn`."""
        self.version = int(wire["version"])
        self.torn = None if wire["torn"] is None else TornWeightsError(**wire["torn"])

    def reading(self, read: Callable[[], R]) -> tuple[R | None, VerlServerError | None]:
        """What `read` makes of the caller's tensors, or its failure as an error that every rank can be told."""
        try:
            return read(), None
        except VerlServerError as error:
            return None, error
        except Exception as error:  # noqa: BLE001 - the caller's iterator failed: every rank must learn of it
            rank = self.group.rank
            wrapped = PeerError(
                f"reading named_tensors failed on rank {rank}: {type(error).__name__}: {error}", ranks=[rank]
            )
            wrapped.__cause__ = error
            return None, wrapped

    def collected(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> tuple[dict[str, torch.Tensor], VerlServerError | None]:
        """All tensors whole and on the CPU, for what is small and does not go through the staging memory."""
        stage = ShardWriter(lambda _: None, self.manifest, frozenset(), self.group, self.ranks.timeout_s, finite=False)
        tensors, error = self.reading(lambda: stage.collect(named_tensors))
        return tensors or {}, error

    def check_adapter(self, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> None:
        """Raises BadInputError or WeightManifestError for a LoRA adapter that does not fit."""
        specs = {
            name: TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in tensors.items()
        }
        check_adapter(specs, config, self.manifest)


def first_version(server_args: Mapping[str, Any]) -> int:
    """The version that the server starts with."""
    given = str(server_args.get("weight_version", "0"))
    return int(given) if given.isdecimal() else 0


def torn_wire(error: TornWeightsError) -> Json:
    """The error as it goes to all ranks."""
    return {"message": error.message, **error.details}


def torn_by(error: VerlServerError, validated: ValidatedUpdate) -> TornWeightsError:
    return TornWeightsError(
        f"the weight update {validated.weight_version} failed half-way: {error.message}. "
        "Nothing is generated until a whole update has landed.",
        cause=type(error).__name__,
        **error.details,
    )


def result_wire(**values: Any) -> Json:
    """A `WeightUpdateResult` without what each rank measures for itself."""
    return asdict(WeightUpdateResult(gather_s=math.nan, **values))
