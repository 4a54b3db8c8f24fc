"""`cseq.tokens.Rows`: every token of every document once, in the arrays of trainers."""

from __future__ import annotations

import json
import pickle
from typing import Any

import numpy as np
import pytest
from kinds import INLINE, PARALLEL, by_name
from token_data import Listed, expected, random_documents, write_flat, write_megatron

import cseq
from cseq import tokens

ALL = (
    "input_ids", "labels", "position_ids", "document_ids", "cu_seqlens", "max_seqlen",
    "valid_tokens", "source_tokens",
)  # fmt: skip
ARRAYS = ALL[:4]


def as_lists(batch):
    """Return a batch without arrays."""
    return {key: getattr(value, "tolist", lambda it=value: it)() for key, value in batch.items()}


def reader_of(kind, folder, name, documents):
    """Write documents, and return a source of the given kind."""
    if kind == "megatron":
        write_megatron(folder / name, documents)
        return tokens.Megatron(folder / name)
    if kind == "end":
        # Each document ends with token 0.
        path = folder / f"{name}.bin"
        write_flat(path, documents, "int32")
        return tokens.Flat(path, "int32", end=0)
    if kind == "listed":
        return Listed(documents)
    offsets = write_flat(folder / f"{name}.npy", documents)
    return tokens.Flat(folder / f"{name}.npy", offsets=offsets)


KINDS = ("megatron", "flat", "end", "listed")


def batches_of(rows, **options):
    """Return the batches of an epoch, made without workers."""
    with INLINE.start(rows, None, **{"batch_size": 3, "seed": 5, **options}) as batches:
        return [as_lists(batch) for batch in batches]


@pytest.mark.parametrize("packing", ["best-fit", "concatenate"])
def test_each_token_comes_once_with_its_labels(tmp_path, packing):
    """Rows are what plain Python makes of their pieces; no token comes twice or is missing.

    With `concatenate`, the remainder that fills no row is missing.
    """
    rng = np.random.default_rng(1)
    for number in range(100):
        row = int(rng.integers(2, 30))
        names = ["a", "b"][: 1 + number % 2]
        documents = {name: random_documents(rng, int(rng.integers(1, 40)), row) for name in names}
        kinds = {name: KINDS[int(rng.integers(len(KINDS)))] for name in names}
        for name in names:
            # This guarantees a row and a loss.
            documents[name].append([7, 8] * row)
            if kinds[name] == "end":
                documents[name] = [[*document, 0] for document in documents[name]]
        sources = {n: reader_of(kinds[n], tmp_path, f"{n}{number}", documents[n]) for n in names}
        flat = number % 3 == 0
        rows = tokens.Rows(sources, row, packing=packing, flat=flat, keys=ALL)
        pieces = [rows.locate(k, seed=5) for k in range(rows.order.units)]
        seen = sorted(piece for each in pieces for piece in each)
        whole = {
            (name, k): [token for piece in seen if piece[:2] == (name, k)
                        for token in range(piece.start, piece.stop)]
            for name in names for k in range(len(documents[name]))
        }  # fmt: skip
        lengths = {
            (name, k): len(document) for name in names for k, document in enumerate(documents[name])
        }
        assert all(each == sorted({*each}) for each in whole.values())
        assert all(not each or each[-1] < lengths[key] for key, each in whole.items())
        missing = sum(lengths.values()) - sum(map(len, whole.values()))
        assert missing == (sum(lengths.values()) % row if packing == "concatenate" else 0)
        wanted = [
            expected(pieces[first : first + 3], documents, row, flat=flat)
            for first in range(0, len(pieces), 3)
        ]
        assert batches_of(rows) == wanted


def test_a_mask_of_the_loss(tmp_path):
    """Labels are -100 where the next token's mask is 0, even after a cut."""
    rng = np.random.default_rng(2)
    for number in range(20):
        documents = {name: [*random_documents(rng, 20, 8), [1, 2]] for name in ("a", "b")}
        masks = {
            name: [rng.integers(0, 2, len(each)).tolist() for each in documents[name]]
            for name in documents
        }
        masks["b"] = [[1] * len(each) for each in documents["b"]]
        sources = {
            "a": Listed(documents["a"], masks["a"]),
            "b": reader_of("flat", tmp_path, f"b{number}", documents["b"]),
        }
        rows = tokens.Rows(sources, 8, keys=ALL, packing="concatenate")
        pieces = [rows.locate(k, seed=5) for k in range(rows.order.units)]
        wanted = [
            expected(pieces[first : first + 3], documents, 8, masks)
            for first in range(0, len(pieces), 3)
        ]
        assert batches_of(rows) == wanted


@pytest.mark.parametrize("kind", PARALLEL, ids=by_name)
def test_every_kind_of_worker_reads_the_same(tmp_path, kind):
    """Worker processes and threads get the sources, and open the files themselves."""
    rng = np.random.default_rng(4)
    documents = {name: [[*each, 0] for each in random_documents(rng, 30, 16)] for name in KINDS}
    sources = {name: reader_of(name, tmp_path, name, documents[name]) for name in KINDS}
    weights = dict.fromkeys(KINDS, 1)
    rows = tokens.Rows(sources, 16, weights, epoch_size=40, keys=ALL)
    with kind.start(rows, None, batch_size=3, seed=5) as batches:
        assert [as_lists(batch) for batch in batches] == batches_of(rows)


def test_shares_count_tokens(tmp_path):
    """By default, weights are shares of tokens; with ``weights_of="units"``, of rows."""
    rng = np.random.default_rng(6)
    full = [rng.integers(1, 9, 32).tolist() for _ in range(600)]
    half = [rng.integers(1, 9, 17).tolist() for _ in range(600)]
    sources = {"full": Listed(full), "half": Listed(half)}
    shares = {}
    for of in ("tokens", "units"):
        rows = tokens.Rows(sources, 32, {"full": 1, "half": 1}, weights_of=of, epoch_size=1200)
        assert rows.names == ["full", "half"]
        given = np.sum([batch["source_tokens"] for batch in batches_of(rows)], axis=0)
        shares[of] = given[0] / given.sum()
    assert shares["tokens"] == pytest.approx(0.5, abs=0.01)
    assert shares["units"] == pytest.approx(32 / 49, abs=0.01)


@pytest.mark.parametrize("packing", ["best-fit", "concatenate"])
@pytest.mark.needs("POSIX")
def test_tables_in_a_folder(tmp_path, packing):
    """`cache` does not change the rows; the next process finds its files."""
    documents = random_documents(np.random.default_rng(9), 50, 16)
    source, cache = Listed(documents), tmp_path / "cache"
    wanted = batches_of(tokens.Rows(source, 16, packing=packing))
    assert batches_of(tokens.Rows(source, 16, packing=packing, cache=cache)) == wanted
    kept = {path.name: path.stat().st_ino for path in cache.iterdir()}
    assert kept
    assert batches_of(tokens.Rows(source, 16, packing=packing, cache=cache)) == wanted
    assert kept == {path.name: path.stat().st_ino for path in cache.iterdir()}


@pytest.mark.parametrize("balance", ["step", "window", "epoch"])
def test_rows_are_dealt_by_their_work(balance):
    """With `step`, an epoch has the same rows, in the order of `cseq.Balanced`."""
    rng = np.random.default_rng(8)
    lengths = rng.lognormal(4, 1.2, 1000).clip(1, 2000).astype(int)
    source = Listed([[1] * length for length in lengths.tolist()])
    plain, rows = tokens.Rows(source, 512), tokens.Rows(source, 512, step=32, balance=balance)
    wanted = cseq.Balanced(plain.order, 32, over=balance)
    assert rows.order.facts() == wanted.facts()
    assert rows.order.batches(seed=5) == wanted.batches(seed=5) != plain.order.batches(seed=5)
    pieces = [[each.locate(k, seed=5) for k in range(each.order.units)] for each in (plain, rows)]
    assert sorted(map(sorted, pieces[0])) == sorted(map(sorted, pieces[1]))


def test_types_and_keys(tmp_path):
    """A batch has the requested keys, as integers of the requested type."""
    source = reader_of("megatron", tmp_path, "m", [[1, 2, 3], [4, 5]])
    kinds = {}
    for dtype in ("int64", "int32"):
        rows = tokens.Rows(source, 4, dtype=dtype, keys=["labels", "cu_seqlens", "document_ids"])
        with cseq.MPSequence(rows, num_workers=0, batch_size=2, seed=1).start() as batches:
            [batch] = batches
        assert [*batch] == ["labels", "cu_seqlens", "document_ids"]
        kinds[dtype] = {str(array.dtype).removeprefix("torch.") for array in batch.values()}
    assert kinds == {"int64": {"int64", "int32"}, "int32": {"int32"}}


def test_tokens_fit_in_the_type(tmp_path):
    """Integers of any width are accepted if the batch's type can hold them; others are refused."""
    kinds = ("u1", "i1", "<u2", ">u2", "<i2", ">i2", "<i4", ">i4", "<u4", ">u4", "<i8", ">i8")
    for k, kind in enumerate(kinds):
        path, number = tmp_path / f"{k}.bin", 100
        np.arange(number, dtype=kind).tofile(path)
        source = tokens.Flat(path, kind, offsets=[0, number])
        for dtype in ("int32", "int64"):
            if kind[-2:] in ("u4", "i8") and dtype == "int32":
                with pytest.raises(TypeError, match="which dtype=int32 cannot hold"):
                    tokens.Rows(source, number, dtype=dtype)
            else:
                [batch] = batches_of(tokens.Rows(source, number, dtype=dtype))
                assert batch["input_ids"] == [[*range(number)]]


def test_a_sequence_takes_the_order_of_its_indexer():
    """An indexer's order is used unless another is given; `shuffle` with it is an error.

    Rows that are longer than the indexer's are another, not a batch without their rest.
    """
    source = Listed([[1, 2, 3, 4], [5, 6]])
    rows = tokens.Rows(source, 4)
    order = cseq.MPSequence(rows, batch_size=1, seed=1)
    assert order.dset_size == 6
    assert len(order) == 2
    with pytest.raises(ValueError, match="shuffle=False cannot be combined with order="):
        cseq.MPSequence(rows, shuffle=False)
    other = cseq.Resized(rows.order, 5)
    assert len(cseq.MPSequence(rows, batch_size=1, seed=1, order=other)) == 5
    with pytest.raises(ValueError, match="pieces beyond the end of a row of 3 tokens"):
        batches_of(tokens.Rows(source, 3), order=tokens.Rows(source, 6).order)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"row": 1}, "row=1 is below 2"),
    ({"sources": {}}, "pass at least one source"),
    ({"sources": {"a": [1, 2]}}, r"sources contains \[1, 2\], which has no name"),
    ({"sources": Listed([[], []])}, "listed has no tokens; leave this source out"),
    ({"sources": Listed([[1], [2]])}, "no document has at least 2 tokens"),
    ({"dtype": "int16"}, "dtype=int16 does not work with pad=0; pass dtype='int64' or 'int32'"),
    ({"dtype": "int32", "pad": 2**40}, "dtype=int32 does not work with pad="),
    ({"keys": ["ids"]}, "keys='ids' is unknown; pass one of"),
    ({"keys": "labels"}, "keys='labels' is not a list of keys; pass at least one key"),
    ({"keys": []}, r"keys=\[\] is not a list of keys"),
    ({"dtype": "in64"}, "dtype='in64' is not a NumPy type"),
    ({"packing": "best"}, "packing='best' is unknown"),
    ({"step": 0}, "step=0 is below 1"),
    ({"balance": "steps"}, "balance='steps' is unknown"),
    ({"balance": "window"}, "balance='window' needs step"),
    ({"epoch_size": 4}, "epoch_size=4 needs weights"),
    ({"weights": {"b": 1}}, "weights has 'b', which is not a source"),
]


@pytest.mark.parametrize(("wrong", "said"), WRONG)
def test_what_is_wrong_is_said(wrong, said):
    """An invalid argument is refused at once, with its value and the remedy."""
    given = {"sources": {"listed": Listed([[1, 2, 3]])}, "row": 4} | wrong
    with pytest.raises((TypeError, ValueError), match=said):
        tokens.Rows(**given)


def test_a_row_beyond_the_epoch():
    """`locate` names the valid rows."""
    rows = tokens.Rows(Listed([[1, 2, 3, 4], [5, 6]]), 4)
    found = rows.locate(0, seed=1) + rows.locate(1, seed=1)
    assert sorted(found) == [("listed", 0, 0, 4), ("listed", 1, 0, 2)]
    with pytest.raises(IndexError, match="row=2 is out of range for an epoch of 2 rows"):
        rows.locate(2, seed=1)


def test_a_source_of_one_s_own_that_contradicts_itself():
    """The result of `read` has the requested length, and the type of earlier results."""
    source = Listed([[1, 2, 3]])
    rows = tokens.Rows(source, 3)
    source.read = lambda *_: np.array([1.0, 2.0, 3.0])  # type: ignore[method-assign,assignment]
    with pytest.raises(ValueError, match=r"cannot be read from an array of .* type float64"):
        batches_of(rows)
    source = Listed([[1, 2, 3]])
    source.lengths = np.array([4])
    with pytest.raises(ValueError, match=r"read\(0, 0, 4\) returned .* correct lengths\[0\]"):
        batches_of(tokens.Rows(source, 4))


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("flat", [False, True])
def test_parts_of_a_context(tmp_path, flat, balanced):
    """Ranks that share a batch have each token once, with its label; the rest is the batch's."""
    rng = np.random.default_rng(7)
    source = reader_of("flat", tmp_path, "f", random_documents(rng, 30, 16))
    rows = tokens.Rows(source, 16, flat=flat, keys=ALL)
    manager = cseq.MPSequence(rows, num_workers=0, batch_size=2, seed=1, out_type="null")
    with manager.start() as batches:
        batch = next(iter(batches))
    parts = [tokens.split_context(batch, (rank, 2), balanced=balanced) for rank in range(2)]
    for key in ALL:
        if key in ARRAYS:
            first, second = (part[key] for part in parts)
            quarters = [*np.split(first, 2, 1), *np.split(second, 2, 1)]
            order = [0, 2, 3, 1] if balanced else [0, 1, 2, 3]
            assert (np.concatenate([quarters[k] for k in order], 1) == batch[key]).all()
        else:
            assert all(part[key] is batch[key] for part in parts)
    with pytest.raises(ValueError, match="cannot be divided into 3 equal parts"):
        tokens.split_context(batch, (0, 3))
    for shard in (None, "auto"):
        with pytest.raises(ValueError, match="is not a rank"):
            tokens.split_context(batch, shard)


def test_a_state_of_other_tokens_is_refused(tmp_path):
    """A state knows the tokens of each source, not where they are; sources may come and go."""
    documents = {"a": [[1, 2, 3, 4], [5, 6]], "b": [[7, 8, 9]], "c": [[7, 8, 6]]}
    sources = {name: reader_of("flat", tmp_path, name, documents[name]) for name in documents}
    sources["moved"] = reader_of("megatron", tmp_path, "moved", documents["a"])

    def manager(**named):
        given = {key: sources[name] for key, name in named.items()}
        rows = tokens.Rows(given, 4, dict.fromkeys(named, 1), epoch_size=8)
        return cseq.MPSequence(rows, num_workers=0, batch_size=1, seed=1, out_type="null")

    state = json.loads(json.dumps(manager(web="a", code="b").state_dict()))
    for given in ({"web": "moved", "code": "b"}, {"web": "a"}, {"web": "a", "code": "b", "x": "c"}):
        manager(**given).load_state_dict(state)
    other = manager(web="a", code="c")
    with pytest.raises(ValueError, match="the content of source 'code' has changed: its fingerp"):
        other.load_state_dict(state)
    other.load_state_dict(state, strict=False)


def test_a_pickle_of_rows_has_no_data(tmp_path):
    """Workers get paths and numbers, for a corpus of any size; a copy has the order, too."""
    source = reader_of("end", tmp_path, "f", [[*range(1, 900), 0]] * 500)
    rows = tokens.Rows(source, 16)
    whole = pickle.dumps(rows)
    assert len(whole) < 3000
    assert pickle.loads(whole).locate(3, seed=1) == rows.locate(3, seed=1)
