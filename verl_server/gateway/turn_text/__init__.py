"""Turns as text: the thoughts, the text and the tool calls of finished turns and of turns that are being generated."""
