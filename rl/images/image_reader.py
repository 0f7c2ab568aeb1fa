"""Process images for a model. Driver, learner and sampler share an `ImageReader`.

An image is processed once. Its chunk then carries its tokens, so its length in tokens is known to
context limits, budgets and plans.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rl.errors import BadRequestError, UserError
from rl.images.image_input import open_image
from rl.images.vision_families import VISION_FAMILIES
from rl.types import ImageAssetPointerChunk, ImageChunk, ModelInput, PlacedImage

if TYPE_CHECKING:
    from torch import Tensor

_READER_ATTRIBUTE = "image_reader"  # attribute of a model and of its tokenizer
_CACHE_BYTES = 1 << 30  # maximum size of the cache of processed images


@dataclass(frozen=True, slots=True)
class ProcessedImage:
    """Hold a processed image.

    `text`: the text that represents it. `count`: its number of image tokens. `tensors`: the tensors
    of the image processor.
    """

    text: str
    count: int
    tensors: dict[str, Any]

    @property
    def size(self) -> int:
        """Return the size of the tensors in bytes."""
        return sum(
            tensor.numel() * tensor.element_size()
            for tensor in self.tensors.values()
            if hasattr(tensor, "numel")
        )


class ImageReader:
    """Process images for a model (its config, tokenizer and image processor).

    Raises UserError if the architecture's images are not supported.
    """

    def __init__(self, config: Any, tokenizer: Any, image_processor: Any):
        if config.model_type not in VISION_FAMILIES:
            raise UserError(
                f"images are not supported for the architecture {config.model_type!r}, which can "
                f"be trained on text only; supported are {', '.join(VISION_FAMILIES)}"
            )
        self.family = VISION_FAMILIES[config.model_type](config, tokenizer, image_processor)
        self.image_token_id = self.family.image_token_id
        # Learner and sampler feed this token in place of an image token that the policy sampled
        # after an image. The model treats every image token as part of an input image, and the
        # counts would not match. Rows without images are not changed.
        self.replacement_token_id = 1 if self.image_token_id == 0 else 0
        self._init_cache()

    def _init_cache(self) -> None:
        """Create the lock and the empty cache."""
        self._lock = threading.Lock()
        self._pictures: OrderedDict[bytes, ProcessedImage] = OrderedDict()
        self._held = 0

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in vars(self).items()
            if name not in ("_lock", "_pictures", "_held")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._init_cache()

    def __deepcopy__(self, memo: Any) -> ImageReader:
        return self  # copies of the model share the reader

    # -------------------------------------------------------------------------------- single images

    def process(self, chunk: ImageChunk) -> ProcessedImage:
        """Return the processed image, cached if it was used recently."""
        with self._lock:
            cached = self._pictures.get(chunk.data)
            if cached is not None:
                self._pictures.move_to_end(chunk.data)
                return cached
        tensors = self.family.process(open_image(chunk))
        text = self.family.expansion(tensors)
        picture = ProcessedImage(text, text.count(self.family.image_token), tensors)
        with self._lock:
            if chunk.data not in self._pictures:
                self._pictures[chunk.data] = picture
                self._held += picture.size
            while self._held > _CACHE_BYTES and len(self._pictures) > 1:
                self._held -= self._pictures.popitem(last=False)[1].size
        return picture

    def resolve_tokens(self, model_input: ModelInput) -> ModelInput:
        """Return the input with the tokens of its images filled in.

        Raises BadRequestError if an image's tokens or their number differ from the expected ones.
        """
        if not any(
            isinstance(chunk, (ImageChunk, ImageAssetPointerChunk)) for chunk in model_input.chunks
        ):
            return model_input
        return ModelInput(
            [
                self._resolve_chunk(chunk) if chunk.type != "encoded_text" else chunk
                for chunk in model_input.chunks
            ]
        )

    def _resolve_chunk(self, chunk: Any) -> ImageChunk:
        """Return an image chunk with its tokens."""
        if not isinstance(chunk, ImageChunk):
            raise BadRequestError(
                f"the image at {chunk.location} is not local: download it and pass "
                "ImageChunk(data=its bytes, format=...)"
            )
        tokens = chunk.tokens
        if tokens is None:
            ids = list(
                self.family.tokenizer.encode(self.process(chunk).text, add_special_tokens=False)
            )
            positions = [i for i, token in enumerate(ids) if token == self.image_token_id]
            tokens = tuple(ids[positions[0] : positions[-1] + 1])
        elif tokens.count(self.image_token_id) != self.process(chunk).count:
            raise BadRequestError(
                f"an image takes {self.process(chunk).count} image tokens in this model, "
                "but its chunk has the tokens of another model"
            )
        if chunk.expected_tokens is not None and chunk.expected_tokens != len(tokens):
            raise BadRequestError(
                f"an image takes {len(tokens)} tokens in this model, expected_tokens is "
                f"{chunk.expected_tokens}: omit expected_tokens or correct it"
            )
        return replace(chunk, tokens=tokens)

    def place_images(self, tokens: Sequence[int], images: Sequence[ImageChunk]) -> ModelInput:
        """Return tokens that contain the texts of `images`, in order, as an input with placed
        images.

        Raises UserError if tokens and images do not match.
        """
        at, placed = 0, []
        positions = [i for i, token in enumerate(tokens) if token == self.image_token_id]
        for image in images:
            count = self.process(image).count
            span = positions[at : at + count]
            if len(span) < count:
                break
            placed.append(
                (
                    span[0],
                    replace(
                        image, tokens=tuple(tokens[span[0] : span[-1] + 1]), expected_tokens=None
                    ),
                )
            )
            at += count
        if at != len(positions) or len(placed) != len(images):
            expected = sum(self.process(image).count for image in images)
            raise UserError(
                f"{len(images)} images take {expected} image tokens, the text has "
                f"{len(positions)}: check that the template belongs to this model"
            )
        return ModelInput.of(list(tokens), placed)

    # -------------------------------------------------------------------------------------- a batch

    def model_inputs(
        self,
        model: Any,
        ids: Tensor,
        rows: Sequence[Sequence[PlacedImage]],
        starts: Sequence[int],
        lengths: Sequence[int],
    ) -> dict[str, Tensor]:
        """Return the forward's arguments (with input_ids) of a padded batch [R, L], on the device
        of `ids`.

        `rows`: the images of each row, placed in the row's tokens. These start at `starts` and are
        `lengths` long in `ids`. Either all rows have images or no row has; without images the only
        argument is input_ids. Raises ValueError for a mixed batch.
        """
        import torch

        if not any(rows):
            return {"input_ids": ids}
        if not all(rows):
            raise ValueError(
                "rows with images and rows without need separate batches: "
                "image tokens in a text row would be treated as an image"
            )
        types = torch.zeros_like(ids)
        for r, images in enumerate(rows):
            for at, image in images:
                span = slice(starts[r] + at, starts[r] + at + image.length)
                types[r, span] = (ids[r, span] == self.image_token_id).to(types.dtype)
        arguments = {
            "input_ids": ids.masked_fill(
                (ids == self.image_token_id) & (types == 0), self.replacement_token_id
            )
        }
        pictures = [[self.process(image).tensors for _, image in images] for images in rows]
        arguments |= {
            name: value.to(ids.device)
            for name, value in self.family.pixels(
                [value for row in pictures for value in row]
            ).items()
        }
        if self.family.token_types_name:
            arguments[self.family.token_types_name] = types
        positions = []
        for r, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            row_span = slice(start, start + length)
            self._check_not_adjacent(types[r, row_span], rows[r])
            positions.append(
                self.family.positions(
                    model, ids[r, row_span].cpu(), types[r, row_span].cpu(), pictures[r]
                )
            )
        if positions[0] is not None:
            position_ids = torch.zeros(3, *ids.shape, dtype=torch.int64)
            for r, (value, start) in enumerate(zip(positions, starts, strict=True)):
                assert value is not None
                position_ids[:, r, start : start + value.shape[1]] = value
            arguments["position_ids"] = position_ids.to(ids.device)
        return arguments

    def replace_image_tokens(self, ids: Tensor, has_images: Tensor) -> Tensor:
        """Replace the image tokens among sampled tokens [R, 1] in rows with images (`has_images`,
        bool [R]).

        The replacement is `replacement_token_id`.
        """
        return ids.masked_fill(
            (ids == self.image_token_id) & has_images[:, None].to(ids.device),
            self.replacement_token_id,
        )

    def _check_not_adjacent(self, types: Tensor, images: Sequence[PlacedImage]) -> None:
        """Raise BadRequestError for adjacent images: models treat adjacent image tokens as a single
        image.
        """
        for (at, image), (following, _) in zip(images, images[1:], strict=False):
            if at + image.length == following:
                raise BadRequestError(
                    f"two images are adjacent at position {following}, without a token between "
                    "them, and would be treated as a single image: put the model's marker tokens "
                    "around each image, as its chat template does"
                )

    def save(self, folder: Any) -> None:
        """Save the image processor in a model's folder, so that the folder supports images when
        loaded.
        """
        self.family.image_processor.save_pretrained(str(folder))


def attach_image_reader(owner: Any, reader: ImageReader | None) -> None:
    """Attach the reader to a model or a tokenizer."""
    if owner is not None and reader is not None:
        setattr(owner, _READER_ATTRIBUTE, reader)


def get_image_reader(owner: Any) -> ImageReader | None:
    """Return the reader attached to a model or tokenizer; None for a text-only model."""
    reader = vars(owner).get(_READER_ATTRIBUTE) if hasattr(owner, "__dict__") else None
    return reader if isinstance(reader, ImageReader) else None


def make_no_images_error(name: str) -> UserError:
    """Return the error for an image that was passed to a text-only model."""
    return UserError(
        f"{name} supports only text, but got an image: use a vision-language model "
        "(Qwen3-VL, Gemma 3, SmolVLM), or omit the image"
    )
