"""Objects of multiprocessing in a data set whose workers are not forked."""

import copyreg
import multiprocessing
import os
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import context

import pytest

torch = pytest.importorskip("torch")

from cseq.encoding.pickling import UnpicklableError, dump  # noqa: E402
from cseq.processes.launcher import start_methods  # noqa: E402
from cseq.processes.spawning import Reopened, Workers, spawning  # noqa: E402

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="descriptors are opened by /proc"),
    # torch warns of this on machines with few processors.
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


class Sharing:
    """Has some of the objects that multiprocessing shares."""

    def __init__(self):
        shared = multiprocessing.get_context("spawn")
        self.lock, self.queue, self.value = shared.Lock(), shared.Queue(), shared.Value("i", 0)


@pytest.fixture(scope="module", autouse=True)
def _begun_by_multiprocessing():
    """Begin what multiprocessing begins once per process: its resource tracker, and memory."""
    multiprocessing.get_context("spawn").Value("i")


def test_all_is_as_before_afterwards():
    dataset, table = Sharing(), dict(copyreg.dispatch_table)
    with spawning() as reducers:
        assert len(dump(dataset, reducers=reducers).data) > 0
        assert copyreg.dispatch_table == table
    assert context.get_spawning_popen() is None
    with pytest.raises(UnpicklableError, match="only be shared"):
        dump(dataset)


def test_two_threads():
    """One thread finishes while another one pickles; a third one fails."""
    dataset, pickled = Sharing(), []
    entered, left = threading.Event(), threading.Event()

    def pickles():
        with spawning() as reducers:
            entered.set()
            left.wait()
            pickled.append(dump(dataset, reducers=reducers))

    with spawning():
        thread = threading.Thread(target=pickles, daemon=True)
        thread.start()
        entered.wait()
        with ThreadPoolExecutor(1) as other:
            error = other.submit(dump, dataset).exception()
        assert isinstance(error, UnpicklableError)
    left.set()
    thread.join()
    assert len(pickled) == 1


def test_a_descriptor_that_is_another_one_by_now():
    reading, writing = os.pipe()
    with spawning():
        opened = Workers.DupFd(Workers.duplicate_for_child(writing))
    other = pickle.loads(pickle.dumps(opened)).detach()
    os.write(other, b"by the other one")
    assert os.read(reading, 100) == b"by the other one"
    os.close(other)
    os.close(writing)
    with pytest.raises(OSError, match="No such file"):
        opened.detach()
    with pytest.raises(OSError, match="now refers to another file"):
        Reopened(os.getpid(), reading, os.O_RDONLY, opened.device, opened.inode + 1).detach()
    os.close(reading)


def test_what_workers_cannot_open():
    # The pipe is a pair of sockets.
    one, other = multiprocessing.Pipe()
    with spawning() as reducers, pytest.raises(UnpicklableError, match="socket"):
        dump(one, reducers=reducers)
    for end in (one, other):
        end.close()


BY_DEFAULT = """
import multiprocessing, os, sys
import torch
import cseq

class Looks(torch.utils.data.Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return "inherited" if hasattr(sys, "mark") else "made anew"

if __name__ == "__main__":
    sys.mark = True  # what a forked worker inherits
    for kind in (torch.utils.data.DataLoader, cseq.DataLoader):
        print(*kind(Looks(), batch_size=None, num_workers=1))
    print(multiprocessing.get_start_method())
"""


def test_workers_are_started_as_torch_starts_them(run_prepared):
    """By default, they are forked on Linux; from Python 3.14 on, a fork server starts them."""
    done = run_prepared(BY_DEFAULT)
    theirs, ours, method = done.stdout.splitlines()
    assert (theirs, method) in {("inherited", "fork"), ("made anew", "forkserver")}, done.stderr
    assert ours == theirs


# A data set that records where a copy of it is dropped; a worker imports this, too.
GIVEN = """
import os, sys
import torch
from cseq.adapters.torch import names
if len(sys.argv) > 2:
    names.GIVES_BACK = bool(sys.argv[2])
class Given:
    def __init__(self):
        self.pid = os.getpid()
    def __del__(self):
        if os.getpid() != self.pid:
            with open("dropped", "a") as file:
                file.write("x")
class Samples(Given, torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return index
class Stream(Given, torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(4))
"""

DROPPING = """
import gc, os, sys
import cseq, given
from cseq.runs import await_closings

if __name__ == "__main__":
    for kind in (given.Samples, given.Stream):
        open("dropped", "w").close()
        loader = cseq.DataLoader(kind(), num_workers=1, multiprocessing_context=sys.argv[1])
        assert len(list(loader)) == 4
        gc.collect()
        await_closings(60)
        print(os.path.getsize("dropped"))
"""


@pytest.mark.parametrize("gives", ["gives", ""])
@pytest.mark.parametrize("method", start_methods())
def test_a_worker_gives_its_data_set_back(run_prepared, tmp_path, method, gives):
    """A worker drops it at its end, as in torch from 2.14.1 on; a forked one has its parent's."""
    (tmp_path / "given.py").write_text(GIVEN, encoding="ascii")
    done = run_prepared(DROPPING, method, gives)
    assert done.stdout == f"{int(bool(gives) and method != 'fork')}\n" * 2, done.stderr
