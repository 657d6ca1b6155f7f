"""What a CPU cannot do, said in one sentence at the start instead of a stack trace or wrong numbers later.

Every entry was seen failing, or giving silently wrong numbers, on the real server; what works is not here.
SGLang calls this while it resolves its arguments, so the server dies with the sentence as its last words.
"""

from __future__ import annotations

from typing import Any

_NEED_TRITON = {
    "GptOssForCausalLM": "has attention sinks, which torch's attention does not know",
    "Qwen2MoeForCausalLM": "gates its shared expert in a GPU kernel",
}


def refuse_what_a_cpu_cannot_do(args: Any) -> None:
    """Raise ValueError with the first sentence that applies to `args` or to the model it names."""
    sentence = argument_refusal(args) or model_refusal(_model_config(args))
    if sentence is not None:
        raise ValueError(sentence)


def argument_refusal(args: Any) -> str | None:
    """Why these server arguments cannot work on a CPU, or None."""
    if args.quantization is not None:
        return (
            f"quantization={args.quantization!r} needs GPU kernels: serve the unquantized checkpoint on a CPU, "
            "in bfloat16 to save memory."
        )
    if args.speculative_algorithm is not None:
        return (
            f"Speculative decoding ({args.speculative_algorithm}) needs GPU kernels: "
            "leave speculative_algorithm unset on a CPU."
        )
    if args.enable_hierarchical_cache:
        return (
            "The hierarchical cache moves KV cache from a GPU to host memory, and a CPU has nothing to move: "
            "leave enable_hierarchical_cache unset and raise max_total_tokens instead."
        )
    if args.enable_deterministic_inference or args.rl_on_policy_target is not None:
        return (
            "enable_deterministic_inference and rl_on_policy_target need GPU kernels: leave them unset; "
            "a sampling_seed in a request's sampling_params is honoured on a CPU without them."
        )
    return None


def model_refusal(model: Any) -> str | None:
    """Why this model (SGLang's `ModelConfig`) cannot be served on a CPU, or None."""
    name = (model.hf_config.architectures or ["this model"])[0]
    if name in _NEED_TRITON:
        return f"{name} {_NEED_TRITON[name]}: serve a model without it on a CPU."
    for option in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(model.hf_text_config, option, None):
            return f"{name} caps its logits ({option}) in a GPU kernel: serve a model without it on a CPU."
    if model.quantization is not None:
        return f"{name} is quantized ({model.quantization}), which needs GPU kernels: serve an unquantized checkpoint."
    return None


def _model_config(args: Any) -> Any:
    from sglang.srt.arg_groups.overrides import model_config_of

    return model_config_of(args)
