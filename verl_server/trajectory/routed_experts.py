"""Routed experts: the experts that the routers of a mixture-of-experts model chose for each token during generation.

A trainer that replays these choices (routing replay, "R3") computes the log probabilities of the policy that sampled.

SGLang's reply to a request has a base64 text of int32 numbers with the shape [tokens, layers, experts per token]
(`_maybe_collect_routed_experts` in `sglang/srt/managers/scheduler_components/batch_result_processor.py`). The tokens
are those from the request's `routed_experts_start_len` up to the last but one of prompt and output together: the server
has never read the last token. Tokens that were in the prefix cache have the experts that were chosen when their KV
cache was computed. Layers without experts have zeros.

A record has these numbers as one or two bytes each (`pack_experts`): a model with 48 layers and 8 experts per token
needs 512 instead of 2,048 bytes for each token.

So a turn has the experts of the tokens that no earlier turn of its path has read: the last token of the earlier turn,
the messages after this turn, and its own tokens but the last. A turn may also have those of its whole path, for a
request without `routed_experts_start_len`; the experts of the earlier turns are used then, because the weights may have
changed since.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_server.config import PositiveInt
from verl_server.errors import BadInputError
from verl_server.trajectory.graph import Node, TrajectoryGraph
from verl_server.validation import check_fields
from verl_server.weights.manifest import read_config

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

MAX_UINT8, MAX_INT16 = 255, 32767
PACKED_DTYPES = {"uint8": "u1", "int16": "<i2"}
"""Names before the base64 text of packed experts, and their dtypes. A text without a name is of int32 numbers."""
SWITCH_ON = "RolloutRunner(return_routed_experts=True)"
"""How a runner records routed experts, for errors."""
PASS_LAYOUT = "expert_layout=ExpertLayout.from_config(model.config)"
"""How a batch gets the layout, for errors."""


@check_fields()
@dataclass(frozen=True)
class ExpertLayout:
    """The number of layers and of experts per token of a model, which say how its routed experts are stored.

    Raises BadInputError for a value that is no whole number of at least 1.
    """

    num_layers: PositiveInt
    """Number of all layers, also of those without experts: Hugging Face's `num_hidden_layers`."""
    num_experts_per_token: PositiveInt
    """Number of experts that the router of a layer chooses for a token: Hugging Face's `num_experts_per_tok`."""

    @classmethod
    def from_config(cls, config: Any, *, trust_remote_code: bool = False) -> ExpertLayout:
        """The layout of a model. `config`: the Hugging Face config of the model, or the path of its folder.

        `trust_remote_code`: whether a config that is code in the folder of the model may be executed. Raises
        BadInputError for a model without experts, and for a path from which no config can be loaded.
        """
        if isinstance(config, (str, Path)):
            config = read_config({"model_path": config, "trust_remote_code": trust_remote_code})
        text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
        num_layers = getattr(text_config, "num_hidden_layers", None)
        num_experts = getattr(text_config, "num_experts_per_tok", None)
        if num_layers is None or num_experts is None:
            raise BadInputError(
                f"{type(text_config).__name__} has no num_hidden_layers and num_experts_per_tok, so its model has no "
                "routed experts; pass the config of a mixture-of-experts model, or ExpertLayout(num_layers, "
                "num_experts_per_token)"
            )
        return cls(num_layers, num_experts)


def pack_experts(text: str | None) -> str | None:
    """The routed experts of a reply with the smallest dtype that has all of their numbers.

    A text that is damaged, or has other numbers, is returned unchanged: the batch refuses it with its place.
    """
    import numpy as np

    if text is None:
        return None
    try:
        experts = np.frombuffer(base64.b64decode(text, validate=True), dtype="<i4")
    except (binascii.Error, ValueError):
        return text
    if experts.size and (experts.min() < 0 or experts.max() > MAX_INT16):
        return text
    name = "uint8" if not experts.size or experts.max() <= MAX_UINT8 else "int16"
    return f"{name}:{base64.b64encode(experts.astype(PACKED_DTYPES[name]).tobytes()).decode()}"


def num_recorded_expert_tokens(graph: TrajectoryGraph, leaf: int | None) -> int:
    """Number of tokens at the beginning of a path whose routed experts are recorded: the `routed_experts_start_len` of
    the next turn. 0 if no turn of the path has routed experts. `leaf`: id of the last node of the path, None before it.
    """
    while leaf is not None:
        node = graph.node(leaf)
        if node.routed_experts is not None:
            return max(0, graph.num_tokens(leaf) - 1)
        leaf = node.parent
    return 0


def read_experts(paths: Sequence[tuple[TrajectoryGraph, int]], layout: ExpertLayout | None) -> list[torch.Tensor]:
    """The routed experts of each path, [tokens, layers, experts per token], all with the same dtype.

    Empty without a `layout`. Raises BadInputError, see `to_batch`.
    """
    path_nodes = [graph.path(leaf) for graph, leaf in paths]
    names = [f"path {index} (session {graph.session_id!r})" for index, (graph, _) in enumerate(paths)]
    if (layout := _check_layout(names, path_nodes, layout)) is None:
        return []
    arrays = []
    for (graph, leaf), nodes in zip(paths, path_nodes, strict=True):
        experts = _zeros(graph.num_tokens(leaf), layout)
        for node in nodes:
            if node.routed_experts is not None:
                start, new = _new_experts(graph, node, layout)
                experts[start : start + len(new)] = new
        arrays.append(experts)
    return _to_tensors(arrays)


def read_tree_experts(graph: TrajectoryGraph, layout: ExpertLayout | None) -> torch.Tensor | None:
    """The routed experts of all nodes, [tokens, layers, experts per token], one node after the other.

    A token that several turns have read has the experts of the first of them. None without a `layout`. Raises
    BadInputError, see `to_batch`.
    """
    import numpy as np

    if (layout := _check_layout([f"session {graph.session_id!r}"], [graph.nodes], layout)) is None:
        return None
    offsets = np.cumsum([0, *(len(node.token_ids) for node in graph.nodes)])
    experts, is_known = _zeros(int(offsets[-1]), layout), np.zeros(int(offsets[-1]), dtype=bool)
    for node in graph.nodes:
        if node.routed_experts is not None:
            start, new = _new_experts(graph, node, layout)
            path = [np.arange(offsets[item.id], offsets[item.id + 1]) for item in graph.path(node.id)]
            positions = np.concatenate(path)[start : start + len(new)]
            is_new = ~is_known[positions]
            experts[positions[is_new]] = new[is_new]
            is_known[positions] = True
    return _to_tensors([experts])[0]


def _check_layout(
    names: Sequence[str], node_lists: Sequence[Sequence[Node]], layout: ExpertLayout | None
) -> ExpertLayout | None:
    """`layout`. Raises BadInputError if only some turns have routed experts, or if the layout is missing or wrong.

    `names`: the names of the node lists in errors. A list without a turn fits to both.
    """
    found: dict[bool, tuple[str, int]] = {}
    """First turn with routed experts, and first turn with tokens and without routed experts."""
    for name, nodes in zip(names, node_lists, strict=True):
        for node in nodes:
            if node.routed_experts is not None or (node.sampled and node.token_ids):
                found.setdefault(node.routed_experts is not None, (name, node.id))
    if layout is None and True in found:
        name, node_id = found[True]
        raise BadInputError(f"{name} has routed experts (node {node_id}); pass {PASS_LAYOUT} to convert them")
    if layout is not None and False in found:
        (name, node_id), others = found[False], "" if True not in found else f", but {found[True][0]} has"
        raise BadInputError(
            f"{name} has no routed experts for the turn at node {node_id}{others}; generate all samples with "
            f"{SWITCH_ON}, or leave out expert_layout and the paths with routed experts"
        )
    return layout


def _new_experts(graph: TrajectoryGraph, node: Node, layout: ExpertLayout) -> tuple[int, NDArray[np.integer[Any]]]:
    """The experts of the tokens that no earlier turn of the path has read, and the position of the first of them.

    Raises BadInputError for a text that is no base64, and for another number of experts than that of the tokens.
    """
    import numpy as np

    assert node.routed_experts is not None
    place = f"the routed experts of node {node.id} of session {graph.session_id!r}"
    name, _, text = node.routed_experts.rpartition(":")
    dtype = np.dtype(PACKED_DTYPES.get(name, "<i4"))
    try:
        content = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadInputError(
            f"{place} are no base64 text: {error}; the record is damaged, or another program wrote it, so generate the "
            "sample again"
        ) from error
    start, end = num_recorded_expert_tokens(graph, node.parent), max(0, graph.num_tokens(node.id) - 1)
    num_bytes = layout.num_layers * layout.num_experts_per_token * dtype.itemsize
    if len(content) not in ((end - start) * num_bytes, end * num_bytes):
        raise BadInputError(
            f"{place} have {len(content)} bytes, but {end - start} tokens with {layout.num_layers} layers and "
            f"{layout.num_experts_per_token} experts per token need {(end - start) * num_bytes}; pass the layout of "
            "the model that generated the sample, and leave routed_experts_start_len to the episode"
        )
    experts = np.frombuffer(content, dtype=dtype).reshape(-1, layout.num_layers, layout.num_experts_per_token)
    experts = experts[len(experts) - (end - start) :]
    if experts.size and (experts.min() < 0 or experts.max() > MAX_INT16):
        wrong = experts.min() if experts.min() < 0 else experts.max()
        raise BadInputError(
            f"{place} have the expert {wrong}, but experts are numbered from 0 to {MAX_INT16}; the record is "
            "damaged, so generate the sample again"
        )
    return start, experts


def _zeros(num_tokens: int, layout: ExpertLayout) -> NDArray[np.int16]:
    import numpy as np

    return np.zeros((num_tokens, layout.num_layers, layout.num_experts_per_token), dtype=np.int16)


def _to_tensors(arrays: Sequence[NDArray[np.int16]]) -> list[torch.Tensor]:
    """The arrays as tensors of the smallest dtype that has all of their numbers."""
    import torch

    largest = max((int(array.max()) for array in arrays if array.size), default=0)
    dtype = torch.uint8 if largest <= MAX_UINT8 else torch.int16
    return [torch.from_numpy(array).to(dtype) for array in arrays]
