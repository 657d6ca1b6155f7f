"""Partial updates of engines that load a module only with all of its tensors.

vLLM fuses some modules of a checkpoint into one, for example `q_proj`, `k_proj` and `v_proj`, and would fill the
missing part with uninitialised memory. The missing tensors are taken from the arena, which has those of the last
update.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from verl_server.errors import WeightManifestError
from verl_server.types import ServerInfo
from verl_server.weights.manifest import Manifest


def complete_modules(
    names: Sequence[str],
    members: Iterable[ServerInfo],
    manifest: Manifest,
    published: Mapping[str, int],
    compute_checksums: Callable[[Sequence[str]], Sequence[int]],
) -> list[str]:
    """`names`, and the tensors without which a server of `members` cannot load them, in the order of the manifest.

    `published`: checksum of each tensor of the last updates. `compute_checksums` returns those of tensors as they are
    staged now. Raises WeightManifestError if a tensor that must be added was not published or has changed since.
    """
    given = set(names)
    added: set[str] = set()
    for fused in {member.fused_modules for member in members if member.fused_modules is not None}:
        added |= _missing_tensors(given, fused, manifest, published)
    if not added:
        return list(names)
    missing = sorted(added)
    changed = missing
    if all(name in published for name in missing):
        checksums = compute_checksums(missing)
        changed = [name for name, value in zip(missing, checksums, strict=True) if published[name] != value]
    if changed:
        raise WeightManifestError(
            f"the update has a part of a module that vLLM loads only as a whole, and lacks {', '.join(changed[:6])}"
            f"{' and others' if len(changed) > 6 else ''}. Push these tensors as well, or push all tensors once with "
            "verify=True: later updates take the missing tensors from it",
            name=changed[0],
        )
    return [name for name in manifest.tensors if name in given or name in added]


def _missing_tensors(
    given: set[str], fused: Sequence[Sequence[str]], manifest: Manifest, published: Collection[str]
) -> set[str]:
    """The tensors of the modules of `given` that are not in `given`. Optional ones only if they were published."""
    known = [name for name in manifest.tensors if name in manifest.required or name in published]
    missing = set[str]()
    if given.issuperset(known):
        return missing
    for tails in fused:
        endings = "|".join(re.escape(tail).replace(r"\*", r"\d+") for tail in tails)
        pattern, groups = re.compile(rf"(?:(.*)\.)?(?:{endings})"), defaultdict[str | None, set[str]](set)
        for name in known:
            if (match := pattern.fullmatch(name)) is not None:
                groups[match[1]].add(name)
        missing.update(*(group - given for group in groups.values() if not group.isdisjoint(given)))
    return missing
