"""Test images end to end: learner and sampler give the same logprobs as the plain model, in any
batch.
"""

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from seeing import (
    FAMILIES,
    chunk,
    compute_plain_logits,
    make_image,
    make_tiny_model,
    permute_pixels,
)

from rl.images import get_image_reader
from rl.learner import Learner, LearnerSettings
from rl.losses import get_loss
from rl.renderers import get_renderer
from rl.sampler import Engine, SamplingRequest, make_decoder, score_sequences
from rl.types import Datum, ModelInput, SamplingParams

SIZES = [(32, 32), (64, 24), (16, 40)]


def rows(tokenizer, reader, renderer):
    """Return prompts with no image, with one, with three of different sizes in two messages, and
    with an image at the end.
    """
    image = [{"type": "image", "image": chunk(i, *SIZES[i])} for i in range(3)]
    text = [{"type": "text", "text": t} for t in ("what is this?", "and this", "third")]
    conversations = [
        [{"role": "user", "content": "hello there"}],
        [{"role": "user", "content": [image[0], text[0]]}],
        [
            {"role": "user", "content": [text[1], image[1], text[2], image[2]]},
            {"role": "assistant", "content": "a cat"},
            {"role": "user", "content": [image[0], text[0]]},
        ],
        [{"role": "user", "content": [text[0], image[2]]}],
    ]
    return [renderer.build_generation_prompt(output) for output in conversations]


def datum(inputs):
    """Return a datum with all tokens of the input as targets."""
    weights = np.ones(inputs.length - 1, np.float32)
    fields = {"target_tokens": inputs.token_ids()[1:], "weights": weights}
    return Datum(inputs.truncate(inputs.length - 1), fields)


def request_of(inputs, **options):
    images = inputs.images_with_positions()
    return SamplingRequest(prompt=inputs.token_ids(), images=images, **options)


def continued(inputs, sequence):
    tokens = [*inputs.token_ids(), *sequence.tokens]
    return ModelInput.of(tokens, inputs.images_with_positions())


def compute_scores(decoder, inputs, temperature=1.0):
    """Return the sampler's logprobs of all tokens but the first of each input."""
    tokens = [item.token_ids() for item in inputs]
    images = [item.images_with_positions() for item in inputs]
    rows = score_sequences(decoder, tokens, temperature, images)
    return [np.array(row[1:]) for row in rows]


def compute_logprobs(learner, datums, temperature=1.0):
    outputs, _ = learner.run(
        datums, get_loss("cross_entropy"), {}, temperature=temperature, divisor=1.0, backward=False
    )
    return [outputs[i]["logprobs"] for i in range(len(datums))]


def of_logits(logits, inputs, temperature=1.0):
    """Return float64 logprobs of the tokens of an input, from the plain model's logits."""
    table = (logits.double() / temperature).log_softmax(-1)
    return table[:-1].gather(1, torch.tensor(inputs.token_ids()[1:])[:, None])[:, 0].numpy()


@pytest.fixture(
    scope="module",
    params=[pytest.param(f, marks=[] if f == "qwen3_vl" else pytest.mark.slow) for f in FAMILIES],
)
def image_model(request):
    loaded, _ = make_tiny_model(request.param)
    reader, renderer = (
        get_image_reader(loaded.model),
        get_renderer("chat_template", loaded.tokenizer),
    )
    learner = Learner(loaded, Accelerator(cpu=True), LearnerSettings())
    return loaded, reader, renderer, learner


def test_learner_sampler_and_the_model_alone_agree(image_model):
    """Mixed rows in one call, at two temperatures: the logprobs of sampling, scoring and learning
    equal the plain model's. A group prefills its prompt only once.
    """
    loaded, reader, renderer, learner = image_model
    prompts = rows(loaded.tokenizer, reader, renderer)
    decoder = make_decoder(loaded.model)
    for temperature in (1.0, 0.7):
        engine = Engine(decoder, loaded.eos_token_ids, max_context=1024)
        for i, prompt in enumerate(prompts):
            params = SamplingParams(max_tokens=9, temperature=temperature)
            engine.add(request_of(prompt, num_samples=3, params=params, problem=i))
        responses = engine.run()
        assert engine.counters.prefill_tokens == sum(p.length for p in prompts)
        whole, drawn = [], []
        for prompt, response in zip(prompts, responses, strict=True):
            for sequence in response.sequences:
                if reader.image_token_id not in sequence.tokens:
                    whole.append(continued(prompt, sequence))
                    drawn.append(np.array(sequence.logprobs))
        assert len(whole) >= 8
        result = compute_logprobs(learner, [datum(item) for item in whole], temperature)
        read = compute_scores(decoder, whole, temperature)
        for item, logprobs, mine, sampler in zip(whole, drawn, result, read, strict=True):
            logits = compute_plain_logits(loaded.model, reader, item)
            expected = of_logits(logits, item, temperature)
            assert np.abs(mine - expected).max() < 2e-5
            assert np.abs(sampler - expected).max() < 2e-5
            assert np.abs(logprobs - expected[-len(logprobs) :]).max() < 1e-4


def test_permuted_pixels_and_swapped_images_change_the_logprobs(image_model):
    loaded, reader, renderer, learner = image_model
    a, b = chunk(5), chunk(6)

    def request(*images):
        first, second = ({"type": "image", "image": image} for image in images)
        content = [first, {"type": "text", "text": "or"}, second]
        return renderer.build_generation_prompt([{"role": "user", "content": content}])

    inputs = [request(a, b), request(b, a), request(permute_pixels(a), b)]
    assert inputs[0].token_ids() == inputs[1].token_ids() == inputs[2].token_ids()
    right, swapped, blind = compute_logprobs(learner, [datum(item) for item in inputs])
    for other in (swapped, blind):
        assert np.abs(right[-6:] - other[-6:]).max() > 1e-4  # text after both images
    decoder = make_decoder(loaded.model)
    seen = compute_scores(decoder, inputs)
    for mine, sampler in zip((right, swapped, blind), seen, strict=True):
        assert np.abs(mine - sampler).max() < 2e-5
    engine = Engine(decoder, loaded.eos_token_ids, max_context=1024)
    for item in inputs:  # the same tokens, in the same batch
        engine.add(request_of(item, params=SamplingParams(max_tokens=4), seed=7))
    for item, response in zip(inputs, engine.run(), strict=True):
        (sequence,) = response.sequences
        if reader.image_token_id not in sequence.tokens:
            whole = continued(item, sequence)
            expected = of_logits(compute_plain_logits(loaded.model, reader, whole), whole)
            last = expected[-len(sequence.tokens) :]
            assert np.abs(last - sequence.logprobs).max() < 1e-4


def test_a_batch_of_mixed_rows_equals_each_alone_and_so_do_gradients(image_model):
    loaded, reader, renderer, learner = image_model
    datums = [datum(item) for item in rows(loaded.tokenizer, reader, renderer)]
    together = compute_logprobs(learner, datums)
    for item, results in zip(datums, together, strict=True):
        assert np.abs(compute_logprobs(learner, [item])[0] - results).max() < 1e-5

    def gradient(calls):
        options = {"temperature": 1.0, "divisor": 7.0, "backward": True}
        for call in calls:
            learner.run(call, get_loss("cross_entropy"), {}, **options)
        results = {n: p.grad.clone() for n, p in learner.trainable.items() if p.grad is not None}
        learner.drop_gradients()
        return results

    once, apart = gradient([datums]), gradient([[item] for item in datums])
    assert once.keys() == apart.keys() and any("vis" in name for name in once)
    whole = torch.stack([g.norm() for g in once.values()]).norm()
    assert float(torch.stack([(once[n] - apart[n]).norm() for n in once]).norm() / whole) < 1e-5


def test_an_image_token_that_was_drawn_is_read_alike_by_both_sides():
    """After an image, the model would treat every image token as part of the image. Sampler and
    learner both feed another token in place of a sampled image token.
    """
    loaded, _ = make_tiny_model("qwen3_vl")
    reader, renderer = (
        get_image_reader(loaded.model),
        get_renderer("chat_template", loaded.tokenizer),
    )
    with torch.no_grad():  # so that most samples contain the image token
        loaded.model.get_output_embeddings().weight[reader.image_token_id] += 0.5
    prompt = rows(loaded.tokenizer, reader, renderer)[1]
    engine = Engine(make_decoder(loaded.model), max_context=1024)
    engine.add(request_of(prompt, num_samples=8, params=SamplingParams(max_tokens=12)))
    sequences = engine.run()[0].sequences
    assert any(reader.image_token_id in sequence.tokens[:-1] for sequence in sequences)
    learner = Learner(loaded, Accelerator(cpu=True), LearnerSettings())
    whole = [datum(continued(prompt, sequence)) for sequence in sequences]
    for sequence, result in zip(sequences, compute_logprobs(learner, whole), strict=True):
        assert np.abs(result[-len(sequence.tokens) :] - sequence.logprobs).max() < 1e-4


def test_the_renderers_tokens_are_those_of_the_families_own_processor(image_model):
    """transformers' processor, if it can be built, gives the same tokens and pixels for a
    conversation.
    """
    loaded, reader, renderer, _ = image_model
    family = loaded.model.config.model_type
    if family not in ("gemma3",):  # the others need a video processor, which needs torchvision
        pytest.skip("its processor cannot be made without torchvision")
    from transformers import Gemma3Processor

    tokenizer, config = loaded.tokenizer, loaded.model.config
    named = {
        "boi_token": config.boi_token_index,
        "eoi_token": config.eoi_token_index,
        "image_token": config.image_token_id,
    }
    for name, index in named.items():
        setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(index))
        setattr(tokenizer, f"{name}_id", index)
    processor = Gemma3Processor(
        reader.family.image_processor, tokenizer, image_seq_length=config.mm_tokens_per_image
    )
    content = [{"type": "image", "image": make_image(1)}, {"type": "text", "text": "what?"}]
    output = [{"role": "user", "content": content}]
    text = tokenizer.apply_chat_template(output, tokenize=False, add_generation_prompt=True)
    theirs = processor(
        images=[[make_image(1)]], text=[text], add_special_tokens=False, return_tensors="pt"
    )
    mine = renderer.build_generation_prompt(output)
    assert mine.token_ids() == theirs["input_ids"][0].tolist()
    ((_, image),) = mine.images_with_positions()
    assert torch.equal(reader.process(image).tensors["pixel_values"], theirs["pixel_values"])
