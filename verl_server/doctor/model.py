"""Checks of a model's configuration and tokenizer files. Imports no torch."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from verl_server.adapter.model_files import ModelFacts
from verl_server.doctor.finding import Finding, fail, ok, warn

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "tiktoken.model")


def check_architecture(facts: ModelFacts, *, in_sglang: bool | None, in_transformers: bool) -> Finding:
    """Check whether SGLang supports the architecture.

    `in_sglang` is None when SGLang is not installed, which another check reports.
    """
    title, symptom = "Architecture", "the server ends with: Model architectures [...] are not supported for now"
    if not facts.architecture:
        return fail(
            title,
            "config.json has no architecture",
            symptom=symptom,
            fix='Add "architectures": ["..."] to config.json, with the value of the original model.',
        )
    if in_sglang is None or in_sglang:
        return ok(title, facts.architecture)
    if facts.own_code or in_transformers:
        return warn(
            title,
            f"{facts.architecture} is not a model of SGLang; its slower transformers backend can perhaps serve it",
            symptom=symptom,
            fix="Start the server with --model-impl transformers" + (" --trust-remote-code" if facts.own_code else ""),
        )
    return fail(
        title,
        f"neither SGLang nor transformers supports {facts.architecture}",
        symptom=symptom,
        fix="Upgrade SGLang to the newest supported version (see the SGLang line above), or choose another model.",
    )


def check_tokenizer(names: set[str]) -> Finding:
    """Check for tokenizer files. `names` are the files of the model's folder."""
    found = sorted(names & set(TOKENIZER_FILES))
    if found or any(name.endswith(".tiktoken") for name in names):
        return ok("Tokenizer", ", ".join(found) or "tiktoken")
    return warn(
        "Tokenizer",
        "the folder has no tokenizer file",
        symptom="the server ends during its start with OSError: Can't load tokenizer",
        fix="Copy the tokenizer files of the original model into the folder, or serve token ids only with "
        "--skip-tokenizer-init.",
    )


def known_to_sglang(architecture: str) -> bool | None:
    """Whether a file of SGLang's model folder names the class. None without SGLang. Does not import SGLang."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations or not architecture:
        return None
    wanted = re.compile(rf"\b{re.escape(architecture)}\b")
    models = Path(spec.submodule_search_locations[0]) / "srt" / "models"
    return any(wanted.search(file.read_text(encoding="utf-8")) for file in models.rglob("*.py"))


def known_to_transformers(model_type: str) -> bool:
    """Whether transformers has a folder for the model type. Does not import transformers."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or not spec.submodule_search_locations or not model_type:
        return False
    return (Path(spec.submodule_search_locations[0]) / "models" / model_type.replace("-", "_")).is_dir()
