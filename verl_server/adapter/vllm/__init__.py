"""vLLM's own protocol: start of a server, server arguments, endpoints, request bodies and replies.

Facts were read and tried in vLLM 0.32.0 (`vllm/entrypoints/`). `requests` and `replies`
are pure: they open no socket and start no process.
"""
