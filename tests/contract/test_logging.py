"""Workers' log records reach the script's handlers once, for every start method."""

import pytest
from kinds import PROCESSES

METHODS = [kind.name for kind in PROCESSES]
# Start methods whose workers lack the script's configuration.
ANEW = [name for name in METHODS if name != "fork"]

LOADERS = """
import cseq, logging, sys, threading

log = logging.getLogger("mine.data")
logging.getLogger("cseq").setLevel("ERROR")  # which may have something to say on a busy machine


class Batches:
    def __getitem__(self, indices):
        for index in indices:
            self.note(int(index))
        return indices

    def note(self, index):
        log.info("sample %d", index)


def loader(worker, method, num_workers=2):
    options = {"num_workers": num_workers, "batch_size": 2, "shuffle": False, "out_type": "null"}
    return cseq.MPSequence(worker, 6, start_method=method, **options)


def loop(made):
    with made.start():
        return len(list(made))

"""

KINDS = """
class Data(Batches):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        self.note(int(index))
        return int(index)

logging.basicConfig(level="INFO", format="LOG %(message)s", stream=sys.stdout)
kind, method = sys.argv[1:]
if kind == "DataLoader":
    print(len(list(cseq.DataLoader(Data(), 2, num_workers=2, multiprocessing_context=method))))
else:
    print(loop(loader(Batches, method)))
"""


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["MPSequence", "DataLoader"])
def test_records_arrive_once(kind, method, run_script):
    """Each of the six records arrives once, for every loader."""
    if kind == "DataLoader":
        pytest.importorskip("torch")
    done = run_script(LOADERS + KINDS, kind, method)
    lines = sorted(done.stdout.splitlines())
    assert lines == ["3", *(f"LOG sample {k}" for k in range(6))], done.stderr


FIELDS = """
class Seen(logging.Handler):
    def emit(self, record):
        rows.append(record)

rows = []
logging.root.addHandler(Seen())
logging.root.setLevel("WARNING")
logging.getLogger("mine").setLevel("DEBUG")
logging.getLogger("mine.quiet").setLevel("ERROR")

class Many(Batches):
    def __init__(self):
        logging.getLogger("mine").debug("made")

    def note(self, index):
        if index:
            return
        log.debug("of %s", threading.Lock(), extra={"lock": threading.Lock(), "size": 3})
        logging.getLogger("other").info("too low")
        logging.getLogger("mine.quiet").warning("too low")
        library = logging.getLogger("library")
        library.addHandler(logging.NullHandler())
        library.warning("a library's")
        try:
            1 / 0
        except ZeroDivisionError:
            logging.getLogger("alone").exception("failed")
        for k in range(100):
            log.info("%d", k)

loop(loader(Many, sys.argv[1], num_workers=1))
first, record, library, failed, *rest = rows
print(first.name, first.levelname, first.getMessage(), {row.processName for row in rows})
print(record.name, record.getMessage()[:11], record.funcName, record.size, "lock" in record.lock)
print(library.name, library.getMessage())
print(failed.name, failed.getMessage(), failed.exc_text.splitlines()[-1])
print([row.getMessage() for row in rest] == [str(k) for k in range(100)])
"""


@pytest.mark.parametrize("method", ANEW)
def test_what_arrives(method, run_script):
    """Handlers get records of the script's levels, in a worker's order, with picklable content."""
    done = run_script(LOADERS + FIELDS, method)
    assert done.stdout.splitlines() == [
        "mine DEBUG made {'cseq-w0'}",
        "mine.data of <unlocke note 3 True",
        "library a library's",
        "alone failed ZeroDivisionError: division by zero",
        "True",
    ], done.stderr


OWN = """
import functools

logging.basicConfig(level="INFO", format="TRAINER %(message)s", stream=sys.stdout)

class Own(Batches):
    def __init__(self, late):
        self.late = late
        if not late:
            logging.basicConfig(level="INFO", format="OWN %(message)s", stream=sys.stdout)

    def note(self, index):
        if self.late and not index:
            handler = logging.StreamHandler(sys.stdout)
            handler.setFormatter(logging.Formatter("OWN %(message)s"))
            logging.root.addHandler(handler)
        super().note(index)

made = functools.partial(Own, sys.argv[2] == "late")
print(loop(loader(made, sys.argv[1], num_workers=1)))
"""


@pytest.mark.parametrize("when", ["early", "late"])
@pytest.mark.parametrize("method", ANEW)
def test_a_worker_that_configures_logging(method, when, run_script):
    """Its records go to its own handlers only."""
    done = run_script(LOADERS + OWN, method, when)
    lines = sorted(done.stdout.splitlines())
    assert lines == ["3", *(f"OWN sample {k}" for k in range(6))], done.stderr


HANDLERS = """
class Slow(logging.Handler):
    def emit(self, record):
        if record.name == "mine.data":
            over.wait()
            seen.append(record.getMessage())
            raise ValueError("a handler's")

over, seen = threading.Event(), []
logging.root.addHandler(Slow())
logging.root.setLevel("INFO")
with loader(Batches, sys.argv[1]).start() as batches:
    print(len(list(batches)), len(seen))
    over.set()
print(sorted(seen) == [f"sample {k}" for k in range(6)])
"""


@pytest.mark.parametrize("method", ANEW)
def test_handlers_that_wait_or_raise(method, run_script):
    """They delay no batch and see every record; their exceptions are printed."""
    done = run_script(LOADERS + HANDLERS, method)
    assert done.stdout.splitlines() == ["3 0", "True"], done.stderr
    assert done.stderr.count("ValueError: a handler's") == 6


FORKING = """
import os

class Forks(Batches):
    def note(self, index):
        if index == 0:
            pid = os.fork()
            if pid == 0:
                log.warning("of a child")
                os._exit(0)
            os.waitpid(pid, 0)

logging.basicConfig(format="TRAINER %(message)s", stream=sys.stdout)
print(loop(loader(Forks, sys.argv[1])))
"""


@pytest.mark.needs("Linux")
@pytest.mark.parametrize("method", ANEW)
def test_a_process_that_a_worker_forks(method, run_script):
    """It is not connected to the trainer: it logs like a process without a configuration."""
    done = run_script(LOADERS + FORKING, method)
    assert done.stdout == "3\n"
    assert done.stderr == "of a child\n"
