"""Routed experts of mixture-of-experts models: recorded turn by turn, and converted to batches for trainers."""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agent_helpers import add
from helpers import change_weights, chat_tokenizer, reference_model
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh

from verl_server import BadInputError, VerlEngine
from verl_server.agent import (
    AgentLoop,
    Episode,
    RolloutLimits,
    RolloutRunner,
    Sample,
    Task,
    ToolAgentLoop,
    as_generate_fn,
)
from verl_server.agent.steps.stream import RolloutStep
from verl_server.trajectory import (
    ChatRenderer,
    ExpertLayout,
    ForkReason,
    Span,
    TrajectoryGraph,
    load_session,
    to_batch,
    to_packed,
    to_tree,
)
from verl_server.trajectory.routed_experts import pack_experts

NUM_LAYERS, NUM_CHOSEN = 3, 2
LAYOUT = ExpertLayout(NUM_LAYERS, NUM_CHOSEN)
TASK = Task("t", [{"role": "user", "content": "hello"}])


@pytest.fixture(scope="module")
def folder(tiny: Callable[..., Path]) -> Path:
    return tiny("qwen3_moe", layers=NUM_LAYERS)


@pytest.fixture(scope="module")
def moe_engine(one_rank: DeviceMesh, folder: Path) -> Iterator[VerlEngine]:
    """A real server of a mixture-of-experts model, which returns routed experts."""
    with VerlEngine(
        one_rank, model_path=str(folder), dtype="float32", max_total_tokens=16384, enable_return_routed_experts=True
    ) as engine:
        yield engine


@pytest.fixture
def model(moe_engine: VerlEngine, folder: Path) -> Any:
    """Hugging Face's model with the weights of the server."""
    model = reference_model(folder)
    moe_engine.update_weights_from_tensor(model.state_dict().items())
    return model


def chosen_by(model: Any, token_ids: Sequence[int]) -> torch.Tensor:
    """The experts that Hugging Face's routers choose, [tokens, layers, experts per token], sorted by their ids."""
    chosen: list[torch.Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda module, args, output: chosen.append(output[2]))
        for layer in model.model.layers
    ]
    try:
        with torch.no_grad():
            model(torch.tensor([list(token_ids)]))
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(chosen, dim=1).sort(-1).values


def assert_experts(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """`got`: all tokens of a path, of which the last one has none. `wanted`: those of the model."""
    assert got[:-1].sort(-1).values.tolist() == wanted[:-1].tolist()
    assert not got[-1].any(), "the server has never read the last token"


class Recording:
    """A generate function that stores its requests and replies."""

    def __init__(self, engine: Any) -> None:
        self._generate = as_generate_fn(engine.adapter.asynchronous)
        self.requests: list[Any] = []
        self.replies: list[Any] = []

    async def __call__(self, *, rid: str, session_id: str, **request: Any) -> Any:
        reply = await self._generate(rid=rid, session_id=session_id, **request)
        self.requests.append(request)
        self.replies.append(reply)
        return reply


class Turns(AgentLoop):
    """Three turns with messages between them. `between`: called before the second turn."""

    def __init__(self, between: Callable[[], Any] = lambda: None) -> None:
        super().__init__()
        self._between = between

    async def run(self, episode: Episode) -> None:
        await episode.generate()
        await asyncio.to_thread(self._between)
        for text in ("more", "again"):
            await episode.generate([{"role": "user", "content": text}])


def runner_of(engine: Any, agent: Any, **overrides: Any) -> RolloutRunner:
    arguments: dict[str, Any] = {
        "limits": RolloutLimits(max_response_tokens=200, max_context_tokens=1000),
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 9},
        "return_routed_experts": True,
        **overrides,
    }
    return RolloutRunner(agent, engine, **arguments)


def first_step(runner: RolloutRunner, tasks: Sequence[Task] = (TASK,)) -> RolloutStep:
    async def run() -> RolloutStep:
        (step,) = [step async for step in runner.steps(list(tasks), num_groups=len(tasks))]
        return step

    return asyncio.run(run())


def sample_of(runner: RolloutRunner) -> Sample:
    async def run() -> Sample:
        ((sample,),) = [group.samples async for group in runner.run([TASK])]
        return sample

    return asyncio.run(run())


# -- a real server -----------------------------------------------------------------------------------


def test_the_batch_has_the_choices_of_the_model(moe_engine: VerlEngine, model: Any) -> None:
    """Several turns, tools, and samples of one prompt, which is in the prefix cache."""
    tasks = [Task(f"t{i}", [{"role": "user", "content": f"hello {i}" * (1 + i)}]) for i in range(2)]
    step = first_step(runner_of(moe_engine, Turns(), n=2), tasks)
    assert [sample.error for sample in step.samples] == [None] * 4
    assert step.expert_layout == LAYOUT
    batch = step.batch()
    experts = batch["routed_experts"]
    assert experts.dtype == torch.uint8
    assert experts.shape == (*batch["input_ids"].shape, NUM_LAYERS, NUM_CHOSEN)
    assert not experts[batch["attention_mask"] == 0].any()
    for row in range(4):
        own = batch["attention_mask"][row].bool()
        assert_experts(experts[row][own], chosen_by(model, batch["input_ids"][row][own]))
    packed = to_packed([sample.path for sample in step.samples], expert_layout=LAYOUT)
    assert torch.equal(packed["routed_experts"], experts[batch["attention_mask"].bool()])


def test_each_turn_transfers_new_tokens_only(moe_engine: VerlEngine, model: Any) -> None:
    """The bytes of a reply are those of the tokens that no earlier turn has read."""
    generate = Recording(moe_engine)
    renderer = runner_of(moe_engine, Turns())._samples.renderer
    sample = sample_of(runner_of(generate, Turns(), renderer=renderer))
    assert sample.error is None
    start = 0
    for request, reply in zip(generate.requests, generate.replies, strict=True):
        assert request.get("routed_experts_start_len", 0) == start
        end = len(request["input_ids"]) + len(reply["output_ids"]) - 1
        num_bytes = len(base64.b64decode(reply["meta_info"]["routed_experts"]))
        assert num_bytes == (end - start) * NUM_LAYERS * NUM_CHOSEN * 4
        start = end
    batch = to_batch([sample.path], 0, expert_layout=ExpertLayout.from_config(model.config))
    assert_experts(batch["routed_experts"][0], chosen_by(model, batch["input_ids"][0]))


def test_each_token_has_the_choices_of_the_weights_that_read_it_first(moe_engine: VerlEngine, model: Any) -> None:
    """The weights change after the first turn. The server then reads the whole path again with the new weights."""
    new = reference_model(model.config._name_or_path)
    change_weights(new, seed=5, scale=0.3)
    loop = Turns(lambda: moe_engine.update_weights_from_tensor(new.state_dict().items()))
    sample = sample_of(runner_of(moe_engine, loop))
    assert sample.error is None
    token_ids, first_turn = sample.graph.token_ids(sample.path[1]), sample.graph.num_tokens(1) - 1
    before, after = chosen_by(model, token_ids), chosen_by(new, token_ids)
    assert not torch.equal(before[:first_turn], after[:first_turn]), "the new weights must choose other experts"
    batch = to_batch([sample.path], 0, expert_layout=LAYOUT)
    assert_experts(batch["routed_experts"][0], torch.cat([before[:first_turn], after[first_turn:]]))


def test_branches_have_the_choices_of_their_own_path(moe_engine: VerlEngine, model: Any) -> None:
    """Forks at a prompt, whose turns have both read it, and forks after a turn; the tree has each token once."""

    class Forking(AgentLoop):
        async def run(self, episode: Episode) -> None:
            other = episode.fork()
            await asyncio.gather(other.generate(), episode.generate())
            third = episode.fork()
            await third.generate([{"role": "user", "content": "third"}])
            await episode.generate([{"role": "user", "content": "more"}])

    sample = sample_of(runner_of(moe_engine, Forking()))
    assert sample.error is None
    assert len(sample.paths) == 3
    batch = to_batch(sample.paths, 0, expert_layout=LAYOUT)
    tree = to_tree(sample.graph, expert_layout=LAYOUT)
    assert tree["routed_experts"].shape == (len(tree["input_ids"]), NUM_LAYERS, NUM_CHOSEN)
    for row, (graph, leaf) in enumerate(sample.paths):
        wanted = chosen_by(model, graph.token_ids(leaf))
        assert_experts(batch["routed_experts"][row][batch["attention_mask"][row].bool()], wanted)
        nodes = [node.id for node in graph.path(leaf)]
        on_path = torch.tensor([int(node) in nodes for node in tree["node"]])
        assert_experts(tree["routed_experts"][on_path], wanted)


def test_a_record_keeps_the_experts(moe_engine: VerlEngine, model: Any, tmp_path: Path) -> None:
    """A file is read again with the experts, and a resumed run must record them in the same way."""
    sample = sample_of(runner_of(moe_engine, Turns(), run_dir=tmp_path))
    loaded = load_session(tmp_path / "t-0.jsonl")
    first, second = (to_packed([(graph, sample.path[1])], expert_layout=LAYOUT) for graph in (sample.graph, loaded))
    assert torch.equal(first["routed_experts"], second["routed_experts"])
    with pytest.raises(BadInputError, match="a different return_routed_experts"):
        sample_of(runner_of(moe_engine, Turns(), run_dir=tmp_path, return_routed_experts=False))


def test_a_server_that_returns_no_experts_is_named(shared_engine: VerlEngine, tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="start it with enable_return_routed_experts=True"):
        runner_of(shared_engine, Turns())
    renderer = ChatRenderer(chat_tokenizer(tmp_path))
    generate = Recording(shared_engine)
    sample = sample_of(runner_of(generate, Turns(), renderer=renderer))
    assert sample.error is not None
    assert "start it with enable_return_routed_experts=True" in sample.error["message"]
    with pytest.raises(BadInputError, match="return_routed_experts must be a valid boolean, got 'yes'"):
        runner_of(generate, Turns(), renderer=renderer, return_routed_experts="yes")
    for name, hint in (
        ("return_routed_experts", "RolloutRunner.return_routed_experts=True"),
        ("routed_experts_start_len", ""),
    ):
        with pytest.raises(BadInputError, match=f"'{name}' is no sampling parameter of an agent; .*{hint}"):
            runner_of(generate, Turns(), renderer=renderer, sampling_params={name: True})


def test_a_generate_function_with_the_argument(moe_engine: VerlEngine, model: Any) -> None:
    """Each reply then has the experts of its whole path. Those of the earlier turns are used."""
    plain = as_generate_fn(moe_engine.adapter.asynchronous)  # type: ignore[union-attr]

    async def generate(**request: Any) -> Any:
        return await plain(**request, return_routed_experts=True)

    renderer = runner_of(moe_engine, Turns())._samples.renderer
    agent = ToolAgentLoop([add])
    sample = sample_of(runner_of(generate, agent, renderer=renderer, return_routed_experts=False))
    batch = to_batch([sample.path], 0, expert_layout=LAYOUT)
    assert_experts(batch["routed_experts"][0], chosen_by(model, batch["input_ids"][0]))


# -- without a server: the layout of SGLang's text ---------------------------------------------------


def encode(experts: Any) -> str:
    """As SGLang's detokenizer does (`_b64_encode_per_request`)."""
    return base64.b64encode(torch.tensor(np.asarray(experts), dtype=torch.int32).numpy().tobytes()).decode("utf-8")


def random_experts(rng: np.random.Generator, count: int, num_experts: int = 200) -> Any:
    return rng.integers(1, num_experts, (count, NUM_LAYERS, NUM_CHOSEN))


def make_graph(*, with_experts: bool = True) -> TrajectoryGraph:
    """Prompt of 3 tokens, turn of 2, message of 2, turn of 1; and another turn of 2 below the prompt."""
    graph, rng = TrajectoryGraph("s"), np.random.default_rng(0)
    for index, (parent, count, num_new) in enumerate([(None, 3, 0), (0, 2, 4), (1, 2, 0), (2, 1, 3), (0, 2, 4)]):
        sampled = bool(num_new)
        graph.add_node(
            parent,
            [10 * index + offset for offset in range(count)],
            sampled=sampled,
            logprobs=[-0.5] * count if sampled else [],
            spans=[Span(1, 0, count)] if sampled else [],
            fork_reason=ForkReason.SAMPLE if index == 4 else None,
            routed_experts=encode(random_experts(rng, num_new)) if sampled and with_experts else None,
        )
    return graph


def with_text(graph: TrajectoryGraph, node: int, text: str | None) -> TrajectoryGraph:
    object.__setattr__(graph.nodes[node], "routed_experts", text)
    return graph


def decode(graph: TrajectoryGraph, node: int) -> Any:
    text = graph.nodes[node].routed_experts
    assert text is not None
    return np.frombuffer(base64.b64decode(text), dtype=np.int32).reshape(-1, NUM_LAYERS, NUM_CHOSEN)


def test_a_later_turn_does_not_replace_the_experts_of_an_earlier_one() -> None:
    graph = make_graph()
    wanted = np.concatenate([decode(graph, 1), decode(graph, 3), np.zeros((1, NUM_LAYERS, NUM_CHOSEN), dtype=int)])
    for other in (
        graph,
        with_text(make_graph(), 3, encode(np.concatenate([7 + 0 * decode(graph, 1), decode(graph, 3)]))),
    ):
        packed = to_packed([(other, 3)], expert_layout=LAYOUT)
        assert packed["routed_experts"].tolist() == wanted.tolist()
    tree = to_tree(graph, expert_layout=LAYOUT)["routed_experts"]
    assert tree[:8].tolist() == wanted.tolist()
    assert tree[8].tolist() == decode(graph, 4)[3].tolist()
    assert not tree[9].any()
    batch = to_batch([(graph, 3), (graph, 4)], 0, expert_layout=LAYOUT)
    assert batch["routed_experts"].shape == (2, 8, NUM_LAYERS, NUM_CHOSEN)
    assert batch["routed_experts"][1][:4].tolist() == decode(graph, 4).tolist()
    assert not batch["routed_experts"][1][4:].any()


def test_recorded_experts_need_one_or_two_bytes() -> None:
    """Records of earlier versions have four bytes. A damaged text is kept, and refused when a batch is made."""
    graph = make_graph()
    wanted = to_packed([(graph, 3)], expert_layout=LAYOUT)["routed_experts"]
    for node in (1, 3):
        text = graph.nodes[node].routed_experts
        assert text is not None
        packed = pack_experts(text)
        assert packed is not None
        assert len(packed) < 0.3 * len(text) + 10
        with_text(graph, node, packed)
    assert torch.equal(to_packed([(graph, 3)], expert_layout=LAYOUT)["routed_experts"], wanted)
    large = decode(make_graph(), 4) + 200
    packed = pack_experts(encode(large))
    assert packed is not None
    assert packed.startswith("int16:")
    found = to_packed([(with_text(graph, 4, packed), 4)], expert_layout=LAYOUT)["routed_experts"][:4]
    assert found.tolist() == large.tolist()
    for damaged in ("no base64", encode(large - 1000), encode(large + 40_000)):
        assert pack_experts(damaged) == damaged
    assert pack_experts(None) is None


def test_experts_above_255_need_two_bytes() -> None:
    graph = make_graph()
    experts = decode(graph, 4).copy()
    experts[0, 0, 0] = 256
    with_text(graph, 4, encode(experts))
    assert to_packed([(graph, 3)], expert_layout=LAYOUT)["routed_experts"].dtype == torch.uint8
    for result in (
        to_batch([(graph, 3), (graph, 4)], 0, expert_layout=LAYOUT),
        to_packed([(graph, 4)], expert_layout=LAYOUT),
    ):
        assert result["routed_experts"].dtype == torch.int16
        assert int(result["routed_experts"].max()) == 256


def test_a_path_without_a_turn_needs_no_experts() -> None:
    """Its row is masked. Its experts are 0. A batch without experts has no such field."""
    graph = make_graph()
    batch = to_batch([(graph, 3), (make_graph(), 0)], 0, expert_layout=LAYOUT)
    assert not batch["routed_experts"][1].any()
    plain = make_graph(with_experts=False)
    assert "routed_experts" not in to_batch([(plain, 3)], 0)
    assert "routed_experts" not in to_packed([(plain, 3)])
    assert "routed_experts" not in to_tree(plain)


@pytest.mark.parametrize(
    ("graph", "layout", "expected"),
    [
        (make_graph(), None, r"path 0 \(session 's'\) has routed experts \(node 1\); pass expert_layout=Expert"),
        (make_graph(), (3, 2), "expert_layout must be .* ExpertLayout, got .* tuple; pass ExpertLayout.from"),
        (make_graph(with_experts=False), LAYOUT, "no routed experts for the turn at node 1; generate .* RolloutRunner"),
        (with_text(make_graph(), 1, None), LAYOUT, "no routed experts for the turn at node 1, but path 0 .* has"),
        (with_text(make_graph(), 3, None), LAYOUT, "no routed experts for the turn at node 3, but path 0 .* has"),
        (with_text(make_graph(), 3, "no base64!"), LAYOUT, "node 3 of session 's' are no base64 text"),
        (with_text(make_graph(), 3, "é"), LAYOUT, "node 3 of session 's' are no base64 text"),
        (with_text(make_graph(), 3, encode([1, 2])), LAYOUT, "have 8 bytes, but 3 tokens with 3 layers .* need 72"),
        (with_text(make_graph(), 3, "AAAA"), LAYOUT, "have 3 bytes"),
        (make_graph(), ExpertLayout(2, 2), "have 96 bytes, but 4 tokens with 2 layers .* pass the layout of the model"),
        (with_text(make_graph(), 3, encode([[[-1] * 2] * 3] * 3)), LAYOUT, "have the expert -1, but experts are"),
        (with_text(make_graph(), 3, encode([[[40000] * 2] * 3] * 3)), LAYOUT, "have the expert 40000"),
    ],
)  # fmt: skip
def test_experts_that_do_not_fit_are_refused(graph: TrajectoryGraph, layout: Any, expected: str) -> None:
    for convert in (
        lambda: to_batch([(graph, 3)], 0, expert_layout=layout),
        lambda: to_packed([(graph, 3)], expert_layout=layout),
    ):
        with pytest.raises(BadInputError, match=expected):
            convert()
    with pytest.raises(
        BadInputError,
        match=expected.replace(r"path 0 \(session 's'\)", "session 's'").replace("path 0 .* has", "session 's' has"),
    ):
        to_tree(graph, expert_layout=layout)


def test_paths_with_and_without_experts_are_refused() -> None:
    paths = [(make_graph(), 3), (make_graph(with_experts=False), 3)]
    with pytest.raises(BadInputError, match=r"path 1 \(session 's'\) has no routed experts .*, but path 0 .* has"):
        to_batch(paths, 0, expert_layout=LAYOUT)


def test_layouts(tiny: Callable[..., Path], folder: Path) -> None:
    assert ExpertLayout.from_config(str(folder)) == LAYOUT
    for config in (tiny("qwen3"), reference_model(tiny("qwen3")).config):
        with pytest.raises(BadInputError, match=r"Qwen3Config has no .* so its model has no routed experts; pass"):
            ExpertLayout.from_config(config)
    with pytest.raises(BadInputError, match="cannot read the configuration of the model at /nowhere"):
        ExpertLayout.from_config("/nowhere")
    with pytest.raises(BadInputError, match="num_layers must be"):
        ExpertLayout(0, 2)


def test_the_layout_of_a_model_with_code_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code is executed only with `trust_remote_code`. An exception of the code is a BadInputError."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.path", list(sys.path))  # transformers adds the folder
    config = {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code = "from transformers import PretrainedConfig\n\n\nclass OwnConfig(PretrainedConfig):\n    model_type = 'own'\n"
    (tmp_path / "own.py").write_text(code + "    num_hidden_layers, num_experts_per_tok = 3, 2\n")
    with pytest.raises(BadInputError, match="trust_remote_code=True"):
        ExpertLayout.from_config(tmp_path)
    assert ExpertLayout.from_config(tmp_path, trust_remote_code=True) == ExpertLayout(3, 2)
    (tmp_path / "own.py").write_text(code + "    raise RuntimeError('no')\n")
    with pytest.raises(BadInputError, match=f"cannot read the configuration of the model at {tmp_path}: no"):
        ExpertLayout.from_config(tmp_path, trust_remote_code=True)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.integers(0, 4), st.booleans()), max_size=8),
    st.integers(0, 2**32 - 1),
)
def test_each_token_has_the_experts_of_the_first_turn_that_read_it(
    nodes: list[tuple[int, bool, int, bool]], seed: int
) -> None:
    """Random trees. `nodes`: distance to the parent, whether sampled, number of tokens, whether with the whole path."""
    graph, rng = TrajectoryGraph("s"), np.random.default_rng(seed)
    graph.add_node(None, [1, 2], sampled=False)
    known: dict[int, list[Any]] = {0: []}
    """The experts of the first tokens of the path to each node."""
    for distance, sampled, count, is_whole in nodes:
        parent = max(0, len(graph.nodes) - 1 - distance)
        experts, text = known[parent], None
        if sampled:
            end = graph.num_tokens(parent) + count - 1
            new = list(random_experts(rng, end - len(experts)))
            # What a request for the whole path returns for tokens that were read before must not matter.
            sent = [*random_experts(rng, len(experts)), *new] if is_whole else new
            experts, text = [*experts, *new], encode(np.array(sent).reshape(-1, NUM_LAYERS, NUM_CHOSEN))
        node = graph.add_node(
            parent,
            [3] * count,
            sampled=sampled,
            logprobs=[-0.5] * (count if sampled else 0),
            spans=[Span(1, 0, count)] if sampled and count else [],
            fork_reason=ForkReason.SAMPLE if graph.children(parent) else None,
            routed_experts=text,
        )
        known[node.id] = experts
    tree = to_tree(graph, expert_layout=LAYOUT)["routed_experts"]
    seen: dict[int, Any] = {}
    for node in graph.nodes:
        got = to_packed([(graph, node.id)], expert_layout=LAYOUT)["routed_experts"]
        wanted = np.zeros(got.shape, dtype=int)
        if known[node.id]:
            wanted[: len(known[node.id])] = known[node.id]
        assert got.tolist() == wanted.tolist()
        if node.sampled:
            offsets = np.cumsum([0, *(len(item.token_ids) for item in graph.nodes)])
            positions = [p for item in graph.path(node.id) for p in range(offsets[item.id], offsets[item.id + 1])]
            for position, experts in zip(positions, known[node.id], strict=False):
                seen.setdefault(position, experts.tolist())
    zero = np.zeros((NUM_LAYERS, NUM_CHOSEN), dtype=int).tolist()
    assert tree.tolist() == [seen.get(position, zero) for position in range(len(tree))]
