"""torchtitan's own trainer on rows of `cseq.tokens`, on gloo ranks without a GPU."""

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import cseq

pytest.importorskip("torchtitan")

from recipes import RECIPES
from token_data import random_documents, write_flat, write_megatron

ROW, SAVED = 64, 6
CONFIGS = """
from with_torchtitan import TokenDataLoader, pretrain, tokens

def held_out(length):
    return tokens.Rows(tokens.Flat("held_out.bin", dtype="uint16", end=0), length)

def validated():
    config = pretrain()
    config.validator.enable, config.validator.freq, config.validator.steps = True, 8, -1
    config.validator.dataloader = TokenDataLoader.Config(rows=held_out, num_workers=0)
    return config
"""
ALONE = {"TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": "1"}
WORDLEVEL = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
UNUSED = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
TOKENIZER = {"version": "1.0", "added_tokens": [], "model": WORDLEVEL, **dict.fromkeys(UNUSED)}


class Runner:
    """Runs legs of `titan_legs`, each in its own folder."""

    def __init__(self, folder, path):
        self.folder, self.path, self.ended = folder, path, {}

    def run(self, name, behind=None, **leg):
        """Run a leg once, after another one in its checkpoints; return the ranks' batches."""
        if name not in self.ended:
            folder = self.folder / name
            shutil.copytree(self.folder / (behind or "data"), folder)
            done = subprocess.run(
                [sys.executable, Path(__file__).with_name("titan_legs.py"), json.dumps(leg)],
                cwd=folder, capture_output=True, text=True, check=False,
                env=os.environ | ALONE | {"PYTHONPATH": self.path},
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            self.ended[name] = json.loads(done.stdout.splitlines()[-1])
        return self.ended[name]

    def whole(self):
        return self.run("whole", config="validated")

    def resumed(self, **leg):
        """Two ranks are killed in step 8; the leg continues from their checkpoint of step 6."""
        assert self.run("killed", kill_at=SAVED + 2) is None
        return self.run(json.dumps(leg), "killed", **leg)


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    """Write the documents of the recipe's config."""
    folder = tmp_path_factory.mktemp("titan")
    data = folder / "data"
    rng = np.random.default_rng(1)

    def documents(number):
        return [[k % 2000 + 1 for k in each] for each in random_documents(rng, number, ROW)]

    (data / "tokenizer").mkdir(parents=True)
    (data / "tokenizer" / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (data / "configs.py").write_text(CONFIGS)
    write_megatron(data / "web_text_document", documents(60))
    for name, number in (("code", 30), ("held_out", 20)):
        write_flat(data / f"{name}.bin", [[*each, 0] for each in documents(number)])
    return Runner(folder, os.pathsep.join([str(Path(cseq.__file__).parents[1]), str(RECIPES)]))


def steps_of(run):
    """Return the rows of each step from all ranks: triples of tokens, positions, labels."""
    steps = {}
    for rank in run:
        for batch in rank["batches"]:
            steps.setdefault(batch["step"], []).extend(zip(*batch["rows"], strict=True))
    return steps


def is_whole(run):
    """Return whether all ranks had equally many batches and rows, and have no worker left."""
    counts = {len(rank["batches"]) for rank in run}
    sizes = {len(batch["rows"][0]) for rank in run for batch in rank["batches"]}
    return len(counts) == len(sizes) == 1 and not any(rank["left"] for rank in run)


def test_finite_data_end_on_all_ranks_at_once(runner):
    """All ranks train the same number of whole batches, and stop; no worker is left."""
    whole = runner.whole()
    assert is_whole(whole)
    assert len(whole[0]["batches"]) == len(whole[0]["losses"]) > SAVED


def test_the_validator_reads_all(runner):
    """With steps=-1, it reads its rows to the end, repeatedly, on all ranks."""
    first, *others = [rank["validation"] for rank in runner.whole()]
    steps = len(steps_of(runner.whole()))
    assert [step for step, _ in first] == [1, *range(8, steps + 1, 8)]
    assert others == [first]


def test_the_same_ranks_go_on_with_the_same_losses(runner):
    """After a resume with other workers, two ranks get their remaining rows and equal losses."""
    same = runner.resumed(workers=2)
    for before, after in zip(runner.whole(), same, strict=True):
        assert after["batches"] == [b for b in before["batches"] if b["step"] > SAVED]
        assert after["losses"] == {k: v for k, v in before["losses"].items() if int(k) > SAVED}


@pytest.mark.parametrize(("ranks", "rows", "workers"), [(1, 2, 0), (3, 1, 1)])
def test_other_ranks_go_on_with_the_next_rows(runner, ranks, rows, workers):
    """One rank and three, with halved batches, share the remaining rows that fill a step."""
    steps = steps_of(runner.whole())
    rest = [row for step, found in steps.items() if step > SAVED for row in found]
    other = runner.resumed(ranks=ranks, rows=rows, workers=workers)
    assert is_whole(other)
    assert min(steps_of(other)) == SAVED + 1
    found = [*itertools.chain(*steps_of(other).values())]
    common = min(len(found), len(rest))
    assert found[:common] == rest[:common]
    assert abs(len(found) - len(rest)) < 4
