"""SGLang's HTTP routes: the key that a route needs, its class of deadline, and whether a request may be retried."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class OperationKind(enum.Enum):
    """Classes of operations. Each class has its own deadline in `Timeouts`."""

    CONTROL = "control"
    WEIGHTS = "weights"
    GENERATION = "generation"


@dataclass(frozen=True)
class Endpoint:
    """One HTTP route of the server."""

    path: str
    kind: OperationKind = OperationKind.CONTROL
    method: str = "POST"
    needs_admin_key: bool = False
    retryable: bool = False
    """Whether the request can be sent a second time without harm, for example after a broken connection."""
    is_optional: bool = False
    """Whether some supported versions of SGLang do not have the route."""
    reply_types: type | tuple[type, ...] = object
    """Types that the JSON of a successful reply can have. A reply of another type does not come from SGLang."""


_WEIGHTS = OperationKind.WEIGHTS

GENERATE = Endpoint("/generate", OperationKind.GENERATION, reply_types=(dict, list))
ABORT = Endpoint("/abort_request", needs_admin_key=True, retryable=True)
PAUSE = Endpoint("/pause_generation", needs_admin_key=True, retryable=True)
CONTINUE = Endpoint("/continue_generation", needs_admin_key=True, retryable=True)
FLUSH = Endpoint("/flush_cache", needs_admin_key=True, retryable=True)
BEGIN_UPDATE = Endpoint("/begin_weight_update", _WEIGHTS, needs_admin_key=True, is_optional=True)
END_UPDATE = Endpoint("/end_weight_update", _WEIGHTS, needs_admin_key=True, is_optional=True)
UPDATE_FROM_TENSOR = Endpoint("/update_weights_from_tensor", _WEIGHTS, needs_admin_key=True)
UPDATE_FROM_DISTRIBUTED = Endpoint("/update_weights_from_distributed", _WEIGHTS, needs_admin_key=True)
UPDATE_FROM_DISK = Endpoint("/update_weights_from_disk", _WEIGHTS, needs_admin_key=True)
INIT_UPDATE_GROUP = Endpoint("/init_weights_update_group", _WEIGHTS, needs_admin_key=True)
DESTROY_UPDATE_GROUP = Endpoint("/destroy_weights_update_group", _WEIGHTS, needs_admin_key=True)
WEIGHT_VERSION = Endpoint("/update_weight_version", needs_admin_key=True, retryable=True)
LOAD_LORA = Endpoint("/load_lora_adapter_from_tensors", _WEIGHTS, needs_admin_key=True)
UNLOAD_LORA = Endpoint("/unload_lora_adapter", _WEIGHTS, needs_admin_key=True)
WEIGHTS_CHECKER = Endpoint("/weights_checker", _WEIGHTS, needs_admin_key=True, is_optional=True)
RELEASE_MEMORY = Endpoint("/release_memory_occupation", needs_admin_key=True)
RESUME_MEMORY = Endpoint("/resume_memory_occupation", needs_admin_key=True)
#: Reports settings of a cache. The only route with an admin key that changes nothing and asks no other process.
ADMIN_STATUS = Endpoint(
    "/hicache/storage-backend", method="GET", needs_admin_key=True, retryable=True, is_optional=True
)
OPENAPI = Endpoint("/openapi.json", method="GET", retryable=True, is_optional=True, reply_types=dict)
MODEL_INFO = Endpoint("/model_info", method="GET", retryable=True, reply_types=dict)
SERVER_INFO = Endpoint("/server_info", method="GET", retryable=True, reply_types=dict)
#: The served model, and its LoRA adapters as models with a `parent`.
MODELS = Endpoint("/v1/models", method="GET", retryable=True, reply_types=dict)
LOADS = Endpoint("/v1/loads", method="GET", retryable=True, is_optional=True, reply_types=dict)
READY = Endpoint("/ready", method="GET", retryable=True)
HEALTH = Endpoint("/health", method="GET", retryable=True)
PING = Endpoint("/ping", method="GET", retryable=True)
