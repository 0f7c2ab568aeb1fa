"""Images in a conversation: taken out of its messages, and put where the model's template has their
places.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rl.errors import UserError
from rl.images import ImageReader, as_chunk, image_of, is_image_part
from rl.types import ImageChunk, Message, ModelInput


def parts_of(content: Sequence[Any], role: str, where: str) -> list[dict[str, Any]]:
    """Content that holds images as parts of two kinds: {"type": "text", "text"}, {"type": "image",
    "image": ImageChunk}.
    """
    if role == "assistant":
        raise UserError(
            f"{where} is the assistant's and has an image: models here write text alone"
        )
    found: list[dict[str, Any]] = []
    for part in content:
        if is_image_part(part):
            given = image_of(part)
            if given is None:
                what = '{"type": "image", "image": a path, bytes, base64 or a PIL image}'
                raise UserError(f"{where} has a place for an image and no image in it: {what}")
            try:
                found.append({"type": "image", "image": as_chunk(given)})
            except UserError as error:
                raise UserError(f"{where}: {error}") from error
        elif (
            isinstance(part, Mapping)
            and part.get("type") == "text"
            and isinstance(part.get("text"), str)
        ):
            found.append({"type": "text", "text": part["text"]})
        else:
            raise UserError(
                f'{where} has a part of content that is neither {{"type": "text", "text": ...}} nor an image: {str(part)[:60]}'
            )
    return found


def chunks_of(messages: Sequence[Message]) -> list[ImageChunk]:
    """The images of messages (as `parts_of` left them) in their order."""
    return [
        part["image"] for message in messages for part in _parts(message) if part["type"] == "image"
    ]


def for_template(messages: Sequence[Message], *, all_in_parts: bool) -> list[Message]:
    """The messages as a template takes them: images are places. `all_in_parts`: texts, too, are
    lists of parts.
    """

    def content(message: Message) -> Any:
        if isinstance(message["content"], list):
            return [
                {"type": "image"} if part["type"] == "image" else part
                for part in message["content"]
            ]
        return (
            [{"type": "text", "text": message["content"]}] if all_in_parts else message["content"]
        )

    return [{**message, "content": content(message)} for message in messages]


def expanded(text: str, messages: Sequence[Message], reader: ImageReader) -> str:
    """A rendered text in which each image's place has become what stands for it in the model's
    tokens.
    """
    chunks = chunks_of(messages)
    pieces = text.split(reader.family.placeholder)
    if len(pieces) - 1 != len(chunks):
        raise UserError(
            f"the model's chat template has {len(pieces) - 1} places for the {len(chunks)} images of this conversation: it leaves some "
            "out, or is not the template of a model that sees"
        )
    expansions = [reader.read(chunk).text for chunk in chunks]
    return pieces[0] + "".join(
        expansion + piece for expansion, piece in zip(expansions, pieces[1:], strict=True)
    )


def located(
    tokens: Sequence[int], messages: Sequence[Message], reader: ImageReader | None
) -> ModelInput:
    """The tokens of a rendered text with its images in their places."""
    chunks = chunks_of(messages)
    return (
        ModelInput.from_ints(tokens)
        if reader is None or not chunks
        else reader.located(tokens, chunks)
    )


def written_texts(message: Message) -> Iterator[str]:
    """The texts of a message that a template must write."""
    if isinstance(message["content"], str):
        yield message["content"].strip()
    else:
        yield from (part["text"].strip() for part in message["content"] if part["type"] == "text")


def _parts(message: Message) -> list[dict[str, Any]]:
    return message["content"] if isinstance(message["content"], list) else []
