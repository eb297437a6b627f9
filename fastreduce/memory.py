"""Which tensors peers can map: those in shared memory, and those that can be moved there.

torch shares a CPU storage by moving it, in place and under all its views, into an unlinked
file of /dev/shm. That needs room there, for all ranks at once, and it needs a storage that nobody
else points into. NumPy's hold on a storage can be seen, that of a DLPack consumer cannot.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import UntypedStorage

    from fastreduce._C import HostCommunicator

logger = logging.getLogger("fastreduce")

NOT_SHARED = -1
# Every so many calls, storages that have been freed are looked for.
_SWEEP_EVERY = 64
_SHM = "/dev/shm"


class SharedTensors:
    """The storages of one rank that its peers map, as segments of its communicator."""

    def __init__(self, core: HostCommunicator, ranks_on_host: int) -> None:
        self._core = core
        self._ranks = ranks_on_host
        # By address. A storage can move and leave its address to another: look at both.
        self._segments: dict[int, tuple[StorageWeakRef, int]] = {}
        self._said: set[str] = set()
        self._calls = 0
        self._lock = threading.Lock()

    def segment_of(self, tensor: Tensor, *, move_unless: Callable[[], bool] | None = None) -> int:
        """The segment that holds ``tensor``, or NOT_SHARED if it has to be staged.

        With ``move_unless``, a storage in private memory is moved into shared memory if that can
        be done and the function, asked last, does not tell that somebody uses its memory now.
        One that cannot be is named in the log, once per reason.
        """
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        self._calls += 1
        if self._calls % _SWEEP_EVERY == 0:
            self.sweep()
        known = self._segments.get(address)
        if known is not None and known[0].cdata == storage._cdata and not known[0].expired():
            return known[1]
        if self._core.is_allocation(address):
            return NOT_SHARED  # the core finds its own memory by itself
        if not storage.is_shared() and move_unless is None:
            return NOT_SHARED
        try:
            if storage.is_shared():
                reason = _why_not_mappable(storage)
            else:
                reason = _why_not_movable(storage, self._ranks)
                if reason is None and move_unless is not None and move_unless():
                    reason = "an earlier call on the same storage has not ended, so it cannot move"
            if reason is None:
                return self._add(storage)
        except (OSError, RuntimeError) as error:
            # The call goes on: it must not go missing in the order of calls.
            reason = f"sharing it failed: {error}"
        if reason not in self._said:
            self._said.add(reason)
            logger.warning("staging a tensor of %d bytes: %s", storage.nbytes(), reason)
        return NOT_SHARED

    def sweep(self) -> None:
        """Lets peers unmap, with the next call, what has been freed here."""
        self._core.refuse_child()
        with self._lock:
            self._forget(lambda address, reference: reference.expired())

    def _add(self, storage: UntypedStorage) -> int:
        self._core.refuse_child()
        with self._lock:
            known = self._segments.get(storage.data_ptr())
            if known is not None and known[0].cdata == storage._cdata:
                return known[1]  # another thread was faster
            fd, nbytes = storage._share_fd_cpu_()
            if fd < 0:
                raise OSError("torch has no file descriptor for it")
            now = storage.data_ptr()
            self._forget(lambda address, reference: address == now or reference.expired())
            segment: int = self._core.add_segment(fd, now, nbytes)
            self._segments[now] = (StorageWeakRef(storage), segment)
        return segment

    def _forget(self, gone: Callable[[int, StorageWeakRef], bool]) -> None:
        for address, (reference, segment) in list(self._segments.items()):
            if gone(address, reference):
                self._core.remove_segment(segment)
                del self._segments[address]


def movable_bytes(room: int, ranks: int) -> int:
    """What each of a host's ranks can move into shared memory that has so much room: all do at the
    same time, and a sixteenth stays free for others."""
    return (room - room // 16) // ranks


def _why_not_movable(storage: UntypedStorage, ranks: int) -> str | None:
    if not storage.resizable():
        return "its memory belongs to something else too (a NumPy array, say), so it cannot move"
    space = os.statvfs(_SHM) if os.path.isdir(_SHM) else None
    room = space.f_bavail * space.f_frsize if space is not None else 0
    if storage.nbytes() > movable_bytes(room, ranks):
        return f"{_SHM} has too little room"
    return None


def _why_not_mappable(storage: UntypedStorage) -> str | None:
    """A shared storage whose file has a name (sharing strategy file_system) has no file
    descriptor to hand on; asking torch for one would move it away from those it is shared
    with. An unlinked file has one."""
    address = storage.data_ptr()
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, _, rest = line.partition(" ")
            begin, _, end = span.partition("-")
            if int(begin, 16) <= address < int(end, 16):
                if rest.rstrip().endswith("(deleted)"):
                    return None
                break
    return "it is shared through a named file (torch's file_system strategy)"
