"""Test bench/architectures_seeing.py on an architecture of each vision family, and that it reports
injected faults.
"""

import numpy as np
import pytest
import torch
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

from bench import architectures_seeing as table
from rl.images import ImageReader, get_image_reader, vision_families
from rl.learner import Learner, LearnerSettings
from rl.renderers import get_renderer
from rl.sampler import make_decoder

KINDS = {
    "qwen3_vl": vision_families.QwenVisionFamily,
    "gemma3": vision_families.Gemma3Family,
    "smolvlm": vision_families.TiledFamily,
}


@pytest.mark.parametrize("name", KINDS)
def test_two_images_that_are_swapped_turn_a_row_red(name, monkeypatch):
    """Only the pixels are swapped; tokens, grids and positions stay the same."""
    assert table.measure_images(name) == "exact"
    pixels, swaps = KINDS[name].pixels, []

    def faulty(self, images):
        if len(images) < 2:
            return pixels(self, images)
        swaps.append(len(images))
        return pixels(self, images) | {"pixel_values": pixels(self, images[::-1])["pixel_values"]}

    monkeypatch.setattr(KINDS[name], "pixels", faulty)
    text = table.measure_images(name)
    assert swaps and text.startswith("WRONG") and "learner" in text and "sampler" in text


def test_one_wrong_position_of_an_image_turns_a_row_red(monkeypatch):
    positions = vision_families.QwenVisionFamily.positions

    def faulty(self, model, row, types, images):
        result = positions(self, model, row, types, images).clone()
        result[1, int(types.argmax())] += 1  # the height coordinate of an image's first token
        return result

    monkeypatch.setattr(vision_families.QwenVisionFamily, "positions", faulty)
    text = table.measure_images("qwen3_vl")
    assert text.startswith("WRONG") and "learner" in text and "sampler" in text


def test_an_image_that_stands_for_another_turns_a_row_red(monkeypatch):
    """Inject an image reader that caches images by size only."""
    read, kept = ImageReader.process, {}

    def faulty(self, chunk):
        result = read(self, chunk)
        return kept.setdefault(result.count, result)

    assert table.measure_images("gemma3") == "exact"  # all of its images have the same size
    monkeypatch.setattr(ImageReader, "process", faulty)
    assert table.measure_images("gemma3").startswith("WRONG")


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
