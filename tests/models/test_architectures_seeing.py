"""Test every vision-language architecture of transformers: its images are exact, it is trained on
text only, or it is refused by name. Injected faults are seen.

With WHETSTONE_TABLES, a folder, the test of all architectures writes architectures_seeing.csv there
(about a minute); `python tools/architectures_page.py` then writes docs/architectures.md.
"""

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from seeing import FAMILIES
from test_architectures import make_fake_accelerator, one_thread  # noqa: F401  (a fixture of its own)
from test_images import (
    compute_logprobs,
    compute_plain_logits,
    compute_scores,
    datum,
    make_tiny_model,
    of_logits,
    rows,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from bench.harness import write_table
from rl.errors import UserError
from rl.images import ImageReader, get_image_reader, vision_families
from rl.learner import Learner, LearnerSettings
from rl.models.vision_models import select_auto_class
from rl.renderers import get_renderer
from rl.sampler import Engine, SamplingRequest, make_decoder
from rl.types import ModelInput, SamplingParams

KINDS = {
    "qwen3_vl": vision_families.QwenVisionFamily,
    "gemma3": vision_families.Gemma3Family,
    "smolvlm": vision_families.TiledFamily,
}


NEAR = 1e-4


def measure_images(name: str) -> str:
    """Return "exact" if the logprobs of the learner and of the samples equal the plain model's on a
    single sequence at a time. The batch mixes rows without an image, with a single image and with
    three, of several sizes; the models are the tiny random models of tests/seeing.py.
    """
    loaded, _ = make_tiny_model(name)
    reader = get_image_reader(loaded.model)
    assert reader is not None
    prompts = rows(loaded.tokenizer, reader, get_renderer("chat_template", loaded.tokenizer))
    learner = Learner(loaded, make_fake_accelerator(bf16=False), LearnerSettings())
    expected = [
        of_logits(compute_plain_logits(loaded.model, reader, item), item) for item in prompts
    ]
    pairs = zip(compute_logprobs(learner, [datum(item) for item in prompts]), expected, strict=True)
    off = {"learner": max(float(np.abs(mine - right).max()) for mine, right in pairs)}
    engine = Engine(make_decoder(loaded.model), loaded.eos_token_ids, max_context=1024)
    options = {"num_samples": 2, "params": SamplingParams(max_tokens=9)}
    for i, item in enumerate(prompts):
        images = item.images_with_positions()
        engine.add(SamplingRequest(prompt=item.token_ids(), images=images, problem=i, **options))
    drawn = []
    for item, response in zip(prompts, engine.run(), strict=True):
        for sequence in response.sequences:
            if reader.image_token_id not in sequence.tokens:  # plain model: no image for it
                tokens = [*item.token_ids(), *sequence.tokens]
                whole = ModelInput.of(tokens, item.images_with_positions())
                right = of_logits(compute_plain_logits(loaded.model, reader, whole), whole)
                gap = np.array(sequence.logprobs) - right[-len(sequence.tokens) :]
                drawn.append(float(np.abs(gap).max()))
    off["sampler"] = max(drawn)
    wrong = [f"{side} {by:.2g} nats" for side, by in off.items() if not by <= NEAR]
    return f"WRONG: {', '.join(wrong)}" if wrong else "exact"


def images_of(name: str) -> str:
    """Return the verdict on an architecture."""
    if name in FAMILIES:
        return measure_images(name)
    try:
        select_auto_class(SimpleNamespace(model_type=name, vision_config=None))
    except UserError as error:
        return f"refused: {error}"
    return "text alone"


@pytest.mark.campaign
def test_every_architecture_that_sees_is_exact_or_refused():
    """A model that is trained on text alone has a row in architectures.csv."""
    rows = [
        {"architecture": name, "images": images_of(name)}
        for name in sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    ]
    if folder := os.environ.get("WHETSTONE_TABLES"):
        write_table(Path(folder) / "architectures_seeing.csv", rows)
    assert not [row for row in rows if row["images"].startswith("WRONG")]


@pytest.mark.parametrize("name", KINDS)
def test_two_images_that_are_swapped_turn_a_row_red(name, monkeypatch):
    """Only the pixels are swapped; tokens, grids and positions stay the same."""
    assert measure_images(name) == "exact"
    pixels, swaps = KINDS[name].pixels, []

    def faulty(self, images):
        if len(images) < 2:
            return pixels(self, images)
        swaps.append(len(images))
        return pixels(self, images) | {"pixel_values": pixels(self, images[::-1])["pixel_values"]}

    monkeypatch.setattr(KINDS[name], "pixels", faulty)
    text = measure_images(name)
    assert swaps and text.startswith("WRONG") and "learner" in text and "sampler" in text


def test_one_wrong_position_of_an_image_turns_a_row_red(monkeypatch):
    positions = vision_families.QwenVisionFamily.positions

    def faulty(self, model, row, types, images):
        result = positions(self, model, row, types, images).clone()
        result[1, int(types.argmax())] += 1  # the height coordinate of an image's first token
        return result

    monkeypatch.setattr(vision_families.QwenVisionFamily, "positions", faulty)
    text = measure_images("qwen3_vl")
    assert text.startswith("WRONG") and "learner" in text and "sampler" in text


def test_an_image_that_stands_for_another_turns_a_row_red(monkeypatch):
    """Inject an image reader that caches images by size only."""
    read, kept = ImageReader.process, {}

    def faulty(self, chunk):
        result = read(self, chunk)
        return kept.setdefault(result.count, result)

    assert measure_images("gemma3") == "exact"  # all of its images have the same size
    monkeypatch.setattr(ImageReader, "process", faulty)
    assert measure_images("gemma3").startswith("WRONG")


@pytest.mark.parametrize("name", KINDS)
def test_in_bf16_rows_with_images_are_no_further_off_than_the_model_alone(name):
    """Learner and sampler on a batch of mixed rows, compared with float32 by root mean square. The
    reference is the error of the plain model under autocast.
    """
    loaded, _ = make_tiny_model(name)
    reader = get_image_reader(loaded.model)
    prompts = rows(loaded.tokenizer, reader, get_renderer("chat_template", loaded.tokenizer))

    def by_itself():
        return np.concatenate(
            [of_logits(compute_plain_logits(loaded.model, reader, item), item) for item in prompts]
        )

    exact = by_itself()
    with torch.autocast("cpu", torch.bfloat16):
        rounded = by_itself()
    spread = float(np.sqrt(np.mean((rounded - exact) ** 2)))
    assert spread > 1e-3
    decoder = make_decoder(loaded.model, dtype=torch.bfloat16)
    sampler = np.concatenate(compute_scores(decoder, prompts))
    learner = Learner(loaded, make_fake_accelerator(bf16=True), LearnerSettings())
    logprobs = np.concatenate(compute_logprobs(learner, [datum(item) for item in prompts]))
    for result in (logprobs, sampler):
        assert float(np.sqrt(np.mean((result - exact) ** 2))) < 2 * spread
