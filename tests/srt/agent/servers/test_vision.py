"""Images in episodes: a tiny Qwen-VL model of each family on a real server, and the batch of its trainer."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import itertools
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from agent_helpers import ScriptedGenerateFn
from both_engines import engine_settings, in_background, load_of
from helpers import adapter_of, change_weights, wait_until
from PIL import Image
from torch.distributed.device_mesh import DeviceMesh
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from vision_models import VISION_CHAT_TEMPLATE, VISION_TOKENS, make_vision_model
from vllm_helpers import needs_vllm

from verl_server import BadInputError, UnsupportedError, VerlEngine
from verl_server.agent import AgentLoop, Episode, EpisodeStopped, RolloutLimits, RolloutRunner, Task, as_generate_fn
from verl_server.tiny import SPECIAL_TOKENS, make_config, make_tokenizer
from verl_server.trajectory import (
    ChatRenderer,
    Recorder,
    Span,
    TrajectoryGraph,
    VisionInputs,
    VisionRenderer,
    get_renderer,
    image_data_url,
    load_session,
    to_batch,
    to_packed,
    to_tree,
)

pytestmark = pytest.mark.timeout(300)

PAD_TOKEN, IMAGE_TOKEN = 256, 261
PLACEHOLDERS = range(259, 263)
GREEDY = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True}


def picture(width: int, height: int, step: int) -> Image.Image:
    """A colored picture. Another `step` is another picture."""
    image = Image.new("RGB", (width, height))
    image.putdata([(x * step % 256, y * step % 256, x * y % 256) for y in range(height) for x in range(width)])
    return image


def look(image: str, text: str = "what?") -> list[dict[str, Any]]:
    """A message with an image."""
    return [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": text}]}]


FIRST = look(image_data_url(picture(120, 80, 2)))


class VisionModel:
    """A tiny model of one family, with its processor."""

    def __init__(self, folder: Path, family: str) -> None:
        self.folder = make_vision_model(folder, family, weight_std=0.15)
        self.processor = AutoProcessor.from_pretrained(self.folder)
        self.renderer = get_renderer(self.processor)
        self.reference = AutoModelForImageTextToText.from_pretrained(self.folder).eval()
        self.inputs = VisionInputs(self.processor, self.reference)


class Served(VisionModel):
    """A tiny model with a server."""

    def __init__(self, folder: Path, family: str, mesh: DeviceMesh) -> None:
        super().__init__(folder, family)
        self.engine = VerlEngine(mesh, model_path=str(self.folder), dtype="float32", max_total_tokens=8192)
        self.server = adapter_of(self.engine)
        self.prompts: list[list[int]] = []
        """The prompts that the server has read, as it reports them."""

    async def generate(self, *, rid: str, session_id: str, **request: Any) -> Any:
        reply = await as_generate_fn(self.server.asynchronous)(rid=rid, session_id=session_id, **request)
        self.prompts.append(reply["prompt_token_ids"])
        return reply

    def episode(
        self,
        record: Recorder | TrajectoryGraph,
        renderer: ChatRenderer | None = None,
        params: dict[str, Any] = GREEDY,
    ) -> Episode:
        task = Task("t", FIRST)
        return Episode(task, record, self.generate, renderer or self.renderer, RolloutLimits(500), params)


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def served(
    request: pytest.FixtureRequest, one_rank: DeviceMesh, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    model = Served(tmp_path_factory.mktemp("vision"), request.param, one_rank)
    yield model
    model.engine.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> VisionModel:
    """A model without a server."""
    return VisionModel(tmp_path_factory.mktemp("vision"), "qwen2_5_vl")


def forward(model: Any, batch: Any, row: int, banned: Iterable[int] = (), **images: torch.Tensor) -> torch.Tensor:
    """Log probabilities of the responses of one row, computed by Hugging Face from the batch.

    `banned`: tokens that have a `logit_bias` of -100.
    """
    with torch.no_grad():
        logits: torch.Tensor = model(
            input_ids=batch["input_ids"][row : row + 1],
            attention_mask=batch["attention_mask"][row : row + 1],
            position_ids=batch["position_ids"][row : row + 1].transpose(0, 1),
            **images,
        ).logits[0]
    logits[:, list(banned)] -= 100.0
    responses: torch.Tensor = batch["responses"][row]
    mask: torch.Tensor = batch["response_mask"][row]
    return logits[-len(responses) - 1 : -1].log_softmax(-1).gather(-1, responses[:, None])[:, 0] * mask


def test_an_episode_with_images_is_exact(served: Served, tmp_path: Path) -> None:
    """The recorded tokens are the server's prompts, and Hugging Face computes the log probabilities from the batch."""
    picture(60, 150, 5).save(tmp_path / "b.png")
    graphs = [TrajectoryGraph("images"), TrajectoryGraph("text")]
    served.prompts.clear()

    async def run() -> list[int | None]:
        episode = served.episode(graphs[0])
        await episode.generate()
        await episode.generate([{"role": "user", "content": "and now?"}])
        await episode.generate(look(str(tmp_path / "b.png"), "<|im_end|> <|vision_end|>"))
        other = Episode(
            Task("text", [{"role": "user", "content": "hello"}]), graphs[1], as_generate_fn(served.server.asynchronous),
            served.renderer, RolloutLimits(500), {"max_new_tokens": 3, "temperature": 0.0},
        )  # fmt: skip
        await other.generate()
        return [episode.leaf, other.leaf]

    leaf, other = asyncio.run(run())
    assert leaf is not None
    assert other is not None
    turns = [node for node in graphs[0].nodes if node.sampled]
    assert served.prompts == [graphs[0].token_ids(node.parent) for node in turns if node.parent is not None]
    assert len(turns) == 3
    batch = to_batch([(graphs[0], leaf), (graphs[1], other)], PAD_TOKEN, vision=served.inputs)
    images, none = batch["multi_modal_inputs"]
    assert none == {}
    assert images["image_grid_thw"].shape == (2, 3)
    assert int(images["image_grid_thw"].prod(-1).sum()) == len(images["pixel_values"])
    assert 4 * graphs[0].token_ids(leaf).count(IMAGE_TOKEN) == len(images["pixel_values"])
    for row, inputs in enumerate((images, none)):
        gaps = forward(served.reference, batch, row, **inputs) - batch["rollout_log_probs"][row]
        assert gaps.abs().max() < 1e-4
    without = forward(served.reference, batch, 0, **(images | {"pixel_values": 0 * images["pixel_values"]}))
    assert (without - batch["rollout_log_probs"][0]).abs().max() > 1e-2


def gap(served: Served, num_versions: int = 1, **params: Any) -> float:
    """Largest difference of log probabilities between the server and Hugging Face, for one turn about the image.

    The turn has tokens of `num_versions` weights. Those of the present weights count.
    """
    graph = TrajectoryGraph("gap")
    bias = {str(token): -100.0 for token in PLACEHOLDERS}  # a turn that has sampled one fails
    episode = served.episode(graph, params=GREEDY | params | {"logit_bias": bias})
    asyncio.run(episode.generate())
    assert episode.leaf is not None
    batch = to_batch([(graph, episode.leaf)], PAD_TOKEN, vision=served.inputs)
    (images,) = batch["multi_modal_inputs"]
    gaps = forward(served.reference, batch, 0, PLACEHOLDERS, **images) - batch["rollout_log_probs"][0]
    spans = graph.nodes[-1].spans
    assert len(spans) == num_versions
    assert spans[-1].version == served.engine.weight_version
    return float(gaps[spans[-1].start :].abs().max())


def push_tower(served: Served, seed: int, **options: Any) -> None:
    """Train the vision tower, and push it alone."""
    change_weights(served.reference.model.visual, seed=seed, scale=0.03)
    tower = {name: tensor for name, tensor in served.reference.state_dict().items() if ".visual." in name}
    served.engine.update_weights_from_tensor(tower.items(), **options)


def test_no_embedding_of_an_image_outlives_the_weights(served: Served, tmp_path: Path) -> None:
    """The same image again, after the vision tower has been trained."""
    engine, model = served.engine, served.reference
    original = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gaps = {"before": gap(served)}
    change_weights(model, seed=1)
    engine.update_weights_from_tensor(model.state_dict().items())
    gaps["all tensors"] = gap(served)
    push_tower(served, seed=2)
    gaps["the tower alone"] = gap(served)
    engine.flush_cache()
    gaps["flush"] = gap(served)
    push_tower(served, seed=3, pause_mode="in_place", flush_cache=False)
    gaps["in place"] = gap(served)
    change_weights(model.model.visual, seed=4, scale=0.03)
    engine.release_memory_occupation(tags=["kv_cache", "weights"])
    engine.resume_memory_occupation(tags=["weights"])
    engine.update_weights_from_tensor(model.state_dict().items())
    engine.resume_memory_occupation(tags=["kv_cache"])
    gaps["release and resume"] = gap(served)
    running, results = in_background(lambda: gap(served, num_versions=2, max_new_tokens=150))
    wait_until(lambda: load_of(served.server)[0] == 1, 20.0, "the request does not run")
    push_tower(served, seed=5)  # the request is computed again
    running.join(60.0)
    assert isinstance(results[0], float), results[0]
    gaps["a running request"] = results[0]
    change_weights(model.model.visual, seed=6, scale=0.03)
    model.save_pretrained(tmp_path)
    served.server.update_weights_from_disk(str(tmp_path), weight_version=engine.weight_version)
    gaps["from disk"] = gap(served)
    model.load_state_dict(original)
    engine.update_weights_from_tensor(original.items())
    gaps["restored"] = gap(served)
    assert max(gaps.values()) < 1e-5, gaps


def make_idefics3(folder: Path) -> tuple[Any, Any]:
    """A tiny model whose images vLLM reads without torchvision, and its image processor."""
    tokenizer = make_tokenizer(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<global-img>"]})
    template = (
        "{% for message in messages %}{% for part in message['content'] %}"
        "{{ part['text'] if part['type'] == 'text' else '<image>' }}{% endfor %}{% endfor %}"
    )
    size = {"longest_edge": 32}
    images = Idefics3ImageProcessorPil(size=size, max_image_size=size, do_image_splitting=False)
    processor = Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=template)
    text = make_config("llama", heads=2, kv_heads=1, vocab_size=len(tokenizer))
    vision = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Idefics3Config(
        text_config=text.to_dict(),
        vision_config={**vision, "image_size": 32, "patch_size": 8},
        image_token_id=processor.image_token_id,
        pad_token_id=PAD_TOKEN,
    )
    model = Idefics3ForConditionalGeneration(config).float().eval()
    change_weights(model, seed=0, scale=0.15)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return model, images


@needs_vllm
def test_no_output_of_an_encoder_outlives_the_weights_in_vllm(one_rank: DeviceMesh, tmp_path: Path) -> None:
    """The same image again by vLLM's own route, after the vision tower has been pushed. A vLLM server takes 15 s."""
    model, images = make_idefics3(tmp_path)
    image = picture(32, 32, 7)
    settings = {**engine_settings("vllm"), "context_length": 2048}
    engine = VerlEngine(one_rank, model_path=str(tmp_path), **settings)
    try:
        server = adapter_of(engine)

        image_token = model.config.image_token_id  # is never generated: the reference would lack a second image

        def ask(max_tokens: int, **options: Any) -> requests.Response:
            body = {
                "model": str(tmp_path),
                "messages": [{
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": image_data_url(image)}},
                        {"type": "text", "text": "what?"},
                    ],
                }],
                "temperature": 0.0,
                "max_tokens": max_tokens,
                "ignore_eos": True,
                "logit_bias": {str(image_token): -100},
                "logprobs": True,
                "return_token_ids": True,
                **options,
            }  # fmt: skip
            headers = {"Authorization": f"Bearer {server.api_key}"}
            url, stream = f"{server.base_url}/v1/chat/completions", "stream" in options
            reply = requests.post(url, json=body, headers=headers, timeout=60.0, stream=stream)
            assert reply.ok, reply.text
            return reply

        def gap() -> float:
            reply = ask(4).json()
            (choice,) = reply["choices"]
            prompt, tokens = reply["prompt_token_ids"], choice["token_ids"]
            with torch.no_grad():
                logits = model(
                    input_ids=torch.tensor([prompt + tokens]), **images([[image]], return_tensors="pt")
                ).logits
            logits[:, :, image_token] -= 100
            expected = logits[0, len(prompt) - 1 : -1].log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
            served = torch.tensor([token["logprob"] for token in choice["logprobs"]["content"]])
            return float((served - expected).abs().max())

        def push(seed: int, **options: Any) -> None:
            change_weights(model.model.vision_model, seed=seed)
            tower = {name: tensor for name, tensor in model.state_dict().items() if ".vision_model." in name}
            engine.update_weights_from_tensor(tower.items(), **options)

        gaps = {"before": gap()}
        push(1)
        gaps["default"] = gap()
        push(2, pause_mode="in_place", flush_cache=False)
        gaps["in place"] = gap()
        events = ask(300, stream=True).iter_lines()
        first = next(events)
        push(3, pause_mode="in_place", flush_cache=False)
        gaps["beside a running request"] = gap()
        lines = [first, *filter(None, events)]
        assert (b'"length"' in lines[-2], lines[-1]) == (True, b"data: [DONE]"), lines[-2:]
        server.pause_generation("in_place")
        push(4)
        server.continue_generation()
        gaps["during a pause in place"] = gap()
        assert max(gaps.values()) < 1e-5, gaps
    finally:
        engine.shutdown()


def test_packed_paths_have_the_inputs_of_the_batch(model: VisionModel) -> None:
    graphs = [TrajectoryGraph("a"), TrajectoryGraph("b"), TrajectoryGraph("c")]
    images = [image_data_url(picture(120, 80, 2)), image_data_url(picture(60, 60, 3))]
    for graph, messages in zip(
        graphs, [look(images[0]), look(images[1]), [{"role": "user", "content": "x"}]], strict=True
    ):
        add_turn(graph, model.renderer.render_prompt(messages), messages)
    paths = [(graph, 1) for graph in graphs]
    batch, packed = to_batch(paths, PAD_TOKEN, vision=model.inputs), to_packed(paths, vision=model.inputs)
    rows = [batch["position_ids"][row][:, batch["attention_mask"][row].bool()] for row in range(3)]
    assert torch.equal(packed["position_ids"][1:], torch.cat(rows, dim=1))
    starts = packed["cu_seqlens"].tolist()
    counts = [torch.arange(end - start) for start, end in itertools.pairwise(starts)]
    assert torch.equal(packed["position_ids"][0], torch.cat(counts))
    for name in ("pixel_values", "image_grid_thw"):
        found = [inputs[name] for inputs in batch["multi_modal_inputs"] if inputs]
        assert torch.equal(packed[name], torch.cat(found))
    text_only = to_packed(paths[2:], vision=model.inputs)
    assert "pixel_values" not in text_only
    assert torch.equal(text_only["position_ids"], torch.arange(text_only["input_ids"].numel()).expand(4, -1))


def add_turn(graph: TrajectoryGraph, token_ids: list[int], messages: list[dict[str, Any]]) -> None:
    """Record a prompt and a turn of two tokens."""
    graph.add_node(None, token_ids, sampled=False, message={"messages": messages})
    graph.add_node(0, [5, 6], sampled=True, logprobs=[-1.0, -1.0], spans=[Span(1, 0, 2)])


def test_a_session_with_images_is_resumed(served: Served, tmp_path: Path) -> None:
    """A second episode replays the recorded turn, and sends the images of both prompts with the next one."""
    later = look(image_data_url(picture(64, 64, 7)))
    with Recorder(tmp_path, "s") as record:
        asyncio.run(served.episode(record).generate())
    served.prompts.clear()

    async def run(episode: Episode) -> None:
        await episode.generate()
        await episode.generate(later)

    with Recorder(tmp_path, "s") as record:
        asyncio.run(run(served.episode(record)))
    graph = load_session(tmp_path / "s.jsonl")
    assert served.prompts == [graph.token_ids(2)]
    assert graph.images(3) == [FIRST[0]["content"][0]["image"], later[0]["content"][0]["image"]]


class Looking(AgentLoop):
    async def run(self, episode: Episode) -> None:
        await episode.generate()


def test_a_runner_takes_the_processor_of_its_engine(served: Served) -> None:
    """Two samples of one image, as one step of a training run."""

    async def run() -> Any:
        runner = RolloutRunner(
            Looking(), served.server, n=2, limits=RolloutLimits(16), reward=lambda _: 1.0, max_staleness=0,
            sampling_params={"max_new_tokens": 4, "temperature": 0.0},
        )  # fmt: skip
        async for step in runner.steps([Task("t", FIRST)], num_groups=1):
            return step
        raise AssertionError

    step = asyncio.run(run())
    assert [sample.error for sample in step.samples] == [None, None]
    batch = step.batch(vision=served.inputs)
    first, second = batch["multi_modal_inputs"]
    assert torch.equal(first["pixel_values"], second["pixel_values"])
    gaps = forward(served.reference, batch, 1, **second) - batch["rollout_log_probs"][1]
    assert gaps.abs().max() < 1e-4


def test_another_image_processor_than_the_server_has_is_found(served: Served) -> None:
    """The server reads fewer tokens of a large image."""
    processor = AutoProcessor.from_pretrained(served.folder)
    processor.image_processor.size = processor.image_processor.size | {"longest_edge": 2000}
    episode = served.episode(TrajectoryGraph("s"), get_renderer(processor))
    with pytest.raises(BadInputError, match=r"the server has read a prompt of .* pass the processor of the served"):
        asyncio.run(episode.generate())


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("no/such.png", r"the image 'no/such.png' cannot be read: \[Errno 2\]"),
        ("data:image/png;base64,AAAA", "the image 'data:image/png;base64,AAAA' cannot be read: its bytes are no image"),
        ("data:image/png;base64,A!", "the image 'data:image/png;base64,A!' has no valid base64 data"),
        ("https://example.org/a.png", "the image 'https://example.org/a.png' is on another machine.*download"),
        (image_data_url(picture(1, 300, 2)), "the image processor refuses the images .*300, 1"),
    ],
)
def test_a_wrong_image_is_named(model: VisionModel, source: str, expected: str) -> None:
    with pytest.raises(BadInputError, match=expected):
        model.renderer.render_prompt(look(source))


def test_sources_of_one_image_are_the_same_image(model: VisionModel, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    picture(80, 60, 3).save(path)
    url = image_data_url(path)
    sources = [str(path), path.as_uri(), url, url.partition(",")[2], image_data_url(path.read_bytes())]
    prompts = [model.renderer.render_prompt(look(source)) for source in sources]
    assert prompts == [prompts[0]] * len(sources)
    graph = TrajectoryGraph("s")
    messages = [message for source in sources for message in look(source)]
    add_turn(graph, model.renderer.render_prompt(messages), messages)
    inputs = to_packed([(graph, 1)], vision=model.inputs)
    parts = inputs["pixel_values"].chunk(len(sources))
    assert all(torch.equal(part, parts[0]) for part in parts)


def test_images_need_a_processor(model: VisionModel, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(
        tmp_path, special_tokens=SPECIAL_TOKENS + VISION_TOKENS, chat_template=VISION_CHAT_TEMPLATE
    )
    policy = ScriptedGenerateFn(tokenizer, lambda _: "x")

    async def run(renderer: ChatRenderer) -> None:
        await Episode(Task("t", FIRST), TrajectoryGraph("s"), policy, renderer, RolloutLimits(99), {}).generate()

    with pytest.raises(BadInputError, match="needs the processor of the model: pass get_renderer"):
        asyncio.run(run(ChatRenderer(tokenizer)))
    asyncio.run(run(model.renderer))
    with pytest.raises(BadInputError, match="family is for messages without images"):
        get_renderer(model.processor, "qwen3")
    processor = AutoProcessor.from_pretrained(model.folder)
    processor.chat_template = tokenizer.chat_template.replace("<|image_pad|>", "")
    with pytest.raises(UnsupportedError, match="writes 0 placeholders for one image"):
        get_renderer(processor)
    processor.chat_template = tokenizer.chat_template
    processor.tokenizer.chat_template = "the template of the processor is used"
    assert get_renderer(processor).render_prompt(FIRST) == model.renderer.render_prompt(FIRST)


def test_a_sampled_placeholder_fails_the_turn(model: VisionModel) -> None:
    """Also one that the policy has sampled in the last turn: the trainer would look for its image."""
    graph = TrajectoryGraph("s")
    policy = ScriptedGenerateFn(model.processor.tokenizer, lambda _: "a<|image_pad|>")
    episode = Episode(Task("t", FIRST), graph, policy, model.renderer, RolloutLimits(99), {})
    with pytest.raises(BadInputError, match=r"has sampled '<\|image_pad\|>' \(token 261\).*logit_bias.*'261': -100.0"):
        asyncio.run(episode.generate())
    assert [node.sampled for node in graph.nodes] == [False]


@pytest.mark.parametrize("text", ["<|image_pad|>", "<|video_pad|>", "<image>"])
def test_the_text_of_a_placeholder_is_refused(model: VisionModel, text: str) -> None:
    """SGLang would look for its image. In a conversation without images it is ordinary text."""
    policy = ScriptedGenerateFn(model.processor.tokenizer, lambda _: "x")

    async def run(messages: list[dict[str, Any]]) -> None:
        await Episode(
            Task("t", messages), TrajectoryGraph("s"), policy, model.renderer, RolloutLimits(99), {}
        ).generate()

    with pytest.raises(BadInputError, match=f"contains the text {re.escape(repr(text))}, which SGLang"):
        asyncio.run(run(look(FIRST[0]["content"][0]["image"], f"a {text} b")))
    asyncio.run(run([{"role": "user", "content": f"a {text} b"}]))
    assert len(policy.prompts) == 1


def test_a_file_that_is_overwritten_stays_what_the_policy_has_seen(model: VisionModel, tmp_path: Path) -> None:
    """As a screenshot that a tool writes in each turn."""
    policy, file = ScriptedGenerateFn(model.processor.tokenizer, lambda _: "x"), tmp_path / "screen.png"
    images: list[list[str]] = []

    async def generate(*, rid: str, session_id: str, **request: Any) -> Any:
        images.append(request["image_data"])
        return await policy(rid=rid, session_id=session_id, **request)

    picture(56, 56, 1).save(file)
    before = image_data_url(file)

    async def run() -> TrajectoryGraph:
        graph = TrajectoryGraph("s")
        episode = Episode(Task("t", look(str(file))), graph, generate, model.renderer, RolloutLimits(99), {})
        await episode.generate()
        picture(56, 56, 2).save(file)
        await episode.generate(look(str(file)))
        return graph

    graph = asyncio.run(run())
    assert images == [[before], [before, image_data_url(file)]]
    assert graph.images(graph.leaves[0]) == images[1]


def test_images_are_decoded_outside_of_the_event_loop(model: VisionModel, tmp_path: Path) -> None:
    """A large image does not hold other episodes. A pipe and an image that is cut off are refused."""
    policy = ScriptedGenerateFn(model.processor.tokenizer, lambda _: "x")

    def episode(source: str) -> Episode:
        return Episode(Task("t", look(source)), TrajectoryGraph("s"), policy, model.renderer, RolloutLimits(99), {})

    async def run() -> int:
        large = Image.effect_noise((3000, 3000), 50).convert("RGB").resize((3000, 30))
        content = io.BytesIO()
        large.resize((3000, 3000)).save(content, "PNG")
        held = episode(image_data_url(content.getvalue()))
        task = asyncio.create_task(held.generate())
        await asyncio.sleep(0)
        with pytest.raises(BadInputError, match="is generating a turn"):
            held.add_messages(FIRST)
        ticks = 0
        while not task.done():
            ticks += 1
            await asyncio.sleep(0)
        with contextlib.suppress(EpisodeStopped):  # the image has more tokens than the limits allow
            await task
        return ticks

    assert asyncio.run(run()) > 200
    os.mkfifo(tmp_path / "pipe.png")
    for source in (str(tmp_path / "pipe.png"), f"file://{tmp_path}/pipe.png"):
        with pytest.raises(BadInputError, match="is no regular file"):
            asyncio.run(asyncio.wait_for(episode(source).generate(), 20.0))
    cut_off = base64.b64decode(image_data_url(picture(200, 200, 7))[22:])[:-200]
    with pytest.raises(BadInputError, match="cannot be read: image file is truncated"):
        asyncio.run(episode(f"data:image/png;base64,{base64.b64encode(cut_off).decode()}").generate())


def test_the_decoding_of_images_ends_at_the_timeout_of_the_episode(
    model: VisionModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that does not answer: the thread waits, and the episode ends."""
    monkeypatch.setattr("verl_server.agent.user_code.CANCEL_TIMEOUT_S", 0.5)
    picture(50, 50, 1).save(tmp_path / "picture.png")
    policy = ScriptedGenerateFn(model.processor.tokenizer, lambda _: "x")
    released, is_file = threading.Event(), Path.is_file

    def wait_for_the_disk(path: Path) -> bool:
        assert path.name != "picture.png" or released.wait(60)
        return is_file(path)

    async def generate() -> float:
        limits = RolloutLimits(max_response_tokens=50, timeout_s=0.3)
        messages = look(str(tmp_path / "picture.png"))
        episode = Episode(Task("t", messages), TrajectoryGraph("s"), policy, model.renderer, limits, {})
        started = time.monotonic()
        with pytest.raises(EpisodeStopped, match="timeout_s"):
            await episode.generate()
        return time.monotonic() - started

    with monkeypatch.context() as patched:
        patched.setattr(Path, "is_file", wait_for_the_disk)
        try:
            assert asyncio.run(asyncio.wait_for(generate(), 30.0)) < 10.0
        finally:
            released.set()


def test_videos_and_sounds_are_refused(model: VisionModel) -> None:
    for part in ({"type": "video", "video": "a.mp4"}, {"type": "input_audio", "input_audio": {"data": ""}}):
        with pytest.raises(BadInputError, match=r"content part 0: the type .* is not supported; images are"):
            model.renderer.render_prompt([{"role": "user", "content": [part]}])


def test_batches_with_images_need_their_inputs(model: VisionModel, tmp_path: Path) -> None:
    picture(80, 60, 3).save(tmp_path / "a.png")
    messages, graph = look(str(tmp_path / "a.png")), TrajectoryGraph("s")
    add_turn(graph, model.renderer.render_prompt(messages), messages)
    for convert in (lambda: to_batch([(graph, 1)], PAD_TOKEN), lambda: to_packed([(graph, 1)])):
        with pytest.raises(BadInputError, match=r"path 0 has images.*pass vision=VisionInputs\(processor, model\)"):
            convert()
    with pytest.raises(BadInputError, match=r"vision must be an instance of VisionInputs, got .*int"):
        to_batch([(graph, 1)], PAD_TOKEN, vision=3)  # type: ignore[arg-type]
    with pytest.raises(BadInputError, match="to_tree cannot convert a session with images"):
        to_tree(graph)
    with pytest.raises(BadInputError, match="needs the processor of the model, got int"):
        VisionInputs(3, model.reference)
    with pytest.raises(UnsupportedError, match=r"Linear has no get_rope_index\(\)"):
        VisionInputs(model.processor, torch.nn.Linear(1, 1))
    picture(200, 200, 3).save(tmp_path / "a.png")
    with pytest.raises(BadInputError, match="a file has changed since the rollout"):
        to_batch([(graph, 1)], PAD_TOKEN, vision=model.inputs)


def test_a_model_on_the_meta_device_gives_the_same_positions(model: VisionModel) -> None:
    with torch.device("meta"):
        empty = AutoModelForImageTextToText.from_config(model.reference.config)
    graph = TrajectoryGraph("s")
    add_turn(graph, model.renderer.render_prompt(FIRST), FIRST)
    found = [
        to_packed([(graph, 1)], vision=VisionInputs(model.processor, each))["position_ids"][1:]
        for each in (empty, torch.nn.Sequential(model.reference))
    ]
    assert torch.equal(*found)
    assert found[0].max() < found[0].shape[1] - 1
    assert isinstance(model.renderer, VisionRenderer)
