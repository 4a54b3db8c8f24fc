"""What a new process can import goes by reference, and nothing else does."""

from __future__ import annotations

import functools
import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

import pytest
from travelling import Indexer, Pair, Slotted, arrives_elsewhere, goes_by_value, make

from cseq.encoding import importable
from cseq.encoding.importable import Importable, named_here
from cseq.encoding.pickling import dump

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give a folder on the path; what is imported from it is forgotten after the test."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in set(sys.modules) - before:
        module = sys.modules[name]
        if str(tmp_path) in str(getattr(module, "__file__", tmp_path)):
            del sys.modules[name]


def import_file(path: Path, source: str) -> types.ModuleType:
    """Write a module, and import it."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(source)
    importlib.invalidate_caches()
    return importlib.import_module(path.stem)


SOURCE = "class Worker:\n    answer = 42\n    def __getitem__(self, i): return helper(i)\n"
SOURCE += "def helper(i): return i + Worker.answer\n"


def test_what_can_be_imported_goes_by_reference(folder: Path) -> None:
    """A module that a new process finds is imported there, not pickled."""
    module = import_file(folder / "on_disk.py", SOURCE)
    made = dump(module.Worker())
    assert b"helper" not in made.data
    assert made.modules == ("on_disk",)
    assert arrives_elsewhere(module.Worker(), "obj[1], type(obj).__module__") == "(43, 'on_disk')"


def test_another_machine_has_what_is_installed_alone(folder: Path) -> None:
    """The standard library, packages, cseq, what a runtime_env brings; no file of the user's."""
    (folder / "site-packages").mkdir()
    (folder / "working_dir_files").mkdir()
    sys.path[:0] = [str(folder / "site-packages"), str(folder / "working_dir_files")]
    own = import_file(folder / "own_file.py", SOURCE)
    installed = import_file(folder / "site-packages" / "installed.py", SOURCE)
    brought = import_file(folder / "working_dir_files" / "brought.py", SOURCE)
    names = ["json", "numpy", "cseq", "cseq.errors", "itertools", "installed", "brought"]
    there = Importable(elsewhere=True)
    assert [name for name in names if not there.findable(name)] == []
    assert not there.findable("own_file")
    assert b"helper" in dump(own.Worker(), elsewhere=True).data
    assert dump(own.Worker()).modules == ("own_file",)
    for module in (installed, brought):
        made = dump(module.Worker(), elsewhere=True)
        assert (b"helper" in made.data, made.modules) == (False, (module.__name__,))


def test_a_module_made_by_hand_goes_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that exists in memory only is taken along."""
    module = types.ModuleType("made_by_hand")
    exec(SOURCE, vars(module))
    monkeypatch.setitem(sys.modules, "made_by_hand", module)
    assert goes_by_value(vars(module)["Worker"])
    assert arrives_elsewhere(vars(module)["Worker"](), "obj[1]") == "43"
    assert arrives_elsewhere(functools.partial(vars(module)["helper"], 2), "obj()") == "44"


def test_a_module_whose_file_is_gone_goes_by_value(folder: Path) -> None:
    """What cannot be imported any more is taken along."""
    module = import_file(folder / "vanishing.py", SOURCE)
    (folder / "vanishing.py").unlink()
    assert goes_by_value(module.Worker)
    assert arrives_elsewhere(module.Worker(), "obj[1]") == "43"


def test_a_module_that_another_one_hides_goes_by_value(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new process would import the other one of the same name."""
    module = import_file(folder / "twin.py", SOURCE)
    (folder / "first").mkdir()
    (folder / "first" / "twin.py").write_text("raise SystemExit('the wrong twin')")
    monkeypatch.syspath_prepend(str(folder / "first"))
    assert goes_by_value(module.Worker)
    assert arrives_elsewhere(module.Worker(), "obj[1]") == "43"


def test_a_helper_that_workers_cannot_import_comes_with_what_needs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Modules that a function refers to are looked at too, not only those of classes."""
    module = types.ModuleType("made_by_hand")
    exec(SOURCE, vars(module))
    monkeypatch.setitem(sys.modules, "made_by_hand", module)
    assert arrives_elsewhere(lambda: module.Worker()[1], "obj()") == "43"


def test_packages_and_their_modules_go_by_reference(folder: Path) -> None:
    """Modules in packages, packages without __init__.py, and what a module makes of itself."""
    (folder / "plain").mkdir()
    (folder / "pack").mkdir()
    (folder / "pack" / "__init__.py").write_text("")
    for place in ("plain", "pack"):
        (folder / place / "inner.py").write_text(
            "import sys, types\nclass Inner: pass\nclass Made: pass\n"
            "Made.__module__ = __name__ + '.made'\nmade = types.ModuleType(Made.__module__)\n"
            "made.Made = Made\nsys.modules[Made.__module__] = made\n"
        )
        inner = importlib.import_module(f"{place}.inner")
        assert not goes_by_value(inner.Inner)
        assert not goes_by_value(inner.Made)
        assert arrives_elsewhere(inner.Inner, "obj.__module__") == f"{place}.inner"
        assert arrives_elsewhere(inner.Made, "obj.__module__") == f"{place}.inner.made"


def test_a_name_that_means_something_else_now_goes_by_value() -> None:
    """A class or function that is not what its module has under its name is taken along."""
    function = types.FunctionType((lambda: 41).__code__, {})
    function.__module__, function.__qualname__ = __name__, "make"
    assert goes_by_value(function)
    assert arrives_elsewhere(function, "obj()") == "41"


def test_each_module_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of objects of a class ask the import system once."""
    asked: list[str] = []
    find = importable.find_spec

    def count(name: str, path: Any) -> Any:
        asked.append(name)
        return find(name, path)

    monkeypatch.setattr(importable, "find_spec", count)
    dump([Indexer(make) for _ in range(1000)] + [Slotted(Pair(1, 2))])
    assert len(asked) == len(set(asked))
    assert make.__module__ in asked


def test_what_a_process_that_has_met_this_one_knows_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever has its name here, importable or not, as long as that is the same object."""

    class Local:
        pass

    module = types.ModuleType("made_by_hand")
    exec(SOURCE, vars(module))
    monkeypatch.setitem(sys.modules, "made_by_hand", module)
    worker = vars(module)["Worker"]
    assert named_here(worker)
    assert not Importable().findable("made_by_hand")
    assert not named_here(Local)
    assert not named_here(lambda: 1)
    vars(module)["Worker"] = Local
    assert not named_here(worker)
    assert not named_here(module)
