"""Define model inputs: text tokens, and images for vision models. Names and fields follow Tinker's
client.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias


@dataclass(frozen=True, slots=True)
class EncodedTextChunk:
    """Hold a copy of a run of token ids: later changes of the caller's list have no effect."""

    tokens: Sequence[int]
    type: Literal["encoded_text"] = "encoded_text"

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "tokens", list(self.tokens))
        except TypeError as error:
            raise ValueError(
                f"a chunk's tokens must be a list of token ids, got {self.tokens!r:.80}"
            ) from error

    @property
    def length(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class ImageChunk:
    """Hold an image as png or jpeg bytes. Only a vision model's processor knows its `length`.

    expected_tokens: the expected number of tokens, checked against the actual number.
    tokens (extension): the ids of the image in a model's input, from its first image token to its
        last; set once that model's image processor has processed the image (`rl.images`).
    """

    data: bytes
    format: Literal["png", "jpeg"]
    expected_tokens: int | None = None
    type: Literal["image"] = "image"
    tokens: tuple[int, ...] | None = None

    def __repr__(self) -> str:
        digest = (
            hashlib.blake2b(self.data, digest_size=8).hexdigest()
            if isinstance(self.data, bytes)
            else "?"
        )
        return f"ImageChunk({self.format}, {len(self.data)} bytes, {digest})"

    @property
    def length(self) -> int:
        if self.tokens is not None:
            return len(self.tokens)
        if self.expected_tokens is not None:
            return self.expected_tokens
        raise ValueError(
            f"the length in tokens of an image ({self.format}, {len(self.data)} bytes) depends on "
            f"the model"
        )


@dataclass(frozen=True, slots=True)
class ImageAssetPointerChunk:
    """Refer to an image that a service stores, by its address.

    Models of this project cannot read it: to_ints() raises ValueError.
    """

    format: Literal["png", "jpeg"]
    location: str
    expected_tokens: int | None = None
    type: Literal["image_asset_pointer"] = "image_asset_pointer"

    @property
    def length(self) -> int:
        if self.expected_tokens is not None:
            return self.expected_tokens
        raise ValueError(
            f"the length in tokens of the image at {self.location} depends on the model"
        )


Chunk = EncodedTextChunk | ImageChunk | ImageAssetPointerChunk
ModelInputChunk: TypeAlias = Chunk
PlacedImage: TypeAlias = tuple[int, ImageChunk]  # (position of its first token, the image)


@dataclass(frozen=True, slots=True)
class ModelInput:
    """Hold the input of a model: chunks of text tokens (and images, for vision models)."""

    chunks: Sequence[Chunk] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "chunks", tuple(self.chunks))

    @classmethod
    def from_ints(cls, tokens: Sequence[int]) -> ModelInput:
        # EncodedTextChunk copies the list
        return cls(
            (EncodedTextChunk(tokens if isinstance(tokens, list) else [int(t) for t in tokens]),)
        )

    @classmethod
    def empty(cls) -> ModelInput:
        return cls(())

    def to_ints(self) -> list[int]:
        tokens: list[int] = []
        for chunk in self.chunks:
            if not isinstance(chunk, EncodedTextChunk):
                raise ValueError(
                    f"to_ints() supports only text chunks, this input holds an {chunk.type} chunk"
                )
            tokens.extend(chunk.tokens)
        return tokens

    @classmethod
    def of(cls, tokens: Sequence[int], images: Sequence[PlacedImage] = ()) -> ModelInput:
        """Build an input of `tokens` that include the tokens of `images` at their positions.

        An extension. Raises ValueError if an image's tokens are cut off or not at its position.
        """
        if not images:
            return cls.from_ints(tokens)
        chunks: list[Chunk] = []
        at = 0
        for offset, image in images:
            end = offset + image.length
            if offset < at or image.tokens is None or tuple(tokens[offset:end]) != image.tokens:
                raise ValueError(
                    f"the {image.length} tokens of an image are not at position {offset} of "
                    f"{len(tokens)} tokens"
                )
            chunks += [EncodedTextChunk(tokens[at:offset])] if offset > at else []
            chunks.append(image)
            at = end
        return cls((*chunks, *([EncodedTextChunk(tokens[at:])] if len(tokens) > at else [])))

    def token_ids(self) -> list[int]:
        """Return the ids of all chunks; for images the ids that the model reads.

        An extension. Callers that drop the images must use `to_ints`. Raises ValueError if an image
        has no ids yet.
        """
        tokens: list[int] = []
        for chunk in self.chunks:
            chunk_tokens = getattr(chunk, "tokens", None)
            if chunk_tokens is None:
                raise ValueError(
                    f"this input holds an {chunk.type} chunk that no model has processed: its "
                    "tokens are unknown"
                )
            tokens.extend(chunk_tokens)
        return tokens

    def images_with_positions(self) -> tuple[PlacedImage, ...]:
        """Return the images, each with the position of its first token. An extension."""
        if all(isinstance(chunk, EncodedTextChunk) for chunk in self.chunks):
            return ()
        images: list[PlacedImage] = []
        at = 0
        for chunk in self.chunks:
            if isinstance(chunk, ImageChunk):
                images.append((at, chunk))
            at += chunk.length
        return tuple(images)

    def truncate(self, length: int) -> ModelInput:
        """Return the first `length` tokens, less if these would end within an image (an
        extension).
        """
        images = self.images_with_positions()
        cut = min([length, *(at for at, image in images if at + image.length > length)])
        return ModelInput.of(
            self.token_ids()[:cut], [(at, image) for at, image in images if at < cut]
        )

    @property
    def length(self) -> int:
        return sum(chunk.length for chunk in self.chunks)

    def append(self, chunk: Chunk) -> ModelInput:
        return ModelInput((*self.chunks, chunk))

    def append_int(self, token: int) -> ModelInput:
        return self.append(EncodedTextChunk([int(token)]))
