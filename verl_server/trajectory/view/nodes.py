"""Makes the views of single nodes: facts, recorded texts, and tokens by weight version. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet

from verl_server.trajectory.graph import TrajectoryGraph
from verl_server.trajectory.nodes import Node
from verl_server.trajectory.view.model import NodeView, TokenRun, TokenView
from verl_server.trajectory.view.texts import as_label, as_text, count, join, text_parts, visible
from verl_server.trajectory.view.token_texts import TokenTexts


def logprob_fact(logprobs: Sequence[float]) -> list[str]:
    """Mean and minimum of the log probs in nats, as a list of one text. Empty without log probs."""
    return [f"log prob mean {sum(logprobs) / len(logprobs):.3f}, min {min(logprobs):.3f}"] if logprobs else []


class NodeViews:
    """Makes the views of the nodes of a session.

    `trained`: ids of the nodes in trained segments, None if the session has not finished. `starts`: number of the
    path that begins at a node, by the id of the node. `kinds`: recorded kinds of conversations by their first nodes.
    """

    def __init__(
        self,
        graph: TrajectoryGraph,
        texts: TokenTexts | None,
        trained: AbstractSet[int] | None,
        starts: Mapping[int, int],
        kinds: Mapping[int, str],
    ) -> None:
        self._graph, self._texts, self._trained, self._starts, self._kinds = graph, texts, trained, starts, kinds
        self._depths: dict[int, int] = {}

    def view(self, node: Node) -> NodeView:
        """The view of a node. The parent of the node, if any, has been viewed before."""
        depth = self._depths[node.id] = 0 if node.parent is None else self._depths[node.parent] + 1
        is_left_out = node.sampled and self._trained is not None and node.id not in self._trained
        return NodeView(
            id=node.id,
            depth=depth,
            sampled=node.sampled,
            parts=text_parts(node.message),
            num_tokens=len(node.token_ids),
            runs=tuple(self._runs(node)),
            facts=tuple(self._facts(node, is_left_out)),
            is_left_out=is_left_out,
            forks=tuple(self._starts[child] for child in self._graph.children(node.id) if child in self._starts),
        )

    def _facts(self, node: Node, is_left_out: bool) -> Iterator[str]:
        if node.sampled:
            yield f"turn {self._graph.num_turns(node.id)}"
        yield count(len(node.token_ids), "token")
        if node.id in self._kinds and node.id not in self._starts:
            yield f"begins a conversation of the kind {as_label(self._kinds[node.id])}"
        if node.spans:
            yield f"weights {join(span.version for span in node.spans)}"
        if node.finish_reason is not None:
            yield f"finish reason {as_text(node.finish_reason)}"
        yield from logprob_fact(node.logprobs)
        rewards = self._graph.rewards.get(node.id, [])
        if len(rewards) == 1:
            yield f"reward {as_text(rewards[0])}"
        elif rewards:
            yield f"rewards of {len(rewards)} tokens, sum {as_text(sum(rewards))}"
        if node.branch:
            yield f"branch {as_text(node.branch)}"
        if node.routed_experts is not None:
            yield "routed experts recorded"
        if is_left_out:
            yield "in no trained segment"

    def _runs(self, node: Node) -> Iterator[TokenRun]:
        tokens = tuple(self._tokens(node))
        if not node.sampled and tokens:
            yield TokenRun(None, tokens)
        for span in node.spans:
            yield TokenRun(span.version, tokens[span.start : span.end])

    def _tokens(self, node: Node) -> Iterator[TokenView]:
        texts = None if self._texts is None else self._texts(node.token_ids)
        rewards = self._graph.rewards.get(node.id, [])
        has_rewards = len(rewards) == len(node.token_ids) > 1
        for index, token in enumerate(node.token_ids):
            yield TokenView(
                id=token,
                text=None if texts is None else visible(texts[index]),
                logprob=node.logprobs[index] if node.sampled else None,
                reward=rewards[index] if has_rewards else None,
            )
