"""Realistic work with cseq and its peers: the data for the picture in the README.

All contenders have two workers and buffer ten batches. Processes are spawned. The DataLoaders read
single samples, as is usual; the others request a whole batch at once. SPDL and Grain return arrays,
the others tensors.

SPDL's documentation recommends threads for work that releases the GIL, as Pillow does, and
processes for work that holds it. Grain reads in threads by default and can use processes. Both are
measured in both modes, and the picture shows the faster mode.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import loaders
from harness.case import Case, Contender, Goal, scaled
from work import Work, microseconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from loaders import Rounds

OURS, DROP_IN = "MPSequence", "cseq.DataLoader"
TORCH, SPDL, GRAIN = "torch DataLoader", "SPDL", "Grain"
# The suffixes of a peer's name, which the picture shows.
THREADS, PROCESSES = ", threads", ", processes"
# Grain's workers have no other start method.
START_METHOD = "spawn"

# -- data sets: samples by number, as tensors, and batches by numbers, as arrays


class Photographs:
    """A folder of JPEG files, decoded, randomly cropped to 224 × 224 and flipped, as floats."""

    FILES = scaled(256, 8)
    SIZE = 224

    def __init__(self, folder: str) -> None:
        self.paths = sorted(Path(folder).glob("*.jpg"))

    @classmethod
    def write(cls, folder: str) -> None:
        """Write images that are as smooth as photographs."""
        from PIL import Image

        rng = np.random.default_rng(0)
        for number in range(cls.FILES):
            small = Image.fromarray(rng.integers(256, size=(24, 24, 3), dtype="uint8"))
            large = small.resize((256, 256), Image.Resampling.BICUBIC)
            large.save(Path(folder, f"{number:04}.jpg"), quality=90)

    def image(self, number: int) -> np.ndarray:
        """One image, channels first."""
        from PIL import Image

        with Image.open(self.paths[number % len(self.paths)]) as file:
            left, top, mirrored = np.random.randint(0, (33, 33, 2))  # noqa: NPY002 (seeded by all)
            pixels = np.asarray(file)[top : top + self.SIZE, left : left + self.SIZE]
        pixels = pixels[:, ::-1] if mirrored else pixels
        return np.divide(pixels.transpose(2, 0, 1), 255, dtype=np.float32)

    def sample(self, number: int) -> Any:
        """One image and its number."""
        import torch

        return torch.from_numpy(self.image(number)), number

    def batch(self, numbers: np.ndarray) -> Any:
        """A batch of images in one array."""
        images = np.empty((len(numbers), 3, self.SIZE, self.SIZE), np.float32)
        for row, number in enumerate(numbers):
            images[row] = self.image(int(number))
        return images, np.asarray(numbers)


class Tokens:
    """A memory-mapped file of tokens: random windows of 512, and the same ones shifted by one."""

    COUNT = scaled(10_000_000, 10_000)
    WINDOW = 512

    def __init__(self, folder: str) -> None:
        self.tokens = np.memmap(Path(folder, "tokens.bin"), dtype="uint16", mode="r")
        self.steps = np.arange(self.WINDOW + 1)

    @classmethod
    def write(cls, folder: str) -> None:
        """Write the tokens."""
        rng = np.random.default_rng(0)
        rng.integers(50_000, size=cls.COUNT, dtype="uint16").tofile(Path(folder, "tokens.bin"))

    def starts(self, numbers: Any) -> Any:
        """The starts of windows, scattered over the file."""
        return numbers * 7919 % (len(self.tokens) - self.WINDOW)

    def sample(self, number: int) -> Any:
        """One window."""
        import torch

        start = self.starts(number)
        window = torch.from_numpy(self.tokens[start : start + self.WINDOW + 1].astype(np.int64))
        return window[:-1], window[1:]

    def batch(self, numbers: np.ndarray) -> Any:
        """Windows by one fancy index."""
        starts = self.starts(np.asarray(numbers))
        windows = self.tokens[starts[:, None] + self.steps].astype(np.int64)
        return windows[:, :-1], windows[:, 1:]


class Table:
    """A table in memory: a dict of 113 columns."""

    ROWS = scaled(100_000, 2000)
    COLUMNS = 113

    def __init__(self, folder: str) -> None:
        table = np.load(Path(folder, "table.npy"))
        self.columns = {f"column {number}": column for number, column in enumerate(table)}

    @classmethod
    def write(cls, folder: str) -> None:
        """Write the table."""
        rng = np.random.default_rng(0)
        np.save(Path(folder, "table.npy"), rng.random((cls.COLUMNS, cls.ROWS), dtype="float32"))

    def batch(self, numbers: Any) -> Any:
        """Each column, indexed once."""
        rows = np.asarray(numbers) % self.ROWS
        return {name: column[rows] for name, column in self.columns.items()}

    # DataLoaders read whole batches as well, because single rows would take far too long.
    sample = batch


class Images:
    """Images of 3 × 224 × 224 bytes, in memory."""

    COUNT = scaled(256, 16)

    def __init__(self, folder: str) -> None:  # noqa: ARG002 (nothing is read)
        self.images = np.zeros((self.COUNT, 3, 224, 224), np.uint8)

    @classmethod
    def write(cls, folder: str) -> None:
        """Write nothing."""

    def sample(self, number: int) -> Any:
        """One image and its number."""
        import torch

        return torch.from_numpy(self.images[number % self.COUNT]), number

    def batch(self, numbers: np.ndarray) -> Any:
        """Images by one fancy index."""
        return self.images[np.asarray(numbers) % self.COUNT], np.asarray(numbers)


class Dicts:
    """A dict of 20 rows of 16 floats, in memory."""

    COUNT = 256

    def __init__(self, folder: str) -> None:  # noqa: ARG002 (nothing is read)
        self.parts = {f"part {n}": np.zeros((self.COUNT, 16), np.float32) for n in range(20)}

    @classmethod
    def write(cls, folder: str) -> None:
        """Write nothing."""

    def sample(self, number: int) -> Any:
        """A row of each part."""
        import torch

        return {
            name: torch.from_numpy(part[number % self.COUNT]) for name, part in self.parts.items()
        }

    def batch(self, numbers: np.ndarray) -> Any:
        """Rows of each part by one fancy index."""
        rows = np.asarray(numbers) % self.COUNT
        return {name: part[rows] for name, part in self.parts.items()}


class Samples:
    """A data set for a DataLoader, opened in each worker."""

    def __init__(self, kind: Any, folder: str, count: int) -> None:
        self.kind = kind
        self.folder = folder
        self.count = count
        self.opened: Any = None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: Any) -> Any:
        if self.opened is None:
            self.opened = self.kind(self.folder)
        return self.opened.sample(number)


class Indexer:
    """An indexer of whole batches for all other contenders."""

    def __init__(self, kind: Any, folder: str) -> None:
        self.opened = kind(folder)

    def __getitem__(self, numbers: Any) -> Any:
        return self.opened.batch(numbers)


# -- contenders


def measured(
    make: Callable[[Work, Any, str], Rounds], kind: Any, batches: int, batch_size: int
) -> Iterator[Callable[[], float]]:
    """Write the data, then run a loader's rounds over it."""
    with tempfile.TemporaryDirectory() as folder:
        kind.write(folder)
        indexer = partial(Indexer, kind, folder)
        yield from make(Work(indexer, batches, microseconds, batch_size=batch_size), kind, folder)


def dataloader(home: str, work: Work, kind: Any, folder: str) -> Rounds:
    """A DataLoader, torch's or ours."""
    from importlib import import_module

    from torch.utils.data import BatchSampler, RandomSampler

    dataset = Samples(kind, folder, work.samples)
    options: dict[str, Any] = {"batch_size": work.batch_size, "shuffle": True}
    if kind.sample is kind.batch:
        sampler = BatchSampler(RandomSampler(dataset), work.batch_size, drop_last=False)
        options = {"batch_size": None, "sampler": sampler}
    loader = import_module(home).DataLoader
    return loaders.drop_in(loader, work, dataset, multiprocessing_context=START_METHOD, **options)


def ours(work: Work, _kind: Any, _folder: str) -> Rounds:
    """`MPSequence` with tensors that keep the types of the data."""
    return loaders.cseq_processes(work, start_method=START_METHOD, out_type="cpu", dtype=None)


def spdl_threads(work: Work, _kind: Any, _folder: str) -> Rounds:
    """A pipeline in threads, its default."""
    return loaders.spdl_threads(work)


def spdl_processes(work: Work, _kind: Any, _folder: str) -> Rounds:
    """A pipeline with a pool of processes."""
    return loaders.spdl_pool(work, start_method=START_METHOD)


def grain_threads(work: Work, _kind: Any, _folder: str) -> Rounds:
    """Threads that read."""
    return loaders.grain_threads(work)


def grain_processes(work: Work, _kind: Any, _folder: str) -> Rounds:
    """`mp_prefetch`, which spawns."""
    return loaders.grain_processes(work)


# -- cases


def case(name: str, title: str, kind: Any, size: int, counts: tuple[int, ...], goal: float) -> Case:
    """Declare a case. `counts`: a round's batches of ours, the drop-in, SPDL, Grain and torch."""
    first, second, third, fourth, last = counts
    own = ("pillow",) if kind is Photographs else ()
    makes: dict[str, tuple[Any, tuple[str, ...]]] = {
        OURS: (ours, ("torch",)),
        DROP_IN: (partial(dataloader, "cseq"), ("torch",)),
        SPDL + THREADS: (spdl_threads, ("spdl-core",)),
        SPDL + PROCESSES: (spdl_processes, ("spdl-core",)),
        GRAIN + THREADS: (grain_threads, ("grain",)),
        GRAIN + PROCESSES: (grain_processes, ("grain",)),
        TORCH: (partial(dataloader, "torch.utils.data"), ("torch",)),
    }
    return Case(
        f"picture_{name}",
        title,
        "µs/batch",
        tuple(
            Contender(
                contender,
                partial(measured, make, kind, scaled(count, 12), scaled(size, 4)),
                (*needs, *own),
                contender in (OURS, DROP_IN),
            )
            for (contender, (make, needs)), count in zip(
                makes.items(), (first, second, third, third, fourth, fourth, last), strict=True
            )
        ),
        goals=(Goal("times torch's rate, drop-in", lambda f: f[TORCH] / f[DROP_IN], None, goal),),
    )


CASES = (
    case("photographs", "JPEG folder", Photographs, 32, (100, 100, 100, 100, 100), 1),
    case("tokens", "Tokens", Tokens, 64, (5000, 1000, 500, 500, 300), 1.5),
    case("table", "Table, 113 columns", Table, 512, (1000, 300, 200, 200, 40), 3),
    case("images", "4.8 MB of images", Images, 32, (400, 300, 100, 100, 60), 3),
    case("dicts", "20 small tensors", Dicts, 32, (5000, 500, 500, 500, 60), 2),
)
