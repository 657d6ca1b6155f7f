"""Rendering of chat messages to token ids.

messages.py         which messages are valid, which images they contain, and the calls that are parsed from turns
tokenizer.py        what a renderer needs of a tokenizer
token_codec.py      `TokenCodec`: texts to token ids and back, without the work around the Rust code of a tokenizer
chat_renderer.py    `ChatRenderer`: messages with any chat template, turn by turn
turn_ends.py        the tokens at the end of a turn
call_turns.py       `CallTurns`: turns with tool calls in a chat template, and the text after them
prompt_cache.py     `PromptCache`: first prompts that were rendered a moment ago
probes.py           the conversations with which `ChatRenderer` checks a chat template
families.py         `FamilyRenderer`: messages of a known model family; `get_renderer`
family_calls.py     calls that the package `renderers` has parsed, and the results of these calls
foreign_text.py     control tokens in the text of messages, which must not become control tokens
truncation.py       truncation of long texts to a number of tokens
images.py           images of messages: their bytes, and how they are sent to a server
vision_renderer.py  `VisionRenderer`: messages with images
"""
