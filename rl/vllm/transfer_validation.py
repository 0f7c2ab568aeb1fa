"""Compare the weights that a vLLM server holds with the folder that it loaded.

vLLM returns a SHA-256 of the bytes of each of its parameters. It fuses some matrices (q, k and v;
gate and up), tensor parallelism cuts matrices, and on a CPU a layer may hold its matrix in a packed
form outside its parameters: these are not compared. Parameters in the form of the folder must be
equal. A part of a parameter must have changed if its tensor changed since the last transfer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_EMPTY_DIGEST = hashlib.sha256(b"").hexdigest()  # of a parameter that holds no values itself
_SHOWN_NAMES = 3
_VOCAB_PADDING = 64  # vLLM's DEFAULT_VOCAB_PADDING_SIZE


Digests = Mapping[str, tuple[str, ...]]  # of a tensor, in each form that vLLM may hold it in


def read_folder_digests(folder: Path, dtype: str) -> dict[str, tuple[str, ...]]:
    """Return the digests of the tensors in a folder by vLLM's name, in the server's dtype (such as
    "torch.bfloat16"); fused matrices too. The second digest of a vocabulary's matrix is that with
    zeros up to a multiple of 64 rows.
    """
    places: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            places.update(dict.fromkeys(file.keys(), path))
    target = getattr(torch, dtype.removeprefix("torch."))

    def read(name: str) -> Tensor:
        with safe_open(places[name], framework="pt") as file:
            tensor = file.get_tensor(name)
        return tensor.to(target) if tensor.is_floating_point() else tensor

    digests: dict[str, tuple[str, ...]] = {name: (_digest(read(name)),) for name in places}
    for name in places:
        if "embed" in name or "lm_head" in name:
            matrix = read(name)
            rows = -len(matrix) % _VOCAB_PADDING
            padded = torch.cat([matrix, matrix.new_zeros(rows, *matrix.shape[1:])])
            digests[name] = (*digests[name], _digest(padded))
    for name in places:
        for fused, parts in _FUSED.items():
            members = [name.replace(f".{parts[0]}.", f".{part}.") for part in parts]
            if f".{parts[0]}." in name and all(member in places for member in members):
                matrix = torch.cat([read(member) for member in members])
                digests[name.replace(f".{parts[0]}.", f".{fused}.")] = (_digest(matrix),)
    return digests


def find_transfer_error(
    digests: Digests,
    held: Mapping[str, str],
    previous: tuple[Digests, Mapping[str, str]] | None,
    tensor_parallel: int,
) -> str | None:
    """Return what is wrong with a transfer, None if it is right.

    `digests`: of the folder, by name. `held`: of the server, by "dp0:pp0:pcp0:tp0:" and name.
    `previous`: both of the transfer before.
    """
    wrong: list[str] = []
    compared = 0
    for key, digest in held.items():
        name = key.rpartition(":")[2]
        if digest == _EMPTY_DIGEST or name not in digests:
            continue
        if tensor_parallel == 1 or "norm" in name:  # norms are whole on each process
            compared += 1
            if digest not in digests[name]:
                wrong.append(name)
        elif previous is not None and name in previous[0] and key in previous[1]:
            if (digests[name] != previous[0][name]) != (digest != previous[1][key]):
                wrong.append(name)
    if wrong:
        names = ", ".join(wrong[:_SHOWN_NAMES])
        return (
            f"does not hold the weights that it was told to load: {len(wrong)} of {len(held)} "
            f"parameters differ ({names}). It kept old weights or changed them"
        )
    if not compared:
        return (
            "has no parameter in common with the learner's model: start it with the model that is "
            "trained"
        )
    return None


def _digest(tensor: Tensor) -> str:
    values = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(values.data).hexdigest()
