"""Run the monitor, a process next to a run and outside its namespaces.

The monitor is the only process that talks to the caller.

The monitor counts time, output and memory, and ends a run that exceeds a limit. A run's verdicts
pass through the monitor with the caller's nonce, on a socket that no candidate has.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import tempfile
import time
from typing import Any

from rl.sandbox.inside import (
    init_process,
    isolation,
    message_framing,
    pytest_tester,
    reply_parser,
    tester,
)
from rl.sandbox.inside.message_framing import JsonObject
from rl.sandbox.inside.run_watcher import CallerClosedError, LimitReached, RunWatcher

_INIT_REPLY_SECONDS = 5.0


def serve(caller: socket.socket, layers: set[str], user: int, group: int) -> None:
    """Serve a job, from its first message until the caller closes the socket. Never returns."""
    monitor = None
    try:
        isolation.die_with_parent()
        monitor = Monitor(caller, layers, user, group)
        monitor.serve()
    except (message_framing.ConnectionClosedError, CallerClosedError):
        pass
    except BaseException as error:
        with contextlib.suppress(BaseException):
            message_framing.send(caller, {"failed": f"{type(error).__name__}: {error}"})
    finally:
        if monitor is not None:
            monitor.end_init()
        os._exit(0)


class Monitor:
    """Serve the requests of the caller for a single job."""

    def __init__(self, caller: socket.socket, layers: set[str], user: int, group: int):
        self.caller, self.layers = caller, layers
        self.nonce = ""
        # Fork before this process reads any part of the job: a candidate is a fork of init and can
        # read all of the memory that init had.
        init_socket, init_end = socket.socketpair()
        self.init_pid = isolation.fork_into(layers)
        if self.init_pid == 0:
            init_socket.close()
            caller.close()
            init_process.serve(init_end, layers, user, group)
        init_end.close()
        self.init = init_socket
        self.job: JsonObject = {}
        self.watch: RunWatcher | None = None
        self.requests = self.replies = -1  # pipes of a serving candidate
        self.request_count = 0

    def serve(self) -> None:
        verbs = {
            "begin": self._begin,
            "case": self._case,
            "call": self._call,
            "tests": self._tests,
            "end": self._end,
        }
        while True:
            message = message_framing.receive(self.caller)
            start = time.monotonic()
            reply = verbs[message["do"]](message)
            wall_s = time.monotonic() - start
            message_framing.send(self.caller, {"wall_s": wall_s, **reply, "nonce": self.nonce})

    # ------------------------------------------------------------------------------------- requests

    def _begin(self, job: JsonObject) -> JsonObject:
        self.nonce = job.pop("nonce")
        self.job = job
        # Counting costs time: spend it on the core of this run, not on the core of another run.
        if "cores" in self.layers and job["cores"]:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, job["cores"])
        message_framing.send(self.init, job)
        reply = message_framing.receive(self.init)
        if "begun" not in reply:
            raise RuntimeError(reply.get("failed", "init did not begin"))
        return {"begun": True}

    def _case(self, message: JsonObject) -> JsonObject:
        """Run a program from start to end. Return its output and the way it ended."""
        if message.get("clean"):
            message_framing.send(self.init, {"do": "clean"})
            message_framing.receive(self.init)
        start = time.monotonic()
        source = os.memfd_create("stdin")
        with os.fdopen(os.dup(source), "wb") as file:
            file.write(message_framing.encode_text(message["stdin"]))
        os.lseek(source, 0, os.SEEK_SET)
        watch = self._start(message, source, [])
        by = ""
        try:
            watch.wait_for_end(start + message["wall_s"])
        except LimitReached as stopped:
            by = stopped.reason
        ended = self._stop(by)
        # The last count was up to a tick before the end.
        if not ended["ended_by"] and ended["cpu_s"] >= self.job["limits"]["cpu_s"]:
            ended["ended_by"] = "cpu"
        return {**ended, "wall_s": time.monotonic() - start}

    def _call(self, message: JsonObject) -> JsonObject:
        """Send a request to the candidate's server, which is started on the first call."""
        until = time.monotonic() + message["wall_s"]
        try:
            watch = self._serve_candidate()
            if self.request_count == 0:
                failed = reply_parser.read_loaded(watch.read_message(self.replies, until))
                if failed is not None:
                    return {**self._stop("load"), "text": failed[1]}
            else:  # the first request includes the load
                watch.begin_request()
            self.request_count += 1
            watch.send(self.requests, {**message["request"], "id": self.request_count}, until)
            # Forwarded unparsed: the caller parses the message by the grammar of `reply_parser`, only
            # there, and requests the end of a candidate that forges messages.
            body = watch.read_frame(self.replies, until).decode("utf-8")
            watch.drain()
            out, err = watch.take_output()
            return {"reply": body, "number": self.request_count, "stdout": out, "stderr": err}
        except (LimitReached, message_framing.ConnectionClosedError) as stopped:
            return self._stop(getattr(stopped, "reason", ""))
        except (reply_parser.ForgedMessageError, UnicodeDecodeError):
            return self._stop("forged")

    def _tests(self, message: JsonObject) -> JsonObject:
        """Run test texts in a tester that queries the candidate. Return verdicts up to the first
        test that ended either process.
        """
        start = time.monotonic()
        self._end({})
        watch = self._serve_candidate()
        verdict_reader, verdict_writer = os.pipe()
        # Without private mounts this folder is the host's. The tester may be killed, so that only
        # the monitor can remove it.
        folder = tempfile.mkdtemp(prefix="tests-") if "files" in message else ""
        pid = self._fork_tester({**message, "folder": folder}, verdict_reader, verdict_writer)
        os.close(verdict_writer)
        os.close(self.requests)
        os.close(self.replies)
        self.requests = self.replies = -1
        results: list[list[Any]] = []
        by, until, collected = "", start + message["wall_s"], 0
        try:
            while True:
                verdict = watch.read_message(verdict_reader, min(until, start + message["total_s"]))
                if "done" in verdict:
                    break
                if "ended_by" in verdict:  # the candidate broke the protocol, and the tester exited
                    by = verdict["ended_by"]
                    break
                if "collected" in verdict:
                    collected = int(verdict["collected"])
                else:
                    results.append([verdict["ok"], verdict["why"]])
                until = time.monotonic() + message["wall_s"]
                watch.begin_request()
        except LimitReached as stopped:
            by = stopped.reason
        except (message_framing.ConnectionClosedError, message_framing.BadMessage):
            by = "tester"
        finally:  # also if the caller has closed the socket
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            if folder:
                shutil.rmtree(folder, ignore_errors=True)
        os.close(verdict_reader)
        return {**self._stop(by), "verdicts": results, "collected": collected}

    def _fork_tester(self, message: JsonObject, verdict_reader: int, verdict_writer: int) -> int:
        """Fork the tester. A tester of asserts cannot write files; a tester of pytest gets a
        private /tmp.
        """
        files = "files" in message
        layers = self.layers & {"user", "mounts"} if files else set()
        user, group = os.getuid(), os.getgid()
        pid = isolation.fork_into(layers)
        if pid == 0:
            try:
                os.close(verdict_reader)
                self.init.close()
                self.caller.close()
                assert self.watch is not None
                self.watch.close()
                isolation.map_user(layers, user, group)
                isolation.mount_private(
                    layers, int(self.job["limits"]["file_mb"]), int(self.job["limits"]["files"])
                )
                run = pytest_tester.run_pytest if files else tester.run_asserts
                tester.serve(
                    message,
                    self.requests,
                    self.replies,
                    verdict_writer,
                    self.layers,
                    self.job["limits"],
                    run,
                )
            finally:
                os._exit(1)
        return pid

    def _end(self, _: JsonObject) -> JsonObject:
        return self._stop("") if self.watch is not None else {"ended": None}

    def end_init(self) -> None:
        """End init, and with it the namespaces and all their processes."""
        with contextlib.suppress(OSError):
            self.init.close()
            # without a PID namespace, init itself ends the remaining processes
            if "pid" in self.layers:
                os.kill(self.init_pid, signal.SIGKILL)
            os.waitpid(self.init_pid, 0)

    # -------------------------------------------------------------------------------- the candidate

    def _start(self, message: JsonObject, source: int, channel: list[int]) -> RunWatcher:
        """Let init start a candidate with `source` as its input. The descriptors belong to the
        candidate and are closed here.
        """
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        fds = (source, out_end, err_end, *channel)
        message_framing.send(self.init, {**message, "stdin": None, "do": "run"}, fds)
        for descriptor in fds:
            os.close(descriptor)
        self.watch = RunWatcher(
            self.init,
            self.caller,
            out,
            err,
            self.job["limits"],
            self.init_pid,
            counting="watch" in self.layers,
        )
        reply = message_framing.receive(self.init)
        if "started" not in reply:
            raise RuntimeError(reply.get("failed", "init started nothing"))
        return self.watch

    def _serve_candidate(self) -> RunWatcher:
        if self.watch is not None:
            return self.watch
        (requests, request_sink), (reply_source, reply_sink) = os.pipe(), os.pipe()
        self.requests, self.replies, self.request_count = request_sink, reply_source, 0
        return self._start(
            {"mode": "serve"}, os.open("/dev/null", os.O_RDONLY), [requests, reply_sink]
        )

    def _stop(self, by: str) -> JsonObject:
        """End the candidate if it still runs. Return its output and the way it ended."""
        watch = self.watch
        assert watch is not None
        self.watch = None
        for descriptor in {self.requests, self.replies} - {-1}:
            os.close(descriptor)
        self.requests = self.replies = -1
        ended = watch.ended
        self.init.settimeout(_INIT_REPLY_SECONDS)
        if ended is None:
            message_framing.send(self.init, {"do": "end"})
            ended = message_framing.receive(self.init)
            message_framing.receive(self.init)
        else:
            message_framing.send(self.init, {"do": "ack"})
        self.init.settimeout(None)
        watch.drain()
        out, err = watch.take_output()
        watch.close()
        status = int(ended["ended"])
        signalled = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
        if signalled == signal.SIGXCPU and by in ("", "tester"):
            by = "cpu"
        return {
            "ended": True,
            "ended_by": by,
            "signal": signalled,
            "code": code,
            "stdout": out,
            "stderr": err,
            "cpu_s": ended["cpu_s"],
            "memory_mb": max(ended["memory_mb"], watch.peak_mb),
        }
