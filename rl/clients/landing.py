"""Transfer weights from learner ranks to sampler ranks in chunks, while both keep working.

Rank 0 copies the weights that an update has changed into host memory, after which the learners are
free. The bytes are sent over the bridge group in chunks. Each chunk is a verb of the samplers,
executed between two step requests of a stream. The chunks are written into a decoder that no
request samples from, which becomes the new version when all have arrived. (rl.clients.far sends
them.)
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from rl.clients.bases import Key
from rl.clients.drawing import Drawing
from rl.clients.versions import SamplerVersion
from rl.learner import ModelSpec
from rl.models import LoadedModel, add_lora
from rl.sampler import Decoder, make_decoder

PIECE_BYTES = 4 * 2**20  # a step request of a stream waits for at most a single chunk
STRETCH = 2**20  # elements of a tensor that are converted at a time


@dataclass(frozen=True)
class Staged:
    """Hold a copy of a model's weights, unsharded and in host memory. `stands_on`: what its base is
    loaded from (base, tokenizer, seed).
    """

    model_id: int
    spec: ModelSpec
    stands_on: Key
    version: int
    tensors: Mapping[str, Tensor]

    def manifest(self) -> Manifest:
        """Return the shapes and dtypes of the tensors, without their data."""
        shapes = {
            name: (tuple(tensor.shape), tensor.dtype) for name, tensor in self.tensors.items()
        }
        return Manifest(self.model_id, self.spec, self.stands_on, self.version, shapes)

    def pieces(
        self, size: int = PIECE_BYTES, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> Iterator[Piece]:
        """Yield the bytes of all tensors in order, at most `size` bytes in each chunk. `dtypes`: by
        name, the dtype of tensors that are sent in another dtype.
        """
        parts: list[tuple[str, int, np.ndarray]] = []
        space = size
        for name, tensor in self.tensors.items():
            flat, dtype = tensor.reshape(-1), (dtypes or {}).get(name, tensor.dtype)
            for low in range(0, len(flat), STRETCH):
                # converting a whole embedding would delay the streams
                raw, offset = raw_bytes(flat[low : low + STRETCH].to(dtype)), 0
                while offset < len(raw):
                    parts.append(
                        (name, low * dtype.itemsize + offset, raw[offset : offset + space])
                    )
                    offset, space = offset + len(parts[-1][2]), space - len(parts[-1][2])
                    if space == 0:
                        yield Piece.of(parts)
                        parts, space = [], size
        if parts:
            yield Piece.of(parts)


@dataclass(frozen=True)
class Manifest:
    """Describe a transfer: the model's version, and the shape and dtype of each tensor by name."""

    model_id: int
    spec: ModelSpec
    stands_on: Key
    version: int
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]

    def narrower(self, decoder: Decoder) -> dict[str, torch.dtype]:
        """Return by name the dtype of tensors that this decoder stores in fewer bytes. They are
        rounded before they are sent, with the same result.
        """
        dtypes = {name: (dtype, decoder.held_in(name)) for name, (_, dtype) in self.tensors.items()}
        return {
            name: decoder_dtype
            for name, (sent_dtype, decoder_dtype) in dtypes.items()
            if decoder_dtype is not None and decoder_dtype.itemsize < sent_dtype.itemsize
        }

    def sizes(self) -> dict[str, int]:
        """Return the number of bytes of each nonempty tensor by name."""
        sizes = {
            name: int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            for name, (shape, dtype) in self.tensors.items()
        }
        return {name: size for name, size in sizes.items() if size}

    def crossing(self, dtypes: Mapping[str, torch.dtype]) -> Manifest:
        """Return the manifest with these dtypes."""
        return replace(
            self,
            tensors={
                name: (shape, dtypes.get(name, dtype))
                for name, (shape, dtype) in self.tensors.items()
            },
        )


@dataclass(frozen=True)
class Piece:
    """Hold bytes of tensors as (name, byte offset, bytes). `checksum`: CRC-32 of all of them."""

    parts: Sequence[tuple[str, int, np.ndarray]]
    checksum: int

    @classmethod
    def of(cls, parts: Sequence[tuple[str, int, np.ndarray]]) -> Piece:
        """Return a chunk of these parts with its checksum."""
        return cls(parts, _checksum(parts))


@dataclass
class Landing:
    """Receive a version in transfer. `left`: bytes still to come of each tensor, by name; `open`:
    partially received tensors.
    """

    manifest: Manifest
    decoder: Decoder
    loaded: LoadedModel
    begun: float
    left: dict[str, int]
    open: dict[str, Tensor] = field(default_factory=dict)

    def take(self, piece: Piece) -> None:
        """Write a chunk, and load each completed tensor into the decoder. Raises RuntimeError if
        the checksum differs.
        """
        if _checksum(piece.parts) != piece.checksum:
            raise RuntimeError(
                f"weights of version {self.manifest.version} were corrupted in transfer (the "
                f"checksum differs), at tensors {self._names(piece)}"
            )
        for name, offset, raw in piece.parts:
            shape, dtype = self.manifest.tensors[name]
            if name not in self.open:
                self.open[name] = torch.empty(shape, dtype=dtype)
            raw_bytes(self.open[name])[offset : offset + len(raw)] = raw
            self.left[name] -= len(raw)
            if self.left[name] == 0:
                self.decoder.load_([(name, self.open.pop(name))])
                del self.left[name]

    def check(self) -> None:
        """Raise RuntimeError if bytes are missing."""
        if self.left:
            missing = sorted(self.left)
            raise RuntimeError(
                f"the transfer of version {self.manifest.version} is incomplete: {len(missing)} "
                f"tensors are missing, {missing[:3]}"
            )

    @staticmethod
    def _names(piece: Piece) -> str:
        """Return the first tensor names of a chunk, for an error message."""
        return ", ".join(name for name, _, _ in piece.parts[:3])


class Hangar(Drawing):
    """Execute verbs on a rank that samples and does not learn, and receive weights from the learner
    ranks.
    """

    def __init__(self, *given: object):
        super().__init__(*given)  # type: ignore[arg-type]
        self.shells: dict[int, LoadedModel] = {}
        self.specs: dict[int, ModelSpec] = {}  # by model: the spec that its decoders were made from
        # by model; decoders that are not in use receive new weights
        self.decoders: dict[int, list[Decoder]] = {}
        self.landings: dict[int, Landing] = {}

    def forget_all(self) -> None:
        super().forget_all()
        for model_id in list(self.shells):
            self.forget_model(model_id)

    def forget_model(self, model_id: int) -> None:
        self.shells.pop(model_id, None)
        self.specs.pop(model_id, None)
        self.decoders.pop(model_id, None)

    def forget_version(self, version_id: int) -> None:
        self.landings.pop(version_id, None)
        super().forget_version(version_id)

    def begin_landing(self, version_id: int, manifest: Manifest) -> dict[str, torch.dtype]:
        """Prepare to receive weights. A model's frozen base is read at its first transfer, from the
        source that the learners read.

        Return the dtypes in which tensors are to be sent, by name, if they differ from those of the
        manifest.
        """
        start_time = time.perf_counter()
        decoder = self._free(manifest)
        manifest = manifest.crossing(dtypes := manifest.narrower(decoder))
        self.landings[version_id] = Landing(
            manifest, decoder, self.shells[manifest.model_id], start_time, manifest.sizes()
        )
        return dtypes

    def land(self, version_id: int, piece: Piece) -> None:
        """Receive a chunk."""
        self.landings[version_id].take(piece)

    def end_landing(self, version_id: int) -> dict[str, object]:
        """Make the received version available for sampling. Return what `snapshot` returns."""
        landing = self.landings.pop(version_id)
        landing.check()
        if self.accelerator.device.type == "cuda":
            torch.cuda.synchronize()
        version = landing.manifest.version
        self.versions[version_id] = SamplerVersion(
            landing.decoder, landing.loaded, version, None, learned=True
        )
        return {"version": version, "seconds": time.perf_counter() - landing.begun, "mixes": None}

    def base_version(self, version_id: int, manifest: Manifest) -> dict[str, object]:
        """Create a version of the base model under a LoRA adapter: the adapter's B
        matrices are 0.
        """
        start_time = time.perf_counter()
        decoder = self._free(manifest)
        loaded = self.shells[manifest.model_id]
        for name, parameter in loaded.model.named_parameters():
            if ".lora_B." in name or ".lora_embedding_B." in name:
                decoder.load_([(name, torch.zeros(parameter.shape))])
        self.versions[version_id] = SamplerVersion(decoder, loaded, 0, None)
        return {"version": 0, "seconds": time.perf_counter() - start_time, "mixes": None}

    def _free(self, manifest: Manifest) -> Decoder:
        """Return a decoder of the model that no version, stream or transfer uses."""
        if self.specs.setdefault(manifest.model_id, manifest.spec).lora != manifest.spec.lora:
            # the adapter's scale has changed, and a decoder's scale is fixed
            self.forget_model(manifest.model_id)
            self.specs[manifest.model_id] = manifest.spec
        decoders = self.decoders.setdefault(manifest.model_id, [])
        if not decoders:
            decoders.append(self._first(manifest))
        busy = {id(version.decoder) for version in self.versions.values()}
        busy |= {id(stream.engine.decoder) for stream in self.streams.values()}
        busy |= {id(landing.decoder) for landing in self.landings.values()}
        for decoder in decoders:
            if id(decoder) not in busy:
                return decoder
        decoders.append(decoders[0].fork())
        return decoders[-1]

    def _first(self, manifest: Manifest) -> Decoder:
        """Load the model and return its first decoder."""
        base, tokenizer, seed = manifest.stands_on
        loaded = self.bases.load(base, tokenizer, seed, manifest.spec.lora is not None)
        loaded.name = manifest.spec.base_model
        if manifest.spec.lora is not None:
            loaded = add_lora(loaded, manifest.spec.lora)
        device, kind = self.accelerator.device, self.settings.sampler.kind
        loaded.model.to(device)
        self.shells[manifest.model_id] = loaded
        base_decoder = self._base(manifest.stands_on) if manifest.spec.lora is not None else None
        decoder = make_decoder(
            loaded.model, dtype=self.sampler_dtype, device=device, kind=kind, base=base_decoder
        )
        if not self.bases.shares:
            # the decoder has copied the weights: only names and shapes of this model are used later
            loaded.model.to("meta")
        return decoder


def raw_bytes(tensor: Tensor) -> np.ndarray:
    """Return the memory of a (contiguous host) tensor as uint8 [bytes]."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def _checksum(parts: Sequence[tuple[str, int, np.ndarray]]) -> int:
    """Return the CRC-32 of names, offsets, lengths and bytes."""
    total = 0
    for name, offset, raw in parts:
        total = zlib.crc32(raw.data, zlib.crc32(f"{name} {offset} {len(raw)}".encode(), total))
    return total
