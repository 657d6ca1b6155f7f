"""The machine on which the suite ran."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Mapping

import psutil

from verl_server.doctor import hardware
from verl_server.doctor.packages import installed_version
from verl_server.types import Json

PACKAGES = ("verl-server", "sglang", "torch", "transformers")


def describe_environment(versions: Mapping[str, str] | None = None) -> Json:
    """Hardware and versions. `versions`: those of packages in other environments.

    Neither the name of the host nor a path is part of the result. Imports torch.
    """
    facts = hardware.probe()
    here = {name: installed_version(name) for name in PACKAGES}
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": facts.cores,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": [gpu.name for gpu in facts.gpus],
        "load_1min": round(os.getloadavg()[0], 2),
        "versions": {"python": platform.python_version(), **here, **(versions or {})},
    }
