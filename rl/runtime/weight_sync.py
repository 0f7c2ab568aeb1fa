"""Transfer weights from learner ranks to sampler ranks in chunks, while both keep working.

Rank 0 copies the weights that an update has changed into host memory, after which the learners are
free. They are sent in chunks. Each chunk is a verb of the samplers, which its bytes follow over
NCCL from GPU to GPU, or over gloo. Several chunks are executed between two step requests of a
stream. They are written into a decoder that no request samples from, which becomes the new version
when all have arrived. (rl.runtime.driver sends them.)
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from rl.learner import ModelSpec
from rl.models import LoadedModel, add_lora
from rl.runtime.sampler_versions import BaseKey, SamplerVersion
from rl.runtime.sampling_worker import SamplingWorker, load_base
from rl.runtime.verb_table import SAMPLER, verb
from rl.sampler import Decoder

# A verb takes about a millisecond, in which a GPU receives tens of MiB.
CHUNK_BYTES, GPU_CHUNK_BYTES = 4 * 2**20, 64 * 2**20
TRANSFER_SHARE = 0.5  # of the samplers' time while weights are sent and streams sample
MAX_CHUNKS = 32  # of a round, if chunks are cut while they are sent: two rounds are in host memory
CONVERT_ELEMENTS = 2**20  # elements of a tensor that are converted at a time
ROW_BYTES, CHECKSUM_ROWS = 4096, 4096  # the checksum reads at most 16 MiB of a chunk
HASH_FACTOR = 0x9E3779B97F4A7C15 - 2**64  # of Fibonacci hashing: 2^64 over the golden ratio

# (name, byte offset in the tensor, number of bytes) of each part of a chunk, and its bytes (uint8)
ChunkPayload = tuple[Sequence[tuple[str, int, int]], Tensor]


@dataclass(frozen=True)
class WeightSnapshot:
    """Hold a copy of a model's weights, unsharded and in host memory. `base_key`: what its base is
    loaded from (base, tokenizer, seed). The manifest of a transfer is a snapshot whose tensors
    have a shape and a dtype and no data (device meta).

    `payloads`: the bytes of the chunks, if they are cut. The tensors are on device meta then.
    """

    model_id: int
    spec: ModelSpec
    base_key: BaseKey
    version: int
    tensors: Mapping[str, Tensor]
    payloads: Sequence[ChunkPayload] | None = None

    def cut(self, named: Iterable[tuple[str, Tensor]]) -> WeightSnapshot:
        """Return the snapshot of these tensors, copied from any device into payloads."""
        manifest: dict[str, Tensor] = {}

        def record() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in named:
                manifest[name] = tensor.to("meta")
                yield name, tensor

        payloads = list(cut_payloads(record()))
        return replace(self, tensors=manifest, payloads=payloads)

    def make_manifest(self) -> WeightSnapshot:
        """Return the snapshot without its data."""
        tensors = {name: t.to("meta") for name, t in self.tensors.items()}
        return replace(self, tensors=tensors, payloads=None if self.payloads is None else ())

    def find_narrower_dtypes(self, decoder: Decoder) -> dict[str, torch.dtype]:
        """Return by name the dtype of tensors that this decoder stores in fewer bytes. They are
        rounded before they are sent, with the same result. If the chunks are cut, there are none.
        """
        if self.payloads is not None:
            return {}
        dtypes = {name: decoder.dtype_of(name) for name in self.tensors}
        return {
            name: dtype
            for name, dtype in dtypes.items()
            if dtype is not None and dtype.itemsize < self.tensors[name].dtype.itemsize
        }

    def with_dtypes(self, dtypes: Mapping[str, torch.dtype]) -> WeightSnapshot:
        """Return the snapshot with these dtypes."""
        converted = {name: self.tensors[name].to(dtype) for name, dtype in dtypes.items()}
        return replace(self, tensors={**self.tensors, **converted})

    def iter_chunks(
        self, size: int | None = None, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> Iterator[WeightChunk]:
        """Yield the bytes of all tensors in order. If they are not cut yet: at most `size` bytes in
        each chunk, and in `dtypes`, by name, the tensors that are sent in another dtype.
        """
        payloads: Iterable[ChunkPayload] | None = self.payloads
        if payloads is None:
            payloads = cut_payloads(self.tensors.items(), size, dtypes)
        for parts, payload in payloads:
            yield WeightChunk(parts, _compute_checksum(parts, payload), payload)


class TransferSchedule:
    """Choose how many chunks are sent between two step requests of the streams, so that a transfer
    takes TRANSFER_SHARE of the samplers' time.

    The chunks of a round are executed one after the other, so the time between their arrivals is
    that of a chunk. The first of them also waits for the step requests before it. A round has at
    most `limit` chunks.
    """

    num_chunks = 2

    def __init__(self, limit: int = MAX_CHUNKS):
        self.limit = limit

    def start_round(self, size: int) -> None:
        """Record that a round of `size` chunks is being queued."""
        self._size, self._start_time = size, time.perf_counter()
        self._arrivals: SimpleQueue[float] = SimpleQueue()

    def record_arrival(self) -> None:
        """Record that a chunk has arrived."""
        self._arrivals.put(time.perf_counter())

    def end_round(self) -> None:
        """Wait until all arrivals of the round are recorded, then choose `num_chunks`."""
        times = [self._arrivals.get() for _ in range(self._size)]
        if self._size < 2:
            return
        first, last = min(times), max(times)
        chunk_seconds = max((last - first) / (self._size - 1), 1e-6)
        wait_seconds = first - self._start_time - chunk_seconds
        chunks = TRANSFER_SHARE / (1 - TRANSFER_SHARE) * wait_seconds / chunk_seconds
        self.num_chunks = max(2, round(min(chunks, self.limit)))


@dataclass(frozen=True)
class WeightChunk:
    """Hold bytes of tensors.

    parts       (name, byte offset in the tensor, number of bytes), in the order of the payload
    checksum    of parts and payload
    payload     uint8 [bytes]; None in the verb of a chunk, which the payload follows
    following   on rank 0: the payload of the next chunk, if any
    """

    parts: Sequence[tuple[str, int, int]]
    checksum: int
    payload: Tensor | None = None
    following: Tensor | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return WeightChunk, (self.parts, self.checksum)

    @property
    def num_bytes(self) -> int:
        """Return the size of the payload."""
        return sum(length for *_, length in self.parts)


@dataclass
class WeightTransfer:
    """Receive a version in transfer. `remaining_bytes`: bytes still to come of each tensor, by
    name; `partial_tensors`: partially received tensors.
    """

    manifest: WeightSnapshot
    decoder: Decoder
    loaded: LoadedModel
    start_time: float
    partial_tensors: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tensors = self.manifest.tensors
        self.remaining_bytes = {name: t.nbytes for name, t in tensors.items() if t.nbytes}

    def receive(self, chunk: WeightChunk) -> None:
        """Write a chunk, and load each completed tensor into the decoder. Raises RuntimeError if
        the checksum differs.
        """
        payload = chunk.payload
        assert payload is not None
        if _compute_checksum(chunk.parts, payload) != chunk.checksum:
            raise RuntimeError(
                f"weights of version {self.manifest.version} were corrupted in transfer (the "
                "checksum differs), at tensors " + ", ".join(name for name, *_ in chunk.parts[:3])
            )
        pieces = payload.split([length for *_, length in chunk.parts])
        for (name, offset, length), piece in zip(chunk.parts, pieces, strict=True):
            if name not in self.partial_tensors:
                sent = self.manifest.tensors[name]
                self.partial_tensors[name] = torch.empty(
                    sent.shape, dtype=sent.dtype, device=payload.device
                )
            view_bytes(self.partial_tensors[name])[offset : offset + length] = piece
            self.remaining_bytes[name] -= length
            if self.remaining_bytes[name] == 0:
                self.decoder.load_([(name, self.partial_tensors.pop(name))])
                del self.remaining_bytes[name]

    def check_complete(self) -> None:
        """Raise RuntimeError if bytes are missing."""
        if self.remaining_bytes:
            missing = sorted(self.remaining_bytes)
            raise RuntimeError(
                f"the transfer of version {self.manifest.version} is incomplete: {len(missing)} "
                f"tensors are missing, {missing[:3]}"
            )


@dataclass
class ReceivedModel:
    """Hold a model of the learner ranks: the spec that its decoders were made from, and the
    decoders. Those that are not in use receive new weights.
    """

    spec: ModelSpec
    loaded: LoadedModel
    decoders: list[Decoder]


class SamplerWorker(SamplingWorker):
    """Execute verbs on a rank that samples and does not learn, and receive weights from the learner
    ranks.
    """

    def __init__(self, *args: object):
        super().__init__(*args)  # type: ignore[arg-type]
        self.models: dict[int, ReceivedModel] = {}
        self.transfers: dict[int, WeightTransfer] = {}
        self._buffer: Tensor | None = None  # uint8, of the chunk that is received

    def free_all(self) -> None:
        super().free_all()
        self.models.clear()

    def free_model(self, model_id: int) -> None:
        self.models.pop(model_id, None)

    def free_version(self, version_id: int) -> None:
        self.transfers.pop(version_id, None)
        super().free_version(version_id)

    @verb(SAMPLER)
    def begin_transfer(self, version_id: int, manifest: WeightSnapshot) -> dict[str, torch.dtype]:
        """Prepare to receive weights. A model's frozen base is read at its first transfer, from the
        source that the learners read.

        Return the dtypes in which tensors are to be sent, by name, if they differ from those of the
        manifest.
        """
        start_time = time.perf_counter()
        loaded, decoder = self._find_free_decoder(manifest)
        if self._buffer is None:  # here, because a rank that fails before a broadcast misses it
            device = self.accelerator.device
            self._buffer = torch.empty(_get_chunk_bytes(), dtype=torch.uint8, device=device)
        dtypes = manifest.find_narrower_dtypes(decoder)
        self.transfers[version_id] = WeightTransfer(
            manifest.with_dtypes(dtypes), decoder, loaded, start_time
        )
        return dtypes

    @verb(SAMPLER)
    def receive_chunk(self, version_id: int, chunk: WeightChunk) -> None:
        """Receive a chunk, whose payload rank 0 sends after the verb."""
        if chunk.payload is None:
            assert self._buffer is not None
            buffer = self._buffer[: chunk.num_bytes]
            chunk = replace(chunk, payload=self.objects.broadcast_buffer(buffer))
        self.transfers[version_id].receive(chunk)

    @verb(SAMPLER)
    def end_transfer(self, version_id: int) -> dict[str, object]:
        """Make the received version available for sampling. Return what `snapshot` returns."""
        transfer = self.transfers.pop(version_id)
        transfer.check_complete()
        version = SamplerVersion(
            transfer.decoder, transfer.loaded, transfer.manifest.version, None, learned=True
        )
        return self._add_version(version_id, version, transfer.start_time)

    @verb(SAMPLER)
    def create_base_version(self, version_id: int, manifest: WeightSnapshot) -> dict[str, object]:
        """Create a version of the base model under a LoRA adapter: the adapter's B
        matrices are 0.
        """
        start_time = time.perf_counter()
        loaded, decoder = self._find_free_decoder(manifest)
        load_base(decoder, {name: p.shape for name, p in loaded.model.named_parameters()})
        return self._add_version(version_id, SamplerVersion(decoder, loaded, 0, None), start_time)

    def _find_free_decoder(self, manifest: WeightSnapshot) -> tuple[LoadedModel, Decoder]:
        """Return the model, and a decoder of it that no version, stream or transfer uses."""
        model = self.models.get(manifest.model_id)
        if model is not None and model.spec.lora != manifest.spec.lora:
            # the adapter's scale has changed, and a decoder's scale is fixed
            self.free_model(manifest.model_id)
            model = None
        if model is None:
            model = self.models[manifest.model_id] = self._load_model(manifest)
        # chunks arrive between the steps of a stream
        engines = [stream.engine for stream in self.streams.values()]
        users = (*self.transfers.values(), *engines)
        for decoder in model.decoders:
            if not self._is_in_use(decoder) and all(user.decoder is not decoder for user in users):
                return model.loaded, decoder
        model.decoders.append(model.decoders[0].fork())
        return model.loaded, model.decoders[-1]

    def _load_model(self, manifest: WeightSnapshot) -> ReceivedModel:
        """Load a model and make its first decoder."""
        lora = manifest.spec.lora
        loaded = self.base_models.load(*manifest.base_key, lora is not None)
        loaded.name = manifest.spec.base_model
        if lora is not None:
            loaded = add_lora(loaded, lora)
        loaded.model.to(self.accelerator.device)
        decoder = self._make_decoder(loaded.model, manifest.base_key if lora is not None else None)
        if not self.base_models.enabled:
            # the decoder has copied the weights: only names and shapes of this model are used later
            loaded.model.to("meta")
        return ReceivedModel(manifest.spec, loaded, [decoder])


def _get_chunk_bytes() -> int:
    """Return the largest number of bytes of a chunk."""
    return GPU_CHUNK_BYTES if torch.cuda.is_available() else CHUNK_BYTES


def view_bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a (contiguous) tensor as uint8 [bytes]."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def cut_payloads(
    named: Iterable[tuple[str, Tensor]],
    size: int | None = None,
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> Iterator[ChunkPayload]:
    """Copy the bytes of all tensors, on any device, to host memory in order. Yield them by `size`
    bytes. `dtypes`: by name, the dtype to which tensors are converted.

    The memory is pinned if there is a GPU, which copies several times slower otherwise. Torch keeps
    pinned blocks of a power of two for later use. All blocks have the size of a chunk, so that
    snapshots use the same.
    """
    size, cuda = size or _get_chunk_bytes(), torch.cuda.is_available()
    parts: list[tuple[str, int, int]] = []
    for name, tensor in named:
        flat, dtype = tensor.reshape(-1), (dtypes or {}).get(name, tensor.dtype)
        # converting a whole embedding would delay the streams
        step = max(1, len(flat)) if dtype == tensor.dtype else CONVERT_ELEMENTS
        for low in range(0, len(flat), step):
            raw, offset = view_bytes(flat[low : low + step].to(dtype)), 0
            while offset < len(raw):
                if not parts:
                    payload, filled = torch.empty(size, dtype=torch.uint8, pin_memory=cuda), 0
                piece = raw[offset : offset + size - filled]
                payload[filled : filled + len(piece)] = piece
                parts.append((name, low * dtype.itemsize + offset, len(piece)))
                offset, filled = offset + len(piece), filled + len(piece)
                if filled == size:
                    yield parts, payload
                    parts = []
    if parts:
        yield parts, payload[:filled]


def _compute_checksum(parts: Sequence[tuple[str, int, int]], payload: Tensor) -> int:
    """Return a checksum of names, offsets and lengths, and of the bytes, which a GPU computes too:
    the sum of 64-bit words in rows of 4 KiB, each times a number of its row and column, modulo
    2^64, and the last bytes. A changed word is always found, two swapped words nearly always.

    Of more than CHECKSUM_ROWS rows only every n-th is read, as for a GPU rank 0 takes longer to
    read a chunk than to send it. With n = 4 a wrong range of more than 12 KiB is found.
    """
    rows, columns = len(payload) // ROW_BYTES, ROW_BYTES // 8
    words = payload[: rows * ROW_BYTES].view(torch.int64).view(rows, columns)
    words = words[:: max(1, -(-rows // CHECKSUM_ROWS))]
    # a word's number, that of its column plus that of its row, is odd: w * n differs for every w
    places = torch.arange(1, columns + len(words) + 1, device=payload.device)
    numbers = (places * HASH_FACTOR >> 8) | 1
    total = (words.sum(0) * numbers[:columns]).sum()
    total += (words.sum(1) * numbers[columns:] * 2).sum()
    rest = zlib.crc32(payload[rows * ROW_BYTES :].cpu().numpy().tobytes())
    return zlib.crc32(f"{list(parts)} {int(total)} {rest}".encode())
