"""An image as somebody gives it (a path, bytes, base64, a PIL image, a row of a data set) to png or
jpeg bytes.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from rl.errors import UserError
from rl.types import ImageChunk

# The kinds of a content part that is an image, and the keys that hold it there, the usual one
# first.
_KINDS = ("image", "image_url", "input_image")
IMAGE_KEYS = ("image", "image_url", "url", "path", "base64", "data", "bytes")
_WANTED = "give a path, bytes, base64 text, or a PIL image"
_FORMATS: dict[str | None, Literal["png", "jpeg"]] = {"PNG": "png", "JPEG": "jpeg"}


def is_image_part(part: Any) -> bool:
    """Whether a part of a message's content is an image: {"type": "image", "image": ...}, or as
    APIs spell it.
    """
    return isinstance(part, Mapping) and part.get("type") in _KINDS


def has_images(messages: Any) -> bool:
    """Whether any content of a conversation holds an image."""
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    return any(
        is_image_part(part) for content in contents if isinstance(content, list) for part in content
    )


def said(content: Any) -> str:
    """A message's content as text that a person or a reward reads: each image is [image]."""
    if not isinstance(content, list):
        return str(content)
    return "".join(
        "[image]"
        if is_image_part(part)
        else str(part.get("text", ""))
        if isinstance(part, Mapping)
        else ""
        for part in content
    )


def image_of(part: Mapping[str, Any]) -> Any:
    """What a content part holds as its image; None where it holds none (its place alone)."""
    for key in IMAGE_KEYS:
        value = part.get(key)
        if value is not None:
            return value.get("url") if isinstance(value, Mapping) and "url" in value else value
    return None


def as_chunk(given: Any, folder: Path | None = None) -> ImageChunk:
    """The image as bytes that travel. Formats other than png and jpeg become png. `folder`: where
    relative paths start.

    Taken are ImageChunk, PIL images, bytes, a path, base64 (bare, or a data: address), {"bytes":
    ..., "path": ...} as data sets have it. UserError where it is none of these, is not there, or
    cannot be decoded to its end.
    """
    if isinstance(given, ImageChunk):
        return given
    if isinstance(given, Mapping):
        given = given.get("bytes") or image_of(given)
    if isinstance(given, (bytearray, memoryview)):
        given = bytes(given)
    if isinstance(given, (str, Path)):
        given = _read(given, folder)
    if isinstance(given, bytes):
        return _of_bytes(given)
    if type(given).__module__.partition(".")[0] == "PIL":
        return ImageChunk(_written(given), "png")
    raise UserError(f"an image is expected, this is a {type(given).__name__}: {_WANTED}")


def shown(chunk: ImageChunk, largest: int = 320) -> str:
    """The image as a data: address for a page, made smaller where a side is longer than `largest`
    pixels.
    """
    image = opened(chunk)
    image.thumbnail((largest, largest))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def opened(chunk: ImageChunk) -> Any:
    """The image as PIL has it, upright (as its EXIF data says) and in RGB. UserError where it
    cannot be decoded.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(chunk.data)) as image:
            return ImageOps.exif_transpose(_flat(image)).convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(
            f"an image of {len(chunk.data)} bytes ({chunk.format}) cannot be decoded: {_reason(error)}"
        ) from error


def _flat(image: Any) -> Any:
    """On white, where it is see-through: what stands in hidden pixels is no part of the image."""
    from PIL import Image

    if image.mode not in ("RGBA", "LA", "PA") and "transparency" not in image.info:
        return image
    above = image.convert("RGBA")
    below = Image.new("RGBA", above.size, (255, 255, 255, 255))
    below.alpha_composite(above)
    found = below.convert("RGB")
    found.info = dict(image.info)
    if "exif" in image.info:
        found.getexif().load(image.info["exif"])
    return found


def _of_bytes(data: bytes) -> ImageChunk:
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data)) as image:
            image.load()
            form = _FORMATS.get(image.format)
            return ImageChunk(data if form else _written(image), form or "png")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(
            f"{len(data)} bytes that are no image, or a damaged one: {_reason(error)}"
        ) from error


def _written(image: Any) -> bytes:
    """PNG of the pixels, upright."""
    from PIL import ImageOps

    upright = ImageOps.exif_transpose(image)
    if upright.mode not in ("RGB", "RGBA", "L", "LA", "P", "1"):
        upright = upright.convert("RGB")
    buffer = io.BytesIO()
    upright.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def _read(given: str | Path, folder: Path | None) -> bytes:
    """The bytes behind a path, a data: address, or base64."""
    text = str(given)
    if text.startswith("data:"):
        head, comma, body = text.partition(",")
        if not comma or not head.endswith(";base64"):
            raise UserError(
                f"an image's data: address is data:image/png;base64,..., this begins with {text[:40]!r}"
            )
        return _decoded(body)
    if text.startswith(("http://", "https://")):
        raise UserError(
            f"an image at an address ({text[:80]}) is not fetched: download it, and {_WANTED}"
        )
    if len(text) < 4096:
        path = Path(text.removeprefix("file://")).expanduser()
        path = path if path.is_absolute() or folder is None else folder / path
        if path.is_file():
            return path.read_bytes()
        looks_like_a_path = isinstance(given, Path) or "." in path.name or len(text) < 100
        if looks_like_a_path:
            raise UserError(f"no image file at {path}")
    return _decoded(text)


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise UserError(
            f"a text of {len(text)} characters is neither a file nor base64 ({error}): {text[:40]!r}"
        ) from error


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
