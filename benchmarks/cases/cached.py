"""`cseq.cached`: photographs that are decoded once and augmented in each epoch."""

from __future__ import annotations

import io
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import cseq
from cases.dataloader import processor
from harness.case import Case, Contender, Goal, scaled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SAMPLES, BATCH = scaled(640, 64), 32
SIZES = {"400 × 500": (400, 500), "800 × 1000": (800, 1000)}
LIMIT, CACHED, DECODED = "arrays in memory", "cseq.cached", "decoded each time"


class Photographs:
    """JPEG files of one picture, decoded by Pillow, with a short side of 256."""

    def __init__(self, size: tuple[int, int]) -> None:
        from PIL import Image

        draw = np.random.default_rng(0)
        coarse = draw.integers(0, 256, (size[0] // 16, size[1] // 16, 3), np.uint8)
        smooth = np.asarray(Image.fromarray(coarse).resize(size[::-1], Image.Resampling.BICUBIC))
        grain = np.clip(smooth + draw.normal(0, 6, smooth.shape), 0, 255).astype(np.uint8)
        file = io.BytesIO()
        Image.fromarray(grain).save(file, "jpeg", quality=90)
        self.data = file.getvalue()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        import torch
        from PIL import Image

        image = Image.open(io.BytesIO(self.data)).convert("RGB")
        scale = 256 / min(image.size)
        image = image.resize((round(image.width * scale), round(image.height * scale)))
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous(), index


class Augmented:
    """Crops a random part, resizes it to 224 × 224, flips it at random, and normalizes it."""

    def __init__(self, pictures: Any) -> None:
        self.pictures = pictures

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> Any:
        from torch.nn.functional import interpolate

        image, label = self.pictures[index]
        height, width, top, left, flip = cseq.rng().integers((130, 130, 100, 100, 2))
        part = image[None, :, top : top + 100 + height, left : left + 100 + width].float()
        part = interpolate(part, (224, 224), mode="bilinear", antialias=True)[0]
        return ((part.flip(2) if flip else part) - 118.0) / 58.0, label


def epochs(size: tuple[int, int], name: str) -> Iterator[Callable[[], float]]:
    """Measure the CPU time per batch in an epoch of persistent workers, after a warm-up epoch."""
    pictures: Any = Photographs(size)
    if name == CACHED:
        pictures = cseq.cached(pictures, "1 GB")
    elif name == LIMIT:
        picture, _ = pictures[0]
        pictures = [(picture.clone(), number) for number in range(SAMPLES)]
    options: Any = {"num_workers": 2, "persistent_workers": True, "rng": "batch"}
    loader = cseq.DataLoader(Augmented(pictures), BATCH, shuffle=True, **options)
    yield lambda: processor(loader) / 1e3


def case(name: str, size: str, at_least: float) -> Case:
    """Declare a case for photographs of one size."""
    return Case(
        f"cached_{name}",
        f"JPEG files of {size}, resized crop, flip, normalize: CPU time of a batch of {BATCH}",
        "ms",
        tuple(
            Contender(
                each, partial(epochs, SIZES[size], each), needs=("torch", "pillow"), ours=True
            )
            for each in (CACHED, DECODED, LIMIT)
        ),
        limit=LIMIT,
        goals=(
            Goal("cached: of arrays in memory", lambda f: f[CACHED] / f[LIMIT], at_most=1.1),
            Goal("each time: of cached", lambda f: f[DECODED] / f[CACHED], at_least=at_least),
        ),
    )


CASES = (case("jpeg", "400 × 500", 3.3), case("jpeg_large", "800 × 1000", 7))
