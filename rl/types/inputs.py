"""What a model reads: text tokens, and images for those that take them. Names and fields as in
Tinker's client.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias


@dataclass(frozen=True, slots=True)
class EncodedTextChunk:
    """A run of token ids, kept as a list of its own: what the caller does to his afterwards changes
    nothing.
    """

    tokens: Sequence[int]
    type: Literal["encoded_text"] = "encoded_text"

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "tokens", list(self.tokens))
        except TypeError as error:
            raise ValueError(
                f"a chunk's tokens are a list of token ids, got {self.tokens!r:.80}"
            ) from error

    @property
    def length(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class ImageChunk:
    """An image as png or jpeg bytes. `length` is known only to a vision model's processor.

    `expected_tokens`: how many tokens it is thought to take, checked against what it takes.
    `tokens` (extension): the ids that stand for it in a model's input, once that model's reader has
    looked at it (`rl.images`); from its first image token to its last.
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
            f"the length in tokens of an image ({self.format}, {len(self.data)} bytes) depends on the model"
        )


@dataclass(frozen=True, slots=True)
class ImageAssetPointerChunk:
    """An image that lies with a service, by its address. Models here read text: to_ints() refuses
    it.
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
PlacedImage: TypeAlias = tuple[int, ImageChunk]  # where its first token stands, and the image


@dataclass(frozen=True, slots=True)
class ModelInput:
    """What a model reads: chunks of text tokens (and images, for models that take them)."""

    chunks: Sequence[Chunk] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "chunks", tuple(self.chunks))

    @classmethod
    def from_ints(cls, tokens: Sequence[int]) -> ModelInput:
        # which copies
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
                    f"to_ints() reads text chunks alone, this input holds an {chunk.type} chunk"
                )
            tokens.extend(chunk.tokens)
        return tokens

    @classmethod
    def of(cls, tokens: Sequence[int], images: Sequence[PlacedImage] = ()) -> ModelInput:
        """An extension: these tokens, among which those of `images` stand where they say.
        ValueError where one is cut off or not there.
        """
        if not images:
            return cls.from_ints(tokens)
        chunks: list[Chunk] = []
        at = 0
        for offset, image in images:
            end = offset + image.length
            if offset < at or image.tokens is None or tuple(tokens[offset:end]) != image.tokens:
                raise ValueError(
                    f"the {image.length} tokens of an image do not stand at position {offset} of {len(tokens)} tokens"
                )
            chunks += [EncodedTextChunk(tokens[at:offset])] if offset > at else []
            chunks.append(image)
            at = end
        return cls((*chunks, *([EncodedTextChunk(tokens[at:])] if len(tokens) > at else [])))

    def flat(self) -> list[int]:
        """An extension: the ids of all chunks, those of an image as its model reads it. Who drops
        the images must use `to_ints`.
        """
        tokens: list[int] = []
        for chunk in self.chunks:
            found = getattr(chunk, "tokens", None)
            if found is None:
                raise ValueError(
                    f"this input holds an {chunk.type} chunk, and no model has looked at it: its tokens are not known"
                )
            tokens.extend(found)
        return tokens

    def placed(self) -> tuple[PlacedImage, ...]:
        """An extension: the images, each with where its first token stands."""
        if all(isinstance(chunk, EncodedTextChunk) for chunk in self.chunks):
            return ()
        found: list[PlacedImage] = []
        at = 0
        for chunk in self.chunks:
            if isinstance(chunk, ImageChunk):
                found.append((at, chunk))
            at += chunk.length
        return tuple(found)

    def cut(self, length: int) -> ModelInput:
        """An extension: the first `length` tokens. ValueError where that would cut an image in two."""
        return ModelInput.of(
            self.flat()[:length], [(at, image) for at, image in self.placed() if at < length]
        )

    @property
    def length(self) -> int:
        return sum(chunk.length for chunk in self.chunks)

    def append(self, chunk: Chunk) -> ModelInput:
        return ModelInput((*self.chunks, chunk))

    def append_int(self, token: int) -> ModelInput:
        return self.append(EncodedTextChunk([int(token)]))
