"""Rendering of chat messages to token ids."""
