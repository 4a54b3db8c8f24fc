"""Each private name of torch that `cseq.DataLoader` relies on, and what it means."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils import data  # noqa: E402
from torch_data import Plain  # noqa: E402

from cseq.adapters.torch import names  # noqa: E402

if TYPE_CHECKING:
    from conftest import RunScript


def test_the_seam() -> None:
    """`__iter__` gets its iterator from `_get_iterator`, or has the persistent one reset."""
    made = []

    class Loader(data.DataLoader[Any]):
        def _get_iterator(self) -> Any:
            made.append(super()._get_iterator())
            return made[-1]

    loader = Loader(Plain(2))
    assert iter(loader) is made[0]
    assert loader._iterator is None
    assert loader._index_sampler is loader.batch_sampler
    assert loader._IterableDataset_len_called is None
    assert loader.check_worker_number_rationality() is None


def test_base() -> None:
    """Its constructor sets all that the iterators rely on, and draws the seed."""
    generator = torch.Generator().manual_seed(1)
    loader = data.DataLoader(Plain(4), batch_size=2, generator=generator, drop_last=True)
    base = names.Base(loader)
    expected = torch.empty((), dtype=torch.int64).random_(
        generator=torch.Generator().manual_seed(1)
    )
    assert base._base_seed == expected.item()
    assert base._dataset is loader.dataset
    assert base._dataset_kind == 0 != names.ITERABLE
    assert base._auto_collation
    assert base._drop_last
    assert base._index_sampler is loader.batch_sampler
    assert next(base._sampler_iter) == [0, 1]
    assert (base._num_workers, base._timeout, base._num_yielded) == (0, 0, 0)
    assert base._collate_fn is loader.collate_fn
    assert base._IterableDataset_len_called is None
    assert not base._persistent_workers
    assert not base._pin_memory
    assert base._pin_memory_device is None
    assert isinstance(base._profile_name, str)
    base._num_yielded = 5
    base._reset(loader, False)
    assert base._num_yielded == 0
    assert next(base._sampler_iter) == [0, 1]
    assert len(base) == 2


def test_multiprocessings_own() -> None:
    """What `worker` calls of multiprocessing, in a new process, and what `spawning` changes."""
    from cseq.processes.launcher.identity import PROCESS
    from cseq.processes.spawning import CONTEXT, PICKLER

    util: Any = multiprocessing.util
    parent = PROCESS._ParentProcess("trainer", 7, None)
    assert (parent.name, parent.pid, parent._sentinel) == ("trainer", 7, None)
    assert PROCESS._parent_process is PROCESS.parent_process()
    assert multiprocessing.Process()._identity[:-1] == ()
    CONTEXT.set_spawning_popen(parent)
    assert CONTEXT.get_spawning_popen() is parent
    CONTEXT.set_spawning_popen(None)
    assert callable(PICKLER._extra_reducers[Connection])
    assert PROCESS._current_process is PROCESS.current_process()
    assert isinstance(PROCESS._children, set)
    assert callable(util._run_after_forkers)
    assert callable(util._exit_function)
    assert hasattr(util._finalizer_registry, "clear")


# ── another torch ──────────────────────────────────────────────────────────────────────────

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


def loads(run: RunScript, change: str) -> list[str]:
    """Load with a torch that is changed first; return what is printed, and logged."""
    done = run(LOADS.format(change=change))
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.needs("fork")
def test_a_class_with_two_type_parameters(run_prepared: RunScript) -> None:
    """Its batches are cseq's, and it can be subscripted as torch's."""
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
        ("torch.autograd._profiler_enabled = lambda kind: None", "differs from those that cseq"),
    ],
)
def test_a_name_that_torch_lacks(run_prepared: RunScript, change: str, reason: str) -> None:
    """Torch's own iterator is used, and the log says so once."""
    told, *lines = loads(run_prepared, change)
    assert "torch's own iterator is used, since this torch, " in told
    assert reason in told
    assert lines.pop(4).startswith("the state of a DataLoader is empty: torch's own iterator")
    assert lines == [f"{BATCHES} torch.utils.data.dataloader"] * 4 + [BATCHES, "True"]


def test_a_default_device_where_cseq_is_imported(run_prepared: RunScript) -> None:
    """The names are tried on the CPU: torch's loader does not work on this device."""
    code = "import torch; torch.set_default_device('meta'); from cseq.adapters.torch import names; "
    done = run_prepared(f"{code}print(names.REASON, torch.empty(1).device)")
    assert done.stdout.split() == ["None", "meta"], done.stderr
