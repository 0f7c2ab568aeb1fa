"""Describe weights that vLLM servers load (all weights of a model, or a LoRA adapter on a model),
and compare the weights that a server holds with the folder that it loaded.

vLLM returns a SHA-256 of the bytes of each of its parameters. It fuses some matrices (q, k and v;
gate and up), tensor parallelism cuts matrices, and on a CPU a layer may hold its matrix in a packed
form outside its parameters: these are not compared. Parameters in the form of the folder must be
equal. Of a parameter in parts, a part must have changed if its tensor changed since the last
transfer, and none if it did not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

MAX_DIFFERENCE = 0.1  # nats on average, as of the self-test (rl.trainer.self_test)
_MAX_DIFFERENCE_FP32 = 0.01
_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_EMPTY_DIGEST = hashlib.sha256(b"").hexdigest()  # of a parameter that holds no values itself
_SHOWN_NAMES = 3
_VOCAB_PADDING = 64  # vLLM's DEFAULT_VOCAB_PADDING_SIZE


class FolderManifest:
    """Hold the digests of the tensors in a folder, by vLLM's name, in the server's dtype (such as
    "torch.bfloat16"); of fused matrices too.
    """

    def __init__(self, folder: Path, dtype: str):
        self._dtype = getattr(torch, dtype.removeprefix("torch."))
        self._places: dict[str, Path] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                self._places.update(dict.fromkeys(file.keys(), path))
        self._parts: dict[str, list[str]] = {name: [name] for name in self._places}
        for name in self._places:
            for fused, parts in _FUSED.items():
                members = [name.replace(f".{parts[0]}.", f".{part}.") for part in parts]
                if f".{parts[0]}." in name and all(m in self._places for m in members):
                    self._parts[name.replace(f".{parts[0]}.", f".{fused}.")] = members
        self._digests = {name: _digest(self._read(name, self._dtype)) for name in self._parts}

    def find(self, name: str) -> str | None:
        """Return the digest of a tensor, None if the folder has no tensor of that name."""
        return self._digests.get(name)

    def matches(self, name: str, digest: str) -> bool:
        """Return whether a digest is that of a tensor, in any form in which vLLM may hold it: with
        zeros up to a multiple of 64 rows (a vocabulary), or in another dtype than the others.
        """
        return digest == self._digests[name] or any(
            digest == _digest(form) for form in self._iter_other_forms(name)
        )

    def _iter_other_forms(self, name: str) -> Iterator[Tensor]:
        if "embed" in name or "lm_head" in name:
            matrix = self._read(name, self._dtype)
            rows = -len(matrix) % _VOCAB_PADDING
            yield torch.cat([matrix, matrix.new_zeros(rows, *matrix.shape[1:])])
        yield self._read(name, None)
        yield self._read(name, torch.float32)

    def _read(self, name: str, dtype: torch.dtype | None) -> Tensor:
        tensors = []
        for part in self._parts[name]:
            with safe_open(self._places[part], framework="pt") as file:
                tensor = file.get_tensor(part)
            converts = dtype is not None and tensor.is_floating_point()
            tensors.append(tensor.to(dtype) if converts else tensor)
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


@dataclass(frozen=True)
class AdapterCheck:
    """Hold the learner's logprobs of fixed tokens, to be compared with a server's. `logprobs`: of
    all tokens but the first. `exact`: the learner computes in fp32.
    """

    tokens: list[int]
    logprobs: list[float]
    exact: bool

    def find_error(self, logprobs: Sequence[float | None], dtype: str) -> str | None:
        """Return what is wrong with a server's logprobs of the tokens, None if they are right."""
        is_fp32 = self.exact and dtype == "torch.float32"
        limit = _MAX_DIFFERENCE_FP32 if is_fp32 else MAX_DIFFERENCE
        gap = np.array(logprobs[1:], np.float64) - np.array(self.logprobs)
        if (mean := float(np.abs(gap).mean())) <= limit:
            return None
        return (
            f"computes other logprobs with a LoRA adapter than the learner: they differ by "
            f"{mean:.2g} nats on average, allowed are {limit:g}. It may not apply all parts of the "
            "adapter: start it without --enable-lora, so that adapters are merged"
        )


@dataclass(frozen=True)
class ServerWeights:
    """Hold weights for servers.

    `folder`: in the format of Hugging Face, or of PEFT for an adapter. `base`: of an adapter, the
    model below it. `check`: of an adapter.
    """

    weights_id: str
    folder: Path
    base: ServerWeights | None = None
    check: AdapterCheck | None = None
    _manifests: dict[str, FolderManifest] = field(default_factory=dict, repr=False)

    @property
    def model(self) -> ServerWeights:
        """Return the weights of the whole model: these, or those below the adapter."""
        return self.base or self

    def read_manifest(self, dtype: str) -> FolderManifest:
        """Return the digests of the tensors in a server's dtype, which are computed once."""
        if dtype not in self._manifests:
            self._manifests[dtype] = FolderManifest(self.folder, dtype)
        return self._manifests[dtype]


def find_transfer_error(
    manifest: FolderManifest,
    held: Mapping[str, str],
    previous: tuple[FolderManifest, Mapping[str, str]] | None,
    tensor_parallel: int,
) -> str | None:
    """Return what is wrong with a transfer, None if it is right.

    `manifest`: of the folder. `held`: of the server, by "dp0:pp0:pcp0:tp0:" and name.
    `previous`: both of the transfer before.
    """
    wrong: list[str] = []
    compared = 0
    # of tensors that changed, by their processes without the tensor-parallel rank and by name
    part_changes: dict[tuple[str, str], bool] = {}
    for key, digest in held.items():
        process, _, name = key.rpartition(":")
        name = name.replace(".base_layer.", ".")  # of a server with --enable-lora
        expected = manifest.find(name)
        if digest == _EMPTY_DIGEST or expected is None:
            continue
        if tensor_parallel == 1 or "norm" in name:  # norms are whole on each process
            compared += 1
            if not manifest.matches(name, digest):
                wrong.append(name)
        elif previous is not None and previous[0].find(name) and key in previous[1]:
            is_changed = digest != previous[1][key]
            if expected != previous[0].find(name):  # perhaps in the rows of another part alone
                part = process.rpartition(":tp")[0], name
                part_changes[part] = part_changes.get(part, False) or is_changed
            elif is_changed:
                wrong.append(name)
    wrong += [name for (_, name), is_changed in part_changes.items() if not is_changed]
    if wrong:
        names = ", ".join(wrong[:_SHOWN_NAMES])
        return (
            f"does not hold the weights that it was told to load: {len(wrong)} of {len(held)} "
            f"parameters differ ({names}). It kept old weights or changed them"
        )
    if not compared:
        return (
            "names no parameter as the learner's model does, so its weights cannot be compared: "
            "start it with the model that is trained (a model whose parameters vLLM names "
            "differently is not supported yet)"
        )
    return None


def _digest(tensor: Tensor) -> str:
    values = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(values.data).hexdigest()
