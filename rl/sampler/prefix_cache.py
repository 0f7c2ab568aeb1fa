"""Find the prompts that begin with tokens whose keys and values are in the cache already.

The tokens of a sequence are hashed in chunks of a fixed number of positions. The hash of a chunk
includes the hash of the chunk before it, and that of the first chunk names the weights. So equal
hashes mean equal weights, equal tokens and equal positions. The paged cache finds blocks by these
hashes (block_manager.py); `PrefixStore` finds prompts of the contiguous cache, and keeps copies of
prompts that have left the batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

CHUNK_SIZE = 16  # positions of a hash (the paged cache divides its blocks evenly)
# A prompt is prefilled after the others of its batch if this many positions that these prefill can
# be reused. A further forward costs more than fewer positions.
_MIN_SHARED = 64
_MAX_RATIO = 8  # of the length of a prompt to its reused positions

Hashes = Sequence[bytes]


def hash_chunks(
    tokens: Sequence[int] | np.ndarray, weights: str, chunk_size: int, known: Hashes = ()
) -> list[bytes]:
    """Return the hash of each full chunk of a sequence. `weights`: the name of its model. `known`:
    the hashes of the chunks before `tokens`.
    """
    hashes = list(known)
    if len(tokens) < chunk_size:
        return hashes
    data, step = np.asarray(tokens, np.int32).tobytes(), 4 * chunk_size
    parent = hashes[-1] if hashes else weights.encode()
    for start in range(0, len(data) - step + 1, step):
        parent = hashlib.blake2b(parent + data[start : start + step], digest_size=16).digest()
        hashes.append(parent)
    return hashes


def select_wave(
    pending: Sequence[int],
    hashes: Sequence[Hashes],
    lengths: Sequence[int],
    count_cached: Callable[[Hashes], int],
    chunk_size: int,
) -> tuple[dict[int, Hashes], list[int]]:
    """Split pending prompts into those to prefill next, each with the chunks that it takes from the
    cache, and those that wait to reuse what these compute.

    `hashes` and `lengths`: of all prompts. `count_cached` returns how many of the chunks are in the
    cache. The last token of a prompt is always fed, because its logits are needed.
    """
    wave, later, computed = dict[int, Hashes](), list[int](), set[bytes]()
    for i in pending:
        usable = hashes[i][: (lengths[i] - 1) // chunk_size]
        cached = count_cached(usable) if usable else 0
        end = next(
            (n for n in range(cached, len(usable)) if usable[n] not in computed), len(usable)
        )
        if (end - cached) * chunk_size >= _MIN_SHARED and pays(end * chunk_size, lengths[i]):
            later.append(i)
        else:
            wave[i] = usable[:cached] if pays(cached * chunk_size, lengths[i]) else ()
            computed.update(hashes[i])
    return wave, later


def pays(positions: int, length: int) -> bool:
    """Return whether a prompt of this length is prefilled faster if its first positions are reused:
    attention to cached positions is slower than to those of the same forward.
    """
    return positions * _MAX_RATIO >= length


@dataclass(eq=False, slots=True)
class CachedSequence:
    """Hold a sequence whose keys and values can be reused: a prompt in a slot of the batch, or a
    copy `kv` [layers, 2, K, positions, D].

    `experts` [positions, B * K]: of a copy, if recorded.
    """

    hashes: Hashes
    slot: int = -1
    kv: Tensor | None = None
    experts: np.ndarray | None = None

    @property
    def positions(self) -> int:
        """Return the positions of the copy."""
        return 0 if self.kv is None else self.kv.shape[3]


class PrefixStore:
    """Index the prompts of a contiguous cache and the copies of earlier ones, least recently used
    first.
    """

    def __init__(self) -> None:
        self._by_hash: dict[bytes, CachedSequence] = {}
        self._copies: dict[CachedSequence, None] = {}
        self.stored_positions = 0

    def find(self, hashes: Hashes) -> tuple[CachedSequence | None, int]:
        """Return the prefix that shares the most chunks, and their number."""
        for count in range(len(hashes), 0, -1):
            if (prefix := self._by_hash.get(hashes[count - 1])) is not None:
                if prefix.kv is not None:  # now the most recently used
                    self._copies[prefix] = self._copies.pop(prefix)
                return prefix, count
        return None, 0

    def add(self, prefix: CachedSequence) -> None:
        """Add a prefix. Copies that it begins with are dropped."""
        for i, each in enumerate(prefix.hashes):
            known = self._by_hash.get(each)
            if known is not None and known in self._copies and len(known.hashes) == i + 1:
                self.remove(known)
            self._by_hash[each] = prefix
        if prefix.kv is not None:
            self._copies[prefix] = None
            self.stored_positions += prefix.positions

    def remove(self, prefix: CachedSequence) -> None:
        """Remove a prefix."""
        for each in prefix.hashes:
            if self._by_hash.get(each) is prefix:
                del self._by_hash[each]
        if prefix in self._copies:
            del self._copies[prefix]
            self.stored_positions -= prefix.positions

    def owns_any(self, prefix: CachedSequence) -> bool:
        """Return whether some chunk would be lost with this prefix."""
        return any(self._by_hash.get(each) is prefix for each in prefix.hashes)

    def shrink(self, positions: int) -> None:
        """Remove copies until they take at most `positions` positions."""
        while self.stored_positions > max(positions, 0):
            self.remove(next(iter(self._copies)))

    def clear(self) -> None:
        """Remove all prefixes."""
        self._by_hash, self._copies, self.stored_positions = {}, {}, 0
