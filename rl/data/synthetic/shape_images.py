"""Generate images of a few shapes on a plain background, with a question about them. For vision
models of half a million parameters.
"""

from __future__ import annotations

import io
import random
from collections.abc import Mapping
from typing import Any

import numpy as np

from rl.data.problem_set import ProblemSet
from rl.data.synthetic.generated_set import build_set, make_options_error, parse_noise
from rl.errors import UserError
from rl.seed import derive_seed
from rl.types import ImageChunk, Problem

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 80, 220),
    "yellow": (230, 200, 40),
}
QUESTIONS = {"count": "how many?", "colour": "colour?", "place": "where?"}
_ANSWERS = {
    "count": ("1", "2", "3", "4"),
    "colour": tuple(COLOURS),
    "place": ("left", "right", "top", "bottom"),
}
_SIDE = 32
# With 2,048 rows a model of half a million weights memorizes them.
_ROWS = {"train": 8192, "test": 256}
_DEFAULTS = {"ask": "count", "rows": "", "blind": "0"}
_TAKES = (
    f"ask={'|'.join(QUESTIONS)}, rows=N, blind=1, noise=P with P from 0 to 1, and from=EPOCH, e.g. "
    "'shapes:ask=count'"
)


def shapes(
    split: str = "train",
    options: Mapping[str, str] | None = None,
    *,
    tag: str = "shapes",
) -> ProblemSet:
    """Generate images of 32 x 32 pixels: 8,192 of the "train" and 256 of the "test" split.

    Options:
    ask: "count" (1 to 4 shapes, "1" to "4"; default), "colour" (of a single shape) or "place" (of a
        single shape: left, right, top, bottom). The shapes of an image have the same colour, and
        cover the same area whatever their number, so that the pixels' colours do not reveal it.
    rows: the number of rows.
    blind=1: permute the pixels of every image, which keeps only the colours: a baseline without
        vision.
    noise (0 to 1): the share of wrong responses, for supervised training of a model that can see
        but makes errors.
    from: the first epoch with noise.
    meta["answer"] is always correct. Raises UserError for invalid options or an unknown split.
    """
    resolved = {**_DEFAULTS, **(options or {})}
    noise = parse_noise("shapes", _TAKES, options or {}, _DEFAULTS)
    ask = resolved["ask"]
    if (
        ask not in QUESTIONS
        or resolved["blind"] not in ("0", "1")
        or not (resolved["rows"] or "1").isdecimal()
    ):
        raise make_options_error("shapes", _TAKES, options or {})
    count = int(resolved["rows"] or _ROWS.get(split, 1))

    def resample(problem: Problem, rng: random.Random) -> str:
        return rng.choice([other for other in _ANSWERS[ask] if other != problem.response])

    rows = (_make_row(split, index, ask, resolved["blind"] == "1") for index in range(count))
    if count < 1:
        raise UserError("shapes has at least one row, got rows=0")
    return build_set(
        "shapes",
        split,
        rows,
        tag,
        noise=noise,
        resample=resample,
        seed=lambda index, epoch: derive_seed("shapes noise", split, index, epoch),
    )


def _make_row(
    split: str, index: int, ask: str, blind: bool
) -> tuple[list[dict[str, Any]], dict[str, Any], str, str]:
    draw = random.Random(derive_seed("shapes", split, index, ask))
    answer, image = _picture(draw, ask)
    wrong = draw.choice([other for other in _ANSWERS[ask] if other != answer])
    if blind:
        image = _permute_pixels(image, derive_seed("blind", split, index))
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=1)
    parts: list[dict[str, Any]] = [
        {"type": "image", "image": ImageChunk(buffer.getvalue(), "png")},
        {"type": "text", "text": QUESTIONS[ask]},
    ]
    return parts, {"answer": answer}, answer, wrong


def _picture(draw: random.Random, ask: str) -> tuple[str, Any]:
    """Return (the answer, the image).

    Shapes do not touch. If the question is the place, the shape is clearly on its side.
    """
    from PIL import Image, ImageDraw

    answer = draw.choice(_ANSWERS[ask])
    number = int(answer) if ask == "count" else 1
    ground = draw.randrange(215, 256)
    image = Image.new("RGB", (_SIDE, _SIDE), (ground, ground, ground))
    pen = ImageDraw.Draw(image)
    colour = COLOURS[answer if ask == "colour" else draw.choice(list(COLOURS))]
    shape = pen.ellipse if draw.random() < 0.5 else pen.rectangle
    place = answer if ask == "place" else ""
    while (boxes := _boxes(draw, number, place)) is None:
        pass  # the last shape did not fit
    for box in boxes:
        shape(box, fill=colour)
    return answer, image


def _boxes(draw: random.Random, number: int, place: str) -> list[tuple[int, int, int, int]] | None:
    """Return the corners (x0, y0, x1, y1, inclusive) of shapes; None if they did not fit.

    Shapes are at least 2 pixels apart. Their total area is about the same whatever their number.
    """
    boxes: list[tuple[int, int, int, int]] = []
    for _ in range(200):
        if len(boxes) == number:
            return boxes
        aspect = draw.uniform(0.65, 1.0 / 0.65)
        area = draw.uniform(95, 165) / number
        wide, high = max(2, round((area * aspect) ** 0.5)), max(2, round((area / aspect) ** 0.5))
        x, y = draw.randint(1, _SIDE - 1 - wide), draw.randint(1, _SIDE - 1 - high)
        apart = all(
            x > c + 2 or a > x + wide + 1 or y > d + 2 or b > y + high + 1 for a, b, c, d in boxes
        )
        if apart and place in ("", _side_of(x + wide / 2, y + high / 2)):
            boxes.append((x, y, x + wide - 1, y + high - 1))
    return None


def _side_of(x: float, y: float) -> str:
    """Return the side on which a point lies; "" near the diagonals, between two sides."""
    across, down = x - _SIDE / 2, y - _SIDE / 2
    if abs(abs(across) - abs(down)) < 3:
        return ""
    if abs(across) > abs(down):
        return "right" if across > 0 else "left"
    return "bottom" if down > 0 else "top"


def _permute_pixels(image: Any, seed: int) -> Any:
    from PIL import Image

    pixels = np.asarray(image).reshape(-1, 3)
    order = np.random.default_rng(seed).permutation(len(pixels))
    return Image.fromarray(pixels[order].reshape(_SIDE, _SIDE, 3))
