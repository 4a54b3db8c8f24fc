"""What out_type and dtype mean, and what of it a machine can give."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
from converting import FLOAT, same_bits

from cseq.converter.host import Converter
from cseq.converter.output import (
    are_threads,
    cast_dtype,
    for_test,
    parse,
    resolve,
    say_once,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

torch = pytest.importorskip("torch", reason="stage 2 makes torch tensors")


@pytest.fixture(autouse=True)
def _fresh_log() -> Iterator[None]:
    """Make every test the first to which something is said."""
    say_once.cache_clear()
    yield
    say_once.cache_clear()


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torch impossible to import."""
    monkeypatch.setitem(sys.modules, "torch", None)


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take CUDA away."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def two_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend to have two CUDA devices, not used yet."""
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
def test_out_type(out_type: object, kind: str, device: str) -> None:
    """`out_type` is a device by name or by torch.device, 'null', None, or a callable."""
    output = parse(out_type, "float32")
    assert (output.kind, output.device) == (kind, device)
    assert output.use_cuda == (kind == "cuda")
    assert output.function is (out_type if kind == "call" else None)


@pytest.mark.parametrize(
    ("out_type", "error"),
    [
        ("gpu", ValueError),
        ("", ValueError),
        ("CUDA", ValueError),
        ("cuda:", ValueError),
        ("cuda:-1", ValueError),
        ("cuda:1 ", ValueError),
        ("cuda:1\n", ValueError),
        (torch.device("meta"), ValueError),
        (torch.float32, TypeError),
        (1, TypeError),
        (True, TypeError),
        (["cpu"], TypeError),
        (b"cpu", TypeError),
    ],
)
def test_bad_out_type(out_type: object, error: type[Exception]) -> None:
    """An unknown `out_type` is refused: the error has argument, value and remedy."""
    with pytest.raises(error, match=r"(?s)out_type is .*'cuda:1', 'cpu', 'null'") as caught:
        parse(out_type, "float32")
    assert repr(out_type) in str(caught.value)


@pytest.mark.parametrize(
    ("dtype", "cast", "torch_dtype"),
    [
        ("float32", "float32", None),
        (np.dtype(">f8"), "float64", None),
        (np.float16, "float16", None),
        (float, "float64", None),
        (bool, "bool", None),
        ("uint8", "uint8", None),
        ("complex64", "complex64", None),
        (torch.int64, "int64", None),
        (torch.double, "float64", None),
        (torch.bfloat16, None, "bfloat16"),
        ("bfloat16", None, "bfloat16"),
        (None, None, None),
    ],
)
def test_dtype(dtype: object, cast: str | None, torch_dtype: str | None) -> None:
    """`dtype` is a type of numbers in the words of Python, numpy or torch, or None."""
    output = parse("cpu", dtype)
    assert output.dtype == (None if cast is None else np.dtype(cast))
    assert output.torch_dtype == torch_dtype


@pytest.mark.parametrize(
    ("dtype", "error"),
    [
        ("float31", ValueError),
        ("", ValueError),
        ("(1,", ValueError),
        ("O", ValueError),
        (object, ValueError),
        (str, ValueError),
        ("S4", ValueError),
        ("datetime64[s]", ValueError),
        ("f4,f4", ValueError),
        (np.longdouble, ValueError),
        (torch.qint8, ValueError),
        (3, TypeError),
        (True, TypeError),
    ],
)
def test_bad_dtype(dtype: object, error: type[Exception]) -> None:
    """A `dtype` that no tensor of numbers can have is refused: argument, value and remedy."""
    with pytest.raises(error, match=r"dtype is .*'float32'.*None") as caught:
        parse("cpu", dtype)
    assert repr(dtype) in str(caught.value)


def test_arguments_do_not_import_torch() -> None:
    """Checking the arguments imports no torch, nor does making what needs none."""
    script = (
        "import sys; from cseq.converter.host import *; from cseq.converter.output import *;"
        "[parse(o, d) for o in ('cuda:1', 'cpu', None) for d in ('float32', 'bfloat16', None)];"
        "c = Converter(resolve(parse('null', 'float32'))); c.convert([1]);"
        "c = Converter(resolve(parse(len, 'float32'))); c.convert([1]);"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=True)
    assert done.stdout.split() == [b"False"]


def test_compat() -> None:
    """CUDA conversion is in threads, unless processes are asked for."""
    assert are_threads(None)
    assert are_threads(True)
    assert not are_threads(False)


def test_test_modes() -> None:
    """Test mode gives the same, CPU tensors, or what the indexer returned."""
    for out_type in ("cuda:1", "cpu", "null", np.negative):
        output = parse(out_type, "float64")
        assert for_test(output, "default") is output
        assert for_test(output, "cpu") == parse("cpu", "float64")
        assert for_test(output, "numpy").kind == "null"
    with pytest.raises(ValueError, match="test_mode is 'torch': give one of 'default', 'cpu'"):
        for_test(FLOAT, "torch")


def test_what_workers_cast_to() -> None:
    """Workers cast for tensors, and for arrays in the place of tensors; else nothing is cast."""
    assert cast_dtype(parse("cuda", "float16")) == np.float16
    assert cast_dtype(parse("cpu", "float16")) == np.float16
    assert cast_dtype(FLOAT._replace(kind="array")) == np.float32
    assert cast_dtype(parse("null", "float16")) is None
    assert cast_dtype(parse(np.negative, "float16")) is None
    assert cast_dtype(parse("cpu", "bfloat16")) is None
    assert cast_dtype(parse("cpu", None)) is None


@pytest.mark.usefixtures("no_torch")
@pytest.mark.parametrize("out_type", ["cuda", "cuda:7", "cpu", None])
def test_without_torch(out_type: object, caplog: pytest.LogCaptureFixture) -> None:
    """Without torch, what needs it gives arrays of the same values; this is said once."""
    with caplog.at_level(logging.INFO, "cseq"):
        outputs = [resolve(parse(out_type, "float32")) for _ in range(3)]
    assert [record.name for record in caplog.records] == ["cseq"]
    assert "torch is not installed" in caplog.text
    assert not outputs[0].use_cuda
    text = np.array(["a", "b"])
    images, names = Converter(outputs[0]).convert((np.arange(3), text))
    assert same_bits(images, np.array([0, 1, 2], np.float32))
    assert names is text


@pytest.mark.usefixtures("no_torch")
def test_without_torch_none_keeps_arrays() -> None:
    """Without torch, arrays keep their type where tensors would have kept it."""
    array = np.arange(3)
    for dtype in (None, "bfloat16"):
        assert Converter(resolve(parse("cpu", dtype))).convert(array) is array


def test_a_broken_torch_is_no_missing_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A torch that cannot be imported because of something else is an error."""
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('no sympy', name='sympy')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with pytest.raises(ModuleNotFoundError, match="sympy"):
        resolve(FLOAT)


@pytest.mark.usefixtures("no_cuda")
def test_without_cuda(caplog: pytest.LogCaptureFixture) -> None:
    """Without CUDA, 'cuda' gives CPU tensors and use_cuda is False; this is said once."""
    with caplog.at_level(logging.INFO, "cseq"):
        for out_type in ("cuda", "cuda:7", torch.device("cuda", 1)):
            assert resolve(parse(out_type, "float32")) == FLOAT
    assert [record.name for record in caplog.records] == ["cseq"]
    assert "CUDA is not available" in caplog.text


@pytest.mark.usefixtures("two_cards")
def test_cuda_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """'cuda' is the device that is current in the thread that starts; others must exist."""
    assert resolve(parse("cuda", None)).device == "cuda:0"
    assert resolve(parse("cuda:1", None)).device == "cuda:1"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    once = resolve(parse("cuda", None))
    assert once.use_cuda
    assert once.device == "cuda:1"
    assert resolve(once) == once
    with pytest.raises(ValueError, match=r"'cuda:2', but .* 2 in number, .* number below 2"):
        resolve(parse("cuda:2", None))
