"""How cseq is named, built and installed, and the messages where that fails."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import cseq

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(cseq.__file__).resolve().parent
TEXTS = (".py", ".pyx", ".pyi", ".md", ".toml", ".yml", "Makefile", ".mk")
BUILD_TOOLS = [name for name in ("Cython", "setuptools") if find_spec(name) is None]

needs_sources = pytest.mark.skipif(
    not (ROOT / "cseq" / "_core.pyx").exists(), reason="the sources are not here"
)
needs_build_tools = pytest.mark.skipif(
    bool(BUILD_TOOLS), reason=f"not installed: {', '.join(BUILD_TOOLS)}"
)


def run(*words, **options):
    """Run Python with these arguments."""
    command = [sys.executable, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def texts():
    """Return every text of the project that may name the distribution."""
    top = [path for path in ROOT.iterdir() if path.name.endswith(TEXTS)]
    folders = [ROOT / name for name in ("cseq", "docs", "tests", "examples", "benchmarks")]
    below = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    workflows = list((ROOT / ".github").rglob("*.yml"))
    return [path for path in [*top, *below, *workflows] if path.name.endswith(TEXTS)]


@needs_sources
def test_what_is_to_be_installed_has_the_name_of_this_distribution():
    """The project is cseq-loader; on the package index, cseq is another project."""
    assert re.search(r'^name = "cseq-loader"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    wrong = re.compile(r"\bcseq" + r"\[\w|pip install '?cseq" + r"\b(?!-loader)")
    warning = re.compile(r"(?<=Do not type `)[^`]+|`[^`]+`(?= installs another project)")
    found = {
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in texts()
        for match in wrong.finditer(warning.sub("", path.read_text(encoding="utf-8")))
    }
    assert found == set()


@needs_sources
@needs_build_tools
def test_the_description_has_whole_addresses(sources):
    """A package index shows README.md without the repository, so each link is a whole address."""
    project = (sources / "pyproject.toml").read_text(encoding="utf-8")
    urls = dict(re.findall(r'^(\w+) = "(.+?)/?"$', project, re.MULTILINE))
    site, source = f"{urls['Documentation']}/stable/", f"{urls['Source']}/blob/main/"
    raw = source.replace("github.com", "raw.githubusercontent.com").replace("blob/", "")
    done = setup(sources, "--long-description", PYTHONIOENCODING="utf-8")
    links = re.findall(r"\]\(([^)\s#]+)", done.stdout)
    pages = [link.removeprefix(site) for link in links if link.startswith(site)]
    files = [link.removeprefix(start) for start in (source, raw) for link in links if start in link]
    assert len(pages) > 10
    assert len(files) > 5
    assert len(links) == len(pages) + len(files)
    names = [f"docs/{page.removesuffix('.html')}" for page in pages]
    assert [n for n in names if not any((ROOT / n).parent.glob(f"{Path(n).name}.*"))] == []
    assert [name for name in files if not (ROOT / name).exists()] == []


@needs_sources
@needs_build_tools
def test_the_version_has_one_place(sources):
    """`cseq.__version__` gives the version of a build; pyproject.toml does not."""
    done = setup(sources, "--version")
    assert done.stdout.split()[-1:] == [cseq.__version__], done.stderr
    project = (sources / "pyproject.toml").read_text(encoding="utf-8").partition("\n[tool")[0]
    assert not re.search("^version =", project, re.MULTILINE)


RELEASE, DATE = ROOT / ".ci" / "release.py", "2026-03-04"
CHANGES = """# Changelog

## 1.2.0 ({})

### Added

- Something.

## 1.1.0 (2026-01-02)

- Older.
"""


@pytest.mark.skipif(not RELEASE.exists(), reason="not a checkout")
@pytest.mark.parametrize(
    ("version", "date", "tag", "readme", "said"),
    [
        ("1.2.0", DATE, "v1.2.0", "", ""),
        ("1.2.0rc1", DATE, "v1.2.0rc1", "", ""),
        ("1.2.0", DATE, "v1.3.0", "", "tag v1.2.0"),
        ("1.2.0.dev0", DATE, "v1.2.0", "", "tag v1.2.0.dev0"),
        ("1.2.0", "unreleased", "v1.2.0", "", "write the date"),
        ("1.4.0", DATE, "v1.4.0", "", "no section '## 1.4.0"),
        ("1.2.0", DATE, "v1.2.0", "No release is on a package index yet.", "how to install"),
    ],
)
def test_a_release_is_of_its_tag(tmp_path, version, date, tag, readme, said):
    """A tag unlike the version, a missing dated section, or an old first command is refused."""
    for folder in ("cseq", ".ci"):
        (tmp_path / folder).mkdir()
    (tmp_path / "cseq" / "__init__.py").write_text(f'"""cseq."""\n\n__version__ = "{version}"\n')
    (tmp_path / "CHANGELOG.md").write_text(CHANGES.format(date))
    (tmp_path / "README.md").write_text(readme)
    script = shutil.copy2(RELEASE, tmp_path / ".ci")
    done = run(script, "check", tag)
    assert (done.returncode == 0) is (not said), done.stderr
    assert said in done.stderr
    if not said:
        assert run(script, "notes").stdout == "### Added\n\n- Something.\n"


@pytest.mark.skipif(not RELEASE.exists(), reason="not a checkout")
def test_the_changelog_is_about_this_version():
    """The newest section of CHANGELOG.md is `cseq.__version__`'s, and has its four parts."""
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    newest, *_ = re.findall(r"^## (\S+) \(", text, re.MULTILINE)
    assert re.match(rf"{re.escape(newest)}(\.dev\d+|rc\d+)?$", cseq.__version__)
    parts = re.findall("^### (.*)$", run(RELEASE, "notes").stdout, re.MULTILINE)
    assert parts == ["Added", "Changed", "Removed", "Fixed"]


@needs_sources
def test_addresses_are_those_of_the_project():
    """Files that name the repository or the site use the addresses of pyproject.toml."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    homes = re.findall(r'^(?:Homepage|Documentation) = "(.+?)/?"$', project, re.MULTILINE)
    hosts = r"(?:raw\.githubusercontent\.com|github\.com|[\w.-]+\.github\.io)"
    rest = r"[^\s)>\"'`]*"
    ours = re.compile(f"https://{hosts}/{rest}cseq{rest}")
    raw = homes[0].replace("github.com", "raw.githubusercontent.com")
    others = [ROOT / name for name in ("CITATION.cff", ".github/ISSUE_TEMPLATE/config.yml")]
    for path in [*texts(), *(one for one in others if one.exists())]:
        for address in ours.findall(path.read_text(encoding="utf-8")):
            assert address.startswith((*homes, raw)), f"{path.name}: {address}"


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Copy the sources without builds; none of these tests compiles them.

    Cython's output comes along, as it is made again if it is older than its source.
    """
    folder = tmp_path_factory.mktemp("sources")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, folder / name)
    ignored = shutil.ignore_patterns("*.so", "*.pyd", "*.c", "__pycache__")
    shutil.copytree(PACKAGE, folder / "cseq", ignore=ignored)
    if (ROOT / "build" / "release").exists():
        shutil.copytree(ROOT / "build" / "release", folder / "build" / "release")
        shutil.copy2(ROOT / "build" / "mode", folder / "build" / "mode")
    return folder


def setup(folder, *args, **environment):
    """Run setup.py."""
    others = {key: value for key, value in os.environ.items() if key != "CC"}
    return run("setup.py", *args, cwd=folder, env=others | environment)


@needs_sources
@needs_build_tools
@pytest.mark.skipif(sys.platform == "win32", reason="MSVC is not found by way of PATH")
@pytest.mark.parametrize(
    ("environment", "compiler"),
    [
        ({"CC": "/no/such/compiler -pthread"}, "/no/such/compiler"),
        pytest.param(
            {"PATH": "/no/such/folder"},
            (sysconfig.get_config_var("CC") or "cc").split()[0],
            marks=pytest.mark.skipif(sys.platform == "darwin", reason="setuptools asks xcrun"),
        ),
    ],
    ids=["CC", "PATH"],
)
def test_a_missing_compiler_is_named_in_one_sentence(sources, environment, compiler):
    """Without a C compiler, a build ends with what to install, and without a traceback."""
    done = setup(sources, "--quiet", "build_ext", "--inplace", **environment)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: cseq-loader is compiled when it is installed from source")
    assert f"the C compiler {compiler!r} was not found: install one" in last
    assert "Traceback" not in done.stderr


@needs_sources
@needs_build_tools
def test_an_sdist_is_the_same_each_time(sources, tmp_path):
    """With SOURCE_DATE_EPOCH, neither times nor permissions of a checkout are in the archive."""
    archives = []
    for number, (age, mode) in enumerate([(0, 0o644), (86_400, 0o664)]):
        time = 1_700_000_000 - age
        os.utime(sources / "cseq" / "stage.py", (time, time))
        (sources / "cseq" / "stage.py").chmod(mode)
        folder = tmp_path / str(number)
        command = ("--quiet", "sdist", "--dist-dir", str(folder))
        done = setup(sources, *command, SOURCE_DATE_EPOCH="1700000001")
        assert done.returncode == 0, done.stderr
        archives.append(next(folder.iterdir()))
    assert archives[0].read_bytes() == archives[1].read_bytes()
    with tarfile.open(archives[0]) as archive:
        assert {one.mtime for one in archive} == {1_700_000_001}
        text = archive.extractfile(f"{archives[0].name.removesuffix('.tar.gz')}/cseq/stage.py")
        assert text is not None
        assert text.read() == (sources / "cseq" / "stage.py").read_bytes()


PYTHONS = ["cp310", "cp311", "cp312", "cp313", "cp314", "cp314t", "cp315"]
PLATFORMS = [
    ("linux", "x86_64", ["manylinux_x86_64", "musllinux_x86_64"]),
    ("linux", "aarch64", ["manylinux_aarch64", "musllinux_aarch64"]),
    ("macos", "x86_64", ["macosx_x86_64"]),
    ("macos", "arm64", ["macosx_arm64"]),
    ("windows", "AMD64", ["win_amd64"]),
]


@needs_sources
@pytest.mark.skipif(find_spec("cibuildwheel") is None, reason="no cibuildwheel (`make lint`)")
@pytest.mark.parametrize(("system", "machine", "names"), PLATFORMS)
def test_which_wheels_are_published(system, machine, names):
    """On each system, cibuildwheel selects exactly the Pythons of the classifiers."""
    ask = ["-m", "cibuildwheel", "--print-build-identifiers", "--platform", system]
    done = run(*ask, "--archs", machine, str(ROOT))
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == {f"{python}-{name}" for python in PYTHONS for name in names}


@needs_sources
def test_the_oldest_and_the_newest_python_are_tested():
    """A Python of the classifiers has wheels; the workflow tests the oldest and the newest."""
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    versions = re.findall(r"Python :: (3\.\d+)", text)
    assert {f"cp{version.replace('.', '')}" for version in versions} == {*PYTHONS} - {"cp314t"}
    workflow = (ROOT / ".github" / "workflows" / "tests.yml").read_text("utf-8")
    page = (ROOT / "docs" / "reference" / "platforms.md").read_text("utf-8")
    assert {f'"{versions[0]}"', f'"{versions[-1]}"'} <= set(re.findall(r'"3\.\d+"', workflow))
    assert f"CPython {versions[0]} to {versions[-1]} " in page


def refusal(folder):
    """Import cseq from a folder; return the last line of the traceback."""
    libraries = str(Path(np.__file__).resolve().parents[1])
    found = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), libraries])}
    # An editable install must not be found.
    done = run("-S", "-c", "import cseq", cwd=folder, env=found)
    assert done.returncode == 1
    return done.stderr.strip().splitlines()[-1]


@needs_sources
def test_sources_that_are_not_built_say_what_to_do(sources):
    """In a source tree without the core, `import cseq` ends with the remedy."""
    last = refusal(sources)
    assert last.startswith("ImportError: cseq's compiled core is not built for this Python")
    assert str(sources / "cseq") in last
    assert "`pip install .` or `make build`" in last


@needs_sources
def test_files_of_another_project_in_the_folder_are_refused(tmp_path):
    """An index's cseq is another project that installs into the same folder; the error says so."""
    shutil.copytree(PACKAGE, tmp_path / "cseq", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "cseq" / "cli.py").write_text("def main(): ...\n", encoding="utf-8")
    last = refusal(tmp_path)
    assert last.startswith(f"ImportError: {tmp_path / 'cseq'} contains files of another project")
    assert "`pip uninstall cseq cseq-loader`" in last
