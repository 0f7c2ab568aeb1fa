"""Define model inputs: text tokens, and images for vision models. Names and fields follow Tinker's
client.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from rl.errors import BadRequestError
from rl.types.number_lists import ArrayLists, pack_numbers


@dataclass(frozen=True, slots=True)
class EncodedTextChunk(ArrayLists):
    """Hold a copy of a run of token ids: later changes of the caller's list have no effect. Of an
    array of integers, which is not copied if it cannot be written, `tokens` is made when it is
    read.
    """

    tokens: Sequence[int]  # or an array of integers
    type: Literal["encoded_text"] = "encoded_text"

    def __post_init__(self) -> None:
        if _is_id_array(self.tokens):
            array: Any = self.tokens
            self._set_arrays({"tokens": array.copy() if array.flags.writeable else array})
            return
        try:
            object.__setattr__(self, "tokens", list(self.tokens))
        except TypeError as error:
            raise ValueError(
                f"a chunk's tokens must be a list of token ids, got {self.tokens!r:.80}"
            ) from error

    def __reduce__(self) -> tuple[Any, ...]:
        array = self._find_array("tokens")
        return EncodedTextChunk, (self.tokens if array is None else pack_numbers(array),)

    @property
    def length(self) -> int:
        return len(self.held_tokens())

    def held_tokens(self) -> Sequence[int] | np.ndarray:
        """Return the ids as they are held, a list or an array. An extension."""
        array = self._find_array("tokens")
        return self.tokens if array is None else array


def _is_id_array(tokens: object) -> bool:
    """Return whether tokens are an array of integers [tokens]."""
    return isinstance(tokens, np.ndarray) and tokens.ndim == 1 and tokens.dtype.kind in "iu"


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
    def from_ints(cls, tokens: Sequence[int] | np.ndarray) -> ModelInput:
        if isinstance(tokens, str):
            raise BadRequestError(
                "from_ints takes token ids, such as tokenizer.encode(text) returns; got the text "
                f"{tokens!r:.60}"
            )
        # EncodedTextChunk copies a list or an array
        whole = isinstance(tokens, list) or _is_id_array(tokens)
        ids: Any = tokens if whole else [int(t) for t in tokens]
        return cls((EncodedTextChunk(ids),))

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
    def of(
        cls, tokens: Sequence[int] | np.ndarray, images: Sequence[PlacedImage] = ()
    ) -> ModelInput:
        """Build an input of `tokens` that include the tokens of `images` at their positions.

        An extension. Raises ValueError if an image's tokens are cut off or not at its position.
        """
        if not images:
            return cls.from_ints(tokens)
        ids: list[int] = np.asarray(tokens).tolist()
        chunks: list[Chunk] = []
        at = 0
        for offset, image in images:
            end = offset + image.length
            if offset < at or image.tokens is None or tuple(ids[offset:end]) != image.tokens:
                raise ValueError(
                    f"the {image.length} tokens of an image are not at position {offset} of "
                    f"{len(ids)} tokens"
                )
            chunks += [EncodedTextChunk(ids[at:offset])] if offset > at else []
            chunks.append(image)
            at = end
        return cls((*chunks, *([EncodedTextChunk(ids[at:])] if len(ids) > at else [])))

    def token_ids(self) -> list[int]:
        """Return the ids of all chunks; for images the ids that the model reads.

        An extension. Callers that drop the images must use `to_ints`. Raises ValueError if an image
        has no ids yet.
        """
        tokens: list[int] = []
        for chunk in self.chunks:
            if isinstance(chunk, EncodedTextChunk):
                held = chunk.held_tokens()
                tokens.extend(held.tolist() if isinstance(held, np.ndarray) else held)
                continue
            chunk_tokens = getattr(chunk, "tokens", None)
            if chunk_tokens is None:
                raise ValueError(
                    f"this input holds an {chunk.type} chunk that no model has processed: its "
                    "tokens are unknown"
                )
            tokens.extend(chunk_tokens)
        return tokens

    def held_tokens(self) -> Sequence[int] | np.ndarray:
        """Return what `token_ids` returns, without a copy if the input is a single text. The result
        is not to be changed. An extension.
        """
        if len(self.chunks) == 1 and isinstance(self.chunks[0], EncodedTextChunk):
            return self.chunks[0].held_tokens()
        return self.token_ids()

    def with_arrays(self) -> ModelInput:
        """Return the same input with its texts held as arrays, which costs no time at later uses.
        An extension.
        """
        return ModelInput(
            [
                EncodedTextChunk(np.asarray(chunk.held_tokens(), np.int64))  # type: ignore[arg-type]
                if isinstance(chunk, EncodedTextChunk)
                else chunk
                for chunk in self.chunks
            ]
        )

    def token_array(self) -> np.ndarray:
        """Return what `token_ids` returns as int64 [tokens], which is not to be changed. An
        extension.
        """
        return np.asarray(self.held_tokens(), np.int64)

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
