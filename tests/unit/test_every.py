"""Figures of every few steps, no matter what starts and ends in between."""

import logging

import pytest
from indexers import Indices1

import cseq


class Read:
    """A loader that keeps its last reading."""

    def __init__(self, loader):
        self.loader = loader

    def stats(self):
        self.last = self.loader.stats()
        return self.last


def test_windows_end_with_each_so_many_steps():
    """The figures cover the time since the previous ones, even across epochs."""
    with cseq.MTSequence(Indices1, 32, batch_size=4, out_type="null").start() as manager:
        read = Read(manager)
        every = cseq.Stats.every(3, read)
        before, step = read.last, 0
        for _ in range(2):
            for _ in manager:
                step += 1
                figures = every.at(step)
                assert bool(figures) == (step % 3 == 0)
                if figures:
                    added = read.last.since(before)
                    assert added.batches == 3
                    assert figures == added.as_dict()
                    before = read.last
    assert step == 16


def test_a_new_start_begins_a_window():
    """Earlier counts are another run's, even if that one had fewer batches."""
    manager = cseq.MTSequence(Indices1, 32, batch_size=4, out_type="null")
    read = Read(manager)
    with manager.start():
        next(iter(manager))
        every = cseq.Stats.every(8, read)
    with manager.start():
        for _ in manager:
            pass
        assert every.at(8) == read.last.as_dict()
        assert read.last.batches == 8


def test_a_loader_without_workers_is_told_once(caplog):
    """It has no figures; training continues."""
    loader = cseq_loader(num_workers=0)
    with caplog.at_level(logging.WARNING, "cseq"):
        every = cseq.Stats.every(1, loader)
        for step, _ in enumerate(loader, 1):
            assert every.at(step) == {}
    told = "there are no figures to log, because this loader has no cseq workers"
    assert caplog.messages == [told]


def test_each_epoch_of_a_loader_has_workers_of_its_own():
    """A window that began with the previous epoch's workers has the new ones' work."""
    loader = cseq_loader(num_workers=1)
    read = Read(loader)
    every = cseq.Stats.every(3, read)
    step, found = 0, []
    for _ in range(2):
        for _ in loader:
            step += 1
            if every.at(step):
                found.append(read.last.batches)
    assert found == [3, 2]


def cseq_loader(**options):
    """Return a DataLoader of four batches."""
    pytest.importorskip("torch")
    return cseq.DataLoader(list(range(8)), batch_size=2, **options)


def test_what_does_not_count_is_refused():
    """The error comes at once, with the remedy."""
    with pytest.raises(TypeError, match=r"manager=\[\] has no stats\(\); pass a cseq manager"):
        cseq.Stats.every(1, [])
    with pytest.raises(ValueError, match="n=0 is below 1"):
        cseq.Stats.every(0, Read(None))


def test_adapters_import_no_library(run_script):
    """`import cseq.adapters` costs nothing; a module without its library says how to install it."""
    done = run_script("""
import sys, importlib
import cseq.adapters
libraries = {"keras": "keras", "lightning": "lightning", "transformers": "transformers[torch]"}
assert not libraries.keys() & sys.modules.keys()
for name, package in libraries.items():
    sys.modules[name] = None
    try:
        importlib.import_module(f"cseq.adapters.{name}")
    except ImportError as error:
        print("pip install" in str(error) and package in str(error), error.name)
""")
    expected = ["True keras", "True lightning", "True transformers"]
    assert done.stdout.splitlines() == expected, done.stderr
