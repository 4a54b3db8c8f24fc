"""What a release needs to know, for the workflows and for people.

python .ci/release.py check TAG     an error unless TAG is that of this version, with its date
python .ci/release.py notes         print the section of CHANGELOG.md about this version
python .ci/release.py version       print this version
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def version() -> str:
    """Read `__version__` without importing cseq."""
    text = (ROOT / "cseq" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    if found is None:
        raise SystemExit("cseq/__init__.py has no __version__")
    return found[1]


def section() -> tuple[str, str]:
    """Find what CHANGELOG.md says of this version: the date in the heading, and the text."""
    release = re.sub(r"\.dev\d+$|(a|b|rc)\d+$", "", version())
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    pattern = rf"^## {re.escape(release)} \(([^)\n]+)\)\n(.*?)(?=^## |\Z)"
    found = re.search(pattern, text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise SystemExit(f"CHANGELOG.md has no section '## {release} (…)'")
    return found[1], found[2].strip()


def check(tag: str) -> None:
    """Refuse a tag that is not this version's, and a release without a date."""
    if tag != f"v{version()}":
        raise SystemExit(f"the tag is {tag!r}, and the version is {version()}: tag v{version()}")
    date, _ = section()
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", date):
        raise SystemExit(f"CHANGELOG.md says ({date}) of {version()}: write the date, YYYY-MM-DD")
    if "No release is on a package index yet" in (ROOT / "README.md").read_text(encoding="utf-8"):
        raise SystemExit(
            "README.md says that no release is on a package index: write how to install it"
        )


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["check", tag]:
            check(tag)
        case ["notes"]:
            print(section()[1])
        case ["version"]:
            print(version())
        case _:
            raise SystemExit(__doc__)
