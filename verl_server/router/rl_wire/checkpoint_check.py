"""`CheckpointCheck`: compares the folder of an update with the model that the servers serve."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

from verl_server.config import EngineKind
from verl_server.errors import BadInputError, UnsupportedError
from verl_server.router.rl_wire.folders import (
    in_thread,
    read_served_manifest,
    require_checkpoint_folder,
    require_whole_checkpoint,
)
from verl_server.router.rl_wire.server_calls import Servers

if TYPE_CHECKING:
    from verl_server.weights.manifest import Manifest

logger = logging.getLogger(__name__)


class CheckpointCheck:
    """Reads the headers of the served model once, and those of each checkpoint."""

    def __init__(self) -> None:
        self._manifest: Manifest | None = None
        """The tensors that the servers accept. All of them serve the same model."""

    async def require_loadable(self, folder: Any, servers: Servers) -> None:
        """Raise BadInputError for a folder that does not fit the model, and UnsupportedError for a vLLM server."""
        await in_thread(functools.partial(require_checkpoint_folder, folder), folder)
        for name, server in servers.items():
            args = await server.connection.get_resolved_args()
            if args.get("engine_kind") == EngineKind.VLLM:
                raise UnsupportedError(
                    f"{name} is a vLLM server, which loads no folder while it runs: push the weights with "
                    "VerlEngine(servers=[...]).update_weights_from_tensor, or use SGLang servers behind this router"
                )
            if self._manifest is None:  # later, SGLang names the folder of the last update as its model
                try:
                    read = functools.partial(read_served_manifest, args)
                    self._manifest = await in_thread(read, args.get("model_path"))
                except (BadInputError, UnsupportedError) as error:
                    logger.warning("the folder %s is not compared with the served model: %s", folder, error)
        if self._manifest is not None:
            await in_thread(functools.partial(require_whole_checkpoint, folder, self._manifest), folder)
