"""The number of threads that libraries compute with in a worker process."""

import importlib.util
import os
import sys
from types import SimpleNamespace

import pytest

from cseq import system
from cseq.processes.launcher import start_methods


class Cuda:
    """Stands for `torch.cuda`: it may be in use, record a graph, or have work to do."""

    def __init__(self, used, records, busy):
        self.is_initialized, self.is_current_stream_capturing = lambda: used, lambda: records
        self.current_stream = lambda: SimpleNamespace(query=lambda: not busy)


@pytest.mark.parametrize(
    ("torch", "found"),
    [
        (None, None), (SimpleNamespace(), None), (SimpleNamespace(cuda=SimpleNamespace()), None),
        (SimpleNamespace(cuda=Cuda(False, False, False)), None),
        (SimpleNamespace(cuda=Cuda(True, True, True)), None),
        (SimpleNamespace(cuda=Cuda(True, False, True)), False),
        (SimpleNamespace(cuda=Cuda(True, False, False)), True),
    ],
)  # fmt: skip
def test_the_gpu_is_asked_if_cuda_is_in_use(monkeypatch, torch, found):
    """It is not asked before it is initialised, or while it records a graph."""
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert system.gpu_is_idle() is found


def test_one_thread_unless_the_user_says_otherwise():
    """The environment takes precedence; OMP_NUM_THREADS also stands for those who read it."""
    assert system.thread_variables(None, {}) == {}
    assert system.thread_variables(3, {}) == dict.fromkeys(system.VARIABLES, "3")
    partly = system.thread_variables(1, {"MKL_NUM_THREADS": "4"})
    assert "MKL_NUM_THREADS" not in partly
    assert partly["OMP_NUM_THREADS"] == "1"
    others = system.thread_variables(1, {"OMP_NUM_THREADS": "4"})
    assert set(others) == {"VECLIB_MAXIMUM_THREADS", "OPENCV_FOR_THREADS_NUM"}


# A script asks each worker once.
ASKING = """
import os, sys
import numpy as np
import cseq
def answer(method, threads):
    options = {"out_type": "null", "start_method": method, "threads": threads}
    with cseq.MPSequence(Threads, 1, 1, seed_globals=False, **options).start() as batches:
        return list(batches)[0]
"""
JOB = f"""{ASKING}
class Threads:
    def __getitem__(self, indices):
        return {{name: os.environ.get(name) for name in os.environ if "THREADS" in name}}

method = sys.argv[1]
for threads in (1, 3, None):
    got = answer(method, threads)
    print(method, threads, got.get("OMP_NUM_THREADS"), got.get("OPENBLAS_NUM_THREADS"))
print(os.environ.get("OPENBLAS_NUM_THREADS"))
"""


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    """Remove the variables of the tests' environment."""
    for name in system.VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("method", start_methods())
def test_the_environment_of_workers(run_script, method):
    """Workers have the variables, for every start method; the trainer does not."""
    done = run_script(JOB, method)
    expected = f"{method} 1 1 1\n{method} 3 3 3\n{method} None None None\nNone\n"
    assert done.stdout == expected, done.stderr
    done = run_script(JOB, method, OMP_NUM_THREADS="2", OPENBLAS_NUM_THREADS="4")
    assert done.stdout.startswith(f"{method} 1 2 4\n{method} 3 2 4\n"), done.stderr


BLAS = f"""{ASKING}
np.ones((300, 300)) @ np.ones((300, 300))  # its threads are there

class Threads:
    def __init__(self):
        for _ in range(3):
            np.ones((300, 300)) @ np.ones((300, 300))

    def __getitem__(self, indices):
        return len(os.listdir("/proc/self/task"))

one, four = (answer(sys.argv[1], threads) for threads in (1, 4))
print(four - one)
"""


@pytest.mark.needs("Linux")
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="libraries have one thread here")
@pytest.mark.parametrize("method", start_methods())
def test_openblas(run_anew, method):
    """Matrices are multiplied in the given number of threads, OpenBLAS's and a fork's."""
    import numpy as np

    config = np.show_config(mode="dicts")
    if "openblas" not in config["Build Dependencies"]["blas"]["name"]:
        pytest.skip("this numpy has no OpenBLAS")
    done = run_anew(BLAS, method)
    more = int(done.stdout)
    # OpenBLAS makes no more threads than there are cores.
    assert 1 <= more <= 3, done.stderr


TORCH = f"""{ASKING}
import torch
torch.set_num_threads(2)
x = torch.rand(4, 3, 256, 256)
torch.nn.functional.interpolate(x, size=64, mode="bilinear")  # OpenMP's threads are there
class Threads:
    def __getitem__(self, indices):
        torch.nn.functional.interpolate(x, size=64, mode="bilinear")
        return torch.get_num_threads()
for method in sys.argv[1:]:
    # A start that is not a fork imports torch anew; what it is told comes the same way for all.
    for threads in {{"fork": (1, 2), "forkserver": (2,), "spawn": (1,)}}[method]:
        print(method, answer(method, threads))
"""


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="without torch")
def test_torch(run_prepared):
    """It computes in that number of threads, for every start method."""
    done = run_prepared(TORCH, *start_methods())
    expected = {"fork": "fork 1\nfork 2\n", "forkserver": "forkserver 2\n", "spawn": "spawn 1\n"}
    assert done.stdout == "".join(map(expected.get, start_methods())), done.stderr


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="without torch")
@pytest.mark.needs("fork")
def test_a_number_of_the_users_own(run_prepared):
    """A fork leaves torch the number from the environment."""
    done = run_prepared(TORCH, "fork", MKL_NUM_THREADS="2")
    assert done.stdout == "fork 2\nfork 2\n", done.stderr
