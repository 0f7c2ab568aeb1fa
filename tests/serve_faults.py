"""Run by test_serve_durable.py under LD_PRELOAD of faulty_disk.c: a durable server whose disk goes wrong at operation k, for every k.

Usage: serve_faults.py BASE FOLDER make | BASE FOLDER reference | BASE FOLDER full FIRST STRIDE | BASE FOLDER kill K
"""

import ctypes
import json
import shutil
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]
from serving import Wire, server  # noqa: E402
from test_serve import texts  # noqa: E402

DISK = ctypes.CDLL(None)
SEQ = 3  # of the update that goes wrong: the first was 2


def begin(folder: Path) -> None:
    """A model with one update, written out; its session's name in `folder`/session."""
    with server(folder / "out", durable=True) as one:
        wires = Wire(one)
        (folder / "session").write_text(wires.open())
        model = wires.model()
        wires.output(wires.ask(model, 1, texts(4, 0)))
        wires.wait(wires.step(model, 2))


def opened(folder: Path, one) -> tuple[Wire, str]:
    wires = Wire(one)
    wires.session = (folder / "session").read_text()
    return wires, f"{wires.session}:train:0"


def score(wires: Wire, model: str, seq: int) -> list[float]:
    """Logprobs of some texts, which tell one version of the weights from another."""
    return [float(x) for row in wires.output(wires.ask(model, seq, texts(3, 9), forward_only=True))[0] for x in row]


def reference(folder: Path) -> dict:
    """What the weights say before the second update, after it, and after another one; and how many disk operations it takes."""
    with server(folder / "out", durable=True, resume=True) as one:
        wires, model = opened(folder, one)
        said = [score(wires, model, 3)]
        wires.output(wires.ask(model, 4, texts(4, 1)))
        DISK.arm(0, 0)
        wires.wait(wires.step(model, 5))
        total = DISK.count(-1)
        DISK.disarm()
        said.append(score(wires, model, 6))
        wires.output(wires.ask(model, 7, texts(4, 2)))
        wires.wait(wires.step(model, 8))
        said.append(score(wires, model, 9))
    return {"operations": total, "scores": said}


def full(base: Path, folder: Path, first: int, stride: int) -> dict:
    """The disk is full from operation k of the update on; then there is room again, and the client does the step once more."""
    found, k, total = [], first, None
    while total is None or k <= total:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(base, folder)
        with server(folder / "out", durable=True, resume=True) as one:
            wires, model = opened(folder, one)
            wires.output(wires.ask(model, 3, texts(4, 1)))
            DISK.arm(k, 2)
            answer = wires.wait(wires.step(model, 4))
            if "error" not in answer:
                total = min(total or 10**6, DISK.count(-1))
            DISK.disarm()
            row = {"k": k, "failed": answer.get("error"), "category": answer.get("category"), "after": score(wires, model, 5)}
            left = [path.name for path in (folder / "out").rglob("*.partial*")]
            if row["failed"]:
                row["bare"] = wires.wait(wires.step(model, 6))
                wires.output(wires.ask(model, 7, texts(4, 1)))
                assert "error" not in wires.wait(wires.step(model, 8))
                row["again"] = score(wires, model, 9)
            found.append({**row, "left": left})
        with server(folder / "out", durable=True, resume=True) as one:
            wires, model = opened(folder, one)
            row["resumed"] = score(wires, model, one.book.models[model].next_seq)
            found[-1]["resumed"] = row["resumed"]
        k += stride
    return {"rows": found}


def killed(folder: Path, k: int) -> None:
    """The process ends at operation k of the update."""
    with server(folder / "out", durable=True, resume=True) as one:
        wires, model = opened(folder, one)
        wires.output(wires.ask(model, 3, texts(4, 1)))
        DISK.arm(k, 1)
        wires.wait(wires.step(model, 4))
        DISK.disarm()
        print("survived")


def main(base: Path, folder: Path, mode: str, *numbers: str) -> None:
    if mode == "make":
        base.mkdir(parents=True)
        begin(base)
        return
    if mode == "full":
        print(json.dumps(full(base, folder, *map(int, numbers))))
        return
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(base, folder)
    if mode == "reference":
        print(json.dumps(reference(folder)))
    else:
        killed(folder, int(numbers[0]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
