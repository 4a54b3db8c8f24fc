"""Worker processes with rings and slots in shared memory."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from cseq._core import CALLED
from cseq._memory import Mapping
from cseq.encoding import codec
from cseq.encoding._codec import Encoder, Objects
from cseq.encoding._room import Room
from cseq.encoding.pickling import Pickled, dump, dumps
from cseq.encoding.transport import SlotReader
from cseq.engine._streams import Request
from cseq.engine.crews.base import Crew, file_name
from cseq.engine.worker import ENTRY
from cseq.measure.lanes import Lanes
from cseq.memory.arena import Arena
from cseq.processes.launcher import make_launcher
from cseq.processes.supervisor import Supervisor
from cseq.system import available_memory, neighbours, private_memory

if TYPE_CHECKING:
    from cseq.converter.export import Imports
    from cseq.converter.page_locks import PageLocks
    from cseq.engine.crews.threads import ThreadGroup
    from cseq.engine.tickets.base import Tickets
    from cseq.measure.stats import Stats

__all__ = ["ProcessCrew"]


class ProcessCrew(Crew):
    """Worker processes. Converters are processes (`_imports`) or threads (`_group`)."""

    supervisor: Supervisor
    of = "MPSequence"
    _imports: Imports | None = None
    _group: ThreadGroup | None = None

    def __init__(self, tickets: Tickets) -> None:
        super().__init__(tickets)
        options, output = tickets.options, tickets.output
        in_processes = tickets.converts_in_processes
        self._locks: PageLocks | None = None
        # Converter threads copy batches from the slots to the device.
        if output is not None and output.use_cuda and not in_processes:
            from cseq.converter.page_locks import PageLocks

            self._locks = PageLocks(output.device)
        self.timed = tickets.num_workers + (tickets.num_converters if in_processes else 0)
        self._arena = Arena(options.memory_limit, self._locks, tickets=tickets.ahead)
        self._arena.add_rings(
            tickets.cells,
            tickets.words,
            tickets.runners,
            owners=self.timed,
            rings=tickets.rings,
            calls=tickets.calls,
            limit=tickets.limit,
            name=file_name(tickets),
        )
        self.rings = self._arena.rings
        self.lanes = Lanes(tickets.num_workers, "process")
        self.staff = self.supervisor = Supervisor(
            make_launcher(options.start_method, entry=ENTRY, threads=options.threads),
            self._arena,
            readers=tickets.num_workers,
            task=lambda runner_number: tickets.task(runner_number, forks=True),
            describe=tickets.held,
            deaths=tickets.deaths(),
            lanes=self.lanes,
        )
        self._encoders: list[Encoder] = []
        self._reader = SlotReader(self._arena)
        self._set_reader(in_processes=in_processes)

    def _set_reader(self, *, in_processes: bool) -> None:
        tickets, output = self.tickets, self.tickets.output
        self.reader = self._reader
        if output is None:
            return
        if in_processes:
            from cseq.converter.export import Imports
            from cseq.converter.host import Converter

            convert = Converter(output).convert
            self.reader = self._imports = Imports(self._arena, self.rings[0], output, convert)
            self.on_cancel = self._imports.cancel
        elif tickets.num_converters:
            from cseq.converter.cuda import receive
            from cseq.engine.crews.threads import ThreadGroup, add_converters

            self._group = ThreadGroup(self.rings[0])
            self.reader = objects = Objects(tickets.cells, self._reader)
            self.convert = receive
            add_converters(tickets, self.rings[0], self._reader, objects, self._group)
        elif (converter := self._converter()) is not None:
            self.convert, self.leaf_for = converter.convert, converter.leaf_for

    def prepare(self, worker: object, name: str = "worker") -> None:
        """Prepare the workers and start the converter threads."""
        options = self.tickets.options
        if self._group is not None:
            self._group.start_threads()
        self.supervisor.prepare(
            worker,
            name=name,
            preload=options.preload,
            needs=[] if self._imports is None else ["torch"],
            timeout=options.timeout,
        )

    def launch(self) -> None:
        """Start the processes, unless they are running."""
        self.supervisor.launch()

    def begin_epoch(self) -> None:
        """Start an epoch and reset the death count."""
        self.supervisor.begin_epoch()

    def resize(self, num_workers: int) -> None:
        """Change the number of workers."""
        self.supervisor.resize(num_workers)

    def room_for(self, num_workers: int, present: int) -> int:
        """Return how many workers fit if new ones may use half of the free memory."""
        free = available_memory()
        largest = max(private_memory(pid) for pid in self.supervisor.pids())
        if free is None or not largest:
            return num_workers
        more = free // (2 * neighbours() * largest)
        return min(num_workers, present + more)

    def check(self) -> None:
        """Raise an error that has occurred in a process or a converter thread."""
        self.supervisor.check()
        if self._group is not None:
            self._group.check()

    def died_of(self, ring_number: int, cell: int) -> BaseException | None:
        """Return the error to raise if a ticket has killed its workers."""
        return self.supervisor.died_of(ring_number, cell)

    def write(self, value: object, name: str) -> Request:
        """Write a value for a worker into a slot.

        A signal handler may call this during another call, so nested calls use separate encoders.
        """
        pickled = self._pickle(value, name)
        request = Request(self._arena.slots)
        arena = self._arena
        encoder = self._encoders.pop() if self._encoders else Encoder(Room(arena.fd, arena.width))
        encoder.room.select(request.slot, self._arena.request(request.slot))
        record = codec.encode_pickled(pickled, encoder)
        request.locate(encoder.room.capacity, record)
        self._encoders.append(encoder)
        return request

    def _pickle(self, value: object, name: str) -> Pickled:
        """Pickle a value: by reference for forked workers, because they have the same classes."""
        if self.supervisor.takes_objects:
            # If this fails, `dump` raises the same exception with an explanation.
            with contextlib.suppress(Exception):
                buffers: list[memoryview] = []
                return Pickled(dumps([value], buffers), buffers)
        return dump(value, name=name)

    def requested_key(self, ring_number: int, cell: int) -> object:
        """Return the key of a cell's ticket. Thread-safe."""
        slot, capacity, *record = self.rings[ring_number].indices(cell)[CALLED].tolist()
        # The training thread may be holding the arena's lock.
        offset = slot * self._arena.width
        return codec.decode(Mapping(self._arena.fd, offset, capacity, own=True), record)

    def stats(self, **counted: Any) -> Stats:
        """Return statistics. Repeated conversions count as retries."""
        deaths = self.supervisor.deaths
        lost = 0 if self._imports is None else self._imports.lost
        return super().stats(
            **counted,
            restarts=deaths.restarts,
            retries=deaths.retries + lost,
            copies=self._arena.copies,
        )

    def close(self, *, hurried: bool) -> None:
        """Stop the workers, then free their memory."""
        self.supervisor.closed = True
        # Imports may still be reading the memory of converter processes.
        if self._imports is not None:
            self._imports.close()
        self.supervisor.close(hurried=hurried)
        if self._group is not None:
            self._group.join(1.0)
        if self._locks is not None:
            self._locks.close()
        for encoder in self._encoders:
            encoder.room.close()
        self._arena.close()
