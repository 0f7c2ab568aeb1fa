"""Start the server from the command line, run it, and shut it down.

The address is bound and the certificate is checked before a model is loaded.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from rl.client import ServiceClient
from rl.config import RawValue, SettingsError, build_settings
from rl.distributed import get_launch_sharding
from rl.errors import UserError
from rl.learner import choose_base_dtype
from rl.memory_plan import ModelSkeleton
from rl.processes import RunLock
from rl.reporting import check_writable
from rl.runtime import WorkerSettings, make_worker_settings
from rl.serve.app import JsonLineFormatter, make_app, make_chat_page_route
from rl.serve.openai_routes import make_openai_routes as openai_routes
from rl.serve.request_store import PendingRequest, RequestStore
from rl.serve.serve_settings import WORKER_FLAGS, ServedBaseModel, ServeLimits, ServeSettings
from rl.serve.served_models import ModelManager, ServerParts
from rl.serve.serving_engine import ServingEngine
from rl.serve.session_store import SessionStore
from rl.serve.tinker_rest import TinkerRestRoutes, UrlSigner
from rl.serve.tinker_routes import TinkerRoutes
from rl.types.feature_table import check_features

log = logging.getLogger("whetstone.serve")
KEYS_VARIABLE = "WHETSTONE_SERVE_KEYS"
_NO_SUCH_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def read_serve_settings(args: argparse.Namespace) -> ServeSettings:
    """Return the settings of the command line, with the keys of a file and the environment.

    Raises UserError if the keys file cannot be read or has no key, or if a setting has a wrong
    value.
    """
    keys = os.environ.get(KEYS_VARIABLE, "").split(",")
    if args.keys_file:
        try:
            lines = Path(args.keys_file).read_text("utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"--keys-file {args.keys_file} cannot be read: "
                f"{getattr(error, 'strerror', None) or error}"
            ) from error
        file_keys = [line for line in map(str.strip, lines) if line and line[0] != "#"]
        if not file_keys:  # otherwise the server would be open to everyone on this machine
            raise UserError(f"--keys-file {args.keys_file} has no key: write a key on each line")
        keys += file_keys
    options = {name: value for name, value in vars(args).items() if value is not None}
    limits = {name: options[name] for name in vars(ServeLimits()) if name in options}
    if args.resume and not args.output_dir:
        raise UserError("--resume continues the server of a folder: give its --output-dir")
    folder = f"runs/served-{time.strftime('%Y%m%d-%H%M%S')}"
    worker, base_dtype = _read_worker_settings(options)
    if args.sampler == "vllm":
        worker = _use_vllm_servers(worker, args)
    elif args.sampler_url or args.sampler_folder:
        raise UserError("--sampler-url and --sampler-folder are of --sampler vllm: add it")
    names = {field.name for field in fields(ServeSettings)}
    values = {name: value for name, value in options.items() if name in names}
    values |= {
        "bases": tuple(map(ServedBaseModel.parse, args.base_model)),
        "output_dir": Path(args.output_dir or folder),
        "keys": tuple(dict.fromkeys(stripped for key in keys if (stripped := key.strip()))),
        "limits": ServeLimits(**limits),
        "worker": worker,
        "base_dtype": base_dtype,
    }
    return ServeSettings(**values)


def _read_worker_settings(options: Mapping[str, Any]) -> tuple[WorkerSettings, str]:
    """Return (`worker`, `base_dtype`) of `ServeSettings` from the texts of the `WORKER_FLAGS`.

    Raises SettingsError for values that train.py refuses too.
    """
    problems: list[str] = []
    sections = []
    for section, flags in WORKER_FLAGS.items():
        texts = {
            name: RawValue((str(options[name]),), f"--{name.replace('_', '-')}")
            for name in flags
            if name in options
        }
        sections.append(build_settings(section, texts, problems, flags=flags))
    if problems:
        raise SettingsError(problems)
    model, sampling, optim = sections
    return make_worker_settings(model, sampling, optim), model.base_dtype


def _use_vllm_servers(worker: WorkerSettings, args: argparse.Namespace) -> WorkerSettings:
    """Return worker settings whose sampler is vLLM servers. Raises UserError if that cannot be."""
    if not args.sampler_url:
        raise UserError("--sampler vllm needs --sampler-url, the addresses of vLLM servers")
    if len(args.base_model) > 1:
        check_features(("vllm", "several models"))
    sampler = replace(
        worker.sampler, kind="vllm", urls=tuple(args.sampler_url), folder=args.sampler_folder
    )
    return replace(worker, sampler=sampler)


@dataclass
class ModelServer(ServerParts):
    """Hold the parts of a server and its HTTP application."""

    app: Any

    @classmethod
    def create(cls, settings: ServeSettings) -> ModelServer:
        """Create the parts of a server.

        Ranks other than 0 serve rank 0 inside this call and exit in it. Raises UserError if the
        output folder was written by another server and `settings.resume` is off.
        """
        session_store = SessionStore(settings)
        if session_store.has_saved_sessions() and not settings.resume:
            raise UserError(
                f"{settings.output_dir} was written by another server: pass --resume to continue "
                "it, or choose another folder"
            )
        tp_size = settings.worker.sampler.tp
        for base in settings.bases if tp_size > 1 else ():  # before weights are loaded
            ModelSkeleton(base.source, base.tokenizer, None).shape.check_tensor_parallel(tp_size)
        is_bf16 = settings.worker.dtype == "bf16" or (
            settings.worker.dtype == "auto" and torch.cuda.is_available()
        )
        sharding = get_launch_sharding()
        choose_base_dtype(settings.base_dtype, lora=True, bf16=is_bf16, sharding=sharding)
        worker = replace(settings.worker, share_bases=True)
        engine = ServingEngine(
            ServiceClient(output_dir=settings.output_dir, seed=settings.seed, settings=worker),
            settings,
            session_store.has_other_tenants,
        )
        limits = settings.limits
        model_manager = ModelManager(engine, session_store)
        request_store = RequestStore(
            limits.result_seconds,
            limits.resend_seconds,
            limits.held_bytes,
            session_store.has_other_tenants,
        )
        engine.metrics.set_gauge("held_bytes", lambda: request_store.total_bytes)
        if settings.resume and session_store.has_saved_sessions():
            session_store.load_sessions({base.name: base for base in settings.bases})
            for model in session_store.models.values():
                if model.last_update is not None:
                    request_id = f"{model.model_id}:{model.last_update['seq']}"
                    last_request = PendingRequest(
                        request_id, model.owner, "optim_step", tenant=model.tenant
                    )
                    request_store.add(last_request, model.last_update["result"])
        parts, links = (engine, session_store, model_manager, request_store), UrlSigner()
        routes = [
            *TinkerRoutes(*parts).routes(),
            *TinkerRestRoutes(*parts, links).routes(),
            *openai_routes(model_manager),
            make_chat_page_route(),
        ]
        return cls(*parts, make_app(engine, routes, links))

    def run_upkeep(self) -> None:
        """Call `do_upkeep`, and log its errors: of a full disk, for example. It is called again."""
        try:
            self.do_upkeep()
        except Exception as error:  # boundary: requests go on
            log.error("upkeep of sessions failed", exc_info=error)

    def do_upkeep(self) -> None:
        """Skip lost numbers, remove expired results, and end sessions without a heartbeat."""
        self.model_manager.skip_lost_numbers()
        self.request_store.remove_expired()
        silent_since = time.monotonic() - self.engine.settings.limits.session_seconds
        for session in self.session_store.list_live_sessions():
            if session.last_used < silent_since:
                self.model_manager.end_session(session, "silent")

    def shut_down(self, seconds: float = 90.0) -> None:
        """Shut the server down within `seconds`.

        Let running work finish for a third of `seconds`, answer waiting requests with "try again",
        and write the models.
        """
        end = time.monotonic() + seconds
        self.engine.shut_down(seconds / 3)
        self.model_manager.interrupt_waiting()
        if self.engine.join(max(0.0, end - time.monotonic())):
            self.model_manager.write_all_models()
        self.engine.service.close()


def bind_sockets(settings: ServeSettings) -> list[socket.socket]:
    """Return bound sockets for the host and port, a socket for each local address of the host name.

    The sockets do not listen yet: early connections are refused, and no other process gets the
    port. Raises UserError if no address can be bound.
    """
    try:
        addresses = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (socket.gaierror, UnicodeError) as error:
        raise UserError(
            f"--host {settings.host}: {getattr(error, 'strerror', None) or error}"
        ) from error
    sockets: list[socket.socket] = []
    last_error: OSError | None = None
    for family, _, _, _, (host, port, *more) in sorted(
        set(addresses), key=lambda info: info[0] != socket.AF_INET
    ):
        if sockets:  # port 0 selects any free port, which all sockets must share
            port = sockets[0].getsockname()[1]
        try:
            sockets.append(_bind_socket(family, (host, port, *more)))
        except OSError as error:
            if error.errno not in _NO_SUCH_ADDRESS:
                raise _make_bind_error(settings, error) from error
            last_error = error
    if not sockets:
        raise _make_bind_error(settings, last_error) from last_error
    return sockets


def _bind_socket(family: int, address: tuple) -> socket.socket:
    """Return a socket that is bound to `address`.

    With SO_REUSEADDR, Linux lets two sockets bind the same port as long as neither listens.
    Therefore SO_REUSEADDR is set only if binding fails without it, which happens while connections
    of an ended server remain on the port. It is cleared after binding, until `allow_port_reuse`.
    """
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            # IPv4 has a separate socket
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            sock.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            allow_port_reuse([sock])
            sock.bind(address)
            allow_port_reuse([sock], False)
        return sock
    except OSError:
        sock.close()
        raise


def allow_port_reuse(sockets: list[socket.socket], allow: bool = True) -> None:
    """Set SO_REUSEADDR before the sockets listen.

    The next server on the port then need not wait for remaining connections of this server.
    """
    for sock in sockets:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(allow))


def _make_bind_error(settings: ServeSettings, error: OSError | None) -> UserError:
    """Return the error for an address that cannot be bound, with its remedy."""
    other_address = "pass an address of this machine, or 0.0.0.0 for all"
    remedy = {
        None: "it has no address",
        errno.EADDRINUSE: "the port is in use: pass another --port (0 selects any free port)",
        errno.EACCES: "this user lacks the rights for it: pass a --port above 1023",
        errno.EADDRNOTAVAIL: f"this machine has no such address: {other_address}",
        errno.EAFNOSUPPORT: f"this machine has no address of this family: {other_address}",
    }
    reason = remedy.get(error.errno if error is not None else None, str(error))
    return UserError(f"--host {settings.host} --port {settings.port}: {reason}")


def check_certificate(cert: Path | None, key: Path | None) -> None:
    """Raise UserError if the TLS files cannot be read, or are not a certificate and its key."""
    if cert is None or key is None:
        return
    for flag, path in (("--tls-cert", cert), ("--tls-key", key)):
        if not os.access(path, os.R_OK) or not Path(path).is_file():
            raise UserError(f"{flag} {path}: no such file, or it cannot be read")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, lambda: "")
    except (ssl.SSLError, ValueError, OSError) as error:
        reason = getattr(error, "reason", None) or str(error)
        raise UserError(
            f"--tls-cert {cert} and --tls-key {key} are not a certificate and its key, in PEM and "
            f"without a password ({reason})"
        ) from error


def make_timeout_protocol(header_seconds: float) -> type[asyncio.Protocol]:
    """Return uvicorn's HTTP protocol with a timeout for the head of a request.

    It closes a connection if the head has not arrived after `header_seconds`. uvicorn itself limits
    only the idle time of a connection after a response.
    """

    class LimitedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        """Close connections with a late head."""

        _head_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._update_timer()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._update_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def _update_timer(self) -> None:
            """Stop the timer while a request with a complete head is answered; otherwise start it.

            The first bytes of the next request start it, and further bytes do not extend it.
            """
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop_timer()
            elif self._head_timer is None:
                self._head_timer = self.loop.call_later(header_seconds, self.transport.close)

        def _stop_timer(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

    return LimitedProtocol


def _end_process(message: str, **fields: Any) -> None:
    """Log why, and end the process without the rest of the shutdown."""
    log.error(message, extra=fields)
    logging.shutdown()
    os._exit(1)


def exit_after(seconds: float) -> None:
    """End the process after `seconds`, even if a load, a long kernel or a disk access hangs."""
    message = "the server did not shut down in time: everything not yet written is lost"
    timer = threading.Timer(seconds, _end_process, (message,), {"seconds": seconds})
    timer.daemon = True
    timer.start()


def main(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT, then return exit code 0.

    Raises UserError if a setting, the certificate, the address or the output folder is unusable.
    """
    settings = read_serve_settings(args)
    check_writable(settings.output_dir)
    check_certificate(settings.tls_cert, settings.tls_key)
    # only rank 0 listens; the other ranks execute its calls
    sockets = bind_sockets(settings) if os.environ.get("RANK", "0") == "0" else None
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLineFormatter())  # the server's log as JSON lines
    for logger in (log, logging.getLogger("uvicorn")):
        logger.handlers[:], logger.propagate = [handler], False
    log.setLevel(logging.INFO)
    settings.output_dir.mkdir(parents=True, exist_ok=True)
    # a restarted server may meet the lock of one that was killed on another machine
    lock = RunLock(settings.output_dir, patient=settings.resume)
    if sockets is not None:
        lock.acquire(warn=log.warning)
    try:
        served = ModelServer.create(settings)
        served.engine.start()

        async def keep_up() -> None:
            try:
                lock.check_held()
            except Exception as error:  # the models are not written to a folder of another server
                _end_process("the server ends at once", error=str(error))
            served.run_upkeep()

        config = uvicorn.Config(
            served.app,
            http=make_timeout_protocol(settings.limits.header_seconds),
            ssl_certfile=settings.tls_cert and str(settings.tls_cert),
            ssl_keyfile=settings.tls_key and str(settings.tls_key),
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            callback_notify=keep_up,
            timeout_notify=-(10**10),  # once a second, even if the clock is set back
            # for responses that are being sent
            timeout_graceful_shutdown=max(1, int(settings.stop_grace / 6)),
        )
        # with uvloop's event loop and httptools' parser where they are installed
        _HttpServer(config, served).run(sockets)
    finally:
        lock.release()
        with contextlib.suppress(OSError):
            settings.output_dir.rmdir()  # nothing was saved
    return 0


class _HttpServer(uvicorn.Server):
    """Run uvicorn on bound sockets until SIGTERM or SIGINT, then shut down the parts first."""

    def __init__(self, config: uvicorn.Config, parts: ModelServer):
        super().__init__(config)
        self.parts, self.settings = parts, parts.engine.settings

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn's own handlers end the process by the signal, without an exit code
        loop = asyncio.get_running_loop()
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signal_number, setattr, self, "should_exit", True)
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen, and print the address."""
        allow_port_reuse(sockets or [])
        await super().startup(sockets)
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        protocol = "https" if self.settings.tls_cert else "http"
        address = f"{protocol}://{f'[{host}]' if ':' in host else host}:{port}"
        log.info("listening", extra={"address": address})
        names = ", ".join(base.name for base in self.settings.bases)
        print(f"serving {names} at {address}", flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down the parts while /healthz still answers, then close the connections."""
        exit_after(self.settings.stop_grace)
        await asyncio.to_thread(self.parts.shut_down, self.settings.stop_grace)
        await super().shutdown(sockets)
