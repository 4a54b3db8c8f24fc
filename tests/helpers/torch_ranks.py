"""Ranks of a gloo group on loopback, forked from a script that has imported torch."""

import json
import os
import socket
import sys
import tempfile
import traceback
from datetime import timedelta

import torch.distributed as dist

# Only a failing test waits this long.
PATIENCE = 60.0
LOOPBACK = "lo" if "lo" in dict(map(reversed, socket.if_nameindex())) else "lo0"


def on_ranks(number, function, patience=PATIENCE):
    """Call a function on each of several ranks, with the rank; return the results through JSON.

    `patience` is the timeout of the store, in seconds.
    """
    answers = []
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "store")
        ranks = [fork(number, rank, function, path, patience) for rank in range(number)]
        for pid, pipe in ranks:
            with open(pipe, encoding="utf-8") as file:
                answers.append(file.read())
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return [*map(json.loads, answers)]


def fork(number, rank, function, path, patience):
    """Fork a rank; return its process, and the pipe of its answer."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid:
        os.close(theirs)
        return pid, ours
    code = 1
    try:
        os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
        store, timeout = dist.FileStore(path, number), timedelta(seconds=PATIENCE)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=number, timeout=timeout)
        store.set_timeout(timedelta(seconds=patience))
        with open(theirs, "w", encoding="utf-8") as file:
            json.dump(function(rank), file)
        dist.barrier()
        dist.destroy_process_group()
        code = 0
    except BaseException:  # noqa: BLE001 - it ends the process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
