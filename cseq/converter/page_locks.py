"""Page-locks slots, so that CUDA can copy from them directly."""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING

from cseq.converter.output import say_once

if TYPE_CHECKING:
    from cseq._memory import Memory

logger = logging.getLogger("cseq")


class PageLocks:
    """Page-locked mappings of an arena. CUDA copies from them directly.

    Mappings stay alive until they are unregistered. Otherwise, CUDA would copy stale pages if an
    address were mapped again.
    """

    # The flag that page-locks memory for all CUDA contexts (cudaHostRegisterPortable).
    PORTABLE = 1

    def __init__(self, device: str) -> None:
        self._torch = importlib.import_module("torch")
        self._device = device
        self._locked: dict[int, Memory] = {}

    def register(self, memory: Memory) -> bool:
        """Page-lock a mapping. Return False if this fails, in which case copies are slower."""
        if memory.address in self._locked:
            return True
        status = self._call("cudaHostRegister", memory.address, memory.nbytes, self.PORTABLE)
        if status:
            say_once(
                f"CUDA could not page-lock shared memory (error {status}), so batches are copied "
                "one extra time on their way to the device"
            )
            return False
        self._locked[memory.address] = memory
        return True

    def unregister(self, memory: Memory) -> None:
        """Unlock a mapping. All copies from it must be complete."""
        if self._locked.pop(memory.address, None) is None:
            return
        status = self._call("cudaHostUnregister", memory.address)
        if status:
            logger.warning("CUDA could not unlock %d bytes (error %d)", memory.nbytes, status)

    def close(self) -> None:
        """Unlock all mappings."""
        for memory in list(self._locked.values()):
            self.unregister(memory)

    def _call(self, name: str, *arguments: int) -> int:
        """Call a CUDA runtime function and return its status."""
        with self._torch.cuda.device(self._device):
            status = int(getattr(self._torch.cuda.cudart(), name)(*arguments))
            if status:
                self._forget_error()
            return status

    def _forget_error(self) -> None:
        """Clear the error from a failed call.

        The next kernel launch reports and clears it, so launch one here.
        """
        try:
            self._torch.ones(1, device=self._device)
        except RuntimeError as error:
            logger.debug("a CUDA error was cleared: %s", str(error))
