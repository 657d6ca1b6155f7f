"""`ServedModels`: the models and LoRA adapters that the replicas of a router serve, as `/v1/models` lists them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from verl_server.errors import BadInputError, NotReadyError, ServerError, UnsupportedError
from verl_server.router.replica import GenerationServer, RoutedReplica
from verl_server.router.replica_pool import ReplicaPool
from verl_server.types import Json

GetJson = Callable[[GenerationServer, str, float], Awaitable[Any]]
"""Function that gets the JSON of a path from a replica's server, within a number of seconds."""
PATH = "/v1/models"
TIMEOUT_S = 5.0
NEXT_CALL_S = 0.2
"""Seconds without an answer after which one more replica is asked at the same time."""
MAX_CALLS = 8
"""Maximum number of replicas that are asked at the same time."""
ADAPTERS_AGE_S = 1.0
"""Seconds for which the list of LoRA adapters is used again."""
SGLANG_DEFAULT_NAME = "default"
"""Name of the base model in SGLang's own clients, whatever the server calls the model."""
_LORA_PATH_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
"""Paths for which SGLang has the field `lora_path`."""


@dataclass(frozen=True)
class ServedModel:
    """What a request needs to know about the model that it names."""

    name: str
    """Name of the model in the reply."""
    lora_path: str | None
    """Name of the LoRA adapter. None: the base model."""
    max_model_len: int | None
    """Length of the context in tokens. None if the replica does not tell it."""


class ServedModels:
    """Asks the replicas for their models. All replicas serve the same base model."""

    def __init__(self, pool: ReplicaPool, get_json: GetJson, lora_names: Callable[[], Collection[str]] = tuple) -> None:
        """`lora_names` returns the adapters that each admitted replica has for certain."""
        self._pool, self._get_json, self._lora_names = pool, get_json, lora_names
        self._name: str | None = None
        """Name of the base model when the router first asked. SGLang names it after the folder of the last update."""
        self._base: dict[str, Json] = {}
        """The base model by its name, as `/v1/models` describes it."""
        self._is_vllm = False
        """Whether vLLM has listed the models."""
        self._adapters: dict[str, Json] = {}
        self._listed_at = -ADAPTERS_AGE_S

    @property
    def base_names(self) -> Collection[str]:
        """The known names of the base model."""
        return self._base.keys()

    async def listing(self) -> Json:
        """The reply of `/v1/models`. A LoRA adapter has the `max_model_len` of its base model, too.

        Raises NotReadyError if no replica answers.
        """
        replicas = list(self._pool.replicas.values())
        return await self._ask([each for each in replicas if each.admitted] or replicas)

    async def _ask(self, replicas: Iterable[RoutedReplica]) -> Json:
        """The listing of the first replica that answers. As long as the first one does, its name is the model's."""
        problem, limit = "the router has no replica", asyncio.Semaphore(MAX_CALLS)

        async def ask(place: int, replica: RoutedReplica) -> list[Json]:
            if place > 0:  # the one before it may fail at once
                await asyncio.wait([calls[place - 1]], timeout=place * NEXT_CALL_S)
            async with limit:
                return await self._get_cards(replica)

        calls = [asyncio.create_task(ask(place, replica)) for place, replica in enumerate(replicas)]
        try:
            for call in asyncio.as_completed(calls):
                try:
                    cards = await call
                except (ServerError, KeyError, TypeError, ValueError) as error:
                    problem = f"{error}"
                    continue
                self._remember(cards)
                return {"object": "list", "data": cards}
        finally:
            for task in calls:
                task.cancel()
            await asyncio.gather(*calls, return_exceptions=True)  # asyncio logs an error that nobody has taken
        raise NotReadyError(f"no replica has listed its models: {problem}")

    async def _get_cards(self, replica: RoutedReplica) -> list[Json]:
        listing = await self._get_json(replica.server, PATH, TIMEOUT_S)
        return [dict(card) for card in listing["data"]]

    async def learn_name(self) -> None:
        """Ask for the name of the base model, which an update of the weights changes, if it is not known yet.

        Only admitted replicas are asked, within `TIMEOUT_S` together.
        """
        if self._name is None:
            with contextlib.suppress(NotReadyError, TimeoutError):
                async with asyncio.timeout(TIMEOUT_S):
                    await self._ask([replica for replica in self._pool.replicas.values() if replica.admitted])

    def _remember(self, cards: list[Json]) -> None:
        """Keep what later requests need. The base model keeps its name, and adapters get the length of its context."""
        base = [card for card in cards if card.get("parent") is None]
        if len(base) == 1:  # vLLM may list further names of the same model, and never changes them
            self._name = self._name or str(base[0].get("id"))
            base[0].update(id=self._name, root=self._name)
        for card in cards:
            if base and card.get("max_model_len") is None:
                card["max_model_len"] = base[0].get("max_model_len")
            if card.get("parent") is not None:
                card["parent"] = self._name or card["parent"]
        self._base = {str(card.get("id")): card for card in base}
        self._is_vllm = any(card.get("owned_by") == "vllm" for card in base)
        self._adapters = {str(card["id"]): card for card in cards if card.get("parent") is not None}
        self._listed_at = time.monotonic()

    async def find(self, name: Any) -> ServedModel:
        """The model with this name; None stands for the base model. Raises BadInputError (404) for an unknown name."""
        if name is not None and not isinstance(name, str):
            raise BadInputError(f"model must be a string, got {type(name).__name__}")
        if not self._base:
            await self.listing()
        if not self._base:
            raise NotReadyError("the replicas list no model")
        if name is None or name in self._base:
            found = next(iter(self._base)) if name is None else name
            return ServedModel(found, None, self._base[found].get("max_model_len"))
        if name in self._lora_names():
            return ServedModel(name, name, next(iter(self._base.values())).get("max_model_len"))
        if name not in self._adapters or time.monotonic() - self._listed_at > ADAPTERS_AGE_S:
            await self.listing()
        if name not in self._adapters:
            known = sorted([*self._base, *self._adapters])
            raise BadInputError(f"The model `{name:.200}` does not exist. The replicas serve {known}", status=404)
        return ServedModel(name, name, self._adapters[name].get("max_model_len"))

    async def with_adapter(self, path: str, body: Json) -> Json:
        """The body of a request that is forwarded, so that also SGLang uses the LoRA adapter that `model` names.

        vLLM selects an adapter by its name. SGLang needs `lora_path`, or the name of the base model before the name of
        the adapter, and answers with the base model otherwise. Raises BadInputError (404) for an unknown name, and
        UnsupportedError for an adapter at a path where SGLang uses none. A body without `model` is not changed.
        """
        name, adapters = body.get("model"), {*self._adapters, *self._lora_names()}
        if name in (None, "") or (name == SGLANG_DEFAULT_NAME and name not in adapters):
            return body
        try:
            model = await self.find(name)
        except BadInputError:
            if self._is_sglang_name(name):
                return body
            raise
        if model.lora_path is None or self._is_vllm:
            return body
        if path in _LORA_PATH_PATHS:
            return {**body, "lora_path": model.lora_path}
        if path == "/v1/messages":
            return {**body, "model": f"{next(iter(self._base))}:{model.lora_path}"}
        raise UnsupportedError(f"SGLang uses no LoRA adapter at {path}: send the request to /v1/chat/completions")

    def _is_sglang_name(self, name: Any) -> bool:
        """Whether a name is `BASE:ADAPTER`, which is SGLang's form."""
        if not isinstance(name, str):
            return False
        known = {*self._adapters, *self._lora_names()}
        return any(name.startswith(f"{base}:") and name[len(base) + 1 :] in known for base in self._base)
