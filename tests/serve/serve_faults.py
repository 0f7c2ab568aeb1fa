"""Update a durable server with disk faults. Run by test_serve_durable.py under LD_PRELOAD of
faulty_disk.c.
"""

import ctypes
import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[:3]]
import peft  # noqa: E402, F401
from serving import BASE, Wire, server  # noqa: E402
from test_serve import make_text_datums  # noqa: E402

from rl.models import load_model  # noqa: E402
from rl.serve import ModelServer  # noqa: E402

DISK = ctypes.CDLL(None)


def score(wires: Wire, model: str, seq: int) -> list[float]:
    """Return logprobs of some texts, which distinguish versions of the weights."""
    return [float(x) for row in wires.score(model, seq, make_text_datums(3, 99)) for x in row]


def open_client(first: ModelServer, session: str | None = None) -> tuple[Wire, str]:
    wires = Wire(first)
    wires.session = session or wires.open()
    return wires, f"{wires.session}:train:0" if session else wires.model()


def plain_scores(folder: Path, updates: int) -> list[list[float]]:
    """Return the scores before the first update and after each update, without faults."""
    with server(folder) as first:
        wires, model = open_client(first)
        scores = [score(wires, model, 1)]
        for i in range(updates):
            wires.train(model, 2 + 3 * i, make_text_datums(4, i))
            scores.append(score(wires, model, 4 + 3 * i))
    return scores


def full(folder: Path, stride: int) -> dict[str, int]:
    """Check that a failed update has no effect, and that repeating it applies it once."""
    seq, counts = iter(range(1, 10**6)), {"undone": 0, "done": 0}
    with server(folder / "durable", durable=True) as first:
        wires, model = open_client(first)
        record = first.session_store.models[model]
        scores, k = [score(wires, model, next(seq))], 1
        while counts["done"] == 0:
            data = make_text_datums(4, len(scores) - 1)
            wires.output(wires.ask(model, next(seq), data))
            DISK.arm(k, 2)
            answer = wires.wait(wires.step(model, next(seq)))
            DISK.disarm()
            if "error" in answer:
                assert answer["category"] == "server" and "undone" in answer["error"], (k, answer)
                after = score(wires, model, next(seq))
                assert after == scores[-1], f"operation {k}: the failed update changed the weights"
                bare = wires.wait(wires.step(model, next(seq)))
                assert "repeat the forward_backward" in bare["error"], (k, bare)
                wires.output(wires.ask(model, next(seq), data))
                assert "error" not in wires.wait(wires.step(model, next(seq))), k
                remaining = [path.name for path in (folder / "durable").rglob("*.partial*")]
                assert not remaining, f"operation {k}: {remaining} was left behind"
            counts["undone" if "error" in answer else "done"] += 1
            scores.append(score(wires, model, next(seq)))
            saved = first.session_store.read_live_metadata(record)["last"]
            assert saved["seq"] == record.last_update["seq"]
            k += stride
    assert plain_scores(folder / "plain", len(scores) - 1) == scores
    return counts


def in_child(work: Callable[[], None]) -> int:
    """Run `work` in a child process. Return the exit code; -9 if it was killed."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def kill(folder: Path, stride: int) -> dict[str, int]:
    """Check an update during which the server was killed: either it was applied and gets its
    original answer, or it was not applied and must be repeated.
    """
    base, place, seen = folder / "base", folder / "place", folder / "seen"
    folder.mkdir(parents=True, exist_ok=True)

    def begin() -> None:
        with server(base, durable=True) as first:
            wires, model = open_client(first)
            wires.train(model, 1, make_text_datums(4, 0))
            (folder / "session").write_text(wires.session)

    def update(k: int) -> None:
        with server(place, durable=True, resume=True) as first:
            wires, model = open_client(first, (folder / "session").read_text())
            wires.output(wires.ask(model, 3, make_text_datums(4, 1)))
            DISK.arm(k, 1)
            wires.wait(wires.step(model, 4))
            DISK.disarm()

    def go_on() -> None:
        with server(place, durable=True, resume=True) as first:
            wires, model = open_client(first, (folder / "session").read_text())
            remaining = [path.name for path in place.rglob("*.partial*")]
            assert not remaining, f"{remaining} was left behind"
            next_seq = first.session_store.models[model].next_seq
            assert next_seq in (3, 5)
            if next_seq == 5:
                answer = wires.wait(wires.step(model, 4))
                assert answer["metrics"]["grad_norm"] > 0, "it is answered as it was"
            else:
                wires.train(model, 3, make_text_datums(4, 1))
            results = [score(wires, model, 5)]
            wires.train(model, 6, make_text_datums(4, 2))
            results.append(score(wires, model, 8))
            seen.write_text(json.dumps({"happened": next_seq == 5, "scores": results}))

    def write_plain() -> None:
        (folder / "plain").write_text(json.dumps(plain_scores(folder / "p", 3)))

    # so that no child has to import what this call imports; the call starts no threads
    load_model(BASE)
    assert in_child(begin) == 0
    assert in_child(write_plain) == 0
    expected = json.loads((folder / "plain").read_text())[2:]
    k, counts = 1, {"happened": 0, "not": 0}
    while True:
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(base, place)
        code = in_child(lambda k=k: update(k))
        assert code in (-signal.SIGKILL, 0), f"operation {k}: exit code {code}"
        assert in_child(go_on) == 0, f"operation {k}"
        row = json.loads(seen.read_text())
        assert row["scores"] == expected, f"operation {k}: happened {row['happened']}"
        counts["happened" if row["happened"] else "not"] += 1
        if code == 0:
            assert row["happened"]
            return counts
        k += stride


if __name__ == "__main__":
    check, (folder, stride) = {"full": full, "kill": kill}[sys.argv[1]], sys.argv[2:]
    print(json.dumps(check(Path(folder), int(stride))))
