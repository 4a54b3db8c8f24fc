"""Work and usage that peers are known for: cseq, torch's DataLoader and the peers."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

import cseq
import loaders
from cases.computing import bare_threads
from cases.dataloader import HOMES, OURS, TORCH, WITHOUT, Load, Tensors, epochs, measured
from cases.threads import Jpegs
from cases.threads import case as case_of_threads
from harness.case import Case, Contender, Goal, scaled
from work import Interpreted, Sleepy, Work, microseconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from loaders import Rounds

SEQUENCE, SPDL, GRAIN = "MPSequence", "SPDL threads", "Grain mp_prefetch"


def part(most: float, name: str = OURS) -> Goal:
    """Declare a goal: a fraction of the figure of torch's DataLoader."""
    return Goal(f"{name}: part of torch's", lambda f: f[name] / f[TORCH], at_most=most)


# -- more workers than cores


def case_of_workers(name: str, title: str, work: Work, limit: Any) -> Case:
    """Declare a case with a number of workers."""
    contenders = (
        Contender(OURS, partial(loaders.torch_dataloader, work, home="cseq"), ("torch",), True),
        Contender(SEQUENCE, partial(loaders.cseq_processes, work, start_method="fork"), (), True),
        Contender(TORCH, partial(loaders.torch_dataloader, work), ("torch",)),
        Contender(SPDL, partial(loaders.spdl_threads, work), ("spdl-core",)),
        Contender(GRAIN, partial(loaders.grain_processes, work), ("grain",)),
        Contender("limit", partial(limit, work)),
    )
    goals = part(1), part(1, SEQUENCE)
    return Case(f"peers_{name}", title, "µs/batch", contenders, limit="limit", goals=goals)


def bare_on_all_cores(work: Work) -> Rounds:
    """Measure a bare loop's time divided by the number of cores."""
    for run in loaders.bare(work):
        yield lambda run=run: run() / min(work.num_workers, len(os.sched_getaffinity(0)))


SLEEPS = scaled(400, 16)
SLEEPY = Work(partial(Sleepy, SLEEPS, 0.0), SLEEPS, microseconds, num_workers=4, buffer=8)
BUSY = Work(Interpreted, scaled(400, 16), microseconds, num_workers=8, buffer=16)

# -- JPEG files


class Cropped(Jpegs):
    """Photographs of 224 x 224, cropped from 320 x 240 and decoded by one of several libraries."""

    def __init__(self, decoder: str, samples: int) -> None:
        super().__init__(samples)
        self.decode = getattr(self, decoder)

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)[index % 17 :, index % 97 :][:224, :224]

    def pillow(self, data: bytes) -> np.ndarray:
        """Decode with Pillow."""
        return Jpegs.decode(self, data)

    @staticmethod
    def simplejpeg(data: bytes) -> np.ndarray:
        """Decode with libjpeg-turbo."""
        return import_module("simplejpeg").decode_jpeg(data)

    @staticmethod
    def opencv(data: bytes) -> np.ndarray:
        """Decode with OpenCV."""
        cv2 = import_module("cv2")
        return cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB)


DECODERS = {"pillow": (), "simplejpeg": ("simplejpeg",), "opencv": ("opencv-python-headless",)}

# -- files of libraries that read samples in sequence: images of 3 x 32 x 32 and their numbers

SAMPLES = 32 * scaled(40, 4)


def image(number: int) -> np.ndarray:
    """Make the image of a sample."""
    return np.full((3, 32, 32), number, np.float32)


class Images(Tensors):
    """The same images in memory."""

    def __init__(self, samples: int = SAMPLES) -> None:
        import torch

        self.samples = samples
        self.table = torch.zeros(256, 3, 32, 32)


class Rows:
    """The same images as an indexer."""

    def __init__(self) -> None:
        self.table = np.zeros((256, 3, 32, 32), np.float32)

    def __getitem__(self, indices: np.ndarray) -> Any:
        return self.table[indices % 256], indices


class Tar:
    """Webdataset's shards."""

    needs = ("webdataset",)
    loader = "WebLoader, batches made in workers"

    @staticmethod
    def write(folder: str) -> None:
        """Write four shards."""
        from webdataset import TarWriter

        for shard in range(4):
            with TarWriter(f"{folder}/{shard}.tar") as file:
                for number in range(shard, SAMPLES, 4):
                    sample = {"x.npy": image(number), "y.cls": number}
                    file.write({"__key__": f"{number:06}", **sample})

    @staticmethod
    def read(folder: str) -> Any:
        """Read them."""
        from webdataset import WebDataset

        shards = [f"{folder}/{shard}.tar" for shard in range(4)]
        return WebDataset(shards, shardshuffle=False).decode().to_tuple("x.npy", "y.cls")

    @staticmethod
    def own(dataset: Any, batch_size: int, **options: Any) -> Any:
        """Make the library's loader."""
        from webdataset import WebLoader

        return WebLoader(dataset.batched(batch_size), batch_size=None, **options)


class Lit:
    """Litdata's chunks."""

    needs = ("litdata",)
    loader = "litdata.StreamingDataLoader"

    @staticmethod
    def write(folder: str) -> None:
        """Write chunks of 4 MB."""
        from litdata.streaming.writer import BinaryWriter

        writer = BinaryWriter(folder, chunk_bytes=4_000_000)
        for number in range(SAMPLES):
            writer[number] = {"x": image(number), "y": number}
        writer.done()
        writer.merge()

    @staticmethod
    def read(folder: str) -> Any:
        """Read them."""
        from litdata import StreamingDataset

        return StreamingDataset(folder, shuffle=True)

    @staticmethod
    def own(dataset: Any, **options: Any) -> Any:
        """Make the library's loader."""
        from litdata import StreamingDataLoader

        return StreamingDataLoader(dataset, **options)


class Mosaic:
    """MosaicML's shards."""

    needs = ("mosaicml-streaming",)
    loader = "streaming.StreamingDataLoader"

    @staticmethod
    def write(folder: str) -> None:
        """Write them."""
        from streaming import MDSWriter

        with MDSWriter(out=folder, columns={"x": "ndarray:float32:3,32,32", "y": "int"}) as file:
            for number in range(SAMPLES):
                file.write({"x": image(number), "y": number})

    @staticmethod
    def read(folder: str) -> Any:
        """Read them."""
        from streaming import StreamingDataset

        return StreamingDataset(local=folder, batch_size=32, shuffle=True)

    @staticmethod
    def own(dataset: Any, **options: Any) -> Any:
        """Make the library's loader."""
        from streaming import StreamingDataLoader

        return StreamingDataLoader(dataset, **options)


def epochs_of_files(kind: Any, name: str) -> Rounds:
    """Measure the time per batch over an epoch of persistent workers."""
    options = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": "fork"}
    if name == WITHOUT:
        options = {"num_workers": 0}
    with tempfile.TemporaryDirectory() as folder:
        kind.write(folder)
        dataset = kind.read(folder)
        make = kind.own
        if name != kind.loader:
            make = import_module(HOMES.get(name, HOMES[TORCH])).DataLoader
        loader = make(dataset, batch_size=32, **options)
        yield partial(measured, loader)
        del loader


def case_of_files(name: str, kind: Any) -> Case:
    """Declare a case of a library's files."""
    contenders = tuple(
        Contender(
            loader, partial(epochs_of_files, kind, loader), ("torch", *kind.needs), loader == OURS
        )
        for loader in (OURS, TORCH, kind.loader, WITHOUT)
    )
    title = f"{kind.__doc__.partition(' ')[0]} files of small images, read in order"
    return Case(f"peers_{name}", title, "µs/batch", contenders, goals=(part(1),))


# -- the same images from memory


def tf_data(load: Load) -> Rounds:
    """`tf.data`, whose operations are all compiled."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    tensors = import_module("tensorflow").data.Dataset.from_tensor_slices
    samples = load.batches * load.batch_size
    dataset = tensors((np.zeros((samples, 3, 32, 32), np.float32), np.arange(samples)))
    yield partial(measured, dataset.shuffle(samples).batch(load.batch_size).prefetch(10))


MEMORY = Load(Images, scaled(2000, 10))
ROWS = Work(Rows, scaled(2000, 10), microseconds)

# -- short epochs, each of which starts its workers

SHORT = MEMORY._replace(batches=5)


class Started:
    """Epochs of a manager that starts for each epoch."""

    def __init__(self, manager: Any) -> None:
        self.manager = manager

    def __iter__(self) -> Iterator[Any]:
        with self.manager.start() as batches:
            yield from batches


def short_epochs(name: str) -> Rounds:
    """Measure the milliseconds per epoch with workers from the fork server."""
    if name == SEQUENCE:
        loader: Any = Started(
            loaders.cseq_manager(cseq.MPSequence, replace(ROWS, batches=SHORT.batches))
        )
    else:
        more = {"persistent_workers": False, "multiprocessing_context": "forkserver"}
        loader = SHORT.loader(name, **more)
    yield lambda: measured(loader) * SHORT.batches / 1e3


class Nested:
    """Training batches, with a validation after every 25th."""

    def __init__(self, name: str) -> None:
        self.training = MEMORY._replace(batches=50).loader(name)
        self.validation = SHORT.loader(name, persistent_workers=False)

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self.training, 1):
            yield batch
            if number % 25 == 0:
                yield from self.validation


def nested(name: str) -> Rounds:
    """Measure the time per batch of either loader."""
    yield partial(measured, Nested(name))


# -- cases


def of_torch(measure: Callable[..., Rounds], *names: str) -> tuple[Contender, ...]:
    """Declare contenders that are DataLoader classes."""
    return tuple(
        Contender(name, partial(measure, name), ("torch",), name == OURS) for name in names
    )


CASES = (
    case_of_workers("workers_4", "4 workers, 5 ms asleep a batch", SLEEPY, bare_threads),
    case_of_workers(
        "workers_8",
        "8 workers, 5 ms asleep a batch",
        replace(SLEEPY, num_workers=8, buffer=16),
        bare_threads,
    ),
    case_of_workers("workers_8_busy", "8 workers, 1 ms of Python a batch", BUSY, bare_on_all_cores),
    *(
        case_of_threads(
            name,
            f"32 JPEG files, {name}, cropped",
            partial(Cropped, name),
            scaled(60, 4),
            group="peers_jpeg",
            needs=("pillow", *needs),
        )
        for name, needs in DECODERS.items()
    ),
    case_of_files("webdataset", Tar),
    case_of_files("litdata", Lit),
    case_of_files("mosaic", Mosaic),
    Case(
        "peers_tfdata",
        "Small images from memory",
        "µs/batch",
        (
            *of_torch(lambda name: epochs(MEMORY, name), OURS, TORCH),
            Contender(SEQUENCE, partial(loaders.cseq_processes, ROWS), (), True),
            Contender("tf.data", partial(tf_data, MEMORY), ("tensorflow-cpu",)),
            Contender("bare loop", partial(loaders.bare, ROWS)),
        ),
        limit="bare loop",
        goals=(part(1), part(1, SEQUENCE)),
    ),
    Case(
        "peers_epochs_forkserver",
        "Epochs of 5 batches, new workers by forkserver for each",
        "ms/epoch",
        (
            *of_torch(short_epochs, OURS, TORCH),
            Contender(SEQUENCE, partial(short_epochs, SEQUENCE), (), True),
        ),
        goals=(part(1), part(1, SEQUENCE)),
    ),
    Case(
        "peers_nested",
        "Training, with a validation of 5 batches by new workers behind each 25th",
        "µs/batch",
        of_torch(nested, OURS, TORCH),
        goals=(part(1),),
    ),
)
