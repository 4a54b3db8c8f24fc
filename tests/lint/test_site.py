"""What the package index and the site need from the README, the pages and docs/conf.py."""

import ast
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import cseq

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|href)=[\"']([^\"']+)")
PAGES = sorted(DOCS.rglob("*.md"))

pytestmark = pytest.mark.skipif(not (DOCS / "conf.py").exists(), reason="the pages are not here")


def prose_of(path):
    """Return a page without its blocks of code."""
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]+`", "", text)


def links_of(path):
    """Return the targets of a page's links and pictures."""
    return [match[1] or match[2] for match in LINK.finditer(prose_of(path))]


def urls():
    """Return the project's addresses."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    table = project.partition("[project.urls]\n")[2].partition("\n[")[0]
    return dict(re.findall(r'^(\w+) = "(.+)"$', table, re.MULTILINE))


def sections_of(path):
    """Return the sections of a page as links name them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"\W+", "-", heading.lower()).strip("-") for heading in headings}


def test_the_readme_links_to_files_beside_it():
    """It has at most 150 lines. Its links work in a clone, and before a site exists."""
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    links = [link.partition("#") for link in links_of(ROOT / "README.md")]
    assert len(lines) <= 150
    assert len(links) > 10
    assert [path for path, _, _ in links if not (ROOT / path).exists()] == []
    assert [s for path, _, s in links if s and s not in sections_of(ROOT / path)] == []


# The number at the last count; test_layout.py has the rule.
WORDS = 43_492


def test_the_pages_are_short():
    """By `wc -w`, they have hardly more words: a new page replaces another one's text."""
    words = sum(len(page.read_text(encoding="utf-8").split()) for page in PAGES)
    assert words <= WORDS * 1.02


def test_code_fits_its_column():
    """Code has at most 90 columns: beside both bars, a page of 1280 pixels shows 96."""
    pages = [*PAGES, ROOT / "README.md", *(ROOT / "examples").glob("*/*.py")]
    block = re.compile(r"^```(?:python|py|sh|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    for path in (path for path in pages if "inside" not in path.parts):
        text = path.read_text(encoding="utf-8")
        code = text if path.suffix == ".py" else "".join(block.findall(text))
        assert [line for line in code.splitlines() if len(line) > 90] == [], path


def test_the_figures_are_those_of_the_results():
    """`python benchmarks/tables.py` writes the figures of results/latest.json into these pages."""
    found = runpy.run_path(str(ROOT / "benchmarks" / "tables.py"))["pages"]()
    assert len(found) > 3
    assert [path.name for path, text in found.items() if path.read_text("utf-8") != text] == []


def test_each_promise_has_its_test():
    """Each line of the list in reliability.md names tests that exist."""
    page = (DOCS / "inside" / "reliability.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .*? \| (`test.*) \|$", page, re.MULTILINE)
    files = [*(ROOT / "tests").rglob("test_*.py")]
    there = {path.name for path in files} | {path.relative_to(ROOT).as_posix() for path in files}
    for path in files:
        there |= set(re.findall(r"^ *def (test_\w+)", path.read_text("utf-8"), re.MULTILINE))
    assert len(rows) > 30
    assert {name for row in rows for name in re.findall("`([^`]+)`", row)} - there == set()


def test_the_api_has_each_public_name():
    """docs/reference/api.rst lists all of `cseq.__all__`, and torch's loaders."""
    listed = re.findall(r"^   (\w+)$", (DOCS / "reference" / "api.rst").read_text(), re.MULTILINE)
    wanted = {*cseq.__all__, "DataLoader", "StatefulDataLoader"}
    assert wanted <= set(listed)
    assert len(listed) == len(set(listed))


def test_the_messages_on_the_page_of_errors_are_in_the_sources():
    """Each message in errors.md is a text of cseq, so that a search for it succeeds."""
    package = Path(cseq.__file__).parent
    files = [*package.rglob("*.py"), *package.rglob("*.p[yx][xi]")]
    code = "".join(path.read_text("utf-8") for path in files)
    # A text on several lines is one text.
    code = re.sub(r"\"\s*\n\s*f?\"", "", code)
    page = (DOCS / "reference" / "errors.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([`*].*?) \| .* \| .* \|$", page.partition("## Find")[2], re.MULTILINE)
    quoted = [text for row in rows for text in re.findall("`([^`]+)`", row)]
    assert len(quoted) > 40
    assert [text for text in quoted if text not in code] == []


@pytest.mark.skipif(not (ROOT / ".ci").exists(), reason="not a checkout")
def test_the_versions_of_the_site(tmp_path):
    """The switcher lists main, the newest release as the stable one, and all releases."""
    for name in ("latest", "stable", "0.2", "0.10"):
        (tmp_path / name).mkdir()
    subprocess.run([sys.executable, ROOT / ".ci" / "switcher.py", tmp_path], check=True)
    found = json.loads((tmp_path / "switcher.json").read_text(encoding="utf-8"))
    assert [one["version"] for one in found] == ["latest", "stable", "0.10", "0.2"]
    assert found[1]["name"] == "0.10 (stable)"
    assert all(one["url"].startswith(urls()["Documentation"]) for one in found)
    assert "url=stable/" in (tmp_path / "index.html").read_text(encoding="utf-8")


def configuration():
    """Return the text of docs/conf.py, and the nodes of the values that it sets."""
    code = (DOCS / "conf.py").read_text(encoding="utf-8")
    nodes = [node for node in ast.parse(code).body if isinstance(node, ast.Assign)]
    return code, {ast.unparse(target): node.value for node in nodes for target in node.targets}


def test_the_configuration_asks_no_network():
    """No other site's inventory is loaded, and no request is made for the switcher's file."""
    code, values = configuration()
    assert "sphinx.ext.intersphinx" not in ast.literal_eval(values["extensions"])
    assert "json_url" in code.partition('if "READTHEDOCS_VERSION" in os.environ')[2]
    assert "json_url" not in ast.unparse(values["html_theme_options"])
    assert values.keys() >= {"html_baseurl", "nitpicky", "llms_txt_summary"}


def test_an_address_that_moved_leads_to_a_page():
    """The old page is gone, and the new one exists, with the section."""
    moved = ast.literal_eval(configuration()[1]["MOVED"])
    for page, now in moved.items():
        path, _, section = now.partition(".html#")
        assert not (DOCS / f"{page}.md").exists()
        assert section in sections_of(DOCS / f"{path}.md")
