"""SGLang's own protocol: endpoints, request bodies, replies, server arguments and command line.

Facts were read in SGLang 0.5.15 and 0.5.23: `sglang/srt/entrypoints/http_server.py` (routes, status codes),
`sglang/srt/managers/io_struct.py` (fields), `sglang/srt/utils/auth.py` (which key opens which route). `requests`
and `replies` are pure: they open no socket and start no process.
"""
