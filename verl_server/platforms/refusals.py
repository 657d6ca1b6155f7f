"""Server arguments and models that a CPU does not support. They end the start with a message.

Every entry failed, or gave wrong numbers without an error, on a real server. SGLang calls this module while it resolves
its arguments, so the message is at the end of the server's log.
"""

from __future__ import annotations

from typing import Any

_NEEDS_GPU_KERNEL = {
    "GptOssForCausalLM": "has attention sinks, which torch's attention does not support",
    "Qwen2MoeForCausalLM": "computes the gate of its shared expert in a GPU kernel",
}


def require_cpu_support(args: Any) -> None:
    """Raise ValueError when `args`, or the model that they name, cannot be served on a CPU."""
    message = argument_refusal(args) or model_refusal(_model_config(args))
    if message is not None:
        raise ValueError(message)


def argument_refusal(args: Any) -> str | None:
    """The reason why these server arguments do not work on a CPU, or None."""
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
            "The hierarchical cache moves KV cache from a GPU to host memory, which a CPU does not need: "
            "leave enable_hierarchical_cache unset and raise max_total_tokens instead."
        )
    if args.enable_deterministic_inference or args.rl_on_policy_target is not None:
        return (
            "enable_deterministic_inference and rl_on_policy_target need GPU kernels: leave them unset; "
            "a sampling_seed in a request's sampling_params works on a CPU without them."
        )
    return None


def model_refusal(model: Any) -> str | None:
    """The reason why this model (SGLang's `ModelConfig`) cannot be served on a CPU, or None."""
    name = (model.hf_config.architectures or ["this model"])[0]
    if name in _NEEDS_GPU_KERNEL:
        return f"{name} {_NEEDS_GPU_KERNEL[name]}: serve another model on a CPU."
    for option in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(model.hf_text_config, option, None):
            return f"{name} caps its logits ({option}) in a GPU kernel: serve another model on a CPU."
    if model.quantization is not None:
        return f"{name} is quantized ({model.quantization}), which needs GPU kernels: serve an unquantized checkpoint."
    return None


def _model_config(args: Any) -> Any:
    from sglang.srt.arg_groups.overrides import model_config_of

    return model_config_of(args)
