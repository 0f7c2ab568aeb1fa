"""Test hostile replies with fixed seeds: first the message decoder, then a live worker against the
whole pool.
"""

import json
import math
import os
import random
import struct
import sys
import time
import zlib

import pytest
from fuzzing import ACCEPTED, REFUSED, run_family

from rl.processes import FrameReader, InvalidReply, encode_frame
from rl.rewards import Score, Scorer
from rl.rewards.reward_workers import MAX_REPLY_BYTES, decode_reply, encode_reply

NONCE = "0123456789abcdef" * 2
PID = os.getpid()
GOOD = {
    "item": 7,
    "pid": PID,
    "nonce": NONCE,
    "reward": 0.5,
    "metrics": {"a": 1.0},
    "failure": None,
    "error": None,
}


def header(payload: bytes, **change) -> bytes:
    fields = {"mark": b"WR", "length": len(payload), "checksum": zlib.crc32(payload), **change}
    return struct.pack(">2sQI", fields["mark"], fields["length"], fields["checksum"]) + payload


def hostile_value(rng: random.Random):
    """Return a value that no field should have: wrong type, huge, odd or deeply nested."""
    plain = [None, True, False, -1, 2**63, 10**400, 1e308, -0.0]
    texts = ["", "NaN ", "nan", "1.0", "\ud800", "\x1b[2J", "x" * 5000]
    nested = [[], [1.0], {}, {"a": {}}, [[[[]]]]]
    numbers = [rng.random(), rng.randrange(-(2**70), 2**70)]
    near_right = ["0" * 32, PID, PID + 1, 8, 7.0, NONCE[:-1] + "x"]
    return rng.choice([*plain, *texts, *nested, *numbers, *near_right])


def hostile_message(rng: random.Random) -> bytes:
    """Return a message that is wrong in one of eleven ways. Some changes of a field leave the
    message valid, so the test judges by content.
    """
    good = json.dumps(GOOD).encode()
    numbers = ["NaN", "Infinity", "-Infinity", "1" * 6000, "-" + "9" * 400, "1e999"]
    names = ["\ud800", "a\x1b[2J", "k" * 9000, "b"]

    def damage() -> bytes:
        damaged = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        return encode_frame(bytes(damaged))

    def nest() -> bytes:
        depth = rng.choice([100, 10_000, 200_000])
        opened, closed = rng.choice([(b"[", b""), (b"[", b"]"), (b'{"item":', b"}")])
        return encode_frame(opened * depth + (b"7" if opened != b"[" else b"") + closed * depth)

    def change(**fields) -> bytes:
        return encode_frame(json.dumps({**GOOD, **fields}).encode())

    def omit() -> bytes:
        names = rng.sample(sorted(GOOD), rng.randrange(1, 4))
        return encode_frame(json.dumps({k: GOOD[k] for k in GOOD if k not in names}).encode())

    lengths = [2**63, 2**64 - 1, MAX_REPLY_BYTES + 1, rng.randrange(MAX_REPLY_BYTES + 1, 2**64)]
    text = rng.choice([*numbers, '"\\ud800"', "true", "null"]).encode()
    ways = [
        lambda: rng.randbytes(rng.randrange(1, 300)),
        lambda: header(good, length=rng.choice(lengths)),
        lambda: header(good)[: rng.randrange(1, len(good) + 14)],
        lambda: header(good, checksum=rng.randrange(2**32)),
        lambda: header(good, mark=rng.randbytes(2)),
        damage,
        nest,
        lambda: encode_frame(good.replace(b"0.5", text)),
        lambda: change(**{rng.choice([*GOOD, "another"]): hostile_value(rng)}),
        lambda: change(metrics={rng.choice(names): hostile_value(rng)}),
        omit,
    ]
    return rng.choice(ways)()


def in_pieces(rng: random.Random, data: bytes):
    while data:
        size = rng.choice([1, 3, 14, 100, 1 << 16])
        yield data[:size]
        data = data[size:]


def inputs(seed: int, count: int):
    """Yield hostile messages, each with the seed of its split into pieces."""
    rng = random.Random(f"replies {seed}")
    for _ in range(count):
        yield hostile_message(rng), rng.randrange(2**32)


NOT_ALL_THERE = "waited for"  # incomplete: reading continues until the item's time is over


def check(item) -> str:
    """Check that an accepted message has the right nonce, pid and item, and plain, finite content."""
    data, pieces = item
    frames, payload = FrameReader(MAX_REPLY_BYTES), None
    try:
        for piece in in_pieces(random.Random(pieces), data):
            frames.feed(piece)
            payload = payload or frames.next()
        if payload is None:
            length = struct.unpack_from(">Q", data, 2)[0] if len(data) >= 14 else 0
            assert len(data) < 14 or len(data) < 14 + length <= 14 + MAX_REPLY_BYTES
            return NOT_ALL_THERE
        reply, sender = decode_reply(payload, 7, PID, NONCE)
    except InvalidReply as error:
        assert len(str(error)) < 500
        str(error).encode("utf-8")
        assert "\x1b" not in str(error)
        return REFUSED
    fields = json.loads(payload)
    assert (fields["item"], fields["pid"], fields["nonce"], sender) == (7, PID, NONCE, PID)
    if reply.failure is None:
        assert type(reply.reward) is float and math.isfinite(reply.reward)
        assert reply.reward == float(fields["reward"])
        for name, value in reply.metrics.items():
            assert type(value) is float and len(name) < 400
            assert name.encode("utf-8") is not None and "\x1b" not in name
    else:
        assert reply.failure in ("error", "nan") and "\x1b" not in reply.error
        assert reply.error.encode("utf-8") is not None
    return ACCEPTED


@pytest.mark.parametrize("seed", range(6))
def test_the_reader_takes_what_is_right_and_names_what_is_not(seed):
    report = run_family(inputs, check, seed=seed, count=50)
    assert not report.faults
    refused = report.outcomes[REFUSED] + report.outcomes[NOT_ALL_THERE]
    assert report.outcomes[ACCEPTED] < 25 < refused, "most messages are hostile"


def test_replies_come_back_as_they_were_sent():
    rng = random.Random(3)
    frames = FrameReader(MAX_REPLY_BYTES)
    sent = [
        Score(rng.uniform(-1e6, 1e6), {f"m{i}": rng.gauss(0, 1) for i in range(rng.randrange(4))})
        for _ in range(200)
    ]
    sent.append(Score(None, {}, "raised ä and 中", "error"))
    sent.append(Score(5e-324, {"x": math.inf, "y": -math.inf}))
    stream = b"".join(
        encode_frame(encode_reply(number, NONCE, reply)) for number, reply in enumerate(sent)
    )
    got = []
    for piece in in_pieces(rng, stream):
        frames.feed(piece)
        while (payload := frames.next()) is not None:
            got.append(decode_reply(payload, len(got), PID, NONCE)[0])
    assert got == sent  # bit-exact: JSON keeps Python's floats


def test_a_reward_that_is_no_number_has_a_name():
    for value, text in ((math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")):
        payload = encode_reply(7, NONCE, Score(value))
        assert decode_reply(payload, 7, PID, NONCE)[0] == Score(None, {}, f"returned {text}", "nan")


# ------------------------------------------------------------------------------------ a live worker

MODULE = """
import os
def sends(prompt, response, meta=None):
    if meta is not None:
        for name in os.listdir("/proc/self/fd"):
            try:
                if int(name) < 3 or not os.readlink("/proc/self/fd/" + name).startswith(("socket:", "pipe:")): continue
                os.write(int(name), meta["data"])
            except OSError:
                continue
            if meta["then"] == "exit": os._exit(0)
    return float(response)
"""


@pytest.mark.slow
def test_the_pool_fails_an_item_by_name_and_its_neighbours_are_right(tmp_path, monkeypatch, caplog):
    (tmp_path / "sender.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    rng = random.Random(100)
    items, hostile = [], set()
    for i in range(40):
        meta = None
        if rng.random() < 0.3:
            hostile.add(i)
            then = rng.choice(["exit", "go on", "go on"])
            meta = {"data": hostile_message(rng)[:100_000], "then": then}
        items.append((f"ask {i}", str(i), meta))
    begin = time.monotonic()
    with Scorer("sender:sends", timeout=1.5, workers=2) as scorer:
        scores = scorer.score_many(items)
    assert time.monotonic() - begin < 120 and len(hostile) > 8
    for i, score in enumerate(scores):
        if i in hostile and score.reward is None:
            assert score.failure in ("error", "death", "timeout") and "sender:sends" in score.error
            assert f"ask {i}" in score.error
            score.error.encode("utf-8")
        else:
            assert score.reward == float(i), (i, score)
    failed = {i for i, score in enumerate(scores) if score.reward is None}
    # A sent message is never a valid reply, because it lacks the worker's nonce.
    assert failed == hostile
    assert "Traceback" not in caplog.text
    sys.modules.pop("sender", None)
