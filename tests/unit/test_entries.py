"""The entries of a cache: who claims one, and who keeps it."""

import sys

import pytest
from forking import in_child

from cseq.store.entries import Entries

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fcntl")


def test_a_claim_of_an_entry_that_was_kept_meanwhile_is_given_up(tmp_path):
    """A process that claims an entry too late does not own it; all read the first."""
    folder = str(tmp_path / "cache")
    entries = Entries.opened(folder, {"samples": 9, "limit": 1 << 20}, is_kept=True)

    def keep():
        assert entries.claim(5)
        entries.keep(5, [b"x" * 100])
        entries.release(5)
        return True

    def lock():
        import fcntl

        with open(f"{folder}/claims", "r+b") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 5)
        return True

    assert entries.find(5) is None
    assert in_child(keep)
    assert not entries.claim(5)
    assert in_child(lock)
    entry = entries.find(5)
    assert entry is not None
    assert entry[:100] == b"x" * 100
    assert entries.counts() == (1, 1, 1)
