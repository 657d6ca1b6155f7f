"""Requests of verl and the replies to them, as pure functions; and `Generations`, which can be aborted all together."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from verl_server.errors import BadInputError, NotReadyError, UnsupportedError
from verl_server.integrations.verl.settings import LORA_NAME, FleetSpec
from verl_server.router.dispatcher import RolloutRouter
from verl_server.trajectory.rendering.vision import image_data_url
from verl_server.types import Json

# -- Token output -----------------------------------------------------------------------------------
# verl's reply to a request, sent from a process that does not import verl.
#
# The import of verl costs about 12 s of CPU time and 0.5 GB of memory.


@dataclass(frozen=True)
class TokenOutput:
    """Becomes verl's `TokenOutput` (`verl/workers/rollout/replica.py`) in the process that receives it."""

    token_ids: list[int]
    log_probs: list[float] | None
    """Log probabilities of `token_ids` in nats."""
    stop_reason: str
    """SGLang's type of the end: "stop", "length" or "abort"."""
    num_preempted: int
    """Number of times that the generation was continued, on another server or after an update."""
    extra_fields: Json = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        return _make_token_output, (asdict(self),)


def _make_token_output(fields: Json) -> Any:
    from verl.workers.rollout import replica

    return replica.TokenOutput(**fields)


# -- Generation -------------------------------------------------------------------------------------

TEXT_ONLY = ("detokenize",)
"""Sampling parameters of vLLM that verl's teachers set, and that change only text."""
NOT_READY_DELAY_S = 1.0
"""Seconds until a request is made again after the fleet was not ready."""
ABORT = "abort"
"""Type of the finish reason of aborted requests, and the reason for which `Generations.abort` holds requests."""


def make_request(
    spec: FleetSpec, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any], image_data: Sequence[Any] | None
) -> Json:
    """The arguments of `RolloutRouter.generate` for a request of verl.

    Raises BadInputError for a prompt that does not fit the context.
    """
    params = {name: value for name, value in sampling_params.items() if name not in TEXT_ONLY}
    returns_logprobs = params.pop("logprobs", False) not in (False, None)
    num_prompt_logprobs = params.pop("prompt_logprobs", None)
    limits = [params.pop(name) for name in ("max_new_tokens", "max_tokens") if name in params]
    prompt = [int(token) for token in prompt_ids]
    params["max_new_tokens"] = _max_new_tokens(spec, len(prompt), next(iter(limits), None))
    request: Json = {"input_ids": prompt, "sampling_params": params, "return_logprob": returns_logprobs}
    if num_prompt_logprobs is not None:
        request |= {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": int(num_prompt_logprobs)}
    if image_data:
        request["image_data"] = [image_data_url(image) for image in image_data]
    if spec.uses_lora:
        request["lora_path"] = LORA_NAME
    return request


def _max_new_tokens(spec: FleetSpec, num_prompt_tokens: int, limit: int | None) -> int:
    """The limit of the request. Without one, what the prompt leaves of verl's prompt and response lengths."""
    if limit is None:
        limit = min(spec.response_length, spec.prompt_length + spec.response_length - num_prompt_tokens)
    if spec.context_length is not None:
        room = spec.context_length - num_prompt_tokens - 1
        if room < 0:
            raise BadInputError(
                f"the prompt has {num_prompt_tokens} tokens, but the context of the model has {spec.context_length}; "
                "lower data.max_prompt_length, or filter overlong prompts (data.filter_overlong_prompts=True)"
            )
        limit = min(limit, room)
    return max(0, int(limit))


def require_no_other_media(media: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for video and audio."""
    for name, value in media.items():
        if value is not None and len(value) > 0:
            raise UnsupportedError(f"the rollout verl_server does not support {name}; it supports text and images")


def make_output(request: Json, reply: Mapping[str, Any], steps: Mapping[int, int], latest_step: int) -> TokenOutput:
    """verl's output for a reply to `request`. `steps`: the training step of each weight version."""
    returns_logprobs, num_prompt_logprobs = request["return_logprob"], request.get("top_logprobs_num")
    meta = reply["meta_info"]
    token_ids = list(reply["output_ids"])
    log_probs = None
    if returns_logprobs:
        log_probs = [float(entry[0]) for entry in meta.get("output_token_logprobs") or ()][: len(token_ids)]
    stop_reason = str((meta.get("finish_reason") or {}).get("type") or "stop")
    versions = [span["version"] for span in meta.get("weight_versions") or ()]
    extra = step_fields([steps.get(version, latest_step) for version in versions] or [latest_step])
    extra["num_cached_tokens"] = int(meta.get("cached_tokens") or 0)
    if num_prompt_logprobs is not None and stop_reason != ABORT:
        extra |= prompt_logprobs(meta, num_prompt_logprobs)
    return TokenOutput(
        token_ids=token_ids,
        log_probs=log_probs,
        stop_reason=stop_reason,
        num_preempted=max(0, int(meta.get("attempts") or 1) - 1),
        extra_fields=extra,
    )


def step_fields(steps: Sequence[int]) -> Json:
    """The fields of a reply for the training steps of the weights that its tokens come from."""
    return {"global_steps": steps[-1], "min_global_steps": min(steps), "max_global_steps": max(steps)}


def prompt_logprobs(meta: Json, num_top: int) -> Json:
    """Log probabilities of the prompt's tokens in the form that verl's distillation reads: one row for each token.

    Row i has the tokens at position i + 1: `num_top` candidates, best first, or with 0 the token itself. The last row
    has no token and is zero.
    """
    entries = meta.get("input_top_logprobs" if num_top else "input_token_logprobs") or []
    rows = [entry if num_top else [entry] for entry in entries[1:]]
    width = max(num_top, 1)
    return {
        "prompt_ids": [[int(token) for _, token, *_ in row] for row in rows] + [[0] * width],
        "prompt_logprobs": [[float(logprob) for logprob, *_ in row] for row in rows] + [[0.0] * width],
    }


class Generations:
    """The running requests of verl. They can be held, for several reasons at the same time, and aborted."""

    def __init__(self, router: RolloutRouter) -> None:
        self._router = router
        self._running: dict[str, _Running] = {}
        self._reasons: set[str] = set()
        self._changed = asyncio.Event()
        """Set, and replaced, when requests are released or rejected."""
        self._rejects = False

    @property
    def num_running(self) -> int:
        """Number of requests in the router, also of those that wait there for a server."""
        return len(self._running)

    async def run(self, request: Json, session_id: str | None) -> Mapping[str, Any]:
        """The reply of the router. That of an aborted or rejected request has what was generated, see `abort`.

        Waits while requests are held, and while all servers wait for the next update of the weights. `watch` ends
        the run if no update comes, see `FleetActor.wait_for_loss`.
        """
        while True:
            while self._reasons:
                if self._rejects:
                    return _aborted_reply(None)
                await self._changed.wait()
            try:
                return await self._ask_router(request, session_id)
            except NotReadyError as error:
                if "status" in error.details:  # a server has refused the request
                    raise
            await asyncio.sleep(NOT_READY_DELAY_S)

    async def _ask_router(self, request: Json, session_id: str | None) -> Mapping[str, Any]:
        rid, running = uuid.uuid4().hex, _Running()
        self._running[rid] = running
        try:
            return await self._router.generate(rid=rid, session_id=session_id, **request)
        except asyncio.CancelledError:
            if not running.is_aborting:
                raise
            return _aborted_reply(await asyncio.shield(running.partial))
        finally:
            del self._running[rid]
            running.ended.set()

    def hold(self, reason: str) -> None:
        """Let new requests wait until `release` is called with the same reason."""
        self._reasons.add(reason)

    def release(self, reason: str) -> None:
        """Take requests again, unless they are held for another reason."""
        self._reasons.discard(reason)
        self._wake_up()

    async def abort(self, reject: bool) -> None:
        """Abort all running requests, and hold new ones until `resume`; or reject those, and those that wait.

        The reply of an aborted request has the tokens so far, and the finish reason "abort". A request whose last token
        has arrived is not aborted: its reply is that of the server.
        """
        self.hold(ABORT)
        self._rejects = reject
        self._wake_up()
        aborted = {rid: running for rid, running in self._running.items() if not running.is_aborting}
        for running in aborted.values():
            running.is_aborting = True
        partial: dict[str, Json | None] = {}
        try:
            partial = await self._router.abort(list(aborted))
        finally:  # also if this call was cancelled: the requests must not wait for ever
            for rid, running in aborted.items():
                running.is_aborting = rid in partial
                if not running.partial.done():
                    running.partial.set_result(partial.get(rid))
        for running in aborted.values():
            await running.ended.wait()

    def resume(self) -> None:
        """Undo `abort`."""
        self._rejects = False
        self.release(ABORT)

    def _wake_up(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class _Running:
    """A request in the router."""

    def __init__(self) -> None:
        self.is_aborting = False
        self.partial: asyncio.Future[Json | None] = asyncio.get_running_loop().create_future()
        """What the router had when it aborted the request. None: nothing."""
        self.ended = asyncio.Event()


def _aborted_reply(partial: Json | None) -> Json:
    """The reply of a request that was aborted when it had `partial`."""
    reply = partial or {"output_ids": [], "meta_info": {"output_token_logprobs": []}}
    return {**reply, "meta_info": {**reply["meta_info"], "finish_reason": {"type": ABORT}}}
