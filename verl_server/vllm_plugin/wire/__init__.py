"""The HTTP routes with which a vLLM server answers as an SGLang server of this library does.

The routes run in vLLM's API server, in front of its own routes, and call these routes inside the process. Clients, the
router and the gateway therefore speak one protocol with both engines. What the routes need to know, for example whether
generation is paused, is kept here once for all clients.

app.py         `ServerApp`: keys, then the routes of this folder, then vLLM's own; what the server says about itself
state.py       `ServerState`: pause, running requests, released memory; calls inside the server and to its workers
generation.py  `/generate`, whole and as a stream
control.py     pause, flush of the cache, memory, weights, LoRA adapters, `/abort_request`
"""
