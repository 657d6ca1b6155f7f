"""How an update gets into the model of one vLLM worker.

weight_load.py        the interface of both ways; `weight_engine.py` chooses
layerwise_load.py     vLLM's own layerwise reload, for every model
reloaded_modules.py   the modules of a model during vLLM's reload; parts of fused modules
fast_load.py          one copy and one packing of each module, for models on a CPU whose modules are all known
module_kinds.py       which modules the fast load knows
staged_module.py      one module during a fast load: scratch memory, then packing
packed_embeddings.py  embeddings and output heads during a fast load
scratch.py            memory for raw weights
allocator.py          the C library's allocator during an update
"""
