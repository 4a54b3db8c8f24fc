"""Managers on a real CUDA device: conversion in threads and in processes.

Every test is a separate script, so that CUDA is never initialised in the tests' process.
"""

import textwrap

import pytest

torch = pytest.importorskip("torch", reason="stage 2 makes torch tensors")

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="this needs a CUDA device, and there is none"
)

# The manager, and the place of its conversion.
POOLS = {
    "threads": ("MTSequence", None),
    "processes, converted in threads": ("MPSequence", True),
    "processes": ("MPSequence", False),
}

PRELUDE = """
import gc, os
import numpy as np
import torch
import cseq
from cseq import testing

class Rows:
    def __getitem__(self, indices):
        rng = cseq.rng()
        image = cseq.empty((len(indices), 3, 40, 40), np.uint8)
        image[...] = (indices % 251)[:, None, None, None]
        noise = rng.random((len(indices), 50))
        return {"image": image, "noise": [noise, torch.from_numpy(noise)], "index": indices,
                "name": [str(index) for index in indices]}

def make(size=500, **options):
    options = {"batch_size": 16, "num_workers": 2, "out_type": "cuda", "seed": 3} | options
    return getattr(cseq, KIND)(Rows, size, **options)

def same(one, other):
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())
    return one == other

def on_device(batch):
    tensors = [batch["image"], *batch["noise"], batch["index"]]
    return all(tensor.device == torch.device("cuda:0") for tensor in tensors)
"""


@pytest.fixture(params=POOLS)
def check(request, run_anew):
    """Run a script for one kind of pool; it must not fail."""
    kind, compat = POOLS[request.param]

    def run(source):
        head = f"KIND, COMPAT = {kind!r}, {compat!r}\n{PRELUDE}"
        done = run_anew(head + textwrap.dedent(source))
        assert done.returncode == 0, done.stdout + done.stderr

    return run


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", None])
def test_as_in_test_mode(check, dtype):
    """Batches on the device equal test mode's, on the device and on the CPU, in order."""
    check(f"""
        manager = make(dtype={dtype!r})
        assert manager.use_cuda
        with manager.start(COMPAT) as running:
            got = [batch for _ in range(3) for batch in running]
        assert len(got) == 3 * len(manager)
        assert all(map(on_device, got))
        for mode in ("default", "cpu"):
            manager = make(dtype={dtype!r})
            with manager.start_test(mode) as running:
                expected = [batch for _ in range(3) for batch in running]
            assert same(got, expected), mode
            assert all(on_device(batch) == (mode == "default") for batch in expected)
    """)


def test_while_the_device_is_busy(check):
    """Batches are right even if the consumer's stream is far behind, and drops them early."""
    check("""
        stream = torch.cuda.Stream()
        sums = []
        with make().start(COMPAT) as running, torch.cuda.stream(stream):
            for batch in running:
                torch.cuda._sleep(20_000_000)
                sums.append(batch["image"].sum() + batch["noise"][0].sum())
                del batch
        stream.synchronize()
        with make().start_test() as running:
            expected = [batch["image"].sum() + batch["noise"][0].sum() for batch in running]
        assert same(sums, expected)
    """)


@pytest.mark.parametrize(("cycles", "is_fed"), [(200_000_000, True), (1000, False)])
def test_whether_the_gpu_runs_dry(check, cycles, is_fed):
    """A loop that waits for batches while its GPU still computes does not lack workers."""
    check(f"""
        import time

        if COMPAT is False and {is_fed}:
            raise SystemExit  # the loop waits in CUDA, which opens the memory of a process

        class Slow(Rows):
            def __getitem__(self, indices):
                time.sleep(0.02)
                return super().__getitem__(indices)

        Rows = Slow
        with make(batch_size=8, num_workers=1).start(COMPAT) as running:
            for batch in running:
                torch.cuda._sleep({cycles})
            stats = running.stats()
        assert stats.gpu_waits >= 20, stats
        advice = stats.advice()
        assert ("the GPU has enough work" in advice.sentence) == {is_fed}, advice
        assert "the GPU had run dry" in advice.sentence
        assert (stats.gpu_dry < 0.1 * stats.gpu_waits) == {is_fed}, stats
    """)


def test_leaving_early(check):
    """Leaving a loop does not harm the next epoch, and the device's memory does not grow."""
    check("""
        manager = make()
        with manager.start(COMPAT) as running:
            used = []
            for epoch in range(20):
                for number, batch in enumerate(running):
                    if number == epoch % 5:
                        break
                del batch
                gc.collect()
                used.append(torch.cuda.memory_allocated())
            last = list(running)
        assert max(used[10:]) <= max(used[:10]) + (1 << 22), used
        manager = make()
        manager.set_epoch(20)
        with manager.start_test() as running:
            assert same(last, list(running))
    """)


def test_all_memory_comes_back(check):
    """When the manager has finished and the batches are dropped, no memory is in use."""
    check("""
        manager = make()
        with manager.start(COMPAT) as running:
            kept = list(running)
        assert on_device(kept[-1])
        del kept, running, manager
        gc.collect()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == 0
        names = [name for name in os.listdir("/dev/shm") if name.startswith("torch_")]
        names = [name for name in names if not os.path.exists(f"/proc/{name.split('_')[1]}")]
        assert not names, names  # others are of converters of tests beside this one
    """)


def test_a_killed_converter_loses_nothing(check):
    """Converters are killed while their batches wait; the stream still equals test mode's."""
    check("""
        import signal

        if COMPAT is not False:
            raise SystemExit  # there is no process to be killed
        manager = make(num_converters=1, buffer=10)
        with manager.start(COMPAT) as running:
            got = []
            for number, batch in enumerate(running):
                got.append(batch)
                if number in (3, 12):
                    while running.stats().depths[2] < 5:  # finished, and not yet taken
                        pass
                    testing.kill(running, 2)
                    while running.stats().restarts < 1 + (number > 3):
                        pass
            stats = running.stats()
            assert stats.restarts == 2, stats
            assert stats.retries >= 10, stats
        manager.set_epoch(0)
        with manager.start_test() as running:
            assert same(got, list(running))
        del batch, running
        for name in os.listdir("/dev/shm"):  # which killed processes leave
            if name.startswith("torch_"):
                os.unlink(f"/dev/shm/{name}")
    """)


LOADER = """
import torch
import cseq

class Rows:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((50_000,), float(index)), index

torch.cuda.set_device(0)
options = {"batch_size": 8, "num_workers": 3, "pin_memory": True}
for method in ("thread", "multiprocessing"):
    loader = cseq.DataLoader(Rows(), worker_method=method, **options)
    for _ in range(2):
        seen = []
        for rows, indices in loader:
            assert rows.is_pinned() and indices.is_pinned()
            sent = rows.to("cuda", non_blocking=True)
            del rows
            seen.append((sent, indices.tolist()))
        assert [index for _, indices in seen for index in indices] == list(range(64))
        for sent, indices in seen:
            assert sent.mean(1).tolist() == [float(index) for index in indices]
"""


def test_threads_of_a_loader_pin_their_batches(run_anew):
    """Threads make batches in page-locked memory, as processes do."""
    done = run_anew(LOADER)
    assert done.returncode == 0, done.stdout + done.stderr
