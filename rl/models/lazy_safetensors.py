"""Read a model's weights directly from its files: modules without values, each tensor on request.

Code that shards a model over ranks fills it from here tensor by tensor, so that no process ever
holds the whole model. Only safetensors files are supported. File keys that differ from the model's
parameter names (separate experts, older names) are converted as transformers does it, by its rules
for the architecture.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def _open(file: Path) -> Any:
    """Open a safetensors file, as a context."""
    from safetensors import safe_open

    return safe_open(str(file), framework="pt")


@dataclass(frozen=True)
class _ConversionSource:
    """Describe the sources of a converted tensor: its name in the original model, a rule of
    transformers, and keys by the pattern that they match.
    """

    name: str
    rule: Any
    keys: tuple[tuple[str, str], ...]  # (pattern, key)


class CannotReadLazily(Exception):
    """Signal that the files cannot be read lazily; the text says why."""


class SafetensorsWeights:
    """Read the tensors of a folder by the names of a model's parameters and buffers.

    Raises CannotReadLazily if the files lack tensors, have additional ones or other shapes.
    """

    def __init__(self, folder: Path, model: Any):
        self._model = model
        self._file_of = _map_keys_to_files(folder)
        self._sources = _map_sources(model, list(self._file_of))
        self._name_of: dict[int, str] = {}
        parameters = dict(model.named_parameters(remove_duplicate=False))
        for name, parameter in parameters.items():
            if name in self._sources:
                self._name_of.setdefault(id(parameter), name)
        self._shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        missing = [
            name for name, parameter in parameters.items() if id(parameter) not in self._name_of
        ]
        unexpected = self._sources.keys() - parameters.keys() - dict(model.named_buffers()).keys()
        if missing or unexpected:
            raise CannotReadLazily(
                f"its files lack {sorted(missing)[:3]} or have {sorted(unexpected)[:3]}, "
                "which the model does not have"
            )
        for name in self._name_of.values():
            source = self._sources[name]
            if isinstance(source, str) and self._shape(source) != self._shapes[name]:
                raise CannotReadLazily(
                    f"{source} has the shape {self._shape(source)}, the model's is "
                    f"{self._shapes[name]}"
                )

    def fill_buffers(self) -> None:
        """Load the buffers that the files hold; other buffers are computed and already filled."""
        for name, buffer in self._model.named_buffers():
            if name in self._sources:
                buffer.copy_(self.read(name))

    def for_wrapped_model(self, model: nn.Module) -> SafetensorsWeights:
        """Return these weights by the parameter names of `model`, which wraps the original model
        (with adapters).
        """
        wrapped = copy.copy(self)
        held = {name: p for name, p in model.named_parameters() if id(p) in self._name_of}
        wrapped._sources = {name: self._sources[self._name_of[id(p)]] for name, p in held.items()}
        wrapped._shapes = {name: tuple(p.shape) for name, p in held.items()}
        return wrapped

    def __contains__(self, name: object) -> bool:
        return name in self._sources

    def read(self, name: str) -> Tensor:
        """Return the whole tensor, in the dtype of its file."""
        source = self._sources[name]
        if isinstance(source, str):
            return self.read_key(source)
        rule = copy.deepcopy(source.rule)
        for pattern, key in source.keys:
            rule.add_tensor(source.name, key, pattern, lambda key=key: self.read_key(key))
        converted = rule.convert(source.name, model=self._model, config=self._model.config)
        converted = converted[source.name]
        return converted[0] if isinstance(converted, list) else converted

    def read_key(self, key: str) -> Tensor:
        """Return the tensor of a key of the files."""
        with _open(self._file_of[key]) as file:
            return file.get_tensor(key)

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows of the first dimension, without reading the others (except for converted
        tensors).
        """
        source = self._sources[name]
        if not isinstance(source, str):
            return self.read(name)[start:stop]
        with _open(self._file_of[source]) as file:
            return file.get_slice(source)[start:stop]

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of a parameter."""
        return self._shapes[name]

    def _shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of a key's tensor."""
        with _open(self._file_of[key]) as file:
            return tuple(file.get_slice(key).get_shape())


class LazyTensors(Mapping[str, Tensor]):
    """Map names to tensors, each read at every access from the file or the weights that `entries`
    names.

    An entry may also be a tensor in memory.
    """

    def __init__(self, entries: Mapping[str, Path | SafetensorsWeights | Tensor]):
        self._entries = dict(entries)

    @classmethod
    def from_file(cls, file: Path) -> LazyTensors:
        """Return all tensors of a safetensors file."""
        with _open(file) as opened:
            return cls(dict.fromkeys(opened.keys(), file))

    def __getitem__(self, name: str) -> Tensor:
        entry = self._entries[name]
        if isinstance(entry, Tensor):
            return entry
        if isinstance(entry, SafetensorsWeights):
            return entry.read(name)
        with _open(entry) as opened:
            return opened.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def with_tensors(self, in_memory: Mapping[str, Tensor]) -> LazyTensors:
        """Return these tensors plus others that are in memory."""
        return LazyTensors({**self._entries, **in_memory})

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, without reading it."""
        entry = self._entries[name]
        if isinstance(entry, Tensor):
            return tuple(entry.shape)
        if isinstance(entry, SafetensorsWeights):
            return entry.shape_of(name)
        with _open(entry) as opened:
            return tuple(opened.get_slice(name).get_shape())


def get_tensor_shape(tensors: Mapping[str, Tensor], name: str) -> tuple[int, ...]:
    """Return a tensor's shape, without reading a tensor that is in a file."""
    return (
        tensors.shape_of(name) if isinstance(tensors, LazyTensors) else tuple(tensors[name].shape)
    )


def open_lazy_tensors(folder: Path, names: Collection[str]) -> LazyTensors | None:
    """Return the named tensors of a model's folder; None if it has no such safetensors or names."""
    try:
        files = _map_keys_to_files(folder)
    except CannotReadLazily:
        return None
    if any(name not in files for name in names):
        return None
    return LazyTensors({name: files[name] for name in names})


def replace_meta_parameters_(model: nn.Module) -> None:
    """Replace meta parameters by uninitialized CPU memory, which the system does not allocate until
    it is written.
    """
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(
                    torch.empty(parameter.shape, dtype=parameter.dtype), parameter.requires_grad
                )
            module._parameters[name] = made[id(parameter)]


def _map_keys_to_files(folder: Path) -> dict[str, Path]:
    """Return the file of each key. Raises CannotReadLazily if safetensors files of the whole model
    are missing.
    """
    if (folder / INDEX).is_file():
        names: Collection[str] = set(
            json.loads((folder / INDEX).read_text())["weight_map"].values()
        )
    else:
        names = [SINGLE]
    file_of: dict[str, Path] = {}
    for name in sorted(names):
        if not (folder / name).is_file():
            raise CannotReadLazily(f"{folder} has no {name}")
        with _open(folder / name) as file:
            file_of |= dict.fromkeys(file.keys(), folder / name)
    return file_of


def get_conversion_rules(model: Any) -> tuple[list[Any], list[Any]]:
    """Return transformers' rules that (rename, convert) the keys of a model's files at load."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    rules = get_model_conversion_mapping(model) or []
    return (
        [rule for rule in rules if isinstance(rule, WeightRenaming)],
        [rule for rule in rules if isinstance(rule, WeightConverter)],
    )


def _map_sources(model: Any, keys: Collection[str]) -> dict[str, str | _ConversionSource]:
    """Return the source of each tensor of the model: its key in the files, or the parts of its
    conversion.
    """
    from transformers.core_model_loading import dot_natural_key, rename_source_key

    state = model.state_dict()
    renamings, converters = get_conversion_rules(model)
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    sources: dict[str, str | _ConversionSource] = {}
    for key in sorted(keys, key=dot_natural_key):
        name, pattern = rename_source_key(
            key, renamings, converters, model.base_model_prefix, state
        )
        if name not in state and key in state:
            name, pattern = key, None
        if pattern is None:
            sources[name] = key
            continue
        if len(by_pattern[pattern].target_patterns) > 1:
            raise CannotReadLazily(f"{key} is split into several tensors")
        before = sources.get(name)
        parts = before.keys if isinstance(before, _ConversionSource) else ()
        sources[name] = _ConversionSource(name, by_pattern[pattern], (*parts, (pattern, key)))
    return sources
