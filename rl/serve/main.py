"""Start the server from the command line, run it, and shut it down."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rl.clients import SamplerSettings, ServiceClient, WorkerSettings
from rl.errors import UserError
from rl.memory import Skeleton, check_team_holds
from rl.serve.app import JsonLines, make_app
from rl.serve.book import Book
from rl.serve.chat_routes import routes as openai_routes
from rl.serve.desk import Desk
from rl.serve.door import check_certificate, listen_soon, take_address
from rl.serve.links import Links
from rl.serve.promises import Promise, Promises, settled
from rl.serve.rest import Rest
from rl.serve.samples import Samples
from rl.serve.settings import Limits, ServedBase, ServeSettings
from rl.serve.tenants import Tenants, end_session
from rl.serve.time_limits import limited_protocol
from rl.serve.tinker import Tinker

log = logging.getLogger("whetstone.serve")
KEYS = "WHETSTONE_SERVE_KEYS"


def settings_of(args: argparse.Namespace) -> ServeSettings:
    """Return the settings of the command line, with the keys of a file and the environment.

    Raises UserError if the keys file cannot be read, or if a setting has a wrong value.
    """
    keys = [key.strip() for key in os.environ.get(KEYS, "").split(",")]
    if args.keys_file:
        try:
            keys += [
                line.strip()
                for line in Path(args.keys_file).read_text().splitlines()
                if not line.startswith("#")
            ]
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"--keys-file {args.keys_file} cannot be read: "
                f"{getattr(error, 'strerror', None) or error}"
            ) from error
    limits = {
        name: value for name in vars(Limits()) if (value := getattr(args, name, None)) is not None
    }
    return ServeSettings(
        bases=tuple(ServedBase.parse(text) for text in args.base_model),
        output_dir=Path(
            args.output_dir or Path("runs") / f"served-{time.strftime('%Y%m%d-%H%M%S')}"
        ),
        host=args.host,
        port=args.port,
        keys=tuple(dict.fromkeys(key for key in keys if key)),
        tls_cert=args.tls_cert,
        tls_key=args.tls_key,
        seed=args.seed,
        resume=args.resume,
        durable=args.durable,
        renderer=args.renderer,
        stop_grace=args.stop_grace,
        limits=Limits(**limits),
        worker=WorkerSettings(sampler=SamplerSettings(tp=args.sampler_tp)),
    )


@dataclass
class Served:
    """Hold the parts of a server: engine, session store, models, pending requests, HTTP app."""

    desk: Desk
    book: Book
    tenants: Tenants
    promises: Promises
    app: Any

    @classmethod
    def of(cls, settings: ServeSettings) -> Served:
        """Create the parts of a server.

        Ranks other than 0 serve rank 0 inside this call and exit in it. Raises UserError if the
        output folder was written by another server and `settings.resume` is off.
        """
        session_store = Book(settings.output_dir, settings.limits)
        if session_store.found_there() and not settings.resume:
            raise UserError(
                f"{settings.output_dir} was written by another server: pass --resume to continue "
                "it, or choose another folder"
            )
        tp_size = settings.worker.sampler.tp
        for base in settings.bases if tp_size > 1 else ():  # before weights are loaded
            check_team_holds(Skeleton(base.where, base.tokenizer, None).shape, tp_size)
        worker = replace(settings.worker, share_bases=True)
        engine = Desk(
            ServiceClient(output_dir=settings.output_dir, seed=settings.seed, settings=worker),
            settings,
        )
        limits = settings.limits
        model_manager, request_store = (
            Tenants(engine, session_store),
            Promises(limits.result_seconds, limits.told_seconds, limits.held_bytes),
        )
        request_store.others = model_manager.others
        engine.tally.gauges["held_bytes"] = lambda: float(request_store.held)
        if settings.resume and session_store.found_there():
            session_store.read_again({base.name: base for base in settings.bases})
            for model in session_store.models.values():
                if model.last is not None:
                    last_request = Promise(
                        f"{model.model_id}:{model.last['seq']}",
                        model.owner,
                        "optim_step",
                        session=model.session,
                    )
                    request_store.add(settled(last_request, model.last["result"]))
        parts, links = (engine, session_store, model_manager, request_store), Links()
        routes = [
            *Tinker(*parts).routes(),
            *Samples(*parts).routes(),
            *Rest(*parts, links).routes(),
            *openai_routes(engine),
        ]
        return cls(*parts, make_app(engine, routes, links))

    async def look_after(self) -> None:
        """Call `look` every second, until cancelled."""
        while True:
            await asyncio.sleep(1.0)
            try:
                self.look()
            except Exception as error:  # boundary: for example a full disk; retried in 1 s
                log.error(
                    "upkeep of sessions failed",
                    extra={"error": type(error).__name__},
                    exc_info=error,
                )

    def look(self) -> None:
        """Skip lost numbers, remove expired results, and end sessions without a heartbeat."""
        self.tenants.pass_gaps()
        self.promises.sweep()
        silent_since = time.monotonic() - self.desk.settings.limits.session_seconds
        for session in [
            candidate
            for candidate in list(self.book.sessions.values())
            if candidate.finished is None and candidate.beat < silent_since
        ]:
            end_session(self.desk, self.tenants, session, "silent")

    def end(self, seconds: float = 90.0) -> None:
        """Shut the server down within `seconds`.

        Let running work finish for a third of `seconds`, answer waiting requests with "try again",
        and write the models.
        """
        end = time.monotonic() + seconds
        self.desk.end(seconds / 3)
        self.tenants.give_up_waiting()
        if self.desk.join(max(0.0, end - time.monotonic())):
            self.tenants.write_all()
        self.desk.service.close()


def exit_in_time(seconds: float) -> threading.Timer:
    """End the process after `seconds`, even if a load, a long kernel or a disk access hangs."""

    def exit_process() -> None:
        log.error(
            "the server did not shut down in time: everything not yet written is lost",
            extra={"seconds": seconds},
        )
        logging.shutdown()
        os._exit(1)

    timer = threading.Timer(seconds, exit_process)
    timer.daemon = True
    timer.start()
    return timer


def main(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT, then return exit code 0.

    Raises UserError if a setting, the certificate, the address or the output folder is unusable.
    """
    settings = settings_of(args)
    check_certificate(settings.tls_cert, settings.tls_key)
    # only rank 0 listens; the other ranks execute its calls
    sockets = take_address(settings) if os.environ.get("RANK", "0") == "0" else None
    _log_lines()
    served = Served.of(settings)
    served.desk.start()
    asyncio.run(_serve(served, settings, sockets or []))
    return 0


async def _serve(served: Served, settings: ServeSettings, taken: list[socket.socket]) -> None:
    """Run uvicorn on the bound sockets until a signal arrives, then shut down."""
    import uvicorn

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # the signal handlers are installed below

    config = uvicorn.Config(
        served.app,
        http=limited_protocol(settings.limits.header_seconds),
        host=settings.host,
        port=settings.port,
        ssl_certfile=settings.tls_cert and str(settings.tls_cert),
        ssl_keyfile=settings.tls_key and str(settings.tls_key),
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        # for responses that are being sent
        timeout_graceful_shutdown=max(1, int(settings.stop_grace / 6)),
    )
    server = Server(config)
    loop = asyncio.get_running_loop()
    stop_requested: asyncio.Event = asyncio.Event()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, stop_requested.set)
    listen_soon(taken)
    serve_task = asyncio.create_task(server.serve(taken))
    while not server.started and not serve_task.done():
        await asyncio.sleep(0.01)
    if server.started:
        address = _address(server, settings)
        log.info("listening", extra={"address": address})
        print(f"serving {', '.join(base.name for base in settings.bases)} at {address}", flush=True)
    stop_task, upkeep_task = (
        asyncio.create_task(stop_requested.wait()),
        asyncio.create_task(served.look_after()),
    )
    await asyncio.wait({serve_task, stop_task}, return_when=asyncio.FIRST_COMPLETED)
    upkeep_task.cancel()
    exit_in_time(settings.stop_grace)
    await asyncio.to_thread(served.end, settings.stop_grace)
    server.should_exit = True
    await serve_task


def _address(server: Any, settings: ServeSettings) -> str:
    """Return the URL at which the server listens."""
    host, port = server.servers[0].sockets[0].getsockname()[:2]
    return (
        f"{'https' if settings.tls_cert else 'http'}://"
        f"{f'[{host}]' if ':' in host else host}:{port}"
    )


def _log_lines() -> None:
    """Write the server's log to stderr as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logger = logging.getLogger("whetstone.serve")
    logger.handlers[:], logger.propagate = [handler], False
    logger.setLevel(logging.INFO)
