"""Keys of workers that die, and signal handlers that raise."""

import contextlib
import itertools
import os
from functools import partial
from pathlib import Path

import pytest
from interrupting import first_hits, in_shares, interrupted
from keyed import Counting, Makes, begin, keys_of, streams
from killing import kill
from streaming import STEPS, lost_slots

import cseq


class Fatal(Makes):
    """Dies at some keys, once for each file that it can create."""

    def __init__(self, folder, file_of, number, num_workers):
        super().__init__(number, num_workers)
        self.folder, self.file_of = Path(folder), file_of

    def make(self, key):
        if file := self.file_of(key):
            with contextlib.suppress(FileExistsError):
                (self.folder / file).touch(exist_ok=False)
                kill(os.getpid())
        assert self.assignment in (0, "assigned")
        return super().make(key)


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize(("ordered", "assign"), [(True, "turn"), (True, "free"), (False, "turn")])
def test_a_dead_worker_s_keys_are_made_by_its_replacement(tmp_path, ordered, assign, long):
    """It makes the same keys, after the epoch's assignment."""
    keys = [[k, 2**70] if long else [k, 1] for k in range(40)]
    fatal = partial(Fatal, str(tmp_path), lambda key: str(key[0]) if key[0] % 5 == 3 else "")
    with streams(fatal, prefetch=3) as s:
        s.begin(["assigned"] * 2, iter(keys), ordered=ordered, assign=assign)
        got = keys_of(s)
        assert (got if ordered else sorted(got)) == keys
        assert s.stats().restarts == 8
        assert not lost_slots(s)


@pytest.mark.parametrize(
    ("fatal", "shown", "indices"),
    [([7, 8], r"\[7, 8\]", [7, 8]), (7, "7", [7]), (("a", 7), r"\('a', 7\)", [("a", 7)])],
)
def test_an_item_that_kills_again_and_again_is_named(tmp_path, fatal, shown, indices):
    """WorkerDied has the key and the process."""
    kills = partial(Fatal, str(tmp_path), lambda key: os.urandom(8).hex() if key == fatal else "")
    with streams(kills) as s:
        begin(s, [[0], [1], fatal, [3]])
        named = rf"item 2 \({shown}\) of worker 0, epoch 0\. This item has killed"
        with pytest.raises(cseq.WorkerDied, match=named) as caught:
            list(s)
        assert caught.value.indices == indices
        assert caught.value.pid not in (None, os.getpid())


MIXED = [[0], "one", [2], [3, 2**70], [4], "five", [6], [7], [8]]


@in_shares
@pytest.mark.parametrize("how", ["turn", "glance"])
@pytest.mark.parametrize(("ordered", "assign"), [(True, "turn"), (True, "free"), (False, "turn")])
def test_ctrl_c_anywhere_in_the_taking_of_an_item(ordered, assign, how, share):
    """Wherever a signal handler raises in it, no key or item is lost, doubled or misplaced."""
    with streams(prefetch=2) as s:
        hits = 0
        for behind in (0, 2, len(MIXED)):

            def step(countdown, behind=behind):
                keys = Counting(MIXED)
                begin(s, keys, ordered=ordered, assign=assign)
                got = []
                for _ in range(behind):
                    take(s, how, got)
                with interrupted(countdown, *STEPS) as struck:
                    take(s, how, got)
                while take(s, how, got):
                    assert keys.drawn == min(len(MIXED), 4 + len(got))
                assert (got if ordered else sorted(map(str, got))) == (
                    MIXED if ordered else sorted(map(str, MIXED))
                )
                assert not lost_slots(s)
                return struck.is_set()

            hits += first_hits(step, share=share)
        assert hits > 5


def take(s, how, got):
    """Take an item's key; return whether one was left."""
    ahead = s.glance() if how == "glance" else None
    items = list(itertools.islice(s, 1))
    assert ahead is None or ahead is items[0]
    got += keys_of(items)
    return bool(items)


class Awkward:
    """A key whose unpickling ends the trainer's thread."""

    def __reduce__(self):
        return end_thread, (os.getpid(),)


def end_thread(trainer):
    """Raise SystemExit in the trainer."""
    if os.getpid() == trainer:
        raise SystemExit("of the user's key")
    return 7


def test_a_key_that_raises_where_a_dead_worker_is_replaced(tmp_path):
    """Whatever the user's class does, the worker is replaced, and no item is missing."""
    with streams(partial(Fatal, str(tmp_path), lambda _: "died"), 1) as s:
        begin(s, [Awkward(), Awkward()])
        assert keys_of(s) == [7, 7]
        assert s.stats().restarts == 1
