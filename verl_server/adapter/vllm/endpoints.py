"""vLLM's HTTP routes that this library uses, and the key that each of them needs.

The keys are checked by our own `vllm_server/keys.py`: vLLM's key would protect a few of the routes only.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Endpoint:
    """One HTTP route of the server."""

    path: str
    method: str = "POST"
    needs_admin_key: bool = True
    """Whether the API key does not suffice."""


GENERATE = Endpoint("/inference/v1/generate", needs_admin_key=False)
ABORT = Endpoint("/inference/v1/abort_requests", needs_admin_key=False)
#: Development route: an empty body aborts the requests of all routes.
ABORT_ALL = Endpoint("/abort_requests")
TOKENIZE = Endpoint("/tokenize")
MODELS = Endpoint("/v1/models", method="GET", needs_admin_key=False)
LOAD_LORA = Endpoint("/v1/load_lora_adapter")
UNLOAD_LORA = Endpoint("/v1/unload_lora_adapter")
PAUSE = Endpoint("/pause")
RESUME = Endpoint("/resume")
IS_PAUSED = Endpoint("/is_paused", method="GET")
START_UPDATE = Endpoint("/start_weight_update")
UPDATE_WEIGHTS = Endpoint("/update_weights")
FINISH_UPDATE = Endpoint("/finish_weight_update")
SET_WEIGHT_VERSION = Endpoint("/update_weight_version")
WEIGHT_INFO = Endpoint("/weight_info", method="GET")
RESET_PREFIX_CACHE = Endpoint("/reset_prefix_cache")
RESET_ENCODER_CACHE = Endpoint("/reset_encoder_cache")
SERVER_INFO = Endpoint("/server_info", method="GET")
SLEEP = Endpoint("/sleep")
WAKE_UP = Endpoint("/wake_up")
WORKER_CALL = Endpoint("/collective_rpc")
VERSION = Endpoint("/version", method="GET")
OPENAPI = Endpoint("/openapi.json", method="GET")
#: Open routes. `/health` answers 200 as soon as the engine has loaded, and also while generation is paused.
HEALTH = Endpoint("/health", method="GET", needs_admin_key=False)
METRICS = Endpoint("/metrics", method="GET", needs_admin_key=False)
