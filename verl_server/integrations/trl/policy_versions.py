"""Versions of the policy: the engine counts pushes, and an `AsyncGRPOTrainer` counts its own weight syncs."""

from __future__ import annotations

from collections.abc import Sequence

from verl_server.types import Json


class PolicyVersions:
    """Converts weight versions of the engine to TRL's model versions. Both rise by one with each sync."""

    def __init__(self) -> None:
        self._offset = 0

    def set(self, model_version: int, weight_version: int) -> None:
        """Both numbers of the weights that the servers have now."""
        self._offset = model_version - weight_version

    def oldest(self, spans: Sequence[Json]) -> int:
        """TRL's version of the oldest token of a completion. `spans`: spans of its tokens by weight version."""
        return min(int(span["version"]) for span in spans) + self._offset

    def newest(self, spans: Sequence[Json]) -> int:
        """TRL's version of the newest token of a completion."""
        return max(int(span["version"]) for span in spans) + self._offset
