"""Prompts as token ids, and completions as TRL's reward functions get them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Messages = list[dict[str, Any]]


def prompt_token_ids(tokenizer: Any, prompt: str | Messages, template_kwargs: Mapping[str, Any]) -> list[int]:
    """Token ids of a text, or of messages rendered by the chat template with `template_kwargs`."""
    if isinstance(prompt, str):
        return list(tokenizer(text=prompt)["input_ids"])
    ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False, **template_kwargs)
    return list(ids)


def completion_value(
    tokenizer: Any, prompt: str | Messages, prompt_ids: Sequence[int], token_ids: Sequence[int]
) -> str | Messages:
    """A completion for reward functions: a text for a prompt that is a text, otherwise a list of one message.

    A tokenizer with a response template or schema splits the message into its thoughts and its content.
    """
    if isinstance(prompt, str):
        return str(tokenizer.decode(token_ids, skip_special_tokens=True))
    names = ("response_template", "response_schema")
    if any(getattr(tokenizer, name, None) is not None for name in names):
        from trl.chat_template_utils import parse_response

        return [parse_response(tokenizer, list(token_ids), prefix=list(prompt_ids), tools=None)]
    return [{"role": "assistant", "content": tokenizer.decode(token_ids, skip_special_tokens=True)}]
