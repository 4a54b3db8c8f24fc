"""A trainer's view of a loader, as a list of events that can be compared.

A loader runs in its own process, where it may hang or crash, and where its state stays.
"""

import contextlib
import faulthandler
import gc
import hashlib
import importlib
import json
import os
import pickle
import random
import re
import signal
import tempfile
import threading
import traceback
import warnings
from typing import Any

import case as cases
import numpy as np
import parts
import torch

# A case that takes longer counts as hanging.
SECONDS = 90
# The most batches of one epoch, which end a loader without an end.
MOST = 60

# The errors for samples of unequal size; a torch worker raises the second one if the first sample
# is large enough for all of them to fit in the batch's memory.
UNEQUAL = ("stack expects each tensor to be equal size", "Trying to resize storage that is not")

# Objects of which a trainer only knows the type.
NAMED = (parts.Sampler, parts.Collate, parts.Init, parts.Map, parts.Stream, torch.Generator)
ALL = ["torch", "numpy", "random"]

Event = list[Any]


# -- values


def plain(value):
    """Return a value in plain values: its type, its dtype and shape, and all its bits."""
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, torch.Tensor):
        bits = ""
        if value.numel():
            # Without elements, strides may be numpy's: zero.
            bits = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes().hex()
        about = [name, str(value.dtype), list(value.shape), value.requires_grad]
        if value.numel() > 1000:
            return [*about, value.stride(), hashlib.sha256(bits.encode()).hexdigest()]
        return [*about, value.stride() if bits else [], shown(value), bits]
    if isinstance(value, (np.ndarray, np.generic)):
        writeable = isinstance(value, np.generic) or value.flags.writeable
        about = [name, str(value.dtype), list(value.shape), writeable]
        return [*about, shown(value), value.tobytes().hex()]
    if isinstance(value, dict):
        return [name, [[plain(key), plain(each)] for key, each in value.items()]]
    if isinstance(value, (list, tuple)):
        return [name, [plain(each) for each in value]]
    if isinstance(value, NAMED):
        return [name]
    return [name, bare(repr(value))]


def bare(text):
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from tensors(each)


def fill(tensor):
    """Write to all of a tensor's memory; torch refuses if elements are in several places."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    if tensor.numel():
        tensor.as_strided((1 + sum((size - 1) * step for size, step in steps),), (1,)).fill_(0)


def shown(value):
    return " ".join(repr(value.tolist()).split())


def failure(error):
    """Return an error's type, the first line of its text, and its worker.

    torch's text begins "Caught X in DataLoader worker process w." and ends with the original text,
    in a traceback; others may keep the text, and have that line in a note, or the worker in the
    cause.
    """
    text = bare(str(error))
    if "UFunc" in type(error).__qualname__ + text[:24]:
        return ["one of numpy's, which torch cannot raise again by its type"]
    lines = (text, *getattr(error, "__notes__", ()))
    worker = [line.split("\n")[0] for line in lines if line.startswith("Caught ")]
    place = getattr(error.__cause__, "place", "")
    if place and not worker:
        worker = [f"Caught {type(error).__name__} in {place}."]
    if text.startswith("Caught "):
        name = re.match(r"Caught (\S+)", text).group(1)
        said = re.findall(rf"^(?:[\w.]+\.)?{re.escape(name)}(?:: (.*))?$", text, re.MULTILINE)
        text = said[-1] if said else text
    # The name of an iterator's class does not matter.
    first = re.sub(r"\w+Iter(ator)?\b", "Iter", text.split("\n")[0])
    if first.startswith(UNEQUAL):
        first = UNEQUAL[0]
    return [f"{type(error).__module__}.{type(error).__qualname__}", first, *worker]


def generators(loader):
    """Return a digest of every state that a loader may change in the trainer."""
    states = [torch.get_rng_state().numpy().tobytes(), random.getstate()]
    states.append(np.random.get_state())  # noqa: NPY002
    for holder in (loader, getattr(loader, "sampler", None)):
        given = getattr(holder, "generator", None)
        states.append(None if given is None else given.get_state().numpy().tobytes())
    return " ".join(hashlib.sha256(repr(state).encode()).hexdigest()[:8] for state in states)


# -- a trainer


class Trainer:
    """Does the steps of a case, and records what it sees."""

    def __init__(self, case, cls):
        self.case, self.cls = case, cls
        self.events, self.warned, self.loader, self.begun = [], [], None, 0
        # Batches of this step, as they were and as they are.
        self.kept = []
        # The smallest tensor of each batch.
        self.leaves = []

    def see(self, name, *values):
        for category, message in self.warned:
            text = message.split("\n")[0]
            if "multi-threaded, use of fork" not in text:
                self.events.append(["warning", category, bare(text)])
        self.warned.clear()
        self.events.append([name, *values])

    def warn(self, message, category, *_):
        """Record a warning, except a worker thread's: a process's would not be seen."""
        if not threading.current_thread().name.startswith("cseq-w"):
            self.warned.append((category.__name__, str(message)))

    @contextlib.contextmanager
    def seeing(self, name):
        """Record an error as an event."""
        try:
            yield
        except StopIteration:
            self.see(f"{name}: end")
        except Exception as error:
            self.see(f"{name}: error", *failure(error))

    def run(self):
        torch.manual_seed(self.case.seed)
        np.random.seed(self.case.seed)  # noqa: NPY002
        random.seed(self.case.seed)
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = self.warn
            with self.seeing("loader"):
                self.loader = cases.loader(self.case, self.cls)
                self.see("loader", plain(attributes(self.loader)), generators(self.loader))
                for step in self.case.steps:
                    name, _, value = step.partition(" ")
                    with self.seeing(step):
                        getattr(self, name)(value)
                    self.drop()
                    gc.collect()
                    if name != "resume":
                        # A new loader has its own draws.
                        self.see(f"after {step}", generators(self.loader))
                self.see("leaves", all(plain(leaf) == was for was, leaf in self.leaves))
                self.see("attributes", plain(attributes(self.loader)))
                self.see("asked for a state with each key", self.asks())
        return self.events

    def batch(self, iterator, name):
        """Take a batch; return False if there is none."""
        try:
            batch = next(iterator)
        except StopIteration:
            self.see(f"{name}: end", *self.taken())
            return False
        except Exception as error:
            self.see(f"{name}: error", *failure(error))
            return not self.case.stop
        was = plain(batch)
        if not self.case.kept:
            self.kept.append((was, batch))
        else:
            leaves = sorted(tensors(batch), key=torch.Tensor.numel)[:1]
            self.leaves += [(plain(leaf), leaf) for leaf in leaves]
        self.see(name, was, *self.taken())
        return True

    def drop(self):
        """Inspect a step's batches again: they must be unchanged and writable."""
        self.see("kept", all(plain(batch) == was for was, batch in self.kept))
        # In a persistent worker, a sample of torch's may be the data set's memory.
        made = self.case.batch_size is not None and self.case.collate is None
        if made or not self.case.persistent_workers:
            for _, batch in self.kept:
                for tensor in tensors(batch):
                    fill(tensor)
        self.kept.clear()

    def samplers(self):
        return self.loader.batch_sampler, self.loader.sampler

    def taken(self):
        """Return the number of keys taken from our sampler."""
        return [each.taken for each in self.samplers() if isinstance(each, parts.Sampler)]

    def asks(self):
        """Return whether a sampler with a state was asked for it more than twice an epoch."""
        return any(getattr(each, "asked", 0) > 2 * self.begun + 1 for each in self.samplers())

    def take(self, iterator, name, most=MOST):
        """Take batches; return False at their end."""
        return all(self.batch(iterator, f"{name} {number}") for number in range(most))

    def begin(self):
        iterator = iter(self.loader)
        self.begun += 1
        self.see("iter", iterator is iter(iterator), *self.taken())
        with self.seeing("len of iter"):
            self.see("len of iter", len(iterator))
        return iterator

    # -- the steps

    def epoch(self, value):
        iterator = self.begin()
        self.take(iterator, "batch")
        if not self.case.stop:
            self.batch(iterator, "again")

    def forever(self, value):
        """Run epochs without a pause in between."""
        for _ in range(int(value)):
            self.begun += 1
            self.take(iter(self.loader), "batch")

    def break_(self, value):
        self.take(self.begin(), "batch", int(value))

    def two(self, value):
        """Alternate between two iterators; the second one is dropped first."""
        first, second = self.begin(), self.begin()
        self.see("two", first is second)
        for number in range(int(value)):
            self.batch(first, f"first {number}")
            self.batch(second, f"second {number}")
        del second
        self.take(first, "first")

    def resume(self, value):
        """Take the rest of an epoch, from a new loader if there are states, while the old one
        continues.

        A kept state does not change. It is empty if torch's own iterator is used.
        """
        iterator = self.begin()
        if not self.take(iterator, "batch", int(value)):
            return
        has_state = hasattr(self.loader, "state_dict")
        state = self.loader.state_dict() if has_state else {}
        was, old = pickle.dumps(state), iterator
        if state:
            self.loader = cases.loader(self.case, self.cls)
            self.loader.load_state_dict(state)
            iterator = iter(self.loader)
            self.rest(old, 2)
        rest = self.rest(iterator)
        is_right = not has_state or bool(state) != self.case.falls_back
        # The warnings are of one more loader.
        self.warned.clear()
        self.see("rest", rest)
        self.see("state stays", is_right and pickle.dumps(state) == was)

    def rest(self, iterator, most=MOST):
        found = []
        for _ in range(most):
            try:
                found.append(plain(next(iterator)))
            except StopIteration:
                break
            except Exception as error:
                found.append(failure(error))
        return found

    def len(self, value):
        self.see("len", len(self.loader))

    def draw(self, value):
        self.see("draw", plain(parts.drawn(ALL)))

    def pickle(self, value):
        self.loader = pickle.loads(pickle.dumps(self.loader))
        self.see("pickle", plain(attributes(self.loader)))

    def num_workers(self, value):
        self.loader.num_workers = int(value)

    def collate(self, value):
        self.loader.collate_fn = parts.Collate(value)

    def generator(self, value):
        self.loader.generator = torch.Generator().manual_seed(9)


setattr(Trainer, "break", Trainer.break_)


def attributes(loader):
    """Return the attributes that torch's class has, objects by their type."""
    own = {*vars(torch.utils.data.DataLoader(range(1)))} - {"_iterator"}
    there = {name: value for name, value in vars(loader).items() if name in own}
    for name in ("batch_sampler", "sampler", "dataset", "collate_fn", "worker_init_fn"):
        value = there.get(name)
        there[name] = None if value is None else type(value).__qualname__
    there["_iterator"] = None if getattr(loader, "_iterator", None) is None else "some"
    there["multiprocessing_context"] = type(loader.multiprocessing_context).__name__
    return dict(sorted(there.items()))


# -- in a separate process


class Observation:
    """A trainer that runs in its own process; `events` waits for the end."""

    def __init__(self, case, path):
        self.result, self.stderr = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        with warnings.catch_warnings():
            # A fork beside other threads causes a warning.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setsid()
                os.dup2(self.stderr.fileno(), 2)
                self.child(case, path)
            except BaseException:
                traceback.print_exc(file=open(2, "w", closefd=False))
            finally:
                # This is reached only without a result.
                os._exit(1)

    def child(self, case, path):
        # Without this, each collection would visit all of torch.
        gc.freeze()
        # OpenMP would wait for threads that the fork lacks.
        torch.set_num_threads(1)
        # dump_traceback_later would wait for pytest's thread of that name, which the fork lacks.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        faulthandler.enable(2)
        faulthandler.register(signal.SIGALRM, file=2, all_threads=True, chain=True)
        signal.alarm(SECONDS * (3 if case.method in cases.FRESH else 1))
        module, _, name = path.partition(":")
        events = Trainer(case, getattr(importlib.import_module(module), name)).run()
        self.result.write(json.dumps(events).encode())
        self.result.flush()
        os._exit(0)

    def events(self):
        _, status = os.waitpid(self.pid, 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with self.result, self.stderr:
            if status == 0:
                return json.loads(read(self.result))
            return [["hang or crash", status, read(self.stderr).decode(errors="replace")[:8000]]]


def read(file):
    file.seek(0)
    return file.read()


def observe(case, *paths):
    """Return the events of a case with each of the classes, which run at the same time."""
    started = [Observation(case, path) for path in paths]
    return [each.events() for each in started]


# -- comparing


def alike(case, events):
    """Return the events in a form that all correct loaders share."""
    if case.is_unordered:
        # Ready batches come first, so every epoch is sorted.
        found = [event[1:2] for event in events if event[0].startswith("batch ")]
        batches = sorted(found, key=repr)
        return [event for event in events if not event[0].startswith("batch ")] + batches
    return events


def lacks_fetcher(torchs, other):
    """Return whether torch raises UnboundLocalError where others raise the error of `init` again.

    Its worker raises that error once, and then uses the fetcher that was not made.
    """
    return (
        torchs[0] == other[0]
        and "error" in torchs[0]
        and torchs[1:2] == ["builtins.UnboundLocalError"]
        and "'fetcher'" in torchs[2]
    )


def lacking(first, second, pattern, stop=None):
    """Return what one loader's events with such a name have, and another's have not in order."""
    mine, theirs = (
        [event[1:stop] for event in events if re.search(pattern, event[0])]
        for events in (first, second)
    )
    rest = iter(theirs)
    return [each for each in mine if each not in rest]


def difference(case, first, second):
    """Return the first two events that differ, or None."""
    first, second = alike(case, first), alike(case, second)
    if case.fails("sampler") and case.num_workers > 0:
        # If a sampler fails, torch loses the batch or exception received in that call; others may
        # return it.
        for batch in lacking(first, second, r"^(batch|first|second) \d+$", 2):
            return batch, "not given, or in another order"
        for error in lacking(first, second, "error"):
            return error, "not raised, or in another order"
        first, second = (
            [event[1:] for event in events if re.match("(?!.*error).*(after|loader)", event[0])]
            for events in (first, second)
        )
    for a, b in zip(first, second, strict=False):
        if a != b and not lacks_fetcher(a, b):
            return a, b
    if len(first) != len(second):
        return ("the end", *first[len(second) :][:1]), ("the end", *second[len(first) :][:1])
    return None
