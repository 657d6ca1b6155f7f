"""Weight updates of real vLLM servers: model families, tensor parallelism, parts of models, and updates that fail.

Each server serves one model for all cases.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from both_engines import engine_settings
from helpers import GREEDY, PROMPTS
from model_families import make_family_model, save_family_model
from torch.distributed.device_mesh import DeviceMesh
from vllm_helpers import Checkpoints, VllmServer, leaves_nothing, needs_vllm, weights_of

from verl_server import VerlEngine
from verl_server.errors import BadInputError, VerlServerError

pytestmark = needs_vllm

TOLERANCE = 1e-5
#: Sizes that two workers can divide, with weights that keep rounding errors of float32 below `TOLERANCE`.
DIVISIBLE = {"hidden_size": 128, "heads": 4, "kv_heads": 2, "vocab_size": 330, "weight_std": 0.1}
LAYER, EXPERTS = "model.layers.1.", ".experts."
FAST = "weight updates use the fast load"
LAYERWISE = "weight updates use vLLM's layerwise reload, because the fast load does not know this model"
#: A module that Python imports at the start of each process of a server. It makes all models unknown.
NO_FAST_LOAD = """
import sys, types
module = types.ModuleType("verl_server.cpu.vllm_reload")
class UnknownModuleError(Exception):
    pass
class FastLoad:
    def __init__(self, model):
        raise UnknownModuleError("this model")
module.FastLoad, module.UnknownModuleError = FastLoad, UnknownModuleError
sys.modules[module.__name__] = module
"""


class Served:
    """A server, its checkpoints, and the number of its last push."""

    def __init__(self, server: VllmServer, checkpoints: Checkpoints) -> None:
        self.server, self.checkpoints = server, checkpoints
        self._version = 0

    def push(self, tensors: dict[str, torch.Tensor], *, is_whole: bool = False) -> None:
        self._version += 1
        self.server.push(tensors, self._version, is_whole=is_whole)

    def push_first(self) -> None:
        """Push the whole first checkpoint. It must be exact afterwards."""
        self.push(self.checkpoints.weights[0], is_whole=True)
        self.require(self.checkpoints.expected[0], "the first checkpoint")

    def require(self, expected: Any, case: str) -> None:
        assert self.server.largest_gap(expected) < TOLERANCE, case


@pytest.fixture(
    scope="module",
    params=[
        ("llama", 1, {}, FAST),
        ("qwen3", 1, {"tie_word_embeddings": True}, FAST),
        ("qwen2", 2, {"tie_word_embeddings": True}, FAST),
        ("qwen3", 2, {}, FAST),
        ("qwen3_moe", 2, {}, FAST),
        ("qwen2", 2, {"tie_word_embeddings": True}, LAYERWISE),
    ],
    ids=lambda case: f"{case[0]}-tp{case[1]}{'-tied' * bool(case[2])}{'-layerwise' * (case[3] == LAYERWISE)}",
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    architecture, tp_size, sizes, way = request.param
    folder = tmp_path_factory.mktemp("loading")
    checkpoints = Checkpoints(folder, architecture, **DIVISIBLE, **sizes)
    with leaves_nothing() as env:
        if way is LAYERWISE:
            (folder / "sitecustomize.py").write_text(NO_FAST_LOAD)
            env = {**env, "PYTHONPATH": str(folder)}
        server = VllmServer(checkpoints.folders[0], env, use_forkserver=way is not LAYERWISE, tp_size=tp_size)
        try:
            assert Path(server.process.log_path).read_text().count(way) == tp_size
            yield Served(server, checkpoints)
        finally:
            server.close()


def test_whole_updates_are_exact(served: Served) -> None:
    first, second = served.checkpoints.weights
    gap = served.server.largest_gap(served.checkpoints.expected[0])
    assert gap < TOLERANCE, "before the first update"
    served.push(second, is_whole=True)
    served.require(served.checkpoints.expected[1], "other weights")
    served.push(second, is_whole=True)
    served.require(served.checkpoints.expected[1], "the same weights")
    served.push(dict(sorted(first.items(), reverse=True)), is_whole=True)
    assert served.server.largest_gap(served.checkpoints.expected[0]) == gap, "vLLM's own load, to the last bit"


def test_updates_of_whole_modules_are_exact(served: Served) -> None:
    parts = {
        "a layer": LAYER,
        "an attention": f"{LAYER}self_attn.",
        "all experts of a layer, or an MLP": f"{LAYER}mlp.",
        "the norm": "model.norm.",
        "the embeddings": "model.embed_tokens.",
        "the output head": "lm_head.",
    }
    for case, prefix in parts.items():
        names = [name for name in served.checkpoints.weights[1] if name.startswith(prefix)]
        if names:
            served.push_first()
            served.push({name: served.checkpoints.weights[1][name] for name in names})
            served.require(served.checkpoints.mixed(names), case)


def test_a_part_of_a_module_is_refused_and_nothing_changes(served: Served) -> None:
    served.push_first()
    new = served.checkpoints.weights[1]
    cases = [[f"{LAYER}self_attn.q_proj.weight"], [f"{LAYER}mlp.gate_proj.weight"], [f"{LAYER}self_attn.q_proj.bias"]]
    if any(EXPERTS in name for name in new):
        cases.append([name for name in new if f"{LAYER}mlp{EXPERTS}0." in name])
        cases.append([name for name in new if f"{LAYER}mlp{EXPERTS}" in name and "down_proj" in name])
    for names in cases:
        if set(names) <= set(new):
            with pytest.raises(VerlServerError, match=r"which vLLM loads together|only a part of the tensors came"):
                served.push({name: new[name] for name in names})
            served.require(served.checkpoints.expected[0], str(names))


def test_a_wrong_shape_changes_nothing_in_its_module(served: Served) -> None:
    served.push_first()
    new = served.checkpoints.weights[1]
    for name in (f"{LAYER}self_attn.o_proj.weight", "model.norm.weight", "model.embed_tokens.weight"):
        for tensor in new[name][..., :1].contiguous(), torch.cat([new[name], new[name]]):
            wrong = {name: tensor}
            with served.server.wrong_shapes(wrong), pytest.raises(VerlServerError):
                served.push(wrong)
            served.require(served.checkpoints.expected[0], f"{name} {list(wrong[name].shape)}")


def test_a_whole_update_repairs_one_that_failed_in_the_middle(served: Served) -> None:
    served.push_first()
    new = served.checkpoints.weights[1]
    name = f"{LAYER}self_attn.v_proj.weight"
    wrong = {**new, name: new[name][:, :-32].contiguous()}
    with served.server.wrong_shapes({name: wrong[name]}), pytest.raises(VerlServerError):
        served.push(wrong, is_whole=True)
    assert len(served.server.generate([1, 2, 3], {"max_new_tokens": 4, "ignore_eos": True})["output_ids"]) == 4
    served.push(new, is_whole=True)
    served.require(served.checkpoints.expected[1], "after the repair")


def test_a_tensor_that_the_model_class_ignores_is_found(served: Served) -> None:
    """vLLM's models skip tables of rotary embeddings by their name, as they skip other names that they do not know."""
    name = f"{LAYER}self_attn.rotary_emb.inv_freq"
    tensors = {**served.checkpoints.weights[0], name: torch.ones(8)}
    message = f"did not read 1 of the pushed tensors, for example '{name}'"
    with served.server.wrong_shapes({name: tensors[name]}), pytest.raises(VerlServerError, match=message):
        served.push(tensors, is_whole=True)
    served.push_first()


def log_probs(engine: VerlEngine) -> list[Any]:
    replies = engine.generate(input_ids=PROMPTS, sampling_params=GREEDY, return_logprob=True)
    return [reply["meta_info"]["output_token_logprobs"] for reply in replies]


@pytest.mark.parametrize(
    ("family", "parts"),
    [
        ("vllm_granitemoe", ["block_sparse_moe.output_linear.weight", "self_attn.k_proj.weight"]),
        ("vllm_stablelm", ["mlp.up_proj.weight", "self_attn.v_proj.weight", "input_layernorm.bias"]),
    ],
)
def test_parts_of_modules_are_completed_in_every_family(
    family: str, parts: list[str], one_rank: DeviceMesh, tmp_path: Path
) -> None:
    """vLLM's model classes of these families do not publish which modules they fuse."""
    folder, other = (save_family_model(make_family_model(family, n), family, tmp_path / str(n)) for n in (0, 1))
    old, new = weights_of(folder), weights_of(other)
    with VerlEngine(one_rank, model_path=str(folder), **engine_settings("vllm")) as engine:
        with pytest.raises(BadInputError, match="a part of a module that vLLM loads only as a whole"):
            engine.update_weights_from_tensor({f"{LAYER}{parts[0]}": new[f"{LAYER}{parts[0]}"]}.items())
        engine.update_weights_from_tensor(old.items())
        before = log_probs(engine)
        for part in parts:
            name = f"{LAYER}{part}"
            engine.update_weights_from_tensor([(name, new[name])])
            pushed = log_probs(engine)
            engine.update_weights_from_tensor({**old, name: new[name]}.items())
            assert log_probs(engine) == pushed != before, name
            engine.update_weights_from_tensor(old.items())
            assert log_probs(engine) == before


def test_a_model_that_vllm_cannot_load_again_is_refused_unchanged(one_rank: DeviceMesh, tmp_path: Path) -> None:
    model = make_family_model("vllm_gpt_oss")
    folder = save_family_model(model, "vllm_gpt_oss", tmp_path)
    with VerlEngine(one_rank, model_path=str(folder), **engine_settings("vllm")) as engine:
        before = log_probs(engine)
        for tensors in (model.state_dict(), {"model.layers.0.self_attn.sinks": torch.ones(2)}):
            with pytest.raises(
                BadInputError, match=r"writes 10 tensors past the loaders of its parameters.*Nothing was"
            ):
                engine.update_weights_from_tensor(tensors.items())
            assert engine.weight_version == 0
            assert log_probs(engine) == before
