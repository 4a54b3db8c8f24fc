"""Arguments that orders refuse: the message names the argument, its value and the remedy."""

import math
import re

import numpy as np
import pytest
from ranked import Rows

import cseq

HUGE, TOKENS = 2**70, r"2\.815e\+14 tokens, which is not below 281474976710656"
LONG = np.array([2**63], np.uint64)
SPLIT = {"too_long": "split"}
TWO = {"a": cseq.Shuffled(5), "b": cseq.Shuffled(5)}
SIZELESS = {"a": cseq.Shuffled()}
BATCHES = Rows(9, is_batch=True)
ROWS = r"sources\['b'\] are rows of samples, but the units of sources\['a'\] are samples; pass"
NO_TOKENS = r"mean number of tokens .* sources\['a'\]=.* does not provide it; pass"
RARE = "'all', source 'b' makes an epoch longer"
USUAL = {
    cseq.Balanced: {"order": cseq.Packed([1], 4), "step": 6},
    cseq.Blocks: {"rows": 4, "window": 8},
    cseq.Buckets: {"lengths": [3, 7, 8], "budget": 100},
    cseq.Buckets.of: {"labels": [0, 1], "sizes": 3},
    cseq.Concatenated: {"lengths": [3, 4], "row": 2},
    cseq.Groups: {"labels": list("aabaab"), "classes": 2, "samples": 2},
    cseq.Mixture: {"sources": TWO, "weights": {"a": 1, "b": 1}},
    cseq.Packed: {"lengths": [3, 7, 8], "budget": 100},
    cseq.Resized: {"order": cseq.Shuffled(5), "epoch_size": 4},
    cseq.Weighted: {"weights": [1]},
    cseq.Weighted.balanced: {"labels": [1]},
}
ARRAYS = [
    *((make, "lengths") for make in (cseq.Buckets, cseq.Concatenated, cseq.Packed)),
    *((make, "labels") for make in (cseq.Buckets.of, cseq.Groups, cseq.Weighted.balanced)),
    (cseq.Weighted, "weights"),
    (cseq.Blocks, "rows"),
]


@pytest.mark.parametrize(("make", "name"), ARRAYS)
def test_what_is_no_array(make, name):
    """An array argument has one dimension, and values of a suitable type."""
    options = {"too_long": "split"} if make is cseq.Packed else {}
    for given, said in (
        ([], "is empty; pass at least one value"),
        ([[3, 4]], r"has shape \(1, 2\); pass a list with one value"),
        ([[3], [4, 5]], "is not an array"),
        ([None], "has values of type object, such as None; pass"),
    ):
        if make is cseq.Blocks and given == [[3], [4, 5]]:
            continue
        for more in ({}, options):
            with pytest.raises((TypeError, ValueError), match=f"{name} {said}"):
                make(**{**USUAL[make], name: given, **more})


@pytest.mark.parametrize("kind", [cseq.Buckets, cseq.Packed])
@pytest.mark.parametrize(
    ("lengths", "error", "said"),
    [
        (5, ValueError, r"lengths has shape \(\); pass"),
        ([3, -4, 5], ValueError, r"lengths\[1\]=-4 is below 1; leave this sample out"),
        ([3] * 70_000 + [0], ValueError, r"lengths\[70000\]=0 is below 1"),
        ([3.0, math.nan], TypeError, "lengths has values of type float64, such as .*; pass"),
        ([True], TypeError, "lengths has values of type bool"),
        (["3"], TypeError, "lengths has values of type <U1"),
        ([3] * 70_000 + [101], ValueError, r"lengths\[70000\]=101 exceeds budget=100; .* pass"),
        (np.array([2**64 - 1], np.uint64), ValueError, "exceeds budget=100"),
    ],
)
def test_bad_lengths(kind, lengths, error, said):
    """Each length is at least 1, and within the budget."""
    with pytest.raises(error, match=said):
        kind(lengths, 100)


# For each argument, the values that raise a ValueError, and those that raise a TypeError.
REFUSED = {
    cseq.Balanced: ({"step": [0, 2**16], "together": [4], "over": ["day"]}, {}),
    cseq.Blocks: ({"rows": [0], "window": [0]}, {"rows": [2.5]}),
    cseq.Buckets: (
        {"budget": [0], "ratio": [0.9, math.nan, "1"], "most": [0], "together": [0],
         "too_long": ["cut"]},
        {"budget": [1.5], "together": [True], "longest_first": [1]},
    ),
    cseq.Buckets.of: ({"sizes": [0]}, {"sizes": [[3, 4]]}),
    cseq.Concatenated: ({"row": [0]}, {}),
    cseq.Groups: ({"classes": [0], "epoch_size": [0]}, {"samples": [1.5], "repeat_small": [1]}),
    cseq.Mixture: ({"epoch_size": [0], "weights_of": ["words"]}, {}),
    cseq.Packed: ({"budget": [0], "quantum": [0], "too_long": [None]}, {}),
    cseq.Resized: ({"epoch_size": [0]}, {}),
    cseq.Weighted: ({"size": [0]}, {"replacement": [1]}),
}  # fmt: skip
NAMED = [
    (make, {name: value}, error, re.escape(f"{name}={value!r}"))
    for make, refused in REFUSED.items()
    for error, names in zip((ValueError, TypeError), refused, strict=True)
    for name, values in names.items()
    for value in values
]
TEXTS = [
    (cseq.Shuffled, {"samples": 0}, ValueError, "samples=0 is below 1; pass at least 1, or om"),
    (cseq.Sequential, {"samples": 0}, ValueError, "samples=0 is below 1"),
    (cseq.Buckets, {"budget": HUGE}, ValueError, f"budget={HUGE} is above"),
    (cseq.Buckets, {"together": HUGE}, ValueError, f"together={HUGE} is above"),
    (cseq.Buckets, {"boundaries": [3, 3]}, ValueError, r"boundaries\[1\]=3 is below 4"),
    (cseq.Buckets, {"boundaries": [0]}, ValueError, r"boundaries\[0\]=0"),
    (cseq.Buckets, {"boundaries": [2.5]}, TypeError, r"boundaries\[0\]=2.5"),
    (cseq.Buckets, {"boundaries": [200]}, ValueError, "length 8 to 200, which exceeds b"),
    (cseq.Buckets, {"budget": 2, "too_long": "drop"}, ValueError, "all 3 lengths exceed budg"),
    (cseq.Buckets.of, {"labels": [0.5]}, TypeError, "labels has values of type float64"),
    (cseq.Buckets.of, {"sizes": {0: 3}}, ValueError, "sizes has no entry for label 1"),
    (cseq.Buckets.of, {"sizes": {0: 3, 1: 0}}, ValueError, r"sizes\[1\]=0"),
    (cseq.Buckets.of, {"sizes": {0: 1.5, 1: 1}}, TypeError, r"sizes\[0\]=1.5"),
    (cseq.Buckets.of, {"sizes": HUGE}, ValueError, f"sizes={HUGE} is above"),
    (cseq.Packed, {"quantum": 101}, ValueError, "quantum=101 is above 100"),
    (cseq.Packed, {"budget": 2**40}, ValueError, "pass a quantum of at least 8192"),
    (cseq.Packed, SPLIT | {"lengths": [0, 0]}, ValueError, "all lengths are 0"),
    (cseq.Packed, SPLIT | {"lengths": [1, -2]}, ValueError, r"lengths\[1\]=-2"),
    (cseq.Packed, SPLIT | {"budget": 2**25}, ValueError, "pass a quantum of at least 2"),
    (cseq.Concatenated, {"row": 8}, ValueError, "row=8 exceeds the 7 tokens of all documents"),
    (cseq.Concatenated, {"lengths": [0]}, ValueError, "row=2 exceeds the 0 tokens"),
    (cseq.Concatenated, {"lengths": [3, -1]}, ValueError, r"lengths\[1\]=-1 is not in \[0, 28"),
    (cseq.Concatenated, {"lengths": [1.5]}, TypeError, "lengths has values of type float64"),
    (cseq.Concatenated, {"lengths": [2**47, 2**47]}, ValueError, TOKENS),
    (cseq.Concatenated, {"lengths": LONG}, ValueError, r"lengths\[0\]=9223372036854775808"),
    (cseq.Groups, {"labels": [0.0, 1.0]}, TypeError, "labels has values of type float64"),
    (cseq.Groups, {"classes": 3}, ValueError, "classes=3 is more than the 2 c"),
    (cseq.Groups, {"samples": 3}, ValueError, "2 samples of class 'b', fewer than samples=3"),
    (cseq.Groups, {"samples": 2**32}, ValueError, "samples=4294967296 is above"),
    (cseq.Weighted, {"weights": [1, -2]}, ValueError, r"weights\[1\] is -2.0; pass finite"),
    (cseq.Weighted, {"weights": [math.nan, 1]}, ValueError, r"weights\[0\] is nan"),
    (cseq.Weighted, {"weights": [1, math.inf]}, ValueError, r"weights\[1\] is inf"),
    (cseq.Weighted, {"weights": [0, 0.0]}, ValueError, "all 2 weights are 0; pass at least one"),
    (cseq.Weighted, {"weights": ["1"]}, TypeError, "weights has values of type <U1.*pass real"),
    (cseq.Weighted.balanced, {"labels": [0.5]}, TypeError, "labels has values of type float64"),
    (cseq.Resized, {"order": 5}, TypeError, "order=5 is no"),
    (cseq.Blocks, {"rows": 2**12, "window": 2**20 + 1}, ValueError, "window=1048577 is above 1"),
    (cseq.Blocks, {"lanes": 3}, ValueError, "lanes=3 does not divide window=8; change lanes,"),
    (cseq.Blocks, {"lanes": 9}, ValueError, "lanes=9 is above 8"),
    (cseq.Blocks, {"rows": [3, -1]}, ValueError, r"rows\[1\]=-1; pass sizes of at"),
    (cseq.Blocks, {"rows": [0, 0]}, ValueError, r"smallest block is rows\[0\]=0; pass sizes"),
    (cseq.Blocks, {"rows": [1.5]}, TypeError, "rows has values of type float64"),
    (cseq.Blocks, {"rows": [3, 4], "samples": 8}, ValueError, "rows sum to 7; omit samples"),
    (cseq.Blocks, {"rows": [3, 4], "lanes": 2}, ValueError, "lanes=2 needs blocks of equal s"),
    (cseq.Balanced, {"order": cseq.Shuffled(9)}, TypeError, "cannot compute how much work"),
    (cseq.Balanced, {"order": cseq.Buckets([1, 2], 4)}, TypeError, "cannot compute how much"),
    (cseq.Balanced, {"order": "rows"}, TypeError, "'rows' is not a cseq.Order"),
    (cseq.Mixture, {"sources": {}}, TypeError, r"sources=\{\} is not a dict of orders"),
    (cseq.Mixture, {"sources": {"a": 5}}, TypeError, r"sources\['a'\]=5 is not a cseq.Order"),
    (cseq.Mixture, {"sources": {1: TWO["a"]}}, TypeError, "source name 1 is not a string"),
    (cseq.Mixture, {"sources": SIZELESS}, ValueError, r"sources\['a'\]=.* has no size; pass"),
    (cseq.Mixture, {"sources": TWO | {"b": Rows(9)}}, ValueError, ROWS),
    (cseq.Mixture, {"sources": TWO | {"b": BATCHES}}, ValueError, "'b.* are batches, but"),
    (cseq.Mixture, {"stop": "first"}, ValueError, "source 'a' has 5 units, .* 1024 needs 512, so"),
    (cseq.Mixture, {"weights": {"a": 1, "b": 1e-14}}, ValueError, RARE),
    (cseq.Mixture, {"stop": "last"}, ValueError, "stop='last' is unknown"),
    (cseq.Mixture, {"block": 65536}, ValueError, "block=65536 is above"),
    (cseq.Mixture, {"weights_of": "tokens"}, TypeError, NO_TOKENS),
]


@pytest.mark.parametrize(("make", "given", "error", "said"), NAMED + TEXTS)
def test_bad_arguments(make, given, error, said):
    """Each argument is tested alone, with valid other ones."""
    with pytest.raises(error, match=said):
        make(**{**USUAL.get(make, {}), **given})


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ({"a": 1}, r"weights lacks source 'b'; pass its share, or 0"),
        ({"a": 1, "b": 1, "c": 1}, r"weights has 'c', which is not a source; the names are \['a'"),
        ({"a": -1, "b": 1}, r"weights\['a'\]=-1 is negative or not finite; pass a finite n"),
        ({"a": 1, "b": math.nan}, r"weights\['b'\]=nan is negative or not finite"),
        ({"a": 1, "b": math.inf}, r"weights\['b'\]=inf is negative or not finite"),
        ({"a": "1", "b": 1}, r"weights\['a'\]='1' must be a non-negative number"),
        ({"a": 0, "b": 0}, r"all weights are 0"),
        (5, r"weights=5 is neither a dict nor a list of phases; pass a dict"),
        ([], r"weights=\[\] is neither"),
        ([(5, {"a": 1, "b": 1})], r"weights\[0\]\[0\]=5 is out of order; pass units"),
        ([(0, {"a": 1, "b": 1}), (0, {"a": 1, "b": 1})], r"weights\[1\]\[0\]=0 is out"),
        ([{"a": 1, "b": 1}], r"weights contains \{'a': 1, 'b': 1\}; pass \(unit, dict"),
    ],
)
def test_bad_weights_of_sources(weights, says):
    """Each source has a weight, and some weight is positive."""
    with pytest.raises((TypeError, ValueError), match=says):
        cseq.Mixture(TWO, weights)
