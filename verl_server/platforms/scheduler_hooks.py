"""Hooks of an SGLang server on every platform: the gate of requests, caches that depend on weights, the server's state.

SGLang's scheduler trusts its requests. A token id beyond the vocabulary, a count that no tensor can hold, or a field of
a wrong type ends it, and the server with it. `check_tokenized` sees each request as the scheduler will get it, so that
no route has to be known here. `KeyFilter` keeps the server's keys out of its replies. Importing this module imports
no sglang.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pkgutil import resolve_name
from typing import Any

import torch

from verl_server.platforms.server_report import PARAMETER_DTYPES, RELEASED_MEMORY, report_dtypes

logger = logging.getLogger(__name__)

MANAGERS = "sglang.srt.managers"
UPDATER = f"{MANAGERS}.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_INTERNAL_STATE = f"{MANAGERS}.scheduler_components.internal_state.SchedulerInternalStateController"
SCHEDULER = f"{MANAGERS}.scheduler.Scheduler"
_TOKENIZER_MANAGER = f"{MANAGERS}.tokenizer_manager.TokenizerManager"


# -- State ------------------------------------------------------------------------------------------
# What a scheduler reports, and what it does while memory is released. SGLang does not report which memory is released:
# several clients may release and resume the memory of one server, so that none of them knows it from its own calls.


def add_state(reply: Any, controller: Any, *_args: Any, **_kwargs: Any) -> None:
    """Hook after `SchedulerInternalStateController.get_internal_state`, on every platform: the state that
    `/server_info` returns names the memory tags that are released, and the dtypes of the model's parameters.
    """
    scheduler = controller.scheduler
    reply.internal_state[RELEASED_MEMORY] = sorted(scheduler.weight_updater.offload_tags)
    model = scheduler.tp_worker.model_runner.model
    reply.internal_state[PARAMETER_DTYPES] = report_dtypes(model.state_dict().items())


def hold_requests(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook around `Scheduler.get_next_batch_to_run`: run no batch while memory is released, whoever released it.

    Requests wait then. SGLang itself would compute them from released memory when a client continues generation.
    The CPU platform has a hook of its own for it. With DP attention the ranks must call SGLang's function
    together, also while they have nothing to run.
    """
    if scheduler.weight_updater.offload_tags and not scheduler.server_args.enable_dp_attention:
        return without_batch(kwargs)
    return original(scheduler, *args, **kwargs)


def without_batch(arguments: Mapping[str, Any]) -> Any:
    """The result of `Scheduler.get_next_batch_to_run` with these keyword arguments when there is nothing to run."""
    try:
        from sglang.srt.managers.schedule_batch import NextBatchPlan
    except ImportError:  # earlier versions of SGLang
        return None
    return NextBatchPlan(batch_to_run=None, running_batch=arguments["running_batch"])


# -- Weight caches ----------------------------------------------------------------------------------
# The caches of an SGLang scheduler that depend on its weights, and what keeps each from outliving them.
#
# * Prefixes (radix tree, host memory of HiCache): `flush_cache` empties them, and a request matches only prefixes of
#   namespace of the present weights, see below. A load of a LoRA adapter has an id of its own, which is part of that.
# * Embeddings of images, videos and sounds (`mm_schedule.embedding_cache`): nothing but `forget_weights` empties them.
# * Tensors that a module of the model keeps in a dictionary, as vision towers do with interpolated position embeddings:
#   nothing but `forget_weights` removes them.
# * KV stores outside of the process, encoders of other servers, draft models: such servers take no weights
#   (`adapter/sglang/server_arguments.py`).
#
# What SGLang's tokenizer process keeps of images are pixels, which do not depend on weights.
#
# An update that keeps the KV cache (`pause_mode="in_place"` with `flush_cache=False`) leaves prefixes in the cache
# that were computed with earlier weights. Running requests need theirs, but no other request may be answered from
# them. SGLang matches a prefix only within the same `extra_key`. Therefore each request gets an `extra_key` with the
# number of the update before which its prefix is matched: requests that were queued before the update, too. A running
# request keeps its key, and adds to the cache under that key what it has computed with both sets of weights.
#
# The hooks run inside each scheduler, which computes nothing while one of the hooked methods runs.

_num_updates = 0
"""Number of the weight updates of this process that have begun."""
_dictionaries: list[list[tuple[dict[Any, Any], frozenset[Any]]]] = []
"""Of each module of the model its dictionaries, and the keys that each had before the first request."""


def note_model(_result: Any, scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    """Hook after `Scheduler.init_model_worker`, which has loaded the model and captured its CUDA graphs."""
    watch_modules(scheduler.tp_worker.model_runner.model)


def watch_modules(model: torch.nn.Module) -> None:
    """Take the tensors that modules keep in dictionaries from now on for a cache. The present ones stay: CUDA graphs
    may read them.
    """
    _dictionaries.clear()
    for module in model.modules():
        own = [value for name, value in vars(module).items() if name not in ("_parameters", "_buffers")]
        _dictionaries.append([(value, frozenset(value)) for value in own if isinstance(value, dict)])


def forget_weights(*_args: Any, **_kwargs: Any) -> None:
    """Hook before SGLang's methods that change weights, with its own loaders or the loader of this library."""
    global _num_updates
    _num_updates += 1
    for module in ("mm_schedule", "mm_utils"):  # the second in earlier versions of SGLang
        cache = getattr(sys.modules.get(f"sglang.srt.managers.{module}"), "embedding_cache", None)
        if cache is not None:
            cache.clear()
    for dictionaries in _dictionaries:
        added = [(dictionary, dictionary.keys() - kept) for dictionary, kept in dictionaries]
        tensors = {key for dictionary, keys in added for key in keys if isinstance(dictionary[key], torch.Tensor)}
        for dictionary, keys in added:  # a module may count the uses of each tensor in a second dictionary
            for key in keys & tensors:
                del dictionary[key]


def enter_namespace(request: Any) -> None:
    """Set the `extra_key` of a request (SGLang's `Req`) to that of the present weights.

    The caller's own key stays at the end, because SGLang reads the id of a LoRA adapter there.
    """
    if _num_updates == 0:
        return
    if not hasattr(request, "verl_server_extra_key"):
        request.verl_server_extra_key = request.extra_key
    request.extra_key = f"weights {_num_updates}|{request.verl_server_extra_key or ''}"


def before_prefix_match(request: Any, tree_cache: Any = None, *_args: Any, **_kwargs: Any) -> None:
    """Hook before `Req.init_next_round_input`, which matches the prefix of a request if it gets the cache."""
    if tree_cache is not None:
        enter_namespace(request)


def before_queue_match(_policy: Any, waiting_queue: Sequence[Any], *_args: Any, **_kwargs: Any) -> None:
    """Hook before `SchedulePolicy._compute_prefix_matches`, which matches the prefixes of all queued requests."""
    for request in waiting_queue:
        enter_namespace(request)


def hooks() -> dict[str, Callable[..., None]]:
    """The functions of SGLang before which the hooks are called, by path."""
    # A sender may also write weights into the memory of the server, between the begin and the end of an update.
    sources = ("disk", "distributed", "ipc", "tensor")
    changes = ("end_weight_update", *(f"update_weights_from_{source}" for source in sources))
    return {
        f"{MANAGERS}.schedule_batch.Req.init_next_round_input": before_prefix_match,
        f"{MANAGERS}.schedule_policy.SchedulePolicy._compute_prefix_matches": before_queue_match,
        **{f"{UPDATER}.{change}": forget_weights for change in changes},
    }


# -- Request gate -----------------------------------------------------------------------------------

MAX_GENERATIONS = 16_384
"""Maximum number of generations of one request: prompts times `n`. SGLang makes a state for each of them first."""
WARMUP_VOCABULARY = 13
"""SGLang's own first request has the tokens 10, 11 and 12, whatever the vocabulary is. Embeddings have padding."""
MAX_INT = 2**31 - 1
MAX_FLOAT = 1e30
"""Largest number of a request: divided by the smallest temperature (1e-6), it still fits a float32."""
#: Whole numbers that are neither token ids nor counts of tokens to choose from. All others are below the vocabulary.
_LENGTHS = frozenset({
    "bootstrap_port", "dimensions", "logprob_start_len", "max_new_tokens", "min_new_tokens", "priority",
    "routed_experts_start_len", "stream_interval", "top_k",
})  # fmt: skip
#: Whole numbers of 64 bits, which SGLang checks or makes itself.
_WIDE = frozenset({"bootstrap_room", "sampling_seed"})
#: Fields that only SGLang makes; they cannot be sent as they are.
_INTERNAL = ("mm_inputs", "positional_embed_overrides", "time_stats")
#: Fields whose types are checked, and not their numbers: no tensor is indexed or filled with these.
_OPAQUE = frozenset({
    *_INTERNAL, "custom_params", "input_embeds", "input_ids", "kv_hints", "num_items_assigned", "session_params",
    "stop_regex_max_len", "stop_str_max_len", "token_type_ids", "watermark",
})  # fmt: skip
#: Lists of positions in the prompt. All other lists of whole numbers hold token ids.
_POSITIONS = frozenset({"multi_item_delimiter_indices", "token_indices_to_pool"})
#: Secrets of a server's arguments. No reply has them.
SECRETS = ("admin_api_key", "api_key", "ssl_keyfile_password")

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
App = Callable[[Any, Receive, Send], Awaitable[None]]


def check_size(manager: Any, obj: Any, *_args: Any, **_kwargs: Any) -> None:
    """Hook before `TokenizerManager.generate_request`. Raises ValueError (400) for too many generations."""
    del manager
    params = obj.sampling_params if isinstance(obj.sampling_params, list) else [obj.sampling_params]
    samples = 1
    for each in params:
        n = each.get("n") if isinstance(each, Mapping) else None
        if n is not None and type(n) is not int:
            raise ValueError(f"n must be a whole number, got {n!r:.80}")
        samples = max(samples, n or 1)
    text, ids = getattr(obj, "text", None), getattr(obj, "input_ids", None)
    is_batch_of_ids = isinstance(ids, list) and ids and isinstance(ids[0], list)
    prompts = len(text) if isinstance(text, list) else len(ids or ()) if is_batch_of_ids else 1
    if prompts * samples > MAX_GENERATIONS:
        raise ValueError(
            f"{prompts} prompts with n={samples} are more than {MAX_GENERATIONS} generations: send several requests"
        )


def check_tokenized(tokenized: Any, manager: Any, obj: Any, *_args: Any, **_kwargs: Any) -> None:
    """Hook after `TokenizerManager._create_tokenized_object`. Raises ValueError (400) for a request that would end the
    scheduler: token ids beyond the vocabulary, numbers beyond their range, values of a wrong type.

    Takes about 20 microseconds, and 1 ms for a prompt of 32k tokens.
    """
    vocab_size = manager.model_config.vocab_size
    request = _as_received(tokenized)
    num_tokens = len(tokenized.input_ids or ())
    if tokenized.input_ids is not None and not num_tokens:
        raise ValueError("the prompt is empty: it needs at least one token")
    # A prompt with media holds ids that SGLang's processors made, which the scheduler replaces.
    prompt = (obj if tokenized.mm_inputs is not None else tokenized).input_ids or ()
    _check_list("the prompt", prompt, max(vocab_size, WARMUP_VOCABULARY))
    for name, value in (*_fields(request), *_fields(request.sampling_params)):
        if name not in _OPAQUE:
            _check_value(name, value, vocab_size, num_tokens)


def _as_received(tokenized: Any) -> Any:
    """The request as the scheduler decodes it. Raises ValueError if it cannot.

    SGLang before its typed wire pickles any object: then it is the request itself.
    """
    import msgspec

    if not isinstance(tokenized, msgspec.Struct):
        return tokenized
    from sglang.srt.managers.io_struct import msgpack_decode, msgpack_encode

    names = [name for name in _INTERNAL if name in tokenized.__struct_fields__]
    try:
        return msgpack_decode(msgpack_encode(msgspec.structs.replace(tokenized, **dict.fromkeys(names))))
    except (msgspec.MsgspecError, OverflowError, TypeError, UnicodeError) as error:
        raise ValueError(f"the request has a value of a wrong type: {error}") from error


def _fields(record: Any) -> Iterable[tuple[str, Any]]:
    return ((name, getattr(record, name)) for name in getattr(record, "__struct_fields__", None) or vars(record))


def _check_value(name: str, value: Any, vocab_size: int, num_tokens: int) -> None:
    """Check the numbers of one field, also those in its lists, sets and dicts."""
    kind = type(value)
    if kind is int:
        limit = 2**64 - 1 if name in _WIDE else MAX_INT if name in _LENGTHS else vocab_size
        if not (-limit if name in _WIDE or name == "priority" else -1) <= value <= limit:
            raise ValueError(f"{name} is {value}; it must be a whole number of at most {limit}")
    elif kind is float:
        if not abs(value) <= MAX_FLOAT:  # NaN, too
            raise ValueError(f"{name} is {value}; its size must be at most {MAX_FLOAT:g}")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _check_value(f"{name}[{key!r:.40}]", float(item) if type(item) is int else item, vocab_size, num_tokens)
    elif kind in (list, set, tuple, frozenset):
        limit = num_tokens if name in _POSITIONS else vocab_size
        if len(value) > limit:
            raise ValueError(f"{name} has {len(value)} items; at most {limit} can be different")
        _check_list(name, [item for item in value if type(item) is int], limit)
        for item in value:
            if type(item) is not int:
                _check_value(name, item, vocab_size, num_tokens)


def _check_list(name: str, numbers: Any, limit: int) -> None:
    if len(numbers) and (min(numbers) < 0 or max(numbers) >= limit):
        wrong = min(numbers) if min(numbers) < 0 else max(numbers)
        raise ValueError(f"{name} holds {wrong}; its numbers must be at least 0 and below {limit}")


class EndsWithClient:
    """ASGI middleware that cancels a generation as soon as its client closes the connection, on every route.

    Once the reply is complete, nothing is cancelled: background tasks of the server follow.
    SGLang itself asks every 4 seconds. It aborts what a cancelled handler has sent (`_release_req_states_on_failure`).
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope.get("method") != "POST" or not (path == "/generate" or path.startswith("/v1/")):
            await self._app(scope, receive, send)
            return
        has_body = asyncio.Event()

        async def noting_receive() -> Any:
            message = await receive()
            if not message.get("more_body"):
                has_body.set()
            return message

        async def watch() -> None:
            await has_body.wait()
            while (await receive())["type"] != "http.disconnect":
                pass
            handler.cancel()

        async def noting_send(message: Any) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body"):
                watching.cancel()
            await send(message)

        handler = asyncio.ensure_future(self._app(scope, noting_receive, noting_send))
        watching = asyncio.create_task(watch())
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await handler
        finally:
            watching.cancel()


class KeyFilter:
    """ASGI middleware that removes a server's secrets from its replies, and refuses WebSockets, which ask for no key.

    `/server_info` and other replies to GET requests hold all arguments of the server, and the API key opens them.
    """

    def __init__(self, app: App, secrets: Sequence[str]) -> None:
        self._app, self._secrets = app, secrets

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": "this server has no WebSockets"})
        elif scope["type"] == "http" and scope["method"] == "GET":
            await self._app(scope, receive, self._filtered(send))
        else:
            await self._app(scope, receive, send)

    def _filtered(self, send: Send) -> Send:
        """`send` for a reply. JSON is held back until it is complete."""
        start: Any = None
        body = bytearray()

        async def filtered(message: Any) -> None:
            nonlocal start
            if message["type"] == "http.response.start" and b"json" in dict(message["headers"]).get(
                b"content-type", b""
            ):
                start = message
            elif start is None:
                await send(message)
            else:
                body.extend(message.get("body", b""))
                if not message.get("more_body"):
                    shown = json.dumps(self._without_secrets(json.loads(body or b"null"))).encode()
                    headers = [header for header in start["headers"] if header[0] != b"content-length"]
                    await send({**start, "headers": [*headers, (b"content-length", b"%d" % len(shown))]})
                    await send({**message, "body": shown})

        return filtered

    def _without_secrets(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: self._without_secrets(item) for name, item in value.items() if name not in SECRETS}
        if isinstance(value, list):
            return [self._without_secrets(item) for item in value]
        if isinstance(value, str):
            for secret in self._secrets:
                value = value.replace(secret, "***")
        return value


# -- Registration -----------------------------------------------------------------------------------
# The functions of SGLang that each hook changes, and the processes in which it does.
#
# SGLang loads plugins in every process that it starts. Registering a hook imports the module of its target, so hooks
# are not registered in the detokenizer: it needs none, and it would import the whole scheduler.


def find_hooked_sides() -> tuple[bool, bool]:
    """Whether this process is a launcher, and whether it has a scheduler or may fork one. Ask before any registration.

    A spawned worker has imported its own manager only. The launcher has imported none, or all of them (`Engine`).
    """
    in_scheduler = f"{MANAGERS}.scheduler" in sys.modules
    in_launcher = in_scheduler == (f"{MANAGERS}.detokenizer_manager" in sys.modules)
    return in_launcher, in_launcher or in_scheduler


def register(in_launcher: bool, has_scheduler: bool, *, on_cpu: bool) -> None:
    """Register the hooks of every platform in this process. `on_cpu`: the CPU platform registers further hooks."""
    from sglang.srt.plugins.hook_registry import HookType

    if in_launcher:
        add_hook(f"{_TOKENIZER_MANAGER}.generate_request", check_size, HookType.BEFORE)
        add_hook(f"{_TOKENIZER_MANAGER}._create_tokenized_object", check_tokenized, HookType.AFTER)
    if has_scheduler:
        for target, hook in hooks().items():
            add_hook(target, hook, HookType.BEFORE)
        add_hook(f"{SCHEDULER}.init_model_worker", note_model, HookType.AFTER)
        add_hook(f"{_INTERNAL_STATE}.get_internal_state", add_state, HookType.AFTER)
        if not on_cpu:
            add_hook(f"{SCHEDULER}.get_next_batch_to_run", hold_requests, HookType.AROUND)


def add_hook(target: str, hook: Callable[..., Any], kind: Any) -> None:
    """Register one hook. Log a warning when this version of SGLang does not have its target."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    if has_target(target):
        HookRegistry.register(target, hook, kind)
    else:
        logger.warning("this version of SGLang has no %s; the hook %s is inactive", target, hook.__qualname__)


def has_target(target: str) -> bool:
    try:
        resolve_name(target)
    except (ImportError, AttributeError):
        return False
    return True
