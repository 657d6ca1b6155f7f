"""Everything that is SGLang's own words: endpoints, payloads, replies.

One table and one set of pure functions, shared by the synchronous and the asynchronous adapter. Sources:
`sglang/srt/entrypoints/http_server.py` (routes, status codes), `sglang/srt/managers/io_struct.py` (fields),
`sglang/srt/utils/auth.py` (which key opens what), read in 0.5.15 and 0.5.23. No socket, no process.
"""

from __future__ import annotations

import array
import base64
import enum
import pickletools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl_server.config import MemoryTag, PauseMode
from verl_server.errors import (
    BadInputError,
    NotReadyError,
    ServerBusyError,
    ServerError,
    UnsupportedError,
    VerlServerError,
)

Json = dict[str, Any]


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
WEIGHTS_CHECKER = Endpoint("/weights_checker", Kind.WEIGHTS, admin=True)
RELEASE_MEMORY = Endpoint("/release_memory_occupation", admin=True)
RESUME_MEMORY = Endpoint("/resume_memory_occupation", admin=True)
MODEL_INFO = Endpoint("/model_info", method="GET", repeatable=True)
SERVER_INFO = Endpoint("/server_info", method="GET", repeatable=True)
LOADS = Endpoint("/v1/loads", method="GET", repeatable=True)
READY = Endpoint("/ready", method="GET", repeatable=True)
HEALTH = Endpoint("/health", method="GET", repeatable=True)
PING = Endpoint("/ping", method="GET", repeatable=True)


@dataclass(frozen=True)
class Limits:
    """What one server accepts, in tokens. None: not known, not checked here."""

    vocab_size: int | None = None
    max_prompt: int | None = None


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise BadInputError(message)


#: Up to here the built-in `max` is faster than handing the numbers to numpy.
_SMALL_PROMPT = 256


def _check_prompt_ids(ids: Any, where: str, limits: Limits) -> None:
    """On the hot path of every request: a microsecond for a short prompt, 0.3 ms for 32k tokens."""
    if not isinstance(ids, (list, tuple)):
        raise BadInputError(f"{where} must be a list of token ids, got {type(ids).__name__}")
    if not ids:
        raise BadInputError(f"{where} is empty: a prompt needs at least one token")
    try:
        numbers = array.array("I", ids)
    except (TypeError, OverflowError) as error:
        raise _bad_ids(ids, where, error) from error
    high = max(ids) if len(ids) < _SMALL_PROMPT else int(np.frombuffer(numbers, dtype=np.uint32).max())
    if limits.vocab_size is not None and high >= limits.vocab_size:
        raise BadInputError(
            f"{where} holds token id {high}, but the model's vocabulary ends at {limits.vocab_size - 1}"
        )
    if limits.max_prompt is not None and len(ids) > limits.max_prompt:
        raise BadInputError(f"{where} has {len(ids)} tokens; the server takes prompts of up to {limits.max_prompt}")


def _bad_ids(ids: Sequence[Any], where: str, error: Exception) -> BadInputError:
    """Which id is wrong; asked only when one is."""
    for value in ids:
        if not isinstance(value, int):
            return BadInputError(f"{where} must hold whole numbers only, got {value!r}")
        if value < 0:
            return BadInputError(f"{where} holds the negative token id {value}")
    return BadInputError(f"{where} holds a token id beyond any vocabulary: {error}")


_WHOLE_NUMBERS = {"max_new_tokens": 0, "min_new_tokens": 0, "n": 1}


def _check_sampling(params: Any, where: str) -> None:
    if not isinstance(params, Mapping):
        raise BadInputError(f"{where} must be a dict, got {type(params).__name__}")
    for name, value in params.items():
        if not isinstance(name, str):
            raise BadInputError(f"{where} has the key {name!r}; keys are strings")
        if name in _WHOLE_NUMBERS and value is not None:
            if not isinstance(value, int) or isinstance(value, bool):
                raise BadInputError(f"{where}[{name!r}] must be a whole number, got {value!r}")
            if value < _WHOLE_NUMBERS[name]:
                raise BadInputError(f"{where}[{name!r}] must be at least {_WHOLE_NUMBERS[name]}, got {value!r}")


def is_batch(prompt: Any, input_ids: Any) -> bool:
    """Whether the prompts are a list of prompts (then the reply is a list, too)."""
    if input_ids is not None:
        return bool(input_ids) and isinstance(input_ids[0], (list, tuple))
    return isinstance(prompt, (list, tuple))


def generate_payload(
    limits: Limits,
    *,
    prompt: str | Sequence[str] | None,
    sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
    input_ids: Sequence[int] | Sequence[Sequence[int]] | None,
    rid: str | Sequence[str] | None,
    stream: bool,
    fields: Mapping[str, Any],
) -> Json:
    """The body of `/generate`. `fields` are SGLang's further names, passed on as they are unless None.

    Raises BadInputError before anything is sent: SGLang answers some of these with a 500 or not at all.
    """
    _require((prompt is None) != (input_ids is None), "give either `prompt` or `input_ids`, not both or none")
    if input_ids is not None:
        _require(isinstance(input_ids, (list, tuple)), f"input_ids must be a list, got {type(input_ids).__name__}")
        _require(len(input_ids) > 0, "input_ids is empty: a prompt needs at least one token")
        if is_batch(None, input_ids):
            for i, ids in enumerate(input_ids):
                _check_prompt_ids(ids, f"input_ids[{i}]", limits)
        else:
            _check_prompt_ids(input_ids, "input_ids", limits)
        size = len(input_ids)
    else:
        prompts = list(prompt) if isinstance(prompt, (list, tuple)) else [prompt]
        for i, text in enumerate(prompts):
            _require(isinstance(text, str) and text != "", f"prompt[{i}] must be a non-empty string, got {text!r}")
        size = len(prompts)
    if isinstance(sampling_params, (list, tuple)):
        _require(
            is_batch(prompt, input_ids) and len(sampling_params) == size,
            f"{len(sampling_params)} sampling_params for {size} prompts",
        )
        for i, params in enumerate(sampling_params):
            _check_sampling(params, f"sampling_params[{i}]")
    elif sampling_params is not None:
        _check_sampling(sampling_params, "sampling_params")
    if rid is not None:
        rids = [rid] if isinstance(rid, str) else list(rid)
        _require(all(isinstance(r, str) and r for r in rids), f"rid must be a non-empty string, got {rid!r}")
    body: Json = {"text": prompt, "input_ids": input_ids, "sampling_params": sampling_params, "rid": rid}
    body.update(fields)
    if stream:
        body["stream"] = True
    return {name: value for name, value in body.items() if value is not None}


def abort_payload(rid: str | None, abort_all: bool) -> Json:
    """SGLang aborts by *prefix* of the rid; an empty rid would abort everything."""
    _require(abort_all or bool(rid), "abort_request needs a non-empty rid, or abort_all=True")
    return {"rid": rid or "", "abort_all": abort_all}


def pause_payload(mode: str) -> Json:
    try:
        return {"mode": PauseMode(mode).value}
    except ValueError:
        raise BadInputError(f"pause mode must be one of {[m.value for m in PauseMode]}, got {mode!r}") from None


def memory_tags(tags: Sequence[str] | None) -> list[str]:
    """The tags as SGLang spells them; None means all."""
    if tags is None:
        return [tag.value for tag in MemoryTag]
    _require(not isinstance(tags, str), f"tags must be a list of strings, got the string {tags!r}")
    try:
        found = [MemoryTag(tag).value for tag in tags]
    except ValueError:
        raise BadInputError(f"memory tags are {[t.value for t in MemoryTag]}, got {list(tags)!r}") from None
    _require(len(found) > 0, "tags is empty; leave it out to mean all")
    _require(len(set(found)) == len(found), f"a tag is named twice: {found}")
    return found


def check_tensor_payloads(
    serialized: Any, tp_size: int | None, load_format: str | None, loaders: Sequence[str]
) -> None:
    """Refuse what ends the server: too few payloads, undecodable ones, load formats that it does not know."""
    _require(
        isinstance(serialized, (list, tuple)) and all(isinstance(item, str) for item in serialized),
        "serialized_named_tensors must be a list of base64 strings, one per TP rank",
    )
    _require(
        tp_size is None or len(serialized) == tp_size,
        f"{len(serialized)} payloads for {tp_size} TP ranks; SGLang needs one for each",
    )
    known = (None, "flattened_bucket", *loaders)
    _require(load_format in known, f"load_format {load_format!r} would end this server; it takes {known}")
    for rank, item in enumerate(serialized):
        try:
            for _ in pickletools.genops(base64.b64decode(item, validate=True)):
                pass
        except ValueError as error:
            raise BadInputError(f"payload {rank} is no base64 of a pickle of tensors: {error}") from error


def update_from_tensor_payload(
    serialized: Sequence[str], *, load_format: str | None, flush_cache: bool, weight_version: str | None
) -> Json:
    """`serialized` holds one base64 payload per TP rank."""
    return _update({"serialized_named_tensors": list(serialized)}, load_format, flush_cache, weight_version)


def update_from_distributed_payload(
    names: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[Sequence[int]],
    *,
    group_name: str,
    load_format: str | None,
    flush_cache: bool,
    weight_version: str | None,
) -> Json:
    _require(
        len(names) == len(dtypes) == len(shapes) > 0,
        f"{len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes must be equally many, and not none",
    )
    body = {
        "names": list(names),
        "dtypes": [str(dtype).removeprefix("torch.") for dtype in dtypes],
        "shapes": [list(shape) for shape in shapes],
        "group_name": group_name,
    }
    return _update(body, load_format, flush_cache, weight_version)


def update_from_disk_payload(
    model_path: str, *, load_format: str | None, flush_cache: bool, weight_version: str | None
) -> Json:
    _require(isinstance(model_path, str) and model_path != "", f"model_path must be a path, got {model_path!r}")
    return _update({"model_path": model_path}, load_format, flush_cache, weight_version)


def _update(body: Json, load_format: str | None, flush_cache: bool, weight_version: str | None) -> Json:
    body["flush_cache"] = flush_cache
    if load_format is not None:
        body["load_format"] = load_format
    if weight_version is not None:
        body["weight_version"] = str(weight_version)
    return body


def checker_payload(action: str) -> Json:
    actions = ("checksum", "snapshot", "compare", "reset_tensors")
    _require(action in actions, f"weights_checker knows the actions {actions}, got {action!r}")
    return {"action": action}


def words_of(body: Any) -> str:
    """The server's own words from an error body, whatever its shape."""
    if isinstance(body, dict):
        inner = body.get("error", body)
        if isinstance(inner, dict):
            return str(inner.get("message") or inner.get("detail") or inner)
        return str(inner)
    return str(body).strip() or "(no words)"


def error_of(status: int, url: str, body: Any) -> VerlServerError:
    """The typed error for a reply that is not a success."""
    words = words_of(body)[:2000]
    details: Json = {"status": status, "url": url, "body": words}
    if isinstance(body, dict) and body.get("success") is False:
        return ServerError(f"{url} reports failure: {words}", **details)
    if status in (400, 413, 422):
        return BadInputError(f"{url} refused the request ({status}): {words}", **details)
    if status == 404:
        return UnsupportedError(f"{url} does not exist in this version of the server", **details)
    if status == 409:
        return ServerBusyError(f"{url} refused for now ({status}): {words}", **details)
    if status == 503:
        return NotReadyError(f"{url} is not ready (503): {words}", **details)
    return ServerError(f"{url} failed ({status}): {words}", **details)


def require_success(reply: Any, url: str) -> Json:
    """Replies that carry `success: false` with status 200 are failures, too."""
    if isinstance(reply, dict) and reply.get("success") is False:
        raise ServerError(f"{url} reports failure: {words_of(reply)}", url=url, body=words_of(reply))
    return reply if isinstance(reply, dict) else {"message": reply}


def limits_of(server_info: Json, model_config: Json) -> Limits:
    """Longest prompt from `/server_info`, vocabulary from the model's `config.json`."""
    states = server_info.get("internal_states") or [{}]
    text_config = model_config.get("text_config") or model_config
    return Limits(
        vocab_size=text_config.get("vocab_size"),
        max_prompt=server_info.get("max_req_input_len") or states[0].get("max_req_input_len"),
    )


def requests_in(loads: Json) -> int:
    """Running and waiting requests over all DP ranks of `/v1/loads`."""
    return sum(
        int(load.get("num_running_reqs", 0)) + int(load.get("num_waiting_reqs", 0)) for load in loads.get("loads", [])
    )


def without_keys(server_info: Json) -> Json:
    """`/server_info` names the server's own keys; they stay out of what callers print."""
    states = [without_keys(state) for state in server_info.get("internal_states") or [] if isinstance(state, dict)]
    kept = {name: value for name, value in server_info.items() if name not in ("api_key", "admin_api_key")}
    return {**kept, "internal_states": states} if "internal_states" in kept else kept
