"""Sends thousands of generated and malformed requests to a gateway in front of a real server, and checks the replies.

No reply may have a status of 500 or more, except 503 and 529, and no body may have a stack trace or the path of a file.
The requests are those of `schemathesis`, from the gateway's `/openapi.json`, and malformed bodies
(`gateway_fuzz_bodies.py`). A short version is `test_gateway_fuzz.py`. Exits with 1 on a finding.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import re
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import orjson
from gateway_fuzz_bodies import ADMIN_PATHS, random_bodies

if TYPE_CHECKING:
    from verl_server.gateway import Gateway

ALLOWED_FAILURES = (503, 529)
"""Statuses with which a gateway says that the engine cannot generate now."""
LEAK = re.compile(rb'Traceback|File "|[\w./-]*(?:\.py\b|site-packages|/tmp/|/home/|/root/|/usr/lib)[\w./-]*')
TIMEOUT_S = 60.0
CASES_PER_SESSION = 500
SESSION: dict[str, Any] = {"sampling_params": {"max_new_tokens": 2, "temperature": 1.0}}
"""Settings of the sessions: turns are short, whatever a request asks for."""


@dataclass
class Report:
    """What was sent, and what was wrong."""

    statuses: collections.Counter[int] = field(default_factory=collections.Counter)
    findings: list[str] = field(default_factory=list)

    @property
    def num_cases(self) -> int:
        """Number of requests."""
        return sum(self.statuses.values())

    def check(self, request: str, status: int, body: bytes) -> None:
        """Check one reply. `request`: what was sent, as text. A reply may repeat it: `hypothesis` sends file names."""
        self.statuses[status] += 1
        if status >= 500 and status not in ALLOWED_FAILURES:
            self.findings.append(f"status {status}: {request[:1500]}: {body[:300]!r}")
        leaks = [found for found in LEAK.findall(body) if found.decode(errors="replace") not in request]
        if status >= 400 and leaks:
            self.findings.append(f"the body has {leaks[0]!r}: {request[:1500]}: {body[:300]!r}")

    def line(self, name: str, seconds: float) -> str:
        """A line for the terminal."""
        counts = ", ".join(f"{status}: {count}" for status, count in sorted(self.statuses.items()))
        return f"{name}: {self.num_cases} cases in {seconds:.0f} s, {len(self.findings)} findings ({counts})"


def fuzz_bodies(gateway: Gateway, cases: int, seed: int) -> Report:
    """Send malformed bodies to all endpoints that read one."""
    report, key = Report(), ""
    with httpx.Client(base_url=gateway.url, timeout=TIMEOUT_S) as client:
        for number, (path, body, headers) in enumerate(itertools.islice(random_bodies(seed), cases)):
            if number % CASES_PER_SESSION == 0:
                key = gateway.create_session(**SESSION)[1]
                with contextlib.suppress(Exception):
                    gateway.create_session("fuzz")
            used = gateway.admin_key if path in ADMIN_PATHS else key
            headers = {"authorization": f"Bearer {used}", "content-type": "application/json", **headers}
            reply = client.post(path, content=body, headers=headers)
            report.check(f"seed {seed}, case {number}: POST {path} {headers.get('content-type')} {body!r}",
                         reply.status_code, reply.content)  # fmt: skip
    return report


def fuzz_schema(gateway: Gateway, cases: int, seed: int) -> Report:
    """Send requests that `schemathesis` generates from the gateway's description: valid and invalid ones."""
    import schemathesis

    report = Report()
    schema = schemathesis.openapi.from_url(f"{gateway.url}/openapi.json")
    found: list[Any] = list(schema.get_all_operations())
    operations = [result.ok() for result in found]
    with_body = [operation for operation in operations if operation.body]
    others = [operation for operation in operations if not operation.body]
    modes = list(schemathesis.GenerationMode)
    for operation in others:
        for mode in modes:
            _run_operation(gateway, report, operation, mode, min(20, max(1, cases // 200)), seed)
    turn = 0
    while report.num_cases < cases:
        turn += 1
        before = report.num_cases
        share = max(5, (cases - report.num_cases) // (len(with_body) * len(modes)))
        for operation in with_body:
            for mode in modes:
                _run_operation(gateway, report, operation, mode, min(share, 200), seed + turn)
        if report.num_cases == before:
            break
    return report


def _run_operation(gateway: Gateway, report: Report, operation: Any, mode: Any, cases: int, seed: int) -> None:
    """Send the cases of one operation."""
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as set_seed
    from hypothesis.errors import Unsatisfiable

    session, session_key = gateway.create_session(**SESSION)
    key = gateway.admin_key if operation.path.startswith(("/admin", "/health")) else session_key
    known = {"session_key": session_key, "session_id": session.id, "name": "policy"}
    headers = {"authorization": f"Bearer {key}"}

    @set_seed(seed)
    @settings(
        max_examples=cases,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case: Any) -> None:
        if mode.is_positive:  # the id and the key of a session that exists
            case.path_parameters.update({name: known[name] for name in case.path_parameters})
        sent = case.call(headers=headers, timeout=TIMEOUT_S)
        body = getattr(case, "body", None)
        given = (case.path_parameters, case.query, case.headers, case.cookies, body)
        report.check(f"{case.method} {case.path} {given}", sent.status_code, sent.content)

    with contextlib.suppress(Unsatisfiable):  # nothing is invalid in a request without parameters, for example
        run()


def main() -> int:
    """Check a gateway. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="check_gateway_fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=5000, metavar="N", help="number of requests of each kind")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the requests")
    options = parser.parse_args()
    from servers import tiny_model

    from verl_server import HttpServerEngineAdapter
    from verl_server.agent import RolloutLimits
    from verl_server.gateway import Gateway

    limits = RolloutLimits(max_turns=1_000_000, max_context_tokens=2000)
    reports = []
    with (
        tempfile.TemporaryDirectory() as folder,
        tiny_model() as model,
        HttpServerEngineAdapter(str(model), dtype="float32", max_total_tokens=16384) as server,
        Gateway(server, Path(folder) / "run", limits=limits) as gateway,
    ):
        for name, fuzz in (("malformed bodies", fuzz_bodies), ("schemathesis", fuzz_schema)):
            started_at = time.monotonic()
            reports.append(fuzz(gateway, options.cases, options.seed))
            print(reports[-1].line(name, time.monotonic() - started_at), flush=True)
        key = gateway.create_session(**SESSION)[1]
        body = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
        reply = httpx.post(f"{gateway.openai_url}/chat/completions", content=orjson.dumps(body),
                           headers={"authorization": f"Bearer {key}"}, timeout=TIMEOUT_S)  # fmt: skip
        print(f"afterwards, a turn has the status {reply.status_code}")
    findings = list(dict.fromkeys(finding for report in reports for finding in report.findings))
    for finding in findings[:50]:
        print(finding)
    return 1 if findings or reply.status_code != 200 else 0


if __name__ == "__main__":
    sys.exit(main())
