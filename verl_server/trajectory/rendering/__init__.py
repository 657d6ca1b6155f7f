"""Rendering of chat messages to token ids.

messages.py       which messages are valid, which images they contain, and the calls that are parsed from turns
tokenizer.py      what a renderer needs of a tokenizer: texts to token ids and back, truncation
chat_renderer.py  `ChatRenderer`: messages with any chat template, turn by turn
families.py       `FamilyRenderer`: messages of a known model family; `get_renderer`
foreign_text.py   control tokens in the text of messages, which must not become control tokens
vision.py         `VisionRenderer`: messages with images
"""
