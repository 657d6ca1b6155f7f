"""Rendering of known model families, by the package `renderers`: their templates written out by hand, token by token.

A family knows what a template does not tell: which tokens are a call, where a thought ends, how a turn that was cut
off is closed. What it says is checked all the same: the next prompt must begin with the recorded tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pydantic
from renderers import ToolCallParseStatus, create_renderer
from renderers.base import MODEL_RENDERER_MAP
from renderers.configs import config_from_name

from verl_server.errors import BadInputError, UnsupportedError
from verl_server.trajectory.rendering import Call, Json, Message, Renderer, require_messages


def renderer_for(tokenizer: Any, family: str | None = None) -> Renderer:
    """The family's renderer, or else the generic one.

    `family`: a name of `renderers` ("qwen3", "llama3", ...). None: by the tokenizer's `name_or_path`, which must be a
    released model's; a fine-tuned one may have changed its template, so it is named or proved. Raises
    UnsupportedError.
    """
    known = family or MODEL_RENDERER_MAP.get(str(getattr(tokenizer, "name_or_path", "")))
    return Renderer(tokenizer) if known is None else FamilyRenderer(tokenizer, known)


class FamilyRenderer(Renderer):
    """Of one family. Thoughts stay in the history: what was sampled is what is trained on."""

    def __init__(self, tokenizer: Any, family: str) -> None:
        self._tokenizer, self._name = tokenizer, family
        try:
            self._family: Any = create_renderer(tokenizer, _config(family))
        except Exception as error:
            raise UnsupportedError(f"this tokenizer is not of the family {family!r}: {error}") from error

    def first(self, messages: Sequence[Message], tools: Sequence[Json] | None = None) -> list[int]:
        require_messages(messages)
        try:
            ids = self._family.render_ids(_plain(messages), tools=list(tools or ()) or None, add_generation_prompt=True)
        except Exception as error:
            raise BadInputError(f"the family {self._name!r} refuses these messages: {error}") from error
        return [int(token) for token in ids]

    def suffix(self, messages: Sequence[Message], after: Sequence[int], before: Sequence[int] = ()) -> list[int]:
        require_messages(messages)
        prompt = list(before or self._family.get_stop_token_ids()[:1])  # it wants one, and asks it for open thoughts
        said = [*prompt, *after]
        try:
            bridged = self._family.bridge_to_next_turn(prompt, list(after), _plain(messages))
        except Exception as error:
            raise BadInputError(f"the family {self._name!r} refuses these messages: {error}") from error
        whole = [] if bridged is None else [int(token) for token in bridged.token_ids]
        if whole[: len(said)] != said:
            raise BadInputError(
                f"the family {self._name!r} cannot let {[message['role'] for message in messages]} follow what was said"
            )
        return whole[len(said) :]

    def calls(self, ids: Sequence[int], before: Sequence[int], tools: Sequence[Json]) -> list[Call] | None:
        parsed = self._family.parse_response(list(ids), tools=list(tools) or None, prompt_ids=list(before) or None)
        return [_call(one) for one in parsed.tool_calls]


def _config(family: str) -> Any:
    config = config_from_name(family)
    try:
        return type(config)(thinking_retention="all")
    except (pydantic.ValidationError, NotImplementedError):
        return config


def _call(parsed: Any) -> Call:
    if parsed.status is not ToolCallParseStatus.OK:
        return Call(parsed.raw, parsed.name, None, str(parsed.status.value))
    if not isinstance(parsed.arguments, dict):
        return Call(parsed.raw, parsed.name, None, "its arguments are no object")
    return Call(parsed.raw, parsed.name, parsed.arguments, None)


def _plain(messages: Sequence[Message]) -> list[Json]:
    return [dict(message) for message in messages]
