"""Check every vision-language architecture of transformers: its images are exact, it is trained on
text only, or it is refused by name.

    # into results/architectures_seeing.csv and docs/architectures.md; a minute
    python bench/architectures_seeing.py

The column `images` holds a verdict:
    "exact"        the logprobs of the learner and of the samples equal the plain model's on a
                   single sequence at a time (1e-4 nats). The batch mixes rows without an image,
                   with a single image and with three, of several sizes; the models are the tiny
                   random models of tests/seeing.py.
    "text alone"   the text part has a row in architectures.csv; an image is refused by name.
    "refused: why"
The exit code is 1 if a row contains WRONG.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

sys.path[0] = str(Path(__file__).resolve().parent.parent)
sys.path += [f"{sys.path[0]}/tests", f"{sys.path[0]}/tests/models"]
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from seeing import FAMILIES, compute_plain_logits, make_tiny_model  # noqa: E402
from test_images import compute_logprobs, datum, of_logits, rows  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES  # noqa: E402

from bench.harness import make_parser, write_table  # noqa: E402
from rl.distributed import make_accelerator  # noqa: E402
from rl.errors import UserError  # noqa: E402
from rl.images import get_image_reader  # noqa: E402
from rl.learner import Learner, LearnerSettings  # noqa: E402
from rl.models.vision_models import select_auto_class  # noqa: E402
from rl.renderers import get_renderer  # noqa: E402
from rl.sampler import Engine, SamplingRequest, make_decoder  # noqa: E402
from rl.types import ModelInput, SamplingParams  # noqa: E402
from tools.architectures_page import SEEING  # noqa: E402
from tools.architectures_page import main as write_page  # noqa: E402

NEAR = 1e-4


def measure_images(name: str) -> str:
    loaded, _ = make_tiny_model(name)
    reader = get_image_reader(loaded.model)
    assert reader is not None
    prompts = rows(loaded.tokenizer, reader, get_renderer("chat_template", loaded.tokenizer))
    learner = Learner(loaded, make_accelerator(bf16=False), LearnerSettings())
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
    if name in FAMILIES:
        return measure_images(name)
    try:
        select_auto_class(SimpleNamespace(model_type=name, vision_config=None))
    except UserError as error:
        return f"refused: {error}"
    return "text alone"


def main() -> None:
    make_parser(__doc__).parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    results = {name: images_of(name) for name in sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)}
    write_table(SEEING, [{"architecture": name, "images": text} for name, text in results.items()])
    for name, text in results.items():
        print(f"{name:24} {text[:100]}")
    write_page()
    sys.exit(any(text.startswith("WRONG") for text in results.values()))


if __name__ == "__main__":
    main()
