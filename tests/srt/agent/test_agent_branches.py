"""Branches of episodes: forks, sub-agents and compactions, which share the limits and the record of one sample."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from agent_helpers import add, return_long_text
from helpers import QWEN, chat_tokenizer
from PIL import Image
from transformers import AutoProcessor
from vision_models import make_vision_model

from verl_server import BadInputError, ServerError
from verl_server.agent import (
    AgentLoop,
    Episode,
    EpisodeStopped,
    RolloutLimits,
    RolloutRunner,
    Sample,
    Segment,
    Task,
)
from verl_server.trajectory import (
    ChatRenderer,
    ForkReason,
    Recorder,
    Span,
    TrajectoryGraph,
    get_renderer,
    image_data_url,
    load_session,
    to_batch,
    to_packed,
    to_tree,
)

USER_MESSAGE = {"role": "user", "content": "hello"}
TURN_TOKENS = 4
EMPTY_META = {"finish_reason": {"type": "stop"}, "weight_version": "1", "output_token_logprobs": []}


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    tokenizer = chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    tokenizer.chat_template = QWEN
    return ChatRenderer(tokenizer)


class CountingPolicy:
    """As an engine with a random seed for each request: the tokens depend on the prompt and on the number of the call.

    `fail_at`: numbers of the calls that fail, from 0. `block_at`: number of the call that never ends.
    """

    def __init__(self, fail_at: tuple[int, ...] = (), block_at: int | None = None) -> None:
        self._fail_at, self._block_at = fail_at, block_at
        self.num_calls = 0
        self.prompts: list[list[int]] = []
        self.num_cancelled = 0

    async def __call__(self, *, rid: str, session_id: str, **request: Any) -> Any:
        number, self.num_calls = self.num_calls, self.num_calls + 1
        try:
            await asyncio.sleep(0.001 * (number % 3))
            if number == self._block_at:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if number in self._fail_at:
            raise ServerError("overloaded", status=503)
        self.prompts.append(list(request["input_ids"]))
        count = min(TURN_TOKENS, request["sampling_params"]["max_new_tokens"])
        digest = hashlib.sha256(json.dumps([number, request["input_ids"]]).encode()).digest()
        tokens = [byte % 200 for byte in digest[:count]]
        meta = {
            "finish_reason": {"type": "stop"},
            "weight_version": "1",
            "output_token_logprobs": [[-1.0, token, None] for token in tokens],
        }
        return {"output_ids": tokens, "meta_info": meta}


def make(renderer: ChatRenderer, policy: Any = None, record: Any = None, **limits: Any) -> Episode:
    """An episode of a policy that needs no server."""
    limits = {"max_response_tokens": 500, **limits}
    record = TrajectoryGraph("s") if record is None else record
    return Episode(Task("t", [USER_MESSAGE]), record, policy or CountingPolicy(), renderer, RolloutLimits(**limits), {})


def prompts_of(graph: TrajectoryGraph) -> list[list[int]]:
    return [graph.token_ids(node.parent) for node in graph.nodes if node.sampled and node.parent is not None]


# -- branches ----------------------------------------------------------------------------------------


def test_branches_that_are_awaited_together_have_paths_of_their_own(renderer: ChatRenderer) -> None:
    policy = CountingPolicy()
    episode = make(renderer, policy)

    async def run() -> list[Episode]:
        await episode.generate()
        branches = [episode, *(episode.fork() for _ in range(3))]
        for _ in range(3):
            messages = [[{"role": "user", "content": f"branch {index}"}] for index in range(4)]
            await asyncio.gather(*(b.generate(m) for b, m in zip(branches, messages, strict=True)))
        return branches

    branches = asyncio.run(run())
    assert sorted(prompts_of(episode.graph)) == sorted(policy.prompts)
    for index, branch in enumerate(branches):
        assert branch.leaf is not None
        path = episode.graph.path(branch.leaf)
        texts = [message["content"] for node in path for message in (node.message or {}).get("messages", ())]
        assert texts == ["hello", *[f"branch {index}"] * 3]
        assert {node.branch for node in path[2:]} == {"" if index == 0 else str(index - 1)}
    assert episode.segments == tuple(Segment(branch.leaf or 0) for branch in branches)


def test_best_of_n_within_a_sample(renderer: ChatRenderer) -> None:
    episode = make(renderer)

    async def run() -> list[Episode]:
        await episode.generate()
        branches = [episode.fork() for _ in range(3)]
        await asyncio.gather(*(branch.generate([USER_MESSAGE]) for branch in branches))
        for branch in branches:
            branch.loss_weight = 0.25
        episode.adopt(branches[1])
        branches[2].loss_weight = 0.0
        await episode.generate([USER_MESSAGE])
        return branches

    branches = asyncio.run(run())
    first, others = Segment(1, 1.0), [Segment(branches[0].leaf or 0, 0.25), Segment(episode.leaf or 0, 0.25)]
    assert episode.segments == (first, *others), "the first turn keeps the weight with which it was generated"
    with pytest.raises(BadInputError, match="this branch was adopted"):
        asyncio.run(branches[1].generate())
    for other in (episode, branches[1], make(renderer), 3):
        with pytest.raises(BadInputError, match=r"adopt needs another branch|was adopted"):
            episode.adopt(other)  # type: ignore[arg-type]
    for weight in (-1.0, float("nan"), "1", True):
        with pytest.raises(BadInputError, match="weight of a branch"):
            branches[0].loss_weight = weight  # type: ignore[assignment]
    with pytest.raises(BadInputError, match="no node 99"):
        episode.fork(99)
    with pytest.raises(BadInputError, match="no messages"):
        episode.new_root([])


# -- limits ------------------------------------------------------------------------------------------


def test_limits_count_all_branches(renderer: ChatRenderer) -> None:
    episode = make(renderer, max_turns=3)

    async def run() -> list[Any]:
        await episode.generate()
        branches = [episode.fork(0) for _ in range(4)]
        return await asyncio.gather(*(branch.generate() for branch in branches), return_exceptions=True)

    outcomes = asyncio.run(run())
    assert [getattr(outcome, "stop_reason", None) for outcome in outcomes] == [None, None, "max_turns", "max_turns"]
    assert episode.num_response_tokens == 3 * TURN_TOKENS

    episode = make(renderer, max_response_tokens=2 * TURN_TOKENS + 1)

    async def run_one_after_the_other() -> None:
        for _ in range(4):
            await episode.fork(0 if episode.graph.nodes else None).generate()

    with pytest.raises(EpisodeStopped) as stopped:
        asyncio.run(run_one_after_the_other())
    assert stopped.value.stop_reason == "max_response_tokens"
    assert episode.num_response_tokens == 2 * TURN_TOKENS + 1


def test_compaction_starts_a_context_of_its_own(renderer: ChatRenderer) -> None:
    """`max_context_tokens` is the limit of one path: after a compaction the agent has room again."""
    prompt = len(renderer.render_prompt([USER_MESSAGE]))
    episode = make(renderer, max_context_tokens=prompt + 2 * TURN_TOKENS)

    async def run() -> None:
        for _ in range(4):
            await episode.generate()
            if episode.num_context_tokens > prompt + TURN_TOKENS:
                episode.adopt(episode.new_root([{"role": "user", "content": "h"}], reason=ForkReason.COMPACTED))

    asyncio.run(run())
    graph = episode.graph
    assert [node.fork_reason for node in graph.nodes if node.parent is None] == [None, ForkReason.COMPACTED]
    assert [graph.num_turns(segment.leaf) for segment in episode.segments] == [2, 2]


# -- failures ----------------------------------------------------------------------------------------


def test_a_failed_turn_can_be_repeated(renderer: ChatRenderer) -> None:
    """The first and the third turn fail at first. Nothing is recorded twice."""
    policy = CountingPolicy(fail_at=(0, 2))
    episode = make(renderer, policy, max_turns=2)

    async def run() -> None:
        for messages in ([USER_MESSAGE], [{"role": "user", "content": "more"}]):
            leaf = episode.leaf
            with pytest.raises(ServerError, match="overloaded"):
                await episode.generate(messages)
            assert episode.leaf == leaf
            await episode.generate(messages)

    asyncio.run(run())
    assert [node.sampled for node in episode.graph.nodes] == [False, True, False, True]
    assert [node.parent for node in episode.graph.nodes] == [None, 0, 1, 2]


class ForgetfulLoop(AgentLoop):
    """Returns while one of its branches generates, and uses another branch later."""

    def __init__(self) -> None:
        super().__init__()
        self.left: asyncio.Task[Any] | None = None
        self.branch: Episode | None = None

    async def run(self, episode: Episode) -> None:
        await episode.generate()
        self.branch = episode.fork()
        self.left = asyncio.create_task(episode.fork().generate())
        await asyncio.sleep(0.01)


def test_a_branch_that_is_left_behind_is_cancelled(renderer: ChatRenderer) -> None:
    policy, loop = CountingPolicy(block_at=1), ForgetfulLoop()

    async def run() -> Sample:
        runner = RolloutRunner(loop, policy, renderer=renderer, limits=RolloutLimits(100))
        (group,) = [group async for group in runner.run([Task("t", [USER_MESSAGE])])]
        assert loop.left is not None
        assert loop.branch is not None
        await asyncio.wait({loop.left}, timeout=5.0)
        assert loop.left.cancelled()
        with pytest.raises(BadInputError, match="has ended, and one of its branches is still used"):
            await loop.branch.generate()
        with pytest.raises(BadInputError, match="has ended, and one of its branches is still used"):
            loop.branch.add_messages([USER_MESSAGE])
        return group.samples[0]

    sample = asyncio.run(run())
    assert sample.stop_reason == "done"
    assert len(sample.graph.nodes) == 2
    assert policy.num_cancelled == 1


def test_a_branch_that_still_generates_ends_with_its_last_turn(renderer: ChatRenderer) -> None:
    """Its messages have no turn when the agent loop returns, so they are in no row."""

    class Leaves(AgentLoop):
        async def run(self, episode: Episode) -> None:
            await episode.generate()
            branch = episode.fork()
            self.turn = await branch.generate([USER_MESSAGE])
            self.task = asyncio.create_task(branch.generate([{"role": "user", "content": "long " * 20}]))
            await asyncio.sleep(0.01)

    loop = Leaves()

    async def run() -> Sample:
        runner = RolloutRunner(loop, CountingPolicy(block_at=2), renderer=renderer, limits=RolloutLimits(500))
        (group,) = [group async for group in runner.run([Task("t", [USER_MESSAGE])])]
        return group.samples[0]

    sample = asyncio.run(run())
    assert sample.stop_reason == "done"
    assert [segment.leaf for segment in sample.segments] == [loop.turn.node]


def test_the_first_branch_that_still_generates_ends_with_its_last_turn(renderer: ChatRenderer) -> None:
    class Leaves(AgentLoop):
        async def run(self, episode: Episode) -> None:
            self.turn = await episode.generate()
            self.task = asyncio.create_task(episode.generate([USER_MESSAGE]))
            await asyncio.sleep(0.01)

    loop = Leaves()

    async def run() -> Sample:
        runner = RolloutRunner(loop, CountingPolicy(block_at=1), renderer=renderer, limits=RolloutLimits(500))
        (group,) = [group async for group in runner.run([Task("t", [USER_MESSAGE])])]
        return group.samples[0]

    sample = asyncio.run(run())
    assert sample.stop_reason == "done"
    assert sample.path == (sample.graph, loop.turn.node)


def test_a_limit_belongs_to_the_branch_that_reached_it(renderer: ChatRenderer) -> None:
    """Also if another branch generates before or after. A branch that adopts another one takes over its limit."""

    async def run(order: str) -> tuple[list[str | None], str]:
        episode = make(renderer, max_response_tokens=300)
        await episode.generate()
        branches = {name: episode.fork() for name in "ab"}
        for name in order:
            if name == "a":
                await branches["a"].generate([USER_MESSAGE])
            else:
                with pytest.raises(EpisodeStopped):
                    await branches["b"].generate([{"role": "user", "content": "x" * 900}])
        limits = [branches[name].reached_limit for name in "ab"]
        episode.adopt(branches["a"])
        return limits, episode.reached_limit or "done"

    for order in ("ab", "ba"):
        limits, stop_reason = asyncio.run(run(order))
        assert limits == [None, "max_response_tokens"], order
        assert stop_reason == "done"


def test_a_fork_of_another_root_has_the_messages_of_its_first_prompt(renderer: ChatRenderer) -> None:
    async def run() -> None:
        episode = make(renderer)
        await episode.generate()
        other, shown = episode.new_root([USER_MESSAGE]), [{"role": "user", "content": "other"}]
        other.add_messages(shown)
        turn = await other.generate()
        assert episode.fork(turn.node).messages == shown

    asyncio.run(run())


class FailingTeamLoop(AgentLoop):
    """One of two branches fails while the other generates."""

    async def run(self, episode: Episode) -> None:
        await episode.generate()
        await asyncio.gather(*(episode.fork().generate([{"role": "user", "content": name}]) for name in "ab"))


@pytest.mark.parametrize("num_iterations", range(8))
def test_nothing_is_recorded_after_the_end_of_an_episode(
    renderer: ChatRenderer, tmp_path: Path, num_iterations: int
) -> None:
    """The reply of one branch arrives some iterations of the event loop after the failure of the other branch."""
    has_failed = asyncio.Event()

    class Policy(CountingPolicy):
        async def __call__(self, *, rid: str, session_id: str, **request: Any) -> Any:
            number = self.num_calls
            reply = await super().__call__(rid=rid, session_id=session_id, **request)
            if number == 1:
                await has_failed.wait()
                for _ in range(num_iterations):
                    await asyncio.sleep(0)
            elif number == 2:
                has_failed.set()
                raise RuntimeError("no")
            return reply

    async def run() -> Sample:
        runner = RolloutRunner(
            FailingTeamLoop(), Policy(), renderer=renderer, limits=RolloutLimits(500), run_dir=tmp_path
        )
        (group,) = [group async for group in runner.run([Task("t", [USER_MESSAGE])])]
        return group.samples[0]

    sample = asyncio.run(run())
    assert sample.stop_reason == "error"
    trained = {node.id for segment in sample.segments for node in sample.graph.path(segment.leaf)}
    assert {node.id for node in sample.graph.nodes if node.sampled} <= trained
    assert load_session(tmp_path / "t-0.jsonl") == sample.graph
    assert "termination" in json.loads((tmp_path / "t-0.jsonl").read_text().splitlines()[-1])


# -- records -----------------------------------------------------------------------------------------


class TeamLoop(AgentLoop):
    """Two forks and a sub-agent generate two turns each, concurrently. Then the agent continues with a summary."""

    async def run(self, episode: Episode) -> None:
        await episode.generate()
        team = [episode.fork(), episode.fork(), episode.new_root([{"role": "user", "content": "help"}])]

        async def work(member: Episode, number: int) -> str:
            turn = await member.generate(None if member.leaf is None else [{"role": "user", "content": f"{number}"}])
            return turn.text + (await member.generate([{"role": "user", "content": turn.text}])).text

        texts = await asyncio.gather(*(work(member, number) for number, member in enumerate(team)))
        summary = [{"role": "user", "content": "".join(texts)}]
        episode.adopt(episode.new_root(summary, reason=ForkReason.COMPACTED))
        team[1].loss_weight = 0.5
        await episode.generate()


NUM_TEAM_TURNS = 8


@pytest.mark.parametrize("killed_at", range(NUM_TEAM_TURNS))
def test_branches_continue_after_a_crash(renderer: ChatRenderer, tmp_path: Path, killed_at: int) -> None:
    """A run that ends while any turn is generated continues in each branch. No turn is generated twice."""
    task = Task("t", [USER_MESSAGE])

    async def run(policy: CountingPolicy, deadline_s: float) -> Sample | None:
        runner = RolloutRunner(
            TeamLoop(), policy, renderer=renderer, limits=RolloutLimits(500), reward=lambda _: 2.0, run_dir=tmp_path
        )

        async def first() -> Sample:
            async for group in runner.run([task]):
                return group.samples[0]
            raise AssertionError

        try:
            return await asyncio.wait_for(first(), deadline_s)
        except TimeoutError:
            return None

    killed = CountingPolicy(block_at=killed_at)
    assert asyncio.run(run(killed, 0.3)) is None
    before = load_session(tmp_path / "t-0.jsonl")
    num_recorded = sum(node.sampled for node in before.nodes)
    policy = CountingPolicy()
    sample = asyncio.run(run(policy, 30.0))
    assert sample is not None
    assert sample.stop_reason == "done", sample.error
    assert policy.num_calls == NUM_TEAM_TURNS - num_recorded
    graph = sample.graph
    assert graph.nodes[: len(before.nodes)] == before.nodes
    assert sum(node.sampled for node in graph.nodes) == NUM_TEAM_TURNS
    assert sorted(prompts_of(graph)[num_recorded:]) == sorted(policy.prompts)
    assert [segment.loss_weight for segment in sample.segments] == [1.0, 0.5, 1.0, 1.0], "in the order of the branches"
    assert sample.segments[-1].leaf == sample.leaf, "the compacted path began last"
    assert {graph.rewards[segment.leaf][0] for segment in sample.segments} == {2.0}

    loaded = asyncio.run(run(policy, 30.0))
    assert loaded is not None
    assert policy.num_calls == NUM_TEAM_TURNS - num_recorded
    assert dataclasses.replace(loaded, task=task) == dataclasses.replace(sample, task=task)


def test_a_record_of_an_earlier_version_has_one_segment(renderer: ChatRenderer, tmp_path: Path) -> None:
    with Recorder(tmp_path, "t-0") as recorder:
        asyncio.run(make(renderer, record=recorder).generate())
        recorder.terminate(1, "done")
    path = tmp_path / "t-0.jsonl"
    lines = path.read_text().splitlines()
    last = json.loads(lines[-1])
    del last["termination"]["segments"]
    path.write_text("\n".join([*lines[:-1], json.dumps(last)]) + "\n")
    assert load_session(path).terminations[1].segments is None


def test_tokens_that_paths_share_are_trained_once(renderer: ChatRenderer) -> None:
    """They belong to the prompt of the later rows. Each row has the reward of its own path."""
    episode = make(renderer)

    async def run() -> Episode:
        await episode.generate()
        branch = episode.fork()
        await asyncio.gather(episode.generate([USER_MESSAGE]), branch.generate([{"role": "user", "content": "x"}]))
        return branch

    branch = asyncio.run(run())
    graph, leaves = episode.graph, [episode.leaf or 0, branch.leaf or 0]
    graph.set_rewards(1, [0.5])
    for reward, leaf in enumerate(leaves, 1):
        graph.set_rewards(leaf, [float(reward)])
    paths = [(graph, leaf) for leaf in leaves]
    batch = to_batch(paths, pad_token_id=0)
    assert batch["response_mask"].sum(-1).tolist() == [2 * TURN_TOKENS, TURN_TOKENS]
    assert batch["rm_scores"].sum(-1).tolist() == [1.5, 2.0]
    packed = to_packed(paths)
    assert int(packed["response_mask"].sum()) == 3 * TURN_TOKENS
    assert float(packed["rm_scores"].sum()) == 3.5
    for row, leaf in enumerate(leaves):
        ids = batch["input_ids"][row][batch["attention_mask"][row].bool()].tolist()
        assert ids == graph.token_ids(leaf)
    with pytest.raises(BadInputError, match=r"path 1 .* is the beginning of an earlier path"):
        to_batch([(graph, leaves[0]), (graph, 1)], pad_token_id=0)
    assert to_batch([(graph, leaves[0])] * 2, pad_token_id=0)["response_mask"].sum(-1).tolist() == [8, 8]


def test_a_sample_whose_record_is_open_elsewhere_fails_alone(renderer: ChatRenderer, tmp_path: Path) -> None:
    tasks = [Task(name, [USER_MESSAGE]) for name in ("a", "b")]

    async def run() -> dict[str, Sample]:
        runner = RolloutRunner(
            TeamLoop(), CountingPolicy(), renderer=renderer, limits=RolloutLimits(500), run_dir=tmp_path
        )
        return {group.task.id: group.samples[0] async for group in runner.run(tasks)}

    with Recorder(tmp_path, "a-0"):
        samples = asyncio.run(run())
    assert samples["b"].stop_reason == "done"
    assert samples["a"].stop_reason == "error"
    assert "another process records the session" in (samples["a"].error or {})["message"]
    assert asyncio.run(run())["a"].stop_reason == "done"


def test_a_thousand_calls_in_one_turn_need_few_threads() -> None:
    import threading

    from verl_server.agent import ToolCall, ToolRegistry

    most = 0

    def count_threads(number: int) -> int:
        """Returns its argument."""
        nonlocal most
        most = max(most, threading.active_count())
        return number

    before = threading.active_count()
    calls = [ToolCall("count_threads", {"number": number}) for number in range(1000)]
    results = asyncio.run(ToolRegistry([count_threads, return_long_text]).call_all(calls))
    assert [int(result.content) for result in results] == list(range(1000))
    assert most - before <= 2 * 16, "a thread ends after its result is read"


def test_an_image_belongs_to_its_branch(tmp_path: Path) -> None:
    """Two messages with images of the same size have the same tokens."""
    renderer = get_renderer(AutoProcessor.from_pretrained(make_vision_model(tmp_path)))
    urls = {name: image_data_url(Image.new("RGB", (60, 60), (40 * index, 0, 0))) for index, name in enumerate("ABCD")}
    sent: list[Any] = []

    class Recording(CountingPolicy):
        async def __call__(self, *, rid: str, session_id: str, **request: Any) -> Any:
            sent.append(request.get("image_data"))
            return await super().__call__(rid=rid, session_id=session_id, **request)

    def look(name: str) -> list[dict[str, Any]]:
        image = {"type": "image", "image": urls[name]}
        return [{"role": "user", "content": [image, {"type": "text", "text": "what?"}]}]

    episode = make(renderer, Recording(fail_at=(2,)))

    async def run() -> None:
        for name in "AB":
            await episode.new_root(look(name)).generate()
        with pytest.raises(ServerError):
            await episode.generate(look("C"))
        await episode.generate(look("D"))

    asyncio.run(run())
    assert sent == [[urls[name]] for name in "ABCD"]


def test_each_segment_has_the_reward_once(renderer: ChatRenderer) -> None:
    """Also where the first branch is only the beginning of others, or is not trained."""

    class Forking(AgentLoop):
        async def run(self, episode: Episode) -> None:
            await episode.generate()
            for _ in range(2):
                await episode.fork().generate([USER_MESSAGE])
            episode.fork()
            episode.fork().add_messages([USER_MESSAGE])

    async def run() -> Sample:
        runner = RolloutRunner(
            Forking(), CountingPolicy(), renderer=renderer, limits=RolloutLimits(99), reward=lambda _: 1.0
        )
        (group,) = [group async for group in runner.run([Task("t", [USER_MESSAGE])])]
        return group.samples[0]

    sample = asyncio.run(run())
    with pytest.raises(BadInputError, match=r"has 2 trained paths.*for path in sample.paths"):
        _ = sample.path
    batch = to_batch(sample.paths, pad_token_id=0)
    assert batch["rm_scores"].sum(-1).tolist() == [1.0, 1.0]
    assert batch["response_mask"].sum(-1).tolist() == [2 * TURN_TOKENS, TURN_TOKENS]


def test_a_fork_has_the_weight_of_its_branch(renderer: ChatRenderer) -> None:
    episode = make(renderer)

    async def run() -> None:
        await episode.generate()
        episode.loss_weight = 0.0
        await episode.fork().generate([USER_MESSAGE])
        await episode.new_root([USER_MESSAGE]).generate()

    asyncio.run(run())
    assert [segment.loss_weight for segment in episode.segments] == [1.0], "the new root begins a path of its own"
    with pytest.raises(BadInputError, match=r"reason must be .* ForkReason, got 'later' .*; write ForkReason\.SAMPLE"):
        episode.fork(reason="later")  # type: ignore[arg-type]
    with pytest.raises(BadInputError, match="node must be a valid integer, got '1'"):
        episode.fork("1")  # type: ignore[arg-type]


def test_a_closed_episode_records_nothing(renderer: ChatRenderer) -> None:
    episode = make(renderer)
    asyncio.run(episode.generate())
    branch = episode.fork()
    episode.close()
    with pytest.raises(BadInputError, match="has ended"):
        branch.add_messages([USER_MESSAGE])
    with pytest.raises(BadInputError, match="has ended"):
        branch.append_text("x")
    assert len(episode.graph.nodes) == 2


def test_a_turn_that_close_ends_says_so(renderer: ChatRenderer) -> None:
    async def wait(**_: Any) -> Any:
        await asyncio.sleep(100)

    class ClosesTooEarly(AgentLoop):
        async def run(self, episode: Episode) -> None:
            turn = asyncio.create_task(episode.generate())
            await asyncio.sleep(0.05)
            episode.close()
            await turn

    episode = make(renderer, wait)
    assert asyncio.run(ClosesTooEarly([]).run_episode(episode)) == "error"
    assert "the episode was closed while this turn was being generated" in str(episode.exception)


def test_a_reward_of_a_context_node_stays_in_its_row(renderer: ChatRenderer) -> None:
    """It belongs to the turn before it, which is trained in the row of another path."""
    episode = make(renderer)

    async def run() -> list[int]:
        await episode.generate()
        leaves = []
        for text, reward in (("x", 10.0), ("y", 20.0)):
            branch = episode.fork()
            branch.add_messages([{"role": "user", "content": text}])
            episode.graph.set_rewards(branch.leaf or 0, [reward])
            await branch.generate()
            episode.graph.set_rewards(branch.leaf or 0, [1.0])
            leaves.append(branch.leaf or 0)
        return leaves

    leaves = asyncio.run(run())
    scores = to_batch([(episode.graph, leaf) for leaf in leaves], pad_token_id=0)["rm_scores"]
    assert scores.sum(-1).tolist() == [11.0, 21.0]


def test_a_sub_agent_with_the_same_messages_continues_with_its_own_prompt(tmp_path: Path) -> None:
    """Its tools are other tools, so its prompt differs from that of the first branch."""
    tokenizer = chat_tokenizer(tmp_path / "tokenizer")
    tokenizer.chat_template = QWEN
    renderer, policy = ChatRenderer(tokenizer), CountingPolicy()

    async def run(recorder: Recorder) -> tuple[Segment, ...]:
        episode = Episode(Task("t", [USER_MESSAGE]), recorder, policy, renderer, RolloutLimits(500), {}, [add])
        await episode.generate()
        await episode.new_root([USER_MESSAGE], [return_long_text]).generate()
        return episode.segments

    segments = []
    for _ in range(2):
        with Recorder(tmp_path, "s") as recorder:
            segments.append(asyncio.run(run(recorder)))
    assert segments[0] == segments[1]
    assert policy.num_calls == 2


def test_rewards_of_the_tokens_before_a_turn_stay_in_its_row(renderer: ChatRenderer) -> None:
    graph = TrajectoryGraph("s")
    graph.add_node(None, [1], sampled=False)
    graph.add_node(0, [2], sampled=True, logprobs=[-1.0], spans=[Span(1, 0, 1)])
    for token in (3, 5):
        reason = ForkReason.SAMPLE if token == 5 else None
        context = graph.add_node(1, [token, token], sampled=False, fork_reason=reason)
        turn = graph.add_node(context.id, [token + 1], sampled=True, logprobs=[-1.0], spans=[Span(1, 0, 1)])
        graph.set_rewards(turn.id, [1.0])
    graph.set_rewards(4, [3.0, 4.0])
    assert to_batch([(graph, 3), (graph, 5)], pad_token_id=0)["rm_scores"].sum(-1).tolist() == [1.0, 8.0]


@pytest.mark.parametrize("fails", [False, True])
def test_a_sample_without_a_turn_of_its_first_branch_is_the_same_when_it_is_loaded(
    renderer: ChatRenderer, tmp_path: Path, fails: bool
) -> None:
    """Its first branch has no prompt, or has lost the prompt because its first turn has failed."""

    class Untrained(AgentLoop):
        async def run(self, episode: Episode) -> None:
            if fails:
                await episode.generate()
            branch = episode.fork()
            branch.loss_weight = 0.0
            await branch.generate()

    async def run(policy: CountingPolicy) -> Sample:
        runner = RolloutRunner(
            Untrained(), policy, renderer=renderer, limits=RolloutLimits(99), reward=lambda _: 1.0, run_dir=tmp_path
        )
        (group,) = [group async for group in runner.run([Task("t", [USER_MESSAGE])])]
        return group.samples[0]

    sample = asyncio.run(run(CountingPolicy(fail_at=(0,) if fails else ())))
    recorded = load_session(tmp_path / "t-0.jsonl")
    assert (sample.leaf, sample.segments, sample.num_turns) == (0, (), 0)
    assert (recorded, list(recorded.terminations)) == (sample.graph, [0])
    assert sample.reward == (None if fails else 1.0)
    if not fails:
        policy = CountingPolicy()
        loaded = asyncio.run(run(policy))
        assert dataclasses.replace(loaded, task=sample.task) == sample
        assert policy.num_calls == 0


def test_a_path_whose_turns_are_in_another_path_is_no_segment(renderer: ChatRenderer) -> None:
    """The agent adds a message, then goes back to the turn before it. Another path ends with a message after a turn."""
    episode = make(renderer)

    async def run() -> None:
        turn = await episode.generate()
        episode.add_messages([USER_MESSAGE])
        edited = episode.fork(turn.node, ForkReason.EDITED)
        await edited.generate([{"role": "user", "content": "edited"}])
        episode.adopt(edited)
        for name in "ab":
            ended = episode.fork()
            await ended.generate([{"role": "user", "content": name}])
            ended.add_messages([USER_MESSAGE])

    asyncio.run(run())
    graph = episode.graph
    assert [graph.num_turns(segment.leaf) for segment in episode.segments] == [3, 3]
    mask = to_batch([(graph, segment.leaf) for segment in episode.segments], pad_token_id=0)["response_mask"]
    assert int(mask.sum()) == sum(len(node.token_ids) for node in graph.nodes if node.sampled) == 4 * TURN_TOKENS


def test_a_turn_without_a_token_is_no_segment(renderer: ChatRenderer) -> None:
    class Silent(CountingPolicy):
        async def __call__(self, *, rid: str, session_id: str, **request: Any) -> Any:
            reply = await super().__call__(rid=rid, session_id=session_id, **request)
            return reply if self.num_calls == 1 else {"output_ids": [], "meta_info": EMPTY_META}

    episode = make(renderer, Silent())

    async def run() -> None:
        await episode.generate()
        await episode.fork().generate([USER_MESSAGE])

    asyncio.run(run())
    assert [segment.leaf for segment in episode.segments] == [1]


def test_a_loop_that_repeats_failed_turns_ends_at_a_limit(renderer: ChatRenderer) -> None:
    """`EpisodeStopped` is no `Exception`. At a limit, `generate` raises without a wait, which would hold the run."""

    class Repeats(AgentLoop):
        async def run(self, episode: Episode) -> None:
            messages = None
            while True:
                try:
                    await episode.generate(messages)
                    messages = [USER_MESSAGE]
                except Exception:  # noqa: BLE001
                    continue

    class Swallows(AgentLoop):
        async def run(self, episode: Episode) -> None:
            await episode.generate()
            try:
                while True:
                    await episode.generate([USER_MESSAGE])
            except Exception:  # noqa: BLE001
                pass

    for loop in (Repeats([]), Swallows([])):
        episode = make(renderer, max_turns=3)
        assert asyncio.run(loop.run_episode(episode)) == "max_turns"
        assert len(prompts_of(episode.graph)) == 3


def test_messages_follow_a_turn(renderer: ChatRenderer) -> None:
    """A template would write an empty assistant turn between two lists of messages."""
    episode = make(renderer)
    episode.add_messages([USER_MESSAGE])
    for call in (
        lambda: episode.add_messages([USER_MESSAGE]),
        lambda: asyncio.run(episode.generate([USER_MESSAGE])),
        lambda: asyncio.run(episode.fork().generate([USER_MESSAGE])),
    ):
        with pytest.raises(BadInputError, match="pass all messages in one call"):
            call()
    asyncio.run(episode.generate())
    history = [USER_MESSAGE, {"role": "assistant", "content": "x"}, USER_MESSAGE]
    with pytest.raises(BadInputError, match="pass only the new messages"):
        asyncio.run(episode.generate(history))
    with pytest.raises(BadInputError, match="messages must be a list, got str"):
        asyncio.run(episode.generate("hello"))  # type: ignore[arg-type]
    assert len(episode.graph.nodes) == 2


def test_weights_of_paths_with_common_turns(renderer: ChatRenderer) -> None:
    """A common turn has the weight of the branch that comes first, also if that branch has adopted another one."""
    episode = make(renderer)

    async def run() -> None:
        await episode.generate()
        fork = episode.fork()
        fork.loss_weight = 0.25
        await fork.generate([USER_MESSAGE])
        await episode.generate([USER_MESSAGE])
        episode.adopt(fork)

    asyncio.run(run())
    assert [segment.loss_weight for segment in episode.segments] == [1.0, 0.25]
    batch = to_batch([(episode.graph, segment.leaf) for segment in episode.segments], pad_token_id=0)
    assert batch["response_mask"].sum(-1).tolist() == [2 * TURN_TOKENS, TURN_TOKENS]
    early = make(renderer)
    early.loss_weight = 0.0
    assert early.fork().loss_weight == 0.0
    assert early.new_root([USER_MESSAGE]).loss_weight == 1.0


def weights_of_turns(episode: Episode) -> dict[str, float]:
    """The weight of each turn by the text before it, which is the same in the rows of `to_batch` and in `to_tree`."""
    graph, segments = episode.graph, episode.segments
    packed = to_packed([(graph, segment.leaf) for segment in segments])
    graph.terminate(segments[-1].leaf, "done", segments=[(segment.leaf, segment.loss_weight) for segment in segments])
    weights: dict[str, float] = {}
    for segment, start in zip(segments, packed["cu_seqlens"].tolist(), strict=False):
        for before, node in itertools.pairwise(graph.path(segment.leaf)):
            if packed["response_mask"][start + graph.num_tokens(node.id) - 1]:
                name = (before.message or {})["messages"][-1]["content"]
                assert name not in weights, "a turn is trained once"
                weights[name] = segment.loss_weight
    tree = to_tree(graph)
    num_trained = int(packed["response_mask"].sum())
    assert int((tree["response_mask"] * (tree["loss_weight"] > 0)).sum()) == num_trained
    assert float((tree["response_mask"] * tree["loss_weight"]).sum()) == TURN_TOKENS * sum(weights.values())
    return weights


@pytest.mark.parametrize("adopts", [False, True])
@pytest.mark.parametrize("weight", [0.5, 1.0, 0.0])
def test_a_turn_before_a_fork_has_the_weight_of_its_branch(renderer: ChatRenderer, weight: float, adopts: bool) -> None:
    """Also if that branch has not gone on. A path that only begins a path of the same weight is no segment."""
    episode = make(renderer)

    async def run() -> None:
        await episode.generate()
        fork = episode.fork()
        fork.loss_weight = weight
        await fork.generate([{"role": "user", "content": "fork"}])
        if adopts:
            episode.adopt(fork)

    asyncio.run(run())
    leaves = {0.5: [1, 3], 1.0: [3], 0.0: [1]}[weight]
    assert [segment.leaf for segment in episode.segments] == leaves
    for leaf in leaves:
        episode.graph.set_rewards(leaf, [2.0])
    assert weights_of_turns(episode) == {"hello": 1.0} | ({"fork": weight} if weight else {})
    scores = to_batch([(episode.graph, leaf) for leaf in leaves], pad_token_id=0)["rm_scores"]
    assert scores.sum(-1).tolist() == [2.0] * len(leaves), "the reward of each segment is in its own row"


def test_paths_keep_their_order_when_they_are_adopted(renderer: ChatRenderer) -> None:
    """The turn `b` belongs to the branch that generated it, whichever branch adopts its path, and not to its fork."""
    episode = make(renderer)

    async def run() -> None:
        early = episode.fork(None)
        await episode.generate()
        branch = episode.fork()
        await branch.generate([{"role": "user", "content": "b"}])
        half = branch.fork()
        half.loss_weight = 0.5
        await half.generate([{"role": "user", "content": "half"}])
        late = episode.fork()
        await late.generate([{"role": "user", "content": "late"}])
        await branch.generate([{"role": "user", "content": "more"}])
        late.adopt(branch)
        early.adopt(half)

    asyncio.run(run())
    weights = weights_of_turns(episode)
    assert weights == {"hello": 1.0, "b": 1.0, "half": 0.5, "late": 1.0, "more": 1.0}


def test_appended_text_without_tokens_keeps_the_end_of_the_turn(renderer: ChatRenderer) -> None:
    """The template's end marker follows a turn only if the policy has not written it."""
    end = renderer.encode("x<|im_end|>")

    async def policy(**request: Any) -> Any:
        meta = EMPTY_META | {"output_token_logprobs": [[-1.0, token, None] for token in end]}
        return {"output_ids": end, "meta_info": meta}

    prompts = []
    for texts in ([], [""]):
        episode = make(renderer, policy)

        async def run(episode: Episode = episode, texts: list[str] = texts) -> None:
            await episode.generate()
            for text in texts:
                episode.append_text(text)
            await episode.generate([USER_MESSAGE])

        asyncio.run(run())
        prompts.append(episode.graph.token_ids(episode.leaf or 0))
    assert prompts[0] == prompts[1]
    assert renderer.decode(prompts[0]).count("x") == 2


def prompt_with_tools(graph: TrajectoryGraph, renderer: ChatRenderer, leaf: int) -> str:
    return str(renderer._tokenizer.decode(graph.path(leaf)[0].token_ids))


def test_a_recorded_prompt_of_other_tools_is_not_replayed(tmp_path: Path) -> None:
    """The tools of a sub-agent have changed. Recordings of earlier versions do not tell which tools they had."""
    tokenizer = chat_tokenizer(tmp_path / "tokenizer")
    tokenizer.chat_template = "{{ strftime_now('%f') + ' ' }}" + QWEN
    renderer, policy = ChatRenderer(tokenizer), CountingPolicy()

    async def run(recorder: Recorder, tools: list[Any]) -> int | None:
        episode = Episode(Task("t", [USER_MESSAGE]), recorder, policy, renderer, RolloutLimits(500), {})
        branch = episode.new_root([USER_MESSAGE], tools)
        await branch.generate()
        return branch.leaf

    leaves = []
    for tools in ([add], [add], [return_long_text], [], [add]):
        with Recorder(tmp_path, "s") as recorder:
            leaves.append(leaf := asyncio.run(run(recorder, tools)))
            text = prompt_with_tools(recorder.graph, renderer, leaf or 0)
            assert [name in text for name in ("add", "return_long_text")] == [add in tools, return_long_text in tools]
    assert leaves == [1, 1, 3, 5, 1]
    assert policy.num_calls == 3
    path = tmp_path / "s.jsonl"
    lines = [json.loads(line) for line in path.read_bytes().splitlines()][:3]
    assert len(lines[1]["node"].pop("tools_digest")) == 16
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with Recorder(tmp_path, "s") as recorder:
        assert asyncio.run(run(recorder, [add])) == 1
    assert policy.num_calls == 3


def test_a_fork_of_another_root_has_the_tools_of_its_prompt(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path / "tokenizer")
    tokenizer.chat_template = QWEN
    renderer = ChatRenderer(tokenizer)
    episode = Episode(
        Task("t", [USER_MESSAGE]), TrajectoryGraph("s"), CountingPolicy(), renderer, RolloutLimits(500), {}, [add]
    )

    async def run() -> list[list[str]]:
        await episode.generate()
        history = [{"role": "user", "content": "other"}]
        other = episode.new_root(history, [return_long_text])
        node = (await other.generate()).node
        forks = [episode.fork(), episode.fork(1), episode.fork(node), other.fork(1), other.fork(node)]
        assert [fork.messages for fork in forks] == [[USER_MESSAGE], [USER_MESSAGE], history, [USER_MESSAGE], history]
        return [fork.tools.names for fork in forks]

    names = asyncio.run(run())
    assert [found[0] for found in names] == ["add", "add", "return_long_text", "add", "return_long_text"]


def test_a_limit_that_another_branch_reaches_stops_the_turn(renderer: ChatRenderer) -> None:
    """The limit is reached after the turn has begun and before its request is made."""
    policy = CountingPolicy()
    episode = make(renderer, policy, max_response_tokens=TURN_TOKENS)
    episode.add_messages([USER_MESSAGE])
    branch = episode.fork()
    asyncio.run(episode.generate())
    with pytest.raises(EpisodeStopped, match="max_response_tokens"):
        asyncio.run(branch._cursor.request_turn({}))
    assert policy.num_calls == 1
