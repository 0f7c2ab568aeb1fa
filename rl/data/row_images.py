"""Find the images of rows in columns or messages, verify them, and insert them into the prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.data.row_readers import BadRow, Columns
from rl.errors import UserError
from rl.images import (
    decode_image,
    find_image_file,
    get_image,
    has_images,
    is_image_part,
    make_image_chunk,
)
from rl.types import Message, Messages

COLUMNS = ("images", "image")  # the columns searched for images if no column is named
MARK = "<image>"  # the placeholder of an image in the prompts of many data sets


@dataclass(frozen=True)
class RowImages:
    """Insert a row's images into its messages.

    column: the image column that the user named; None: the first of COLUMNS that the row has.
    folder: the folder that relative paths of images start from.
    """

    column: str | None = None
    folder: Path | None = None

    def __call__(self, messages: Messages, columns: Columns) -> tuple[Message, ...]:
        """Return the messages with the images as parts of their content.

        Images of a column fill the placeholders of the messages in order: {"type": "image"} without
        an image, or "<image>" in a user text. Without placeholders the images precede the first
        user text. A path is relative to the file of the rows. Raises BadRow, with the image's
        number, for a missing or damaged image.
        """
        column_images = self._column(columns)
        if not column_images and not has_images(messages):
            return tuple(messages)
        checked_images = [
            self._verify_image(image, f"image {i}")
            for i, image in enumerate(column_images, start=1)
        ]
        if not has_images(messages):
            messages = _replace_marks(messages, len(checked_images))
        return tuple(self._fill_parts(messages, checked_images))

    def image_columns(self, columns: Columns) -> set[str]:
        """Return the columns that hold the row's images, which are not passed to the reward."""
        names = (self.column,) if self.column is not None else COLUMNS
        return {name for name in names if _images_in(columns.get(name))}

    def _column(self, columns: Columns) -> list[Any]:
        """Return the images of the image column. Raises BadRow if a named column is absent."""
        if self.column is not None and self.column not in columns:
            raise BadRow(
                f"no column {self.column!r} with images; it has {', '.join(map(repr, columns))}"
            )
        candidates = (name for name in COLUMNS if columns.get(name) is not None)
        return _images_in(columns.get(self.column or next(candidates, COLUMNS[0])))

    def _fill_parts(self, messages: Messages, images: list[Any]) -> list[Message]:
        """Insert images at the image parts of the messages that have no image."""
        remaining, filled_messages = iter(images), []
        for number, message in enumerate(messages, start=1):
            content = message["content"]
            if isinstance(content, list):
                content = [self._part(part, remaining, f"message {number}") for part in content]
            filled_messages.append({**message, "content": content})
        if (surplus := len(list(remaining))) > 0:
            raise BadRow(
                f"{len(images)} images in the column, {surplus} more than the messages have "
                "places for"
            )
        return filled_messages

    def _part(self, part: Any, remaining: Any, where: str) -> Any:
        """Return a content part with its image, taken from `remaining` if the part has none."""
        if not is_image_part(part):
            return part
        inside = get_image(part)
        image = (
            next(remaining, None)
            if inside is None
            else self._verify_image(inside, f"an image of {where}")
        )
        if image is None:
            raise BadRow(f"{where} has a place for an image, and the row has no more images")
        return {"type": "image", "image": image}

    def _verify_image(self, image: Any, where: str) -> Any:
        """Return a verified image: bytes that were decoded once, or the path of an image file.

        Raises BadRow for an image that cannot be read.
        """
        try:
            if isinstance(image, Mapping) and not image.get("bytes"):
                image = get_image(image)
            if isinstance(image, str) and (path := find_image_file(image, self.folder)) is not None:
                # not decoded here: the check of the row's tokens decodes it
                with decode_image(path, f"{path} is not an image, or is damaged") as opened:
                    opened.verify()
                return str(path)
            return make_image_chunk(image, self.folder)
        except UserError as error:
            raise BadRow(f"{where}: {error}") from error


def _replace_marks(messages: Messages, images: int) -> list[Message]:
    """Return the messages with an image part at each mark in a user text, or without marks with
    `images` image parts before the first user text. Raises BadRow for another number of marks.
    """
    users = [
        i
        for i, message in enumerate(messages)
        if message["role"] == "user" and isinstance(message["content"], str)
    ]
    marks = sum(messages[i]["content"].count(MARK) for i in users)
    if marks not in (0, images):
        raise BadRow(f"{images} images, and the prompt has {MARK} {marks} times")
    if not users:
        raise BadRow("the row has images, but no user text to insert them into")
    replaced = list(messages)
    for i in users if marks else users[:1]:
        text = replaced[i]["content"] if marks else MARK * images + replaced[i]["content"]
        parts: list[dict[str, Any]] = []
        for number, piece in enumerate(text.split(MARK)):
            parts += [{"type": "image"}] if number else []
            parts += [{"type": "text", "text": piece}] if piece else []
        replaced[i] = {**replaced[i], "content": parts}
    return replaced


def _images_in(value: Any) -> list[Any]:
    """Return the images in a column's value: an image, a list of images, or empty."""
    if isinstance(value, str) and not value.strip():
        return []
    images = value if isinstance(value, (list, tuple)) else [value]
    return [image for image in images if image is not None]
