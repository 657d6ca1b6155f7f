"""Recorded paths as the tensors that a trainer takes. Shapes: B paths, P prompt, R response, T all tokens.

Fields and padding are those of verl's `DataProto`: prompts padded on the left, responses on the right. The response
of a path is all that follows its first prompt: what the policy sampled (mask 1) and what the world answered (mask 0).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl_server.errors import BadInputError
from verl_server.trajectory.graph import Session, Trajectory

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

Path = tuple[Session, int]
"""A session, and the last node of one of its paths."""

NO_VERSION = -1


@dataclass(frozen=True)
class _Row:
    whole: Trajectory
    scores: list[float]
    versions: list[int]

    @property
    def prompt(self) -> int:
        return self.whole.prompt_length


def to_batch(paths: Sequence[Path], pad_token_id: int) -> TensorDict:
    """Padded tensors, all with B rows.

    `prompts` [B, P], `responses`, `response_mask`, `rollout_log_probs`, `rm_scores`, `weight_versions` [B, R],
    `input_ids`, `attention_mask`, `position_ids` [B, P + R]. Masked positions have log prob 0, score 0, version -1.
    Rewards stand where they were given: on each token, or on the last token of their turn. Raises BadInputError.
    """
    import torch
    from tensordict import TensorDict

    rows = _rows(paths)
    prompt = max(row.prompt for row in rows)
    response = max(len(row.whole.ids) - row.prompt for row in rows)
    ids, attention = torch.full((len(rows), prompt + response), pad_token_id), _zeros(rows, prompt + response)
    fields = {
        "response_mask": _zeros(rows, response),
        "rollout_log_probs": _zeros(rows, response).float(),
        "rm_scores": _zeros(rows, response).float(),
        "weight_versions": torch.full((len(rows), response), NO_VERSION),
    }
    for number, row in enumerate(rows):
        start, count = prompt - row.prompt, len(row.whole.ids)
        ids[number, start : start + count] = torch.tensor(row.whole.ids)
        attention[number, start : start + count] = 1
        given: tuple[Sequence[Any], ...] = (row.whole.mask, row.whole.logprobs, row.scores, row.versions)
        for field, values in zip(fields.values(), given, strict=True):
            field[number, : count - row.prompt] = torch.tensor(values[row.prompt :], dtype=field.dtype)
    fields |= {
        "prompts": ids[:, :prompt].clone(),
        "responses": ids[:, prompt:].clone(),
        "input_ids": ids,
        "attention_mask": attention,
        "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
    }
    return TensorDict(fields, batch_size=[len(rows)])


def to_packed(paths: Sequence[Path]) -> dict[str, torch.Tensor]:
    """The same without padding, one path after the other: all fields [T], and `cu_seqlens` [B + 1]."""
    import torch

    rows = _rows(paths)
    lengths = [len(row.whole.ids) for row in rows]
    return {
        "input_ids": torch.tensor([token for row in rows for token in row.whole.ids]),
        "position_ids": torch.tensor([at for length in lengths for at in range(length)]),
        "response_mask": torch.tensor([bit for row in rows for bit in row.whole.mask]),
        "rollout_log_probs": torch.tensor([value for row in rows for value in row.whole.logprobs]),
        "rm_scores": torch.tensor([value for row in rows for value in row.scores]),
        "weight_versions": torch.tensor([version for row in rows for version in row.versions]),
        "cu_seqlens": torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32),
    }


def to_tree(session: Session) -> dict[str, torch.Tensor]:
    """All paths of a session, each node once: shared turns are trained once.

    Fields [T]: `input_ids`, `position_ids` (along the path), `response_mask`, `rollout_log_probs`, `rm_scores`,
    `weight_versions`, `node` (of each token). `parent` [N]: of each node, -1 for a root. A token attends to those of
    its own node before it and to all of its node's ancestors.
    """
    import torch

    fields: dict[str, list[Any]] = {
        name: []
        for name in (
            "input_ids",
            "position_ids",
            "response_mask",
            "rollout_log_probs",
            "rm_scores",
            "weight_versions",
            "node",
        )
    }
    for node in session.nodes:
        alone = Session(session.id)
        alone.add(
            None, node.tokens, sampled=node.sampled, logprobs=node.logprobs, spans=node.spans, message=node.message
        )
        if node.id in session.rewards:
            alone.reward(0, session.rewards[node.id])
        row, count = _row((alone, 0)), len(node.tokens)
        begins = session.length(node.id) - count
        fields["input_ids"] += node.tokens
        fields["position_ids"] += range(begins, begins + count)
        fields["response_mask"] += row.whole.mask
        fields["rollout_log_probs"] += row.whole.logprobs
        fields["rm_scores"] += row.scores
        fields["weight_versions"] += row.versions
        fields["node"] += [node.id] * count
    tree = {name: torch.tensor(values) for name, values in fields.items()}
    tree["parent"] = torch.tensor([-1 if node.parent is None else node.parent for node in session.nodes])
    return tree


def _rows(paths: Sequence[Path]) -> list[_Row]:
    if not paths:
        raise BadInputError("a batch needs at least one path")
    return [_row(path) for path in paths]


def _row(path: Path) -> _Row:
    session, node = path
    whole = session.trajectory(node)
    scores: list[float] = []
    for one in session.path(node):
        given, count = session.rewards.get(one.id, ()), len(one.tokens)
        if count:
            scores += given if len(given) == count else [*[0.0] * (count - 1), *(given or [0.0])]
    return _Row(whole, scores, [_number(version) for version in whole.versions])


def _number(version: str | None) -> int:
    if version is None:
        return NO_VERSION
    if not version.isdecimal():
        raise BadInputError(f"weight version {version!r} is no number: start servers with weight_version='0'")
    return int(version)


def _zeros(rows: Sequence[_Row], width: int) -> torch.Tensor:
    import torch

    return torch.zeros((len(rows), width), dtype=torch.long)
