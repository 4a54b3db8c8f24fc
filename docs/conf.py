"""How Sphinx makes the site: `make docs`, without a network and without torch."""

from __future__ import annotations

import os
import posixpath
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(HERE), str(ROOT)]

import figures  # noqa: E402 - docs/figures.py
from docutils import nodes  # noqa: E402
from sphinx import addnodes  # noqa: E402
from sphinx.ext.autodoc.mock import mock  # noqa: E402
from sphinx.util import logging  # noqa: E402

import cseq  # noqa: E402

if TYPE_CHECKING:
    from sphinx.application import Sphinx

log = logging.getLogger(__name__)

# The addresses have one place: the table [project.urls] of pyproject.toml.
TABLE = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[project.urls]\n")[2]
URLS = dict(re.findall(r'^(\w+) = "([^"]+)"$', TABLE.partition("\n[")[0], re.MULTILINE))
FILES = f"{URLS['Source']}/blob/main"

project = "cseq"
author = "cseq developers"
copyright = "cseq developers"  # noqa: A001 - Sphinx's name
release = cseq.__version__
version = ".".join(release.split(".")[:2])
# The version that is published, where one is: by Read the Docs, or by a workflow.
docs_version = os.environ.get("READTHEDOCS_VERSION", "latest")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "numpydoc",
    "sphinx_design",
    "sphinx_copybutton",
    "sphinx_llms_txt",
]
exclude_patterns = ["_build"]
templates_path = ["_templates"]
nitpicky = True

# -- Markdown

myst_enable_extensions = ["colon_fence", "deflist", "attrs_inline"]
myst_heading_anchors = 4
suppress_warnings = ["myst.header", "misc.highlighting_failure"]

# -- the API


# torch is not in the environment of this build: a stand-in is, while the adapters are imported. Of
# torch's DataLoader it has the arguments.
class StandIn(Generic[TypeVar("T")]):
    """Has the arguments of torch's DataLoader, which cseq.DataLoader shows."""

    def __init__(
        self,
        dataset,
        batch_size=1,
        shuffle=None,
        sampler=None,
        batch_sampler=None,
        num_workers=0,
        collate_fn=None,
        pin_memory=False,
        drop_last=False,
        timeout=0,
        worker_init_fn=None,
        multiprocessing_context=None,
        generator=None,
        *,
        prefetch_factor=None,
        persistent_workers=False,
        pin_memory_device="",
        in_order=True,
    ):
        raise NotImplementedError

    @property
    def multiprocessing_context(self):
        """Have the name that cseq's class extends."""
        raise NotImplementedError


StandIn.__name__ = StandIn.__qualname__ = "DataLoader"
StandIn.__module__ = "torch.utils.data"
with mock(["ray"]):
    import cseq.fleet.ray

with mock(["pyarrow"]):
    import cseq.store.parquet

with mock(["torch"]):
    import torch.autograd
    import torch.utils.data

    vars(torch.autograd)["_profiler_enabled"] = None
    torch.utils.data.DataLoader = StandIn
    import cseq.adapters.torch.loader
    import cseq.adapters.torch.patch

# The docstrings give the types in words.
autodoc_typehints = "none"
autosummary_generate = True
autosummary_ignore_module_all = False
numpydoc_show_class_members = False
numpydoc_class_members_toctree = False
numpydoc_xref_param_type = False
# Names of Python, NumPy and torch: their sites are not asked while this one is built.
nitpick_ignore_regex = [
    ("py:.*", r"(torch|numpy|np|collections|typing|multiprocessing)\..*"),
    ("py:.*", r"[A-Z]\w*Error|[A-Z][A-Za-z]*Warning|KeyboardInterrupt|RuntimeError|OSError"),
    (
        "py:.*",
        r"int|str|bool|float|object|list|dict|tuple|callable|type|None|Self|Generic|Protocol",
    ),
    (
        "py:.*",
        r"cseq\.(sequence|kinds|manager|(indexing|order|store|tokens)\.\w+)\..*|.*\bB(_co)?|.*\bT(_co)?",
    ),
]

# -- HTML

html_theme = "pydata_sphinx_theme"
html_title = "cseq"
html_static_path = ["_static"]
html_css_files = ["cseq.css"]
html_favicon = "_static/favicon.svg"
html_show_sourcelink = False
html_baseurl = f"{URLS['Documentation'].rstrip('/')}/{docs_version}/"
html_theme_options = {
    "logo": {"text": "cseq"},
    "github_url": URLS["Source"],
    "navbar_end": ["theme-switcher", "navbar-icon-links"],
    "header_links_before_dropdown": 6,
    "show_version_warning_banner": False,
    "show_prev_next": True,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "a11y-light",
    "pygments_dark_style": "a11y-dark",
}
# The switcher asks the network: a site that is not published has none.
if "READTHEDOCS_VERSION" in os.environ:
    html_theme_options["navbar_end"].insert(0, "version-switcher")
    # The check would need the network while the site is built.
    html_theme_options["check_switcher"] = False
    html_theme_options["switcher"] = {
        "json_url": f"{URLS['Documentation'].rstrip('/')}/switcher.json",
        "version_match": docs_version,
    }
html_context = {"default_mode": "auto"}
# Pages without pages below them have no bar of sections.
html_sidebars = {"index": [], "faq": [], "tutorial/*": [], "search": [], "genindex": []}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# -- llms.txt: the pages as text, for programs that read

llms_txt_title = "cseq"
llms_txt_summary = (
    "cseq feeds training loops: it shuffles with a seed, cuts batches, reads them in worker "
    "processes or threads and delivers them in order. cseq.DataLoader replaces torch's DataLoader."
)
# The scripts that pages include.
llms_txt_code_files = [f"+:../examples/{each}/*.py" for each in ("data", "frameworks", "slow")]

# Pages that moved, and where they are now.
MOVED = {
    "how-to/slow-loops": "how-to/slow.html#twelve-slow-loops",
    "how-to/tuning": "how-to/slow.html#change-one-thing-at-a-time",
    "how-to/report": "how-to/tools.html#report",
    "how-to/trace": "how-to/tools.html#trace",
    "how-to/bench": "how-to/tools.html#bench",
    "how-to/doctor": "how-to/tools.html#doctor",
    "how-to/top": "how-to/watch.html#a-running-job",
    "how-to/dashboards": "how-to/watch.html#your-dashboard",
}


def redirect(app: Sphinx, failure: Exception | None) -> None:
    """Leave a page at each address that moved, which leads to the new one."""
    if failure is None and app.builder.name == "html":
        for page, now in MOVED.items():
            folder = Path(app.outdir, page).parent
            link = posixpath.relpath(now, posixpath.dirname(page))
            (folder / f"{Path(page).name}.html").write_text(
                f'<!doctype html><meta charset="utf-8"><title>cseq</title>\n'
                f'<meta http-equiv="refresh" content="0; url={link}">\n'
                f'<a href="{link}">{link}</a>\n',
                encoding="utf-8",
            )


LINK = re.compile(r"(!?\[[^\]]*\]\()((?:\.\./)+[\w][^)\s#]*)(#[^)\s]*)?\)")


def link_to_files(app: Sphinx, name: str, source: list[str]) -> None:
    """Have links to files of the repository that are no pages lead to the repository."""
    folder = posixpath.dirname(f"docs/{name}")

    def resolve(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, match[2]))
        if path.startswith("docs/") or match[1].startswith("!"):
            return match[0]
        if not (ROOT / path).exists():
            log.warning("%s links to %s, which is not there", name, path)
        return f"{match[1]}{FILES}/{path}{match[3] or ''})"

    source[0] = LINK.sub(resolve, source[0])


def find_pages_once(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Have words of the index lead to their page or section, which the search lists once then."""
    for node in doctree.findall(addnodes.index):
        whole = node.parent.parent is doctree
        for at, (kind, word, target, *rest) in enumerate(node["entries"]):
            if target.startswith("index-"):
                now = "" if whole else node.parent["ids"][0]
                node["entries"][at] = (kind, word, now, *rest)


def link_messages(app: Sphinx, doctree: nodes.document) -> None:
    """Give each row of the page of errors an address: the words of its message."""
    if app.env.docname != "reference/errors":
        return
    for row in doctree.findall(nodes.row):
        if isinstance(row.parent, nodes.tbody):
            address = nodes.make_id(row[0].astext().replace("<br>", " "))
            row["ids"].append(address)
            link = nodes.reference("", "#", refid=address, classes=["headerlink"])
            row[0][0].append(link)


def setup(app: Sphinx) -> None:
    """Add what is ours: figures, links to files of the repository and to messages, redirects."""
    figures.setup(app)
    app.connect("source-read", link_to_files)
    app.connect("doctree-read", link_messages)
    app.connect("doctree-resolved", find_pages_once)
    app.connect("build-finished", redirect)
