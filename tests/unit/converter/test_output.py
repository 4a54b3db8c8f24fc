"""The meaning of out_type and dtype, and what a machine supports."""

import logging
import sys

import numpy as np
import pytest
from converting import FLOAT

from cseq.converter.output import cast_dtype, parse, resolve, say_once

torch = pytest.importorskip("torch", reason="stage 2 makes torch tensors")


@pytest.mark.parametrize(
    ("out_type", "kind", "device"),
    [
        ("cuda", "cuda", "cuda"), ("cuda:1", "cuda", "cuda:1"), ("cuda:01", "cuda", "cuda:1"),
        ("cpu", "cpu", "cpu"), (None, "cpu", "cpu"), ("null", "null", "cpu"),
        (torch.device("cpu"), "cpu", "cpu"), (torch.device("cpu", 0), "cpu", "cpu"),
        (torch.device("cuda"), "cuda", "cuda"), (torch.device("cuda", 3), "cuda", "cuda:3"),
        (np.negative, "call", "cpu"), (torch.FloatTensor, "call", "cpu"),
    ],
)  # fmt: skip
def test_out_type(out_type, kind, device):
    """`out_type` is a device by name or by torch.device, 'null', None, or a callable."""
    output = parse(out_type, "float32")
    assert (output.kind, output.device) == (kind, device)
    assert output.use_cuda == (kind == "cuda")
    assert output.function is (out_type if kind == "call" else None)


@pytest.mark.parametrize(
    ("dtype", "cast", "torch_dtype"),
    [
        ("float32", "float32", None), (np.dtype(">f8"), "float64", None), (bool, "bool", None),
        (np.float16, "float16", None), (np.ulonglong, "uint64", None), (None, None, None),
        ("complex64", "complex64", None), (torch.int64, "int64", None),
        (torch.double, "float64", None), (torch.bfloat16, None, "bfloat16"),
        ("bfloat16", None, "bfloat16"),
    ],
)  # fmt: skip
def test_dtype(dtype, cast, torch_dtype):
    """`dtype` is a numeric type by the names of Python, numpy or torch, or None."""
    output = parse("cpu", dtype)
    assert str(getattr(output.dtype, "char", None)) == str(cast and np.dtype(cast).char)
    assert output.torch_dtype == torch_dtype


ARGUMENTS = """
import sys
from cseq.converter.host import *
from cseq.converter.output import *
[parse(o, d) for o in ('cuda:1', 'cpu', None) for d in ('float32', 'bfloat16', None)]
for out_type in ('null', len):
    Converter(resolve(parse(out_type, 'float32'))).convert([1])
print('torch' in sys.modules)
"""


def test_arguments_do_not_import_torch(run_anew):
    """Checking the arguments imports no torch; neither does an output without torch."""
    done = run_anew(ARGUMENTS)
    assert done.stdout == "False\n", done.stderr


def test_what_workers_cast_to():
    """Workers cast for tensors, and for arrays that replace tensors; nothing else is cast."""
    assert cast_dtype(parse("cuda", "float16")) == np.float16
    assert cast_dtype(parse("cpu", "float16")) == np.float16
    assert cast_dtype(FLOAT._replace(kind="array")) == np.float32
    others = [("null", "float16"), (np.negative, "float16"), ("cpu", "bfloat16"), ("cpu", None)]
    assert [cast_dtype(parse(*given)) for given in others] == [None] * 4


def test_a_broken_torch_is_no_missing_torch(monkeypatch, tmp_path):
    """If torch exists but its import fails, that is an error."""
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('no sympy', name='sympy')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with pytest.raises(ModuleNotFoundError, match="sympy"):
        resolve(FLOAT)


def test_without_cuda(caplog, monkeypatch):
    """Without CUDA, 'cuda' gives CPU tensors and use_cuda is False; the log says so once."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    say_once.cache_clear()
    with caplog.at_level(logging.INFO, "cseq"):
        for out_type in ("cuda", "cuda:7", torch.device("cuda", 1)):
            assert resolve(parse(out_type, "float32")) == FLOAT
    assert [record.name for record in caplog.records] == ["cseq"]
    assert "CUDA is not available" in caplog.text


def test_cuda_devices(monkeypatch):
    """'cuda' is the current device of the thread that starts; other devices must exist."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: pytest.fail("initialises CUDA"))
    assert resolve(parse("cuda", None)).device == "cuda:0"
    assert resolve(parse("cuda:1", None)).device == "cuda:1"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    once = resolve(parse("cuda", None))
    assert (once.use_cuda, once.device) == (True, "cuda:1")
    assert resolve(once) == once
    with pytest.raises(ValueError, match=r"'cuda:2' does not .* 2 CUDA devices, .* number below 2"):
        resolve(parse("cuda:2", None))
