"""How the trainer ranks of one engine agree on every call."""
