"""`cseq.DataLoader` on a Ray cluster: the batches of rng='batch'; nothing is left there."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time

import pytest
from local_cluster import until

torch = pytest.importorskip("torch")

from drawing import await_agents  # noqa: E402
from torch_data import Augmented, same, seed_all, without_told  # noqa: E402

import cseq  # noqa: E402
import cseq.testing  # noqa: E402

pytestmark = pytest.mark.usefixtures("cluster")

OPTIONS = {"batch_size": 4, "shuffle": True}


class Slow(Augmented):
    """Takes a millisecond for a sample; counts how often it was pickled here."""

    pickled = 0

    def __getitem__(self, index):
        time.sleep(0.001)
        if index == -1:
            raise LookupError("no such sample")
        return super().__getitem__(index)

    def __getstate__(self):
        type(self).pickled += 1
        return self.__dict__


def here(dataset, epochs):
    """List the batches of these epochs without a worker."""
    seed_all()
    loader = cseq.DataLoader(dataset, rng="batch", **OPTIONS)
    return [without_told(list(loader)) for _ in range(epochs)]


def test_batches_are_the_same_also_when_agents_die():
    """Bit for bit, in three epochs; the data set is sent once."""
    dataset = Slow(600)
    with cseq.RayFleet(nodes=2, num_workers=1) as fleet:
        seed_all()
        loader = cseq.DataLoader(dataset, fleet=fleet, **OPTIONS)
        made, sent = [without_told(list(loader))], Slow.pickled
        assert sent
        for _ in range(2):
            made.append([])
            for k, batch in enumerate(loader):
                made[-1] += without_told([batch])
                if k == 20:
                    cseq.testing.kill_agent(fleet, 0)
            until(lambda: len(fleet.agents) == 2, "no agent took its place")
            await_agents(fleet)
        assert Slow.pickled == sent
        stats = loader.stats()
    assert same(made, here(dataset, 3))
    assert stats.batches == 150
    assert stats.received > 0


def test_an_exception_has_torchs_form_and_ctrl_c_leaves_the_loader_usable():
    """Then nothing is left on the cluster, though an epoch is under way: the fixture's check."""
    dataset = Slow(400)
    with cseq.RayFleet(nodes=2, num_workers=1) as fleet:
        failing = cseq.DataLoader(dataset, batch_sampler=[[1], [-1], [2]], fleet=fleet)
        iterator = iter(failing)
        next(iterator)
        with pytest.raises(LookupError, match="Caught LookupError in DataLoader worker process 0"):
            next(iterator)
        assert next(iterator)["index"].tolist() == [2]
        loader = cseq.DataLoader(dataset, fleet=fleet, **OPTIONS)
        for _ in range(3):
            timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                while True:
                    list(loader)
            timer.join()
        seed_all()
        assert same([without_told(list(loader))], here(dataset, 1))
        iterator = iter(loader)
        next(iterator)
    with pytest.raises(RuntimeError, match="the fleet is over"):
        list(iterator)


def test_a_fleet_ends_with_the_loader_that_alone_has_it():
    """In the middle of an epoch; the fixture looks at what is left."""
    loader = cseq.DataLoader(Slow(400), fleet=cseq.RayFleet(nodes=2, num_workers=1), **OPTIONS)
    assert next(iter(loader))["index"].shape == (4,)


def test_a_fleet_without_a_worker_is_no_sequences():
    """Nor is it pickled before a loader has used it, or used by a loader elsewhere."""
    with cseq.RayFleet(nodes=1) as fleet:
        with pytest.raises(TypeError, match="has no worker: make it as RayFleet"):
            cseq.RaySequence(fleet, 10)
        with pytest.raises(RuntimeError, match="this fleet has no worker"):
            pickle.dumps(fleet)
        dataset = Augmented()
        assert len(list(cseq.DataLoader(dataset, fleet=fleet))) == 23
        copy = pickle.loads(pickle.dumps(fleet))
        with pytest.raises(ValueError, match="in the process that has made it"):
            iter(cseq.DataLoader(dataset, fleet=copy))
