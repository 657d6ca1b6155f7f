"""`FleetWeightTransfer`: how the weights of an `AsyncGRPOTrainer` get into the servers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from verl_server.config import PauseMode
from verl_server.errors import BadInputError, UnsupportedError
from verl_server.integrations.trl.servers import RolloutServers, require_servers
from verl_server.integrations.trl.version import require_trl
from verl_server.types import WeightUpdateResult

if TYPE_CHECKING:
    import torch


USABLE_PAUSE_MODES = (PauseMode.RETRACT, PauseMode.IN_PLACE, PauseMode.WAIT)
"""Modes in which running generations have all their tokens at the end."""


class FleetWeightTransfer:
    """Pushes the weights of an `AsyncGRPOTrainer` into all servers. Implements TRL's `WeightTransferProtocol`.

    Pass it as `AsyncGRPOTrainer(weight_transfer=...)`. TRL calls it in the main thread of rank 0: once before the first
    step, and then after every `weight_sync_steps` steps.
    """

    def __init__(self, servers: RolloutServers, *, pause_mode: PauseMode | str = PauseMode.RETRACT) -> None:
        """`pause_mode`: what happens to running generations. `retract`: their KV cache is computed again with the new
        weights. `in_place`: they continue with the KV cache of the old weights, which is faster. `wait`: the push waits
        until they have ended. `abort` is refused, because TRL would train on completions that were cut off.

        Raises UnsupportedError for another version of TRL, and for several trainer ranks; BadInputError.
        """
        require_trl()
        require_servers(servers)
        if servers.mesh.size() > 1:
            raise UnsupportedError(
                "AsyncGRPOTrainer sends the weights from rank 0 alone, which VerlEngine on several ranks cannot do: "
                "start the trainer with one process, or use GRPOTrainer with FleetRolloutFunc"
            )
        if pause_mode not in USABLE_PAUSE_MODES:
            raise BadInputError(
                f"pause_mode must be one of {[mode.value for mode in USABLE_PAUSE_MODES]}, got {str(pause_mode)!r}"
            )
        self._engine, self._pause_mode = servers.engine, PauseMode(pause_mode)
        self.last_update: WeightUpdateResult | None = None
        """Result of the last push."""

    def init_weight_transfer(self) -> None:
        """Nothing: the engine is connected since it was made."""

    def pause(self) -> None:
        """Nothing: `send_weights` pauses the servers only while they load."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Push all tensors and verify them. The servers serve the new weights when the call returns.

        Raises WeightManifestError, TornWeightsError, ServerDiedError.
        """
        self.last_update = self._engine.update_weights_from_tensor(
            iterator, pause_mode=self._pause_mode, flush_cache=self._pause_mode is not PauseMode.IN_PLACE
        )

    def resume(self) -> None:
        """Nothing: `send_weights` has resumed the servers."""

    def destroy(self) -> None:
        """Nothing: who started the servers ends them."""
