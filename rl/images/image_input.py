"""Convert an image from a user (path, bytes, base64, PIL image, data set row) to png or jpeg."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit
from urllib.request import url2pathname

import numpy as np

from rl.errors import UserError
from rl.types import ImageChunk, Message, Messages

# The types of a content part that is an image, and the keys that may hold the image, the usual key
# first.
_PART_TYPES = ("image", "image_url", "input_image")
IMAGE_KEYS = ("image", "image_url", "url", "path", "base64", "data", "bytes")
_MAX_PATH = 4096  # characters
_MIN_BASE64 = 92  # characters of the smallest PNG's 67 bytes
_REMEDY = "give a path, bytes, base64 text, or a PIL image"
_FORMATS: dict[str | None, Literal["png", "jpeg"]] = {"PNG": "png", "JPEG": "jpeg"}


def is_image_part(part: Any) -> bool:
    """Return whether a content part of a message is an image.

    Accepts the types "image" (of chat templates), "image_url" and "input_image" (of APIs).
    """
    return isinstance(part, Mapping) and part.get("type") in _PART_TYPES


def has_images(messages: Any) -> bool:
    """Return whether any message of a conversation contains an image."""
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    return any(
        is_image_part(part) for content in contents if isinstance(content, list) for part in content
    )


def content_to_text(content: Any) -> str:
    """Return a message's content as text for a person or a reward: each image becomes [image]."""
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


def replace_images(messages: Messages) -> list[Message]:
    """Return messages in which each content with images is a text, as a reward receives them."""
    return [
        {**message, "content": content_to_text(message["content"])}
        if has_images([message])
        else message
        for message in messages
    ]


def get_image(part: Mapping[str, Any]) -> Any:
    """Return the image of a content part, or None if the part is only a placeholder."""
    for key in IMAGE_KEYS:
        value = part.get(key)
        if value is not None:
            return value.get("url") if isinstance(value, Mapping) and "url" in value else value
    return None


def make_image_chunk(source: Any, folder: Path | None = None) -> ImageChunk:
    """Convert an image to bytes. Formats other than png and jpeg become png.

    Accepts ImageChunk, PIL images, bytes, a path, base64 (bare, or a data: address), and {"bytes":
    ..., "path": ...} as in data sets. `folder`: the base of relative paths. Raises UserError for
    other types, if the file does not exist, or if the image cannot be decoded completely.
    """
    if isinstance(source, ImageChunk):
        return source
    if isinstance(source, Mapping):
        source = source.get("bytes") or get_image(source)
    if isinstance(source, (bytearray, memoryview)):
        source = bytes(source)
    if isinstance(source, (str, Path)):
        source = _read_bytes(source, folder)
    if isinstance(source, bytes):
        return _chunk_from_bytes(source)
    if type(source).__module__.partition(".")[0] == "PIL":
        with _report_damage(f"a {source.width} x {source.height} image cannot be decoded"):
            return ImageChunk(_encode_png(source), "png")
    raise UserError(f"expected an image, got {type(source).__name__}: {_REMEDY}")


def find_image_file(source: str | Path, folder: Path | None = None) -> Path | None:
    """Return the existing file that a path or a file: address names; None if it names none, as
    base64 text. `folder`: the base of relative paths.
    """
    text = str(source)
    if len(text) > _MAX_PATH:
        return None
    names = [text]
    try:
        if text.startswith("file:"):  # an address, or a path with file:// before it
            names = [text.removeprefix("file://"), url2pathname(urlsplit(text).path)]
        paths = ((folder or Path()).absolute() / Path(name).expanduser() for name in names)
        return next((path for path in paths if path.is_file()), None)
    except (OSError, ValueError, RuntimeError):  # not a name that the system allows
        return None


def to_data_url(chunk: ImageChunk) -> str:
    """Return the image as a data: address for a page, scaled down to at most 320 pixels per
    side.
    """
    image = open_image(chunk)
    image.thumbnail((320, 320))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def open_image(chunk: ImageChunk) -> Any:
    """Return the image as a PIL image, upright (according to its EXIF data) and in RGB.

    Raises UserError if it cannot be decoded.
    """
    from PIL import ImageOps

    fault = f"an image of {len(chunk.data)} bytes ({chunk.format}) cannot be decoded"
    with decode_image(io.BytesIO(chunk.data), fault) as image:
        flat = _flatten_transparency(_reduce_depth(image))
        return ImageOps.exif_transpose(flat).convert("RGB")


@contextmanager
def decode_image(source: Any, fault: str) -> Iterator[Any]:
    """Open a file or a path as a PIL image for the body. Raises UserError, with `fault`, if the
    image cannot be decoded there.
    """
    from PIL import Image

    with _report_damage(fault), Image.open(source) as image:
        yield image


@contextmanager
def _report_damage(fault: str) -> Iterator[None]:
    """Raise UserError, with `fault`, for whatever a decoder raises in the body."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # boundary: decoders raise any exception for damaged data
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise UserError(f"{fault}: {reason}") from error


def _reduce_depth(image: Any) -> Any:
    """Return a grayscale image of 16 bits as one of 8 bits. PIL's own conversion makes every value
    above 255 white.
    """
    if not image.mode.startswith("I;16"):
        return image
    from PIL import Image

    reduced = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    reduced.info = {key: value for key, value in image.info.items() if key != "transparency"}
    return reduced


def _flatten_transparency(image: Any) -> Any:
    """Blend a transparent image with white: the color of transparent pixels is not part of the
    image.
    """
    from PIL import Image

    if image.mode not in ("RGBA", "LA", "PA") and "transparency" not in image.info:
        return image
    foreground = image.convert("RGBA")
    background = Image.new("RGBA", foreground.size, (255, 255, 255, 255))
    background.alpha_composite(foreground)
    flattened = background.convert("RGB")
    flattened.info = dict(image.info)
    if "exif" in image.info:
        flattened.getexif().load(image.info["exif"])
    return flattened


def _chunk_from_bytes(data: bytes) -> ImageChunk:
    """Convert encoded bytes to a chunk. Raises UserError if they are not a valid image."""
    fault = f"{len(data)} bytes are not an image, or a damaged image"
    with decode_image(io.BytesIO(data), fault) as image:
        image.load()
        form = _FORMATS.get(image.format)
        return ImageChunk(data if form else _encode_png(image), form or "png")


def _encode_png(image: Any) -> bytes:
    """Return the pixels as PNG, upright."""
    from PIL import ImageOps

    upright = ImageOps.exif_transpose(_reduce_depth(image))
    if upright.mode not in ("RGB", "RGBA", "L", "LA", "P", "1"):
        upright = upright.convert("RGB")
    buffer = io.BytesIO()
    upright.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def _read_bytes(source: str | Path, folder: Path | None) -> bytes:
    """Return the bytes of a path, a data: address, or base64 text."""
    text = str(source)
    if text.startswith("data:"):
        header, comma, body = text.partition(",")
        if not comma or not header.endswith(";base64"):
            raise UserError(
                "expected a data: address of the form data:image/png;base64,..., "
                f"got one that begins with {text[:40]!r}"
            )
        return _decode_base64(body)
    if text.startswith(("http://", "https://")):
        raise UserError(
            f"images are not downloaded from an address ({text[:80]}): download it, and {_REMEDY}"
        )
    if (path := find_image_file(source, folder)) is not None:
        return path.read_bytes()
    is_short = len(text) < _MIN_BASE64
    if isinstance(source, Path) or is_short or (len(text) <= _MAX_PATH and "." in text):
        name = text.removeprefix("file://")
        raise UserError(f"no image file at {name if folder is None else folder / name}")
    return _decode_base64(text)


def _decode_base64(text: str) -> bytes:
    """Decode base64 text. Raises UserError if it is invalid."""
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise UserError(
            f"a text of {len(text)} characters is neither a file nor base64 ({error}): "
            f"{text[:40]!r}"
        ) from error
