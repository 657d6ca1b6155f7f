"""The HTTP routes with which a vLLM server answers as an SGLang server of this library does.

The routes run in vLLM's API server, in front of its own routes, and call these routes inside the process. Clients, the
router and the gateway therefore speak one protocol with both engines. What the routes need to know, for example whether
generation is paused, is kept here once for all clients.

app.py            `ServerApp`: keys, then the routes of this folder, then vLLM's own
inner_calls.py    `InnerCalls`: calls of vLLM's own routes inside the process
state.py          `ServerState`: pause, running requests, released memory
replies.py        replies as JSON, and the status of an error
generation.py     `/generate`, whole and as a stream
abort.py          `/abort_request`
control.py        pause, continue, flush of the cache
memory.py         release and resume of memory
lora.py           LoRA adapters
weights.py        updates of weights and their version
worker_calls.py   calls of the methods of all workers, whose replies are checked
information.py    what the server says about itself
"""
