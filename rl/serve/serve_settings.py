"""Define the settings of a server."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rl.config import ModelSettings, OptimSettings, SamplingSettings
from rl.errors import UserError
from rl.runtime import WorkerSettings

LOCAL_OWNER = "local"  # the owner of everything if the server has no keys
# flags of serve.py that set a setting of train.py
WORKER_FLAGS: dict[type, tuple[str, ...]] = {
    ModelSettings: (
        "precision",
        "base_dtype",
        "gradient_checkpointing",
        "offload_activations",
        "fused_logprobs",
        "kept_logits_gib",
    ),
    SamplingSettings: (
        "kv_cache_tokens",
        "max_rows",
        "sampler_cache",
        "sampler_tp",
        "num_speculative_tokens",
    ),
    OptimSettings: ("token_budget", "layout", "optimizer", "context_parallel_size"),
}
LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class ServedBaseModel:
    """Hold a base model: the name that clients request, and its source.

    `source` is a hub name, a folder or `tiny:<preset>`.
    """

    name: str
    source: str
    tokenizer: str | None = None

    @classmethod
    def parse(cls, text: str) -> ServedBaseModel:
        """Parse NAME, NAME=WHERE or NAME=WHERE,TOKENIZER. Raises UserError for other text."""
        name, _, rest = text.partition("=")
        where, _, tokenizer = rest.partition(",")
        if not name or (rest and not where):
            raise UserError(
                f"--base-model is NAME, NAME=WHERE or NAME=WHERE,TOKENIZER; got {text!r}"
            )
        return cls(name, where or name, tokenizer or None)


@dataclass(frozen=True)
class ServeLimits:
    """Hold the limits of a server.

    A request beyond a limit is refused immediately, with the limit's name. Running requests
    continue.
    """

    body_bytes: int = 256 * 2**20
    header_seconds: float = 20.0  # timeout for the request line and headers
    body_seconds: float = 60.0  # timeout for the body, plus a second for every 64 KiB received
    open_requests: int = 2048
    queued: int = 4096  # accepted requests that have not started
    tokens: int = 4_000_000  # of a request: prompt and samples, or all datums
    sessions: int = 256
    models: int = 64  # training clients of all sessions, in memory or on disk
    models_in_memory: int = 8
    # sampling sessions; beyond it, the oldest sessions of the tenant that has most are removed
    samplers: int = 4096
    samplers_in_memory: int = 64
    poll_seconds: float = 25.0  # longest wait of a poll; the SDK gives up after 45 s
    result_seconds: float = 3600.0  # time for which a result that was never fetched is kept
    resend_seconds: float = 60.0  # time for which a result can be fetched again after it was sent
    held_bytes: int = 2**30  # bytes of waiting requests and stored results
    session_seconds: float = 900.0  # without a heartbeat, until the session's memory is freed

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise UserError(f"--{name.replace('_', '-')} is {value}: it must be greater than 0")


@dataclass(frozen=True)
class ServeSettings:
    """Hold the settings of a server, and check them. Raises UserError if a value is wrong."""

    bases: tuple[ServedBaseModel, ...]
    output_dir: Path
    host: str = "127.0.0.1"
    port: int = 8000
    keys: tuple[str, ...] = field(default=(), repr=False)
    # names besides loopback under which browsers may use a server without keys
    allowed_hosts: Sequence[str] = ()
    tls_cert: Path | None = None
    tls_key: Path | None = None
    seed: int = 0
    resume: bool = False
    durable: bool = False
    renderer: str | None = None
    stop_grace: float = 60.0  # seconds from SIGTERM to the end of the process
    limits: ServeLimits = field(default_factory=ServeLimits)
    worker: WorkerSettings = field(default_factory=WorkerSettings)
    base_dtype: str = "auto"  # of the frozen base models, see `ModelSettings.base_dtype`

    @property
    def saved_base_dtype(self) -> str | None:
        """Return the base dtype of models that are loaded; None: as they were saved."""
        return None if self.base_dtype == "auto" else self.base_dtype

    def __post_init__(self) -> None:
        if not self.bases:
            raise UserError("no model to serve: pass --base-model, such as Qwen/Qwen3-0.6B")
        names = [base.name for base in self.bases]
        duplicates = sorted({name for name in names if names.count(name) > 1})
        if duplicates:
            raise UserError(f"--base-model {duplicates[0]} occurs twice: each name must be unique")
        if self.host not in LOOPBACK_HOSTS and not self.keys:
            raise UserError(
                f"--host {self.host} can be reached from other machines, which could train and "
                "sample here: set keys (--keys-file, or WHETSTONE_SERVE_KEYS)"
            )
        if not 1 <= self.stop_grace < math.inf:
            raise UserError(f"--stop-grace must be at least 1 second, got {self.stop_grace}")
        if Path(self.output_dir).is_file():
            raise UserError(f"--output-dir {self.output_dir} is a file: pass a folder")
        if not 0 <= self.port <= 65535:
            raise UserError(f"--port must be 0 (any free port) to 65535, got {self.port}")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise UserError("TLS needs both --tls-cert and --tls-key")
        short_keys = [key for key in self.keys if len(key) < 16]
        if short_keys:
            raise UserError(
                f"a key has {len(short_keys[0])} characters: it needs at least 16, such as "
                "tml-$(openssl rand -hex 24)"
            )

    def find_base(self, name: str | None) -> ServedBaseModel:
        """Return the base model called `name`, or the first base model if `name` is None.

        Raises UserError, which lists the served base models, if the name is unknown.
        """
        for base in self.bases:
            if name in (None, base.name):
                return base
        raise UserError(
            f"unknown base model {name!r:.100}: this server has "
            f"{', '.join(base.name for base in self.bases)}"
        )


def compute_owner_id(key: str) -> str:
    """Return the owner id of a key, 16 hexadecimal digits of its SHA-256.

    The id distinguishes tenants but does not grant access.
    """
    return hashlib.sha256(b"whetstone owner " + key.encode()).hexdigest()[:16]
