"""The signature of the three classes, and the arguments they refuse."""

import copy
import inspect
import os
import pickle
import re
import threading
import warnings
from typing import Any

import cloudpickle
import numpy as np
import pytest
from indexers import Indices1, Rows
from kinds import PROCESSES, by_name, every_class, make_small

import cseq
from cseq import MPSequence, MSequence, MTSequence

POSITIONS = {
    "worker": inspect.Parameter.empty, "dset_size": None, "num_workers": 4, "num_converters": None,
    "batch_size": 32, "buffer": None, "shuffle": True, "thread_type": "proc", "out_type": "cuda",
    "seed": None,
}  # fmt: skip
KEYWORDS = {
    "dtype": "auto",
    "drop_last": False,
    "ordered": True,
    "start_method": None,
    "shard": None,
}


def positions_of(function):
    """Return the positional parameters and their defaults."""
    return {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    }


def test_positions_and_defaults():
    """Names, positions and defaults are fixed; the other classes lack only `thread_type`."""
    assert list(positions_of(MSequence).items()) == list(POSITIONS.items())
    rest = {name: value for name, value in POSITIONS.items() if name != "thread_type"}
    keywords = dict(inspect.signature(MSequence).parameters)
    assert {name: keywords[name].default for name in KEYWORDS} == KEYWORDS
    assert all(keywords[name].kind is inspect.Parameter.KEYWORD_ONLY for name in KEYWORDS)
    del keywords["thread_type"]
    for kind in (MPSequence, MTSequence, cseq.RaySequence):
        assert list(positions_of(kind).items()) == list(rest.items())
        assert inspect.signature(kind).parameters == keywords
        with pytest.raises(TypeError, match="'thread_type': the class sets it"):
            kind(Indices1, 10, thread_type="thread")


def test_methods_and_their_defaults():
    """`start(compat=None)` and `start_test(test_mode='default')` accept positional arguments."""
    manager = make_small()
    assert positions_of(manager.start) == {"compat": None}
    assert positions_of(manager.start_test) == {"test_mode": "default"}
    manager.start(None).start_test("numpy").finish()


def test_arguments_by_position():
    """All arguments up to `seed` may be positional, and of numpy's types."""
    manager = MSequence(
        Rows, np.int32(100), np.int8(2), np.uint8(1), np.int64(8), np.int64(3), np.False_,
        "thread", "null", np.uint64(2**64 - 1), drop_last=np.True_,
    )  # fmt: skip
    with manager.start_test() as m:
        assert [labels.tolist() for _, labels in m][:2] == [[*range(8)], [*range(8, 16)]]
    assert (len(manager), manager.batch_size, manager.seed) == (12, 8, 2**64 - 1)
    other = MTSequence(Rows, 100, 2, 1, 8, 3, False, "null", 5)
    assert (other.batch_size, other.seed, other.length) == (8, 5, 13)


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy, cloudpickle.dumps])
@every_class
def test_it_is_not_copied(make, copied):
    """A copy would share the original's order: it is refused, with an alternative."""
    manager = make(Indices1, 10)
    with pytest.raises(TypeError, match=rf"^{make.__name__} cannot be pickled .* make a manager"):
        copied(manager)


HINTS = {
    "collate_fn": "collate in", "sampler": "dset_size", "batch_sampler": "batch_size",
    "prefetch_factor": "use buffer=", "pin_memory": "out_type='cuda'",
    "pin_memory_device": "out_type='cuda:1'", "persistent_workers": "omit it",
    "worker_init_fn": "__init__", "generator": "seed", "dataset": "worker=",
    "multiprocessing_context": "use start_method=", "in_order": "use ordered=",
    "workers": "use num_workers=", "device": "use out_type='cuda'",
    "num_worker": "did you mean 'num_workers'", "batchsize": "did you mean 'batch_size'",
    "zzz": "the arguments are worker, dset_size, num_workers",
}  # fmt: skip


@pytest.mark.parametrize(("keyword", "hint"), HINTS.items())
@every_class
def test_what_to_write_instead(make, keyword, hint):
    """A keyword of DataLoader's, or a misspelled one, gets the right name and the user's class."""
    with pytest.raises(TypeError, match=re.escape(hint)) as caught:
        make(Indices1, 10, **{keyword: 1})
    assert str(caught.value).startswith(f"{make.__name__}() got an unexpected keyword")
    assert keyword in str(caught.value)
    assert make is MSequence or "thread_type" not in str(caught.value)

    class Mine(make):  # type: ignore[misc]
        pass

    with pytest.raises(TypeError, match=r"^Mine\(\) got an unexpected"):
        Mine(Indices1, 10, **{keyword: 1})


def test_a_generator_for_a_seed():
    """The error says where the number is."""
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"seed=.*initial_seed\(\)"):
        make_small(seed=torch.Generator())


def test_no_workers():
    """num_workers=0 makes every batch in the loop, regardless of the other arguments."""

    class Where:
        def __init__(self):
            # A lock cannot be pickled, and need not be.
            self.lock = threading.Lock()

        def __getitem__(self, indices):
            return indices, threading.get_ident(), cseq.worker_info()

    before = threading.active_count()
    for make in (MPSequence, MTSequence):
        manager = make(
            Where, 10, 0, num_converters=2, batch_size=4, out_type="null", seed=42, timeout=1.0
        )
        with manager.start(compat=True) as m:
            got = list(m)
            assert threading.active_count() == before
            assert m.stats().batches == 3
        assert {ident for _, ident, _ in got} == {threading.get_ident()}
        assert [info.num_workers for *_, info in got] == [1, 1, 1]
        indices = [int(i) for batch, *_ in got for i in batch]
        assert indices == cseq.permutation(10, 42, 0).tolist()
        assert manager.state_dict()["epoch"] == 1


def test_warnings_reach_everyone(run_script):
    """Without a logging configuration, warnings of 'cseq' go to stderr, and nothing below them."""
    done = run_script("""
import cseq, numpy as np
class W:
    def __getitem__(self, indices):
        if 3 in indices:
            raise OSError("unreadable")
        return indices
with cseq.MTSequence(W, 4, 1, batch_size=1, out_type="null", on_error="skip").start() as m:
    print(len(list(m)))
""")
    assert (done.returncode, done.stdout) == (0, "3\n")
    assert re.fullmatch(r"skipped .*unreadable.*\n", done.stderr)


# For each argument, the values that raise a ValueError, and those that raise a TypeError.
BAD: dict[str, tuple[list[Any], list[Any]]] = {
    "num_workers": ([-2, 70_000], [2.0, True, "4"]),
    "num_converters": ([0, 5], [1.5]),
    "batch_size": ([0, -1, 2**40], [None, 3.5]),
    "buffer": ([0, 2**14 + 1], [2.5]),
    "shuffle": (["yes"], [1]),
    "thread_type": ([], ["process", None]),
    "out_type": (["gpu", "cuda:x", "cuda:1\n"], [3]),
    "seed": ([-1, 2**64], [0.5, "abc"]),
    "dtype": (["floaty", "U5", object, "(1,", np.longdouble], []),
    "drop_last": ([], [None]),
    "ordered": ([], [0]),
    "start_method": (["thread"], []),
    "shard": (["all", (2, 2), (-1, 2), (0, 0)], [3, (1, 2, 3), (0.5, 2), (True, 2)]),
    "on_error": (["ignore"], []),
    "max_restarts": ([-1], []),
    "timeout": ([0, float("nan")], ["1s"]),
    "on_timeout": (["kill"], []),
    "memory_limit": (["much"], []),
    "dset_size": (
        [0, -5, [], [[1, 2]], 2**48 + 1, np.array(5), np.array([2**63], np.uint64)],
        [None, 10.0, True, "100", [1.5, 2], [True, False], [[1], [2, 3]], [2**64],
         np.array(["1"]), np.array([1], "m8[s]")],
    ),
    "worker": ([], [5, None, [1, 2, 3], {"a": 1}, "text"]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        pytest.param(name, value, kind, id=f"{name}={value!r}"[:40])
        for name, refused in BAD.items()
        for kind, values in zip((ValueError, TypeError), refused, strict=True)
        for value in values
    ],
)
def test_bad_arguments(name, value, kind):
    """The constructor refuses a wrong argument; the message names it."""
    arguments = {"worker": Indices1, "dset_size": 10, "out_type": "null"} | {name: value}
    with pytest.raises(kind, match=name) as caught:
        MSequence(**arguments)
    assert type(caught.value) is kind
    if name != "worker" and value is not None and not isinstance(value, (list, tuple, np.ndarray)):
        assert str(value)[:3] in str(caught.value)


DATA_SET = {"worker": cseq.from_dataset([1, 2]), "dset_size": None}


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"num_workers": -1}, ValueError, "num_workers=-1 is below 0"),
        *(({name: "fast"}, TypeError, f"{name}='fast' is not an integer; pass .* 'auto'")
          for name in ("num_workers", "buffer")),
        ({"batch_size": None}, TypeError, "batch_size=None.*pass 1"),
        ({"threads": 0}, ValueError, "threads=0"),
        ({"threads": "2"}, TypeError, "threads='2'"),
        ({"preload": ["torch"]}, TypeError, r"preload=\['torch'\] is neither True nor False"),
        ({"repeat": 0}, ValueError, "repeat=0"),
        ({"repeat": False}, TypeError, "repeat=False"),
        ({"repeat": 1.5}, TypeError, "repeat=1.5"),
        ({"repeat": 2, "ordered": False}, ValueError, "repeat=2 cannot .* ordered=False"),
        ({"repeat": True, "pad": False}, ValueError, "repeat=True cannot .* pad=False"),
        *((DATA_SET | {name: list}, TypeError, r"pass cseq.from_dataset\(dataset, collate=...\)")
          for name in ("collate", "collate_fn")),
    ],
)  # fmt: skip
@every_class
def test_what_the_error_says(make, options, kind, said):
    """The error has the argument, its value and the remedy."""
    with pytest.raises(kind, match=said):
        make(**{"worker": Indices1, "dset_size": 10, "out_type": "null"} | options)


FLEETS = {"start_method": "spawn", "preload": False, "max_restarts": 3, "on_timeout": "restart"}


@pytest.mark.parametrize("name", ["num_workers", *FLEETS])
def test_a_fleet_has_no_processes_that_cseq_starts(name):
    """Arguments for such processes are refused, with their values; the buffer's size is known."""
    error, said = TypeError, f"{name}=.*has no effect on a fleet's workers: Ray starts"
    if name == "num_workers":
        error, said = ValueError, r"num_workers='auto' cannot be .* thread_type='ray'"
    with pytest.raises(error, match=said):
        cseq.RaySequence(Indices1, 10, out_type="null", **{name: FLEETS.get(name, "auto")})
    cseq.RaySequence(Indices1, 10, out_type="null", buffer="auto")


def test_more_processes_than_can_be_of_use():
    """The constructor warns of them, but not of threads or the default number."""
    many = 64 * (os.cpu_count() or 1)
    with pytest.warns(UserWarning, match=f"num_workers={many} is too high for") as caught:
        cseq.MPSequence(Indices1, 10, num_workers=many)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cseq.MPSequence(Indices1, 10)
        cseq.MTSequence(Indices1, 10, num_workers=many)


class Handle(Indices1):
    def __init__(self):
        self.lock = threading.Lock()


@pytest.mark.parametrize("kind", [k for k in PROCESSES if k.name != "fork"], ids=by_name)
def test_a_worker_that_cannot_be_pickled(kind):
    """`start` refuses it, and names the attribute and the reason."""
    manager = kind.make(Handle(), 10)
    with pytest.raises(TypeError, match=r"worker.*lock"):
        manager.start()


@pytest.mark.parametrize(
    ("verb", "value", "kind", "said"),
    [
        *(("start_test", value, ValueError, r"test_mode.*'default'.*'cpu'.*'numpy'")
          for value in ("inline", "", None, 1)),
        ("start", "yes", TypeError, "compat"),
        *(("set_epoch", value, ValueError, "epoch") for value in (-1, 2**64)),
        *(("set_epoch", value, TypeError, "epoch") for value in (1.0, None)),
    ],
)  # fmt: skip
def test_bad_arguments_of_methods(verb, value, kind, said):
    """A refused call starts nothing, and changes nothing."""
    manager = make_small()
    with pytest.raises(kind, match=said):
        getattr(manager, verb)(value)
    with pytest.raises(OSError, match="with"), manager:
        pass
    assert manager.epoch == 0
