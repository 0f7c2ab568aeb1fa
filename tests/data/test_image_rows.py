"""Test images in messages, data rows and Tinker's form, and the errors of models without vision."""

import base64
import io
import json
import pickle
import re

import numpy as np
import pytest
import torch
from data_helpers import write_rows
from PIL import Image
from seeing import chunk, encode_parts, make_image, make_png, permute_pixels

from rl.client.check_arguments import resolve_datum_images, resolve_images
from rl.data import load_problems
from rl.data.synthetic.shape_images import COLOURS
from rl.errors import UserError
from rl.images import get_image_reader, make_image_chunk, open_image
from rl.models import load_model, load_tokenizer
from rl.renderers import get_renderer
from rl.reporting.rollout_html import render_page
from rl.rollout import Trajectory, Transition, trajectory_to_datums
from rl.types import (
    Datum,
    EncodedTextChunk,
    ImageAssetPointerChunk,
    ImageChunk,
    ModelInput,
    SampledSequence,
)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("tiny:vision")


@pytest.fixture(scope="module")
def renderer(tokenizer):
    return get_renderer("chat_template", tokenizer)


def make_messages(*parts):
    content = [p if isinstance(p, dict) else {"type": "text", "text": p} for p in parts]
    return [{"role": "user", "content": content}]


def show(seed):
    return {"type": "image", "image": make_image(seed)}


# -------------------------------------------------------------------------------------------- forms


def test_every_form_of_an_image_is_the_same_pixels(tmp_path):
    data = make_png(1)
    for name in ("a.png", "a b.png"):
        (tmp_path / name).write_bytes(data)
    path, text = tmp_path / "a.png", base64.b64encode(data).decode()
    address = f"data:image/png;base64,{text}"
    forms = [
        data, bytearray(data), str(path), path, text, address, make_image(1),
        {"bytes": data, "path": None}, {"bytes": None, "path": str(path)}, {"url": address},
        (tmp_path / "a b.png").as_uri(), ImageChunk(data, "png"),
        make_png(1, form="BMP"), make_png(1, form="TIFF"),
    ]  # fmt: skip
    expected = np.asarray(make_image(1))
    for form in forms:
        assert np.array_equal(np.asarray(open_image(make_image_chunk(form))), expected), type(form)
    assert make_image_chunk(make_png(1, form="JPEG")).format == "jpeg"
    assert make_image_chunk("a.png", tmp_path).format == "png"


def test_a_file_address_may_be_relative_and_hold_any_character(tmp_path):
    (tmp_path / "images").mkdir()
    for name in ("images/a.png", "images/b c#1?.png", "images/d%20e.png", "images/[x.png"):
        data = make_png(len(name))
        (tmp_path / name).write_bytes(data)
        quoted = (tmp_path / name).as_uri()
        for address in (f"file://{name}", f"file://{tmp_path / name}", quoted):
            assert make_image_chunk(address, tmp_path).data == data, address
    for address in ("file://gone.png", "file://[x/gone.png", f"file://{tmp_path / 'gone.png'}"):
        with pytest.raises(UserError, match=f"no image file at {re.escape(str(tmp_path))}/[^:]*$"):
            make_image_chunk(address, tmp_path)


@pytest.mark.parametrize(("side", "seed"), [(10, 3), (24, 24)])
def test_small_images_as_bare_base64_are_no_file_names(tmp_path, side, seed):
    """The text up to its first slash is longer than a file's name may be."""
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "noise.png")
    data = (tmp_path / "noise.png").read_bytes()
    text = base64.b64encode(data).decode()
    assert text.find("/") > 255 and len(text) < 4096
    assert make_image_chunk(text).data == data
    row = {"question": "what?", "image": text, "answer": "x"}
    path = write_rows(tmp_path / "rows.jsonl", row)
    (problem,) = load_problems(path, prompt_column="question")
    (image,) = [p["image"] for p in problem.messages[-1]["content"] if p["type"] == "image"]
    assert image.data == data


def test_the_smallest_png_as_bare_base64_is_no_file_name(tmp_path):
    Image.new("1", (1, 1)).save(tmp_path / "dot.png")
    data = (tmp_path / "dot.png").read_bytes()
    text = base64.b64encode(data).decode()
    assert len(text) < 100
    assert make_image_chunk(text).data == data


def make_jpeg_with_text_as_width():
    """The pixels are intact; PIL raises struct.error where it turns them upright."""
    exif, buffer = Image.Exif(), io.BytesIO()
    exif[270], exif[274] = "a description", 6  # 274: rotate by 90 degrees
    make_image(1).save(buffer, "JPEG", exif=exif)
    return buffer.getvalue().replace(b"\x01\x0e\x00\x02", b"\x01\x00\x00\x02")


@pytest.mark.parametrize(
    ("form", "says"),
    [
        (make_png(1)[:-30], "damaged"),
        ("missing.png", "no image file"),
        ("%" * 200, "neither a file nor base64"),
        ("https://a.b/c.png", "not downloaded"),
        (3, "int"),
        (b"hello", "not an image, or"),
        ("data:image/png,abc", "data: address of the form"),
        (Image.open(io.BytesIO(make_png(1)[:-30])), "image cannot be decoded: "),  # read when used
        (make_jpeg_with_text_as_width(), "an image of .* cannot be decoded: "),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_no_image_is_an_error_that_says_so(tmp_path, form, says):
    with pytest.raises(UserError, match=says):
        open_image(make_image_chunk(form, tmp_path))


def test_an_image_lies_upright_and_on_white():
    image = Image.new("RGB", (8, 16), (250, 0, 0))
    image.paste((0, 0, 250), (0, 0, 8, 8))
    exif = image.getexif()
    exif[274] = 6  # rotate by 90 degrees
    buffer = io.BytesIO()
    image.save(buffer, "PNG", exif=exif)
    assert open_image(make_image_chunk(buffer.getvalue())).size == (16, 8)
    clear = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    assert np.asarray(open_image(make_image_chunk(clear))).min() == 255


def test_gray_of_16_bits_keeps_its_shades():
    """Such as X-rays and depth."""
    shades = np.arange(0, 65536, 256).astype(np.uint16).reshape(16, 16)
    buffer = io.BytesIO()
    Image.fromarray(shades).save(buffer, "PNG")
    for source in (buffer.getvalue(), Image.fromarray(shades)):
        pixels = np.asarray(open_image(make_image_chunk(source)))
        assert (pixels == (shades >> 8)[:, :, None]).all()


# ----------------------------------------------------------------------- inputs, as Tinker has them


def test_an_image_chunk_takes_the_tokens_that_the_model_makes_of_it(tokenizer):
    """By hand: 64 x 24 pixels are 16 x 6 patches of 4, merged 2 x 2: 24 tokens."""
    reader = get_image_reader(tokenizer)
    inputs = encode_parts(tokenizer, "see ", chunk(1, 64, 24), ".")
    with pytest.raises(ValueError, match="depends on the model"):
        _ = inputs.length
    result = resolve_images(inputs, {"tokenizer": tokenizer, "base_model": "tiny:vision"})
    assert result.length == 4 + 24 + 1 and result.images_with_positions()[0][0] == 4
    pads = [reader.image_token_id] * 24
    assert result.token_ids() == [*tokenizer.encode("see "), *pads, *tokenizer.encode(".")]
    with pytest.raises(ValueError, match="image chunk"):
        result.to_ints()  # reading the tokens without the images is an error

    def expect(tokens):
        return ModelInput([ImageChunk(inputs.chunks[1].data, "png", expected_tokens=tokens)])

    assert reader.resolve_tokens(expect(24)).length == 24
    with pytest.raises(ValueError, match="takes 24 tokens in this model, expected_tokens is 25"):
        reader.resolve_tokens(expect(25))
    with pytest.raises(ValueError, match="is not local"):
        reader.resolve_tokens(ModelInput([ImageAssetPointerChunk("png", "tinker://x")]))
    assert pickle.loads(pickle.dumps(reader)).resolve_tokens(inputs) == result


def test_a_model_of_text_says_that_it_cannot_see(tokenizer):
    plain = load_tokenizer("tiny:ascii")
    info = {"tokenizer": plain, "base_model": "tiny:ascii"}
    inputs = ModelInput([EncodedTextChunk([3]), chunk(1)])
    with pytest.raises(UserError, match="tiny:ascii supports only text, but got an image"):
        resolve_images(inputs, info)
    with pytest.raises(UserError, match="tiny:ascii supports only text"):
        resolve_datum_images([Datum(ModelInput.from_ints([1])), Datum(inputs)], info)
    for name in ("plain", "role_colon"):
        for item in (plain, tokenizer):
            with pytest.raises(UserError, match="has an image, but this renderer writes only text"):
                get_renderer(name, item).build_generation_prompt(make_messages(show(1)))
    plain.chat_template = tokenizer.chat_template
    plain.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    with pytest.raises(UserError, match="has an image"):
        get_renderer("chat_template", plain).build_generation_prompt(make_messages(show(1)))


def test_an_architecture_whose_images_are_not_known_is_refused_by_name(tmp_path):
    config = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"")
    says = "images are not supported for the architecture 'llava'; supported: qwen2_vl"
    with pytest.raises(UserError, match=says):
        load_model(str(tmp_path))


def test_an_input_is_cut_and_joined_without_losing_an_image(tokenizer):
    result = get_image_reader(tokenizer).resolve_tokens(
        encode_parts(tokenizer, "ab", chunk(1), "cd", chunk(2, 16, 40), "e")
    )
    tokens, placed = result.token_ids(), result.images_with_positions()
    assert ModelInput.of(tokens, placed) == result
    for length in range(1, result.length + 1):
        # within an image the cut moves to the image's start
        (cut,) = [at for at, image in placed if at < length < at + image.length] or [length]
        part = result.truncate(length)
        assert part.token_ids() == tokens[:cut]
        assert part.images_with_positions() == tuple(p for p in placed if p[0] < cut)


# ------------------------------------------------------------------------------------ conversations


def test_images_stand_where_the_template_has_them(tokenizer, renderer):
    address = "data:image/png;base64," + base64.b64encode(make_png(2, 16, 40)).decode()
    a, b = show(1), {"type": "image_url", "image_url": {"url": address}}
    first = [{"role": "system", "content": "look"}, *make_messages("one", a, "two", b)]
    messages = [*first, {"role": "assistant", "content": "yes"}, *make_messages(a, "again")]
    large, small = (f"<|vision_start|>{'<|image_pad|>' * n}<|vision_end|>" for n in (16, 10))
    before = f"<|system|>look<|end|><|user|>one{large}two{small}<|end|><|assistant|>yes<|end|>"
    before += f"<|user|>{large}again<|end|>"
    prompt = renderer.build_generation_prompt(messages)
    assert tokenizer.decode(prompt.token_ids()) == f"{before}<|assistant|>"
    images = [make_image_chunk(make_image(1)).data, make_png(2, 16, 40)]
    placed = prompt.images_with_positions()
    assert [image.data for _, image in placed] == [*images, images[0]]
    messages.append({"role": "assistant", "content": "no"})
    example, weights = renderer.build_supervised_example(messages, "all_assistant")
    trained = [t for t, w in zip(example.token_ids(), weights, strict=True) if w]
    assert tokenizer.decode(trained) == "yes<|end|>no<|end|>"
    assert example.truncate(prompt.length) == prompt and len(example.images_with_positions()) == 3


def test_a_turn_is_bridged_to_the_next_with_the_images_of_both(tokenizer, renderer):
    first, new = make_messages(show(1), "what?"), make_messages("and", show(2))
    prompt, answer = renderer.build_generation_prompt(first), tokenizer.encode("cat<|end|>")
    bridged = renderer.extend_prompt(first, prompt.token_ids(), answer, new)
    images = [*prompt.images_with_positions(), *bridged.images_with_positions()]
    whole = [*first, {"role": "assistant", "content": "cat"}, *new]
    expected = renderer.build_generation_prompt(whole)
    assert ModelInput.of(bridged.token_ids(), images) == expected


def test_text_that_spells_an_image_token_is_text(tokenizer, renderer):
    spelt_out = "<|image_pad|><|vision_start|>"
    prompt = renderer.build_generation_prompt(make_messages(show(1), spelt_out))
    assert prompt.token_ids().count(get_image_reader(tokenizer).image_token_id) == 16
    assert spelt_out in tokenizer.decode(prompt.token_ids())[-60:]


def test_an_image_of_the_assistant_and_a_place_without_one_are_refused(renderer):
    shown = {"role": "assistant", "content": [show(1)]}
    with pytest.raises(UserError, match="assistant's and has an image"):
        renderer.build_generation_prompt([*make_messages("a"), shown, *make_messages("b")])
    with pytest.raises(UserError, match="has an image part without an image"):
        renderer.build_generation_prompt(make_messages({"type": "image"}))


def test_an_episode_of_two_turns_is_one_datum_and_another_image_begins_another(renderer, tokenizer):
    first = renderer.build_generation_prompt(make_messages(show(1), "what?"))
    answer = tokenizer.encode("cat<|end|>")
    ((position, image),) = first.images_with_positions()

    def datums(second):
        tail = [*tokenizer.encode("<|user|>"), *tokenizer.encode("<|end|><|assistant|>")]
        tokens = [*first.token_ids(), *answer, *tail]
        turns = [
            Transition(ob, SampledSequence(answer, [-0.5] * len(answer)), 1.0, False)
            for ob in (first, ModelInput.of(tokens, [(position, second)]))
        ]
        return trajectory_to_datums(Trajectory(turns, advantage=1.0))

    (item,) = datums(image)
    assert item.model_input.images_with_positions() == first.images_with_positions()
    assert item.loss_fn_inputs["mask"].array.sum() == 2 * len(answer)
    swapped = ImageChunk(permute_pixels(image).data, "png", tokens=image.tokens)
    parts = [part.model_input.images_with_positions() for part in datums(swapped)]
    assert [shown.data for ((_, shown),) in parts] == [image.data, swapped.data]


# --------------------------------------------------------------------------------------------- rows


def get_parts(problem):
    """Return the texts of the prompt, with "image" in place of an image."""
    content = problem.messages[-1]["content"]
    return content if isinstance(content, str) else [part.get("text", "image") for part in content]


def load_pixels(problem):
    content = problem.messages[-1]["content"]
    images = [p["image"] for p in content if isinstance(p, dict) and p["type"] == "image"]
    return [np.asarray(open_image(make_image_chunk(image))) for image in images]


def test_rows_bring_images_in_columns_and_messages(tmp_path):
    names = ["pics/1.png", "pics/2.png"]
    (tmp_path / "pics").mkdir()
    for seed, name in enumerate(names, start=1):
        (tmp_path / name).write_bytes(make_png(seed))
    coded = base64.b64encode(make_png(2)).decode()
    text = make_messages("a", {"type": "image"}, {"type": "image", "image": names[1]})
    # (row, parts of the prompt, images)
    cases = [
        ({"prompt": "what?", "images": names}, ["image", "image", "what?"], (1, 2)),
        ({"prompt": "<image> and <image>?", "images": [names[0], coded]},
         ["image", " and ", "image", "?"], (1, 2)),
        ({"prompt": "what?", "image": coded}, ["image", "what?"], (2,)),
        ({"prompt": "what?", "images": None}, "what?", ()),
        ({"prompt": "what?", "": "no image"}, "what?", ()),  # a column without a name
        ({"prompt": text, "image": names[0]}, ["a", "image", "image"], (1, 2)),
    ]  # fmt: skip
    path = write_rows(tmp_path / "rows.jsonl", *({**row, "answer": "x"} for row, *_ in cases))
    problems = load_problems(path)
    for problem, (row, parts, seeds) in zip(problems, cases, strict=True):
        assert get_parts(problem) == parts
        expected = [np.asarray(make_image(seed)) for seed in seeds]
        for pixels, image in zip(load_pixels(problem), expected, strict=True):
            assert np.array_equal(pixels, image), row
        assert "image" not in problem.meta and problem.meta.get("images") is None
    streamed = load_problems(path, stream=True)
    assert [p.messages for p in streamed] == [p.messages for p in problems]


def test_a_bad_image_costs_its_row_with_file_and_line(tmp_path):
    (tmp_path / "cut.png").write_bytes(make_png(1)[:-30])
    (tmp_path / "good.png").write_bytes(make_png(1))
    images = ["good.png", "cut.png", "gone.png", base64.b64encode(b"no").decode()]
    rows = [{"prompt": "what?", "answer": "x", "image": image} for image in images]
    rows.append({"prompt": "<image><image>", "answer": "x", "images": ["good.png"]})
    path = write_rows(tmp_path / "rows.jsonl", *rows)
    with pytest.raises(UserError) as caught:
        load_problems(path)
    for line in (2, 3, 4, 5):
        assert f"rows.jsonl line {line}: " in str(caught.value)
    assert len(load_problems(path, on_bad_row="skip")) == 1


def test_a_column_that_is_named_is_read_and_an_image_feature_as_well(tmp_path):
    datasets = pytest.importorskip("datasets")
    kinds = {"prompt": datasets.Value("string"), "answer": datasets.Value("string")}
    features = datasets.Features({**kinds, "photo": datasets.Image()})
    columns = {"prompt": ["what?", "who?"], "answer": ["x", "y"]}
    columns["photo"] = [make_image(1), make_image(2)]
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(str(tmp_path / "set"))
    for seed, problem in enumerate(load_problems(tmp_path / "set", image_column="photo"), start=1):
        (pixels,) = load_pixels(problem)
        assert np.array_equal(pixels, np.asarray(make_image(seed))), seed
    assert seed == 2


# -------------------------------------------------------------------------------- the generated set


def read_shown(problem):
    return np.asarray(open_image(problem.messages[0]["content"][0]["image"])).astype(int)


def find_shapes(pixels):
    """Return a mask of the pixels that differ from the background."""
    return np.abs(pixels - pixels[0, 0]).max(-1) > 60


def count_shapes(pixels):
    """Count by flood fill."""
    remaining, number = find_shapes(pixels), 0
    while remaining.any():
        number += 1
        stack = [tuple(np.argwhere(remaining)[0])]
        while stack:
            y, x = stack.pop()
            if 0 <= y < 32 and 0 <= x < 32 and remaining[y, x]:
                remaining[y, x] = False
                stack += [(y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)]
    return number


def test_shapes_are_what_their_answers_say():
    """Permuted pixels keep every colour and lose the shapes."""
    result, blind = load_problems("shapes:rows=60"), load_problems("shapes:rows=60,blind=1")
    answers = [problem.response for problem in result]
    images = [read_shown(problem) for problem in result]
    assert [str(count_shapes(image)) for image in images] == answers
    assert all(p.rejected != p.response for p in result) and set(answers) == set("1234")
    for problem, shuffled, image in zip(result, blind, images, strict=True):
        assert shuffled.response == problem.response
        colours = [sorted(map(tuple, i.reshape(-1, 3))) for i in (image, read_shown(shuffled))]
        assert colours[0] == colours[1]
    covered = np.array([find_shapes(image).mean() for image in images])
    areas = [covered[np.array(answers) == n].mean() for n in "1234"]
    assert max(areas) < 1.5 * min(areas)
    for problem in load_problems("shapes:ask=colour,rows=20"):
        assert (read_shown(problem) == COLOURS[problem.response]).all(-1).sum() > 50


@pytest.mark.parametrize(
    "options",
    ["ask=size", "rows=x", "rows=²", "blind=2", "hue=1", "noise=2", "noise=x", "from=-1"],
)
def test_options_of_shapes_are_checked(options):
    with pytest.raises(UserError, match="shapes takes the options"):
        load_problems(f"shapes:{options}")


def test_careless_answers_begin_with_their_epoch_and_are_wrong():
    result = load_problems("shapes:rows=400,noise=0.25,from=2")
    right = [problem.response for problem in load_problems("shapes:rows=400")]
    answers = {epoch: [result.at(i, epoch) for i in range(400)] for epoch in (0, 1, 2, 3, 7)}
    for epoch, items in answers.items():
        assert [item.meta["answer"] for item in items] == right
        assert {item.response for item in items} == set("1234")
        wrong = np.mean([i.response != answer for i, answer in zip(items, right, strict=True)])
        # 400 draws: three standard deviations
        assert wrong == 0 if epoch < 2 else abs(wrong - 0.25) <= 0.07, epoch
    assert [item.response for item in answers[2]] != [item.response for item in answers[3]]


def test_a_fresh_model_that_sees_has_a_tower_that_writes_what_it_sees():
    """Its patches have the same scale as the input; with an initial spread of 0.02 at a width of 64
    they were about a hundred times smaller.
    """
    tower, same, other = (
        load_model("tiny:vision", seed=seed).model.model.visual.patch_embed for seed in (1, 1, 2)
    )
    generator = torch.Generator().manual_seed(0)
    patches = torch.randn(64, tower.proj.weight[0].numel(), generator=generator)
    with torch.no_grad():
        assert 0.8 < float(tower(patches).std()) < 1.25
    assert torch.equal(same.proj.weight, tower.proj.weight)
    assert not torch.equal(other.proj.weight, tower.proj.weight)


def test_the_page_shows_what_was_seen():
    address = "data:image/png;base64,AAAA"
    row = {"prompt": "[image]what?", "response": "x", "reward": 1.0}
    made = render_page([{**row, "images": [address, "https://a.b/c.png"]}], title="t", step=1)
    assert f'<img alt="image 1" src="{address}">' in made and "https://a.b" not in made
