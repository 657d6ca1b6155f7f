"""`sampling_seed` on a CPU: equal seed, prompt and weights give equal tokens, whatever other requests run.

SGLang uses a request's seed only with `--enable-deterministic-inference`, which needs GPU kernels and applies to the
whole server. Its sampler uses the Gumbel trick with noise that is hashed from (seed, position, token)
(`layers/sampler.multinomial_with_seed`). This module computes the same hash, bit for bit. Requests without a seed use
torch's generator as before.

The noise does not depend on the batch. The last bits of the logits do, because matrix multiplication rounds differently
for other batch sizes. A token changes only when two candidates are closer than this rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

UNSEEDED = -1
_MASK = 0xFFFFFFFF


def from_schedule_batch(info: Any, _cls: type, batch: Any, vocab_size: int) -> Any:
    """Set the seeds of the batch that `SamplingBatchInfo.from_schedule_batch` has made, if a request has a seed.

    SGLang itself sets them with `--enable-deterministic-inference` only.
    """
    seeds = [request.sampling_params.sampling_seed for request in batch.reqs]
    if any(seed is not None for seed in seeds):
        values = [UNSEEDED if seed is None else seed & 0x7FFFFFFFFFFFFFFF for seed in seeds]
        info.sampling_seed = torch.tensor(values, dtype=torch.int64)
    return info


def merge_batch(info: Any, other: Any) -> None:
    """Give both batches seeds before `SamplingBatchInfo.merge_batch`, which keeps seeds only when both have them."""
    if info.sampling_seed is None and other.sampling_seed is None:
        return
    for side in (info, other):
        if side.sampling_seed is None:
            side.sampling_seed = torch.full((len(side),), UNSEEDED, dtype=torch.int64)


def sample(
    original: Callable[..., Any],
    probs: torch.Tensor,
    sampling_seed: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draw the rows that have a seed from hashed noise instead of calling `sampler.sampling_from_probs_torch`.

    SGLang calls this function for a batch without top-k, top-p and min-p. Its own seeded sampling needs GPU kernels.
    """
    if sampling_seed is None or positions is None:
        return original(probs, sampling_seed=None, positions=positions)  # type: ignore[no-any-return]
    return _draw(probs, None, sampling_seed, positions).view(-1).to(torch.int32)


def sample_filtered(
    original: Callable[..., Any],
    probs: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    need_min_p_sampling: bool,
    sampling_seed: torch.Tensor | None,
    positions: torch.Tensor,
    *,
    return_filtered_probs: bool = False,
    **options: Any,
) -> Any:
    """Filter as `sampler.top_k_top_p_min_p_sampling_from_probs_torch`, and draw seeded rows from hashed noise.

    A batch without seeds is passed to SGLang's function. SGLang's assertion ends the server when a batch has both a
    seed and a min-p.
    """
    if sampling_seed is None:
        options["return_filtered_probs"] = return_filtered_probs
        return original(probs, top_ks, top_ps, min_ps, need_min_p_sampling, None, positions, **options)
    weights, ids = probs.sort(dim=-1, descending=True, stable=True)
    mass_before = torch.cumsum(weights, dim=-1) - weights
    rank = torch.arange(weights.shape[-1]).view(1, -1)
    dropped = (rank >= top_ks.view(-1, 1)) | (mass_before > top_ps.view(-1, 1))
    if need_min_p_sampling:
        dropped |= weights < weights[:, :1] * min_ps.view(-1, 1)
    weights = weights.masked_fill(dropped, 0.0)
    index = _draw(weights, ids, sampling_seed, positions)
    ids = ids.to(torch.int32)
    tokens = torch.gather(ids, 1, index).view(-1)
    if return_filtered_probs:
        return tokens, weights, ids, torch.gather(weights, 1, index).view(-1)
    return tokens


def _draw(
    weights: torch.Tensor, ids: torch.Tensor | None, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Index of the drawn column, shape (rows, 1): hashed Gumbel noise for rows with a seed, torch's generator for
    others.

    `ids` holds the token of each column when the columns are sorted, because the noise depends on the token.
    """
    index = torch.multinomial(weights, num_samples=1)
    rows = (seeds != UNSEEDED).nonzero().view(-1)
    columns = torch.arange(weights.shape[1]).view(1, -1) if ids is None else ids[rows]
    noise = gumbel(seeds[rows], positions[rows], columns)
    index[rows] = torch.argmax(noise.add_(weights[rows].double().log()), dim=1, keepdim=True)
    return index


def gumbel(seeds: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Gumbel noise, float64, shape (rows, tokens). Formula and clamps are those of SGLang's `multinomial_with_seed`."""
    uniform = murmur_hash32(seeds, positions, tokens).double() / _MASK
    uniform.log_().clamp_(min=torch.finfo(torch.float64).min, max=-(2.0**-32)).neg_()
    return uniform.log_().neg_()


def murmur_hash32(seeds: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 (x86, 32 bit) of four 32-bit words: seed low, seed high, position, token.

    Equal to `sglang.kernels.ops.sampling.murmur_hash`. It computes in int64: products overflow, but their low 32 bits
    are correct.
    """
    seeds = seeds.long().view(-1, 1)
    words = (seeds & _MASK, (seeds >> 32) & _MASK, positions.long().view(-1, 1) & _MASK, tokens.long())
    state = torch.zeros((), dtype=torch.int64)
    for word in words:
        mixed = _rotate((word * 0xCC9E2D51) & _MASK, 15)
        state = _rotate(state ^ ((mixed * 0x1B873593) & _MASK), 13)
        state = (state * 5 + 0xE6546B64) & _MASK
    state = state ^ 16
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & _MASK
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & _MASK
    return state ^ (state >> 16)


def _rotate(word: torch.Tensor, bits: int) -> torch.Tensor:
    return ((word << bits) | (word >> (32 - bits))) & _MASK
