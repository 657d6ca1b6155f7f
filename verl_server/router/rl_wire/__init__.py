"""Routes of vLLM-RL servers, for trainers that speak to such servers: requests and replies with vLLM's names.

    routes.py       handlers of the routes
    generate.py     `/inference/v1/generate`: token ids in, token ids out
    completions.py  `/v1/completions` with a prompt of token ids and `return_token_ids`
    sampling.py     vLLM's sampling parameters, and the parameters of this library
    logprobs.py     log probabilities and finish reasons as vLLM returns them
    models.py       the served models and LoRA adapters
    admin.py        handlers of the routes that pause the router and update weights, which need the admin key
    replica_control.py  pauses, weights and LoRA adapters of all servers of a router
    pauses.py       pauses a router and its servers, and continues them
    server_calls.py  calls of all servers that answer
    weight_record.py  which servers have the weights of the last update
    lora_control.py  LoRA adapters, and which servers have them
    checkpoint_check.py  compares the folder of an update with the served model
    folders.py      folders with weights that a trainer has written

All generations run through the `Dispatcher`, as those of `/generate` do. The source of the forms is vLLM 0.32
(`vllm/entrypoints/scale_out/token_in_token_out/` and `vllm/entrypoints/openai/completion/`).
"""
