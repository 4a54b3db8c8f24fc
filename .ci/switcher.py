"""Write what the folders of versions share: switcher.json, and index.html, which leads to one.

python .ci/switcher.py FOLDER
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def site() -> str:
    """Read the site's address from pyproject.toml."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'^Documentation = "(.+?)/?"$', project, re.MULTILINE)
    if found is None:
        raise SystemExit("pyproject.toml has no address of the documentation")
    return found[1]


def entries(names: list[str]) -> list[dict[str, str | bool]]:
    """List the versions, newest first: latest (main), stable, and the releases."""
    releases = sorted(
        (name for name in names if re.fullmatch(r"\d+\.\d+", name)),
        key=lambda name: [int(part) for part in name.split(".")],
        reverse=True,
    )
    known = [name for name in ("latest", "stable") if name in names]
    shown = {"latest": "latest (main)"}
    if releases:
        shown["stable"] = f"{releases[0]} (stable)"
    return [
        {"name": shown.get(name, name), "version": name, "url": f"{site()}/{name}/"}
        | ({"preferred": True} if name == "stable" else {})
        for name in [*known, *releases]
    ]


def main(folder: Path) -> None:
    """Write both files."""
    names = [path.name for path in folder.iterdir() if path.is_dir()]
    found = entries(names)
    (folder / "switcher.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    first = "stable" if "stable" in names else "latest"
    (folder / "index.html").write_text(
        f'<!doctype html><meta charset="utf-8"><title>cseq</title>\n'
        f'<meta http-equiv="refresh" content="0; url={first}/">\n'
        f'<link rel="canonical" href="{site()}/{first}/">\n',
        encoding="utf-8",
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
