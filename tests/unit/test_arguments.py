"""Values that `MSequence` derives from its arguments."""

import pytest

from cseq import arguments
from cseq.order.shuffled import Shuffled


def test_the_number_of_converters():
    """By default, a quarter of the workers, at most four; none without workers."""
    numbers = (0, 1, 3, 5, 16, 20)
    assert [arguments.converters_of(n, None, "proc") for n in numbers] == [0, 1, 1, 1, 1, 1]
    assert [arguments.converters_of(n, None, "thread") for n in numbers] == [0, 1, 3, 4, 4, 5]
    assert arguments.converters_of(0, 3, "proc") == 0
    assert arguments.converters_of(3, 3, "proc") == 3
    with pytest.raises(ValueError, match="num_converters=4 exceeds num_workers=3"):
        arguments.converters_of(3, 4, "thread")


def test_the_number_of_samples_of_a_worker():
    """It is an object's length, if any; a class has none, but the order may know."""
    assert arguments.samples_of(range(7), Shuffled(9)) == 7
    assert arguments.samples_of(dict, Shuffled(9)) == 9
    with pytest.raises(TypeError, match="dset_size is missing"):
        arguments.samples_of(dict, Shuffled())
