"""A program that replaces the candidate's server and answers each request with arbitrary bytes."""

import json

# `answer(request)` returns the bytes of the reply; `send(message)` and `raw(bytes)` write at once.
TAKE_OVER = """
import json, os
def raw(data):
    while data:
        data = data[os.write(4, data):]
def packed(message):
    body = message if isinstance(message, bytes) else json.dumps(message).encode()
    return len(body).to_bytes(8, "big") + body
def send(message):
    raw(packed(message))
def take(count):
    data = b""
    while len(data) < count:
        part = os.read(3, count - len(data))
        if not part:
            os._exit(0)
        data += part
    return data
def serve(answer):
    send({"loaded": True})
    while True:
        raw(answer(json.loads(take(int.from_bytes(take(8), "big")))))
"""
# A name resolves to object 0. A call is answered by `choose`; an "id" of 0 is replaced by the
# request's id.
CALLS_ANSWERED = """
def answer(request):
    if request["do"] == "find":
        return packed({"id": request["id"], "value": ["ref", 0, "object", "function", [], True]})
    if request["do"] != "call":
        return packed({"id": request["id"], "raised": ["AttributeError", ["Exception"], ""]})
    message = choose(request)
    if isinstance(message, dict) and message.get("id") == 0:
        message = {**message, "id": request["id"]}
    return message if isinstance(message, bytes) and BARE else packed(message)
"""


def make_adversary(messages: list[object], bare: bool = False) -> str:
    """Return a program whose f(i) is answered by `messages[i]`, cyclically.

    A message is an object (an "id" of 0 is replaced by the request's id), or the bytes of an
    object. `bare`: bytes are sent without a length prefix.
    """
    texts = [
        message.hex() if isinstance(message, bytes) else json.dumps(message) for message in messages
    ]
    kinds = [isinstance(message, bytes) for message in messages]
    choose = (
        f"TEXTS, KINDS, BARE = {texts!r}, {kinds!r}, {bare!r}\n"
        "def choose(request):\n    i = request['arguments'][0] % len(TEXTS)\n"
        "    return bytes.fromhex(TEXTS[i]) if KINDS[i] else json.loads(TEXTS[i])\n"
    )
    return TAKE_OVER + choose + CALLS_ANSWERED + "serve(answer)\n"


def value(encoded: object) -> dict[str, object]:
    """Return the reply to a call that returns `encoded`."""
    return {"id": 0, "value": encoded}


def nested(depth: int) -> object:
    made: object = ["l"]
    for _ in range(depth):
        made = ["l", made]
    return made


# Values that are expensive to decode, or raise another exception than the decoder's, if a
# constructor is called on the received value.
COMPUTING = {
    "a fraction with an exponent": ["R", "1e9999999999"],
    "a fraction of a text": ["R", "1/0"],
    "a fraction without a denominator": ["R", 1],
    "a fraction over 0": ["R", 1, 0],
    "a fraction of large numbers": ["R", ["i", "0x" + "7" * 100_000], ["i", "0x" + "3" * 100_000]],
    "a decimal with a long exponent": ["M", "1e999999999999999999"],
    "a decimal with an exponent": ["M", "1E+999999"],
    "a decimal with an exponent beyond the digits": ["M", "1E+131073"],
    "a decimal of many digits": ["M", "1" * 300_000],
    "a decimal that signals": ["M", "sNaN"],
    "a decimal of a text": ["M", "one"],
    "a decimal of a number": ["M", 5],
    "an int of a text": ["i", " 0x_5 "],
    "an int in tens": ["i", "5"],
    "an int of a number": ["i", 3],
    "an int with two texts": ["i", "0x5", "0x5"],
    "a range without a step": ["r", 0, 5, 0],
    "a range of two": ["r", 0, 5],
    "a range of texts": ["r", "0", "5", "1"],
    "a range of floats": ["r", 0.0, 5.0, 1.0],
    "a range of fractions": ["r", ["R", 1, 2], 5, 1],
    "a complex number of texts": ["c", "1", "2"],
    "a complex number of one": ["c", 1.0],
    "a complex number of ints": ["c", 1, 2],
    "bytes of a text": ["B", "zz"],
    "bytes with spaces": ["B", "00 00"],
    "bytes of a number": ["B", 10**9],
    "a date": ["da", "2020-13-45"],
    "a date of a number": ["da", 5],
    "a date and time of a list": ["dt", []],
    "a type that is none": ["type", "eval"],
    "a type of a list": ["type", []],
    "a type without a name": ["type"],
    "a key without a value": ["d", 1],
    "a list as a key": ["d", ["l"], 1],
    "a list in a set": ["s", ["l", 1]],
    "a decimal in a set that has no hash": ["s", ["M", "sNaN"]],
    "a counter with half a pair": ["C", "a"],
    "nothing": [],
    "a number as the type": [1],
    "no type": ["zz", 1],
    "an object": {"a": 1},
    "an object within": ["l", {"a": 1}],
    "a long int as it is": 1 << 64,
    "nested deep": nested(401),
    "a reference of nothing": ["ref"],
    "a reference of a text": ["ref", "f0"],
    "a reference of a negative number": ["ref", -1, "object", "A", [], False],
    "a reference with a number as its name": ["ref", 1, "class", 5, [], False],
    "a reference to a truth": ["ref", True, "object", "A", [], False],
    "a reference whose family is a text": ["ref", 1, "class", "A", "Exception", False],
}

# Replies to a call of f with a single argument that no server sends.
MALFORMED = {
    "no id": {"value": 5},
    "an id of a text": {"id": "2", "value": 5},
    "an id that is true": {"id": True, "value": 5},
    "another's id": {"id": 99, "value": 5},
    "no value": {"id": 0},
    "a value and arguments": {"id": 0, "value": 5, "arguments": [["l"]]},
    "a value and an exception": {"id": 0, "value": 5, "raised": ["A", [], ""]},
    "an exception and arguments": {"id": 0, "raised": ["A", [], ""], "arguments": [1]},
    "something more": {"id": 0, "value": 5, "ok": True},
    "too many arguments": {"id": 0, "value": None, "arguments": [1, 2]},
    "too few arguments": {"id": 0, "value": None, "arguments": []},
    "arguments that are none": {"id": 0, "value": None, "arguments": {}},
    "arguments that compute": {"id": 0, "value": None, "arguments": [["R", "1e9999999999"]]},
    "raised nothing": {"id": 0, "raised": []},
    "raised null": {"id": 0, "raised": None},
    "raised a number": {"id": 0, "raised": 5},
    "raised an object": {"id": 0, "raised": {"a": 1}},
    "raised a text": {"id": 0, "raised": "ValueError"},
    "raised a list of numbers": {"id": 0, "raised": [1, 2, 3]},
    "raised a family of a text": {"id": 0, "raised": ["A", "Exception", ""]},
    "raised with an endless name": {"id": 0, "raised": ["A" * 100_000, [], ""]},
    "a call of no function": {"call": "f7", "arguments": []},
    "a call of a list": {"call": [], "arguments": []},
    "a call without arguments": {"call": "f0"},
    "a verdict": {"verdicts": [[True, "ok"]], "ok": True, "done": True},
    "loaded again": {"loaded": True},
    "an empty object": {},
    "a list": b"[]",
    "a number": b"5",
    "nothing at all": b"",
    "no UTF-8": b"\xff\xfe\xff",
    "UTF-16": '{"id": 2, "value": 5}'.encode("utf-16"),
    "two objects": b'{"id": 2, "value": 5} {"id": 2, "value": 5}',
    "brackets without end": b"[" * 100_000,
    "brackets within a value": b'{"id": 2, "value": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "an int of a million digits": b'{"id": 2, "value": ' + b"1" * 1_000_000 + b"}",
}


def make_forged_replies() -> dict[str, object]:
    """Return every item of `COMPUTING` and `MALFORMED` as a reply."""
    return {**{name: value(encoded) for name, encoded in COMPUTING.items()}, **MALFORMED}
