"""Images of rows: found in their columns or messages, looked at while rows are read, put where the
prompt has their places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl.data.rows import BadRow
from rl.errors import UserError
from rl.images import as_chunk, has_images, image_of, is_image_part
from rl.types import Message

COLUMNS = ("images", "image")  # where images are looked for, unless a column is named
MARK = "<image>"  # what stands for an image in the prompts of many data sets


class RowImages:
    """Puts a row's images into its messages. `column`: named by the user; None: one of COLUMNS, if
    the row has it.
    """

    def __init__(self, column: str | None = None, folder: Path | None = None):
        self.column, self.folder = column, folder

    def __call__(
        self, messages: Sequence[Message], columns: Mapping[str, Any]
    ) -> tuple[Message, ...]:
        """The messages with their images as parts of content. BadRow, naming the image, for one
        that is not there or damaged.

        Images of a column fill the places that the messages have for them ({"type": "image"}
        without an image, or "<image>" in a text of the user), in order; where there are none they
        stand before the first text of the user. A path is relative to the rows' file.
        """
        given = self._column(columns)
        if not given and not has_images(messages):
            return tuple(messages)
        left = [self._looked_at(one, f"image {i}") for i, one in enumerate(given, start=1)]
        found = (
            self._filled(messages, left) if has_images(messages) else self._marked(messages, left)
        )
        return tuple(found)

    def of_the_column(self, columns: Mapping[str, Any]) -> set[str]:
        """The columns that hold the row's images, which are no text for a reward."""
        names = (self.column,) if self.column is not None else COLUMNS
        return {name for name in names if _images_in(columns.get(name))}

    def _column(self, columns: Mapping[str, Any]) -> list[Any]:
        if self.column is not None and self.column not in columns:
            raise BadRow(
                f"no column {self.column!r} with images; it has {', '.join(map(repr, columns))}"
            )
        names = (
            [self.column]
            if self.column is not None
            else [name for name in COLUMNS if columns.get(name) is not None]
        )
        return _images_in(columns[names[0]]) if names else []

    def _filled(self, messages: Sequence[Message], left: list[Any]) -> list[Message]:
        given, found = iter(left), []
        for number, message in enumerate(messages, start=1):
            content = message["content"]
            if isinstance(content, list):
                content = [self._part(part, given, f"message {number}") for part in content]
            found.append({**message, "content": content})
        if (over := len(list(given))) > 0:
            raise BadRow(
                f"{len(left)} images in the column, {over} more than the messages have places for"
            )
        return found

    def _part(self, part: Any, given: Any, where: str) -> Any:
        if not is_image_part(part):
            return part
        inside = image_of(part)
        image = (
            next(given, None) if inside is None else self._looked_at(inside, f"an image of {where}")
        )
        if image is None:
            raise BadRow(f"{where} has a place for an image, and the row has no image left for it")
        return {"type": "image", "image": image}

    def _marked(self, messages: Sequence[Message], left: list[Any]) -> list[Message]:
        users = [
            i
            for i, message in enumerate(messages)
            if message["role"] == "user" and isinstance(message["content"], str)
        ]
        marks = sum(messages[i]["content"].count(MARK) for i in users)
        if marks not in (0, len(left)):
            raise BadRow(f"{len(left)} images, and the prompt has {MARK} {marks} times")
        if not users:
            raise BadRow("images, and no message of the user that they could stand in")
        found, given = list(messages), iter(left)
        for i in users if marks else users[:1]:
            texts = found[i]["content"].split(MARK) if marks else ["", found[i]["content"]]
            before = [] if marks else [{"type": "image", "image": image} for image in given]
            parts: list[dict[str, Any]] = before or [{"type": "text", "text": texts[0]}]
            for text in texts[1:]:
                parts += [{"type": "image", "image": next(given)}] if marks else []
                parts.append({"type": "text", "text": text})
            found[i] = {
                **found[i],
                "content": [part for part in parts if part["type"] == "image" or part["text"]],
            }
        return found

    def _looked_at(self, given: Any, where: str) -> Any:
        """The image as it is kept: bytes that were decoded once, or the path of a file whose
        beginning is an image's.
        """
        try:
            if isinstance(given, Mapping) and not given.get("bytes"):
                given = image_of(given)
            if isinstance(given, str) and (path := self._path(given)) is not None:
                _verify(path)
                return str(path)
            return as_chunk(given, self.folder)
        except UserError as error:
            raise BadRow(f"{where}: {error}") from error

    def _path(self, text: str) -> Path | None:
        if len(text) > 4096 or text.startswith("data:"):
            return None
        path = Path(text).expanduser()
        path = path if path.is_absolute() or self.folder is None else self.folder / path
        return path.absolute() if path.is_file() else None


def _images_in(value: Any) -> list[Any]:
    """A column's images: one, a list of them, or none."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return []
    return (
        [one for one in value if one is not None] if isinstance(value, (list, tuple)) else [value]
    )


def _verify(path: Path) -> None:
    """UserError unless the file is an image, as far as can be told without decoding it (which the
    check of the row's tokens does).
    """
    from PIL import Image

    try:
        with Image.open(path) as image:
            image.verify()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(
            f"{path} is no image, or a damaged one: {(str(error) or type(error).__name__).splitlines()[0]}"
        ) from error
