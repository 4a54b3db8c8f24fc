"""Small sequences of RETURNN's as one array: they come back as they were."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

pytest.importorskip("returnn", reason="the package cseq.adapters.returnn needs it")

from cseq._memory import SMALL
from cseq.adapters.returnn.packing import pack, unpack

DTYPES = st.one_of(npst.integer_dtypes(), npst.floating_dtypes(), npst.boolean_dtypes())
ARRAYS = npst.arrays(DTYPES, npst.array_shapes(min_dims=0, min_side=0, max_side=4))


@given(
    st.text(st.characters(exclude_categories=())),
    st.none() | st.floats(0, 1),
    st.dictionaries(st.text(), ARRAYS, max_size=4),
)
def test_a_small_sequence_comes_back(
    tag: str, fraction: float | None, data: dict[str, Any]
) -> None:
    """Tag, fraction and data are as before, in the same order; the arrays can be written to."""
    packed = pack(tag, fraction, data)
    assert isinstance(packed, bytearray)
    same_tag, same_fraction, same = unpack(packed)
    assert (same_tag, same_fraction, list(same)) == (tag, fraction, list(data))
    for key, array in data.items():
        assert (same[key].dtype, same[key].shape) == (array.dtype, array.shape)
        assert same[key].tobytes() == array.tobytes()
        assert same[key].flags.writeable
        assert same[key].ctypes.data % same[key].itemsize == 0


@pytest.mark.parametrize(
    "array", [np.zeros(SMALL + 1, np.uint8), np.array(["text"]), np.array([None]), "no array"]
)
def test_other_sequences_are_left(array: Any) -> None:
    """A large sequence, and one of something else than numbers, is left as it is."""
    data = {"data": array}
    item = pack("tag", 0.5, data)
    assert item[2] is data
    assert unpack(item) == ("tag", 0.5, data)


def test_the_largest_small_sequence() -> None:
    """`SMALL` bytes of data are packed."""
    assert isinstance(pack("tag", None, {"data": np.zeros(SMALL, np.uint8)}), bytearray)
