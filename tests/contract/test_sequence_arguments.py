"""The signature of the three classes, and the arguments they refuse."""

import copy
import inspect
import os
import pickle
import re
import threading
import warnings

import cloudpickle
import numpy as np
import pytest
from indexers import Indices1, Rows
from kinds import PROCESSES, by_name, every_class, make_small

import cseq
from cseq import MPSequence, MSequence, MTSequence

# -- the signature

POSITIONS = {
    "worker": inspect.Parameter.empty,
    "dset_size": None,
    "num_workers": 4,
    "num_converters": None,
    "batch_size": 32,
    "buffer": None,
    "shuffle": True,
    "thread_type": "proc",
    "out_type": "cuda",
    "seed": None,
}
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
    """All arguments up to `seed` may be positional."""
    manager = MSequence(Rows, 100, 2, 1, 8, 3, False, "thread", "null", 5)
    with manager.start_test() as m:
        assert [len(labels) for _, labels in m][:2] == [8, 8]
    assert (manager.batch_size, manager.seed) == (8, 5)
    other = MTSequence(Rows, 100, 2, 1, 8, 3, False, "null", 5)
    assert (other.batch_size, other.seed, other.length) == (8, 5, 13)


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy, cloudpickle.dumps])
@every_class
def test_it_is_not_copied(make, copied):
    """A copy would share the original's order: it is refused, with an alternative."""
    manager = make(Indices1, 10)
    with pytest.raises(TypeError, match=rf"^{make.__name__} cannot be pickled .* make a manager"):
        copied(manager)


@pytest.mark.parametrize(
    ("keyword", "hint"),
    [
        ("collate_fn", "collate in"),
        ("sampler", "dset_size"),
        ("batch_sampler", "batch_size"),
        ("prefetch_factor", "use buffer="),
        ("pin_memory", "out_type='cuda'"),
        ("pin_memory_device", "out_type='cuda:1'"),
        ("persistent_workers", "omit it"),
        ("worker_init_fn", "__init__"),
        ("generator", "seed"),
        ("dataset", "worker="),
        ("multiprocessing_context", "use start_method="),
        ("in_order", "use ordered="),
        ("workers", "use num_workers="),
        ("device", "use out_type='cuda'"),
        ("num_worker", "did you mean 'num_workers'"),
        ("batchsize", "did you mean 'batch_size'"),
        ("zzz", "the arguments are worker, dset_size, num_workers"),
    ],
)
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


def test_no_batch_size():
    """The error for batch_size=None explains how to get single samples."""
    with pytest.raises(TypeError, match=r"batch_size=None.*pass 1"):
        make_small(batch_size=None)


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
    with pytest.raises(ValueError, match="num_workers=-1 is below 0"):
        make_small(num_workers=-1)


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


# -- bad input

BAD = [
    ("batch_size", None, TypeError),
    ("num_workers", -2, ValueError),
    ("num_workers", 2.0, TypeError),
    ("num_workers", True, TypeError),
    ("num_workers", "4", TypeError),
    ("num_workers", 70_000, ValueError),
    ("num_converters", 0, ValueError),
    ("num_converters", 5, ValueError),
    ("num_converters", 1.5, TypeError),
    ("batch_size", 0, ValueError),
    ("batch_size", -1, ValueError),
    ("batch_size", 3.5, TypeError),
    ("batch_size", 2**40, ValueError),
    ("buffer", 0, ValueError),
    ("buffer", 2.5, TypeError),
    ("buffer", 2**14 + 1, ValueError),
    ("shuffle", 1, TypeError),
    ("shuffle", "yes", ValueError),
    ("thread_type", "process", TypeError),
    ("thread_type", None, TypeError),
    ("out_type", "gpu", ValueError),
    ("out_type", "cuda:x", ValueError),
    ("out_type", "cuda:1\n", ValueError),
    ("out_type", 3, TypeError),
    ("seed", -1, ValueError),
    ("seed", 2**64, ValueError),
    ("seed", 0.5, TypeError),
    ("seed", "abc", TypeError),
    ("dtype", "floaty", ValueError),
    ("dtype", "U5", ValueError),
    ("dtype", object, ValueError),
    ("dtype", "(1,", ValueError),
    ("dtype", np.longdouble, ValueError),
    ("drop_last", None, TypeError),
    ("ordered", 0, TypeError),
    ("start_method", "thread", ValueError),
    ("shard", "all", ValueError),
    ("shard", 3, TypeError),
    ("shard", (1, 2, 3), TypeError),
    ("on_error", "ignore", ValueError),
    ("max_restarts", -1, ValueError),
    ("timeout", 0, ValueError),
    ("timeout", float("nan"), ValueError),
    ("timeout", "1s", TypeError),
    ("on_timeout", "kill", ValueError),
    ("memory_limit", "much", ValueError),
    ("dset_size", 0, ValueError),
    ("dset_size", -5, ValueError),
    ("dset_size", 10.0, TypeError),
    ("dset_size", True, TypeError),
    ("dset_size", "100", TypeError),
    ("dset_size", [], ValueError),
    ("dset_size", [1.5, 2], TypeError),
    ("dset_size", [True, False], TypeError),
    ("dset_size", [[1, 2]], ValueError),
    ("dset_size", [[1], [2, 3]], TypeError),
    ("dset_size", [2**64], TypeError),
    ("dset_size", np.array(["1"]), TypeError),
    ("dset_size", np.array([1], "m8[s]"), TypeError),
    ("dset_size", 2**48 + 1, ValueError),
    ("dset_size", np.array(5), ValueError),
    ("dset_size", np.array([2**63], np.uint64), ValueError),
    ("shard", (2, 2), ValueError),
    ("shard", (-1, 2), ValueError),
    ("shard", (0.5, 2), TypeError),
    ("shard", (True, 2), TypeError),
    ("shard", (0, 0), ValueError),
    ("dset_size", None, TypeError),
    ("worker", 5, TypeError),
    ("worker", None, TypeError),
    ("worker", [1, 2, 3], TypeError),
    ("worker", {"a": 1}, TypeError),
    ("worker", "text", TypeError),
]


@pytest.mark.parametrize(("name", "value", "kind"), BAD, ids=[f"{n}={v!r}"[:40] for n, v, _ in BAD])
def test_bad_arguments(name, value, kind):
    """The constructor refuses a wrong argument; the message names it."""
    arguments = {"worker": Indices1, "dset_size": 10, "out_type": "null"} | {name: value}
    with pytest.raises(kind, match=name) as caught:
        MSequence(**arguments)
    assert type(caught.value) is kind
    if name != "worker" and value is not None and not isinstance(value, (list, tuple, np.ndarray)):
        assert str(value)[:3] in str(caught.value)


@pytest.mark.parametrize("keyword", ["collate", "collate_fn"])
def test_a_collate_function_beside_a_data_set(keyword):
    """The error says that it is an argument of `from_dataset`."""
    options = {keyword: list}
    with pytest.raises(TypeError, match=r"pass cseq.from_dataset\(dataset, collate=...\)"):
        cseq.MPSequence(cseq.from_dataset([1, 2]), **options)


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


class Handle:
    def __init__(self):
        self.lock = threading.Lock()

    def __getitem__(self, indices):
        return indices


@pytest.mark.parametrize("kind", [k for k in PROCESSES if k.name != "fork"], ids=by_name)
def test_a_worker_that_cannot_be_pickled(kind):
    """`start` refuses it, and names the attribute and the reason."""
    manager = kind.make(Handle(), 10)
    with pytest.raises(TypeError, match=r"worker.*lock") as caught:
        manager.start()
    assert "lock" in str(caught.value)


@pytest.mark.parametrize("value", ["inline", "", None, 1])
def test_bad_test_mode(value):
    """An unknown `test_mode` raises a ValueError with the known ones; nothing is started."""
    manager = make_small()
    with pytest.raises(ValueError, match=r"test_mode.*'default'.*'cpu'.*'numpy'"):
        manager.start_test(value)
    with pytest.raises(OSError, match="with"), manager:
        pass


def test_bad_compat():
    """`compat` is None, True or False."""
    with pytest.raises(TypeError, match="compat"):
        make_small().start("yes")


@pytest.mark.parametrize(
    ("value", "kind"), [(-1, ValueError), (1.0, TypeError), (None, TypeError), (2**64, ValueError)]
)
def test_bad_epochs(value, kind):
    """`set_epoch` refuses a value that is no epoch, and changes nothing."""
    manager = make_small()
    with pytest.raises(kind, match="epoch"):
        manager.set_epoch(value)
    assert manager.epoch == 0


def test_numpys_numbers():
    """Numpy's integers and booleans serve wherever Python's do."""
    manager = MSequence(
        Indices1, np.int32(20), np.int8(2), np.uint8(1), np.int64(4), np.int64(3), np.True_,
        "thread", "null", np.uint64(2**64 - 1), drop_last=np.False_,
    )  # fmt: skip
    assert (len(manager), manager.batch_size, manager.seed) == (5, 4, 2**64 - 1)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"threads": 0}, ValueError, "threads=0"),
        ({"threads": "2"}, TypeError, "threads='2'"),
        ({"preload": ["torch"]}, TypeError, "preload=['torch'] is neither True nor False"),
    ],
)
def test_bad_threads_and_preloads(options, error, text):
    """The constructor refuses them."""
    with pytest.raises(error, match=re.escape(text)):
        make_small(**options)
