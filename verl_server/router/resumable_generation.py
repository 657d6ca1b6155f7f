"""One sample, once: what has arrived of a generation, and what is still to be asked for when its server is lost.

Pure. Token ids make it exact: the next attempt's prompt is the old one and the tokens that have arrived. What
the engine computes from the whole output (a grammar, stop strings, penalties) cannot be taken up in the middle;
such a sample begins again, and as nothing of it was handed out it is still one sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_server.errors import BadInputError

Json = dict[str, Any]

#: What SGLang generates when nothing is said.
DEFAULT_MAX_NEW_TOKENS = 128
#: Sampling parameters whose meaning hangs on where the output began; with these values it does not.
_HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "json_schema": (None,), "regex": (None,), "ebnf": (None,), "structural_tag": (None,),
    "stop": (None, [], ""), "stop_regex": (None, [], ""),
    "frequency_penalty": (None, 0), "presence_penalty": (None, 0), "repetition_penalty": (None, 1),
}  # fmt: skip
#: Lists of the reply's `meta_info` with one entry for each token of the output.
_PER_TOKEN = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")


class ResumableGeneration:
    """A generation for one prompt. `request`: keyword arguments of the adapter's `generate`."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        self.request = dict(request)
        params = self.request.get("sampling_params") or {}
        if not isinstance(params, Mapping):
            raise BadInputError("one sample has one sampling_params, a dict")
        prompt = self.request.get("input_ids")
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], list):
            raise BadInputError("one sample has one prompt; make one call for each")
        self._prompt: list[int] | None = prompt
        self._params: Json = dict(params)
        if self._params.get("n") not in (None, 1):
            raise BadInputError("one sample is n=1; make a call for each sample, with an id of its own")
        self._parts: list[Json] = []
        """The last event of each attempt that brought tokens."""
        self._event: Json | None = None
        self._labels: list[tuple[int, Any]] = []
        """Of each event of the running attempt: how many tokens it had, and the weight version of its server then."""
        self.attempts = 0

    @property
    def can_continue(self) -> bool:
        """Whether an interrupted sample goes on from the tokens that have arrived."""
        if self._prompt is None or self.request.get("return_routed_experts") or self.request.get("image_data"):
            return False
        return all(self._params.get(name) in harmless for name, harmless in _HARMLESS.items())

    @property
    def tokens(self) -> list[int]:
        """The output so far."""
        return [token for part in self._all_parts() for token in part["output_ids"]]

    def begin(self) -> Json:
        """The request of the next attempt."""
        self.attempts += 1
        have = self.tokens
        params = dict(self._params)
        if have:
            params["max_new_tokens"] = self._wanted - len(have)
            if params.get("min_new_tokens"):
                params["min_new_tokens"] = max(0, params["min_new_tokens"] - len(have))
        body = {**self.request, "sampling_params": params}
        if have:
            assert self._prompt is not None
            body["input_ids"] = [*self._prompt, *have]
            if body.get("logprob_start_len") is not None:
                body["logprob_start_len"] = -1  # the prompt's logprobs have come with the first attempt
        return body

    def arrived(self, event: Json) -> None:
        """The reply of the running attempt as it stands now."""
        self._event = event
        self._labels.append((len(event["output_ids"]), event["meta_info"].get("weight_version")))

    def interrupted(self) -> None:
        """The running attempt will not go on. What it has brought is kept, as far as its weights are certain."""
        (event, self._event), (labels, self._labels) = (self._event, None), (self._labels, [])
        if event is None or not self.can_continue:
            return
        if not event["meta_info"].get("weight_versions"):  # SGLang tells the spans with the last event only
            event = _cut(event, *_certain(labels))
        if event["output_ids"]:
            self._parts.append(event)

    @property
    def _wanted(self) -> int:
        wanted = self._params.get("max_new_tokens")
        return DEFAULT_MAX_NEW_TOKENS if wanted is None else int(wanted)

    @property
    def left(self) -> int:
        """Tokens that are still to come, at most."""
        return self._wanted - len(self.tokens)

    @property
    def is_full(self) -> bool:
        """Whether all tokens that were asked for are there, though no attempt said that it had finished."""
        return bool(self._parts) and self._event is None and len(self.tokens) >= self._wanted

    @property
    def is_partial(self) -> bool:
        """Whether it was aborted before its end; asked for again, it goes on."""
        reason = (self._event or {}).get("meta_info", {}).get("finish_reason") or {}
        return bool(reason.get("type") == "abort")

    def _all_parts(self) -> list[Json]:
        return [*self._parts, *([self._event] if self._event is not None else [])]

    def reply(self) -> Json:
        """The whole reply, as one attempt would have brought it; `meta_info.attempts` says how many there were."""
        parts = self._all_parts()
        if not parts:
            raise ValueError("nothing has arrived")
        last = parts[-1]
        meta: Json = {**parts[0]["meta_info"], **last["meta_info"], "attempts": self.attempts}
        if len(parts) > 1:
            tokens = self.tokens
            for name in ("prompt_tokens", "cached_tokens"):
                if name in parts[0]["meta_info"]:
                    meta[name] = parts[0]["meta_info"][name]
            meta["completion_tokens"] = len(tokens)
            meta["weight_versions"] = spans_of(parts)
            for name in _PER_TOKEN:
                if name in last["meta_info"]:
                    meta[name] = [entry for part in parts for entry in part["meta_info"].get(name) or []]
        if self.is_full:
            meta["finish_reason"] = {"type": "length", "length": self._wanted}
        whole = {**last, "output_ids": self.tokens, "meta_info": meta}
        whole.pop("text", None)
        if all("text" in part for part in parts):
            whole["text"] = "".join(part["text"] for part in parts)
        return whole


def _certain(labels: Sequence[tuple[int, Any]]) -> tuple[int, Any]:
    """How many tokens were certainly made with the first label's weights, and that label.

    What comes between two events with different labels may have been made before or after the update.
    """
    version = labels[0][1]
    count = 0
    for tokens, label in labels:
        if label != version:
            break
        count = tokens
    return count, version


def _cut(event: Json, count: int, version: Any) -> Json:
    """The event with its first `count` tokens, all of that version."""
    meta = dict(event["meta_info"], completion_tokens=count)
    meta["weight_versions"] = [{"version": version, "start": 0, "end": count}] if count else []
    for name in _PER_TOKEN:
        if meta.get(name):
            meta[name] = meta[name][:count]
    cut = {**event, "output_ids": event["output_ids"][:count], "meta_info": meta}
    if count < len(event["output_ids"]):
        cut.pop("text", None)  # nobody knows which of it these tokens are
    return cut


def spans_of(parts: list[Json]) -> list[Json]:
    """Which weights made which tokens of the whole output: `version`, `start`, `end`."""
    spans: list[Json] = []
    offset = 0
    for part in parts:
        meta, length = part["meta_info"], len(part["output_ids"])
        own = meta.get("weight_versions") or [{"version": meta.get("weight_version"), "start": 0, "end": length}]
        for span in own:
            start, end = offset + span["start"], offset + span["end"]
            if spans and spans[-1]["version"] == span["version"]:
                spans[-1]["end"] = end
            elif end > start:
                spans.append({"version": span["version"], "start": start, "end": end})
        offset += length
    return spans


def one_by_one(body: Mapping[str, Any]) -> list[Json] | None:
    """A request for each of several prompts; None for one prompt."""
    which = "input_ids" if body.get("input_ids") is not None else "prompt"
    prompts = body.get(which)
    if not isinstance(prompts, list) or not prompts or (which == "input_ids" and not isinstance(prompts[0], list)):
        return None
    params = body.get("sampling_params")
    each = params if isinstance(params, list) else [params] * len(prompts)
    if len(each) != len(prompts):
        raise BadInputError(f"{len(each)} sampling_params for {len(prompts)} prompts")
    return [{**body, which: one, "sampling_params": own} for one, own in zip(prompts, each, strict=True)]
