"""`DockerSandbox` with a real daemon of Docker. Without a daemon the tests are skipped and say so."""

from __future__ import annotations

import asyncio
import io
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from helpers import wait_until

from verl_server.agent import DockerSandbox, SandboxLimits
from verl_server.agent.sandboxes.docker_sandbox import LABEL
from verl_server.errors import InfrastructureError

if TYPE_CHECKING:
    from docker.client import DockerClient

PROGRAMS = ("sh", "bash", "cat", "head", "timeout", "sleep", "mkdir", "dirname", "ls", "wc", "yes", "tail")
IMAGE = "verl-server-test-sandbox:1"


@pytest.fixture(scope="module")
def docker() -> Iterator[DockerClient]:
    import docker

    try:
        client = docker.from_env()
        client.ping()
    except Exception as error:  # noqa: BLE001 - of docker and requests
        pytest.skip(f"no daemon of Docker answers, so DockerSandbox is not tested: {error}")
    client.api.import_image_from_data(make_image(), repository=IMAGE.split(":")[0], tag="1")
    yield client
    client.images.remove(IMAGE, force=True)
    client.close()


def make_image() -> bytes:
    """A file system with programs of this machine and their libraries, as a tar archive."""
    files = {f"/bin/{name}": Path(str(shutil.which(name))).resolve() for name in PROGRAMS}
    for program in list(files.values()):
        for line in subprocess.run(
            ["ldd", str(program)], capture_output=True, text=True, check=True
        ).stdout.splitlines():
            found = [part for part in line.split() if part.startswith("/")]
            files |= {part: Path(part).resolve() for part in found}
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for target, source in files.items():
            archive.add(source, target.lstrip("/"))
        folder = tarfile.TarInfo("tmp")
        folder.type, folder.mode = tarfile.DIRTYPE, 0o777
        archive.addfile(folder)
    return content.getvalue()


def containers(client: DockerClient) -> list[Any]:
    found: list[Any] = client.containers.list(all=True, filters={"label": LABEL})
    return found


def test_commands_files_and_limits(docker: DockerClient) -> None:
    limits = SandboxLimits(memory_bytes=64 << 20, cpu_s=1.0, max_output_bytes=10_000, max_processes=30)

    async def run() -> None:
        async with DockerSandbox(IMAGE, limits) as box:
            assert box.shell.endswith("bash")
            result = await box.run("echo out; echo err >&2; exit 3")
            assert (result.exit_code, result.stdout, result.stderr) == (3, "out\n", "err\n")
            assert (await box.run("cat; echo $SEED", stdin="ü", env={"SEED": "7"})).stdout == "ü7\n"
            assert (await box.run(["no-such-program"])).exit_code == 127
            await box.write_file("/tmp/a/b", b"\0" * 3_000_000)
            assert (await box.run("wc -c /tmp/a/b")).stdout == "3000000 /tmp/a/b\n"
            await box.write_file("/tmp/a/c", b"\x00\xff")
            assert await box.read_file("/tmp/a/c") == b"\x00\xff"
            with pytest.raises(OSError, match="No such file"):
                await box.read_file("/tmp/missing")
            assert (await box.run("sleep 60", timeout_s=0.5)).exceeded == "time"
            assert (await box.run("while :; do :; done")).exceeded == "cpu"
            assert (await box.run("tail /dev/zero")).exit_code == 137  # killed for its memory
            assert "bytes omitted" in (await box.run("yes | head -c 100000")).stdout
            assert (await box.run("ls /sys/class/net")).stdout == "lo\n"
            assert (await box.run("sleep 60 & echo started")).stdout == "started\n"
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(box.run("echo $$ > /tmp/pid; sleep 60"), 1.0)
            await asyncio.sleep(0.5)
            assert (await box.run("kill -0 $(cat /tmp/pid)")).exit_code
            results = await asyncio.gather(*(box.run(f"echo {n}") for n in range(10)))
            assert [result.stdout for result in results] == [f"{n}\n" for n in range(10)]
            (container,) = containers(docker)
            container.kill()
            with pytest.raises(InfrastructureError):
                await box.run("true")

    asyncio.run(run())
    wait_until(lambda: not containers(docker), 20.0, "a container is left")


KILLED_TRAINER = f"""
import asyncio, os, signal
from verl_server.agent import DockerSandbox

async def main():
    box = DockerSandbox({IMAGE!r})
    await box.start()
    await box.run("sleep 1000 &")
    print("started", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def test_no_container_is_left_of_a_trainer_that_was_killed(docker: DockerClient) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED_TRAINER], capture_output=True, text=True, check=False)
    assert done.stdout == "started\n", done.stderr
    wait_until(lambda: not containers(docker), 20.0, "a container is left")


def test_an_image_that_is_missing(docker: DockerClient) -> None:
    box = DockerSandbox("verl-server-test-no-such-image:1")
    with pytest.raises(InfrastructureError, match="no-such-image"):
        asyncio.run(box.start())


def test_a_daemon_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none")
    with pytest.raises(InfrastructureError, match="Docker"):
        asyncio.run(DockerSandbox(IMAGE).start())
