"""A ticket server: worker processes that are fed with parcels."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from carrying import Trainer
from waiting import until

import cseq
from cseq.arguments import WorkerOptions
from cseq.encoding import failure
from cseq.fleet.server import TicketServer
from cseq.processes.deaths import TRIES
from cseq.stage import RAISED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Start = Callable[..., TicketServer]

SIZE = 3  # samples of a batch
PLAIN = WorkerOptions.checked(None, 100, None, "raise", None, 1, None)


class Draws:
    """Draws from all generators; now and then a batch is large."""

    def __getitem__(self, indices: np.ndarray[Any, Any]) -> Any:
        drawn = cseq.rng().integers(1000, size=len(indices))
        large = np.arange(indices[0] % 7 * 10_000)
        return indices, drawn, np.random.randint(1000), random.random(), large  # noqa: NPY002


class Fails(Draws):
    """Raises for one sample in ten."""

    def __getitem__(self, indices: np.ndarray[Any, Any]) -> Any:
        if 0 in indices % 10:
            raise LookupError(f"no sample {indices[0]}")
        return super().__getitem__(indices)


class Refuses:
    """Cannot be made."""

    def __init__(self) -> None:
        raise OSError(2, "no such file")


class Waits:
    """Waits for ever."""

    def __getitem__(self, indices: np.ndarray[Any, Any]) -> Any:
        signal.pause() if hasattr(signal, "pause") else threading.Event().wait()


class Dies:
    """Ends its process in one batch."""

    def __getitem__(self, indices: np.ndarray[Any, Any]) -> Any:
        if 7 in indices:
            os._exit(3)
        return indices


@pytest.fixture
def start() -> Iterator[Start]:
    """Start servers, and close them afterwards."""
    servers = []

    def start(worker: Any, num_workers: int = 2, **options: Any) -> TicketServer:
        server = TicketServer(worker, num_workers, SIZE, PLAIN._replace(**options))
        servers.append(server)
        server.start()
        return server

    yield start
    while servers:
        servers.pop().close()
    assert multiprocessing.active_children() == []


def in_test_mode(worker: Any, count: int, seed: int, epoch: int) -> list[Any]:
    """List the batches of an epoch as test mode makes them."""
    manager = cseq.MPSequence(
        worker, count * SIZE, batch_size=SIZE, shuffle=False, seed=seed, out_type="null"
    )
    with manager.start_test() as batches:
        manager.set_epoch(epoch)
        return list(batches)


class Client:
    """A trainer that asks a server for parcels of an epoch."""

    def __init__(self, server: TicketServer, count: int, seed: int = 5, epoch: int = 9) -> None:
        self.server = server
        self.trainer = Trainer(count, SIZE)
        self.numbers = self.trainer.post(count, SIZE, seed, epoch)

    def ask(self, most: int) -> int:
        """Ask for a parcel of so many tickets; return how many came."""
        tickets = self.trainer.carrier.claim(most)
        answer = self.server.make(self.trainer.carrier.request(tickets))
        return self.trainer.carrier.publish(tickets, answer)

    def batches(self) -> list[Any]:
        """Return all batches, or what was raised in their place."""
        left = [self.trainer.take(number) for number in self.numbers]
        reader = self.trainer.reader
        made = [
            reader.error(0, *one[1:]) if isinstance(one, tuple) and one[0] is RAISED else one
            for one in left
        ]
        self.trainer.close()
        return made


def test_a_server_makes_the_batches_of_test_mode(start: Start) -> None:
    """Parcels of any size, several at a time, of two seeds: the same to the last bit."""
    server = start(Draws)
    clients = [Client(server, 60, seed, epoch) for seed, epoch in ((5, 9), (2**64 - 1, 0))]
    sizes = [1, 1, 2, 4, 8, 16, 20, 5, 3]
    with ThreadPoolExecutor(3) as threads:
        asked = [threads.submit(client.ask, size) for size in sizes for client in clients]
        assert sum(one.result() for one in asked) == 2 * sum(sizes)
    for client, (seed, epoch) in zip(clients, ((5, 9), (2**64 - 1, 0)), strict=True):
        assert repr(client.batches()) == repr(in_test_mode(Draws, 60, seed, epoch))


def test_killed_workers_change_nothing(start: Start) -> None:
    """Workers that are killed at any time are replaced; each batch is there once, and the same."""
    server = start(Draws, max_restarts=100)
    client = Client(server, 200)
    assert client.ask(10) == 10  # both are ready, or nearly so
    killed = 0
    while client.trainer.carrier.waiting:
        with ThreadPoolExecutor(1) as threads:
            asked = threads.submit(client.ask, 19)
            killed += server.supervisor.kill(1 + killed % 2) is not None
            assert asked.result() == 19
    assert server.supervisor.deaths.restarts > 0
    assert repr(client.batches()) == repr(in_test_mode(Draws, 200, 5, 9))


def test_exceptions_come_in_the_place_of_their_batches(start: Start) -> None:
    """With their own types; the other batches of the parcel are there."""
    client = Client(start(Fails), 8)
    assert client.ask(8) == 8
    batches = client.batches()
    failed = [k for k, one in enumerate(batches) if isinstance(one, LookupError)]
    assert failed == [0, 3, 6]
    assert failure.line_of(batches[3]) == "LookupError: no sample 9"


def test_an_indexer_that_cannot_be_made_fails_every_call(start: Start) -> None:
    """With its own exception."""
    client = Client(start(Refuses), 4)
    for _ in range(2):
        with pytest.raises(FileNotFoundError, match="no such file"):
            client.ask(1)


def test_a_batch_that_kills_its_workers_is_named(start: Start) -> None:
    """As in a training loop."""
    client = Client(start(Dies), 4)
    with pytest.raises(cseq.WorkerDied, match="has ended 3 workers") as caught:
        client.ask(4)
    assert (caught.value.epoch, caught.value.batch, caught.value.indices) == (9, 2, [6, 7, 8])


class DiesWithOthers:
    """Ends its process in one batch, not before another batch was made since."""

    folder = ""

    def __getitem__(self, indices: np.ndarray[Any, Any]) -> Any:
        if 0 not in indices:
            Path(self.folder, f"made-{indices[0]}").touch()
            return indices
        before = len(os.listdir(self.folder))
        Path(self.folder, f"begun-{os.getpid()}").touch()
        while len(os.listdir(self.folder)) <= before + 1:
            time.sleep(0.01)
        os._exit(3)


def test_deaths_are_counted_while_parcels_of_other_epochs_come(
    start: Start, tmp_path: Path
) -> None:
    """A batch that kills its workers is named, whatever comes in between."""

    class Dies(DiesWithOthers):
        folder = str(tmp_path)

    server = start(Dies)
    poison = Client(server, 1)
    others = [Client(server, 1 + TRIES, epoch=epoch) for epoch in (10, 9)]
    for other in others:
        other.trainer.carrier.claim(1)  # the same samples as the poison
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as another:
        asked = one.submit(poison.ask, 1)
        for k in range(TRIES):
            until(lambda k=k: len([*tmp_path.glob("begun-*")]) > k)
            for other in others:
                another.submit(other.ask, 1)  # the last ones fail with it
        with pytest.raises(cseq.WorkerDied, match="has ended 3 workers"):
            asked.result()


def test_a_batch_that_takes_too_long_is_named(start: Start) -> None:
    """As in a training loop."""
    client = Client(start(Waits, timeout=0.5), 4)
    with pytest.raises(cseq.WorkerTimeout, match="epoch 9, batch 0"):
        client.ask(1)


def test_a_batch_larger_than_the_servers_is_refused(start: Start) -> None:
    """The server goes on."""
    server = start(Draws)
    trainer = Trainer(1, SIZE + 1)
    trainer.post(1, SIZE + 1)
    request = trainer.carrier.request(trainer.carrier.claim(1))
    with pytest.raises(ValueError, match=f"{SIZE + 1} samples exceeds batch_size={SIZE}"):
        server.make(request)
    trainer.close()
    assert Client(server, 2).ask(2) == 2


def test_closing_ends_the_calls_that_wait(start: Start) -> None:
    """Also the calls that come later."""
    server = start(Waits)
    client, later = Client(server, 1), Client(server, 1)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(client.ask, 1)
        while client.trainer.carrier.held == 0 or server.supervisor.pid(1) is None:
            pass
        threading.Thread(target=server.close).start()
        with pytest.raises(InterruptedError, match="closed"):
            waiting.result()
    with pytest.raises(InterruptedError, match="closed"):
        later.ask(1)


def test_a_worker_that_cannot_be_pickled_is_refused_at_the_start() -> None:
    """Before any process is there."""
    server = TicketServer(threading.Lock(), 1, SIZE, PLAIN)
    try:
        with pytest.raises(TypeError, match="worker"):
            server.start()
    finally:
        server.close()
