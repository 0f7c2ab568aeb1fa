"""A model's weights where they lie: modules without values, and each tensor read from its file when
it is asked for.

What shards a model over ranks fills it from here one tensor at a time, so that no process ever
holds the whole. Only safetensors files can be read so. Names in a file that are not the model's own
(experts by themselves, older names) are put together as transformers does it, by its own rules for
the architecture.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True)
class _Parts:
    """What one tensor is put together from: a rule of transformers, and keys by the pattern that
    they match.
    """

    rule: Any
    keys: tuple[tuple[str, str], ...]  # (pattern, key)


class Unfit(Exception):
    """The files cannot be read so; the text says why."""


class StoredWeights:
    """The tensors of a folder by the names that a model's parameters and buffers have. Raises Unfit
    where they are not just those.
    """

    def __init__(self, folder: Path, model: Any):
        self._model = model
        self._file_of = _keys(folder)
        self._sources = _sources(model, list(self._file_of))
        self._name_of: dict[int, str] = {}
        own = dict(model.named_parameters(remove_duplicate=False))
        for name, parameter in own.items():
            if name in self._sources:
                self._name_of.setdefault(id(parameter), name)
        without = [name for name, parameter in own.items() if id(parameter) not in self._name_of]
        beside = self._sources.keys() - own.keys() - dict(model.named_buffers()).keys()
        if without or beside:
            raise Unfit(
                f"its files lack {sorted(without)[:3]} or have {sorted(beside)[:3]} beside the model's own"
            )
        for name in self._name_of.values():
            source = self._sources[name]
            if isinstance(source, str) and self._shape(source) != tuple(own[name].shape):
                raise Unfit(
                    f"{source} has the shape {self._shape(source)}, the model's is {tuple(own[name].shape)}"
                )

    def fill_buffers(self) -> None:
        """Buffers that the files hold; others are computed, and are there."""
        for name, buffer in self._model.named_buffers():
            if name in self._sources:
                buffer.copy_(self.read(name))

    def under(self, model: nn.Module) -> Unread:
        """The same by the names that parameters have in a model around the one that this was made
        for (under adapters).
        """
        return Unread(
            self,
            {
                name: self._name_of[id(p)]
                for name, p in model.named_parameters()
                if id(p) in self._name_of
            },
        )

    def read(self, name: str) -> Tensor:
        """The whole tensor, in the dtype of its file."""
        source = self._sources[name]
        if isinstance(source, str):
            with self._opened(source) as file:
                return file.get_tensor(source)
        rule = copy.deepcopy(source.rule)
        for pattern, key in source.keys:
            rule.add_tensor(name, key, pattern, lambda key=key: self.read_key(key))
        found = rule.convert(name, model=self._model, config=self._model.config)[name]
        return found[0] if isinstance(found, list) else found

    def read_key(self, key: str) -> Tensor:
        with self._opened(key) as file:
            return file.get_tensor(key)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows of the first dimension, of which no others are read (but of a tensor that is put
        together).
        """
        source = self._sources[name]
        if not isinstance(source, str):
            return self.read(name)[start:stop]
        with self._opened(source) as file:
            return file.get_slice(source)[start:stop]

    def _shape(self, key: str) -> tuple[int, ...]:
        with self._opened(key) as file:
            return tuple(file.get_slice(key).get_shape())

    @contextmanager
    def _opened(self, key: str) -> Iterator[Any]:
        from safetensors import safe_open

        with safe_open(str(self._file_of[key]), framework="pt") as file:
            yield file


@dataclass(frozen=True)
class Unread:
    """Weights that are still in their files, by the parameters' names in a model that is to be
    filled.
    """

    stored: StoredWeights
    names: Mapping[str, str]

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def whole(self, name: str) -> Tensor:
        return self.stored.read(self.names[name])

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        return self.stored.rows(self.names[name], start, stop)


class Lazy(Mapping[str, Tensor]):
    """Tensors by name, each read from its file whenever it is asked for; `here`: those that are in
    memory.
    """

    def __init__(
        self, places: Mapping[str, tuple[Path, str]], here: Mapping[str, Tensor] | None = None
    ):
        self._places, self._here = dict(places), dict(here or {})

    @classmethod
    def of(cls, file: Path) -> Lazy:
        """All of a safetensors file."""
        from safetensors import safe_open

        with safe_open(str(file), framework="pt") as opened:
            return cls({key: (file, key) for key in opened.keys()})  # noqa: SIM118  (no mapping)

    def __getitem__(self, name: str) -> Tensor:
        from safetensors import safe_open

        if name in self._here:
            return self._here[name]
        file, key = self._places[name]
        with safe_open(str(file), framework="pt") as opened:
            return opened.get_tensor(key)

    def __iter__(self) -> Iterator[str]:
        return iter([*self._here, *self._places])

    def __len__(self) -> int:
        return len(self._here) + len(self._places)

    def and_here(self, here: Mapping[str, Tensor]) -> Lazy:
        """These and others that are in memory."""
        return Lazy(self._places, {**self._here, **here})

    def shape_of(self, name: str) -> tuple[int, ...]:
        from safetensors import safe_open

        if name in self._here:
            return tuple(self._here[name].shape)
        file, key = self._places[name]
        with safe_open(str(file), framework="pt") as opened:
            return tuple(opened.get_slice(key).get_shape())


def shape_of(tensors: Mapping[str, Tensor], name: str) -> tuple[int, ...]:
    """A tensor's shape, of one that lies in a file without reading it."""
    return tensors.shape_of(name) if isinstance(tensors, Lazy) else tuple(tensors[name].shape)


def in_folder(folder: Path, names: Collection[str]) -> Lazy | None:
    """The named tensors of a model's folder; None where its files are no safetensors or have other
    names.
    """
    try:
        files = _keys(folder)
    except Unfit:
        return None
    return (
        Lazy({name: (files[name], name) for name in names})
        if all(name in files for name in names)
        else None
    )


def hollow_(model: nn.Module) -> None:
    """Parameters without memory become CPU memory that nobody has touched, which the system does
    not give out yet.
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


def _keys(folder: Path) -> dict[str, Path]:
    """The file of each key. Raises Unfit where there are no safetensors files of a whole model."""
    from safetensors import safe_open

    if (folder / INDEX).is_file():
        names: Collection[str] = set(
            json.loads((folder / INDEX).read_text())["weight_map"].values()
        )
    else:
        names = [SINGLE]
    found: dict[str, Path] = {}
    for name in sorted(names):
        if not (folder / name).is_file():
            raise Unfit(f"{folder} has no {name}")
        with safe_open(str(folder / name), framework="pt") as file:
            found |= dict.fromkeys(file.keys(), folder / name)
    return found


def _sources(model: Any, keys: Collection[str]) -> dict[str, str | _Parts]:
    """What each of the model's tensors is read from: its key in the files, or the parts that it is
    put together from.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    own = model.state_dict()
    rules = get_model_conversion_mapping(model) or []
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    found: dict[str, str | _Parts] = {}
    for key in sorted(keys, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, own)
        if name not in own and key in own:
            name, pattern = key, None
        if pattern is None:
            found[name] = key
            continue
        if len(by_pattern[pattern].target_patterns) > 1:
            raise Unfit(f"{key} is cut up into several tensors")
        before = found.get(name)
        parts = before.keys if isinstance(before, _Parts) else ()
        found[name] = _Parts(by_pattern[pattern], (*parts, (pattern, key)))
    return found
