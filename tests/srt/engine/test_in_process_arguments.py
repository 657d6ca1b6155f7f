"""What is refused before SGLang runs in the trainer's process, which ends with SGLang's scheduler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from verl_server.engine import servers
from verl_server.errors import BadInputError


class StartedError(Exception):
    """The engine would have been made."""


@pytest.mark.parametrize(
    ("server_args", "error", "message"),
    [
        ({"tp_size": 3}, BadInputError, "tp_size=3 cannot divide 4 attention heads of the model"),
        ({"tp_size": 2}, StartedError, None),
        ({"tp_size": 3, "enable_dp_attention": True}, StartedError, None),
        ({"tp_size": 3, "model_path": "/nowhere"}, StartedError, None),
    ],
)
def test_a_tp_size_that_would_end_the_trainer(
    server_args: dict[str, Any],
    error: type[Exception],
    message: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(_: object) -> None:
        raise StartedError

    monkeypatch.setattr(servers, "_make_engine", start)
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 4}), encoding="utf-8")
    with pytest.raises(error, match=message):
        servers.InProcessBackend({"model_path": str(tmp_path), **server_args})
