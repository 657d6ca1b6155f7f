"""Generation over HTTP."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from verl_server.adapter import sglang as api
from verl_server.adapter.calls_information import InformationCalls
from verl_server.adapter.model_files import read_model_config
from verl_server.config import PauseMode
from verl_server.errors import BadInputError, NotReadyError, ServerBusyError

Json = dict[str, Any]


class GenerationCalls(InformationCalls):
    """Generate, abort, pause, continue, flush."""

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
        """Generate for one prompt (a dict comes back) or a list of prompts (a list of dicts).

        The reply is SGLang's own: `output_ids` and `meta_info` with `output_token_logprobs` as
        `[logprob, token id, text]`, `finish_reason`, `weight_version`. Further keyword arguments are fields
        of SGLang's `GenerateReqInput`. Raises BadInputError before sending what the server cannot take,
        NotReadyError while its memory is released, ServerDiedError when it ends.
        """
        given = {
            "image_data": image_data,
            "return_logprob": return_logprob,
            "logprob_start_len": logprob_start_len,
            "top_logprobs_num": top_logprobs_num,
            "token_ids_logprob": token_ids_logprob,
            "lora_path": lora_path,
            "custom_logit_processor": custom_logit_processor,
            **fields,
        }
        body = await self._generate_body(prompt, sampling_params, input_ids, rid, False, given)
        self._in_flight += 1
        try:
            return await self._http.call(api.GENERATE, body)
        finally:
            self._in_flight -= 1

    async def generate_stream(
        self,
        /,
        prompt: str | None = None,
        sampling_params: Mapping[str, Any] | None = None,
        input_ids: list[int] | None = None,
        rid: str | None = None,
        **fields: Any,
    ) -> AsyncGenerator[Json, None]:
        """`generate` for one prompt, as it grows: each item is the whole reply so far.

        Closing the iterator (leaving the `async for`) aborts the request on the server.
        """
        body = await self._generate_body(prompt, sampling_params, input_ids, rid, True, fields)
        self._in_flight += 1
        try:
            async for event in self._http.stream(api.GENERATE, body):
                yield event
        finally:
            self._in_flight -= 1

    async def _generate_body(
        self,
        prompt: Any,
        sampling_params: Any,
        input_ids: Any,
        rid: Any,
        stream: bool,
        fields: Mapping[str, Any],
    ) -> Json:
        if self._asleep:
            raise NotReadyError(
                f"the server at {self.base_url} has released {sorted(self._asleep)}; "
                "call resume_memory_occupation first",
                url=self.base_url,
            )
        return api.generate_payload(
            await self.learn_limits(),
            prompt=prompt,
            sampling_params=sampling_params,
            input_ids=input_ids,
            rid=rid,
            stream=stream,
            fields=fields,
        )

    async def learn_limits(self) -> api.Limits:
        """What this server accepts; asked once."""
        if self._limits is None:
            info = await self.get_server_info()
            self._limits = api.limits_of(info, read_model_config(str(info.get("model_path"))))
        return self._limits

    async def abort_request(self, rid: str | None = None, abort_all: bool = False) -> None:
        """End requests whose id *begins* with `rid` (SGLang matches prefixes), or all."""
        await self._http.call(api.ABORT, api.abort_payload(rid, abort_all))

    async def pause_generation(self, mode: str = PauseMode.ABORT) -> None:
        """Hold generation; new requests wait. See `PauseMode`."""
        await self._http.call(api.PAUSE, api.pause_payload(mode))
        self._paused = True

    async def continue_generation(self) -> None:
        """Go on after `pause_generation`. Refused (NotReadyError) while memory is released."""
        if self._asleep:
            raise NotReadyError(f"cannot continue while {sorted(self._asleep)} is released", url=self.base_url)
        await self._http.call(api.CONTINUE, {})
        self._paused = False

    async def flush_cache(self) -> None:
        """Forget the prefix cache. Raises ServerBusyError when requests run that are not paused."""
        try:
            await self._http.call(api.FLUSH, {})
        except BadInputError as error:
            raise ServerBusyError(
                f"the cache of {self.base_url} was not flushed because requests are running: {error.message}",
                url=self.base_url,
            ) from error
