"""SGLang in a trainer's own process: the in-process engine, and server arguments that a CPU does not support."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    GREEDY,
    PROMPTS,
    Ranks,
    assert_equals_reference,
    change_weights,
    mesh_of,
    no_new_shared_memory,
    raised,
    reference_model,
    trainer_ranks,
)

from verl_server import VerlEngine

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def sglang_process() -> Iterator[Ranks]:
    """A separate process that imports SGLang: an import takes most of the time of these tests, and has side effects."""
    with trainer_ranks(1) as ranks:
        yield ranks


CASES: list[tuple[dict[str, object], str]] = [
    ({"quantization": "fp8"}, "quantization"),
    ({"speculative_algorithm": "NGRAM"}, "peculative"),
    ({"enable_hierarchical_cache": True}, "hierarchical"),
    ({"enable_deterministic_inference": True}, "sampling_seed"),
    ({"rl_on_policy_target": "fsdp"}, "sampling_seed"),
    ({}, "accepted"),
    ({"attention_backend": "fa3", "enable_memory_saver": True, "page_size": 16}, "accepted"),
]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="an accelerator is present")
def test_each_refusal_names_its_reason(sglang_process: Ranks, tiny: Callable[..., Path]) -> None:
    """Server arguments that a CPU does not support are refused with a message that says what to do."""
    cases = [{"model_path": str(tiny("qwen3")), **arguments} for arguments, _ in CASES]
    (results,) = sglang_process.run(_resolve, cases)
    for (arguments, expected), result in zip(CASES, results, strict=True):
        assert expected in result, (arguments, result)


def _resolve(rank: int, world: int, cases: list[dict[str, Any]]) -> list[str]:
    """The error for each set of server arguments, or "accepted"."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import ServerArgs

    results = []
    for case in cases:
        try:
            ServerArgs(**case).resolve_once()
            results.append("accepted")
        except ValueError as error:
            results.append(str(error))
    return results


@pytest.mark.skipif(torch.accelerator.is_available(), reason="an accelerator is present")
def test_media_are_loaded_from_listed_domains_only(sglang_process: Ranks, tiny: Callable[..., Path]) -> None:
    """A server loads no URL that a request names, unless `allowed_media_domains` has its host."""
    ((refused, loaded),) = sglang_process.run(_load_media, str(tiny("qwen3")), [[], ["127.0.0.1"]])
    assert "Media URL domain is not allowed. Allowed domains: ['none-by-default.invalid']" in refused
    assert loaded == "pixels"


def _load_media(rank: int, world: int, model_path: str, all_domains: list[list[str]]) -> list[str]:
    """For each list of allowed domains, what SGLang loads from 127.0.0.1, or its error."""
    import http.server
    import threading

    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils import get_image_bytes

    from verl_server.server.server_main import limit_media_domains

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"pixels")

    results = []
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for domains in all_domains:
            arguments = {"model_path": model_path, "allowed_media_domains": domains}
            ServerArgs(**limit_media_domains(arguments)).resolve_once()
            try:
                results.append(get_image_bytes(f"http://127.0.0.1:{server.server_port}/a.png").decode())
            except ValueError as error:
                results.append(str(error))
        server.shutdown()
    return results


#: Options of `verl-server launch`, and the fields of the server.
LINES: list[tuple[str, dict[str, Any]]] = [
    ("--lora-target-modules q_proj", {"lora_target_modules": ["q_proj"]}),
    ("--lora-paths a=/x", {"lora_paths": ["a=/x"]}),
    ('--lora-paths {"lora_name":"a","lora_path":"/x"}', {"lora_paths": [{"lora_name": "a", "lora_path": "/x"}]}),
    ("--lora-paths a b", {"lora_paths": ["a", "b"]}),
    ("--cuda-graph-bs-decode 8", {"cuda_graph_bs_decode": [8]}),
    ("--bucket-time-to-first-token=1", {"bucket_time_to_first_token": [1.0]}),
    ("--uvicorn-access-log-exclude-prefixes", {"uvicorn_access_log_exclude_prefixes": []}),
    ("--disable-radix-cache False", {"disable_radix_cache": False}),
    ("--enable-metrics=TRUE", {"enable_metrics": True}),
    ("--no-skip-tokenizer-init", {"skip_tokenizer_init": False}),
    ("--no-lora-strict-loading", {"lora_strict_loading": False}),
    ("--disable-cuda-graph", {"disable_cuda_graph": True}),
    ("--served-model-name 7", {"served_model_name": "7"}),
    ("--served-model-name 1.50", {"served_model_name": "1.50"}),
    ('--watermark-config {"key":1}', {"watermark_config": '{"key":1}'}),
    ('--preferred-sampling-params {"top_k":1}', {"preferred_sampling_params": {"top_k": 1}}),
    ("--mem-fraction-static .5", {"mem_fraction_static": 0.5}),
    ("--mem-fraction-static=8e-1", {"mem_fraction_static": 0.8}),
    ("--max-running-requests 04", {"max_running_requests": 4}),
    ("--data-parallel-size 2 --expert-parallel-size=04 --pp 3", {"dp_size": 2, "ep_size": 4, "pp_size": 3}),
    ("--pipeline-parallel-size 2 --ep 2 --dp 5 --dp-size 2", {"pp_size": 2, "ep_size": 2, "dp_size": 2}),
    ("--context-length 1k", {"context_length": 1000}),
    ("--max-total-tokens 1.5k", {"max_total_tokens": 1500}),
    ("--max-total-tokens 4Ki", {"max_total_tokens": 4096}),
    ("--model-checksum", {"model_checksum": ""}),
    ("--quantization-param-path None", {"quantization_param_path": None}),
]
#: Options that SGLang's parser refuses, and its words.
REFUSED_LINES = [
    ("--enable-metrics no", "enable_metrics must be one of True, False, got 'no'"),
    ("--context-length 4K", "argument --context-length: Invalid integer value: '4K'"),
    ("--dp-size two", "--data-parallel-size: invalid int value: 'two'"),
    ("--mem-fraction-static half", "argument --mem-fraction-static: invalid float value: 'half'"),
    ("--preferred-sampling-params {", "argument --preferred-sampling-params: invalid loads value: '{'"),
    ("--dtype", "argument --dtype: expected one argument"),
    ('--lora-paths {"a":"/x"}', "looks like a JSON str, but it does not contain 'lora_name' and 'lora_path' keys"),
    ("--dtype auto half", "dtype takes one value, got a list of 2"),
    ("--random-seed 1 2", "random_seed takes one value, got a list of 2"),
    ("--dtype bf16", "dtype must be one of auto, half, float16, bfloat16, float, float32, got 'bf16'"),
    ("--cuda-graph-bs-decode", "argument --cuda-graph-bs-decode: expected at least one argument"),
    ("--kv-cache-dtype fp8", "; did you mean 'fp8_e4m3' or 'fp8_e5m2'?"),
    ("--log-requests-level 9", "log_requests_level must be one of 0, 1, 2, 3, got 9"),
    ("--fp8-gemm-backend auto", "has no argument 'fp8_gemm_backend'; did you mean 'fp8_gemm_runner_backend'?"),
    ("--mem-fraction 0.5", "has no argument 'mem_fraction'; did you mean 'mem_fraction_static'?"),
    ("--watermark 1", "has no argument 'watermark'"),
]


def test_the_server_reads_the_command_line_as_sglang_does(sglang_process: Ranks) -> None:
    """Each option of SGLang sets the same field to the same value, of the same type, as SGLang's own parser does."""
    lines = [line for line, _ in (*LINES, *REFUSED_LINES)]
    ((differences, compared, results),) = sglang_process.run(_compare_options, lines)
    assert differences == []
    assert compared > 500
    for (line, fields), (values, refusal) in zip(LINES, results, strict=False):
        assert (values, refusal) == ({"model_path": "Org/Model", **fields}, None), line
    for (line, expected), (_, refusal) in zip(REFUSED_LINES, results[len(LINES) :], strict=True):
        assert expected in refusal, line


def _compare_options(rank: int, world: int, lines: list[str]) -> tuple[list[str], int, list[Any]]:
    """Options that are read differently, the number of compared options, and what `lines` are read as."""
    import argparse
    import inspect

    from sglang.srt.server_args import ServerArgs

    from verl_server.cli.arguments import KEY_ARGUMENTS, RENAMED_ARGUMENTS, read_server_args
    from verl_server.config import EngineKind
    from verl_server.server.server_main import parse_arguments

    def read(line: list[str]) -> tuple[dict[str, Any], str | None]:
        return parse_arguments(json.loads(json.dumps(read_server_args(EngineKind.SGLANG, ["Org/Model", *line]))))

    parser = argparse.ArgumentParser(add_help=False)
    ServerArgs.add_cli_args(parser)
    fields = set(inspect.signature(ServerArgs).parameters)
    expected, given = {}, []
    for action in parser._actions:
        option = f"--{action.dest.replace('_', '-')}"
        is_ours = action.dest in {*KEY_ARGUMENTS, *RENAMED_ARGUMENTS}
        if is_ours or action.dest not in fields or option not in action.option_strings:  # plugins add other options
            continue
        line = [option, *_example_of(action)]
        expected[action.dest] = getattr(parser.parse_args(["--model-path", "Org/Model", *line]), action.dest)
        given += line
    del expected["quantization_param_path"]  # a file whose name is a number stays a number
    values, refusal = read(given)
    differences = [] if refusal is None else [refusal]
    for name, wanted in expected.items():
        value = values.get(name)
        # SGLang's fields take a whole number for any number.
        if value != wanted or (type(value) is not type(wanted) and type(wanted) is not float):
            differences.append(f"{name}: {value!r} instead of {wanted!r}")
    return differences, len(expected), [read(line.split()) for line in lines]


def _example_of(action: Any) -> list[str]:
    """A value that SGLang accepts for an option. Empty for an option without a value."""
    if action.nargs == 0:
        return []
    if action.choices:
        return [str(min(action.choices))]
    converter = getattr(action.type, "__name__", "str")
    examples = {"float": ".5", "human_readable_int": "4Ki", "loads": '{"a": 1}', "json_list_type": "[1]"}
    return [{**examples, "parse_cuda_graph_config_arg": '{"decode": {}}'}.get(converter, "7")]


#: Fields of requests with two prompts.
BATCHES: list[dict[str, Any]] = [
    {"image_data": ["x", "y"], "modalities": ["image"]},
    {"image_data": [None, ["x", "y"]], "modalities": ["video", "video"]},
    {"image_data": [], "video_data": [], "modalities": ["image", "video"]},
    {"audio_data": ["a", "b"], "modalities": []},
    {"image_data": "x", "video_data": ["v", None], "audio_data": "a"},
    {"image_data": ["x", "y"], "mm_hashes": ["1", "2"], "mm_content_hashes": ["3", "4"]},
    {"extra_key": [None, "x"], "cache_salt": ["", "y"], "return_hidden_states": [None, True]},
    {"extra_key": "x", "lora_path": [None, "p"], "sampling_params": [None, {"top_k": 3}]},
    {"token_ids_logprob": [None, [3]], "top_logprobs_num": [None, 2], "logprob_start_len": 0},
    {"token_ids_logprob": [3, 4], "return_logprob": [True, None]},
]


def test_requests_with_several_prompts_are_divided_as_sglang_divides_them(sglang_process: Ranks) -> None:
    """SGLang accepts a request with several prompts. A router divides it into the requests that SGLang makes of it."""
    (differences,) = sglang_process.run(_divide, BATCHES)
    assert differences == []


def _divide(rank: int, world: int, batches: list[dict[str, Any]]) -> list[str]:
    """Fields of divided requests that differ from those of SGLang."""
    from pydantic import TypeAdapter
    from sglang.srt.managers.io_struct import GenerateReqInput

    from verl_server.adapter.sglang.requests import PromptLimits, generate_payload, split_batch

    parse = TypeAdapter(GenerateReqInput).validate_python  # as SGLang's HTTP server does

    def normalize(request: Mapping[str, Any]) -> Any:
        parsed = parse(generate_payload(PromptLimits(), request))
        parsed.normalize_batch_and_arguments()
        return parsed

    differences = []
    for batch in batches:
        request = {"input_ids": [[1], [2, 3]], **batch}
        whole = normalize(request)
        for index, one in enumerate(split_batch(request) or ()):
            alone = normalize(one)
            assert alone.is_single
            for name in ("input_ids", "modalities", *batch):
                ours, theirs = (getattr(item, name) or None for item in (alone, whole[index]))
                if name in ("modalities", "image_data", "video_data", "audio_data"):  # a value or a list with it
                    ours, theirs = ([value] if isinstance(value, str) else value for value in (ours, theirs))
                if ours != theirs:
                    differences.append(f"{name} of prompt {index} of {batch}: {ours!r} instead of {theirs!r}")
    return differences


def test_every_way_to_change_weights_empties_the_caches(sglang_process: Ranks) -> None:
    """Otherwise an update with flush_cache=False would leave prefixes of the earlier weights in use."""
    (missing,) = sglang_process.run(_updates_without_namespace)
    assert missing == set()


def _updates_without_namespace(rank: int, world: int) -> set[str]:
    """Methods of SGLang's scheduler that change weights, and have no hook."""
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

    from verl_server.platforms import scheduler_hooks

    hooks = scheduler_hooks.hooks().items()
    hooked = {path.rpartition(".")[2] for path, hook in hooks if hook is scheduler_hooks.forget_weights}
    changes = ("update_weights_from_", "end_weight_update")
    return {name for name in dir(SchedulerWeightUpdaterManager) if name.startswith(changes)} - hooked


def test_no_tensor_that_a_module_keeps_outlives_the_weights(sglang_process: Ranks) -> None:
    """Vision towers of Kimi-VL and PaddleOCR-VL keep position embeddings, interpolated for each size of images."""
    (gaps,) = sglang_process.run(_gaps_of_kept_embeddings)
    assert gaps == pytest.approx({"kimi_vl": 0.0, "paddleocr_vl": 0.0}, abs=1e-5)


def _gaps_of_kept_embeddings(rank: int, world: int) -> dict[str, float]:
    """Largest difference of what each module computes after a change of its weights to what a fresh one computes."""
    from sglang.srt.models.kimi_vl_moonvit import Learnable2DInterpPosEmb
    from sglang.srt.models.paddleocr_vl import SiglipVisionEmbeddings
    from transformers import SiglipVisionConfig

    from verl_server.platforms import scheduler_hooks

    grid = torch.tensor([[2, 3]])
    paddle = SiglipVisionEmbeddings(SiglipVisionConfig(hidden_size=8, image_size=56, patch_size=14))
    kimi, pixels = Learnable2DInterpPosEmb(4, 4, 8).eval(), torch.ones(40, 3, 14, 14)
    calls: dict[str, Callable[[], Any]] = {
        "kimi_vl": lambda: kimi(torch.zeros(6, 8), grid),
        "paddleocr_vl": lambda: paddle(pixels[None, :6], [(1, 2, 3)]),
    }
    with torch.no_grad():
        scheduler_hooks.watch_modules(torch.nn.ModuleList([kimi, paddle]))
        before = {name: call() for name, call in calls.items()}
        for parameter in (*kimi.parameters(), *paddle.parameters()):
            parameter.mul_(3.0)
        scheduler_hooks.forget_weights()
        after = {name: call() for name, call in calls.items()}
        for number in range(30):  # more sizes than the second one keeps
            paddle(pixels[None, : 6 + number], [(1, 1, 6 + number)])
    return {name: float((after[name] - 3.0 * before[name]).abs().max()) for name in calls}


def test_in_process_engine_behaves_as_a_server(sglang_process: Ranks, tiny: Callable[..., Path]) -> None:
    (tokens,) = sglang_process.run(_in_process, str(tiny("qwen3")))
    first, second, third = tokens
    assert first == third != second


def _in_process(rank: int, world: int, folder: str) -> list[Any]:
    model = reference_model(folder)
    old = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with (
        no_new_shared_memory(),
        VerlEngine(
            mesh_of(world), launch_server=False, model_path=folder, dtype="float32", max_total_tokens=8192
        ) as engine,
    ):
        first = assert_equals_reference(engine, model)
        change_weights(model, seed=1)
        engine.update_weights_from_tensor(model.state_dict().items())
        second = assert_equals_reference(engine, model)
        assert raised(lambda: engine.generate(input_ids=[9999]))[0] == "BadInputError"
        mistakes: list[tuple[dict[str, Any], str]] = [
            ({"return_logprobs": True}, "return_logprob"),
            ({"sampling_params": {"max_tokens": 4}}, "max_new_tokens"),
        ]
        for fields, similar in mistakes:
            kind, message = raised(functools.partial(engine.generate, input_ids=[1], **fields))
            assert (kind, f"did you mean '{similar}'" in message) == ("BadInputError", True), message
        engine.release_memory_occupation()
        assert raised(lambda: engine.generate(input_ids=[1]))[0] == "NotReadyError"
        engine.resume_memory_occupation()
        assert raised(lambda: engine.generate(input_ids=[1]))[0] == "TornWeightsError"
        norm = [("model.norm.weight", torch.ones(64))]
        assert raised(lambda: engine.update_weights_from_tensor(norm))[0] == "TornWeightsError"
        engine.update_weights_from_tensor(old.items())
        reply = asyncio.run(engine.async_generate(input_ids=PROMPTS[0], sampling_params=GREEDY))
        assert reply["meta_info"]["weight_version"] == engine.weight_version == 2
        assert {span["version"] for span in reply["meta_info"]["weight_versions"]} == {2}
        logprobs = engine.generate(input_ids=PROMPTS, sampling_params=GREEDY, return_logprob=True, top_logprobs_num=2)
        assert logprobs == json.loads(json.dumps(logprobs)), "all trainer ranks get the same values"
        third = assert_equals_reference(engine, reference_model(folder))
        assert third[0] == reply["output_ids"]
    return [first, second, third]
