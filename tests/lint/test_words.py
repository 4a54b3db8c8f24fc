"""The English of comments, and in cseq also of docstrings and other strings."""

import io
import re
import tokenize
from pathlib import Path

import cseq

PACKAGE = Path(cseq.__file__).resolve().parent
ROOT = Path(__file__).resolve().parents[2]
# Only comments are searched here: strings may be test data.
OTHERS = ("tests", "benchmarks", "examples", "setup.py")
TRAILING = "trailing comments"
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
# These are for tools and for the table of docs/inside/ring.md.
DIRECTIVE = re.compile(
    r"(#|//|/\*)\s*(type:|noqa|pragma|fmt:|isort:|cython:|distutils:|mypy:|SYNC: |:)"
)
# tests/lint/test_typing.py looks for this mark.
MARK = "# refused\n"
PATTERNS = {
    "so many/long/much": r"\bso (many|long|much)\b",
    "also if/where/in/that/when": r"\balso (if|where|in|that|when)\b",
    "in (the) place of": r"\bin (the )?place of\b",
    "anew": r"\banew\b",
    "for ever": r"\bfor ever\b",
    "of it, at an end": r"\bof it(?=[.,;:)\"'\n])",
    "that of": r"\bthat of\b",
    "those of": r"\bthose of\b",
    "X; None: Y": r"\bNone: ",
}


def python_english(text):
    """Yield line, text, whether it is a comment, and whether code stands before it."""
    strings = {tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            before = token.line[: token.start[1]]
            yield token.start[0], f"{token.string}\n", True, before.strip() != ""
        elif token.type in strings:
            yield token.start[0], token.string, False, False


def header_english(text):
    """Yield the same for a C header, from its comments only."""
    for match in COMMENT.finditer(text):
        before = text[text.rfind("\n", 0, match.start()) + 1 : match.start()]
        yield text.count("\n", 0, match.start()) + 1, f"{match[0]}\n", True, before.strip() != ""


def joined(pieces):
    """Join the comments of consecutive lines, as a sentence may span them."""
    last = None
    for line, text, comment, _ in pieces:
        if comment and last and last[2] and line == last[0] + last[1].count("\n"):
            last = (last[0], last[1] + text.lstrip("#/ "), True)
            continue
        if last:
            yield last[:2]
        last = (line, text, comment)
    if last:
        yield last[:2]


def other_files():
    """Return the Python files outside of cseq."""
    paths = [path for name in OTHERS for path in [ROOT / name, *(ROOT / name).rglob("*.py")]]
    return sorted(path for path in paths if path.is_file())


def offenders():
    """Return files and lines by the rule that they break."""
    found = {}
    for path in [*sorted(PACKAGE.rglob("*")), *other_files()]:
        if path.suffix not in (".py", ".pyx", ".pxd", ".pyi", ".h"):
            continue
        text = path.read_text(encoding="utf-8")
        english = header_english if path.suffix == ".h" else python_english
        pieces = [piece for piece in english(text) if not DIRECTIVE.match(piece[1])]
        if PACKAGE not in path.parents:
            pieces = [piece for piece in pieces if piece[2] and piece[1] != MARK]
        name = path.relative_to(PACKAGE.parent).as_posix()
        for line, *_, trailing in pieces:
            if trailing:
                found.setdefault(TRAILING, []).append(f"{name}:{line}")
        for line, prose in joined(pieces):
            for pattern, words in PATTERNS.items():
                for match in re.finditer(words.replace(" ", r"\s+"), prose, re.IGNORECASE):
                    at = line + prose.count("\n", 0, match.start())
                    found.setdefault(pattern, []).append(f"{name}:{at}")
    return found


def test_the_english_is_plain():
    """No comment stands behind code, and no phrase reads as translated."""
    assert offenders() == {}


def test_what_is_searched_for_is_found():
    """Comments before and behind code, strings, headers and phrases over two lines are found."""
    python = list(python_english('# as long\n# so\n# many\nx = "# no"  # those of\n'))
    assert [piece[0] for piece in python] == [1, 2, 3, 4, 4]
    assert [trailing for *_, trailing in python] == [False, False, False, False, True]
    assert [text for _, text in joined(python)] == [
        "# as long\nso\nmany\n",
        '"# no"',
        "# those of\n",
    ]
    header = list(header_english("/* a\n b */\nint x; // of it\n"))
    assert [(line, trailing) for line, *_, trailing in header] == [(1, False), (3, True)]
