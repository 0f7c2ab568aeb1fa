"""The process beside a run, outside its namespaces: the only one that speaks to the caller. It
counts time, output and memory, and ends what uses more. A run's verdicts pass through here with the
caller's nonce, on a socket that no candidate has.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from typing import Any

from rl.sandbox.inside import frames, init, pytest_tester, replies, tester, walls
from rl.sandbox.inside.watch import Gone, Stopped, Watch

_ENDING_SECONDS = 5.0


def serve(caller: socket.socket, up: set[str], user: int, group: int) -> None:
    """One job: from its first message until the caller closes. Never returns."""
    monitor = None
    try:
        walls.die_with_parent()
        monitor = Monitor(caller, up, user, group)
        monitor.serve()
    except (frames.Ended, Gone):
        pass
    except BaseException as error:
        with contextlib.suppress(BaseException):
            frames.send(caller, {"failed": f"{type(error).__name__}: {error}"})
    finally:
        if monitor is not None:
            monitor.end_init()
        os._exit(0)


class Monitor:
    def __init__(self, caller: socket.socket, up: set[str], user: int, group: int):
        self.caller, self.up = caller, up
        self.nonce = ""
        # Before anything of the job is read here: what init knows, a candidate can find in its own
        # memory.
        ours, theirs = socket.socketpair()
        self.init_pid = walls.fork_into(up)
        if self.init_pid == 0:
            ours.close()
            caller.close()
            init.serve(theirs, up, user, group)
        theirs.close()
        self.init = ours
        self.job: dict[str, Any] = {}
        self.watch: Watch | None = None
        self.requests = self.replies = -1  # the candidate's, where it serves
        self.asked = 0

    def serve(self) -> None:
        verbs = {
            "begin": self._begin,
            "case": self._case,
            "call": self._call,
            "tests": self._tests,
            "end": self._end,
        }
        while True:
            message = frames.receive(self.caller)
            reply = verbs[message["do"]](message)
            frames.send(self.caller, {**reply, "nonce": self.nonce})

    # ------------------------------------------------------------------------------------ the verbs

    def _begin(self, job: dict[str, Any]) -> dict[str, Any]:
        self.nonce = job.pop("nonce")
        self.job = job
        # counting costs time as well: on the run's own core, not on a neighbour's
        if "cores" in self.up and job["cores"]:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, job["cores"])
        frames.send(self.init, job)
        reply = frames.receive(self.init)
        if "begun" not in reply:
            raise RuntimeError(reply.get("failed", "init did not begin"))
        return {"begun": True}

    def _case(self, message: dict[str, Any]) -> dict[str, Any]:
        """A program from its start to its end: its output and how it ended."""
        if message.get("clean"):
            frames.send(self.init, {"do": "clean"})
            frames.receive(self.init)
        start = time.monotonic()
        source = os.memfd_create("stdin")
        with os.fdopen(os.dup(source), "wb") as file:
            file.write(frames.encode_text(message["stdin"]))
        os.lseek(source, 0, os.SEEK_SET)
        watch = self._start(message, source, [])
        by = ""
        try:
            watch.until(start + message["wall_s"])
        except Stopped as stopped:
            by = stopped.why
        return {**self._stop(by), "wall_s": time.monotonic() - start}

    def _call(self, message: dict[str, Any]) -> dict[str, Any]:
        """A request to the candidate's server, started where none runs."""
        start = time.monotonic()
        try:
            self._serve_candidate()
            assert self.watch is not None
            until = start + message["wall_s"]
            if self.asked == 0:
                failed = replies.read_loaded(self.watch.message(self.replies, until))
                if failed is not None:
                    return {
                        **self._stop("load"),
                        "text": failed[1],
                        "wall_s": time.monotonic() - start,
                    }
            self.asked += 1
            self.watch.send(self.requests, {**message["request"], "id": self.asked}, until)
            # Handed on unread: the caller reads it by the grammar of `replies`, once, and asks for
            # the end of a candidate that forges.
            body = self.watch.frame(self.replies, until).decode("utf-8")
            self.watch.drain()
            out, err = self.watch.take()
            return {
                "reply": body,
                "number": self.asked,
                "stdout": out,
                "stderr": err,
                "wall_s": time.monotonic() - start,
            }
        except (Stopped, frames.Ended) as stopped:
            return {**self._stop(getattr(stopped, "why", "")), "wall_s": time.monotonic() - start}
        except (replies.Forged, UnicodeDecodeError):
            return {**self._stop("forged"), "wall_s": time.monotonic() - start}

    def _tests(self, message: dict[str, Any]) -> dict[str, Any]:
        """Test texts in a tester that asks the candidate: verdicts up to the first test that ended
        one of the two.
        """
        start = time.monotonic()
        self._end({})
        self._serve_candidate()
        assert self.watch is not None
        says, verdicts = os.pipe()
        pid = self._fork_tester(message, says, verdicts)
        os.close(verdicts)
        os.close(self.requests)
        os.close(self.replies)
        self.requests = self.replies = -1
        found: list[list[Any]] = []
        by, until, collected = "", start + message["wall_s"], 0
        try:
            while True:
                verdict = self.watch.message(says, min(until, start + message["total_s"]))
                if "done" in verdict:
                    break
                if "by" in verdict:  # the candidate broke the protocol: the tester ended itself
                    by = verdict["by"]
                    break
                if "collected" in verdict:
                    collected = int(verdict["collected"])
                else:
                    found.append([verdict["ok"], verdict["why"]])
                until = time.monotonic() + message["wall_s"]
        except Stopped as stopped:
            by = stopped.why
        except (frames.Ended, frames.BadMessage):
            by = "tester"
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(says)
        return {
            **self._stop(by),
            "verdicts": found,
            "collected": collected,
            "wall_s": time.monotonic() - start,
        }

    def _fork_tester(self, message: dict[str, Any], says: int, verdicts: int) -> int:
        """Asserts need no file, so theirs can write none; pytest's gets a /tmp of its own."""
        files = "files" in message
        up = self.up & {"user", "mounts"} if files else set()
        user, group = os.getuid(), os.getgid()
        pid = walls.fork_into(up)
        if pid == 0:
            try:
                os.close(says)
                self.init.close()
                self.caller.close()
                assert self.watch is not None
                self.watch.close()
                walls.settle(up, user, group)
                walls.mount_private(
                    up, int(self.job["limits"]["file_mb"]), int(self.job["limits"]["files"])
                )
                run = pytest_tester.run if files else None
                tester.serve(
                    message, self.requests, self.replies, verdicts, self.up, self.job["limits"], run
                )
            finally:
                os._exit(1)
        return pid

    def _end(self, _: dict[str, Any]) -> dict[str, Any]:
        return self._stop("") if self.watch is not None else {"ended": None}

    def end_init(self) -> None:
        """And with it the namespaces and all that is in them."""
        with contextlib.suppress(OSError):
            self.init.close()
            if "pid" in self.up:  # elsewhere init itself looks for what is left, and ends it
                os.kill(self.init_pid, signal.SIGKILL)
            os.waitpid(self.init_pid, 0)

    # -------------------------------------------------------------------------------- the candidate

    def _start(self, message: dict[str, Any], source: int, channel: list[int]) -> Watch:
        """Has init start a candidate with `source` as its input; the descriptors are the
        candidate's own, closed here.
        """
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        fds = (source, out_end, err_end, *channel)
        frames.send(self.init, {**message, "stdin": None, "do": "run"}, fds)
        for descriptor in fds:
            os.close(descriptor)
        self.watch = Watch(
            self.init,
            self.caller,
            out,
            err,
            self.job["limits"],
            self.init_pid,
            counting="watch" in self.up,
        )
        reply = frames.receive(self.init)
        if "started" not in reply:
            raise RuntimeError(reply.get("failed", "init started nothing"))
        return self.watch

    def _serve_candidate(self) -> None:
        if self.watch is not None:
            return
        (requests, ours_out), (ours_in, replies) = os.pipe(), os.pipe()
        self.requests, self.replies, self.asked = ours_out, ours_in, 0
        self._start({"mode": "serve"}, os.open("/dev/null", os.O_RDONLY), [requests, replies])

    def _stop(self, by: str) -> dict[str, Any]:
        """Ends the candidate where it has not ended. How it ended, and its output."""
        watch = self.watch
        assert watch is not None
        self.watch = None
        for descriptor in {self.requests, self.replies} - {-1}:
            os.close(descriptor)
        self.requests = self.replies = -1
        ended = watch.ended
        self.init.settimeout(_ENDING_SECONDS)
        if ended is None:
            frames.send(self.init, {"do": "end"})
            ended = frames.receive(self.init)
            frames.receive(self.init)
        else:
            frames.send(self.init, {"do": "ack"})
        self.init.settimeout(None)
        watch.drain()
        out, err = watch.take()
        watch.close()
        status = int(ended["ended"])
        signalled = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
        if signalled == signal.SIGXCPU:
            by = by or "cpu"
        elif not by and watch.over_cpu(float(ended["cpu_s"])):
            by = "cpu"
        rest = {"cpu_s": ended["cpu_s"], "memory_mb": max(ended["memory_mb"], watch.most_mb)}
        return {
            "ended": True,
            "by": by,
            "signal": signalled,
            "code": code,
            "stdout": out,
            "stderr": err,
            **rest,
        }
