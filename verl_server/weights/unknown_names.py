"""Explanations of tensor names that the model does not have. Pure functions.

The common mistakes are names of a wrapped module, and names that SGLang uses inside the server.
"""

from __future__ import annotations

from collections.abc import Collection

from verl_server.validation import did_you_mean

WRAPPER_PREFIXES = {
    "module": "DistributedDataParallel",
    "_orig_mod": "torch.compile",
    "_fsdp_wrapped_module": "FullyShardedDataParallel",
    "_checkpoint_wrapped_module": "checkpoint_wrapper",
}
"""Components that wrappers add to parameter names, and the wrapper that adds each of them."""
PEFT_COMPONENTS = frozenset({
    "base_layer", "lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector",
})  # fmt: skip
"""Components of the names of a model's tensors after PEFT has added a LoRA adapter to the model."""
SERVER_FUSED_NAMES = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}
"""Components of SGLang's parameter names, and the checkpoint's components that SGLang fuses into each of them."""


def fused_with(component: str) -> set[str]:
    """The components that SGLang fuses with `component`, itself, and the fused component."""
    groups = ({fused, *parts} for fused, parts in SERVER_FUSED_NAMES.items())
    return {component}.union(*(group for group in groups if component in group))


def explain_unknown_name(name: str, known: Collection[str]) -> str:
    """The end of an error message about the unknown tensor `name`: its cause and cure, or the most similar name.

    `known`: the names that the model accepts. Empty if nothing is similar.
    """
    components = name.split(".")
    if not PEFT_COMPONENTS.isdisjoint(components):
        return (
            ": the trainer's model has a LoRA adapter of PEFT. Push the LoRA adapter with load_lora_adapter. Or merge "
            "it into the weights (model.merge_adapter()), push them with the names of the checkpoint, that is without "
            "'base_model.model.' and '.base_layer' and without the tensors of the LoRA adapter, and unmerge it"
        )
    prefixes = [component for component in dict.fromkeys(components) if component in WRAPPER_PREFIXES]
    plain_name = ".".join(component for component in components if component not in WRAPPER_PREFIXES)
    parts = _checkpoint_names(plain_name, known)
    wrappers = " and ".join(f"{prefix + '.'!r} ({WRAPPER_PREFIXES[prefix]})" for prefix in prefixes)
    wrapped = f" it contains {wrappers}, which a wrapper of the module adds" if prefixes else ""
    if prefixes and plain_name in known:
        return f":{wrapped}. Remove it from the names: {plain_name!r}"
    for start in range(1, len(components)):
        if (end := ".".join(components[start:])) in known:
            prefix = ".".join(components[:start])
            return f": remove the prefix {prefix + '.'!r} from the names: {end!r}"
    if parts:
        return (
            f":{wrapped + ', and' if wrapped else ''} SGLang makes this tensor inside the server from tensors of the "
            f"checkpoint. Push them by their Hugging Face names: {', '.join(map(repr, parts))}"
        )
    return did_you_mean(name, known)


def _checkpoint_names(name: str, known: Collection[str]) -> list[str]:
    """The known names of the tensors that SGLang fuses into the tensor `name`. Empty for another tensor."""
    components = name.split(".")
    for fused, parts in SERVER_FUSED_NAMES.items():
        if fused in components:
            names = [".".join(part if component == fused else component for component in components) for part in parts]
            return names if set(names) <= set(known) else []
    return []
