"""Routes of vLLM-RL servers, for trainers that speak to such servers: requests and replies with vLLM's names.

    generate.py  `/inference/v1/generate` and `/v1/completions`: token ids in and out, sampling parameters
    models.py    the served models and LoRA adapters
    admin.py     handlers of the routes that pause the router and update weights, which need the admin key
    control.py   pauses, weights and LoRA adapters of all servers of a router; which servers have the last weights
    lora.py      LoRA adapters, and which servers have them
    calls.py     calls of all servers that answer, and folders with weights that a trainer has written

All generations run through the `Dispatcher`, as those of `/generate` do. The source of the forms is vLLM 0.32
(`vllm/entrypoints/scale_out/token_in_token_out/` and `vllm/entrypoints/openai/completion/`).
"""
