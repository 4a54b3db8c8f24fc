"""Private names of multiprocessing that `cseq.DataLoader` uses, and another version of torch."""

import multiprocessing
from multiprocessing.connection import Connection

import pytest

torch = pytest.importorskip("torch")


def test_multiprocessings_own():
    """These are the names that `worker` uses in a new process, and those `spawning` changes."""
    from cseq.processes.spawning import CONTEXT, PICKLER

    process = multiprocessing.process
    util = multiprocessing.util
    parent = process._ParentProcess("trainer", 7, None)
    assert (parent.name, parent.pid, parent._sentinel) == ("trainer", 7, None)
    assert process._parent_process is process.parent_process()
    assert multiprocessing.Process()._identity[:-1] == ()
    CONTEXT.set_spawning_popen(parent)
    assert CONTEXT.get_spawning_popen() is parent
    CONTEXT.set_spawning_popen(None)
    assert callable(PICKLER._extra_reducers[Connection])
    assert process._current_process is process.current_process()
    assert isinstance(process._children, set)
    assert callable(util._run_after_forkers)
    assert callable(util._exit_function)
    assert hasattr(util._finalizer_registry, "clear")


LOADS = """
import logging, sys, warnings
warnings.simplefilter("ignore")
import torch
from torch.utils import data
logging.basicConfig(format="%(message)s", stream=sys.stdout)
d = data.dataloader
{change}
import cseq
from cseq.adapters.torch import installed

options = {{"batch_size": 2, "num_workers": 1, "multiprocessing_context": "fork"}}
for epoch in range(2):
    loader = cseq.DataLoader(list(range(4)), **options)
    print([batch.tolist() for batch in loader], type(iter(loader)).__module__)
    with installed():
        loader = data.DataLoader(list(range(4)), **options)
        print([batch.tolist() for batch in loader], type(iter(loader)).__module__)
loader = cseq.DataLoader(list(range(4)), batch_size=2)
state = loader.state_dict()
loader.load_state_dict(state)
print([batch.tolist() for batch in loader])
try:
    loader.load_state_dict({{"version": 1}})
except ValueError as error:
    print("state" in str(error))
"""

BATCHES = "[[0, 1], [2, 3]]"


def loads(run, change):
    """Load with a modified torch; return the output and the log."""
    done = run(LOADS.format(change=change))
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.needs("fork")
def test_a_class_with_two_type_parameters(run_prepared):
    """Its batches are cseq's, and it takes type parameters like torch's class."""
    change = """
from typing import TypeVar
data.DataLoader.__parameters__ = (TypeVar("Sample"), TypeVar("Batch"))
import cseq
cseq.DataLoader[int, str]
class Own(cseq.DataLoader[int, str]): pass
"""
    ours = f"{BATCHES} cseq.adapters.torch.iterator"
    assert loads(run_prepared, change) == [ours] * 4 + [BATCHES, "True"]


@pytest.mark.needs("fork")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("del data._utils.worker._worker_info", "_worker_info"),
        ("del data._utils.collate.collate_tensor_fn", "collate_tensor_fn"),
        ("del data._utils.pin_memory.pin_memory", "pin_memory"),
        ("del torch.autograd._profiler_enabled", "_profiler_enabled"),
        ("d._Other = d._BaseDataLoaderIter; del d._BaseDataLoaderIter", "_BaseDataLoaderIter"),
        ("torch.autograd._profiler_enabled = lambda kind: None", "differs from the versions"),
    ],
)
def test_a_name_that_torch_lacks(run_prepared, change, reason):
    """The loader uses torch's own iterator, and the log says so once."""
    told, *lines = loads(run_prepared, change)
    assert "falls back to torch's own iterator because torch " in told
    assert reason in told
    assert lines.pop(4).startswith("the state of this DataLoader is empty: the loader falls")
    assert lines == [f"{BATCHES} torch.utils.data.dataloader"] * 4 + [BATCHES, "True"]


def test_a_default_device_where_cseq_is_imported(run_prepared):
    """The names are checked on the CPU, as torch's loader does not work on this device."""
    code = "import torch; torch.set_default_device('meta'); from cseq.adapters.torch import names; "
    done = run_prepared(f"{code}print(names.REASON, torch.empty(1).device)")
    assert done.stdout.split() == ["None", "meta"], done.stderr
