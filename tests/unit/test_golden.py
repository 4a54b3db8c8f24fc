"""The definitions' results never change; `make golden` writes them down once."""

import json

import golden
import pytest

import cseq

FILES = sorted(golden.FOLDER.glob("*.json"))
CASES = [(path.stem, *case) for path in FILES for case in golden.cases(path)]


@pytest.mark.filterwarnings("ignore:with too_long='drop'")
@pytest.mark.filterwarnings("ignore:the sources")
@pytest.mark.parametrize(
    ("kind", "name", "record"),
    [case[1:] for case in CASES],
    ids=[f"{stem}-{k}" for k, (stem, *_) in enumerate(CASES)],
)
def test_golden(kind, name, record):
    """A definition always gives the same: the first values are in the file, all are in the hash."""
    assert golden.arguments_of(record, kind) | kind(name, record) == record


def test_each_order_has_a_golden_file():
    """Each definition of an order has records; `sequential` needs none."""
    public = [getattr(cseq, name) for name in cseq.__all__]
    orders = {one.name for one in public if isinstance(one, type) and issubclass(one, cseq.Order)}
    named = {name for _, kind, name, _ in CASES if kind is golden.order}
    assert named == {*golden.ORDERS}
    assert orders - {"", "sequential"} <= named


@pytest.fixture
def file(tmp_path):
    """Return the file of a new order, with records without results."""
    given = {"n": 10, "rows": 3, "window": 2, "lanes": 1, "seed": 0, "epoch": 1}
    more = given | {"n": 50}
    path = tmp_path / "orders_new.json"
    text = ",\n".join(f"    {json.dumps(record)}" for record in (given, more))
    path.write_text(f'{{\n  "algorithm": "blocks-v2",\n  "orders": [\n{text}\n  ]\n}}\n')
    return path


def test_records_without_results_get_them(file):
    """They come from the definition; nothing else in the file changes, then or later."""
    before = file.read_text()
    assert golden.complete(file) == 2
    [first, second] = [record for *_, record in golden.cases(file)]
    assert first in golden.records("orders_blocks")
    assert second["first"] != first["first"]
    after = file.read_text()
    assert [*map(golden.arguments_of, (first, second))] == json.loads(before)["orders"]
    assert golden.complete(file) == 0
    assert file.read_text() == after


def test_a_changed_definition_needs_a_new_file(file, monkeypatch):
    """Results are never changed, nor does an old file take a new name's results."""
    golden.complete(file)
    text = file.read_text().replace('"last": 6', '"last": 5')
    file.write_text(text)
    with pytest.raises(ValueError, match="give the new definition a new name, and a new file"):
        golden.complete(file)
    assert file.read_text() == text
    monkeypatch.setattr(cseq.Blocks, "name", "blocks-v3")
    with pytest.raises(ValueError, match="is of blocks-v2, and the order is blocks-v3"):
        golden.complete(file)
    file.write_text(file.read_text().replace("blocks-v2", "blocks-v3"))
    with pytest.raises(ValueError, match=r"'blocks-v3' is not in ORDERS of .*golden\.py"):
        golden.complete(file)
