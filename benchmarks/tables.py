"""Update figures in the README and the pages from results: `python benchmarks/tables.py`.

The figures come from latest.json. The table in performance.md is regenerated. Elsewhere, a sentence
is found by its words, and its figures are replaced: `{case: contender}`, that figure *less* another
contender's, or *over* it. A test compares the pages with the output of this program.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
HEAD = "|work|cseq|torch|best peer|limit|\n|---|---:|---:|---:|---:|\n"
PEERS = "SPDL|Grain|grain|lhotse|trl|numpy|queue|multiproc|concurrent|Stateful|WebLoader"
UNITS = ("ns", "µs", "ms", "s")

# Work, case and contender, and torch's and the peers' names if they are not the usual ones.
ROWS = (
    ("32 floats from two processes", "small_processes", "cseq, 2 workers, torch imported"),
    ("the same from threads", "small_threads", "cseq, 2 workers"),
    ("4.8 MB of images", "large_uint8", "cseq, fresh array"),
    ("4.8 MB in a dict of 113 arrays", "dict_113", "cseq, 2 workers"),
    ("19 MB in a `UserDict`", "objects", "cseq, a UserDict", "torch DataLoader, a UserDict"),
    ("32 samples, each a tensor", "dataloader_tensors", "cseq.DataLoader"),
    ("32 dicts of 20 tensors", "dataloader_dicts", "cseq.DataLoader"),
    ("32 JPEG files in threads", "peers_jpeg_simplejpeg", "cseq.DataLoader, threads"),
    ("WebDataset's shards", "peers_webdataset", "cseq.DataLoader"),
    ("256 images, 38 MB", "dataloader_large", "cseq.DataLoader"),
    ("32 dataclasses, CPU time", "dataloader_dataclasses", "cseq.DataLoader"),
    ("8 workers, 5 ms per batch", "computing", "cseq, processes"),
    ("the same, 100 ms for one in 20", "computing_uneven", "cseq, buffer=128"),
    ("start to first batch", "start", "cseq, forkserver", "torch DataLoader, spawn"),
    ("the same, forked `DataLoader`", "dataloader_start", "cseq.DataLoader"),
    (
        "a new epoch of 10⁶ samples",
        "first_batch",
        "cseq, 10^6 samples",
        "torch DataLoader, 10^6 samples",
    ),
    ("resume at 99 % of 10⁸ samples", "resume", "cseq, at 99 %"),
    ("shuffle of 10⁸, per sample", "permutation_1e8", "cseq.permutation", "torch.randperm"),
    ("buckets, per sample", "orders_buckets_read", "cseq", "", "lhotse"),
    ("packing, per sample", "orders_packed_made", "cseq", "", "trl|grain"),
    (
        "memory of the order, per sample",
        "index_memory",
        "cseq, 10^8 samples",
        "torch DataLoader, 10^7 samples",
    ),
    ("idle workers, of a core", "idle", "cseq, processes"),
)

PICTURE = (
    ("JPEG files, cropped and flipped, 32 per batch", "picture_photographs"),
    ("tokens", "picture_tokens"),
    ("a table of 113 columns", "picture_table"),
    ("4.8 MB of images", "picture_images"),
    ("20 small tensors", "picture_dicts"),
)
THREADS = (
    ("JPEG files, Pillow", "threads_jpeg"),
    ("windows of a token file", "threads_tokens"),
    ("4.8 MB of images by an index", "threads_images"),
    ("300 000 records in a list", "threads_dicts"),
    ("Hugging Face rows", "threads_arrow"),
    ("1 ms of Python code", "threads_python"),
    ("one sample after 20 ms, 32 workers", "threads_remote"),
)


def picture(work: str, case: str) -> str:
    """Return the README's line for a case: torch's figure, and how many times as fast ours is."""
    torch = f"{case}: torch DataLoader"
    ours = " | ".join(f"{{{torch} over {name}}}" for name in ("cseq.DataLoader", "MPSequence"))
    return f"| {work} | {{{torch}}} | {ours} |"


def threads(work: str, case: str) -> str:
    """Return a case's line in the table of processes and threads."""
    names = "cseq.DataLoader, processes", "cseq.DataLoader, threads", "SPDL threads"
    return (
        f"| {work} | {' | '.join(f'{{{case}: {name}}}' for name in (*names, 'torch DataLoader'))} |"
    )


SENTENCES = {
    "README.md": """
a small batch costs {small_processes: cseq, 2 workers, torch imported}, against
{small_processes: torch DataLoader} with torch's `DataLoader`. A dict of 113 arrays costs
{dict_113: cseq, 2 workers}, against {dict_113: torch DataLoader}. Batches of 4.8 MB arrive at
{large_uint8: cseq, fresh array}, against {large_uint8: torch DataLoader}.

resuming at 99 % of 10⁸ samples takes {resume: cseq, at 99 %},

comes after {start: cseq, forkserver} (torch's `DataLoader`: {start: torch DataLoader, spawn} with
`spawn`, {start: torch DataLoader, fork} with `fork`).

"""
    + "\n\n".join(picture(*row) for row in PICTURE),
    "docs/explanation/performance.md": """
one array of 32 floats costs {parts_null_1: one array}, a pair {parts_null_1: a pair}, a dict of 20
{parts_null_1: a dict of 20}, a dict of 113 {parts_null_1: a dict of 113}. Tensors cost
{parts_cpu_1: one array}, {parts_cpu_1: a pair}, {parts_cpu_1: a dict of 20} and
{parts_cpu_1: a dict of 113}.

a call of `torch.from_numpy` takes {parts_cpu_1: torch.from_numpy}.

With `buffer=32`, cseq needs {computing_uneven: cseq, buffer=32} per batch; in order, the best
possible is {computing_uneven: best possible, 32 in hand}.

10⁹ samples** comes after {first_batch: cseq, 10^9 samples}
(10⁴: {first_batch: cseq, 10^4 samples}),
""",
    "docs/how-to/checkpoints.md": "{resume: cseq, at 99 %} at sample 99 million",
    "docs/how-to/processes-or-threads.md": """
| {start: cseq, fork} (`fork`), {start: cseq, forkserver} (`forkserver`), {start: cseq, spawn}
(`spawn`), plus your imports | {start: cseq, threads} |

"""
    + "\n\n".join(threads(*row) for row in THREADS)
    + """

| first batch of the 300 000 records | {threads_start: cseq.DataLoader, processes}
| {threads_start: cseq.DataLoader, threads} | | {threads_start: torch DataLoader} |
""",
}


class Run:
    """The medians of a run, formatted for the pages."""

    def __init__(self, report: dict[str, Any]) -> None:
        self.cases = {case["name"]: case for case in report["cases"]}
        about = report["machine"]
        cpu, cores = re.sub(r"\(R\)| Processor.*", "", about["cpu"]), about["cores"]
        self.machine = f"cseq {about['versions']['cseq']} on {cores} cores of an {cpu}"

    def medians(self, case: str) -> dict[str, float]:
        """The figures of a case, by contender."""
        contenders = self.cases[case]["contenders"]
        return {one["name"]: one["median"] for one in contenders if "median" in one}

    def figure(self, case: str, name: str) -> str:
        """A figure with its unit."""
        name, how, other = re.fullmatch(r"(.*?)(?: (less|over) (.*))?", name).groups()
        value = self.medians(case)[name]
        if how == "over":
            return f"{short(value / self.medians(case)[other])} ×"
        value -= self.medians(case)[other] if how == "less" else 0
        unit = re.sub(r"^CPU |/(?!s$).*| of .*", "", self.cases[case]["unit"])
        while value >= 1000 and unit in UNITS[:-1]:
            value, unit = value / 1000, UNITS[UNITS.index(unit) + 1]
        return f"{short(value)} {unit}"

    def row(
        self, work: str, case: str, ours: str, torch: str = "torch DataLoader", peers: str = PEERS
    ) -> str:
        """A line of the table, with the best of the peers."""
        found, best = self.medians(case), max if self.cases[case]["more_is_better"] else min
        peer = best(filter(re.compile(peers).match, found), key=found.get, default="")
        names = (ours, torch, peer, self.cases[case]["limit"])
        cells = [self.figure(case, name) if name in found else "" for name in names]
        cells[2] = f"{re.sub(r',.*| subprocess| mp_prefetch| threads', '', peer)} {cells[2]}"
        return f"|{work}|{'|'.join(map(str.strip, cells))}|\n"


def short(value: float) -> str:
    """Format a value with two digits, or as an integer."""
    return f"{value:#.2g}".rstrip(".") if value < 99.5 else f"{value:.0f}"


def updated(page: str, sentence: str, run: Run) -> str:
    """Return the page with updated figures in the sentence."""
    parts = re.split(r"\{(\w+): (.*?)\}", " ".join(sentence.split()))
    words = [re.escape(part).replace(r"\ ", r"\s+") for part in parts[::3]]
    found = [*re.finditer(r"([\d.]+\s+(?:\wB/)?[\w×]+)".join(words), page)]
    if len(found) != 1:
        raise ValueError(f"the page has this sentence {len(found)} times: {sentence}")
    figures = [*zip(parts[1::3], parts[2::3], strict=True)]
    for k, (case, name) in reversed([*enumerate(figures, 1)]):
        page = page[: found[0].start(k)] + run.figure(case, name) + page[found[0].end(k) :]
    return page


def pages() -> dict[Path, str]:
    """Return the pages with current figures."""
    run = Run(json.loads((RESULTS / "latest.json").read_text(encoding="utf-8")))
    result = {}
    for name, sentences in SENTENCES.items():
        page = (ROOT / name).read_text(encoding="utf-8")
        for sentence in sentences.strip().split("\n\n"):
            page = updated(page, sentence, run)
        if HEAD in page:
            before, rest = page.split(HEAD)
            rows = "".join(run.row(*row) for row in ROWS)
            page = before + HEAD + rows + rest[rest.index("\n\n") + 1 :]
        if "latest.md" in page and " cores of an " in page and run.machine not in page:
            raise ValueError(f"{name} does not say {run.machine!r}")
        result[ROOT / name] = page
    return result


if __name__ == "__main__":
    for path, page in pages().items():
        path.write_text(page, encoding="utf-8")
