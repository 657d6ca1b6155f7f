"""What only a machine without an accelerator needs. A reader with GPUs never opens this folder.

A server imports these files only if it runs on the CPU. Where the files are imported:

`platforms/__init__.py`, `vllm_plugin/weights.py`  by servers that run on the CPU
`server/launch.py`                                 before a server is started that cannot use an accelerator
`integrations/verl/plugin.py`                      by every process that imports verl, to register a platform: verl uses
                                                   it without an accelerator, or with `VERL_PLATFORM=cpu`
`integrations/trl/__init__.py`                     by every trainer of TRL, for the public `enable_async_grpo_on_cpu`,
                                                   which changes TRL when it is called
`demo/`, `conformance/suite.py`                    on every machine: `prepare_forkserver` does nothing if a server may
                                                   use an accelerator. The demo hides GPUs from its servers

Files of the folders below this one (ARCHITECTURE.md) that import it are listed in `tests/srt/repository/test_units.py`.

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
