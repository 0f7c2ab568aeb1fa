"""Provide a key-value store as tools, for notes within an episode."""

from __future__ import annotations

import threading

from rl.envs.tools import Tool

_MAX_CHARACTERS = 100_000  # characters in all values together


class KeyValueStore:
    """Store the notes of an episode. `tools` are the model's tools: put, get, remove, keys."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self._lock = threading.Lock()  # the calls of an answer run concurrently
        self.tools = (Tool(self.put), Tool(self.get), Tool(self.remove), Tool(self.keys))

    def put(self, key: str, value: str) -> str:
        """Keeps a value under a key, in place of what was there.

        Args:
            key: its name
            value: what is kept
        """
        with self._lock:
            kept = {**self.values, str(key): str(value)}
            if sum(map(len, kept.values())) > _MAX_CHARACTERS:
                raise ValueError(f"the store holds at most {_MAX_CHARACTERS} characters")
            self.values = kept
        return f"kept {key}"

    def get(self, key: str) -> str:
        """The value kept under a key.

        Args:
            key: its name
        """
        if key not in self.values:
            raise ValueError(
                f"nothing is kept under {key!r}: the keys are"
                f" {', '.join(sorted(self.values)) or 'no keys'}"
            )
        return self.values[key]

    def remove(self, key: str) -> str:
        """Forgets a key and its value.

        Args:
            key: its name
        """
        with self._lock:
            self.get(key)
            self.values = {name: value for name, value in self.values.items() if name != key}
        return f"removed {key}"

    def keys(self) -> str:
        """Which keys there are."""
        return ", ".join(sorted(self.values)) or "no keys"
