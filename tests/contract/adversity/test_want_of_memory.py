"""Batches that are kept until memory runs out: each stays intact, or there is one error."""

import gc
import logging
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from adverse import digest, manager, reference
from conftest import SHM, is_my_file

import cseq

pytestmark = pytest.mark.needs("fork")


@pytest.mark.parametrize("limit", ["0 B", "1 MiB", None])
def test_keeping_every_batch_is_safe(limit, caplog):
    """Batches stay intact in lists, as slices of slices, after finish and without the manager."""
    m = manager(memory_limit=limit, buffer=4)
    with caplog.at_level(logging.WARNING, "cseq"):
        with m.start():
            kept = [{k: v[:][...] for k, v in batch.items()} for _ in range(2) for batch in m]
            copies = m.stats().copies
        del m
        gc.collect()
    assert digest(kept) == reference(2)
    said = sum("memory_limit" in record.getMessage() for record in caplog.records)
    assert (said, copies > 0) == ((0, False) if limit is None else (1, True))


LIFETIMES = """
import pickle, random, sys
import numpy as np
import cseq
from cseq import _memory
try:
    import torch
except ImportError:
    torch = None

class Worker:
    def __getitem__(self, indices):
        return {"a": np.repeat(indices[:, None], 6000, axis=1), "b": np.repeat(indices, 4000)}

def derive(rng, value):
    ways = [
        lambda v: v[1:], lambda v: v[..., ::2], lambda v: v.T, lambda v: v.reshape(-1),
        lambda v: v.view(np.uint64), lambda v: np.asarray(memoryview(v)), np.from_dlpack,
        lambda v: pickle.loads(pickle.dumps(v)), lambda v: v[rng.randrange(len(v)):],
    ]
    if torch is not None:
        ways += [lambda v: torch.from_numpy(v)[1:].numpy(),
                 lambda v: torch.utils.dlpack.from_dlpack(v).numpy()]
    try:
        return rng.choice(ways)(value)
    except (ValueError, TypeError, RuntimeError, BufferError):
        return value  # this way is closed to this layout

rng = random.Random(int(sys.argv[1]))
assert _memory.DEBUG
m = cseq.MPSequence(Worker, 400, batch_size=4, num_workers=2, out_type="null", seed=1, buffer=4)
held = []
with m.start():
    for _ in range(3):
        for batch in m:
            value = batch[rng.choice("ab")]
            for _ in range(rng.randrange(4)):
                if value.size > 8 and len(value) > 1:
                    value = derive(rng, value)
            held.append((value, value.copy()))
            rng.shuffle(held)
            del held[12:]
            for value, copy in held:
                assert np.array_equal(value, copy), "a held view has changed"
for value, copy in held:
    assert np.array_equal(value, copy), "a held view has changed after finish"
print(m.stats().batches)
"""


@pytest.mark.parametrize("seed", ["1", "2", "3"])
def test_views_of_views_never_change(run_prepared, debug_build, seed):
    """Slices, tensors, DLPack exports and pickles keep their data while slots are reused."""
    done = run_prepared(LIFETIMES, seed, PYTHONPATH=str(debug_build))
    assert (done.returncode, done.stdout) == (0, "300\n"), done.stderr


def test_want_of_memory_is_an_exception():
    """A slot that cannot grow raises MemoryError in the loop; no process dies of SIGBUS."""
    with manager(Huge).start() as m, pytest.raises(MemoryError):
        list(m)


class Huge:
    """Requests more than any machine has."""

    def __getitem__(self, indices):
        return cseq.empty((1 << 39,), np.uint8)


FULL_DISK = """
import os, sys, tempfile
import numpy as np

what, size, method = sys.argv[1:4]
if len(sys.argv) == 4:  # a file system of that size, which this process and its children see
    mount = 'mount -t tmpfs -o size="$0" none . 2> mount.log || exit 77; exec "$@"'
    script = [sys.executable, "-X", "faulthandler", os.path.abspath(__file__)]
    os.mkdir("full")
    os.chdir("full")
    os.execvp("unshare", ["unshare", "-Urm", "sh", "-c", mount, size, *script,
                          *sys.argv[1:], "inside"])

os.chdir(os.getcwd())  # into what was mounted here
tempfile.tempdir = os.getcwd()
vars(os).pop("memfd_create", None)  # what is mapped then lies in files there
import cseq

class Wide:
    def __getitem__(self, indices):
        return np.repeat(indices[:, None], 4096, axis=1)

m = cseq.MPSequence(Wide, 160, batch_size=4, out_type="null", num_workers=2, shuffle=False,
                    start_method=method)
got, errors = [], 0
try:
    with m.start():
        iterator = iter(m)
        while errors < 3:
            try:
                batch = next(iterator)
            except MemoryError:
                errors += 1
                got.append(None)
            except StopIteration:
                break
            else:
                assert (batch == batch[:, :1]).all()
                got.append(batch if what == "keep" else int(batch[0, 0]))
                del batch
except MemoryError as error:
    got.append(None)
numbers = [entry if entry is None else int(np.ravel(entry)[0]) for entry in got]
delivered = [number for number in numbers if number is not None]
assert delivered == sorted(set(delivered)) and not any(n % 4 for n in delivered), numbers
print(None in numbers, len(delivered))
"""


@pytest.mark.parametrize(
    ("what", "size", "errors", "method"),
    # With a server, the memory may be missing when workers map it: at the start, or later.
    [
        # The first slot has no room, at the start.
        ("drop", "4k", True, "fork"),
        ("drop", "4k", True, "forkserver"),
        # A worker's second slot has no room.
        ("drop", "200k", True, "fork"),
        # Batches that are kept have no room.
        ("keep", "1m", True, "forkserver"),
        ("keep", "4m", True, "fork"),
        ("drop", "8m", False, "forkserver"),
    ],
)
@pytest.mark.skipif(not shutil.which("unshare"), reason="needs a small file system")
def test_a_full_disk_is_an_exception(run_script, what, size, errors, method):
    """If mapped files lie on a full disk, the loop gets a MemoryError, and no process a SIGBUS."""
    done = run_script(FULL_DISK, what, size, method)
    if done.returncode == 77 or done.stderr.startswith("unshare:"):
        pytest.skip("this machine allows no mount in a namespace")
    assert done.returncode == 0, done.stderr
    raised, delivered = done.stdout.split()
    assert raised == str(errors)
    assert (int(delivered) == 40) == (not errors)


@pytest.mark.needs("Linux")
def test_nothing_lies_in_dev_shm():
    """Shared memory has no name, and the size of /dev/shm does not limit it."""
    names, mapped = set(os.listdir(SHM)), mapped_files()
    with manager().start() as m:
        next(iter(m))
        # Earlier tests may have left some mapped files.
        files = mapped_files() - mapped
        assert not [name for name in set(os.listdir(SHM)) - names if is_my_file(SHM / name)]
    assert any("memfd:cseq" in file for file in files)
    assert not any("/dev/shm" in file for file in files)


def mapped_files():
    """Return the files that this process has mapped, and where."""
    return set(Path("/proc/self/maps").read_text().splitlines())


OWN_SHM = """
import os, sys
if len(sys.argv) == 2:  # this process and its children see another /dev/shm, or another /dev
    small = 'mount -t tmpfs -o size=64k none /dev/shm'
    none = '''mkdir dev && mount -t tmpfs none dev && for name in null zero random urandom; do
               touch dev/$name && mount --bind /dev/$name dev/$name || exit 1; done
               mount --rbind dev /dev'''
    mount = {"small": small, "none": none}[sys.argv[1]]
    script = [sys.executable, os.path.abspath(__file__), sys.argv[1], "inside"]
    os.execvp("unshare", ["unshare", "-Urm", "sh", "-c",
                          f'({mount}) 2> mount.log || exit 77; exec "$@"', "sh", *script])

assert os.path.exists("/dev/shm") == (sys.argv[1] == "small")
import numpy as np
import cseq

class Wide:
    def __getitem__(self, indices):
        return np.repeat(indices[:, None], 4096, axis=1)

with cseq.MPSequence(Wide, 160, batch_size=4, shuffle=False, num_workers=2, out_type="null",
                     memory_limit="1GiB").start() as m:
    kept = list(m)
    print(m.stats().copies)
assert (np.concatenate(kept) == np.arange(160)[:, None]).all()
"""


@pytest.mark.needs("Linux")
@pytest.mark.parametrize("there", ["small", "none"])
@pytest.mark.skipif(not shutil.which("unshare"), reason="needs a /dev/shm of its own")
def test_dev_shm_may_be_small_or_absent(run_script, there):
    """The loop keeps five megabytes of batches without a copy, with any /dev/shm."""
    done = run_script(OWN_SHM, there)
    if done.returncode == 77 or done.stderr.startswith("unshare:"):
        pytest.skip("this machine allows no mount in a namespace")
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")
