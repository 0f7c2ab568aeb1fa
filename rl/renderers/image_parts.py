"""Extract the images of a conversation from its messages, and insert them at their positions in the
rendered template.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rl.errors import UserError
from rl.images import ImageReader, get_image, is_image_part, make_image_chunk
from rl.types import ImageChunk, Message, Messages, ModelInput


def split_image_parts(content: Sequence[Any], role: str, where: str) -> list[dict[str, Any]]:
    """Return content with images as parts of two kinds: {"type": "text", "text"} and {"type":
    "image", "image": ImageChunk}. Raises UserError for other parts and for images of the
    assistant.
    """
    if role == "assistant":
        raise UserError(f"{where} is the assistant's and has an image: models write only text here")
    parts: list[dict[str, Any]] = []
    for part in content:
        if is_image_part(part):
            image = get_image(part)
            if image is None:
                expected = '{"type": "image", "image": a path, bytes, base64 or a PIL image}'
                raise UserError(f"{where} has an image part without an image; expected {expected}")
            try:
                parts.append({"type": "image", "image": make_image_chunk(image)})
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


def get_image_chunks(messages: Messages) -> list[ImageChunk]:
    """Return the images of messages (from `split_image_parts`) in order."""
    return [
        part["image"]
        for message in messages
        if isinstance(message["content"], list)
        for part in message["content"]
        if part["type"] == "image"
    ]


def prepare_for_template(messages: Messages, *, all_in_parts: bool) -> list[Message]:
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


def expand_images(text: str, messages: Messages, reader: ImageReader) -> str:
    """Return a rendered text with each image placeholder replaced by the text of the image's
    tokens. Raises UserError if the numbers of placeholders and images differ.
    """
    chunks = get_image_chunks(messages)
    pieces = text.split(reader.family.placeholder)
    if len(pieces) - 1 != len(chunks):
        raise UserError(
            f"the model's chat template has {len(pieces) - 1} places for the {len(chunks)} images "
            "of this conversation: it leaves some "
            "out, or is not the template of a vision-language model"
        )
    return pieces[0] + "".join(
        reader.process(chunk).text + piece for chunk, piece in zip(chunks, pieces[1:], strict=True)
    )


def place_images(
    tokens: Sequence[int], messages: Messages, reader: ImageReader | None
) -> ModelInput:
    """Return the tokens of a rendered text with the images at their positions."""
    chunks = get_image_chunks(messages)
    if reader is None or not chunks:
        return ModelInput.from_ints(tokens)
    return reader.place_images(tokens, chunks)


def iter_texts(message: Message) -> Iterator[str]:
    """Yield the texts of a message that a template must write."""
    if isinstance(message["content"], str):
        yield message["content"].strip()
    else:
        yield from (part["text"].strip() for part in message["content"] if part["type"] == "text")
