"""Where torch's warnings say that they are from, and what a profile calls an iterator."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils import data  # noqa: E402
from torch_data import Plain  # noqa: E402

import cseq  # noqa: E402
from cseq.adapters.torch import installed  # noqa: E402

pytestmark = pytest.mark.needs("fork")

FORK: Any = {"multiprocessing_context": "fork"}


class Longer(data.IterableDataset[Any]):
    """Has three samples, and says that it has one."""

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Any:
        return iter(range(3))


def warned(kind: Any, dataset: Any, **options: Any) -> list[Any]:
    """Return the warnings of an epoch, with their places."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = kind(dataset, **options)
        len(loader)
        of_init = len(caught)
        for _ in loader:
            pass
        iterator = iter(loader)
        next(iterator), next(iterator)
    return [(each.filename, each.lineno, str(each.message)) for each in caught[of_init:]]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    "options", [{}, {"pin_memory": True, "pin_memory_device": "cuda"}], ids=["", "pinned"]
)
def test_they_have_the_place_that_they_have_with_torch(
    num_workers: int, options: dict[str, Any]
) -> None:
    """The line of the loop, or torch's own file."""
    options = options | {"num_workers": num_workers} | (FORK if num_workers else {})
    dataset = Longer()
    expected = warned(data.DataLoader, dataset, **options)
    assert len([path for path, _, _ in expected if path == __file__]) == 3
    assert warned(cseq.DataLoader, dataset, **options) == expected
    with installed():
        assert warned(data.DataLoader, dataset, **options) == expected


def test_more_workers_than_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._utils.cpu_count", lambda: 1)
    options: Any = FORK | {"num_workers": 2}
    expected = warned(data.DataLoader, Plain(4), **options)
    assert len(expected) == 2
    assert warned(cseq.DataLoader, Plain(4), **options) == expected


@pytest.mark.parametrize("num_workers", [0, 1])
def test_they_are_chosen_by_torchs_module(num_workers: int) -> None:
    options: Any = {"num_workers": num_workers} | (FORK if num_workers else {})
    loader = cseq.DataLoader(Plain(2), pin_memory=True, pin_memory_device="cuda", **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", module="torch.utils.data")
        assert len(list(loader)) == 2


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_profile_has_torchs_name(num_workers: int) -> None:
    """Traces are searched for it."""

    def names(kind: Any) -> set[str]:
        loader = kind(Plain(2), num_workers=num_workers, **(FORK if num_workers else {}))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            list(loader)
        return {each.name for each in profile.events() if each.name.startswith("enumerate")}

    expected = names(data.DataLoader)
    assert len(expected) == 1
    assert names(cseq.DataLoader) == expected
