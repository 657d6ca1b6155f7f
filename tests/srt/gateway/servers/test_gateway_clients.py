"""One conversation by many client libraries and programs, through the gateway on a real server.

The conversation: a question, the call of a tool, its result, an answer, another question, another answer. The policy of
random weights follows a script: a grammar for each turn. LiteLLM, OpenAI's Agents SDK and mini-swe-agent need other
versions of packages than SGLang. They run as processes with an environment of their own, which `make clients` makes.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_clients.programs import run_mini_swe_agent, run_program
from agent_clients.sdk_client import SDKS
from transformers import AutoTokenizer

from verl_server import HttpServerEngineAdapter
from verl_server.agent import RolloutLimits, as_generate_fn
from verl_server.gateway import Gateway
from verl_server.trajectory import ChatRenderer, TrajectoryGraph, load_session

PROGRAMS = Path(__file__).parents[2] / "agent_clients"
CONTEXT_LENGTH = 16384
CALL = r'<tool_call>\{"name": "add", "arguments": \{"a": 1, "b": 2\}\}</tool_call>'
PLAIN_SCRIPT = [CALL, r"The sum is 3\.", r"Yes, I am sure\."]
THOUGHT = r"<think>[a-z]{6}</think>\n\n"
SCRIPTS = {"plain": PLAIN_SCRIPT, "thoughts": [THOUGHT + turn for turn in PLAIN_SCRIPT]}
SAID = [{"a": 1, "b": 2}, "The sum is 3.", "Yes, I am sure."]
"""Arguments of the call, and the two answers."""
TURN_START = "<|im_start|>assistant\n"


class ScriptedPolicy:
    """The policy of a real server. The n-th turn of a conversation follows the n-th grammar of a script."""

    def __init__(self, server: HttpServerEngineAdapter, tokenizer: Any) -> None:
        self._generate, self._tokenizer = as_generate_fn(server.asynchronous), tokenizer
        self.script = PLAIN_SCRIPT
        self.prompts: list[list[int]] = []

    async def __call__(self, *, rid: str, session_id: str, **request: Any) -> Any:
        self.prompts.append(list(request["input_ids"]))
        number = self._tokenizer.decode(request["input_ids"]).count(TURN_START)
        params = {**request.pop("sampling_params"), "temperature": 0.0, "regex": self.script[number - 1]}
        return await self._generate(rid=rid, session_id=session_id, sampling_params=params, **request)


@pytest.fixture(scope="module")
def policy(tiny: Callable[..., Path]) -> Iterator[ScriptedPolicy]:
    folder = str(tiny("qwen3", context_length=CONTEXT_LENGTH))
    with HttpServerEngineAdapter(model_path=folder, dtype="float32", max_total_tokens=2 * CONTEXT_LENGTH) as server:
        yield ScriptedPolicy(server, AutoTokenizer.from_pretrained(folder))


@pytest.fixture(scope="module")
def gateway(
    policy: ScriptedPolicy, tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    renderer = ChatRenderer(AutoTokenizer.from_pretrained(tiny("qwen3", context_length=CONTEXT_LENGTH)))
    limits = RolloutLimits(max_context_tokens=CONTEXT_LENGTH - 16, max_turns=100)
    with Gateway(policy, tmp_path_factory.mktemp("run"), renderer=renderer, limits=limits) as gateway:
        yield gateway


def graph_of(gateway: Gateway, session_id: str) -> TrajectoryGraph:
    return load_session(gateway.config.run_dir / f"{session_id}.jsonl")


def exact_path(gateway: Gateway, session_id: str, prompts: list[list[int]]) -> list[int]:
    """The token ids of the only path of a session. The policy has got exactly the prompts of the path."""
    graph = graph_of(gateway, session_id)
    assert len(graph.leaves) == 1, [(node.fork_reason, node.message) for node in graph.nodes]
    sampled = [node for node in graph.nodes if node.sampled]
    assert [graph.token_ids(node.parent) for node in sampled if node.parent is not None] == prompts
    assert len(prompts) == 3
    return graph.token_ids(graph.leaves[0])


# -- the official SDKs -------------------------------------------------------------------------------


def sdk_url(gateway: Gateway, api: str) -> str:
    return gateway.url if api == "messages" else gateway.openai_url


@pytest.mark.parametrize("script", SCRIPTS)
def test_all_dialects_of_the_official_sdks_have_the_same_tokens(
    gateway: Gateway, policy: ScriptedPolicy, script: str
) -> None:
    """Streaming and not, with a tool and its result, with thoughts that the clients send again in their own way."""
    policy.script = SCRIPTS[script]
    paths = dict[str, list[int]]()
    for (api, converse), stream in itertools.product(SDKS.items(), (False, True)):
        policy.prompts.clear()
        session, key = gateway.create_session()
        assert converse(sdk_url(gateway, api), key, stream) == SAID, (api, stream)
        paths[f"{api} {stream}"] = exact_path(gateway, session.id, policy.prompts)
    assert len(paths) == 6
    assert all(path == paths["chat False"] for path in paths.values()), paths


# -- programs with an environment of their own -------------------------------------------------------


def converse_by_program(
    name: str,
    apis: tuple[str, ...],
    gateway: Gateway,
    policy: ScriptedPolicy,
    folder: Path,
    *,
    script: list[str] = PLAIN_SCRIPT,
    streams: tuple[bool, ...] = (False, True),
) -> list[list[int]]:
    """The paths of the conversations of a program of `agent_clients/`: each API, streaming and not."""
    policy.script, policy.prompts = script, []
    runs, sessions = [], []
    for api, stream in itertools.product(apis, streams):
        session, key = gateway.create_session()
        sessions.append(session.id)
        runs.append({"api": api, "stream": stream, "key": key})
    given = json.dumps({"url": gateway.url, "openai_url": gateway.openai_url, "runs": runs})
    replies = json.loads(run_program("python", str(PROGRAMS / name), given=given, folder=folder))
    for run, (arguments, *answers) in zip(runs, replies, strict=True):
        assert [json.loads(arguments), *answers] == SAID, (run["api"], run["stream"])
    assert len(policy.prompts) == 3 * len(runs), "a request was sent twice"
    return [exact_path(gateway, session, policy.prompts[3 * n : 3 * n + 3]) for n, session in enumerate(sessions)]


@pytest.mark.parametrize("program", ["sdk_client.py", "litellm_client.py"])
def test_newest_sdks_and_litellm_as_clients(
    gateway: Gateway, policy: ScriptedPolicy, tmp_path: Path, program: str
) -> None:
    """Their conversations have the tokens of the official SDKs in the versions that SGLang needs."""
    policy.script = PLAIN_SCRIPT
    session, key = gateway.create_session()
    SDKS["chat"](sdk_url(gateway, "chat"), key, False)
    (leaf,) = (graph := graph_of(gateway, session.id)).leaves
    paths = converse_by_program(program, tuple(SDKS), gateway, policy, tmp_path)
    assert paths == [graph.token_ids(leaf)] * 6


def test_litellms_bridge_between_the_apis(gateway: Gateway, policy: ScriptedPolicy, tmp_path: Path) -> None:
    """It sends the text and the call of one turn as two items, the call before the text: the conversation is one path.

    Also with a thought. It streams from the Responses API only if its own caller does.
    """
    for thought in ("", THOUGHT):
        script = [thought + turn for turn in (rf"I add\.\n{CALL}", *PLAIN_SCRIPT[1:])]
        converse_by_program(
            "litellm_client.py", ("bridge",), gateway, policy, tmp_path, script=script, streams=(False,)
        )


def test_openai_agents_sdk(gateway: Gateway, policy: ScriptedPolicy, tmp_path: Path) -> None:
    paths = converse_by_program("openai_agents_client.py", ("chat", "responses"), gateway, policy, tmp_path)
    assert all(path == paths[0] for path in paths)


def test_mini_swe_agent(gateway: Gateway, policy: ScriptedPolicy, tmp_path: Path) -> None:
    """The real program runs two commands, and then submits. It is not told of the gateway, but for URL and key."""
    commands = ["echo 3 > sum.txt", "cat sum.txt", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"]
    calls = (json.dumps({"name": "bash", "arguments": {"command": command}}) for command in commands)
    policy.script = [re.escape(f"Next.<tool_call>{call}</tool_call>") for call in calls]
    policy.prompts.clear()
    session, key = gateway.create_session()
    run_mini_swe_agent(
        "Write the sum of 1 and 2.", "--output", "out.json", "-c", "mini.yaml",
        url=gateway.openai_url, key=key, folder=tmp_path,
    )  # fmt: skip
    assert (tmp_path / "sum.txt").read_text() == "3\n"
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["info"]["exit_status"] == "Submitted"
    results = [message["extra"]["raw_output"] for message in result["messages"] if message["role"] == "tool"]
    assert results[:2] == ["", "3\n"], "the third command ends the program"
    exact_path(gateway, session.id, policy.prompts)
