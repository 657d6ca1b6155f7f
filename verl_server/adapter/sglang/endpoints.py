"""SGLang's routes: which key opens them, how long they may take, whether sending twice does harm."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Kind(enum.Enum):
    """Classes of operation; each has its deadline in `Timeouts`."""

    CONTROL = "control"
    WEIGHTS = "weights"
    GENERATION = "generation"


@dataclass(frozen=True)
class Endpoint:
    """One route. `admin`: opened by the admin key. `repeatable`: sending it twice does no harm."""

    path: str
    kind: Kind = Kind.CONTROL
    method: str = "POST"
    admin: bool = False
    repeatable: bool = False


GENERATE = Endpoint("/generate", Kind.GENERATION)
ABORT = Endpoint("/abort_request", admin=True, repeatable=True)
PAUSE = Endpoint("/pause_generation", admin=True, repeatable=True)
CONTINUE = Endpoint("/continue_generation", admin=True, repeatable=True)
FLUSH = Endpoint("/flush_cache", admin=True, repeatable=True)
BEGIN_UPDATE = Endpoint("/begin_weight_update", Kind.WEIGHTS, admin=True)
END_UPDATE = Endpoint("/end_weight_update", Kind.WEIGHTS, admin=True)
UPDATE_FROM_TENSOR = Endpoint("/update_weights_from_tensor", Kind.WEIGHTS, admin=True)
UPDATE_FROM_DISTRIBUTED = Endpoint("/update_weights_from_distributed", Kind.WEIGHTS, admin=True)
UPDATE_FROM_DISK = Endpoint("/update_weights_from_disk", Kind.WEIGHTS, admin=True)
INIT_UPDATE_GROUP = Endpoint("/init_weights_update_group", Kind.WEIGHTS, admin=True)
DESTROY_UPDATE_GROUP = Endpoint("/destroy_weights_update_group", Kind.WEIGHTS, admin=True)
WEIGHT_VERSION = Endpoint("/update_weight_version", admin=True, repeatable=True)
LOAD_LORA = Endpoint("/load_lora_adapter_from_tensors", Kind.WEIGHTS, admin=True)
UNLOAD_LORA = Endpoint("/unload_lora_adapter", Kind.WEIGHTS, admin=True)
WEIGHTS_CHECKER = Endpoint("/weights_checker", Kind.WEIGHTS, admin=True)
RELEASE_MEMORY = Endpoint("/release_memory_occupation", admin=True)
RESUME_MEMORY = Endpoint("/resume_memory_occupation", admin=True)
MODEL_INFO = Endpoint("/model_info", method="GET", repeatable=True)
SERVER_INFO = Endpoint("/server_info", method="GET", repeatable=True)
LOADS = Endpoint("/v1/loads", method="GET", repeatable=True)
READY = Endpoint("/ready", method="GET", repeatable=True)
HEALTH = Endpoint("/health", method="GET", repeatable=True)
PING = Endpoint("/ping", method="GET", repeatable=True)
