"""`AsyncHttpServerEngineAdapter`: every endpoint of an inference engine that RL uses, over HTTP, for one server."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from verl_server.adapter.engine import get_engine
from verl_server.adapter.http import Capabilities, HttpClient, ServerConnection
from verl_server.adapter.model_files import plain_lora_config
from verl_server.adapter.router_registration import RouterRegistration
from verl_server.adapter.sglang import replies
from verl_server.adapter.sglang.replies import (
    IncrementalStream,
    convert_weight_versions,
    correct_aborts,
    count_requests,
    require_answer,
    require_answers,
    require_no_abort,
)
from verl_server.adapter.sglang.requests import (
    PromptLimits,
    check_tensor_payloads,
    explain_refusal,
    generate_payload,
    load_lora_payload,
    pause_payload,
    require,
    update_payload,
    weight_version_label,
)
from verl_server.adapter.sglang.server_arguments import (
    loses_weights,
    require_lora,
    require_memory_saver,
    require_unpacked_experts,
)
from verl_server.adapter.vllm.requests import vllm_lora_payload
from verl_server.config import AdapterConfig, EngineKind, MemoryTag, PauseMode
from verl_server.errors import (
    BadInputError,
    NotReadyError,
    ServerBusyError,
    ServerError,
    ShutDownError,
    UnsupportedError,
    VerlServerError,
)
from verl_server.server.process import AbortCheck, ExitStatus, ServerPids, Supervisor, never_abort
from verl_server.types import Json, parse_weight_version
from verl_server.validation import as_pairs, check_arguments, require_http_url

if TYPE_CHECKING:
    import torch


# -- Memory tags ------------------------------------------------------------------------------------
# Validation of the memory tags of a release or a resume, for one server, the in-process engine and a fleet.


def tags_to_release(tags: Sequence[str] | None, released: Collection[str]) -> list[str]:
    """The memory tags to release. `tags` of None means all; `released` are the tags that are released now.

    Raises BadInputError for unknown tags and for tags that are released.
    """
    requested = _parse_tags(tags)
    already_released = sorted(set(requested).intersection(released))
    if already_released:
        raise BadInputError(
            f"the memory of {already_released} is released already; released memory: {sorted(released)}. "
            "Name only other tags, or call resume_memory_occupation first."
        )
    return requested


def tags_to_resume(tags: Sequence[str] | None, released: Collection[str]) -> list[str]:
    """The memory tags to resume. `tags` of None means all that are released; `released` are the released tags.

    Raises BadInputError for unknown tags, for tags that are not released, and when nothing is released.
    """
    requested = sorted(released) if tags is None else _parse_tags(tags)
    if not requested:
        raise BadInputError("nothing is released: call release_memory_occupation before resume_memory_occupation")
    not_released = sorted(set(requested).difference(released))
    if not_released:
        raise BadInputError(
            f"the memory of {not_released} is not released; released memory: {sorted(released)}. "
            "Name only released tags, or leave `tags` out to resume all of them."
        )
    return requested


def undefined_weights_reason(
    undefined: bool, released: Collection[str], cause: str = "their memory was released and resumed"
) -> str | None:
    """The reason of `Servers.undefined_weights`: None unless the weights are undefined and in memory.

    `undefined`: not all weights were loaded since the `cause`. `released` are the tags that are released now.
    """
    if not undefined or MemoryTag.WEIGHTS in released:
        return None
    return f"the weights of the servers are undefined, because {cause}"


def _parse_tags(tags: Sequence[str] | None) -> list[str]:
    """Memory tags as plain strings."""
    try:
        values = [MemoryTag(tag).value for tag in (MemoryTag if tags is None else tags)]
    except (TypeError, ValueError):
        raise BadInputError(f"tags must be a list of {[tag.value for tag in MemoryTag]}, got {tags!r}") from None
    if not values or len(set(values)) != len(values):
        raise BadInputError(f"tags is empty, or names a tag twice: {values}; leave it out to mean all")
    return values


MAX_STREAM_EVENTS = 1024
"""Maximum number of events of one stream after its first token, unless the caller sets `stream_interval`."""
LOAD_TIMEOUT_S = 0.5
"""Seconds that a server has to publish that its last request has ended."""
LOAD_POLL_S = 0.02


# -- Client -----------------------------------------------------------------------------------------


class KnownServer:
    """What both adapters tell about their server without a request: address, keys, process and known state."""

    base_url: str
    """Base URL of the server, without an endpoint."""
    api_key: str | None
    """Key for generation requests."""
    admin_api_key: str | None
    """Key for weight, memory and control requests."""
    config: AdapterConfig
    """Settings of the adapter."""
    process: Supervisor | None
    """Supervisor of the server's process. None for an attached server."""
    connection: ServerConnection
    """Internal: the HTTP connections and the state of the server as the adapter knows it."""

    @property
    def server_args(self) -> Mapping[str, Any]:
        """Arguments that the server was started with. Empty for an attached server until they are needed."""
        return self.connection.server_args

    @property
    def paused(self) -> bool:
        """Whether this adapter has paused generation."""
        return self.connection.paused

    @property
    def released_memory(self) -> frozenset[str]:
        """Memory tags that are released, as of this adapter's last call that released or resumed memory."""
        return self.connection.released_memory

    @property
    def needs_continue(self) -> bool:
        """Internal. Whether a release or a resume of memory has left generation paused."""
        return self.connection.needs_continue

    @property
    def pids(self) -> ServerPids:
        """Process ids of the server main, its warden and its workers.

        Raises UnsupportedError for an attached server.
        """
        if self.process is None:
            raise UnsupportedError(f"the process ids of {self.base_url} are not known: this adapter did not start it")
        return self.process.pids

    @property
    def log_path(self) -> Path | None:
        """Path of the server's log file. None for a server that was attached or that runs on another machine."""
        return None if self.process is None else self.process.log_path

    def fail(self, error: VerlServerError) -> None:
        """Internal. Make every call in flight and every later call raise `error`."""
        self.connection.http.fail(error)


class AsyncHttpServerEngineAdapter(KnownServer):
    """One server of an inference engine, started in its own process and driven over HTTP from any event loop.

    The constructor blocks until the server is ready; inside an event loop use `await
    AsyncHttpServerEngineAdapter.launch(...)`. `attach` drives a server that already runs. Use the adapter with
    `async with`, or call `shutdown`.

    Every method raises the errors of `verl_server.errors`: ServerDiedError when the server's process ends,
    DeadlineError after the deadline of `config.timeouts`, ShutDownError after `shutdown`.
    """

    @check_arguments()
    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        config: AdapterConfig | None = None,
        env: Mapping[str, str] | None = None,
        check_abort: AbortCheck = never_abort,
        **server_args: Any,
    ) -> None:
        """Start a server and wait until it is ready.

        Args:
            model_path: Folder of the model, or its name on a hub.
            config: Settings of this adapter.
            env: Environment variables to add to the server's environment.
            check_abort: Internal. Called repeatedly while the server starts; the error that it returns ends the start.
            server_args: Further arguments of the server: fields of SGLang's `ServerArgs`, or the arguments of a vLLM
                server (docs/vllm.md), according to `config.engine_kind`.

        Raises StartupError, DeadlineError, BadInputError (an argument that the engine refuses), or the error of
        `check_abort`.
        """
        config = config or AdapterConfig()
        server_args = {"model_path": model_path, **server_args}
        server = get_engine(config.engine_kind).launch(server_args, config, env or {}, check_abort)
        try:
            self._connect(
                server.base_url, server.api_key, server.admin_api_key, config, server.process, server.server_args
            )
        except BaseException:
            server.process.stop(config.timeouts.stop_s)
            raise

    @classmethod
    async def launch(
        cls,
        model_path: str | os.PathLike[str],
        *,
        config: AdapterConfig | None = None,
        env: Mapping[str, str] | None = None,
        **server_args: Any,
    ) -> Self:
        """Start a server without blocking the event loop. Arguments and errors are those of the constructor."""
        return await asyncio.to_thread(cls, model_path, config=config, env=env, **server_args)

    @classmethod
    @check_arguments()
    def attach(
        cls,
        base_url: str,
        *,
        api_key: str | None = None,
        admin_api_key: str | None = None,
        config: AdapterConfig | None = None,
        process: Supervisor | None = None,
    ) -> Self:
        """Drive a server that already runs.

        Sends no request: `check_keys` tells whether the server accepts the keys. `shutdown` leaves the server running
        unless its supervisor is given as `process`.
        """
        self = cls.__new__(cls)
        base_url = require_http_url("base_url", base_url)
        self._connect(base_url, api_key, admin_api_key, config or AdapterConfig(), process, {})
        return self

    def _connect(
        self,
        base_url: str,
        api_key: str | None,
        admin_api_key: str | None,
        config: AdapterConfig,
        process: Supervisor | None,
        server_args: Mapping[str, Any],
    ) -> None:
        http = HttpClient(
            base_url,
            api_key=api_key,
            admin_api_key=admin_api_key,
            timeouts=config.timeouts,
            max_retries=config.max_retries,
            is_supervised=process is not None,
        )
        self.base_url = base_url
        self.api_key, self.admin_api_key = api_key, admin_api_key
        self.config = config
        self.process = process
        self.connection = ServerConnection(http, server_args)
        self._is_shut_down = False
        if process is not None:
            process.on_exit(self._on_exit)
        self._registration = RouterRegistration.start(config, base_url, api_key)

    # -- information --------------------------------------------------------------------------------

    async def get_model_info(self) -> Json:
        """SGLang's `/model_info`: model path, architecture, and `weight_version` as an int."""
        info = dict(await self.connection.call(replies.MODEL_INFO))
        return {**info, "weight_version": parse_weight_version(info.get("weight_version"))}

    async def get_server_info(self) -> Json:
        """SGLang's `/server_info`: all resolved server arguments and the scheduler's state, without the API keys."""
        return await self.connection.get_server_info()

    async def get_loads(self) -> Json:
        """SGLang's `/v1/loads`: running requests, waiting requests and token usage, per DP rank."""
        return dict(await self.connection.call(replies.LOADS))

    async def is_ready(self) -> bool:
        """Whether the server accepts new requests now. False while generation is paused."""
        return await self.connection.is_ok(replies.READY)

    async def ping(self) -> bool:
        """Whether the server's HTTP loop answers. True also while generation is paused."""
        return await self.connection.is_ok(replies.PING)

    async def health(self) -> bool:
        """Whether the server can generate one token. Takes about one second; meaningless while generation is paused."""
        return await self.connection.is_ok(replies.HEALTH)

    async def check_keys(self) -> None:
        """Check that the server accepts the keys of this adapter. Changes nothing on the server.

        Raises ServerError with the name of the key that is missing or wrong. The admin key is not checked by a version
        of SGLang that has no request with an admin key that changes nothing.
        """
        await self.connection.call(replies.MODEL_INFO)
        with contextlib.suppress(BadInputError, UnsupportedError):  # the server has no admin key, or no such request
            await self.connection.call(replies.ADMIN_STATUS)

    async def capabilities(self) -> Capabilities:
        """Abilities of this version of SGLang. They are probed once."""
        return await self.connection.capabilities.get()

    # -- generation ---------------------------------------------------------------------------------

    async def generate(
        self,
        /,
        prompt: str | list[str] | None = None,
        sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        image_data: Any = None,
        return_logprob: bool | list[bool] | None = None,
        logprob_start_len: int | list[int] | None = None,
        top_logprobs_num: int | list[int] | None = None,
        token_ids_logprob: Any = None,
        lora_path: str | list[str | None] | None = None,
        custom_logit_processor: str | list[str] | None = None,
        rid: str | list[str] | None = None,
        **fields: Any,
    ) -> Any:
        """Generate for one prompt, which returns a dict, or for a list of prompts, which returns a list of dicts.

        Give either `prompt` (text) or `input_ids` (token ids). The reply is SGLang's: `output_ids` and `meta_info`,
        with `output_token_logprobs` as `[logprob, token id, text]`, `finish_reason`, and `weight_version` as an int.
        Other keyword arguments are fields of SGLang's `GenerateReqInput`; a field that the server does not know is
        refused. `rid`: request id, a string; with a list of prompts, a list with one id for each prompt. If a list of
        prompts has one string, SGLang appends `_0`, `_1` and so on to it.

        Raises BadInputError for invalid input before it is sent, NotReadyError while memory is released, and
        ServerError when a log probability of an output token is NaN.
        """
        request = {
            **fields,
            "prompt": prompt,
            "sampling_params": sampling_params,
            "input_ids": input_ids,
            "image_data": image_data,
            "return_logprob": return_logprob,
            "logprob_start_len": logprob_start_len,
            "top_logprobs_num": top_logprobs_num,
            "token_ids_logprob": token_ids_logprob,
            "lora_path": lora_path,
            "custom_logit_processor": custom_logit_processor,
            "rid": rid,
        }
        connection = self.connection
        body, limits = await self._generate_body(request)
        connection.requests_in_flight += 1
        try:
            reply = await connection.call(replies.GENERATE, body)
        except (BadInputError, ServerError) as error:
            raise explain_refusal(error, sampling_params) from error.__cause__
        finally:
            connection.requests_in_flight -= 1
        url = connection.base_url + replies.GENERATE.path
        generations = require_answers(reply, body, limits.vocab_size, url)
        correct_aborts(generations, body.get("sampling_params"), limits.end_tokens)
        for each in generations:
            convert_weight_versions(each)
        return reply

    async def generate_stream(
        self,
        /,
        prompt: str | None = None,
        sampling_params: Mapping[str, Any] | None = None,
        input_ids: list[int] | None = None,
        rid: str | None = None,
        **fields: Any,
    ) -> AsyncGenerator[Json, None]:
        """Generate for one prompt and yield replies, each with all tokens so far. A list of prompts is refused.

        A server with SGLang's `incremental_streaming_output` sends each token once; the others send all tokens so far
        in each event. A request for more than 1,024 tokens gets several tokens in each event: the time for whole
        replies grows with the square of the number of events. `sampling_params={"stream_interval": 1}` gets an event
        for each token.

        Other keyword arguments are those of `generate`. Closing the iterator, for example by leaving the `async for`,
        aborts the request on the server. Raises the errors of `generate`.

        Use each `rid` once: two seconds after the end of a stream, SGLang aborts a request that runs with the same id
        (`TokenizerManager.create_abort_task`). The router gives each attempt an id of its own.
        """
        connection = self.connection
        request = {**fields, "prompt": prompt, "sampling_params": sampling_params, "input_ids": input_ids, "rid": rid}
        body, limits = await self._generate_body(request, stream=True)
        server_args = await connection.get_resolved_args()
        _limit_stream_events(body, limits, server_args)
        is_incremental = server_args.get("incremental_streaming_output")
        # With `n` > 1, the events of the samples are mixed. They name the sample by `index`.
        streams: defaultdict[int, IncrementalStream] = defaultdict(IncrementalStream)
        num_checked: defaultdict[int, int] = defaultdict(int)
        params, url = body.get("sampling_params") or {}, connection.base_url + replies.GENERATE.path
        sent_rid = rid if (params.get("n") or 1) == 1 else None  # several samples have ids of their own
        connection.requests_in_flight += 1
        try:
            async for event in connection.http.stream(replies.GENERATE, body):
                connection.needs_continue = False
                require_no_abort(event, url)
                index = event.get("index", 0)
                reply = convert_weight_versions(streams[index].add(event) if is_incremental else event)
                correct_aborts([reply], body.get("sampling_params"), limits.end_tokens)
                num_checked[index] = require_answer(reply, sent_rid, params, limits.vocab_size, url, num_checked[index])
                yield reply
        except (BadInputError, ServerError) as error:
            raise explain_refusal(error, sampling_params) from error.__cause__
        finally:
            connection.requests_in_flight -= 1

    async def abort_request(self, rid: str | None = None, abort_all: bool = False) -> None:
        """Abort the request with the id `rid` and all requests whose id starts with `rid`, or all requests.

        SGLang does nothing if there is no request with the id `rid` itself. vLLM aborts the others in this case, too.
        """
        require(abort_all or bool(rid), "abort_request needs a non-empty rid, or abort_all=True")
        await self.connection.call(replies.ABORT, {"rid": rid or "", "abort_all": abort_all})

    async def pause_generation(self, mode: str = PauseMode.ABORT) -> None:
        """Pause generation. New requests wait in the server; `PauseMode` says what happens to running requests."""
        await self.connection.call(replies.PAUSE, pause_payload(mode))
        self.connection.paused = True

    async def continue_generation(self) -> None:
        """Continue after `pause_generation`. Raises NotReadyError while memory is released, by whichever client.

        If another client has released memory since this adapter's pause, requests wait in the server until the memory
        is resumed.
        """
        connection = self.connection
        if not connection.paused:
            await self.update_released_memory()
        await self._require_memory()
        await connection.call(replies.CONTINUE, {})
        connection.paused = connection.is_held = connection.needs_continue = False

    async def flush_cache(self) -> None:
        """Drop the prefix cache. Raises ServerBusyError while requests run that are not paused."""
        try:
            await self.connection.call(replies.FLUSH, {})
        except BadInputError as error:  # SGLang answers 400 when requests are running
            raise ServerBusyError(
                f"the cache of {self.base_url} was not flushed because requests are running: {error.message}",
                url=self.base_url,
            ) from error

    # -- memory -------------------------------------------------------------------------------------

    async def release_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Release memory of the server until `resume_memory_occupation`, which any client of the server can call.

        `tags` are values of `MemoryTag`; None releases all. Generation is paused first, so requests that other clients
        send meanwhile wait in the server. Released weights are undefined after the resume: they must be sent again.

        Raises ServerBusyError while requests run, because SGLang itself would end. Raises BadInputError for unknown
        tags, for tags that are released already, and for a server on an accelerator without `enable_memory_saver`.
        """
        connection = self.connection
        await self.update_released_memory()
        requested = tags_to_release(tags, connection.released_memory)
        server_args = await connection.get_resolved_args()
        require_memory_saver(server_args)
        await self.prepare_release()
        before, undefined_before = connection.released_memory, connection.weights_undefined
        connection.released_memory = before.union(requested)
        connection.weights_undefined = undefined_before or loses_weights(requested, server_args)
        try:
            await connection.call(replies.RELEASE_MEMORY, {"tags": requested})
        except (ServerError, BadInputError) as error:
            if "status" in error.details:  # The server has answered. An SGLang server has released nothing then.
                connection.released_memory, connection.weights_undefined = before, undefined_before
                with contextlib.suppress(VerlServerError):
                    await self.update_released_memory()  # some workers of a vLLM server may have released it
                    connection.weights_undefined |= loses_weights(connection.released_memory, server_args)
                await self.cancel_release()
            raise
        finally:
            connection.is_held = False  # if the answer was lost, another client may have continued generation since

    async def resume_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Take released memory back. `tags` of None resumes all memory that is released, by whichever client.

        When nothing is released any more, the prefix cache is flushed and generation continues, unless this adapter has
        paused it with `pause_generation`. When that has failed, a call without `tags` tries it again. Raises
        BadInputError for tags that are not released.
        """
        connection = self.connection
        await self.update_released_memory()
        if tags is not None or connection.released_memory or not connection.needs_continue:
            requested = tags_to_resume(tags, connection.released_memory)
            if loses_weights(requested, await connection.get_resolved_args()):
                connection.weights_undefined = True
            connection.needs_continue = True
            await connection.call(replies.RESUME_MEMORY, {"tags": requested})
            connection.released_memory = connection.released_memory.difference(requested)
        if not connection.released_memory:
            connection.is_held = False
            await connection.call(replies.FLUSH, {})
            if not connection.paused:
                await connection.call(replies.CONTINUE, {})
            connection.needs_continue = False

    # -- weight updates: the bare endpoints ---------------------------------------------------------

    async def begin_weight_update(self) -> None:
        """Open an update session. When this version of SGLang has no sessions, only check that it can do without.

        A session that a dead trainer left open is closed first. Raises UnsupportedError if an update needs a session.
        """
        if not (await self.capabilities()).update_sessions:
            require_unpacked_experts(await self.connection.get_resolved_args())
            return
        try:
            await self.connection.call(replies.BEGIN_UPDATE, {})
        except VerlServerError as error:
            if "already open" not in error.message:
                raise
            await self.connection.call(replies.END_UPDATE, {})
            await self.connection.call(replies.BEGIN_UPDATE, {})

    async def end_weight_update(self) -> None:
        """Close the update session. The server then finishes quantized layers."""
        if (await self.capabilities()).update_sessions:
            await self.connection.call(replies.END_UPDATE, {})

    async def update_weights_from_tensor(
        self,
        serialized_named_tensors: Sequence[str],
        load_format: str | None = None,
        flush_cache: bool = True,
        weight_version: int | None = None,
    ) -> Json:
        """Load one bucket of tensors. `serialized_named_tensors` holds one base64 payload per TP rank.

        `load_format` is None, "flattened_bucket", or a custom weight loader of the server. Raises BadInputError for
        payloads that would end the server.
        """
        connection = self.connection
        server_args = await connection.get_server_args()
        weight_loaders = server_args.get("custom_weight_loader") or ()
        check_tensor_payloads(serialized_named_tensors, await connection.get_tp_size(), load_format, weight_loaders)
        payloads = {"serialized_named_tensors": list(serialized_named_tensors)}
        body = update_payload(payloads, load_format, flush_cache, weight_version)
        return await connection.call_weights(replies.UPDATE_FROM_TENSOR, body)

    async def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str = "weight_update_group",
        backend: str = "nccl",
    ) -> Json:
        """Join a process group for broadcasts of weights. The trainer, which is rank 0, must join at the same time."""
        body = {
            "master_address": master_address,
            "master_port": master_port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": group_name,
            "backend": backend,
        }
        return await self.connection.call_weights(replies.INIT_UPDATE_GROUP, body)

    async def destroy_weights_update_group(self, group_name: str = "weight_update_group") -> Json:
        """Leave the process group of `init_weights_update_group`."""
        return await self.connection.call_weights(replies.DESTROY_UPDATE_GROUP, {"group_name": group_name})

    async def update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[torch.dtype | str],
        shapes: Sequence[Sequence[int]],
        group_name: str = "weight_update_group",
        flush_cache: bool = True,
        weight_version: int | None = None,
        load_format: str | None = None,
    ) -> Json:
        """Receive tensors by broadcast from the trainer, in the order of `names`."""
        require(
            len(names) == len(dtypes) == len(shapes) > 0,
            f"names, dtypes and shapes must be equally many, and not none: got {len(names)} names, {len(dtypes)} "
            f"dtypes and {len(shapes)} shapes",
        )
        tensors = {
            "names": list(names),
            "dtypes": [str(dtype).removeprefix("torch.") for dtype in dtypes],
            "shapes": [list(shape) for shape in shapes],
            "group_name": group_name,
        }
        body = update_payload(tensors, load_format, flush_cache, weight_version)
        return await self.connection.call_weights(replies.UPDATE_FROM_DISTRIBUTED, body)

    async def update_weights_from_disk(
        self,
        model_path: str | os.PathLike[str],
        load_format: str | None = None,
        flush_cache: bool = True,
        weight_version: int | None = None,
    ) -> Json:
        """Load a checkpoint folder, which the server reads on its own machine.

        The folder must contain all weights if the server's weights were released. Raises ServerError if it is not
        loaded.
        """
        body = update_payload({"model_path": os.fspath(model_path)}, load_format, flush_cache, weight_version)
        try:
            reply = await self.connection.call_weights(replies.UPDATE_FROM_DISK, body)
        except ServerError as error:
            if "body" not in error.details:
                raise
            host = urlsplit(self.base_url).hostname
            raise ServerError(
                f"the server at {self.base_url} could not load {body['model_path']}: {error.details['body']} The "
                f"server reads it on its own machine, {host}: check that the folder is there, at the same path and "
                "complete (a file system that trainer and servers share), and that its tensors fit the model",
                **error.details,
            ) from error
        self.connection.weights_undefined = False
        return reply

    async def update_weight_version(self, weight_version: int, abort_all_requests: bool = False) -> None:
        """Set the version of the weights that the server has now. The weights do not change.

        Raises BadInputError for a version that is not a whole number of at least 0.
        """
        body = {"new_version": weight_version_label(weight_version), "abort_all_requests": abort_all_requests}
        self.connection.known_versions.add(weight_version)
        await self.connection.call(replies.WEIGHT_VERSION, body)

    async def weights_checker(self, action: str = "checksum") -> Json:
        """Compute checksums of the served weights (`checksum`), save a copy of them (`snapshot`) or compare with it."""
        known = ("checksum", "snapshot", "compare", "reset_tensors")
        require(action in known, f"weights_checker knows the actions {known}, got {action!r}")
        return await self.connection.call_weights(replies.WEIGHTS_CHECKER, {"action": action})

    # -- LoRA adapters ------------------------------------------------------------------------------

    async def load_lora_adapter(
        self,
        name: str,
        tensors: Iterable[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor],
        config: Mapping[str, Any],
    ) -> None:
        """Load a LoRA adapter. `tensors` have PEFT's names, `config` is PEFT's `adapter_config.json`.

        Every TP rank compares SHA-256 sums of the tensors that it received. Unlike `VerlEngine.load_lora_adapter`, this
        method does not compare the tensors with the model. Raises BadInputError for a server without `enable_lora`, for
        a configuration that SGLang does not support and for tensors with the same name, and ServerError when the server
        refuses: a LoRA rank above `max_lora_rank`, or a name that is loaded already.
        """
        try:
            pairs = list(as_pairs(tensors))
            tensors = dict(pairs)
        except (TypeError, ValueError) as error:
            raise BadInputError(
                f"tensors must be a dict of tensors by name or pairs of name and tensor: {error}"
            ) from None
        if len(tensors) != len(pairs):
            raise BadInputError("a name occurs more than once in tensors: pass each tensor of a LoRA adapter once")
        plain_config = plain_lora_config(config, tensors)
        server_args = await self.connection.get_resolved_args()
        require_lora(server_args)
        if server_args.get("engine_kind") == EngineKind.VLLM:
            body = vllm_lora_payload(name, tensors, plain_config)
        else:
            body = load_lora_payload(name, tensors, plain_config, await self.connection.get_tp_size())
        await self.connection.call_weights(replies.LOAD_LORA, body)

    async def unload_lora_adapter(self, name: str) -> None:
        """Unload a LoRA adapter. New requests for it are refused at once; returns when its running requests have ended.

        Raises BadInputError for a server without `enable_lora`, and ServerError for a name that is not loaded.
        """
        require_lora(await self.connection.get_resolved_args())
        await self.connection.call_weights(replies.UNLOAD_LORA, {"lora_name": name})

    async def list_lora_adapters(self) -> list[str]:
        """Names of the server's LoRA adapters, whoever loaded them. Empty for a server without `enable_lora`."""
        if not (await self.connection.get_resolved_args()).get("enable_lora"):
            return []
        models = (await self.connection.call(replies.MODELS)).get("data") or []
        return [str(model["id"]) for model in models if model.get("parent") is not None]

    # -- end ------------------------------------------------------------------------------------------

    async def close_connections(self) -> None:
        """Close the connections of the running event loop. The server and other event loops are not affected."""
        await self.connection.http.aclose()

    async def shutdown(self) -> None:
        """End the server, unless it was attached, and close the connections. May be called more than once."""
        await asyncio.to_thread(self.shutdown_process)
        await self.close_connections()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    # -- internal: called by other folders of this package, no part of the public API -------------------

    async def fused_modules(self) -> tuple[tuple[str, ...], ...] | None:
        """Internal. The value of `ServerInfo.fused_modules` for this server."""
        modules = (await self.connection.get_resolved_args()).get("fused_modules")
        return None if modules is None else tuple(tuple(names) for names in modules)

    async def end_update_pause(self) -> None:
        """Internal. End the pause of a weight update. While memory is released, generation continues at its resume."""
        if self.connection.released_memory:
            self.connection.paused = False
        else:
            await self.continue_generation()

    async def prepare_release(self) -> None:
        """Internal. Pause generation for a release of memory: requests that arrive from now on wait in the server.

        Raises ServerBusyError while requests run; nothing is paused then. Does nothing while memory is released.
        """
        connection = self.connection
        if connection.released_memory or connection.is_held:
            return
        await self._require_idle()
        connection.needs_continue = True
        try:
            await connection.call(replies.PAUSE, pause_payload(PauseMode.RETRACT))
        except BaseException:  # the server may have paused: the answer was lost, or the caller was cancelled
            connection.is_held = True
            with contextlib.suppress(VerlServerError):
                await asyncio.shield(self.cancel_release())
            raise
        connection.is_held = True

    async def cancel_release(self) -> None:
        """Internal. Undo `prepare_release`, unless memory was released since or this adapter has paused generation."""
        connection = self.connection
        try:
            is_held = connection.is_held or connection.needs_continue  # the second: an earlier attempt has failed
            if is_held and not connection.released_memory and not connection.paused:
                await connection.call(replies.CONTINUE, {})
                connection.needs_continue = False
        finally:
            connection.is_held = False  # if the answer was lost, generation may continue: the next release pauses again

    async def update_released_memory(self) -> None:
        """Internal. Ask the server which memory is released. Another client may have released or resumed it.

        A server that does not tell (it runs without the SGLang plugin of this package) leaves what this adapter knows.
        """
        released = replies.released_memory(await self.get_server_info())
        if released is not None:
            self.connection.released_memory = released

    def shutdown_process(self) -> None:
        """Internal. End the server's process tree. Blocks; may be called from any thread and more than once."""
        if not self._is_shut_down:
            self._is_shut_down = True
            self._registration.stop()
            self.fail(ShutDownError(f"the adapter of {self.base_url} was shut down"))
        if self.process is not None:
            self.process.stop(self.config.timeouts.stop_s)

    def _on_exit(self, _: ExitStatus) -> None:
        assert self.process is not None
        if self._is_shut_down:
            self.fail(ShutDownError("the adapter was shut down"))
        else:
            self.fail(self.process.died(self.base_url))

    async def _generate_body(self, request: Json, *, stream: bool = False) -> tuple[Json, PromptLimits]:
        """The checked body of `/generate`, and the limits of the server that it was checked with."""
        await self._require_memory()
        await self.connection.require_known_fields(request)
        limits = await self.connection.get_limits()
        return generate_payload(limits, request, stream=stream), limits

    async def _require_memory(self) -> None:
        """Raise NotReadyError while memory is released. The server is asked only if this adapter knows of a release."""
        connection = self.connection
        if connection.released_memory:
            await self.update_released_memory()
        if connection.released_memory:
            raise NotReadyError(
                f"the server at {connection.base_url} has released {sorted(connection.released_memory)}: "
                "call resume_memory_occupation first",
                url=connection.base_url,
            )

    async def _require_idle(self) -> None:
        """Raise ServerBusyError while requests run.

        A scheduler publishes its load before a finished request leaves it, and again when it is idle. So a request that
        the load contains may have ended, and the load is read again until `LOAD_TIMEOUT_S`.
        """
        connection = self.connection
        deadline = time.monotonic() + LOAD_TIMEOUT_S
        while num_requests := (connection.requests_in_flight or count_requests(await connection.call(replies.LOADS))):
            if not connection.requests_in_flight and time.monotonic() < deadline:
                await asyncio.sleep(LOAD_POLL_S)
                continue
            raise ServerBusyError(
                f"{num_requests} requests run on {connection.base_url}: wait for them or abort them, then release",
                url=connection.base_url,
            )


def _limit_stream_events(body: Json, limits: PromptLimits, server_args: Json) -> None:
    """Set the number of tokens per event (`stream_interval`) of a long generation, unless the caller has set it."""
    params = body.get("sampling_params") or {}
    limits_of_tokens = (params.get("max_new_tokens", 0), limits.max_prompt_tokens)  # None: no limit, or not known
    max_tokens = min((number for number in limits_of_tokens if number is not None), default=0)
    interval = math.ceil(max_tokens / MAX_STREAM_EVENTS)
    if params.get("stream_interval") is None and interval > (server_args.get("stream_interval") or 1):
        body["sampling_params"] = {**params, "stream_interval": interval}
