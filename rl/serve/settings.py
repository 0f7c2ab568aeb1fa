"""What a server is started with."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

from rl.clients import WorkerSettings
from rl.errors import UserError

LOCAL = "local"  # the owner of everything where no keys are asked for
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class ServedBase:
    """A base model under the name that clients ask for, and where it is (a hub name, a folder,
    tiny:<preset>).
    """

    name: str
    where: str
    tokenizer: str | None = None

    @classmethod
    def parse(cls, text: str) -> ServedBase:
        """Of NAME, NAME=WHERE or NAME=WHERE,TOKENIZER."""
        name, _, rest = text.partition("=")
        where, _, tokenizer = rest.partition(",")
        if not name or (rest and not where):
            raise UserError(
                f"--base-model is NAME, NAME=WHERE or NAME=WHERE,TOKENIZER; got {text!r}"
            )
        return cls(name, where or name, tokenizer or None)


@dataclass(frozen=True)
class Limits:
    """What one server takes on at once. Beyond it a request is refused by name, at once, and what
    is running goes on.
    """

    body_bytes: int = 256 * 2**20
    header_seconds: float = 20.0  # for a request's line and headers to come
    body_seconds: float = 60.0  # for its body to come, and a second more for every 64 KiB
    open_requests: int = 2048
    queued: int = 4096  # requests that were taken and have not begun
    tokens: int = 4_000_000  # of one request: prompt and answers, or all datums
    sessions: int = 256
    models: int = 64  # training clients of all sessions, in memory or written out
    models_in_memory: int = 8
    samplers: int = 4096  # sampling sessions; beyond, the oldest of whoever has most are forgotten
    samplers_in_memory: int = 64
    poll_seconds: float = 25.0  # the longest that a poll is held; the SDK gives up after 45
    result_seconds: float = 3600.0  # how long an answer is kept that nobody asked for
    told_seconds: float = 60.0  # how long an answer that was sent can be asked for again
    held_bytes: int = 2**30  # of requests that wait and of answers that are kept
    session_seconds: float = 900.0  # without a heartbeat: what it has in memory is given back

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise UserError(
                    f"--{name.replace('_', '-')} is {value}: a server that takes nothing serves nobody; give more than 0"
                )


@dataclass(frozen=True)
class ServeSettings:
    bases: tuple[ServedBase, ...]
    output_dir: Path
    host: str = "127.0.0.1"
    port: int = 8000
    keys: tuple[str, ...] = field(default=(), repr=False)
    tls_cert: Path | None = None
    tls_key: Path | None = None
    seed: int = 0
    resume: bool = False
    durable: bool = False
    renderer: str | None = None
    stop_grace: float = 60.0  # seconds from SIGTERM to the end of the process
    limits: Limits = field(default_factory=Limits)
    worker: WorkerSettings = field(default_factory=WorkerSettings)

    def __post_init__(self) -> None:
        if not self.bases:
            raise UserError("there is nothing to serve: give --base-model, such as Qwen/Qwen3-0.6B")
        names = [base.name for base in self.bases]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise UserError(f"--base-model {twice[0]} is given twice: a name stands for one model")
        if self.host not in LOOPBACK and not self.keys:
            raise UserError(
                f"--host {self.host} can be reached by others, who could train and sample here: give keys (--keys-file, or "
                "WHETSTONE_SERVE_KEYS)"
            )
        if not self.stop_grace >= 1:
            raise UserError(
                f"--stop-grace is a number of seconds of at least 1, got {self.stop_grace}"
            )
        if not 0 <= self.port <= 65535:
            raise UserError(f"--port is 0 (any that is free) to 65535, got {self.port}")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise UserError("TLS takes both --tls-cert and --tls-key")
        short = [key for key in self.keys if len(key) < 16]
        if short:
            raise UserError(
                f"a key has {len(short[0])} characters: at least 16, such as tml-$(openssl rand -hex 24)"
            )

    def base(self, name: str | None) -> ServedBase:
        """The base of that name, the first without one. Raises UserError, which names those there
        are.
        """
        for base in self.bases:
            if name in (None, base.name):
                return base
        raise UserError(
            f"there is no base model {name!r} here: {', '.join(base.name for base in self.bases)}"
        )


def owner_of(key: str) -> str:
    """What is noted of a key: enough to tell tenants apart, too little to get in with."""
    return hashlib.sha256(b"whetstone owner " + key.encode()).hexdigest()[:16]
