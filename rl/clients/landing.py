"""Weights on their way from ranks that learn to ranks that sample, a piece at a time, so that both
go on meanwhile.

Rank 0 stages a copy of what an update has changed in its own memory, and the learners are free; its
bytes go over the bridge in pieces, each a verb of the samplers like any other, between two slices
of what they draw. They land in a decoder that nobody draws from yet, which is the new version once
all have. (rl.clients.far sends them.)
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

PIECE_BYTES = 4 * 2**20  # what a slice may have to wait for
STRETCH = 2**20  # numbers of a tensor that are rounded at once


@dataclass(frozen=True)
class Staged:
    """Weights of a model, whole and in host memory. `stands_on`: what its base is loaded from."""

    model_id: int
    spec: ModelSpec
    stands_on: Key
    version: int
    tensors: Mapping[str, Tensor]

    def manifest(self) -> Manifest:
        shapes = {
            name: (tuple(tensor.shape), tensor.dtype) for name, tensor in self.tensors.items()
        }
        return Manifest(self.model_id, self.spec, self.stands_on, self.version, shapes)

    def pieces(
        self, size: int = PIECE_BYTES, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> Iterator[Piece]:
        """The bytes of all tensors, in order, at most `size` of them in each; `dtypes`: of those
        that cross in another one, by name.
        """
        parts: list[tuple[str, int, np.ndarray]] = []
        room = size
        for name, tensor in self.tensors.items():
            flat, dtype = tensor.reshape(-1), (dtypes or {}).get(name, tensor.dtype)
            for low in range(0, len(flat), STRETCH):
                # a whole embedding would keep slices waiting
                raw, at = raw_bytes(flat[low : low + STRETCH].to(dtype)), 0
                while at < len(raw):
                    parts.append((name, low * dtype.itemsize + at, raw[at : at + room]))
                    at, room = at + len(parts[-1][2]), room - len(parts[-1][2])
                    if room == 0:
                        yield Piece.of(parts)
                        parts, room = [], size
        if parts:
            yield Piece.of(parts)


@dataclass(frozen=True)
class Manifest:
    """What is to come: a model's version, and by name the shape and dtype of each tensor."""

    model_id: int
    spec: ModelSpec
    stands_on: Key
    version: int
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]

    def narrower(self, decoder: Decoder) -> dict[str, torch.dtype]:
        """Tensors that this decoder keeps in fewer bytes, by name, and in which dtype: rounded
        before they cross they are the same.
        """
        held = {name: (dtype, decoder.held_in(name)) for name, (_, dtype) in self.tensors.items()}
        return {
            name: own
            for name, (sent, own) in held.items()
            if own is not None and own.itemsize < sent.itemsize
        }

    def sizes(self) -> dict[str, int]:
        """Bytes of each tensor that has any, by name."""
        found = {
            name: int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            for name, (shape, dtype) in self.tensors.items()
        }
        return {name: size for name, size in found.items() if size}

    def crossing(self, dtypes: Mapping[str, torch.dtype]) -> Manifest:
        """The same of tensors that cross in these dtypes."""
        return replace(
            self,
            tensors={
                name: (shape, dtypes.get(name, dtype))
                for name, (shape, dtype) in self.tensors.items()
            },
        )


@dataclass(frozen=True)
class Piece:
    """Bytes of tensors: (name, at which byte, bytes). `checksum`: of all of them."""

    parts: Sequence[tuple[str, int, np.ndarray]]
    checksum: int

    @classmethod
    def of(cls, parts: Sequence[tuple[str, int, np.ndarray]]) -> Piece:
        return cls(parts, _checksum(parts))


@dataclass
class Landing:
    """A version that is arriving. `left`: bytes of each tensor that are still to come, by name;
    `open`: tensors that have come in part.
    """

    manifest: Manifest
    decoder: Decoder
    loaded: LoadedModel
    begun: float
    left: dict[str, int]
    open: dict[str, Tensor] = field(default_factory=dict)

    def take(self, piece: Piece) -> None:
        if _checksum(piece.parts) != piece.checksum:
            raise RuntimeError(
                f"weights of version {self.manifest.version} arrived other than they were sent: {self._names(piece)}"
            )
        for name, at, raw in piece.parts:
            shape, dtype = self.manifest.tensors[name]
            if name not in self.open:
                self.open[name] = torch.empty(shape, dtype=dtype)
            raw_bytes(self.open[name])[at : at + len(raw)] = raw
            self.left[name] -= len(raw)
            if self.left[name] == 0:
                self.decoder.load_([(name, self.open.pop(name))])
                del self.left[name]

    def check(self) -> None:
        """RuntimeError where something has not come."""
        if self.left:
            missing = sorted(self.left)
            raise RuntimeError(
                f"the hand-over of version {self.manifest.version} is not whole: {len(missing)} tensors miss, {missing[:3]}"
            )

    @staticmethod
    def _names(piece: Piece) -> str:
        return ", ".join(name for name, _, _ in piece.parts[:3])


class Hangar(Drawing):
    """The worker of a rank that samples and does not learn: weights land here."""

    def __init__(self, *given: object):
        super().__init__(*given)  # type: ignore[arg-type]
        self.shells: dict[int, LoadedModel] = {}
        self.specs: dict[int, ModelSpec] = {}  # of each model, as its decoders were made
        # of each model; those that nobody draws from are filled anew
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
        """Weights are about to come. The first time a model does, its frozen base is read from
        where the learners have it from.

        Returns the dtypes in which tensors are to cross, where these are not those of the manifest.
        """
        begun = time.perf_counter()
        decoder = self._free(manifest)
        manifest = manifest.crossing(dtypes := manifest.narrower(decoder))
        self.landings[version_id] = Landing(
            manifest, decoder, self.shells[manifest.model_id], begun, manifest.sizes()
        )
        return dtypes

    def land(self, version_id: int, piece: Piece) -> None:
        self.landings[version_id].take(piece)

    def end_landing(self, version_id: int) -> dict[str, object]:
        """From now on it can be sampled from. What `snapshot` returns."""
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
        """The base model under a LoRA adapter: the adapter's B matrices are 0."""
        begun = time.perf_counter()
        decoder = self._free(manifest)
        loaded = self.shells[manifest.model_id]
        for name, parameter in loaded.model.named_parameters():
            if ".lora_B." in name or ".lora_embedding_B." in name:
                decoder.load_([(name, torch.zeros(parameter.shape))])
        self.versions[version_id] = SamplerVersion(decoder, loaded, 0, None)
        return {"version": 0, "seconds": time.perf_counter() - begun, "mixes": None}

    def _free(self, manifest: Manifest) -> Decoder:
        """A decoder of the model that nobody draws from."""
        if self.specs.setdefault(manifest.model_id, manifest.spec).lora != manifest.spec.lora:
            # its adapter's scale has changed, and decoders keep theirs
            self.forget_model(manifest.model_id)
            self.specs[manifest.model_id] = manifest.spec
        made = self.decoders.setdefault(manifest.model_id, [])
        if not made:
            made.append(self._first(manifest))
        busy = {id(version.decoder) for version in self.versions.values()}
        busy |= {id(stream.engine.decoder) for stream in self.streams.values()}
        busy |= {id(landing.decoder) for landing in self.landings.values()}
        for decoder in made:
            if id(decoder) not in busy:
                return decoder
        made.append(made[0].fork())
        return made[-1]

    def _first(self, manifest: Manifest) -> Decoder:
        base, tokenizer, seed = manifest.stands_on
        loaded = self.bases.load(base, tokenizer, seed, manifest.spec.lora is not None)
        loaded.name = manifest.spec.base_model
        if manifest.spec.lora is not None:
            loaded = add_lora(loaded, manifest.spec.lora)
        where, kind = self.accelerator.device, self.settings.sampler.kind
        loaded.model.to(where)
        self.shells[manifest.model_id] = loaded
        under = self._base(manifest.stands_on) if manifest.spec.lora is not None else None
        decoder = make_decoder(
            loaded.model, dtype=self.sampler_dtype, device=where, kind=kind, base=under
        )
        if not self.bases.shares:
            # the decoder has weights of its own: of this, names and shapes are asked from now on
            loaded.model.to("meta")
        return decoder


def raw_bytes(tensor: Tensor) -> np.ndarray:
    """A tensor's memory (host, contiguous) as bytes."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def _checksum(parts: Sequence[tuple[str, int, np.ndarray]]) -> int:
    total = 0
    for name, at, raw in parts:
        total = zlib.crc32(raw.data, zlib.crc32(f"{name} {at} {len(raw)}".encode(), total))
    return total
