"""Test that names and prose are plain: words of docs/glossary.md, a single meaning per name, 100
columns.

docs/architecture.md lists the limits of files and functions.
"""

import ast
import builtins
import io
import re
import sys
import tokenize
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

import rl.types

REPO = Path(__file__).resolve().parents[2]
PACKAGE = sorted(
    path
    for folder in ("rl", "kernels")
    for path in REPO.glob(f"{folder}/**/*.py")
    if not path.name.endswith("_pb2.py")  # generated
)
SCRIPTS = sorted(REPO.glob("*.py"))
MOST_TERMS, MOST_FILE_TOKENS, MOST_FUNCTION_TOKENS = 150, 4000, 500
# These words as identifiers do not describe what a name holds.
EVERYDAY = frozenset(
    "found said asked told given own one left there who how anew alone beside nobody somebody "
    "stands laid wanted goes thing whose behind".split()
)
# The first words of docstrings: verbs, and "Raised" for exceptions.
VERBS = frozenset(
    """
    Accept Access Accumulate Acquire Adapt Add Admit Advance Allocate Annotate Answer Append
    Apply Arrange Ask Assign Attach Attend Average Await Base Begin Bind Blend Block Broadcast
    Buffer Build Cache Call Cancel Capture Cast Change Charge Chat Check Choose Claim Clamp Clean
    Clear Close Collect Combine Compare Compile Compute Concatenate Confine Configure Connect
    Continue Control Convert Copy Correct Count Create Cut Deal Debate Decide Declare Decode
    Decompress Decorate Define Delete Deny Derive Describe Destroy Detect Determine Direct
    Disable Discard Display Distribute Do Draw Drive Drop Enable Encode End Escape Estimate
    Evaluate Evict Exclude Execute Exit Expand Export Expose Extend Extract Fail Feed Fill
    Find Finish Fix Flush Fork Format Forward Free Gather Generate Give Group Guess Handle
    Hide Hold Implement Import Increase Index Initialize Insert Install Intercept Interrupt
    Iterate Join Judge Keep Kill Launch Lay Let Limit List Load Locate Lock Log Make Manage
    Map Mark Measure Merge Mix Modify Mount Move Multiply Name Normalize Note Offer Open Pad
    Parse Partition Pass Pause Perturb Plan Plant Play Preempt Prefill Prepare Present Print
    Probe Process Provide Put Queue Raise Raised Rate Read Reap Receive Recommend Recompute
    Record Reduce Refer Refuse Register Reinitialize Reject Release Remember Remove Render
    Replace Replay Replicate Report Represent Request Resample Reserve Reset Resolve Restart
    Restore Restrict Resume Return Reward Roll Route Run Sample Sanitize Save Scale Scan
    Scatter Schedule Score Search Seed Select Send Serve Set Shade Shape Shard Share Shorten
    Show Shrink Shut Sign Signal Silence Skip Specify Split Stack Stage Stand Start Step Stop
    Store Submit Subtract Sum Summarize Swap Switch Sync Take Test Track Train Transfer
    Truncate Try Turn Unmount Unpack Unpickle Untie Unwrap Update Upload Use Validate Verify
    Wait Wake Warn Watch Weight Wrap Write Yield Zero
    """.split()
)
# Docstrings shown to users or models: titles of --help, and descriptions of tools.
SHOWN_TEXTS = frozenset({"calculator", "get", "keys", "put", "python", "remove", "search"})


def name_of(path: Path) -> str:
    return str(path.relative_to(REPO))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def split_words(name: str) -> list[str]:
    """Return the words of a name in lower case: ["kv", "cache", "pool"] for KVCachePool."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)
    return [part.lower() for part in parts]


def strip_plural(word: str) -> str:
    """Return a word without its plural ending."""
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    if word.endswith(("sses", "ches", "shes", "xes", "iases")):
        return word[:-2]
    keeps = ("ss", "ias", "is", "us")
    return word[:-1] if word.endswith("s") and not word.endswith(keeps) and len(word) > 3 else word


@cache
def read_terms() -> list[str]:
    """Return the terms of docs/glossary.md."""
    text = (REPO / "docs" / "glossary.md").read_text(encoding="utf-8")
    terms = re.findall(r"^\| ([^|]+?) \| [^|]+? \|$", text, re.MULTILINE)
    return [term for term in terms if term not in ("term", "---")]


@cache
def known_heads() -> frozenset[str]:
    """Return the words that may end a name: those of the glossary, Python and Tinker."""
    known: set[str] = set()
    for term in read_terms():
        for variant in re.split(r"[,/]", term):
            known.update(strip_plural(word) for word in split_words(variant.strip())[-1:])
    python = [*dir(builtins), *sys.stdlib_module_names]
    for module in ("abc", "argparse", "asyncio", "collections", "concurrent.futures", "contextlib",
                   "dataclasses", "logging", "multiprocessing", "pathlib", "threading", "typing"):  # fmt: skip
        python += dir(__import__(module, fromlist=["_"]))
    for name in [*python, *dir(rl.types)]:
        known.update(strip_plural(word) for word in split_words(name))
    return frozenset(known)


def list_public_classes() -> list[tuple[Path, ast.ClassDef]]:
    return [
        (path, node)
        for path in PACKAGE
        for node in tree(path).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]


@cache
def code_rows(path: Path) -> Counter[int]:
    """Return the number of tokens in each line of a file, without comments, docstrings, layout."""
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    layout |= {tokenize.ENCODING, tokenize.ENDMARKER}
    source = io.StringIO(path.read_text(encoding="utf-8"))
    tokens = tokenize.generate_tokens(source.readline)
    rows = Counter(token.start[0] for token in tokens if token.type not in layout)
    for node in find_documented_nodes(path):
        for row in range(node.body[0].lineno, node.body[0].end_lineno + 1):
            rows.pop(row, None)
    return rows


def find_documented_nodes(path: Path) -> list[ast.AST]:
    """Return the modules, classes and functions of a file that have a docstring."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (node for node in ast.walk(tree(path)) if isinstance(node, kinds))
    return [node for node in nodes if ast.get_docstring(node) is not None]


IDENTIFIERS = {ast.Name: "id", ast.arg: "arg", ast.keyword: "arg", ast.Attribute: "attr"}
IDENTIFIERS |= dict.fromkeys((ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef), "name")


def find_everyday_identifiers(path: Path) -> list[str]:
    """Return file:line of each identifier that is an everyday word."""
    lines = []
    for node in ast.walk(tree(path)):
        name = getattr(node, IDENTIFIERS.get(type(node), ""), None)
        is_ast_field = isinstance(node, ast.Attribute) and name == "left"
        if name in EVERYDAY and not is_ast_field:
            lines.append(f"{name_of(path)}:{node.lineno} {name}")
    return lines


def test_the_glossary_is_short_and_explains_each_term_once():
    terms = read_terms()
    assert len(terms) == len(set(terms)) <= MOST_TERMS
    assert terms == sorted(terms, key=str.lower)


def test_names_end_in_a_word_of_the_glossary():
    heads: dict[str, list[str]] = defaultdict(list)
    for path in PACKAGE:
        if path.stem != "__init__":
            heads[strip_plural(split_words(path.stem)[-1])].append(name_of(path))
    for path, node in list_public_classes():
        heads[strip_plural(split_words(node.name)[-1])].append(f"{name_of(path)}::{node.name}")
    assert {head: places for head, places in heads.items() if head not in known_heads()} == {}


def test_no_identifier_is_an_everyday_word():
    assert [line for path in (*PACKAGE, *SCRIPTS) for line in find_everyday_identifiers(path)] == []


def test_everyday_words_are_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "REPO", tmp_path)
    file = tmp_path / "module.py"
    file.write_text(
        "def given(own):\n    found = f(wanted=own)\n    return [one for one in found.left]\n"
    )
    names = Counter(line.split()[1] for line in find_everyday_identifiers(file))
    assert names == {"given": 1, "own": 2, "found": 2, "wanted": 1, "one": 2}


def test_a_public_name_of_reporting_has_one_meaning():
    names = Counter()
    for path in REPO.glob("rl/reporting/*.py"):
        for node in tree(path).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names[node.name] += 1
            elif isinstance(node, ast.Assign):
                names.update(item.id for item in node.targets if isinstance(item, ast.Name))
    assert [n for n, count in names.items() if count > 1 and not n.startswith("_")] == []


def test_a_class_name_has_one_meaning():
    places: dict[str, list[str]] = defaultdict(list)
    for path, node in list_public_classes():
        places[node.name].append(name_of(path))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_docstrings_begin_with_a_verb():
    wrong = []
    for path in PACKAGE:
        for node in find_documented_nodes(path):
            name, text = getattr(node, "name", "module"), ast.get_docstring(node) or ""
            shown = name.endswith("Settings") or (name in SHOWN_TEXTS and "/envs/" in str(path))
            if not shown and re.split(r"\W", text)[0] not in VERBS:
                wrong.append(f"{name_of(path)}::{name}: {text[:60]!r}")
    assert wrong == []


def measure_functions(path: Path) -> dict[str, int]:
    """Return the code tokens of each function and method."""
    classes = [node for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef)]
    named = [("", node) for node in tree(path).body]
    named += [(f"{outer.name}.", node) for outer in classes for node in outer.body]
    return {
        f"{name_of(path)}::{prefix}{node.name}": sum(
            code_rows(path)[row] for row in range(node.lineno, node.end_lineno + 1)
        )
        for prefix, node in named
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_files_and_functions_are_short():
    files = {name_of(path): code_rows(path).total() for path in PACKAGE}
    assert {name: size for name, size in files.items() if size > MOST_FILE_TOKENS} == {}
    functions = [item for path in PACKAGE for item in measure_functions(path).items()]
    assert len(functions) > 3000
    assert [(name, size) for name, size in functions if size > MOST_FUNCTION_TOKENS] == []
