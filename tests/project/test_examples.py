"""A newcomer's first runs: the examples, and the README's Python, in fresh interpreters."""

import ast
import inspect
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

import cseq

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
# These are whole trainings, of which `make test` has a few.
NIGHTLY = pytest.mark.nightly
# The README and the site's pages, except the one whose script kills a worker, which is logged.
KILLING = "docs/inside/reliability.md"
PAGES = [
    "README.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")),
]
PAGES.remove(KILLING)

# A block of Python, the heading above it, and the output that the page shows after it.
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
SHOWN = re.compile(
    r"^```\{literalinclude\} [./]*/(examples/data/\w+\.py)\n:language: python\n```\n"
    r"(?:\n```text\n(.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)
FILE = re.compile(r"# \w+\.py\n")
INCLUDED = re.compile(
    r"^```\{literalinclude\} [./]*/examples/((?:data|frameworks)/\w+\.py)$", re.MULTILINE
)
ROW = re.compile(r"^\| `(\w+)` \|(?: `([^`|]*)`)? \|.*\|$", re.MULTILINE)


def blocks_of(page):
    """Return each piece of Python on a page: the heading above it, the code, and its output.

    A block whose first line names a file is no separate script.
    """
    text = (ROOT / page).read_text(encoding="utf-8")
    found = []
    for match in [*BLOCK.finditer(text), *SHOWN.finditer(text)]:
        if FILE.match(match[1]):
            continue
        shown = match.re is SHOWN
        code = (ROOT / match[1]).read_text(encoding="utf-8") if shown else match[1]
        heading = HEADING.findall(text, 0, match.start())[-1]
        found.append((f"{page}: {heading}", code, match[2] or ""))
    return found


def needs(*modules):
    """Skip a test if one of these modules is not installed, and name it."""
    missing = [name for name in modules if find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def imports_of(code):
    """Return the modules that a piece of Python imports."""
    nodes = [*ast.walk(ast.parse(code))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.partition(".")[0] for name in names}


def marks_of(code):
    """Skip a block if its modules, or the system functions that it calls, are missing."""
    store = ["obstore"] if "from cseq import store" in code else []
    marks = [needs("torch", *store, *imports_of(code))]
    return [*marks, pytest.mark.needs("POSIX")] if "os.pread(" in code else marks


@pytest.fixture
def output_of(run_prepared):
    """Return a function that runs a script without CUDA and returns its output.

    The script must succeed, and warn only of the lack of CUDA.
    """

    def run(source, *args):
        code = source if isinstance(source, str) else source.read_text(encoding="utf-8")
        done = run_prepared(code, *args, CUDA_VISIBLE_DEVICES="")
        # torch's profiler names its own steps there.
        notes = ("CUDA is not", "USDT:")
        told = [line for line in done.stderr.splitlines() if not line.startswith(notes)]
        assert (done.returncode, told) == (0, []), done.stderr
        return done.stdout

    return run


@needs("torch")
def test_mdnc_tensors(output_of):
    """MDNC's first example prints its 512 tensors in order, as MDNC's documentation shows them."""
    expected = "".join(f"tensor([{i}.])\n" for i in range(512))
    assert output_of(EXAMPLES / "mdnc_tensors.py") == expected


def test_mdnc_arrays(output_of):
    """MDNC's second example prints the indexer's 512 arrays, in order."""
    expected = "".join(f"[{i}]\n" for i in range(512))
    assert output_of(EXAMPLES / "mdnc_arrays.py") == expected


@needs("h5py", "matplotlib", "sklearn", "torch")
def test_digits(output_of, tmp_path):
    """The demo learns the digits from test mode's stream, with any number of workers."""
    one = digits(output_of, workers=1)
    assert accuracy_after(4, one) > 95
    assert hash_after("start()", one) == hash_after("start_test()", one)
    assert (tmp_path / "out" / "digits.png").read_bytes().startswith(b"\x89PNG")
    assert "picture of the run: " + str(Path("out", "digits.png")) in one
    written = (tmp_path / "out" / "digits.h5").stat().st_mtime_ns
    three = digits(output_of, workers=3)
    assert (tmp_path / "out" / "digits.h5").stat().st_mtime_ns == written
    assert hash_after("start()", three) == hash_after("start()", one)
    assert learned(three) == learned(one)
    assert len(learned(three)) == 4


def digits(output_of, *, workers):
    """Run the demo over four epochs, writing to `out`; return the lines of its output."""
    options = ["--epochs", "4", "--workers", str(workers), "--out", "out"]
    return output_of(EXAMPLES / "digits.py", *options).splitlines()


def accuracy_after(epoch, lines):
    """Return the percentage on the line of an epoch."""
    line = next(line for line in lines if line.startswith(f"epoch {epoch:2}:"))
    return float(line.partition("held-out accuracy ")[2].split()[0])


def hash_after(word, lines):
    """Return the SHA-256 on the line that begins with this word."""
    digests = [line.split()[1] for line in lines if line.split()[0] == word]
    assert [len(digest) for digest in digests] == [64]
    return digests[0]


def learned(lines):
    """Return the loss and accuracy of every epoch, without the times."""
    return [line.split(" %, ")[0] for line in lines if line.startswith("epoch ")]


@needs("sklearn", "torch")
def test_digits_ray(output_of):
    """The network learns from a cluster's batches, too; tests/ray compares the batches."""
    lines = output_of(EXAMPLES / "digits_ray.py", "--here", "--epochs", "3").splitlines()
    losses = [float(line.rpartition(" ")[2]) for line in lines]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.3 < losses[0]


@NIGHTLY
@needs("torch")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("buckets_speech.py", ["--utterances", "1000", "--budget", "3000", "--epochs", "3"]),
        ("packed_lm.py", ["--documents", "1200", "--epochs", "3"]),
        ("groups_metric.py", ["--epochs", "3"]),
        ("mixture_curriculum.py", []),
        ("balanced_classes.py", []),
        pytest.param("blocks_parquet.py", [], marks=needs("pyarrow")),
    ],
)
def test_orders(output_of, name, options):
    """A script's loss with an order falls, and is the same if it stops anywhere and resumes."""

    def run(folder, *more):
        return output_of(EXAMPLES / name, *options, "--out", folder, *more).splitlines()

    whole = run("whole")
    losses = [float(re.findall(r"loss ([\d.]+)", line)[0]) for line in whole[1:4]]
    assert losses == sorted(losses, reverse=True)
    assert "in a row as alone: True" in whole or name != "packed_lm.py"
    stopped = run("stopped", "--stop", "25")
    assert stopped[-1].endswith("after 25 batches")
    rest = run("stopped", "--workers", "1")
    assert rest[1].startswith("continues in epoch")
    assert stopped[:-1] + rest[2:] == whole


@NIGHTLY
@needs("sklearn", "torch", "torchdata")
def test_digits_dataloader2(output_of):
    """A DataLoader2 with shuffle, sharding and batches also trains the demo's network."""
    lines = output_of(EXAMPLES / "digits_dataloader2.py", "--epochs", "4").splitlines()
    assert accuracy_after(4, lines) > 95
    assert [line.rpartition(", ")[2] for line in lines] == ["1437 seen"] * 4


@NIGHTLY
@needs("sklearn", "torch")
@pytest.mark.needs("fork")
def test_digits_dataloader(output_of):
    """With one line changed, torch's own workers train the network with the same losses."""
    source = (EXAMPLES / "digits_dataloader.py").read_text(encoding="utf-8")
    # With torch's loader, start methods other than fork need a guard of the main module.
    fork = "import multiprocessing\n\nmultiprocessing.set_start_method('fork')\n"
    source = source.replace("import argparse\n", f"import argparse\n{fork}")
    source += "\nprint(type(iter(loader)).__module__)\n"
    ours = "from cseq import DataLoader  # or: "
    assert source.count(ours) == 1
    *lines, iterator = output_of(source, "--epochs", "4").splitlines()
    *theirs, torchs = output_of(source.replace(ours, ""), "--epochs", "4").splitlines()
    assert (iterator, torchs) == ("cseq.adapters.torch.iterator", "torch.utils.data.dataloader")
    assert lines == theirs
    assert len(lines) == len({line.split()[4] for line in lines}) == 4
    assert accuracy_after(4, lines) > 95


@NIGHTLY
@needs("h5py", "returnn", "torch", "tree")
def test_returnn_hdf(output_of):
    """RETURNN trains with the same losses, to the last bit, and they fall."""
    lines = output_of(EXAMPLES / "returnn_hdf.py", "--epochs", "2", "--out", "out").splitlines()
    assert lines[:2] == ["plain.config: HDFDataset", "workers.config: MultiProcDataset"]
    losses = [line.split() for line in lines if "train_loss_ce" in line]
    assert [words[1] for words in losses] == ["1:", "2:"]
    assert all(words[3] == words[5] for words in losses)
    assert float(losses[1][3]) < float(losses[0][3])
    assert lines[-1] == "the losses are exactly the same"


@pytest.mark.parametrize(
    ("code", "output"),
    [
        pytest.param(code, output, id=name, marks=marks_of(code))
        for page in PAGES
        for name, code, output in blocks_of(page)
    ],
)
def test_python_on_the_pages(code, output, output_of):
    """Each piece of Python on a page is a whole script, and prints what the page shows."""
    assert output_of(code) == output


def test_the_killed_worker_on_the_page(run_prepared):
    """The user's test in reliability.md kills a worker, and the loop does not notice.

    The log reports it, unless everything was made before the death was seen.
    """
    ((_, code, output),) = blocks_of(KILLING)
    done = run_prepared(code)
    assert (done.returncode, done.stdout) == (0, output), done.stderr
    # Windows has no signals.
    log = r"(worker 0 was killed( by SIGKILL)? and is being replaced\n)?"
    assert re.fullmatch(log, done.stderr), done.stderr


def test_the_example_of_the_readme_is_short():
    """A newcomer can take in the first example: it has 20 lines of code."""
    _, code, _ = blocks_of("README.md")[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 20


def test_each_recipe_is_on_a_page():
    """The pages show each file of examples/data and examples/frameworks once."""
    pages = (ROOT / "docs" / "how-to").rglob("*.md")
    shown = [name for path in pages for name in INCLUDED.findall(path.read_text(encoding="utf-8"))]
    files = [*EXAMPLES.glob("data/*.py"), *EXAMPLES.glob("frameworks/*.py")]
    assert sorted(shown) == sorted(path.relative_to(EXAMPLES).as_posix() for path in files)


def test_the_reference_lists_every_argument():
    """The reference's table has MSequence's arguments in order, with their defaults."""
    text = (ROOT / "docs" / "reference" / "manager.md").read_text(encoding="utf-8")
    table = text.partition("## Arguments")[2].partition("\n\n| `out_type` |")[0]
    parameters = inspect.signature(cseq.MSequence).parameters.values()
    defaults = [(p.name, "" if p.default is p.empty else repr(p.default)) for p in parameters]
    assert ROW.findall(table) == defaults


def test_the_reference_names_everything_public():
    """Every public name of cseq, and every public method and property, is in the reference."""
    pages = sorted((ROOT / "docs" / "reference").glob("*.md"))
    text = "".join(path.read_text(encoding="utf-8") for path in pages)
    members = [name for name in dir(cseq.MSequence) if not name.startswith("_")]
    assert [name for name in cseq.__all__ if f"cseq.{name}" not in text] == []
    assert [name for name in members if not re.search(rf"`{name}\b", text)] == []


@pytest.mark.parametrize("path", sorted((EXAMPLES / "slow").glob("*.py")), ids=lambda p: p.stem)
def test_slow_loops(path, output_of):
    """Each one runs, follows its remedy, and is on the page with its results."""
    source, run, advice = path.read_text(encoding="utf-8").partition("\n\nif __name__ == ")
    assert run + advice == '\n\nif __name__ == "__main__":\n    print(train().advice())\n'
    check = "assert set(AFTER) <= set(__import__('inspect').signature(train).parameters)"
    told = output_of(f"{source}\n{check}\nprint(train(batches=16).stats().batches)")
    assert int(told) >= 12
    page = (ROOT / "docs" / "how-to" / "slow.md").read_text(encoding="utf-8")
    assert f"```{{slow-loop}} {path.stem}\n" in page
    seen = ROOT / "docs" / "drawings" / "slow"
    assert {found.name for found in seen.glob(f"{path.stem}*")} == {
        f"{path.stem}{end}" for end in (".txt", "-before.svg", "-after.svg")
    }
