"""The meaning of out_type and dtype, and what a machine supports."""

import logging
import subprocess
import sys

import numpy as np
import pytest
from converting import FLOAT

from cseq.converter.output import (
    cast_dtype,
    parse,
    resolve,
    say_once,
)

torch = pytest.importorskip("torch", reason="stage 2 makes torch tensors")


@pytest.fixture(autouse=True)
def _fresh_log():
    """Make every test the first one to log."""
    say_once.cache_clear()
    yield
    say_once.cache_clear()


@pytest.fixture
def no_cuda(monkeypatch):
    """Hide CUDA."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def two_cards(monkeypatch):
    """Pretend to have two CUDA devices that are still unused."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: pytest.fail("initialises CUDA"))


@pytest.mark.parametrize(
    ("out_type", "kind", "device"),
    [
        ("cuda", "cuda", "cuda"),
        ("cuda:1", "cuda", "cuda:1"),
        ("cuda:01", "cuda", "cuda:1"),
        ("cpu", "cpu", "cpu"),
        (None, "cpu", "cpu"),
        ("null", "null", "cpu"),
        (torch.device("cpu"), "cpu", "cpu"),
        (torch.device("cpu", 0), "cpu", "cpu"),
        (torch.device("cuda"), "cuda", "cuda"),
        (torch.device("cuda", 3), "cuda", "cuda:3"),
        (np.negative, "call", "cpu"),
        (torch.FloatTensor, "call", "cpu"),
    ],
)
def test_out_type(out_type, kind, device):
    """`out_type` is a device by name or by torch.device, 'null', None, or a callable."""
    output = parse(out_type, "float32")
    assert (output.kind, output.device) == (kind, device)
    assert output.use_cuda == (kind == "cuda")
    assert output.function is (out_type if kind == "call" else None)


@pytest.mark.parametrize(
    ("dtype", "cast", "torch_dtype"),
    [
        ("float32", "float32", None),
        (np.dtype(">f8"), "float64", None),
        (np.float16, "float16", None),
        (bool, "bool", None),
        (np.ulonglong, "uint64", None),
        ("complex64", "complex64", None),
        (torch.int64, "int64", None),
        (torch.double, "float64", None),
        (torch.bfloat16, None, "bfloat16"),
        ("bfloat16", None, "bfloat16"),
        (None, None, None),
    ],
)
def test_dtype(dtype, cast, torch_dtype):
    """`dtype` is a numeric type by the names of Python, numpy or torch, or None."""
    output = parse("cpu", dtype)
    assert str(getattr(output.dtype, "char", None)) == str(cast and np.dtype(cast).char)
    assert output.torch_dtype == torch_dtype


def test_arguments_do_not_import_torch():
    """Checking the arguments imports no torch; neither does an output without torch."""
    script = (
        "import sys; from cseq.converter.host import *; from cseq.converter.output import *;"
        "[parse(o, d) for o in ('cuda:1', 'cpu', None) for d in ('float32', 'bfloat16', None)];"
        "c = Converter(resolve(parse('null', 'float32'))); c.convert([1]);"
        "c = Converter(resolve(parse(len, 'float32'))); c.convert([1]);"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=True)
    assert done.stdout.split() == [b"False"]


def test_what_workers_cast_to():
    """Workers cast for tensors, and for arrays that replace tensors; nothing else is cast."""
    assert cast_dtype(parse("cuda", "float16")) == np.float16
    assert cast_dtype(parse("cpu", "float16")) == np.float16
    assert cast_dtype(FLOAT._replace(kind="array")) == np.float32
    assert cast_dtype(parse("null", "float16")) is None
    assert cast_dtype(parse(np.negative, "float16")) is None
    assert cast_dtype(parse("cpu", "bfloat16")) is None
    assert cast_dtype(parse("cpu", None)) is None


def test_a_broken_torch_is_no_missing_torch(monkeypatch, tmp_path):
    """If torch exists but its import fails, that is an error."""
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('no sympy', name='sympy')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with pytest.raises(ModuleNotFoundError, match="sympy"):
        resolve(FLOAT)


@pytest.mark.usefixtures("no_cuda")
def test_without_cuda(caplog):
    """Without CUDA, 'cuda' gives CPU tensors and use_cuda is False; the log says so once."""
    with caplog.at_level(logging.INFO, "cseq"):
        for out_type in ("cuda", "cuda:7", torch.device("cuda", 1)):
            assert resolve(parse(out_type, "float32")) == FLOAT
    assert [record.name for record in caplog.records] == ["cseq"]
    assert "CUDA is not available" in caplog.text


@pytest.mark.usefixtures("two_cards")
def test_cuda_devices(monkeypatch):
    """'cuda' is the current device of the thread that starts; other devices must exist."""
    assert resolve(parse("cuda", None)).device == "cuda:0"
    assert resolve(parse("cuda:1", None)).device == "cuda:1"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    once = resolve(parse("cuda", None))
    assert once.use_cuda
    assert once.device == "cuda:1"
    assert resolve(once) == once
    with pytest.raises(ValueError, match=r"'cuda:2' does not .* 2 CUDA devices, .* number below 2"):
        resolve(parse("cuda:2", None))
