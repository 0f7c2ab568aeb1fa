"""Programs of the hostile set that reply in place of their server: malformed replies, constructors
that compute, forged arguments.

Items are (family, name, text, style) as in hostile_programs.py, which includes them. Style
"sorting" uses SORTS: f sorts a list, and the test compares with Python's result for the same list.
Style "in place" uses IN_PLACE.
"""

from adversary import COMPUTING, MALFORMED, TAKE_OVER, make_adversary, value

FAMILIES = {12: "malformed replies", 13: "constructors that compute", 14: "forged arguments"}
SORTS = [
    "xs = [3, 1, 2]\nassert f(xs) == sorted(xs)",
    "xs = [[2, 1], [1]]\nassert f(xs) == sorted(xs)",
]
IN_PLACE = [
    "xs = [3, 1, 2]\nf(xs)\nassert xs == [1, 2, 3]",
    "xs = [2, 1]\nys = [5, 4]\nf(xs)\nf(ys)\nassert [xs, ys] == [[1, 2], [4, 5]]",
]

_LISTS = '{"id": request["id"], "value": ["l"], "arguments": [["l"]]}'
_FOUND = """
def answer(request):
    if request["do"] == "find":
        return packed({"id": request["id"], "value": ["ref", 0, "object", "function", [], True]})
"""


def _answering(message: str) -> str:
    """Return a program that resolves f and answers every call with `message`."""
    return f"{TAKE_OVER}{_FOUND}    return packed({message})\nserve(answer)\n"


_SERVER = """
import sys
frame = sys._getframe()
while "self" not in frame.f_locals: frame = frame.f_back
server = frame.f_locals["self"]
"""
ARGUMENTS = {
    "in the server's place": _answering(_LISTS),
    "in the server's place, at every request": f"{TAKE_OVER}\nserve(lambda request: packed({_LISTS}))\n",
    "the server's answer replaced": _SERVER + "real = server._answer\n"
    "server._answer = lambda r: {**real(r), **({'arguments': [['l']]} if r['do'] == 'call' else {})}\ndef f(xs): return []\n",
    "the server's table replaced": _SERVER + "def f(xs):\n    xs.clear()\n    return []\n"
    "do = server._do\nserver._do = lambda r: (do(r)[0], [[]] if r['do'] == 'call' else None)\n",
    "json replaced": "import json\nreal = json.dumps\n"
    "json.dumps = lambda m: real({**m, 'arguments': [['l']]} if m.get('value') == ['l'] else m)\ndef f(xs): return []\n",
    "a raw frame": "import json, os\ndef f(xs):\n    body = json.dumps({'id': 2, 'value': ['l'], 'arguments': [['l']]}).encode()\n"
    "    os.write(4, len(body).to_bytes(8, 'big') + body)\n    return []\n",
    "raw frames for every request to come": "import json, os\ndef f(xs):\n    for i in range(2, 9):\n"
    "        body = json.dumps({'id': i, 'value': ['l'], 'arguments': [['l']]}).encode()\n"
    "        os.write(4, len(body).to_bytes(8, 'big') + body)\n    return []\n",
    "arguments beside an exception": _answering("{'id': request['id'], 'raised': ['A', [], ''], 'arguments': [['l']]}"),
    "an empty value with arguments": _answering("{'id': request['id'], 'value': ['t'], 'arguments': [['t']]}"),
    "false with arguments": _answering("{'id': request['id'], 'value': False, 'arguments': [['l']]}"),
}  # fmt: skip


def list_programs() -> list[tuple[int, str, str, str]]:
    """Return each malformed reply once, alternating between asserts and calls, and forged arguments
    against a test that they would make pass.
    """
    messages = [(12, name, message) for name, message in MALFORMED.items()]
    messages += [(13, name, value(encoded)) for name, encoded in COMPUTING.items()]
    chosen = []
    for number, (family, name, message) in enumerate(messages):
        style = "pytest" if number % 12 == 0 else ("asserts", "calls")[number % 2]
        chosen.append((family, name, make_adversary([message]), style))
    return chosen + [(14, name, text, "sorting") for name, text in ARGUMENTS.items()]


# Honest programs at the limits of the codec, and programs that change their arguments.
HONEST = [
    ("sorts in place", "def f(xs): xs.sort()", "in place"),
    ("sorts by exchanging", "def f(xs):\n    for i in range(len(xs)):\n        for j in range(len(xs) - 1):\n"
     "            if xs[j] > xs[j + 1]: xs[j], xs[j + 1] = xs[j + 1], xs[j]", "in place"),
    ("sorts by a new list", "def f(xs): xs[:] = sorted(xs)", "in place"),
    ("sorts a copy", "def f(xs): return sorted(xs)", "sorting"),
    ("sorts what it was given, and returns it", "def f(xs):\n    xs.sort()\n    return xs", "sorting"),
    ("a generator made a list", "def f(xs): return list(x for x in sorted(xs))", "sorting"),
    ("a fraction", "from fractions import Fraction\ndef f(n): return Fraction(n) ** 2 + 1", "asserts"),
    ("a decimal", "from decimal import Decimal\ndef f(n): return Decimal(n) * n + 1", "asserts"),
    ("a number of 6,000 digits on the way", "def f(n): return (10**6000 * (n * n + 1)) // 10**6000", "calls"),
    ("a memory of large values", "seen = {}\ndef f(n):\n    seen[n] = seen.get(n, 10**6000 + n * n + 1)\n"
     "    return seen[n] - 10**6000", "asserts"),
    ("an error that it handles itself", "def f(n):\n    try: b'\\xff'.decode()\n"
     "    except UnicodeDecodeError: return n * n + 1", "asserts"),
    ("the length of a range", "def f(n): return len(range(n * n + 1))", "calls"),
    ("a nested result taken apart", "def g(n): return ((n, (n, (1,))),)\n"
     "def f(n):\n    ((a, (b, (c,))),) = g(n)\n    return a * b + c", "asserts"),
    ("json and os in use", "import json, os\n"
     "def f(n): return json.loads(json.dumps({'n': n * n + 1}))['n'] + 0 * len(os.listdir('.'))", "calls"),
    ("a class that compares", "class N:\n    def __init__(s, n): s.n = n\n    def __eq__(s, o): return s.n == o.n\n    __hash__ = None\n"
     "def f(n):\n    assert N(n) == N(n)\n    return n * n + 1", "asserts"),
    ("a guard against what cannot be", "def f(n):\n    if not isinstance(n, int): raise TypeError(n)\n    return n * n + 1", "pytest"),
]  # fmt: skip
