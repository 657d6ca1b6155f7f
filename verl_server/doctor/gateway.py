"""Checks of the way of an agent's request: agent -> gateway -> router -> engine. Names the link that is broken."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

import requests

from verl_server.doctor.report import Finding, fail, ok, warn

TIMEOUT_S = 20.0
"""Seconds for one request. The gateway needs up to 15 s to notice that the engine generates nothing."""
ADMIN_KEY = "VERL_SERVER_GATEWAY_ADMIN_KEY"
ADMIN_FAILS = "the requests of the trainer to /admin/sessions fail with 401"
TURNS_FAIL, REQUESTS_FAIL = "every turn fails with 503 or 529", "every request of the agent fails"
AGENT_KEYS = ("ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_API_KEY", "OPENAI_API_KEY")
"""Variables from which agents take the key of their session."""
AGENT_MODELS = ("ANTHROPIC_MODEL", "OPENAI_MODEL")
AGENT_URLS = {"ANTHROPIC_BASE_URL": False, "OPENAI_BASE_URL": True, "OPENAI_API_BASE": True}
"""Variables from which agents take their base URL, and whether it ends with `/v1`."""


def examine(url: str, env: Mapping[str, str]) -> list[Finding]:
    """Walk the chain behind the gateway at `url`. `env`: the environment of the agent, with its keys and URLs.

    Stops at a gateway that does not answer. Changes and records nothing: one token is generated outside of all sessions
    if `env` has the key of the admin API.
    """
    base = url.rstrip("/").removesuffix("/v1")
    with requests.Session() as http:
        http.trust_env = False
        alive = check_alive(base, _ask(http, f"{base}/health/liveness"), _ask(http, f"{base}/replicas"))
        if alive.level != "ok":
            return [alive]
        found = [alive, *check_base_urls(base, env)]
        names = [name for name in AGENT_KEYS if env.get(name)]
        for name in names:
            found += _examine_key(http, base, name, env)
        if not names:
            found.append(ok("Session key", f"not checked: none of {', '.join(AGENT_KEYS)} is set"))
        status, ready = _ask(http, f"{base}/health/readiness")
        admin_key = env.get(ADMIN_KEY)
        if not admin_key:
            return [*found, check_readiness(status, ready)]
        status, report = _ask(http, f"{base}/health", admin_key)
        if status == 401:
            cure = f"set {ADMIN_KEY} to the key that the gateway was started with (Gateway.admin_key)"
            return [*found, fail("Admin key", "the gateway refuses it (401)", symptom=ADMIN_FAILS, fix=cure)]
        return [*found, *check_engine(report if isinstance(report, dict) else {})]


def check_alive(base: str, reply: tuple[int, Any], replicas: tuple[int, Any]) -> Finding:
    """Check that a gateway answers. `replicas`: the reply to `/replicas`, which a router answers."""
    title, (status, body) = "Agent -> gateway", reply
    if status == 0:
        return fail(
            title,
            f"nothing answers at {base}: {body}",
            symptom="the agent reports a connection error and tries again",
            fix="start `verl-server gateway`, and use the URL that it prints. For other machines and containers, start "
            "it with --host 0.0.0.0 and use the address of its machine",
        )
    if status == 200 and isinstance(body, dict) and body.get("status") == "healthy":
        return ok(title, f"a gateway answers at {base}")
    is_router = replicas[0] == 200 or "router" in str(replicas[1])
    what = "a router" if is_router else "another program, perhaps an SGLang server or a proxy"
    return fail(
        title,
        f"{what} answers at {base}, and no gateway (status {status} for /health/liveness)",
        symptom="the agent works or fails with 404, and no session is recorded",
        fix="use the URL that `verl-server gateway` prints, without a path",
    )


def check_base_urls(base: str, env: Mapping[str, str]) -> Iterator[Finding]:
    """Check the base URLs in the environment of the agent: with `/v1` for OpenAI, without for Anthropic."""
    for name, needs_version in AGENT_URLS.items():
        if not (url := env.get(name, "").rstrip("/")):
            continue
        right = f"{base}/v1" if needs_version else base
        if url.removesuffix("/v1") != base and "/session/" not in url:
            yield warn(
                "Base URL",
                f"{name} is {url}, which is not this gateway",
                symptom="the agent works with another model, or reports a connection error",
                fix=f"export {name}={right}",
            )
        elif url.endswith("/v1") != needs_version:
            yield fail(
                "Base URL",
                f"{name} {'needs' if needs_version else 'must not have'} /v1 at its end",
                symptom="every request of the agent fails with 404",
                fix=f"export {name}={right}",
            )
        else:
            yield ok("Base URL", f"{name} is right")


def _examine_key(http: requests.Session, base: str, name: str, env: Mapping[str, str]) -> Iterator[Finding]:
    """Check the key of a session, and then the name of the model with a request that records nothing."""
    key = env[name]
    status, body = _ask(http, f"{base}/v1/models", key)
    if status not in (200, 503):  # 503: the key is right, and the engine is not there
        yield check_key(name, status, body)
        return
    yield ok("Session key", f"the gateway accepts {name}")
    model = next((env[variable] for variable in AGENT_MODELS if env.get(variable)), "policy")
    request = {"model": model, "messages": [{"role": "user", "content": "Hello"}]}
    yield check_model(model, *_ask(http, f"{base}/v1/messages/count_tokens", key, request))


def check_key(name: str, status: int, body: Any) -> Finding:
    """Check why the gateway refuses the key of a session."""
    if status == 401:
        return fail(
            "Session key",
            f"the gateway refuses the key in {name} (401)",
            symptom="every request of the agent fails with 401",
            fix="use the `key` in the reply to POST /admin/sessions. It is the key of one session of one run folder, "
            "not that of the admin API, of the engine, or of another gateway",
        )
    return fail(
        "Session key",
        f"the gateway refuses the session of {name} ({status}): {_message(body)}",
        symptom=REQUESTS_FAIL,
        fix="create another session with POST /admin/sessions: this one has ended or has expired",
    )


def check_model(model: str, status: int, body: Any) -> Finding:
    """Check the reply to a request that counts the tokens of one message."""
    if status == 200:
        return ok("Model name", f"the gateway accepts {model!r}")
    if status in (503, 529):
        return fail(
            "Gateway -> engine",
            _message(body),
            symptom="the agent waits and sends its request again",
            fix="see the next findings; without the key of the admin API, set " + ADMIN_KEY,
        )
    return fail(
        "Model name",
        f"the gateway refuses a request for {model!r} ({status}): {_message(body)}",
        symptom=REQUESTS_FAIL,
        fix="set the model of the agent to one of the names of GET /v1/models",
    )


def check_readiness(status: int, body: Any) -> Finding:
    """Check the readiness of the gateway, which tells no addresses of servers."""
    if status == 200:
        return ok("Readiness", "the gateway can serve turns")
    reasons = body.get("reasons") if isinstance(body, dict) else None
    detail = "; ".join(map(str, reasons or [f"status {status}"]))
    cure = f"set {ADMIN_KEY}, so that the doctor sees the servers behind the gateway"
    return fail("Readiness", detail, symptom="agents get the errors 503 or 529 and try again", fix=cure)


def check_engine(report: Mapping[str, Any]) -> list[Finding]:
    """Check the links behind the gateway. `report`: the body of `GET /health`."""
    engine, ping = report.get("engine") or {}, report.get("ping") or {}
    is_router = engine.get("engine") == "RouterClient"
    link = "Gateway -> router" if is_router else "Gateway -> engine"
    found = list(_check_folder(report))
    error = engine.get("error") or engine.get("problem")
    rows = engine.get("servers") or []
    if error:
        found.append(_check_error(link, str(error)))
    elif is_router:
        found.append(ok(link, f"the router has {len(rows)} replicas"))
    found += _check_servers("Router -> engine" if is_router else link, rows, is_asked="servers" in engine)
    found += _check_names(report, engine)
    is_reached = not error and (not rows or any(row.get("admitted") for row in rows))
    if "seconds" in ping:
        found.append(ok("Engine", f"generated one token in {ping['seconds']:g} s"))
    elif "seconds_without_tokens" in ping:
        busy = "busy: a short request waits behind the turns, which have returned no token for"
        found.append(ok("Engine", f"{busy} {ping['seconds_without_tokens']:g} s"))
    elif is_reached:
        found.append(_check_ping(str(ping.get("error"))))
    return found


def _check_folder(report: Mapping[str, Any]) -> Iterator[Finding]:
    for reason in report.get("reasons") or ():
        if "folder of the records" in reason or "shuts down" in reason:
            yield fail(
                "Gateway",
                reason,
                symptom="agents get errors, and no turn is recorded",
                fix="free or mount the disk of the run folder, and start the gateway again",
            )


def _check_error(link: str, error: str) -> Finding:
    if "401" in error or "API key" in error:
        return fail(
            link,
            f"the key is refused: {error}",
            symptom=TURNS_FAIL,
            fix="start the gateway with VERL_SERVER_API_KEY = the key of the router or server behind it",
        )
    return fail(
        link,
        error,
        symptom=TURNS_FAIL,
        fix="check that it runs, that its URL is right, and that the machine of the gateway reaches it",
    )


def _check_servers(link: str, rows: list[Any], *, is_asked: bool) -> Iterator[Finding]:
    if is_asked and not rows:
        yield fail(
            link,
            "no replica is registered",
            symptom=TURNS_FAIL,
            fix="the replicas never started or never registered: look at the log of the first one. Usual causes: the "
            "tensor parallel size does not divide the attention heads or KV heads (`verl-server doctor MODEL --tp N`), "
            "too little memory, a wrong Ray namespace (--fleet), or a wrong list of --replica or --server",
        )
    for row in rows:
        if row.get("admitted"):
            yield ok(link, f"{row.get('name')} accepts requests")
        elif row.get("problem"):
            yield _check_error(link, f"{row.get('name')}: {row['problem']}")
        else:
            yield fail(
                link,
                f"{row.get('name')} receives no requests{f' ({state})' if (state := row.get('state')) else ''}",
                symptom="turns wait or fail with 503 or 529",
                fix="it is starting, has ended, or its memory is released; see the log of the router and of the server",
            )


def _check_names(report: Mapping[str, Any], engine: Mapping[str, Any]) -> Iterator[Finding]:
    """Check that the gateway has the tokenizer of the model that the engine serves."""
    tokenizer = report.get("tokenizer")
    models = {str(row["model"]) for row in engine.get("servers") or () if row.get("model")}
    models |= {str(entry.get("id")) for entry in engine.get("models") or ()}
    other = [model for model in models if tokenizer and PurePath(model).name != PurePath(tokenizer).name]
    if other:
        yield warn(
            "Model name",
            f"the gateway has the tokenizer {tokenizer}, and the engine serves {', '.join(sorted(other))}",
            symptom="the policy answers with text that makes no sense: its tokens mean something else",
            fix="start the gateway with --model = the folder or the name that the engine serves",
        )
    lengths = [int(entry["max_model_len"]) for entry in engine.get("models") or () if entry.get("max_model_len")]
    limit = report.get("max_context_tokens")
    if lengths and limit and limit > min(lengths):
        yield fail(
            "Context length",
            f"the gateway allows {limit} tokens, and the engine {min(lengths)}",
            symptom="long conversations fail with 503 or 400, and the agent does not shorten them",
            fix=f"start the gateway with --max-context-tokens {min(lengths)} or less",
        )


def _check_ping(error: str) -> Finding:
    if "no token within" in error:
        return fail(
            "Engine",
            f"{error}, although the engine accepts requests",
            symptom="agents wait without an error: generation is stuck",
            fix="generation was paused and never continued (an interrupted weight update: POST /continue_generation), "
            "the scheduler hangs (see the log of the server, restart it), or it is busy with long prompts (ask again)",
        )
    return fail(
        "Engine",
        f"generated no token: {error}",
        symptom="every turn fails",
        fix="see the log of the server; restart it if its scheduler has ended",
    )


def _ask(http: requests.Session, url: str, key: str | None = None, body: Any = None) -> tuple[int, Any]:
    """Status and body of the reply. Without a reply, 0 and the kind of the error."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        reply = http.request(
            "POST" if body else "GET", url, json=body, headers=headers, timeout=TIMEOUT_S, allow_redirects=False
        )
    except requests.Timeout:
        return 0, f"no answer within {TIMEOUT_S:g} s"
    except requests.ConnectionError:
        return 0, "the connection was refused or broken"
    except (requests.RequestException, UnicodeError) as error:
        return 0, type(error).__name__
    try:
        return reply.status_code, reply.json()
    except requests.JSONDecodeError:
        return reply.status_code, reply.text[:200]


def _message(body: Any) -> str:
    """The message of an error of any dialect."""
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message") if isinstance(error, dict) else body)[:300]
