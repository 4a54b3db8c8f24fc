"""The module map in `cseq/__init__.py`, the files on disk and the imports between them agree."""

import ast
import contextlib
import graphlib
import inspect
import re
import sys
import textwrap
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

import cseq

PACKAGE = Path(cseq.__file__).resolve().parent
TESTS = Path(__file__).parents[1]

# A line of the map: `├── sampler.py   what it is`; lines below a folder are further right.
BRANCH = re.compile(r"^(?P<indent>[│ ]*)[├└]── (?P<entry>\S+)  +\S", re.MULTILINE)
CYTHON_IMPORT = re.compile(
    r"^\s*(?:from +(?P<base>[\w.]+) +c?import +\(?(?P<names>[\w, ]*)|c?import +(?P<module>[\w.]+))",
    re.MULTILINE,
)
# Modules without a file, made by Cython's code.
CYTHON_RUNTIME = ("_cython_", "cython_runtime")


def text_of(path):
    """Read a file."""
    return path.read_text(encoding="utf-8")


def module_of(path):
    """Return the module in a file: `engine/__init__.py` holds `cseq.engine`."""
    parts = [part for part in path.with_suffix("").parts if part != "__init__"]
    return ".".join(["cseq", *parts])


MODULES = {
    module_of(path.relative_to(PACKAGE)): path
    for pattern in ("**/*.py", "**/*.pyx")
    for path in sorted(PACKAGE.glob(pattern))
}


def modules_on_the_map():
    """Read the map from top to bottom."""
    modules, folders = [], [Path()]
    branches = list(BRANCH.finditer(inspect.getdoc(cseq) or ""))
    for match in branches:
        depth = (len(match["indent"]) - len(branches[0]["indent"])) // 4
        path = folders[depth] / match["entry"]
        folders[depth + 1 :] = [path]
        modules.append(module_of(path))
    return modules


MAP = modules_on_the_map()


def place_of(module):
    """Return a module's position on the map; one that is not drawn has its folder's."""
    if module == "cseq":
        return -1
    return MAP.index(module) if module in MAP else place_of(module.rpartition(".")[0])


def imports_of(module):
    """Return the modules of cseq that a module imports, at any place, even for types."""
    path = MODULES[module]
    texts = [text_of(one) for one in (path, path.with_suffix(".pxd")) if one.exists()]
    is_cython = path.suffix == ".pyx"
    found = cython_imports("".join(texts)) if is_cython else python_imports(texts[0])
    return {name for name in found if name in MODULES and name != module}


def cython_imports(text):
    """Find import and cimport lines by a pattern."""
    found = set()
    for match in CYTHON_IMPORT.finditer(text):
        names = (match["names"] or "").replace(" ", "").split(",")
        found |= as_modules(match["base"], names) if match["base"] else {match["module"]}
    return found


def python_imports(text):
    """Find imports in the syntax tree, and strings that name a module, with or without a name."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "write whole names of modules"
            found |= as_modules(node.module or "", [alias.name for alias in node.names])
        elif isinstance(node, ast.Constant) and str(node.value).startswith("cseq."):
            found.add(str(node.value).partition(":")[0])
    return found


def as_modules(base, names):
    """Resolve `from base import names`: each is a module of cseq, or an object in `base`."""
    full = {f"{base}.{name}" for name in names}
    return {name if name in MODULES else base for name in full}


def docstring_of(module):
    """Return a module's docstring without an import."""
    text = text_of(MODULES[module])
    if MODULES[module].suffix == ".pyx":
        return text[text.index('"""') + 3 :].partition('"""')[0]
    return ast.get_docstring(ast.parse(text)) or ""


def test_the_map_shows_every_module():
    """Every top-level module is on the map once, and everything on the map exists."""
    at_the_top = {module for module in MODULES if module.count(".") == 1}
    assert at_the_top <= set(MAP) <= set(MODULES)
    assert len(MAP) == len(set(MAP))


def test_imports_point_down_the_map():
    """A module imports only what the map shows below it, or a member of its own folder."""
    above = {
        f"{module} imports {name}"
        for module in MODULES
        for name in imports_of(module)
        if place_of(name) < place_of(module)
    }
    assert above == set()


def test_each_adapter_is_listed():
    """The docstring of `cseq.adapters` lists its folders and modules, one for each library."""
    listed = re.findall(r"^``(\w+)``  ", docstring_of("cseq.adapters"), re.MULTILINE)
    entries = {path.stem for path in (PACKAGE / "adapters").iterdir()} - {"__pycache__"}
    assert sorted(entries) == ["__init__", *sorted(listed)]
    assert all(f"cseq.adapters.{name}" in MODULES for name in listed)


def test_no_import_cycles():
    """No module imports itself, directly or through others."""
    graphlib.TopologicalSorter({module: imports_of(module) for module in MODULES}).prepare()


def test_a_module_says_what_it_is():
    """A module's docstring begins with one line of at most 80 characters."""
    docstrings = {module: docstring_of(module) for module in MODULES}
    first_line = re.compile(r".{1,80}(\n\n|\Z)")
    assert [name for name, text in docstrings.items() if not first_line.match(text)] == []


def test_the_table_of_what_makes_what_visible():
    """docs/inside/ring.md has exactly the names that the sources mark with ``SYNC:``."""
    docs = PACKAGE.parent / "docs" / "inside" / "ring.md"
    if not docs.exists():
        pytest.skip("the package is installed without its docs")
    table = text_of(docs).partition("| name | writes | sees |\n|---|---|---|\n")[2]
    rows = table.partition("\n\n")[0].splitlines()
    sources = [*PACKAGE.rglob("*.pyx"), *PACKAGE.rglob("*.pxd"), *PACKAGE.glob("include/*.h")]
    marks = re.findall(r"SYNC: ([a-z' ]+[a-z])", "\n".join(map(text_of, sources)))
    assert {row.split("|")[1].strip() for row in rows} == {*marks}


# Names with an underscore that tests may use.
ALLOWED = {
    # They are Python's and threading's, public for named tuples, or notebooks' protocol.
    "_exit", "_current_frames", "_base_executable", "_run_module_as_main",
    "_thread.start_new_thread", "_DummyThread", "_is_owned", "_replace", "_fields", "_asdict",
    "_repr_html_",
    # A reading service's interface, under torchdata's names.
    "_pause", "_resume", "_limit", "_is_paused", "_end_datapipe", "_worker_processes",
    "_dispatch_process", "_restore_checkpoint_beginning_of_epoch",
    # They are torch's; Lightning and Composer call the last one.
    "_C", "_from_dlpack", "_sleep", "_shutdown_workers",
}  # fmt: skip
# The modules of the core, each with its own tests.
CORE = {path.stem for path in PACKAGE.rglob("_*.pyx")}
# Nothing public shows which tickets were posted, or that an iterator was asked.
REACHING = {
    *((name, "_run") for name in ("test_protocols.py", "test_keys.py", "resizing.py")),
    *((name, "_run") for name in ("streaming.py", "stress.py")),
    ("test_cuda_converter.py", "_lane"),
    ("conftest.py", "_handle"),
}


def private_names(source):
    """Return the private names of other objects that a test uses, even in its scripts."""
    nodes = list(ast.walk(ast.parse(source)))
    own = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    for node in nodes:
        if isinstance(node, ast.Attribute) and not is_own(node.value):
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("cseq"):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Call) and called(node.func) in ("getattr", "setattr", "delattr"):
            names = [word.value for word in node.args if isinstance(word, ast.Constant)]
            yield from (name for name in names if isinstance(name, str) and name not in own)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" in node.value:
            with contextlib.suppress(SyntaxError):
                # The string is no script.
                yield from private_names(textwrap.dedent(node.value))


def called(function):
    """Return the last part of the called name."""
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def is_own(value):
    """Return whether the object is the one whose class is being defined."""
    words = [value.func] if isinstance(value, ast.Call) else [value]
    return all(isinstance(word, ast.Name) and word.id in ("self", "cls", "super") for word in words)


def test_tests_use_no_private_names():
    """Tests use no private parts of modules: `cseq.testing` and public names suffice."""
    # cseq's classes have the private names of torch's loader, too.
    found = {
        (path.name, name)
        for path in set(TESTS.rglob("*.py")) - {Path(__file__)}
        if path.parent.name not in {"differential", "conformance"}
        and not path.name.startswith("test_torch_")
        for name in private_names(text_of(path))
        if re.match(r"_[A-Za-z]", name) and name not in CORE | ALLOWED
    }
    assert found <= REACHING


PUBLIC = {
    *("cseq", "cseq.errors", "cseq.store", "cseq.stream", "cseq.testing", "cseq.tokens"),
    *("cseq.adapters.returnn", "cseq.adapters.torch", "cseq.adapters.torchdata"),
}
# Private names that are used nevertheless: of torch, and for who may connect.
INSIDE = {"cseq.adapters.torch.names", "cseq.adapters.torchdata.relay"}


def test_contract_tests_import_public_modules_alone():
    """The requirements in tests/contract do not depend on how cseq is built."""
    imported = {
        module
        for path in (TESTS / "contract").rglob("*.py")
        for module in python_imports(text_of(path)) & set(MODULES)
    }
    assert imported <= PUBLIC | INSIDE


def test_every_header_is_compiled_for_other_systems():
    """`make check-headers` compiles a file that includes every C header of the core."""
    text = text_of(TESTS / "c" / "headers.c")
    headers = {path.name for path in (PACKAGE / "include").glob("*.h")}
    assert set(re.findall(r'^#include "(.*)"$', text, re.MULTILINE)) == headers


def test_what_scripts_name_exists():
    """Each file that makefiles and scripts name exists, as does each header of the C tests."""
    root = PACKAGE.parent
    named = re.compile(r"(?<![\w/.])(?:tests|cseq|benchmarks)/[\w./-]+\.(?:py|sh|h|c|pml|txt)\b")
    scripts = [root / "Makefile", *TESTS.glob("**/*.mk"), *TESTS.glob("**/*.sh")]
    files = {name for path in scripts for name in named.findall(text_of(path))}
    for path in TESTS.glob("**/*.[ch]"):
        found = re.findall(r'^#include "(cseq_.*)"$', text_of(path), re.MULTILINE)
        files |= {f"cseq/include/{name}" for name in found}
    assert [name for name in sorted(files) if not (root / name).exists()] == []


def test_slow_tests_exist():
    """Each test in slow.txt exists; the others leave out no module of tests."""
    slow = text_of(TESTS / "slow.txt").split()
    files = {name.partition("::")[0] for name in slow}
    trees = {file: ast.parse(text_of(TESTS.parent / file)) for file in files}
    there = {f"{file}::{test}" for file, tree in trees.items() for test in named_tests(tree.body)}
    assert set(slow) <= there
    assert slow == sorted(set(slow))


def named_tests(body, inside=""):
    """Return the tests of a module or a class; a class's tests have its name."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from named_tests(node.body, f"{inside}{node.name}::")
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield inside + node.name


# Names in `os` and `signal` that Windows has, too; modules of tests may use these when imported.
ON_WINDOWS = {"os._exit", "os.environ", "os.getpid", "os.name", "os.path", "signal.SIGINT"}
SYSTEM = ("os", "signal")


def run_on_import(node):
    """Yield the nodes that an import runs, except those under a condition or in a `try`."""
    if isinstance(node, (ast.FunctionDef, ast.Lambda)):
        parts = [*getattr(node, "decorator_list", []), node.args]
    elif isinstance(node, (ast.If, ast.IfExp, ast.Try, ast.BoolOp)):
        return
    else:
        yield node
        parts = ast.iter_child_nodes(node)
    for part in parts:
        yield from run_on_import(part)


def not_on_windows(text):
    """Return the names in `os` and `signal` that a module's import uses and Windows may lack."""
    nodes = [node for node in run_on_import(ast.parse(text)) if isinstance(node, ast.Attribute)]
    found = {ast.unparse(node) for node in nodes if getattr(node.value, "id", "") in SYSTEM}
    return sorted(found - ON_WINDOWS)


def test_modules_of_tests_can_be_imported_on_windows():
    """Windows imports every module of tests, even one whose tests it skips."""
    text = "import os, signal\n@mark(signal.SIGKILL)\ndef f(x=os.fork):\n    os.pipe()\n"
    assert not_on_windows(text) == ["os.fork", "signal.SIGKILL"]
    found = {path: not_on_windows(text_of(path)) for path in TESTS.rglob("*.py")}
    assert {path: names for path, names in found.items() if names} == {}


def messages_of(folder):
    """Return the strings of a folder's modules; a value in an f-string becomes `{}`."""
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(text_of(path))):
            if isinstance(node, ast.JoinedStr):
                pieces = (getattr(piece, "value", None) for piece in node.values)
                yield "".join(piece if isinstance(piece, str) else "{}" for piece in pieces)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def matched_words(text):
    """Yield the line and each run of lower-case words of every `match="..."` in a module."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.keyword) and node.arg == "match":
            pattern = getattr(node.value, "value", None)
            if isinstance(pattern, str):
                for words in re.findall(r"\b[a-z]+(?: [a-z]+)+\b", pattern):
                    yield node.value.lineno, words


def test_rare_tests_know_the_messages():
    """`make test` leaves these out, so nobody sees them fail when a message changes."""
    assert list(matched_words('f(match=r"a=3, but no one has")')) == [(1, "but no one has")]
    known, unknown = "\n".join(messages_of(PACKAGE)), []
    for folder in ("frameworks", "gpu", "ray"):
        for path in (TESTS / folder).rglob("*.py"):
            text = text_of(path)
            for line, words in matched_words(text):
                # A test that raises an exception itself has its words twice.
                if words not in known and text.count(words) == 1:
                    unknown.append(f"{path.name}:{line}: {words}")
    assert unknown == []


def test_all_is_sorted_and_complete():
    """`__all__` names every public object of the package once, in order."""
    values = vars(cseq).items()
    public = {name for name, value in values if name[0] != "_" and type(value) is not ModuleType}
    assert list(cseq.__all__) == sorted(set(cseq.__all__))
    # `annotations` comes from __future__.
    assert public <= {*cseq.__all__, "annotations"}
    # Most are imported on request.
    assert all(hasattr(cseq, name) for name in cseq.__all__)
    optional = {"DataLoader", "StatefulDataLoader", "RayFleet", "packed", "progress", "__version__"}
    assert {*dir(cseq)} - {*cseq.__all__} <= optional


ORDERS = ("cseq_feistel",)
APART = ("sampler", "place", "shard", "checkpoint", "_source")

# The lines when each entry was last set. A change may add to them within the head-room. A change
# that needs more sets its entry to the new number, and says why. At a release, all entries are set
# to the output of `python tests/lint/test_layout.py`, if that is less; so are the words of the
# pages, in test_site.py.
HEADROOM = 1.02
BUDGET = {
    "cseq without adapters, fleet, orders, tokens, store": 21_491,
    "what users look with": 3_897,
    "of these compiled: C, Cython": 7_780,
    "adapters": 5_951,
    "tokens": 1_270,
    "store": 2_346,
    "fleet": 622,
    "the longest file of cseq": 691,
    "the longest .pyx": 836,
    "tests": 46_000,
    "the longest file of tests": 685,
    "orders": 4_157,
    "extension modules": 14,
}


LOOKS = ("remake", "stats", "advice", "meters", "tracing", "lanes", "_trace", "cseq_trace")
LOOKS += ("observe", "report")
REST = "cseq without adapters, fleet, orders, tokens, store"


def part_of(path):
    """Return the part of the budget to which a file of cseq belongs."""
    words = {*path.relative_to(PACKAGE).parts, path.stem}
    for part in ("adapters", "fleet", "tokens", "store"):
        if part in words:
            return part
    if words & {"order", *ORDERS} and path.stem not in APART:
        return "orders"
    return "what users look with" if words & {*LOOKS} else REST


def lines_there():
    """Return the lines of each part that has a budget."""
    found = {
        path: text_of(path).count("\n")
        for folder in (PACKAGE, TESTS)
        for pattern in ("*.py", "*.pyx", "*.pxd", "*.h")
        for path in folder.rglob(pattern)
        if "build" not in path.parts
    }
    ours = {path: part_of(path) for path in found if path.is_relative_to(PACKAGE)}
    lines = Counter()
    for path, part in ours.items():
        lines[part] += found[path]
        if part == REST and path.suffix != ".py":
            lines["of these compiled: C, Cython"] += found[path]
    tests = found.keys() - ours.keys()
    return {
        **lines,
        "the longest file of cseq": max(found[path] for path in ours if path.suffix != ".pyx"),
        "the longest .pyx": max(found[path] for path in ours if path.suffix == ".pyx"),
        "the longest file of tests": max(found[path] for path in tests),
        "extension modules": len(list(PACKAGE.rglob("*.pyx"))),
        "tests": sum(found[path] for path in tests if path.suffix == ".py"),
    }


def test_the_house_stays_within_its_budget():
    """Raise none of these without a reason in the commit."""
    there = lines_there()
    assert there.keys() == BUDGET.keys()
    above = {name: lines for name, lines in there.items() if lines > BUDGET[name] * HEADROOM}
    assert above == {}


def imported_by(run_anew, modules):
    """Return the modules that an import of some modules imports, apart from numpy."""
    script = f"import sys, numpy\nbefore = set(sys.modules)\nimport {modules}\n"
    done = run_anew(f"{script}print(*set(sys.modules) - before)")
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_import_needs_numpy_alone(run_anew):
    """Outside of the standard library, `import cseq` imports only numpy."""
    imported = {name.partition(".")[0] for name in imported_by(run_anew, "cseq")}
    others = imported - set(sys.stdlib_module_names) - {"numpy"}
    assert {name for name in others if not name.startswith(CYTHON_RUNTIME)} == {"cseq"}


def test_workers_import_nothing_slow(run_anew):
    """Apart from numpy, workers import nothing that delays their start."""
    slow = {"asyncio", "importlib.metadata", "multiprocessing", "pathlib", "subprocess", "tempfile"}
    modules = "cseq.processes.launcher.child, cseq.engine.worker"
    assert slow.isdisjoint(imported_by(run_anew, modules))


FIRST = """
import sys, torch
from cseq import DataLoader
imported = set(sys.modules)
if __name__ == "__main__":
    [batch] = DataLoader(list(range(3)), batch_size=3, num_workers=1)
    print(batch.tolist())
    print(*sorted(imported | set(sys.modules)))
"""


def test_a_loader_imports_what_a_first_batch_needs(run_anew):
    """A DataLoader and its first batch import no sequence, no order, no thread and no advice."""
    pytest.importorskip("torch")
    done = run_anew(FIRST)
    assert done.returncode == 0, done.stderr
    first, imported = done.stdout.splitlines()
    assert first == "[0, 1, 2]"
    apart = {"cseq.engine.tuning", "cseq.engine.remake", "cseq.engine.tickets.batches"}
    apart |= {f"cseq.engine.crews.{name}" for name in ("inline", "threads")}
    apart |= {f"cseq.{name}" for name in ("arguments", "kinds", "sequence", "measure.advice")}
    apart |= {f"cseq.order.{name}" for name in ("mixture", "sampler", "shard", "shuffled")}
    apart |= {"cseq.adapters.torch.batches", "cseq.converter.output"}
    assert apart <= {*MODULES}
    assert apart.isdisjoint(imported.split())


if __name__ == "__main__":
    for name, lines in lines_there().items():
        print(f"{name}: {lines} ({lines / BUDGET[name] - 1:+.1%})")
