"""Environments: one instance for each sample, with tools, rewards, a setup and a teardown."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pytest
from agent_helpers import ScriptedGenerateFn, add, call_text
from helpers import QWEN

from verl_server import BadInputError, InfrastructureError
from verl_server.agent import (
    AgentLoop,
    Environment,
    Episode,
    FunctionTool,
    RolloutLimits,
    RolloutRunner,
    Sample,
    Task,
    ToolAgentLoop,
    ToolCall,
    ToolRegistry,
    reward,
    tool,
)
from verl_server.tiny import make_tokenizer
from verl_server.trajectory import ChatRenderer, list_sessions, load_session, to_batch, to_tree


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    tokenizer = make_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    tokenizer.chat_template = QWEN
    return ChatRenderer(tokenizer)


class Shop(Environment):
    """A shop with a basket. `_events` has what happened in all samples."""

    _events: ClassVar[list[str]] = []
    _setup_failures: ClassVar[int] = 0

    async def setup(self) -> None:
        await asyncio.sleep(0)
        self._events.append("setup")
        self.basket: list[str] = []
        if type(self)._setup_failures:
            type(self)._setup_failures -= 1
            raise OSError("no container")

    @tool(timeout_s=5.0, max_result_tokens=24, truncate="middle")
    async def buy(self, item: Annotated[str, "what to put into the basket"]) -> str:
        self.basket.append(item)
        return f"the basket has {len(self.basket)} items: {self.basket}"

    @tool
    def look_around(self) -> str:
        """The name of the shop."""
        return str(self.task.data["name"])

    @reward(timeout_s=5.0)
    async def right_basket(self, sample: Sample) -> float:
        return float(self.basket == self.task.data["wanted"])

    @reward(weight=-0.1)
    def num_turns(self, sample: Sample) -> int:
        return sample.num_turns

    @reward(weight=0)
    def num_items(self, sample: Sample) -> int:
        return len(self.basket)

    async def teardown(self) -> None:
        self._events.append("teardown")


@pytest.fixture(autouse=True)
def _no_events() -> Iterator[None]:
    Shop._events.clear()
    Shop._setup_failures = 0
    yield
    Shop._setup_failures = 0


def make_tasks(*wanted: list[str]) -> list[Task]:
    return [
        Task(f"t{number}", [{"role": "user", "content": f"buy {number}"}], {"name": "corner shop", "wanted": items})
        for number, items in enumerate(wanted)
    ]


def buying_policy(renderer: ChatRenderer) -> ScriptedGenerateFn:
    """Buys a pear, and after the result says that it is done."""
    tokenizer = renderer._tokenizer
    return ScriptedGenerateFn(tokenizer, lambda prompt: "done" if "basket" in prompt else call_text("buy", item="pear"))


def run(agent: Any, generate: Any, renderer: ChatRenderer, tasks: list[Task], **options: Any) -> list[Sample]:
    async def collect() -> list[Sample]:
        runner = RolloutRunner(agent, generate, renderer=renderer, limits=RolloutLimits(500), **options)
        return [sample async for group in runner.run(tasks) for sample in group.samples]

    samples = asyncio.run(collect())
    return sorted(samples, key=lambda sample: (sample.task.id, sample.index))


# -- samples -----------------------------------------------------------------------------------------


def test_each_sample_has_an_environment_of_its_own(renderer: ChatRenderer, tmp_path: Path) -> None:
    tasks, generate = make_tasks(["pear"], ["apple"]), buying_policy(renderer)
    samples = run(Shop, generate, renderer, tasks, n=3, run_dir=tmp_path)
    assert [sample.stop_reason for sample in samples] == ["done"] * 6
    assert [sample.rewards for sample in samples] == [
        {"right_basket": float(number < 3), "num_turns": 2.0, "num_items": 1.0} for number in range(6)
    ]
    assert [sample.reward for sample in samples] == pytest.approx([0.8] * 3 + [-0.2] * 3)
    assert sorted(Shop._events) == ["setup"] * 6 + ["teardown"] * 6
    assert all("\nthe basket h [cut] " in prompt and "['pear']" in prompt for prompt in generate.prompts[6:])
    assert load_session(tmp_path / "t0-0.jsonl").terminations[samples[0].leaf or 0].rewards == samples[0].rewards

    loaded = run(Shop, generate, renderer, tasks, n=3, run_dir=tmp_path)
    assert len(Shop._events) == 12
    assert [dataclasses.replace(sample, task=tasks[0]) for sample in loaded] == [
        dataclasses.replace(sample, task=tasks[0]) for sample in samples
    ]


class Bigger(Shop):
    """With one more reward."""

    @reward(weight=2.0)
    def basket_size(self, sample: Sample) -> float:
        return float(len(self.basket))


def test_a_new_reward_replays_the_sample_in_a_new_environment(renderer: ChatRenderer, tmp_path: Path) -> None:
    """The reward needs the basket, which is not recorded: the tools are called again, and the policy is not."""
    tasks, generate = make_tasks(["pear"]), buying_policy(renderer)
    Bigger.__qualname__ = "Shop"  # the recorded session belongs to an agent of this name
    run(Shop, generate, renderer, tasks, run_dir=tmp_path)
    (sample,) = run(Bigger, generate, renderer, tasks, run_dir=tmp_path)
    assert sample.reward == pytest.approx(2.8)
    assert sample.rewards["basket_size"] == 1.0
    assert len(generate.prompts) == 2
    assert Shop._events == ["setup", "teardown"] * 2


def test_the_setup_is_repeated_and_the_teardown_is_always_called(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verl_server.agent.environments.RETRY_DELAY_S", 0.01)
    Shop._setup_failures = 2
    (sample,) = run(Shop, buying_policy(renderer), renderer, make_tasks(["pear"]))
    assert sample.reward == pytest.approx(0.8)
    assert Shop._events == ["setup", "teardown"] * 3

    Shop._setup_failures = 3
    (sample,) = run(Shop, buying_policy(renderer), renderer, make_tasks(["pear"]))
    assert (sample.stop_reason, sample.reward, (sample.error or {})["message"]) == ("error", None, "no container")
    assert Shop._events == ["setup", "teardown"] * 6


class Hanging(Shop):
    """Its setup and its teardown hang, and its reward does."""

    setup_timeout_s: ClassVar[float] = 0.05
    setup_attempts: ClassVar[int] = 1
    teardown_timeout_s: ClassVar[float] = 0.05
    hangs_in: ClassVar[str] = ""

    async def _hang(self, name: str) -> None:
        if self.hangs_in == name:
            await asyncio.sleep(60)

    async def setup(self) -> None:
        await super().setup()
        await self._hang("setup")

    async def teardown(self) -> None:
        await super().teardown()
        await self._hang("teardown")

    @reward(timeout_s=0.05)
    async def right_basket(self, sample: Sample) -> float:
        await self._hang("reward")
        return 1.0


@pytest.mark.parametrize(
    ("hangs_in", "expected"),
    [("setup", "Hanging.setup took longer than 0.05 s"), ("reward", "'right_basket' took longer"), ("teardown", "")],
)
def test_every_step_has_a_deadline(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch, hangs_in: str, expected: str
) -> None:
    monkeypatch.setattr(Hanging, "hangs_in", hangs_in)
    started = time.monotonic()
    (sample,) = run(Hanging, buying_policy(renderer), renderer, make_tasks(["pear"]))
    assert time.monotonic() - started < 20.0
    assert expected in (sample.error or {"message": ""})["message"]
    assert (sample.stop_reason == "error") == bool(expected)
    assert Shop._events == ["setup", "teardown"]


class Flaky(Shop):
    """Its tool loses its container at the first call of each task, and the next environment works."""

    _seen: ClassVar[set[str]] = set()
    is_down: ClassVar[bool] = False

    @tool
    async def buy(self, item: str) -> str:
        self.basket.append(item)
        if type(self).is_down or self.task.id not in self._seen:
            self._seen.add(self.task.id)
            raise InfrastructureError("the container is gone")
        return f"the basket has {len(self.basket)} items"


def test_a_failure_of_the_infrastructure_is_no_answer(renderer: ChatRenderer, tmp_path: Path) -> None:
    """The policy does not read it. The sample continues in another environment, from its recorded turn."""
    generate = buying_policy(renderer)
    (sample,) = run(Flaky, generate, renderer, make_tasks(["pear"]), run_dir=tmp_path)
    assert (sample.stop_reason, sample.rewards["num_items"]) == ("done", 1.0)
    assert Shop._events == ["setup", "teardown"] * 2
    assert len(generate.prompts) == 2
    assert not any("container is gone" in prompt for prompt in generate.prompts)

    Flaky.is_down = True
    try:
        (sample,) = run(Flaky, generate, renderer, make_tasks(["x"]), max_attempts=3)
    finally:
        Flaky.is_down = False
    assert (sample.stop_reason, sample.reward) == ("error", None)
    assert (sample.error or {})["type"] == "InfrastructureError"
    assert len(Shop._events) == 4 + 6


class Slow(Shop):
    """Counts what runs at a time."""

    running: ClassVar[dict[str, int]] = {"episodes": 0, "rewards": 0, "calls": 0}
    most: ClassVar[dict[str, int]] = {"episodes": 0, "rewards": 0, "calls": 0}

    async def count(self, name: str) -> None:
        self.running[name] += 1
        self.most[name] = max(self.most[name], self.running[name])
        await asyncio.sleep(0.02)
        self.running[name] -= 1

    async def run(self, episode: Episode) -> None:
        await self.count("episodes")
        await super().run(episode)

    @tool(max_concurrency=2)
    async def buy(self, item: str) -> str:
        await self.count("calls")
        return "the basket is full"

    @reward
    async def right_basket(self, sample: Sample) -> float:
        await self.count("rewards")
        return 1.0


def test_limits_of_concurrency_hold_in_every_phase(renderer: ChatRenderer) -> None:
    samples = run(Slow, buying_policy(renderer), renderer, make_tasks(*[["pear"]] * 6), n=4, max_concurrency=3)
    assert [sample.stop_reason for sample in samples] == ["done"] * 24
    assert Slow.most["episodes"] == 3
    assert Slow.most["calls"] == 2
    assert 0 < Slow.most["rewards"] <= 6
    for sample in samples:
        assert set(sample.times) == {"queue", "setup", "generate", "tool", "reward"}
        assert all(seconds > 0.0 for seconds in sample.times.values())
        assert sample.times["tool"] >= 0.02


class TwoEpisodes(Environment):
    """The reward of each sample waits until two episodes have begun."""

    _has_second_begun: ClassVar[asyncio.Event]
    _num_begun: ClassVar[int] = 0

    @classmethod
    def begin(cls) -> None:
        cls._num_begun += 1
        if cls._num_begun == 2:
            cls._has_second_begun.set()

    async def run(self, episode: Episode) -> None:
        self.begin()
        await episode.generate()

    @reward(timeout_s=5.0)
    async def wait_for_the_second_episode(self, sample: Sample) -> float:
        await self._has_second_begun.wait()
        return 1.0


class TwoEpisodesLoop(AgentLoop):
    """An agent loop that counts its episodes as `TwoEpisodes` does."""

    async def run(self, episode: Episode) -> None:
        TwoEpisodes.begin()
        await episode.generate()


@reward(timeout_s=5.0)
async def wait_for_the_second_episode(sample: Sample) -> float:
    await TwoEpisodes._has_second_begun.wait()
    return 1.0


@pytest.mark.parametrize(
    ("agent", "arguments"),
    [(TwoEpisodes, {}), (TwoEpisodesLoop(), {"reward": wait_for_the_second_episode})],
    ids=["environment", "function"],
)
def test_an_episode_begins_while_a_reward_is_computed(
    agent: Any, arguments: dict[str, Any], renderer: ChatRenderer
) -> None:
    TwoEpisodes._num_begun, TwoEpisodes._has_second_begun = 0, asyncio.Event()
    tasks = make_tasks(["a"], ["b"])
    samples = run(agent, buying_policy(renderer), renderer, tasks, max_concurrency=1, **arguments)
    assert [sample.reward for sample in samples] == [1.0, 1.0]


def test_the_teardown_of_a_cancelled_run_is_called(renderer: ChatRenderer) -> None:
    async def block(**request: Any) -> Any:
        await asyncio.Event().wait()

    async def start_and_cancel() -> None:
        runner = RolloutRunner(Shop, block, renderer=renderer, limits=RolloutLimits(99), n=2)

        async def consume() -> None:
            async for _ in runner.run(make_tasks(["a"], ["b"])):
                pass

        consumer = asyncio.create_task(consume())
        while len(Shop._events) < 4:
            await asyncio.sleep(0.01)
        consumer.cancel()
        await asyncio.wait({consumer}, timeout=10.0)

    asyncio.run(start_and_cancel())
    assert sorted(Shop._events) == ["setup"] * 4 + ["teardown"] * 4


# -- arguments ---------------------------------------------------------------------------------------


def test_a_runner_takes_a_list_of_tools(renderer: ChatRenderer) -> None:
    tokenizer = renderer._tokenizer
    generate = ScriptedGenerateFn(tokenizer, lambda prompt: "42" if "\n42" in prompt else call_text("add", a=40, b=2))
    (sample,) = run([add], generate, renderer, make_tasks(["x"]), reward=lambda s: float("42" in s.text))
    assert (sample.reward, sample.rewards, sample.num_turns) == (1.0, {"reward": 1.0}, 2)


def test_tools_and_rewards_of_an_environment_have_their_order_and_options() -> None:
    shop = Flaky(make_tasks(["x"])[0])
    assert shop.tools.names == ["look_around", "buy"], "the method that a subclass defines again comes last"
    function = shop.tools.schemas[0]["function"]
    assert function["description"] == "The name of the shop."
    described = Shop(make_tasks(["x"])[0]).tools.schemas[0]["function"]
    assert described["description"] == "buy"
    assert described["parameters"]["properties"]["item"]["description"] == "what to put into the basket"
    assert "self" not in described["parameters"]["properties"]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: tool(timeout_s=0), "timeout_s must be greater than 0"),
        (lambda: tool(max_result_tokens=0), "max_result_tokens must be greater than or equal to 1"),
        (lambda: tool(max_concurrency=True), "max_concurrency must be a valid integer"),
        (lambda: tool(truncate="both"), "truncate must be 'start', 'middle' or 'end'"),  # type: ignore[call-overload]
        (lambda: tool(name=""), "name must have at least 1 character"),
        (lambda: reward(weight=float("nan")), "weight must be a finite number"),
        (lambda: reward(timeout_s=-1), "timeout_s must be greater than 0"),
    ],
)
def test_wrong_options_are_refused(make: Any, expected: str) -> None:
    with pytest.raises(BadInputError, match=expected):
        make()


def test_an_instance_of_an_environment_is_refused(renderer: ChatRenderer) -> None:
    with pytest.raises(BadInputError, match=r"pass the class Shop, not Shop\(\.\.\.\)"):
        RolloutRunner(Shop(make_tasks(["x"])[0]), buying_policy(renderer), renderer=renderer, limits=RolloutLimits(9))


def test_functions_have_options_too(renderer: ChatRenderer) -> None:
    @tool(name="now", description="The time.", timeout_s=0.05, max_concurrency=1)
    async def tell_time(wait_s: float) -> str:
        await asyncio.sleep(wait_s)
        return "noon"

    (result,) = asyncio.run(ToolRegistry([tell_time]).call_all([ToolCall("now", {"wait_s": 5.0})]))
    assert result.error_type == "timeout"
    assert FunctionTool(tell_time, timeout_s=3.0).timeout_s == 3.0
    assert ToolAgentLoop([tell_time]).tools.schemas[0]["function"]["description"] == "The time."
    for _ in range(2):  # a semaphore belongs to one event loop
        calls = [ToolCall("now", {"wait_s": 0.03})] * 3
        results = asyncio.run(ToolRegistry([tell_time]).call_all(calls))
        assert [item.content for item in results] == ["noon"] * 3, "waiting for the other calls does not count"


@pytest.mark.parametrize(("cut", "expected"), [("start", "[cut] yz"), ("end", "ab [cut]"), ("middle", "a [cut] z")])
def test_a_long_result_is_cut_where_the_tool_says(renderer: ChatRenderer, cut: str, expected: str) -> None:
    assert renderer.truncate("abcdefghijklmnopqrstuvwxyz", 2, cut) == expected
    assert renderer.truncate("ab", 2, cut) == "ab"
    emoji = renderer.truncate("\U0001f600" * 9, 7, cut)
    assert set(emoji) <= set("\U0001f600 [cut]")


# -- what user code does wrong -----------------------------------------------------------------------


class Misbehaving(Shop):
    """Does in `run` what `deeds` says for its task."""

    async def run(self, episode: Episode) -> None:
        deed = self.task.data.get("deed")
        if deed == "await what it cancelled":
            inner = asyncio.create_task(asyncio.sleep(60))
            await asyncio.sleep(0)
            inner.cancel()
            await inner
        if deed == "ignore its cancellation":
            with contextlib.suppress(BaseException):
                await asyncio.sleep(60)
            return
        await super().run(episode)


def task_with(name: str, **data: Any) -> Task:
    return Task(name, [{"role": "user", "content": f"buy {name}"}], {"name": "s", "wanted": ["pear"], **data})


def test_a_cancellation_within_a_sample_fails_this_sample_only(renderer: ChatRenderer) -> None:
    tasks = [task_with("a", deed="await what it cancelled"), task_with("b")]
    bad, good = run(Misbehaving, buying_policy(renderer), renderer, tasks)
    assert (bad.stop_reason, good.stop_reason) == ("error", "done")
    assert "awaited something that was cancelled" in (bad.error or {})["message"]


def test_a_sample_that_ignores_its_cancellation_is_not_finished(renderer: ChatRenderer, tmp_path: Path) -> None:
    tasks = [task_with("a", deed="ignore its cancellation"), task_with("b")]

    async def first_group() -> None:
        runner = RolloutRunner(
            Misbehaving, buying_policy(renderer), renderer=renderer, limits=RolloutLimits(500), run_dir=tmp_path
        )
        async with contextlib.aclosing(runner.run(tasks)) as groups:
            await anext(groups)

    asyncio.run(first_group())
    assert load_session(tmp_path / "b-0.jsonl").terminations
    assert not load_session(tmp_path / "a-0.jsonl").terminations


class Picky(Shop):
    """Its constructor fails for some tasks, and reads a setting of the task."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.goal = task.data["goal"]
        if self.goal == "exit":
            raise SystemExit(3)


def test_a_constructor_belongs_to_its_sample(
    renderer: ChatRenderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with `run_dir`. What the constructor reads from its task is no setting of all samples."""
    monkeypatch.setattr("verl_server.agent.environments.RETRY_DELAY_S", 0.001)
    tasks = [task_with("a"), task_with("b", goal="exit"), task_with("c", goal="x"), task_with("d", goal="y")]
    for order in (tasks, tasks[::-1]):
        samples = run(Picky, buying_policy(renderer), renderer, order, run_dir=tmp_path)
        assert [sample.stop_reason for sample in samples] == ["error", "error", "done", "done"]
        assert [(sample.error or {}).get("type") for sample in samples[:2]] == ["KeyError", "RuntimeError"]


def test_threads_of_tools_do_not_hold_the_records(renderer: ChatRenderer, tmp_path: Path) -> None:
    """Code of users may occupy all threads of the event loop's pool."""
    released = threading.Event()

    async def collect() -> int:
        loop = asyncio.get_running_loop()
        for _ in range(40):
            loop.run_in_executor(None, released.wait)
        runner = RolloutRunner(
            Shop, buying_policy(renderer), renderer=renderer, limits=RolloutLimits(500), run_dir=tmp_path
        )
        try:
            async with asyncio.timeout(20.0):
                return len([group async for group in runner.run(make_tasks(["pear"]))])
        finally:
            released.set()

    assert asyncio.run(collect()) == 1


class Late(Shop):
    """Its setup ends in time, while another sample blocks the event loop."""

    setup_timeout_s: ClassVar[float] = 0.2
    setup_attempts: ClassVar[int] = 1

    async def setup(self) -> None:
        await super().setup()
        if self.task.id == "a":
            await asyncio.sleep(0.1)
        else:
            await asyncio.sleep(0.05)
            time.sleep(0.4)


def test_a_setup_that_ended_in_time_counts(renderer: ChatRenderer) -> None:
    samples = run(Late, buying_policy(renderer), renderer, [task_with("a"), task_with("b")])
    assert [sample.stop_reason for sample in samples] == ["done", "done"]


class Tidy(Shop):
    """Its teardown takes some time."""

    async def teardown(self) -> None:
        self._events.append("begin")
        await asyncio.sleep(0.2)
        self._events.append("end")


def test_a_teardown_that_the_end_of_the_program_cuts_off_is_repeated(renderer: ChatRenderer) -> None:
    async def leave() -> None:
        runner = RolloutRunner(Tidy, buying_policy(renderer), renderer=renderer, limits=RolloutLimits(500))
        samples = runner.run([task_with("a")])
        consumer = asyncio.ensure_future(anext(samples))
        while "begin" not in Shop._events:
            await asyncio.sleep(0.01)
        assert not consumer.done()

    asyncio.run(leave())
    assert Shop._events == ["setup", "begin", "begin", "end"]


def test_a_generate_function_that_ignores_its_cancellation_is_left_behind(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verl_server.agent.user_code.CANCEL_TIMEOUT_S", 0.05)

    async def stubborn(**request: Any) -> Any:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.5)

    async def collect() -> list[str]:
        runner = RolloutRunner(Shop, stubborn, renderer=renderer, limits=RolloutLimits(500, timeout_s=0.1))
        return [group.samples[0].stop_reason async for group in runner.run([task_with("a")])]

    loop = asyncio.new_event_loop()  # `asyncio.run` would wait for the stubborn task
    assert loop.run_until_complete(asyncio.wait_for(collect(), 20.0)) == ["timeout_s"]


def test_rewards_that_changed_are_computed_from_the_record(renderer: ChatRenderer, tmp_path: Path) -> None:
    """Other weights need no replay. A reward that the environment has no longer does not count."""
    (first,) = run(Shop, buying_policy(renderer), renderer, [task_with("a")], run_dir=tmp_path)
    assert first.reward == pytest.approx(0.8)

    class Changed(Shop):
        @reward(weight=3.0)
        def num_turns(self, sample: Sample) -> int:
            return sample.num_turns

        num_items = None  # type: ignore[assignment]

    Changed.__qualname__ = "Shop"
    (loaded,) = run(Changed, buying_policy(renderer), renderer, [task_with("a")], run_dir=tmp_path)
    assert (loaded.reward, set(loaded.rewards)) == (7.0, {"right_basket", "num_turns"})
    assert loaded.graph.rewards == {loaded.leaf: [7.0]}, "what a batch reads"
    (file,) = list_sessions(tmp_path)
    for graph in (loaded.graph, load_session(file)):  # what exports and a later reader of the file see
        assert graph.last_termination is not None
        assert (graph.last_termination.reward, graph.rewards) == (7.0, {loaded.leaf: [7.0]})
    assert Shop._events == ["setup", "teardown"]


def test_a_reward_that_a_run_takes_away_is_not_in_the_file(renderer: ChatRenderer, tmp_path: Path) -> None:
    """All rewards have become metrics, so the sample has no reward any more. A later run without rewards agrees."""

    class Metrics(Shop):
        @reward(weight=0.0)
        async def right_basket(self, sample: Sample) -> float:
            raise NotImplementedError

        @reward(weight=0.0)
        def num_turns(self, sample: Sample) -> int:
            raise NotImplementedError

    class Silent(Shop):
        right_basket = num_turns = num_items = None  # type: ignore[assignment]

    Metrics.__qualname__ = Silent.__qualname__ = "Shop"
    sizes = []
    for agent, expected in ((Shop, 0.8), (Metrics, None), (Metrics, None), (Silent, None)):
        (sample,) = run(agent, buying_policy(renderer), renderer, [task_with("a")], run_dir=tmp_path)
        (file,) = list_sessions(tmp_path)
        recorded = load_session(file)
        assert recorded.last_termination is not None
        assert sample.reward == recorded.last_termination.reward == (expected and pytest.approx(expected))
        assert sample.graph.rewards == recorded.rewards == ({sample.leaf: [sample.reward]} if expected else {})
        assert to_tree(recorded)["rm_scores"].sum().item() == pytest.approx(expected or 0.0)
        sizes.append(file.stat().st_size)
    assert sizes[0] < sizes[1] == sizes[2] == sizes[3], "a run that changes nothing writes nothing"
    assert file.read_bytes().count(b"cleared_rewards") == 1
    assert Shop._events == ["setup", "teardown"]


def test_a_loaded_sample_is_trained_as_it_finished(renderer: ChatRenderer, tmp_path: Path) -> None:
    """A killed run has added nodes to it: the run replayed the sample for another reward, and a tool answered anew."""
    results = iter(["one item", "two items"])

    class Counter(Environment):
        @tool
        def buy(self, item: str) -> str:
            """Buy something."""
            return f"basket: {next(results)}"

        @reward
        def first(self, sample: Sample) -> float:
            return 1.0

    class Extra(Counter):
        @reward
        def second(self, sample: Sample) -> float:
            return 1.0

    Extra.__qualname__ = Counter.__qualname__
    policy, calls = buying_policy(renderer), asyncio.Event()

    async def stuck(**request: Any) -> Any:
        calls.set()
        await asyncio.sleep(100)

    async def kill() -> None:
        runner = RolloutRunner(Extra, stuck, renderer=renderer, limits=RolloutLimits(500), run_dir=tmp_path)
        consumer = asyncio.ensure_future(anext(runner.run([task_with("a")])))
        await calls.wait()
        consumer.cancel()
        await asyncio.wait([consumer])

    (sample,) = run(Counter, policy, renderer, [task_with("a")], run_dir=tmp_path)
    asyncio.run(kill())
    (file,) = list_sessions(tmp_path)
    assert load_session(file).last_termination is None, "the sample was continued"
    num_nodes = len(load_session(file).nodes)
    assert num_nodes > len(sample.graph.nodes)
    for _ in range(2):
        (loaded,) = run(Counter, policy, renderer, [task_with("a")], run_dir=tmp_path)
        assert (loaded.leaf, loaded.segments, loaded.reward) == (sample.leaf, sample.segments, 1.0)
        for graph in (loaded.graph, load_session(file)):
            assert graph.trained_segments == sample.graph.trained_segments
            tree, batch = to_tree(graph), to_batch([(graph, loaded.segments[0].leaf)], pad_token_id=0)
            assert int((tree["loss_weight"] * tree["response_mask"]).sum()) == int(batch["response_mask"].sum())
    assert len(load_session(file).nodes) == num_nodes
    assert file.read_bytes().count(b'{"termination"') == 2


def test_a_reward_of_the_runner_needs_a_name_of_its_own(renderer: ChatRenderer) -> None:
    class Named(Shop):
        @reward
        def reward(self, sample: Sample) -> float:
            return 1.0

    with pytest.raises(BadInputError, match="has a reward 'reward', and so has the runner"):
        RolloutRunner(
            Named, buying_policy(renderer), renderer=renderer, limits=RolloutLimits(9), reward=lambda sample: 1.0
        )


@pytest.mark.parametrize("value", [float("nan"), "1.5", None])
def test_a_metric_that_is_no_number_fails_its_sample(renderer: ChatRenderer, value: Any) -> None:
    class Odd(Shop):
        @reward(weight=0)
        def odd(self, sample: Sample) -> Any:
            return value

    (sample,) = run(Odd, buying_policy(renderer), renderer, [task_with("a")])
    assert (sample.stop_reason, sample.reward) == ("error", None)
    assert "the reward function 'odd' must return a finite number" in (sample.error or {})["message"]


def test_environments_share_the_models_of_their_tools() -> None:
    first, second = (Shop(task_with(name)).tools.get("buy") for name in "ab")
    assert isinstance(first, FunctionTool)
    assert isinstance(second, FunctionTool)
    assert first._arguments_model is second._arguments_model
    assert first._function != second._function


class Ignoring(Shop):
    """Cancels its own task, and goes on."""

    async def run(self, episode: Episode) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        await super().run(episode)


def test_an_agent_that_cancels_itself_and_goes_on_is_finished(renderer: ChatRenderer) -> None:
    (sample,) = run(Ignoring, buying_policy(renderer), renderer, [task_with("a")])
    assert sample.stop_reason == "done", sample.error


def test_a_replay_that_is_cancelled_leaves_the_recorded_reward(renderer: ChatRenderer, tmp_path: Path) -> None:
    """A reward was added, so the sample is replayed, and the program ends before it is finished."""
    task = task_with("a")
    run(Shop, buying_policy(renderer), renderer, [task], run_dir=tmp_path)
    before = load_session(tmp_path / "a-0.jsonl").rewards

    class Slower(Bigger):
        async def run(self, episode: Episode) -> None:
            await asyncio.sleep(60)

    Slower.__qualname__ = "Shop"

    async def leave() -> None:
        runner = RolloutRunner(
            Slower, buying_policy(renderer), renderer=renderer, limits=RolloutLimits(500), run_dir=tmp_path
        )
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(anext(runner.run([task])), 0.2)

    asyncio.run(leave())
    assert load_session(tmp_path / "a-0.jsonl").rewards == before
    (loaded,) = run(Shop, buying_policy(renderer), renderer, [task], run_dir=tmp_path)
    assert loaded.graph.rewards == before


class Mixin:
    prompt = "be brief"


class Configured(Mixin, Shop):
    """With a setting, also from a class that is no environment."""

    setup_timeout_s: ClassVar[float] = 7.0
    style = "long"


def test_the_settings_of_an_environment_are_inputs_of_its_samples(renderer: ChatRenderer, tmp_path: Path) -> None:
    tasks, generate = [task_with("a")], buying_policy(renderer)
    run(Configured, generate, renderer, tasks, run_dir=tmp_path)
    for attribute, value, is_setting in (("setup_timeout_s", 9.0, False), ("style", "x", True), ("prompt", "y", True)):
        changed = type("Configured", (Configured,), {attribute: value})
        changed.__qualname__ = "Configured"
        if is_setting:
            with pytest.raises(BadInputError, match=f"attribute '{attribute}'"):
                run(changed, generate, renderer, tasks, run_dir=tmp_path)
        else:
            run(changed, generate, renderer, tasks, run_dir=tmp_path)
