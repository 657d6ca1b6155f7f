"""Settings of the plugin for verl that are refused or renamed, without verl and without servers."""

from __future__ import annotations

import pickle
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from verl_server.adapter.engine import get_engine
from verl_server.adapter.vllm.server_arguments import PLAIN_NAMES, VLLM_OPTIONS
from verl_server.config import ENGINE, SERVER_PYTHON, RolloutMode
from verl_server.errors import BadInputError, UnsupportedError
from verl_server.integrations.verl.settings import FleetSpec, make_fleet_spec, parse_own_settings
from verl_server.types import Json


@pytest.fixture(autouse=True)
def no_engine_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (ENGINE, SERVER_PYTHON):
        monkeypatch.delenv(name, raising=False)


def parse(engine_kwargs: Any) -> Json:
    """The arguments of the server in `engine_kwargs`."""
    config: Any = SimpleNamespace(engine_kwargs=engine_kwargs)
    return parse_own_settings(config)[1]


def make_spec(
    section: Json | None = None, max_model_len: Any = None, mode: RolloutMode = RolloutMode.HYBRID
) -> FleetSpec:
    """The settings of a fleet whose model has room for 40960 tokens."""
    model: Any = SimpleNamespace(
        path="/model", local_path="/model", trust_remote_code=False, lora_rank=0, lora={}, target_modules=None,
        hf_config=SimpleNamespace(max_position_embeddings=40960),
    )  # fmt: skip
    config: Any = SimpleNamespace(
        engine_kwargs={"vllm": {}, "trtllm": {}, "verl_server": section or {}}, max_model_len=max_model_len,
        disaggregation=SimpleNamespace(enabled=False), mtp=None, pipeline_model_parallel_size=1,
        prometheus=SimpleNamespace(enable=False), profiler=None, quantization=None, qat=None,
        enable_rollout_routing_replay=False, logprobs_mode=None, checkpoint_engine=SimpleNamespace(backend="naive"),
        dtype="bfloat16", tensor_model_parallel_size=2, data_parallel_size=1, expert_parallel_size=1,
        load_format="dummy", max_num_seqs=1024, gpu_memory_utilization=0.5, seed=42, enable_prefix_caching=True,
        enforce_eager=False, skip_tokenizer_init=True, enable_chunked_prefill=True, max_num_batched_tokens=8192,
        prompt_length=512, response_length=512, free_cache_engine=True,
    )  # fmt: skip
    return make_fleet_spec(config, model, mode)


# -- names ---------------------------------------------------------------------------------------------


def test_other_names_are_arguments_of_the_servers() -> None:
    """The names of SGLang are those of the version that is installed here."""
    program = "import inspect, sglang.srt.server_args as s; print(*inspect.signature(s.ServerArgs).parameters)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    names = done.stdout.splitlines()[-1].split()
    assert len(names) > 100
    sglang = {*names} - {"host", "tp_size", "dp_size", "ep_size", "pp_size"}
    assert parse({"verl_server": dict.fromkeys(sglang)}).keys() == sglang
    vllm = VLLM_OPTIONS - set(PLAIN_NAMES.values())
    assert parse({"verl_server": {"engine_kind": "vllm", **dict.fromkeys(vllm)}}).keys() == vllm


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("tp_size", "tensor_model_parallel_size"),
        ("tensor_parallel_size", "tensor_model_parallel_size"),
        ("tensor_model_parallel_size", "tensor_model_parallel_size"),
        ("dp_size", "data_parallel_size"),
        ("ep_size", "expert_parallel_size"),
        ("expert_parallel_size", "expert_parallel_size"),
        ("pp_size", "pipeline_model_parallel_size"),
    ],
)
@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_verl_says_how_many_gpus_a_server_has(name: str, setting: str, engine: str) -> None:
    """A smaller size in the section would leave GPUs idle without a word."""
    message = rf"^engine_kwargs\.verl_server\.{name} is refused.*set rollout\.{setting}$"
    with pytest.raises(BadInputError, match=message):
        make_spec({"engine_kind": engine, name: 4})


# -- sections ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "section"),
    [
        ("server_python", "/x"),
        ("use_forkserver", False),
        ("timeouts", {"start_s": 3}),
        ("verl-server", {"log_dir": "x"}),
        ("sglang", {"max_logprobs": 1, "attention_backend": "triton"}),
        ("sglang", "triton"),
    ],
)
def test_sections_without_effect(name: str, section: Any) -> None:
    message = rf"engine_kwargs\.{name} has no effect .* move it .* into engine_kwargs\.verl_server"
    with pytest.raises(BadInputError, match=message):
        parse({name: section, "verl_server": {}})


def test_values_of_sections_without_effect_are_not_shown() -> None:
    with pytest.raises(BadInputError, match=r"move it \(api_key\) into") as caught:
        parse({"sglang": {"api_key": "secret", "max_logprobs": 0}})
    assert "secret" not in str(caught.value)


def test_the_own_settings_are_fields_of_two_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine and its interpreter are those of the process that reads the settings, not of the actor."""
    monkeypatch.setenv(ENGINE, "vllm")
    monkeypatch.setenv(SERVER_PYTHON, "/opt/vllm/bin/python")
    section = {"log_dir": "/logs", "timeouts": {"start_s": 9.0}, "folder": "/shared", "env": {"A": 1}, "page_size": 1}
    own, given = parse_own_settings(SimpleNamespace(engine_kwargs={"verl_server": section}))
    own = pickle.loads(pickle.dumps(own))
    assert (own.adapter_config.engine_kind, str(own.adapter_config.server_python)) == ("vllm", "/opt/vllm/bin/python")
    assert (str(own.adapter_config.log_dir), own.adapter_config.timeouts.start_s) == ("/logs", 9.0)
    assert (str(own.weights_config.folder), own.env, given) == ("/shared", {"A": "1"}, {"page_size": 1})


def test_empty_sections() -> None:
    sections = {"vllm": {"max_logprobs": 5}, "sglang": {}, "trtllm": None, "verl_server": {"page_size": 1}}
    assert parse(sections) == {"page_size": 1}
    assert parse(None) == {}


# -- values --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "value", "common"),
    [
        ("max_num_seqs", 3, "max_running_requests"),
        ("max_model_len", 4096, "context_length"),
        ("seed", 1, "random_seed"),
        ("gpu_memory_utilization", 0.3, "mem_fraction_static"),
        ("max_num_batched_tokens", 512, "max_prefill_tokens"),
        ("model", "org/other", "model_path"),
    ],
)
def test_names_of_vllm_replace_settings_of_verl(given: str, value: Any, common: str) -> None:
    spec = make_spec({"engine_kind": "vllm", given: value}, max_model_len=2048)
    assert spec.server_args[common] == value
    assert given not in spec.server_args
    assert spec.context_length == spec.server_args["context_length"]


def test_an_argument_under_two_names_is_still_refused() -> None:
    spec = make_spec({"engine_kind": "vllm", "model": "org/other", "max_num_seqs": 3, "max_running_requests": 4})
    with pytest.raises(BadInputError, match="are the same argument"):
        get_engine("vllm").validate_fleet_args(spec.server_args)


def test_the_context_length_is_a_whole_number() -> None:
    assert make_spec().context_length == 40960
    assert make_spec({"context_length": 64}, max_model_len=2048).context_length == 64
    for given in ({"section": {"context_length": "4k"}}, {"max_model_len": "4k"}):
        with pytest.raises(ValueError, match="'4k'"):
            make_spec(**given)


@pytest.mark.parametrize(
    ("transport", "works", "refused", "needed"),
    [
        ("cuda_ipc", RolloutMode.HYBRID, RolloutMode.STANDALONE, "the devices of the trainer"),
        ("distributed_buckets", RolloutMode.STANDALONE, RolloutMode.HYBRID, "devices of their own"),
    ],
)
def test_a_transport_between_gpus_fits_the_devices_of_the_servers(
    transport: str, works: RolloutMode, refused: RolloutMode, needed: str
) -> None:
    section = {"transport": transport}
    assert make_spec(section, mode=works).own.weights_config.transport == transport
    with pytest.raises(UnsupportedError, match=rf"the transport {transport} needs servers on {needed};"):
        make_spec(section, mode=refused)
