"""`cseq run`: torch's DataLoaders of a script that sees what Python shows it."""

import os
import subprocess
import sys
import zipfile

import pytest

pytest.importorskip("torch")

from checkout import import_path
from kinds import QUICKEST

import cseq

pytestmark = pytest.mark.needs("quick processes")

LOADERS = """
import os
import sys
import warnings
from torch.utils import data
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter
from cseq.adapters.torch import defaults

warnings.simplefilter("ignore")
options = {"num_workers": 1, "multiprocessing_context": sys.argv[1]}
if __name__ == "__main__":
    samples = list(range(3))
    for loader in data.DataLoader(samples, **options), data.DataLoader(samples):
        for epoch in range(2):
            assert [batch.item() for batch in loader] == samples
    made = _MultiProcessingDataLoaderIter(data.DataLoader(samples, **options))
    assert [batch.item() for batch in made] == samples
    print(defaults.rng, flush=True)
    if hasattr(os, "fork") and os.fork():
        os.wait()
"""
INLINE = "2 iterators, torch's own, because with num_workers=0, the loop makes the batches"


@pytest.mark.parametrize(
    ("rng", "engines"),
    [("worker", ["2 iterators, cseq's", INLINE]), ("batch", ["4 iterators, cseq's"])],
)
def test_it_ends_with_the_engine_of_each_kind_of_loader(run_command, tmp_path, rng, engines):
    """An iterator that the program makes itself is torch's, and goes unnoticed."""
    (tmp_path / "loaders.py").write_text(LOADERS)
    options = ["--rng", rng] if rng == "batch" else []
    done = run_command(tmp_path, "run", *options, "loaders.py", QUICKEST.start_method)
    assert (done.returncode, done.stdout) == (0, f"{rng}\n"), done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("cseq: ")] == [
        f"cseq: torch.utils.data.dataloader.DataLoader: {engine}" for engine in engines
    ]


def called(folder, *arguments):
    """Run Python in a folder."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder, env=os.environ | {"PYTHONPATH": import_path()},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


SHOWS = """\
import atexit, sys
print(sys.argv)
print(__name__, __file__, __package__, __spec__ and __spec__.name)
print(sys.path)
print(sys.modules["__main__"].__dict__ is globals())
import beside
atexit.register(lambda: print(sys.modules["__main__"].__dict__ is globals()))
"""


@pytest.fixture
def scripts(tmp_path):
    """Make a script with a module beside it, a link to it, a folder and an archive."""
    for folder in ("own", "own/program", "links"):
        (tmp_path / folder).mkdir()
    (tmp_path / "own/shows.py").write_text(SHOWS)
    (tmp_path / "own/beside.py").write_text("")
    (tmp_path / "own/program/__main__.py").write_text(SHOWS)
    (tmp_path / "own/program/beside.py").write_text("")
    with zipfile.ZipFile(tmp_path / "own/program.pyz", "w") as archive:
        archive.writestr("__main__.py", SHOWS)
        archive.writestr("beside.py", "")
    (tmp_path / "links/shows.py").symlink_to("../own/shows.py")
    main = "import sys\nfrom cseq.__main__ import main\nsys.exit(main())\n"
    (tmp_path / "cseq").write_text(main)
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [
        ["./shows.py", "--", "a", "--lr", "--", "3"],
        ["--", "../links/shows.py", "--help", "--rng"],
        ["-m", "shows", "--", "a", "-m"],
    ],
)
def test_a_script_sees_what_python_shows_it(run_command, scripts, arguments):
    """These are its arguments, its name and the search path, even after its end."""
    expected = called(scripts / "own", *arguments)
    assert expected.returncode == 0, expected.stderr
    done = run_command(scripts / "own", "run", *arguments)
    if arguments[0] == "-m":
        # The module exists only while it runs.
        expected.stdout = expected.stdout.removesuffix("True\n")
        done.stdout = done.stdout.removesuffix("False\n")
    else:
        # Where the command is installed as a file, its folder is not on the search path.
        assert called(scripts / "own", "../cseq", "run", *arguments).stdout == expected.stdout
    assert done.stdout == expected.stdout, done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize("program", ["program", "program.pyz"])
def test_a_folder_and_an_archive(run_command, scripts, program):
    done = run_command(scripts / "own", "run", program, "--", "a")
    lines = done.stdout.splitlines()
    assert lines[0].endswith(f"{program}', '--', 'a']"), done.stderr
    assert lines[1].startswith(f"__main__ {scripts}/own/{program}/__main__.py")
    assert lines[2].startswith(f"['{scripts}/own/{program}'")
    assert done.returncode == 0


@pytest.mark.skipif(sys.version_info < (3, 11), reason="python -P is new in 3.11")
def test_a_safe_path(scripts):
    (scripts / "own/shows.py").write_text("import sys; print(sys.path)")
    expected = called(scripts, "-P", "own/shows.py")
    done = called(scripts, "-P", "-m", "cseq", "run", "own/shows.py")
    assert done.stdout == expected.stdout


@pytest.mark.parametrize(
    "arguments",
    [["./missing.py", "-m"], ["-m", "missing"], ["-m", "missing.too"]],
)
def test_a_script_that_is_not_there(run_command, scripts, arguments):
    """The output is the same line, without a traceback of cseq's."""
    expected = called(scripts, *arguments)
    done = run_command(scripts, "run", *arguments)
    assert done.stderr == expected.stderr
    assert done.returncode == expected.returncode


def test_the_command_without_a_script(run_command, tmp_path):
    assert run_command(tmp_path, "--version").stdout == f"cseq {cseq.__version__}\n"
    done = run_command(tmp_path, "run")
    assert done.returncode == 2
    assert "required: script" in done.stderr
