"""`RolloutStep`: the groups of samples for one training step, as objects, as a batch and as metrics."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import TYPE_CHECKING

from verl_server.agent.phase_times import Phase
from verl_server.agent.samples import Sample, SampleGroup, Segment
from verl_server.agent.tools.call_counts import call_metrics
from verl_server.errors import BadInputError
from verl_server.trajectory.batches.conversion import to_batch
from verl_server.trajectory.batches.routed_experts import ExpertLayout
from verl_server.trajectory.nodes import Node
from verl_server.trajectory.vision import VisionInputs

if TYPE_CHECKING:
    from tensordict import TensorDict


@dataclass(frozen=True)
class RolloutStep:
    """The groups of samples for one training step."""

    index: int
    """Number of the step."""
    groups: Sequence[SampleGroup]
    """Groups of the step. The oldest group is first."""
    metrics: Mapping[str, float]
    """Figures of the step by names such as `reward/mean`, for a dashboard."""
    pad_token_id: int
    """Token with which `batch` fills rows by default."""
    expert_layout: ExpertLayout | None = None
    """Layout of the routed experts. None if they are not recorded, and if the engine of the runner does not tell it."""

    @property
    def samples(self) -> list[Sample]:
        """The samples of all groups, one group after the other."""
        return [sample for group in self.groups for sample in group.samples]

    def batch(
        self,
        pad_token_id: int | None = None,
        *,
        vision: VisionInputs | None = None,
        expert_layout: ExpertLayout | None = None,
        prompt_length: int | None = None,
        response_length: int | None = None,
    ) -> TensorDict:
        """Convert the samples to padded tensors: the fields of `to_batch`, and which sample each row is of.

        Each row is a trained path (`Sample.segments`). Failed samples and samples without a turn are left out. Beside
        the fields of `to_batch` there are `group_index` [B], the position of the row's group in `groups`;
        `sample_index` [B], the index of the sample in its group; `reward` [B], the reward of the row's sample, NaN for
        a sample without a reward; and `uid`, a list with one text for each row, equal in all rows of a group.
        `expert_layout`: by default that of the step. `prompt_length`, `response_length`: fixed P and R, see `to_batch`.
        Raises BadInputError if no sample can be trained, and the errors of `to_batch`.
        """
        import torch
        from tensordict import NonTensorStack

        rows: list[tuple[int, Sample, Segment]] = [
            (position, sample, segment)
            for position, group in enumerate(self.groups)
            for sample in group.samples
            if sample.error is None
            for segment in sample.segments
        ]
        if not rows:
            raise BadInputError(
                f"step {self.index} has no sample that can be trained: all of its {len(self.samples)} samples have "
                "failed or have no turn; see sample.error"
            )
        pad = self.pad_token_id if pad_token_id is None else pad_token_id
        layout = self.expert_layout if expert_layout is None else expert_layout
        paths = [(sample.graph, segment.leaf) for _, sample, segment in rows]
        batch = to_batch(
            paths,
            pad,
            vision=vision,
            expert_layout=layout,
            prompt_length=prompt_length,
            response_length=response_length,
        )
        batch["group_index"] = torch.tensor([position for position, _, _ in rows])
        batch["sample_index"] = torch.tensor([sample.index for _, sample, _ in rows])
        rewards = [sample.reward for _, sample, _ in rows]
        batch["reward"] = torch.tensor([math.nan if reward is None else reward for reward in rewards])
        uids = [f"{self.index}-{position}-{sample.task.id}" for position, sample, _ in rows]
        batch.set("uid", NonTensorStack(*uids))
        return batch


def step_metrics(groups: Sequence[SampleGroup], ages: Sequence[int]) -> dict[str, float]:
    """Figures of the samples of a step. `ages`: number of steps between the start and the delivery of each group."""
    samples = [sample for group in groups for sample in group.samples]
    succeeded = [sample for sample in samples if sample.error is None]
    metrics: dict[str, float] = {
        "groups/num": len(groups),
        "samples/num": len(samples),
        "samples/failed": len(samples) - len(succeeded),
        "staleness/mean": fmean(ages) if ages else 0.0,
        "staleness/max": max(ages, default=0),
    }
    rewards = [sample.reward for sample in succeeded if sample.reward is not None]
    if rewards:
        metrics |= {"reward/mean": fmean(rewards), "reward/std": pstdev(rewards)}
        metrics |= {"reward/min": min(rewards), "reward/max": max(rewards)}
    for name in {name for sample in succeeded for name in sample.rewards}:
        metrics[f"rewards/{name}"] = fmean(s.rewards[name] for s in succeeded if name in s.rewards)
    if succeeded:
        nodes = [_sampled_nodes(sample) for sample in succeeded]
        turns = [len(found) for found in nodes]
        tokens = [sum(len(node.token_ids) for node in found) for found in nodes]
        metrics |= {"turns/mean": fmean(turns), "turns/max": max(turns)}
        versions = [span.version for found in nodes for node in found for span in node.spans]
        if versions:
            metrics |= {"weight_version/min": min(versions), "weight_version/max": max(versions)}
        metrics |= {"sampled_tokens/mean": fmean(tokens), "sampled_tokens/max": max(tokens)}
    for phase in Phase:
        metrics[f"time/{phase}_s"] = fmean(sample.times.get(phase, 0.0) for sample in samples) if samples else 0.0
    metrics |= call_metrics(sample.tool_counts for sample in samples)
    for reason, count in Counter(sample.stop_reason for sample in samples).items():
        metrics[f"stop_reason/{reason}"] = count / len(samples)
    return metrics


def _sampled_nodes(sample: Sample) -> list[Node]:
    """The turns in all trained paths of a sample."""
    nodes = {node.id: node for graph, leaf in sample.paths for node in graph.path(leaf) if node.sampled}
    return list(nodes.values())
