"""What only a machine without an accelerator needs. A reader with GPUs never opens this folder.

A server with an accelerator imports nothing from here. Others do it in a few functions, each of which has asked first
whether there is an accelerator; `tests/srt/test_units.py` has the list.

platform.py         SGLang's platform: defaults of the server arguments, refusals, size of the KV cache
hooks.py            SGLang's processes: release of memory over HTTP, pinned memory, idle schedulers, forked workers
memory.py           memory that goes back to the system while its addresses stay, and the hooks that release it
seeds.py            `sampling_seed` of a request
forkserver.py       fast start: the trainer's side of the forkserver
forkserver_main.py  the process that has imported an engine and forks servers
sglang_server.py    what the forkserver imports and runs for SGLang
vllm_fork.py        the same for vLLM, and how the processes and threads of such a server start
vllm_worker.py      the worker of such a server
vllm_reload.py      one copy and one packing of each module of a vLLM model
verl_platform.py    verl's platform
trl_attention.py    TRL's tree attention in PyTorch
"""
