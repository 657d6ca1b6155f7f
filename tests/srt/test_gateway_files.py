"""The files of the gateway: few open files, damaged files, and ends that reach the disk."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import few_files_gateway

from verl_server.gateway.records.record_files import TOO_MANY_FILES
from verl_server.trajectory import load_session


def test_a_gateway_with_few_open_files_serves_many_sessions_and_ends_them(tmp_path: Path) -> None:
    """Records that are not used have no open file. Without a free file, sessions end, and no session is created."""
    program = [sys.executable, few_files_gateway.__file__, str(tmp_path)]
    done = subprocess.run(program, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found["turns"]) == set(found["later_turns"]) == {200}
    assert found["open_records"] <= 100 // 4
    assert found["full_readiness"][-1] == [503, {"status": "not ready", "reasons": [TOO_MANY_FILES]}]
    status, body = found["created"]
    assert (status, body["error"]["message"]) == (503, f"the session 'new' was not created: {TOO_MANY_FILES}")
    assert found["ends"] == [200] * 3
    assert (found["later_readiness"][0], found["later_created"]) == (200, 200)
    for index in range(few_files_gateway.NUM_SESSIONS):
        graph = load_session(tmp_path / "run" / f"s{index}.jsonl")
        is_ended = index in (0, 59)
        assert (len(graph.leaves), sum(node.sampled for node in graph.nodes)) == (1, 1 if is_ended else 2)
        assert list(graph.rewards.values()) == ([[1.0]] if is_ended else [])
