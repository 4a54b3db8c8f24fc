"""Stage 2 on a real CUDA device: streams, page-locked memory, and another process's memory.

Every test is a separate script, so that CUDA is never initialised in the tests' process: it keeps
descriptors and mappings that would count as leaks, and cannot be used after a fork.
"""

import textwrap
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="stage 2 makes torch tensors")

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="this needs a CUDA device, and there is none"
)

PRELUDE = """
import os, pickle, subprocess, sys, weakref
import numpy as np
import pytest
import torch
from cseq.converter.cuda import CudaConverter, receive
from cseq.converter.export import Lost
from cseq.converter.host import Converter
from cseq.converter.output import for_test, parse, resolve
from cseq.converter.page_locks import PageLocks

# Some tenths of a second of work for the device, so that what is wrongly not waited for shows.
def delay():
    torch.cuda._sleep(1_000_000_000)

class Source(np.ndarray):
    pass

# What is done for the first time (taking memory, loading a kernel) may wait for the device.
def warm_up(cuda, array):
    (receive(cuda.convert(array)) * 2).clone()
    cuda.reap(wait=True)
    torch.cuda.synchronize()

def page_locked(values):
    return torch.as_tensor(values).pin_memory().numpy()
"""


@pytest.fixture
def check(run_anew):
    """Run a script, which must not fail."""

    def run(source):
        done = run_anew(PRELUDE + textwrap.dedent(source))
        assert done.returncode == 0, done.stdout + done.stderr

    return run


def test_finding_out_does_not_initialise_cuda(check):
    """Looking for CUDA does not initialise it; a missing device is an error."""
    check("""
        assert resolve(parse("cuda", None)).device == "cuda:0"
        assert resolve(parse("cuda:0", None)).use_cuda
        with pytest.raises(ValueError, match="cuda:99"):
            resolve(parse("cuda:99", None))
        assert not torch.cuda.is_initialized()
        torch.cuda.init()
        assert resolve(parse("cuda", None)).device == f"cuda:{torch.cuda.current_device()}"
    """)


def test_values(check):
    """A batch on the device equals the batch on the CPU, bit for bit, in any memory."""
    check("""
        rng = np.random.default_rng(0)
        frozen = rng.random((3, 4), np.float32)
        frozen.flags.writeable = False
        images = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
        batch = {
            "ready": rng.random((64, 3, 32, 32), np.float32),
            "page-locked": page_locked(rng.random((7, 5), np.float32)),
            "cast": rng.random((64, 3)),
            "integers": rng.integers(0, 255, (64, 3), np.uint8),
            "big endian": np.arange(9, dtype=">i4"),
            "read-only": frozen,
            "backwards": rng.random((5, 6))[::-1, ::-2],
            "Fortran": np.asfortranarray(rng.random((3, 4, 5))),
            "Fortran, ready": np.asfortranarray(rng.random((3, 4, 5), np.float32)),
            "transposed": rng.random((2, 3, 4, 5), np.float32).transpose(0, 3, 1, 2),
            "no dimensions": np.array(2.5),
            "empty": np.empty((0, 3)),
            "complex": rng.random(3) * 1j,
            "tensor": torch.arange(12).reshape(3, 4),
            "channels last": images,
            "page-locked tensor": torch.rand(3, 4).pin_memory(),
            "part": torch.rand(6, 6)[::2, 1:],
            "gradient": torch.ones(3, requires_grad=True),
            "kept": [np.array(["a"]), "text", None, 1],
        }
        for dtype in ("float32", "int16", "bfloat16", None):
            output = resolve(parse("cuda", dtype))
            cpu = Converter(for_test(output, "cpu")).convert(batch)
            cuda = CudaConverter(output)
            for got in (receive(cuda.convert(batch)), Converter(output).convert(batch)):
                for name in batch:
                    if name == "kept":
                        assert all(a is b for a, b in zip(got[name], batch[name], strict=True))
                        continue
                    here, there = cpu[name].detach(), got[name].detach()
                    assert there.device == torch.device(output.device), name
                    assert there.dtype == here.dtype, name
                    if here.numel() and name != "part":
                        assert there.stride() == here.stride(), name
                    assert torch.equal(there.cpu(), here), (dtype, name)
            cuda.close()
        sparse = torch.eye(3, dtype=torch.float64).to_sparse()
        cuda = CudaConverter(resolve(parse("cuda", "float32")))
        got = receive(cuda.convert(sparse))
        assert got.is_cuda and got.dtype == torch.float32
        assert torch.equal(got.to_dense().cpu(), torch.eye(3))
    """)


def test_the_consumer_waits_on_the_device(check):
    """The consumer gets a batch that is still being copied, and its stream waits for it."""
    check("""
        output = resolve(parse("cuda", "float32"))
        for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
            cuda = CudaConverter(output)
            lane = cuda._lane
            values = np.arange(1 << 20, dtype=np.float32)
            for array in (values, page_locked(values)):
                warm_up(cuda, array)
                with lane.active():
                    delay()
                transfer = cuda.convert(array)
                batch = receive(transfer)
                assert not transfer.event.query(), "the host waited"
                with torch.cuda.stream(stream):
                    batch = receive(transfer)
                    doubled = batch * 2
                stream.synchronize()
                assert transfer.event.query(), "the stream did not wait for the copy"
                assert torch.equal(doubled.cpu(), torch.from_numpy(values * 2))
            cuda.close()
    """)


def test_memory_is_kept_until_it_was_copied(check):
    """Page-locked memory is copied in place, and kept until then."""
    check("""
        cuda = CudaConverter(resolve(parse("cuda", "float32")))
        lane = cuda._lane
        array = page_locked(np.arange(1000, dtype=np.float32)).view(Source)
        gone = weakref.ref(array)
        warm_up(cuda, array.view(np.ndarray))
        with lane.active():
            delay()
        transfer = cuda.convert([array])
        array[:] = -1  # before the copy begins: it is this memory that is copied
        del array
        cuda.reap()
        assert gone() is not None
        batch = receive(transfer)
        cuda.reap(wait=True)
        assert gone() is None
        assert torch.equal(batch[0].cpu(), torch.full((1000,), -1.0))
    """)


def test_dropped_memory_is_not_written_too_early(check):
    """A dropped batch is not overwritten while the user's kernels still read it."""
    check("""
        cuda = CudaConverter(resolve(parse("cuda", "float32")))
        warm_up(cuda, np.ones(1 << 20, np.float32))
        first = receive(cuda.convert(np.ones(1 << 20, np.float32)))
        delay()
        result = first.clone()
        del first
        cuda.reap(wait=True)
        later = [receive(cuda.convert(np.zeros(1 << 20, np.float32))) for _ in range(4)]
        torch.cuda.synchronize()
        assert bool((result == 1).all())
    """)


def test_page_locking(check):
    """Mapped memory is copied in place while it is registered."""
    check("""
        from cseq._memory import Mapping, commit

        fd = os.memfd_create("test")
        os.ftruncate(fd, 1 << 30)
        commit(fd, 0, 1 << 20)
        memory = Mapping(fd, 0, 1 << 20)
        array = memory.view(64, np.dtype(np.float32), (1000,))
        array[:] = np.arange(1000)
        cuda = CudaConverter(resolve(parse("cuda", "float32")))
        lane = cuda._lane
        fetches = lambda: lane.can_fetch(torch.from_numpy(array))
        assert not fetches()
        locks = PageLocks("cuda:0")
        assert locks.register(memory)
        assert locks.register(memory)
        assert fetches()
        got = receive(cuda.convert(array))
        assert torch.equal(got.cpu(), torch.arange(1000.0))

        # What cannot be page-locked (this is, already) is staged, and leaves no error behind.
        again = PageLocks("cuda:0")
        assert not again.register(memory)
        assert float(torch.ones(3, device="cuda").sum()) == 3
        torch.cuda.synchronize()

        cuda.close()
        locks.close()
        assert not fetches()
        got = receive(cuda.convert(array))
        assert torch.equal(got.cpu(), torch.arange(1000.0))
        os.close(fd)
    """)


PRODUCER = """
cuda = CudaConverter(resolve(parse("cuda", "float32")))
for line in sys.stdin:
    if line == "end\\n":
        break
    value = int(line)
    packed = cuda.export({"x": np.full((300, 400), value), "y": [np.arange(value), "text"]})
    pickle.dump(packed, sys.stdout.buffer)
    sys.stdout.buffer.flush()
    del packed
cuda.close()
pickle.dump(torch.cuda.memory_allocated(), sys.stdout.buffer)
"""

CONSUMER = f"""
sys.path.append({str(Path(__file__).parents[1] / "helpers")!r})
from exports import Receiver

code = {PRELUDE + PRODUCER!r}
pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
producer = subprocess.Popen([sys.executable, "-c", code], **pipes)

def ask(value):
    producer.stdin.write(f"{{value}}\\n".encode())
    producer.stdin.flush()
    return pickle.load(producer.stdout)

def check(batch, value):
    assert batch["x"].device == torch.device("cuda:0")
    assert torch.equal(batch["x"].cpu(), torch.full((300, 400), float(value)))
    assert torch.equal(batch["y"][0].cpu(), torch.arange(float(value)))
    assert batch["y"][1] == "text"

def counts():
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{{producer.pid}}_")]

receiver = Receiver(resolve(parse("cuda", "float32")))
"""


@pytest.fixture
def between(check):
    """Run a consumer with a producer in another process."""
    return lambda source: check(CONSUMER + textwrap.dedent(source))


def test_from_another_process(between):
    """Tensors come from a converter's process, which gets all of its memory back."""
    between("""
        batches = []
        for value in range(20):
            batches.append(receiver.unpack(ask(value)))
            delay()
        for value, batch in enumerate(batches):
            check(batch, value)
        receiver.close()
        assert ask("end") == 0
        assert producer.wait() == 0
        assert not counts()
        for value, batch in enumerate(batches):
            check(batch, value)
    """)


def test_a_converter_dies_while_its_batch_is_copied(between):
    """A batch that was opened before its converter died, and is copied later, is intact.

    CUDA does not promise this; its driver keeps memory that another process has mapped. A batch
    that was not opened is lost.
    """
    between("""
        first, lost = ask(7), ask(8)
        with receiver._lane.active():
            delay()
        batch = receiver.unpack(first)
        producer.kill()
        producer.wait()
        check(batch, 7)
        with pytest.raises(Lost):
            receiver.unpack(lost)
        receiver.close()
        for name in counts():  # which killed processes leave
            os.unlink(f"/dev/shm/{name}")
    """)


def test_a_cancelled_batch_is_let_go(between):
    """A batch that the loop will not see returns its memory to the converter's process."""
    between("""
        for value in range(5):
            receiver.drop(ask(value))
        assert ask("end") == 0
        assert producer.wait() == 0
        assert not counts()
    """)
