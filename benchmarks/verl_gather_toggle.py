"""Lets every second weight update of a verl run use verl's own gathered tensors. For `bench_verl.py`.

verl imports this module in each of its processes (`VERL_USE_EXTERNAL_MODULES`). The first update is that before the
first step. So the updates of odd steps push shards, and those of even steps push gathered tensors.
"""

from __future__ import annotations

import itertools
from typing import Any

from verl_server.integrations.verl import verl_classes

_is_plain, _calls = verl_classes._is_plain, itertools.count()


def _alternate(engine: Any) -> bool:
    return _is_plain(engine) and next(_calls) % 2 == 1


verl_classes._is_plain = _alternate
