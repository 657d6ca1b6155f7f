"""What is refused before SGLang runs in the trainer's process, which ends with SGLang's scheduler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from verl_server import AdapterConfig
from verl_server.engine import servers, start
from verl_server.errors import BadInputError
from verl_server.ranks.coordinator import RankCoordinator


class StartedError(Exception):
    """The engine would have been made."""


@pytest.mark.parametrize(
    ("server_args", "error", "message"),
    [
        ({"tp_size": 3}, BadInputError, "tp_size=3 cannot divide the 4 attention heads of the model"),
        ({"tp_size": 2}, StartedError, None),
        ({"tp_size": 3, "enable_dp_attention": True}, StartedError, None),
        ({"tp_size": 3, "model_path": "org/nowhere"}, StartedError, None),
    ],
)
def test_a_tp_size_that_would_end_the_trainer(
    server_args: dict[str, Any],
    error: type[Exception],
    message: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def make_engine(_: object) -> None:
        raise StartedError

    monkeypatch.setattr(servers, "_make_engine", make_engine)
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 4}), encoding="utf-8")
    with pytest.raises(error, match=message):
        start._make_backend(
            RankCoordinator(0, 1, {}, 5.0),
            start.BackendSource(launch_server=False, servers=(), fleet=None),
            {"model_path": str(tmp_path), **server_args},
            AdapterConfig(),
            {},
            on_server_death=print,
        )
