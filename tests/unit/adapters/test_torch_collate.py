"""`default_collate` in a worker of `cseq.DataLoader`: into the slot, with torch's results."""

from unittest import mock

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import default_collate, default_convert  # noqa: E402
from torch_data import same  # noqa: E402

from cseq.adapters.torch import collate, names  # noqa: E402
from cseq.indexing import context  # noqa: E402


class Room:
    """Records what was allocated in the slot."""

    def __init__(self):
        self.asked = []

    def empty(self, shape, dtype):
        made = np.empty(shape, dtype)
        self.asked.append(made.nbytes)
        return made


@pytest.fixture
def room():
    """Collate as a worker does."""
    batch_context = context.BatchContext(0, 1, 0)
    batch_context.allocator = room = Room()
    left = context.enter(batch_context)
    with mock.patch.dict(names.collate_map):
        collate.stack_in_slots()
        yield room
    context.enter(left)


BIG = (70, 80)


class Sub(torch.Tensor):
    """A subclass of tensor."""


class Image(torch.Tensor):
    """A subclass whose operations return plain tensors, as with torchvision's images."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result.as_subclass(torch.Tensor) if isinstance(result, cls) else result


STACKED = [
    [torch.ones(BIG), torch.zeros(BIG)],
    [torch.ones(BIG, dtype=torch.bfloat16)] * 3,
    [torch.ones(80, 70).T, torch.ones(BIG)],
    [torch.ones(BIG).as_subclass(Image), torch.zeros(BIG).as_subclass(Image)],
    [torch.ones(BIG), torch.zeros(BIG).as_subclass(Image)],
    [np.ones(BIG), np.zeros(BIG)],
    [np.ones((80, 70), np.float16).T] * 4,
]
SMALL = [
    [torch.ones(3), torch.zeros(3)],
    [torch.tensor(1), torch.tensor(2)],
    [torch.ones(0, 4)],
    [np.ones(3, np.float32), np.zeros(3, np.float32)],
    [np.array(1), np.array(2)],
    [np.ones(3, np.complex64)],
    [np.array([True, False])],
    [np.float32(1), np.float32(2)],
    [1.5, 2.5],
    ["a", "b"],
    [{"a": (1, torch.ones(2))}, {"a": (2, torch.zeros(2))}],
    [torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.int64)],
    [np.ones(3, np.float64), np.ones(3, np.int32)],
    [torch.ones(2).as_subclass(Sub), torch.zeros(2).as_subclass(Sub)],
    [torch.ones(2).as_subclass(Image), torch.zeros(2).as_subclass(Image)],
]
BAD = [
    [torch.ones(2), torch.ones(3)],
    [torch.ones(BIG), torch.ones(3)],
    [np.ones(2), np.ones(3)],
    [np.ones(BIG), np.ones(3)],
    [np.array(["a"]), np.array(["b"])],
    [np.array([object()])],
    [np.array(["2020-01-01"], "datetime64[s]")],
    [torch.ones(2).to_sparse()],
    [None, None],
    [(1, 2), (1,)],
]


def torchs(samples):
    """Collate by torch's own functions, from now on."""
    names.collate_map.update({torch.Tensor: names.tensor_entry, np.ndarray: names.array_entry})
    return default_collate(samples)


@pytest.mark.parametrize("samples", STACKED + SMALL, ids=range(len(STACKED + SMALL)))
def test_large_ones_are_stacked_into_the_slot(room, samples):
    """The batch is torch's; only large tensors and arrays are in the slot."""
    batch = default_collate(samples)
    is_large = any(samples is each for each in STACKED)
    assert room.asked == ([batch.numel() * batch.element_size()] if is_large else [])
    assert same(batch, torchs(samples))


@pytest.mark.parametrize("samples", BAD, ids=range(len(BAD)))
def test_errors_are_torchs(room, samples):
    with pytest.raises((RuntimeError, TypeError)) as ours:
        default_collate(samples)
    with pytest.raises(type(ours.value)) as theirs:
        torchs(samples)
    assert str(ours.value) == str(theirs.value)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("shape", [BIG, (2,)])
def test_special_tensors_in_a_worker(room, shape, monkeypatch):
    """Gradients are an error; quantised ones, which torch would refuse, are stacked."""
    monkeypatch.setattr(names.worker, "_worker_info", None)
    names.set_worker_info(0, 1, 0, None)
    with pytest.raises(RuntimeError, match="automatic differentiation"):
        default_collate([torch.ones(shape, requires_grad=True)] * 2)
    one = torch.quantize_per_tensor(torch.ones(shape), 0.5, 0, torch.qint32)
    assert torch.equal(default_collate([one, one]).dequantize(), torch.ones(2, *shape))


def test_the_users_own_functions_stay(room):
    def own(batch, *, collate_fn_map=None):
        return "own"

    names.collate_map[torch.Tensor] = own
    collate.stack_in_slots()
    assert default_collate([torch.ones(BIG)]) == "own"


LARGE = (512, 1024)

OWN = [
    (torch.stack, [torch.rand(LARGE), torch.rand(LARGE)]),
    (torch.stack, [torch.rand(LARGE).bfloat16()] * 3),
    (torch.stack, [torch.rand(LARGE).as_subclass(Image)] * 2),
    (torch.cat, [torch.rand(LARGE), torch.rand(3, 1024)]),
    (lambda samples: torch.stack(tuple(samples), dim=0), [torch.rand(LARGE)] * 2),
    (lambda samples: {"a": [torch.stack(tensors=samples)]}, [torch.rand(LARGE)] * 2),
]
NOT_OWN = [
    (torch.stack, [torch.rand(3)] * 2),
    (torch.stack, [torch.rand(LARGE), torch.rand(LARGE).double()]),
    (torch.stack, [torch.rand(LARGE).T] * 2),
    (torch.stack, [torch.rand(LARGE).as_subclass(Sub)] * 2),
    (torch.stack, [torch.rand(LARGE, requires_grad=True)] * 2),
    (torch.cat, [torch.rand(LARGE), torch.rand(0)]),
    (torch.hstack, [torch.rand(LARGE)] * 2),
    (lambda samples: torch.stack(samples, 1), [torch.rand(LARGE)] * 2),
    (lambda samples: torch.stack(samples, out=torch.empty(2, *LARGE)), [torch.rand(LARGE)] * 2),
]


@pytest.mark.parametrize(("function", "samples"), OWN)
def test_large_tensors_of_the_users_own_function_are_in_the_slot(room, function, samples):
    """The slot holds the tensors of every batch, from the first on."""
    own, expected = collate.collating(function), function(samples)
    for count in range(1, 4):
        assert same(own(samples), expected)
        assert len(room.asked) == count


@pytest.mark.parametrize(("function", "samples"), NOT_OWN)
def test_other_tensors_of_the_users_own_function(room, function, samples):
    got, expected = collate.collating(function)(samples), function(samples)
    assert same(got.detach(), expected.detach())
    assert (type(got), got.requires_grad) == (type(expected), expected.requires_grad)
    assert not room.asked


def test_errors_of_the_users_own_function(room):
    own = collate.collating(torch.stack)
    for samples in ([], [torch.rand(LARGE), torch.rand(3)], [torch.rand(LARGE), None], None):
        with pytest.raises((RuntimeError, TypeError)) as expected:
            torch.stack(samples)
        with pytest.raises(expected.type) as got:
            own(samples)
        assert str(got.value) == str(expected.value)


def test_what_does_not_get_into_the_batch_is_not_put_into_the_slot(room):
    """It starts after the first batch, and is tried again from time to time."""
    own = collate.collating(lambda samples: torch.stack(samples) + 1)
    samples = [torch.rand(LARGE)] * 2
    for _ in range(collate.EVERY + 1):
        assert same(own(samples), torch.stack(samples) + 1)
    assert len(room.asked) == 2


def test_torchs_own_functions_are_not_watched():
    for function in (default_collate, default_convert):
        assert collate.collating(function) is function


@pytest.mark.usefixtures("room")
@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_nested_tensors_are_refused_as_torch_refuses_them():
    """The error has torch's advice."""
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(RuntimeError, match="custom collate_fn"):
        default_collate([nested, nested])
