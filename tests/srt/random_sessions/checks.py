"""What must hold after the runs of a batch of sessions. Each check yields a sentence for each violation."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import orjson
import torch

from random_sessions.plans import SessionPlan
from random_sessions.running import BatchResult, Run, Server
from verl_server.agent import RolloutLimits, Sample
from verl_server.trajectory import (
    ChatRenderer,
    Node,
    TrajectoryGraph,
    from_atif,
    from_verifiers,
    load_session,
    session_file,
    to_atif,
    to_batch,
    to_packed,
    to_tree,
    to_verifiers,
)
from verl_server.trajectory.rendering.tokenizer import TRUNCATION_MARK
from verl_server.types import Json

OWN_LIMITS: dict[object, int] = {"unicode": 9}
"""Maximum number of tokens of a result, of the tools that have a limit of their own."""


@dataclass
class Session:
    """One session after all of its runs."""

    id: str
    plan: SessionPlan
    limits: RolloutLimits
    runs: list[Run]
    sample: Sample
    """The finished sample, from the memory of the last run but one."""
    replies: dict[int, Json] = field(default_factory=dict)
    """The reply that brought each sampled node of the final graph."""
    lost_replies: int = 0
    """Number of replies that were not recorded, because the process was killed or the episode had ended."""

    @property
    def graph(self) -> TrajectoryGraph:
        return self.sample.graph

    @property
    def sampled(self) -> list[Node]:
        """The turns of all branches and runs."""
        return [node for node in self.graph.nodes if node.sampled]

    @property
    def last_attempt(self) -> list[Json]:
        """The events of the attempt that finished the sample. Empty if it was loaded."""
        for run in reversed(self.runs[:-1]):
            events = run.events_of(self.id)
            starts = [number for number, event in enumerate(events) if event["kind"] == "attempt"]
            if starts:
                return events[starts[-1] :]
        return []

    @property
    def reached(self) -> set[int]:
        """The turns that the last attempt generated or replayed."""
        return {event["node"] for event in self.last_attempt if event["kind"] == "turn"}

    @property
    def has_stopped(self) -> bool:
        """Whether any branch of any run has reached a limit."""
        return any(event["kind"] == "stopped" for run in self.runs for event in run.events_of(self.id))


def check_batch(result: BatchResult, server: Server) -> tuple[list[Session], list[str]]:
    """Check all sessions of a batch, but no log probabilities. Returns the sessions and the violations."""
    violations: list[str] = []
    sessions = []
    finished, again = result.runs[-2].samples, result.runs[-1].samples
    assert finished is not None
    assert again is not None
    for name, plan in zip(result.sessions, result.plan.sessions, strict=True):
        session = Session(name, plan, result.plan.limits, result.runs, finished[name])
        sessions.append(session)
        checks = [
            *check_requests(session),
            *check_nothing_is_sampled_twice(session),
            *check_masks(session),
            *check_limits(session, server.renderer),
            *check_round_trips(session, result),
            *check_resumption(session, again[name]),
        ]
        violations += [f"session {name}: {violation}" for violation in checks]
    return sessions, violations


# -- requests ----------------------------------------------------------------------------------------


def _key(prompt: list[int], output: list[int], logprobs: list[float]) -> tuple[tuple[float, ...], ...]:
    return tuple(prompt), tuple(output), tuple(logprobs)


def check_requests(session: Session) -> Iterator[str]:
    """Every prompt is a recorded path, and every turn is exactly one reply, which followed the path of its parent."""
    for number, run in enumerate(session.runs):
        empty = TrajectoryGraph(session.id)
        before, after = run.before.get(session.id, empty), run.after.get(session.id, empty)
        if after.nodes[: len(before.nodes)] != before.nodes:
            yield f"run {number} changed recorded nodes"
        paths = {tuple(after.token_ids(node.id)) for node in after.nodes if not node.sampled or node.token_ids}
        replies: dict[object, list[Json]] = {}
        events = run.events_of(session.id)
        for event in events:
            if event["kind"] == "send" and tuple(event["prompt"]) not in paths:
                yield f"run {number} sent a prompt that is no recorded path: {event['prompt']}"
            if event["kind"] == "reply":
                replies.setdefault(_key(event["prompt"], event["output"], event["logprobs"]), []).append(event)
        for node in after.nodes[len(before.nodes) :]:
            if node.sampled and node.parent is not None:
                key = _key(after.token_ids(node.parent), list(node.token_ids), list(node.logprobs))
                if not replies.get(key):
                    yield f"run {number} recorded the turn {node.id}, which is no reply to the path of its parent"
                else:
                    session.replies[node.id] = replies[key].pop(0)
        lost = [reply for same in replies.values() for reply in same]
        session.lost_replies += len(lost)
        yield from _check_lost_replies(session, run, number, lost)
    session.replies = {node.id: session.replies[node.id] for node in session.sampled if node.id in session.replies}


def _check_lost_replies(session: Session, run: Run, number: int, lost: list[Json]) -> Iterator[str]:
    """A reply is lost only if its branch was ended while it waited: by a kill, a cancellation or the loop's end."""
    events = run.events_of(session.id)
    may_lose = run.samples is None or session.plan.leaves_branches or session.limits.timeout_s is not None
    for reply in lost:
        later = itertools.takewhile(lambda event: event["kind"] != "attempt", events[events.index(reply) + 1 :])
        if not may_lose or any(event.get("step") == reply["step"] for event in later):
            yield f"run {number} has lost the reply of step {reply['step']}: {reply['output']}"


def check_nothing_is_sampled_twice(session: Session) -> Iterator[str]:
    """No step has two recorded turns after the same prompt, in all runs. A branch replays only its own turns.

    If the tools return the same results, a finished session has no turn that the last attempt has not visited.
    """
    counts = Counter((reply["step"], tuple(reply["prompt"])) for reply in session.replies.values())
    for (step, _), count in counts.items():
        if count > 1:
            yield f"the turn of step {step} was sampled and recorded {count} times after the same prompt"
    for event in session.last_attempt:
        if event["kind"] == "turn" and event["node"] in session.replies:
            step = session.replies[event["node"]]["step"]
            if step != event["step"]:
                yield f"step {event['step']} has replayed the turn of step {step}"
    is_determined = session.plan.is_repeatable and (session.plan.is_sequential or not session.has_stopped)
    if is_determined and session.limits.timeout_s is None and session.sample.stop_reason != "error":
        for node in session.sampled:
            if node.id not in session.reached:
                yield f"the recorded turn {node.id} is not visited by the attempt that finished the session"


# -- batches -----------------------------------------------------------------------------------------


def check_masks(session: Session) -> Iterator[str]:
    """Masks sum to the sampled tokens of the trained paths, and rewards are on sampled tokens."""
    tree = to_tree(session.graph)
    if int(tree["response_mask"].sum()) != sum(len(node.token_ids) for node in session.sampled):
        yield "the mask of to_tree is not each sampled token once"
    trained = {node.id for segment in session.sample.segments for node in session.graph.path(segment.leaf)}
    expected = sum(len(node.token_ids) for node in session.sampled if node.id in trained)
    end = next((i for i, event in enumerate(session.last_attempt) if event["kind"] == "end"), None)
    untrained = set() if end is None else set(session.last_attempt[end]["untrained"])
    if end is not None:  # the weights of branches that were left behind are not known after the end
        untrained |= {event["node"] for event in session.last_attempt[end:] if event["kind"] == "turn"}
    for node in session.sampled:
        if node.token_ids and node.id not in trained and node.id not in untrained and node.id in session.reached:
            yield f"the turn {node.id} is in no segment, although its branch has a weight"
    if not session.sample.segments:
        return
    graph = _with_rewards(session.graph, session.sample)
    paths = [(graph, segment.leaf) for segment in session.sample.segments]
    batch, packed = to_batch(paths, pad_token_id=0), to_packed(paths)
    for mask, scores in ((batch["response_mask"], batch["rm_scores"]), (packed["response_mask"], packed["rm_scores"])):
        if int(mask.sum()) != expected:
            yield f"the mask of a batch has {int(mask.sum())} tokens, but the trained paths have {expected}"
        if bool((scores[mask == 0] != 0).any()):
            yield "a token that the policy did not sample has a reward"
        rewards = sum(sum(values) for node, values in graph.rewards.items() if node in trained)
        if abs(float(scores.sum()) - rewards) > 1e-4:
            yield f"the scores sum to {float(scores.sum())}, but the rewards to {rewards}"
    weights = torch.tensor([segment.loss_weight for segment in session.sample.segments])
    in_rows = float((weights[:, None] * batch["response_mask"]).sum())
    in_tree = float((tree["loss_weight"] * tree["response_mask"]).sum())
    if abs(in_rows - in_tree) > 1e-4 * max(1.0, in_rows):
        yield f"the weights of to_tree sum to {in_tree}, but those of the batch to {in_rows}"
    for row, (_, leaf) in enumerate(paths):
        if batch["input_ids"][row][batch["attention_mask"][row].bool()].tolist() != graph.token_ids(leaf):
            yield f"row {row} has other tokens than its path"


def _with_rewards(graph: TrajectoryGraph, sample: Sample) -> TrajectoryGraph:
    """A copy of the graph. The paths of a failed sample get a reward, because `to_batch` refuses them otherwise."""
    copied = copy.deepcopy(graph)
    if sample.error is not None:
        for segment in sample.segments:
            copied.set_rewards(segment.leaf, [-1.0])
    return copied


# -- limits ------------------------------------------------------------------------------------------


def check_limits(session: Session, renderer: ChatRenderer) -> Iterator[str]:
    """The limits hold for what the finished sample consists of.

    Branches that generate at the same time can each use all tokens that are left. So for a session with concurrent
    branches, the limit of response tokens holds for each path.
    """
    graph, limits = session.graph, session.limits
    nodes = {node.id: node for turn in session.reached for node in graph.path(turn)}
    turns = [node for node in nodes.values() if node.sampled]
    if len(turns) > limits.max_turns:
        yield f"the sample has {len(turns)} turns, but the limit is {limits.max_turns}"
    for node in session.sampled:
        if limits.max_context_tokens is not None and graph.num_tokens(node.id) > limits.max_context_tokens:
            yield f"the path of turn {node.id} is longer than the limit of the context"
        reply = session.replies.get(node.id)
        if reply is not None and len(node.token_ids) > reply["max_new_tokens"]:
            yield f"the turn {node.id} has more tokens than requested"
        if limits.max_response_tokens is not None:
            path = sum(len(item.token_ids) for item in graph.path(node.id) if item.parent is not None)
            if path > limits.max_response_tokens:
                yield f"the path of turn {node.id} has {path} response tokens"
    if session.plan.is_sequential and limits.max_response_tokens is not None:
        num_tokens = sum(len(node.token_ids) for node in nodes.values() if node.parent is not None)
        if num_tokens > limits.max_response_tokens:
            yield f"the sample has {num_tokens} response tokens, but the limit is {limits.max_response_tokens}"
    mark = len(renderer.encode(TRUNCATION_MARK)) + 1
    later_nodes = [node for node in graph.nodes if node.parent is not None]
    for message in (item for node in later_nodes for item in (node.message or {}).get("messages", ())):
        limit = max(limits.max_tool_tokens, OWN_LIMITS.get(message.get("name"), 0)) + mark
        if message["role"] == "tool" and len(renderer.encode_foreign(message["content"])) > limit:
            yield f"a tool result has more tokens than the limit: {message}"


# -- records -----------------------------------------------------------------------------------------


def check_round_trips(session: Session, result: BatchResult) -> Iterator[str]:
    """What is written and read again equals the session in memory, also as the traces of verifiers and as ATIF."""
    if load_session(session_file(result.run_dir, session.id)) != result.runs[-1].after[session.id]:
        yield "the file of the session changes without a run"
    if result.runs[-2].after.get(session.id) != session.graph:
        yield "the file of the session differs from its graph in memory"
    if session.graph.nodes:
        recorded = trained_sequences(session.graph)
        (trace,) = from_verifiers(orjson.loads(orjson.dumps(to_verifiers(session.graph))))
        if trained_sequences(trace) != recorded:
            yield "the trained paths are others after an export to verifiers"
        if trained_sequences(from_atif(orjson.loads(orjson.dumps(to_atif(session.graph))))) != recorded:
            yield "the trained paths are others after an export to ATIF"


def trained_sequences(graph: TrajectoryGraph) -> list[tuple[list[int], list[int], list[float], list[int]]]:
    """Token ids, mask, log probs and weight versions of the trained paths, or of the path of a session without them."""
    termination = next(reversed(graph.terminations.values()))
    ends = [leaf for leaf, _ in termination.segments or ()] or [termination.node]
    sequences = [graph.token_sequence(end) for end in ends]
    return [(found.token_ids, found.loss_mask, found.logprobs, found.weight_versions) for found in sequences]


def check_resumption(session: Session, again: Sample) -> Iterator[str]:
    """A finished session samples nothing when its run is started again, and is the same sample."""
    requests = [event for event in session.runs[-1].events_of(session.id) if event["kind"] == "send"]
    if session.sample.stop_reason == "error":
        return  # it is attempted again; `check_nothing_is_sampled_twice` has seen the turns of this attempt, too
    if requests:
        yield f"a finished session has sent a request again: {requests[0]}"
    if dataclasses.replace(again, task=session.sample.task) != session.sample:
        fields = [name for name in vars(again) if getattr(again, name) != getattr(session.sample, name)]
        yield f"a finished session is another sample when it is loaded, in {fields}"
