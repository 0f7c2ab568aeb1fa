"""Extract the images of a conversation from its messages, and insert them at their positions in the
rendered template.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rl.errors import UserError
from rl.images import ImageReader, as_chunk, image_of, is_image_part
from rl.types import ImageChunk, Message, ModelInput


def parts_of(content: Sequence[Any], role: str, where: str) -> list[dict[str, Any]]:
    """Return content with images as parts of two kinds: {"type": "text", "text"} and {"type":
    "image", "image": ImageChunk}. Raises UserError for other parts and for images of the
    assistant.
    """
    if role == "assistant":
        raise UserError(f"{where} is the assistant's and has an image: models write only text here")
    parts: list[dict[str, Any]] = []
    for part in content:
        if is_image_part(part):
            image = image_of(part)
            if image is None:
                expected = '{"type": "image", "image": a path, bytes, base64 or a PIL image}'
                raise UserError(f"{where} has an image part without an image; expected {expected}")
            try:
                parts.append({"type": "image", "image": as_chunk(image)})
            except UserError as error:
                raise UserError(f"{where}: {error}") from error
        elif (
            isinstance(part, Mapping)
            and part.get("type") == "text"
            and isinstance(part.get("text"), str)
        ):
            parts.append({"type": "text", "text": part["text"]})
        else:
            raise UserError(
                f"{where} has a part of content that is neither "
                f'{{"type": "text", "text": ...}} nor an image: {str(part)[:60]}'
            )
    return parts


def chunks_of(messages: Sequence[Message]) -> list[ImageChunk]:
    """Return the images of messages (from `parts_of`) in order."""
    return [
        part["image"] for message in messages for part in _parts(message) if part["type"] == "image"
    ]


def for_template(messages: Sequence[Message], *, all_in_parts: bool) -> list[Message]:
    """Return the messages for a chat template, with a placeholder part for each image.
    `all_in_parts`: texts also become lists of parts.
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
    """Return a rendered text with each image placeholder replaced by the text of the image's
    tokens. Raises UserError if the numbers of placeholders and images differ.
    """
    chunks = chunks_of(messages)
    pieces = text.split(reader.family.placeholder)
    if len(pieces) - 1 != len(chunks):
        raise UserError(
            f"the model's chat template has {len(pieces) - 1} places for the {len(chunks)} images "
            "of this conversation: it leaves some "
            "out, or is not the template of a vision-language model"
        )
    expansions = [reader.read(chunk).text for chunk in chunks]
    return pieces[0] + "".join(
        expansion + piece for expansion, piece in zip(expansions, pieces[1:], strict=True)
    )


def located(
    tokens: Sequence[int], messages: Sequence[Message], reader: ImageReader | None
) -> ModelInput:
    """Return the tokens of a rendered text with the images at their positions."""
    chunks = chunks_of(messages)
    return (
        ModelInput.from_ints(tokens)
        if reader is None or not chunks
        else reader.located(tokens, chunks)
    )


def written_texts(message: Message) -> Iterator[str]:
    """Yield the texts of a message that a template must write."""
    if isinstance(message["content"], str):
        yield message["content"].strip()
    else:
        yield from (part["text"].strip() for part in message["content"] if part["type"] == "text")


def _parts(message: Message) -> list[dict[str, Any]]:
    """Return the content parts of a message, or [] for a text."""
    return message["content"] if isinstance(message["content"], list) else []
