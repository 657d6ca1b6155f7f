"""Tests of the `verl-server` command in a process of its own: its output and its exit code."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from verl_server.cli.app import app
from verl_server.cli.arguments import (
    ADMIN_API_KEY,
    API_KEY,
    REPLICA_API_KEY,
    read_server_args,
)
from verl_server.config import FORKSERVER_FOLDER, EngineKind
from verl_server.errors import BadInputError

#: Programs inherit ignored signals: those of a test run that is in the background, or under nohup.
DEFAULT_SIGNALS = ["env", "--default-signal=INT,HUP"]
COMMAND = [sys.executable, "-m", "verl_server.cli"]
KEYS = {API_KEY: "the-users-key", ADMIN_API_KEY: "the-admins-key"}


def environment(**changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in (*KEYS, FORKSERVER_FOLDER)}
    return {**kept, **changes}


def run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *args], capture_output=True, text=True, timeout=120, env=environment(**env))


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--api-key", "secret"], API_KEY),
        (["--admin_api_key=secret"], ADMIN_API_KEY),
        (["--port=70000"], "65535"),
        (["--tp", "3"], "tp_size=3 cannot divide the 4 attention heads"),
        (["--log-dir", "/proc/x"], "log_dir: no file can be created in the folder /proc/x: No such file or directory"),
        (["--log-dir", __file__], f"log_dir: no file can be created in the folder {__file__}: File exists"),
        (["stray"], "stray"),
    ],
)
def test_invalid_options_are_refused_before_a_server_starts(
    tiny: Callable[..., Path], args: list[str], expected: str
) -> None:
    done = run("launch", str(tiny("qwen3")), *args, **KEYS)
    assert done.returncode == 2
    assert expected in done.stderr
    assert "secret" not in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_the_words_of_sglangs_parser(tiny: Callable[..., Path]) -> None:
    """The server process asks SGLang's parser, before it loads the model."""
    options = ["--dtype", "bf16", "--log-dri", "x", "--page-siz=1", "--fp8-gemm-backend=auto"]
    done = run("launch", str(tiny("qwen3")), *options, **KEYS)
    assert (done.returncode, done.stdout) == (2, "")
    assert "dtype must be one of auto, half, float16, bfloat16, float, float32, got 'bf16'" in " ".join(
        done.stderr.split()
    )
    assert "has no argument 'log_dri'" in done.stderr
    assert "has no argument 'fp8_gemm_backend'; did you mean 'fp8_gemm_runner_backend'?" in done.stderr
    assert "Traceback" not in done.stderr


def test_random_keys_are_not_printed_into_a_pipe(tiny: Callable[..., Path]) -> None:
    done = run("launch", str(tiny("qwen3")), **{API_KEY: "only-one"})
    assert (done.returncode, done.stdout) == (2, "")
    assert f"set {ADMIN_API_KEY}" in done.stderr
    assert "only-one" not in done.stderr


def test_a_short_key_is_refused_before_a_server_starts(tiny: Callable[..., Path]) -> None:
    done = run("launch", str(tiny("qwen3")), **{**KEYS, API_KEY: "short"})
    assert (done.returncode, done.stdout) == (2, "")
    assert f"a key must have at least 8 characters, but {API_KEY} has 5" in done.stderr
    assert f"export {API_KEY}=$(openssl rand -hex 32);" in done.stderr
    assert "Starting a server" not in done.stderr


def parse_server_args(args: list[str]) -> dict[str, Any]:
    return read_server_args(EngineKind.SGLANG, args)


def test_server_arguments() -> None:
    """Numbers and bools are read here; the server, which has SGLang's parser, reads all other texts."""
    command_line = "Org/Model --mem-fraction-static 0.5 --dtype=bfloat16 --skip-tokenizer-init --tool-call-parser qwen"
    assert parse_server_args(command_line.split()) == {
        "model_path": "Org/Model",
        "mem_fraction_static": 0.5,
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "tool_call_parser": "qwen",
    }
    more = ["Org/Model", "--dp-size", "2", "--lora-paths", "a", "b", "--no-lora-strict-loading", "--x", "-1"]
    more += ["--json-model-override-args", '{"a": 1}']
    assert parse_server_args(more) == {
        "model_path": "Org/Model",
        "dp_size": 2,
        "lora_paths": ["a", "b"],
        "lora_strict_loading": False,
        "json_model_override_args": '{"a": 1}',
        "x": -1,
    }


@pytest.mark.parametrize("engine", list(EngineKind))
@pytest.mark.parametrize("option", ["--tp", "--tp-size", "--tensor-parallel-size"])
def test_names_of_the_tensor_parallel_size(option: str, engine: EngineKind) -> None:
    commands = vars(typer.main.get_command(app))["commands"]
    line = ["Org/Model", "--dtype", "auto", option, "2", "--engine", engine.value]
    context = commands["launch"].make_context("launch", line)
    assert context.params["tp"] == 2
    assert read_server_args(engine, ["Org/Model", *context.args])["dtype"] == "auto"


@pytest.mark.parametrize(
    ("command_line", "expected"),
    [
        ("Org/Model --enable-metrics --config x.yaml", "use the options of the file, written on the command line"),
        ("/no/such/file.gguf", "is not a folder"),
        ("--dtype auto", "MODEL must come before the options"),
        ("Org/Model stray", "'stray' does not follow an option"),
        ("Org/Model -x 1", "'-x' does not follow an option"),
        ("Org/Model -p 3000", "for example --mem-fraction-static 0.5$"),
        ("Org/Model --tp-size 2", "use --tp"),
        ("Org/Model --api-key secret", "--api-key is not accepted, because all users of this machine"),
        ("/no/such/folder", "is not a folder"),
        ("models/no/such", "is not a folder"),
    ],
)
def test_server_arguments_that_are_refused(command_line: str, expected: str) -> None:
    with pytest.raises(BadInputError, match=re.escape(expected).replace(r"\$", "$")):
        parse_server_args(command_line.split())


def test_the_path_of_a_local_model_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other programs read it from the server, for example `verl-server conformance`."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model.gguf").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for given in ("model", "./model", "~/model", "model/"):
        assert parse_server_args([given]) == {"model_path": str(tmp_path / "model")}
    assert parse_server_args(["model.gguf"]) == {"model_path": str(tmp_path / "model.gguf")}


def test_remote_model_urls_and_gguf_files_are_passed_to_sglang(tmp_path: Path) -> None:
    assert parse_server_args(["s3://bucket/models/name"]) == {"model_path": "s3://bucket/models/name"}
    file = tmp_path / "model.gguf"
    file.touch()
    assert parse_server_args([str(file)]) == {"model_path": str(file)}


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_of_a_command(option: str) -> None:
    assert "Start one SGLang or vLLM server" in CliRunner().invoke(app, ["launch", option]).output


@pytest.mark.parametrize(
    ("args", "code", "expected"),
    [
        (["router"], 2, "--replica URL"),
        (["router", "--replica", "127.0.0.1:30000"], 2, "is not an HTTP URL"),
        (["router", "--replica", "http://127.0.0.1:70000"], 2, "is not an HTTP URL"),
        (["status", "foo"], 2, "is not an HTTP URL"),
        (["status", "http://u:p@h:1"], 2, f"the URL without them, and set {API_KEY} to the router's key"),
        (["router", "--replica", "http://u:p@h:1"], 2, f"and set {REPLICA_API_KEY} to the key of the servers"),
        (["status", "http://127.0.0.1:1"], 1, "the router at http://127.0.0.1:1 cannot be reached"),
        (["doctor", "--dtype", "bf16"], 2, "'bf16' is not one of"),
        (["demo", "--output", "/proc/x"], 2, "output: no file can be created in the folder /proc/x"),
        (["luanch", "Org/Model"], 2, "Did you mean 'launch'?"),
    ],
)
def test_mistakes_are_explained(args: list[str], code: int, expected: str) -> None:
    """The message names the wrong value and the correction; there is no traceback."""
    done = run(*args, **KEYS)
    assert done.returncode == code
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


def test_a_router_and_its_status_report_an_unreachable_replica() -> None:
    """The router logs the URL and the reason at its start. The status shows the whole URL in a pipe and fails."""
    replica = f"http://{'a-long-name.' * 10}invalid:1"
    command = [*COMMAND, "router", "--replica", replica]
    env = environment(**KEYS)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as router:
        try:
            assert router.stdout is not None
            url = router.stdout.readline().removeprefix("Ready: ").strip()
            table, rows = run("status", url, **KEYS), run("status", url, "--json", **KEYS)
            router.terminate()
            _, logged = router.communicate(timeout=30)
        finally:
            router.kill()
    assert f"replica {replica} receives no requests until it answers: nothing answers" in logged
    assert logged.count(replica) <= 2, "the reason is logged once"
    for done in (table, rows):
        assert done.returncode == 1
        assert f"none of the 1 replicas of {url} accepts requests" in done.stderr
    assert replica in table.stdout
    assert [(row["name"], row["admitted"]) for row in json.loads(rows.stdout)] == [(replica, False)]


def test_a_router_outlives_its_terminal_under_nohup() -> None:
    """nohup ignores SIGHUP: the signal stays ignored. Without nohup, it ends the router."""
    command = [*COMMAND, "router", "--replica", "http://127.0.0.1:1"]
    for prefix in (["nohup"], DEFAULT_SIGNALS):
        with subprocess.Popen(
            [*prefix, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(**KEYS)
        ) as router:
            try:
                assert router.stdout is not None
                assert router.stdout.readline().startswith("Ready:")
                router.send_signal(signal.SIGHUP)
                if prefix == ["nohup"]:
                    with pytest.raises(subprocess.TimeoutExpired):
                        router.wait(2)
                    router.terminate()
                router.wait(30)
            finally:
                router.kill()


def test_the_router_names_a_port_that_is_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("router", "--replica", "http://127.0.0.1:1", "--port", str(port), **KEYS)
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "--port" in done.stderr
    assert "Traceback" not in done.stderr


def test_version_and_light_imports() -> None:
    from verl_server import __version__

    lines = run("version").stdout.splitlines()
    assert lines[0] == f"verl-server {__version__}"
    assert re.match(r"sglang \d", lines[1])
    heavy = "import sys, verl_server.cli.app; print({'torch', 'sglang', 'transformers', 'ray'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", heavy], capture_output=True, text=True).stdout == "set()\n"
