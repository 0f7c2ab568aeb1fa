"""`ImageReader`: what one model makes of images. Driver, learner and sampler ask the same reader,
which looks at an image once.

An image's length in tokens is known from here on, whoever asks (context limits, budgets, plans):
its chunk carries its tokens.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rl.errors import BadRequestError, UserError
from rl.images.families import FAMILIES
from rl.images.given import opened
from rl.types import ImageAssetPointerChunk, ImageChunk, ModelInput, PlacedImage

if TYPE_CHECKING:
    from torch import Tensor

_NOTED = "image_reader"  # on a model, and on the tokenizer that came with it
_KEPT_BYTES = 1 << 30  # of tensors of images seen lately


@dataclass(frozen=True, slots=True)
class Picture:
    """One image, read. `text`: what stands for it. `count`: image tokens in it. `tensors`: of the
    image processor.
    """

    text: str
    count: int
    tensors: dict[str, Any]

    @property
    def size(self) -> int:
        return sum(
            one.numel() * one.element_size()
            for one in self.tensors.values()
            if hasattr(one, "numel")
        )


class ImageReader:
    """For one model (its config, tokenizer and image processor). UserError for an architecture
    whose images are not known here.
    """

    def __init__(self, config: Any, tokenizer: Any, image_processor: Any):
        if config.model_type not in FAMILIES:
            raise UserError(
                f"images are not known for the architecture {config.model_type!r}, of which the text alone can be trained; "
                f"known are {', '.join(FAMILIES)}"
            )
        self.family = FAMILIES[config.model_type](config, tokenizer, image_processor)
        self.image_token_id = self.family.image_token_id
        # What is fed in the place of an image token that the policy drew after an image, on both
        # sides: the model takes every such token for a piece of an image that it was given, and the
        # counts would not agree. Rows without images are read as they are.
        self.stand_in = 1 if self.image_token_id == 0 else 0
        self._start()

    def _start(self) -> None:
        self._lock = threading.Lock()
        self._pictures: OrderedDict[bytes, Picture] = OrderedDict()
        self._held = 0

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in vars(self).items()
            if name not in ("_lock", "_pictures", "_held")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start()

    def __deepcopy__(self, memo: Any) -> ImageReader:
        return self  # a copy of the model sees through the same eyes

    # ------------------------------------------------------------------------------------ one image

    def read(self, chunk: ImageChunk) -> Picture:
        """The image as the model takes it; images seen lately are kept."""
        with self._lock:
            found = self._pictures.get(chunk.data)
            if found is not None:
                self._pictures.move_to_end(chunk.data)
                return found
        tensors = self.family.process(opened(chunk))
        text = self.family.expansion(tensors)
        picture = Picture(text, text.count(self.family.image_token), tensors)
        with self._lock:
            if chunk.data not in self._pictures:
                self._pictures[chunk.data] = picture
                self._held += picture.size
            while self._held > _KEPT_BYTES and len(self._pictures) > 1:
                self._held -= self._pictures.popitem(last=False)[1].size
        return picture

    def settled(self, given: ModelInput) -> ModelInput:
        """The same input, its images with their tokens. UserError for an image that takes others
        than were expected.
        """
        if not any(
            isinstance(chunk, (ImageChunk, ImageAssetPointerChunk)) for chunk in given.chunks
        ):
            return given
        return ModelInput(
            [
                self._settled(chunk) if chunk.type != "encoded_text" else chunk
                for chunk in given.chunks
            ]
        )

    def _settled(self, chunk: Any) -> ImageChunk:
        if not isinstance(chunk, ImageChunk):
            raise BadRequestError(
                f"the image at {chunk.location} lies elsewhere: fetch it and give ImageChunk(data=its bytes, format=...)"
            )
        tokens = chunk.tokens
        if tokens is None:
            ids = list(
                self.family.tokenizer.encode(self.read(chunk).text, add_special_tokens=False)
            )
            own = [i for i, token in enumerate(ids) if token == self.image_token_id]
            tokens = tuple(ids[own[0] : own[-1] + 1])
        elif tokens.count(self.image_token_id) != self.read(chunk).count:
            raise BadRequestError(
                f"an image takes {self.read(chunk).count} image tokens in this model, its chunk has tokens of another"
            )
        if chunk.expected_tokens is not None and chunk.expected_tokens != len(tokens):
            raise BadRequestError(
                f"an image takes {len(tokens)} tokens in this model, expected_tokens says {chunk.expected_tokens}: leave it out or set that"
            )
        return replace(chunk, tokens=tokens)

    def located(self, tokens: Sequence[int], images: Sequence[ImageChunk]) -> ModelInput:
        """Tokens in which the texts of `images` stand, in that order, as an input. UserError where
        they do not fit.
        """
        at, placed = 0, []
        own = [i for i, token in enumerate(tokens) if token == self.image_token_id]
        for image in images:
            count = self.read(image).count
            mine = own[at : at + count]
            if len(mine) < count:
                break
            placed.append(
                (
                    mine[0],
                    replace(
                        image, tokens=tuple(tokens[mine[0] : mine[-1] + 1]), expected_tokens=None
                    ),
                )
            )
            at += count
        if at != len(own) or len(placed) != len(images):
            wanted = sum(self.read(image).count for image in images)
            raise UserError(
                f"{len(images)} images take {wanted} image tokens, the tokens of the text hold {len(own)}: is the template another model's?"
            )
        return ModelInput.of(list(tokens), placed)

    # -------------------------------------------------------------------------------------- a batch

    def inputs(
        self,
        model: Any,
        ids: Tensor,
        rows: Sequence[Sequence[PlacedImage]],
        starts: Sequence[int],
        lengths: Sequence[int],
    ) -> dict[str, Tensor]:
        """The forward's arguments (input_ids among them) of a padded batch [R, L], on the device of
        `ids`.

        rows      the images of each row, placed in its own tokens, which begin at `starts` and are
        `lengths` long in `ids` All rows have images, or none has: then it is the tokens alone.
        ValueError for a batch of both.
        """
        import torch

        if not any(rows):
            return {"input_ids": ids}
        if not all(rows):
            raise ValueError(
                "rows with images and rows without are different batches: a text's image tokens would be taken for an image's"
            )
        types = torch.zeros_like(ids)
        for r, images in enumerate(rows):
            for at, image in images:
                span = slice(starts[r] + at, starts[r] + at + image.length)
                types[r, span] = (ids[r, span] == self.image_token_id).to(types.dtype)
        found = {
            "input_ids": ids.masked_fill((ids == self.image_token_id) & (types == 0), self.stand_in)
        }
        pictures = [[self.read(image).tensors for _, image in images] for images in rows]
        found |= {
            name: one.to(ids.device)
            for name, one in self.family.pixels([one for row in pictures for one in row]).items()
        }
        if self.family.types_as:
            found[self.family.types_as] = types
        positions = []
        for r, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            own = slice(start, start + length)
            self._check_apart(types[r, own], rows[r])
            positions.append(
                self.family.positions(model, ids[r, own].cpu(), types[r, own].cpu(), pictures[r])
            )
        if positions[0] is not None:
            laid = torch.zeros(3, *ids.shape, dtype=torch.int64)
            for r, (one, start) in enumerate(zip(positions, starts, strict=True)):
                assert one is not None
                laid[:, r, start : start + one.shape[1]] = one
            found["position_ids"] = laid.to(ids.device)
        return found

    def fed(self, ids: Tensor, sees: Tensor) -> Tensor:
        """Drawn tokens [R, 1], as rows that saw images (`sees`, bool [R]) read them."""
        return ids.masked_fill(
            (ids == self.image_token_id) & sees[:, None].to(ids.device), self.stand_in
        )

    def _check_apart(self, types: Tensor, images: Sequence[PlacedImage]) -> None:
        """Models take neighbouring image tokens for one image."""
        for (at, image), (following, _) in zip(images, images[1:], strict=False):
            if at + image.length == following:
                raise BadRequestError(
                    f"two images stand side by side at position {following}, without a token between, and would be taken for one: put the "
                    "model's own marks around each, as its chat template does"
                )

    def save(self, folder: Any) -> None:
        """The image processor's file beside a model's, so that the folder reads images again."""
        self.family.image_processor.save_pretrained(str(folder))


def note_reader(owner: Any, reader: ImageReader | None) -> None:
    """Keeps the reader with a model or a tokenizer."""
    if owner is not None and reader is not None:
        setattr(owner, _NOTED, reader)


def reader_of(owner: Any) -> ImageReader | None:
    """The reader that was noted with a model or tokenizer; None for one of text alone."""
    found = vars(owner).get(_NOTED) if hasattr(owner, "__dict__") else None
    return found if isinstance(found, ImageReader) else None


def without_reader(name: str) -> UserError:
    """What is raised where a model that reads text alone is given an image."""
    return UserError(
        f"{name} reads text alone, and was given an image: take a vision-language model (Qwen3-VL, Gemma 3, SmolVLM), or leave it out"
    )
