"""The dialects of the gateway, one file each.

- `dialect.py`: what a dialect has to do; `reply_stream.py`: what its streams have to do.
- `chat.py`: OpenAI's `/v1/chat/completions`.
- `anthropic_messages.py`: Anthropic's `/v1/messages`.
- `anthropic_content.py`: the messages, content blocks and tools of that dialect.
- `responses.py`: OpenAI's `/v1/responses`; `responses_input.py` reads the conversation, `responses_stream.py` has
  the items and the events of streams.
- `tool_choice.py`: the field `tool_choice` of these APIs.
- `completions.py`: OpenAI's `/v1/completions`.
"""

from __future__ import annotations

from verl_server.gateway.dialects.anthropic_messages import AnthropicDialect
from verl_server.gateway.dialects.chat import ChatDialect
from verl_server.gateway.dialects.completions import CompletionsDialect
from verl_server.gateway.dialects.dialect import Dialect
from verl_server.gateway.dialects.responses import ResponsesDialect

DIALECTS: tuple[Dialect, ...] = (ChatDialect(), AnthropicDialect(), ResponsesDialect(), CompletionsDialect())
"""All dialects."""
