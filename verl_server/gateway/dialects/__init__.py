"""The dialects of the gateway, one file each.

- `base.py`: what a dialect and its streams have to do; fields, schemas, known items, the field `tool_choice`.
- `content.py`: the content of messages: texts and images; which images the policy reads.
- `chat.py`: OpenAI's `/v1/chat/completions` and `/v1/completions`.
- `anthropic.py`: Anthropic's `/v1/messages`.
- `responses.py`: OpenAI's `/v1/responses`.
"""

from __future__ import annotations

from verl_server.gateway.dialects.anthropic import AnthropicDialect
from verl_server.gateway.dialects.base import Dialect
from verl_server.gateway.dialects.chat import ChatDialect, CompletionsDialect
from verl_server.gateway.dialects.responses import ResponsesDialect

DIALECTS: tuple[Dialect, ...] = (ChatDialect(), AnthropicDialect(), ResponsesDialect(), CompletionsDialect())
"""All dialects."""
