"""examples/pretrain_lm.py, the script of the page on pre-training: killed and resumed."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    Run = tuple[list[str], list[list[str]]]

pytest.importorskip("torch.distributed.fsdp", reason="torch has no FSDP2")
pytestmark = pytest.mark.needs("fork")

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "pretrain_lm.py"
STEPS, KILLED, SAVED = 8, 7, 5
# Forks the ranks as torchrun would start them; each records its batches, and may be killed.
RANKS = """
import json, os, runpy, signal, socket, sys, warnings
import torch._dynamo, torch.distributed.checkpoint, torch.distributed.fsdp  # before the forks
import cseq

path, name, number, kill_at, *args = sys.argv[1:]
warnings.filterwarnings("ignore")  # of torch's own

class Recorded(cseq.MPSequence):
    def __iter__(self):
        with open(f"{name}.{os.environ['RANK']}", "w") as file:
            for count, batch in enumerate(super().__iter__()):
                if count == int(kill_at):
                    os.kill(os.getpid(), signal.SIGKILL)
                rows = [batch[key].tolist() for key in ("input_ids", "labels", "document_ids")]
                print(json.dumps(rows), file=file, flush=True)
                yield batch

with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
pids = []
for rank in range(int(number)):
    pids.append(os.fork())
    if not pids[-1]:
        os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": number}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
        cseq.MPSequence = Recorded
        sys.argv = [path, *args]
        code = 1
        try:
            runpy.run_path(path, run_name="__main__")
            code = 0
        finally:
            sys.stdout.flush()
            if code:
                sys.excepthook(*sys.exc_info())
            os._exit(code)
print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]))
"""


@pytest.fixture
def run(tmp_path, run_prepared):
    """Return a function that runs the script on ranks, for its output and its batches' rows."""

    def run_on(ranks, name, folder, kill_at=-1):
        options = ["--out", folder, "--steps", f"{STEPS}"]
        given = [str(SCRIPT), name, f"{ranks}", f"{kill_at}", *options]
        done = run_prepared(RANKS, *given, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
        *lines, codes = done.stdout.splitlines()
        assert json.loads(codes) == [0 if kill_at < 0 else -9] * ranks, done.stderr
        return lines, rows_of(tmp_path, name, ranks)

    return run_on


def rows_of(folder, name, ranks):
    """Return the rows of each step from all ranks: tokens, labels, documents."""
    parts = [(folder / f"{name}.{rank}").read_text().splitlines() for rank in range(ranks)]
    steps = []
    for step in zip(*parts, strict=True):
        each = [zip(*json.loads(part), strict=True) for part in step]
        steps.append([json.dumps(row) for rows in each for row in rows])
    return steps


def test_a_killed_job_goes_on_with_any_ranks(run):
    """It gets the rows after the checkpoint; on as many ranks, it prints the same losses."""
    lines, steps = run(2, "whole", "whole")
    assert [line.split(":")[0] for line in lines] == [f"step {k + 1}" for k in range(STEPS)]
    losses = [float(line.rpartition(" ")[2]) for line in lines]
    assert losses[-1] < losses[0]
    assert len({row for step in steps for row in step}) == 12 * STEPS
    assert run(2, "killed", "killed", kill_at=KILLED) == (lines[:KILLED], steps[:KILLED])
    for ranks in (3, 2):
        (told, *after), rest = run(ranks, f"rest{ranks}", "killed")
        assert told == f"continues after step {SAVED}"
        assert [*map(sorted, rest)] == [*map(sorted, steps[SAVED:])]
        assert ranks != 2 or (rest, after) == (steps[SAVED:], lines[SAVED:])
