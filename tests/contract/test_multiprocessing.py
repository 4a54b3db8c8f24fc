"""multiprocessing and process pools in workers: each treats a worker as a process of its own."""

import pytest
from kinds import start_methods

pytestmark = pytest.mark.needs("Linux")

HEAD = """
import multiprocessing
import os
import sys
import numpy as np
import cseq

def start(worker, samples, shuffle=False):
    options = {"batch_size": 4, "out_type": "null", "start_method": sys.argv[1]}
    return cseq.MPSequence(worker, samples, 2, shuffle=shuffle, **options).start()

"""

SHARING = """
class Sharing:
    def __init__(self, method):
        shared = multiprocessing.get_context(method)
        self.value, self.lock, self.queue = shared.Value("i"), shared.Lock(), shared.Queue()
    def __getitem__(self, indices):
        with self.lock:
            self.value.value += len(indices)
        me, parent = multiprocessing.current_process(), multiprocessing.parent_process()
        self.queue.put((me.name, parent.pid, len(indices)))
        return indices

if __name__ == "__main__":
    sharing = Sharing("fork" if sys.argv[1] == "fork" else "spawn")
    sharing.queue.put("used")  # its thread runs in this process, and in no other
    assert sharing.queue.get() == "used"
    with start(sharing, 40) as batches:
        assert np.concatenate(list(batches)).tolist() == list(range(40))
    got = [sharing.queue.get(timeout=60) for _ in range(10)]
    assert {name for name, _, _ in got} <= {"cseq-w0", "cseq-w1"}, got
    assert {(parent, count) for _, parent, count in got} == {(os.getpid(), 4)}, got
    print(sharing.value.value)
"""

TENSORS = """
import torch

class Shared:
    def __init__(self):
        self.epoch = torch.zeros(1, dtype=torch.int64).share_memory_()
        self.made = torch.zeros(8).share_memory_()
        self.twins = self.made[2:], self.made.view(2, 4)
        self.own = torch.zeros(1)
    def __getitem__(self, indices):
        self.made[indices] = torch.from_numpy(indices + 1).float()
        self.own += 1
        same = len({one.untyped_storage().data_ptr() for one in (self.made, *self.twins)}) == 1
        return np.array([self.epoch.item(), same])

if __name__ == "__main__":
    shared, seen = Shared(), []
    with start(shared, 8) as batches:
        for epoch in range(3):
            shared.epoch.fill_(epoch)
            seen += [batch.tolist() for batch in batches]
    print(seen == [[e, 1] for e in range(3) for _ in range(2)], shared.made.tolist(), shared.own)
"""

POOLED = """
class Executor:
    def __init__(self):
        from concurrent.futures import ProcessPoolExecutor
        self.pool = ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork"))
    def __getitem__(self, indices):
        return [self.pool.submit(os.getpid).result() for _ in indices]

class Joblib:
    def __getitem__(self, indices):
        from joblib import Parallel, delayed
        return Parallel(2)(delayed(os.getpid)() for _ in indices)

if __name__ == "__main__":
    if sys.argv[3:]:  # its processes, and the threads that serve them, are this process's
        Joblib()[range(4)]
    with start({"executor": Executor, "joblib": Joblib}[sys.argv[2]], 24, shuffle=True) as batches:
        pids = {pid for batch in batches for pid in batch}
    left = [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    print(os.getpid() in pids, 1 <= len(pids) <= 4, left)
"""

MEASURED = """
import signal
import sys
import coverage
import numpy as np

if __name__ == "__main__":
    measuring = coverage.Coverage()
    measuring.start()
    import cseq, lines
    from cseq import testing
    m = cseq.MPSequence(
        lines.Indexer, 8, 1, out_type="null", start_method=sys.argv[1], shuffle=False
    )
    with m.start() as batches:
        testing.await_workers(batches)
        testing.kill(batches, 0, signal.SIGTERM)
        assert np.concatenate(list(batches)).tolist() == list(range(8))
        print(batches.stats().restarts)
    measuring.stop()
    measuring.save()
    measuring.combine()
    _, statements, missing, _ = measuring.analysis("lines.py")
    print(statements, missing)
"""

LINES = """class Indexer:
    def __getitem__(self, indices):
        made = indices
        return made
"""


@pytest.mark.parametrize("method", start_methods())
def test_coverage_measures_workers(run_anew, tmp_path, method):
    """`coverage` measures them like multiprocessing's processes; the trainer keeps its signals."""
    # The folder of that name beside this one lacks this module.
    pytest.importorskip("coverage.exceptions")
    (tmp_path / "lines.py").write_text(LINES)
    settings = "concurrency = multiprocessing\nparallel = true\nsigterm = true\ninclude = lines.py"
    (tmp_path / ".coveragerc").write_text(f"[run]\n{settings}\n")
    done = run_anew(MEASURED, method)
    assert (done.stdout, done.stderr) == ("0\n[1, 2, 3, 4] []\n", "")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", start_methods())
def test_tensors_in_shared_memory(run_prepared, method):
    """All processes see the same memory; other tensors are each worker's own."""
    pytest.importorskip("torch")
    done = run_prepared(HEAD + TENSORS, method)
    assert done.stdout == f"True {[float(k) for k in range(1, 9)]} tensor([0.])\n", done.stderr


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", start_methods())
def test_what_multiprocessing_shares(run_script, method):
    """Values, locks and queues reach the workers; a used queue delivers the workers' items."""
    done = run_script(HEAD + SHARING, method)
    assert done.stdout == "40\n", done.stderr


@pytest.mark.parametrize("pool", [["executor"], ["joblib"], ["joblib", "before"]], ids=" ".join)
@pytest.mark.parametrize("method", start_methods())
def test_a_process_pool_ends_with_its_worker(run_script, tmp_path, method, pool):
    """No worker has to be killed for that, and the pool leaves no process.

    It holds even if the trainer has processes of joblib, whose pool a forked worker inherits.
    """
    if "joblib" in pool:
        pytest.importorskip("joblib")
    done = run_script(HEAD + POOLED, method, *pool, JOBLIB_TEMP_FOLDER=str(tmp_path))
    assert (done.stdout, done.stderr) == ("False True []\n", "")
