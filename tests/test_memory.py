"""What is moved into shared memory, what is staged, and that the log says why, once."""

from __future__ import annotations

import gc
import os
import socket
import tempfile
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import Lines, nothing_left, shared_files

import fastreduce
from fastreduce import memory

TIMEOUT = 60.0
COUNT = 300_000


def averaged(comm: fastreduce.Communicator, tensor: torch.Tensor) -> bool:
    tensor.fill_(comm.rank)
    comm.all_reduce_future(tensor, "sum", move=True).wait()
    return bool((tensor == sum(range(comm.world_size))).all())


def moves():
    """In place and under all views: addresses change, aliases stay."""
    comm = fastreduce.Communicator(timeout=TIMEOUT)
    lines = Lines()
    tensor = torch.zeros(COUNT)
    view = tensor[10:20]
    assert averaged(comm, tensor)
    assert tensor.is_shared() and view.data_ptr() == tensor.data_ptr() + 40
    assert view.tolist() == tensor[10:20].tolist()
    return lines.lines


def test_private_tensor_is_moved_in_place(ranks):
    assert ranks(2).run(moves) == [[], []]


def stays(case):
    comm = fastreduce.Communicator(timeout=TIMEOUT)
    lines = Lines()
    if case == "numpy":
        array = np.zeros(COUNT, dtype=np.float32)
        tensors = [torch.from_numpy(array), torch.from_numpy(array[:-1])]
    elif case == "exported":
        tensors = [torch.zeros(COUNT), torch.zeros(COUNT)]
        arrays = [tensor.numpy() for tensor in tensors]
    elif case == "full":
        real = os.statvfs
        memory.os.statvfs = lambda path: SimpleNamespace(f_bavail=1, f_frsize=4096)
        tensors = [torch.zeros(COUNT), torch.zeros(COUNT)]
    elif case == "named":
        torch.multiprocessing.set_sharing_strategy("file_system")
        tensors = [torch.zeros(COUNT).share_memory_() for _ in range(2)]
        torch.multiprocessing.set_sharing_strategy("file_descriptor")
    addresses = [tensor.data_ptr() for tensor in tensors]
    for tensor in tensors:
        assert averaged(comm, tensor)
        assert averaged(comm, tensor)
    assert addresses == [tensor.data_ptr() for tensor in tensors]
    del tensor
    if case == "numpy":
        assert array[0] == sum(range(comm.world_size))
    elif case == "exported":
        assert all(a[0] == sum(range(comm.world_size)) for a in arrays)
    elif case == "full":
        memory.os.statvfs = real
    comm.close()
    del comm, tensors
    gc.collect()  # torch unlinks a named file with its last tensor
    return lines.lines


@pytest.mark.parametrize(
    "case, reason",
    [
        ("numpy", "belongs to something else"),
        ("exported", "belongs to something else"),
        ("full", "too little room"),
        ("named", "named file"),
    ],
)
def test_staged_and_said_once(ranks, case, reason):
    for lines in ranks(2).run(stays, case):
        assert len(lines) == 1 and reason in lines[0]


def moved_while_in_use():
    """A call that has not ended holds a pointer: its memory must stay where it is."""
    comm = fastreduce.Communicator(timeout=TIMEOUT)
    lines = Lines()
    flat = torch.ones(COUNT)
    if comm.rank == 1:
        time.sleep(0.3)  # rank 0's first call waits
    first = comm.all_reduce_future(flat[:100], "sum", move=True)  # one_shot: nothing moves
    second = comm.all_reduce_future(flat[100:], "sum", move=True)
    first.wait()
    second.wait()
    assert (flat == comm.world_size).all()
    assert averaged(comm, flat)
    assert flat.is_shared()  # by now it could be moved
    comm.close()
    return lines.lines


def test_memory_in_use_is_not_moved(ranks):
    first, _ = ranks(2).run(moved_while_in_use)
    assert len(first) == 1 and "an earlier call on the same storage has not ended" in first[0]


def readdressed():
    """A storage that torch has moved away leaves its address to another one."""
    comm = fastreduce.Communicator(timeout=TIMEOUT)
    old, new = torch.zeros(COUNT).share_memory_(), torch.zeros(COUNT).share_memory_()
    assert averaged(comm, old)
    shared = comm._shared
    first = shared.segment_of(old)
    assert shared.segment_of(old) == first != memory.NOT_SHARED
    shared._segments[new.data_ptr()] = shared._segments.pop(old.data_ptr())
    assert averaged(comm, new)
    assert shared.segment_of(new) != first
    return averaged(comm, old) and averaged(comm, new)


def test_address_of_a_moved_storage(ranks):
    assert all(ranks(2).run(readdressed))


def cannot_look():
    """Where a tensor lies cannot be found out: it is staged, and the call is not left out."""
    comm = fastreduce.Communicator(timeout=TIMEOUT)
    lines = Lines()
    tensor = torch.zeros(COUNT).share_memory_()
    real = memory._why_not_mappable

    def no_descriptor(storage):
        raise OSError(24, "Too many open files")

    if comm.rank == 0:
        memory._why_not_mappable = no_descriptor
    assert averaged(comm, tensor)
    memory._why_not_mappable = real
    assert averaged(comm, tensor)
    return lines.lines


def test_call_goes_on_without_descriptors(ranks):
    first, second = ranks(2).run(cannot_look)
    assert len(first) == 1 and "Too many open files" in first[0]
    assert second == []


def small_tensors():
    """Thousands of them need no descriptors."""
    comm = fastreduce.Communicator(timeout=TIMEOUT)
    before = len(os.listdir("/proc/self/fd"))
    tensors = [comm.empty(16).fill_(comm.rank) for _ in range(3000)]
    comm.all_reduce(tensors[-1], "sum")
    assert tensors[-1].tolist() == [1.0] * 16
    return len(os.listdir("/proc/self/fd")) - before


def test_small_tensors(ranks):
    assert ranks(2).run(small_tensors) == [0, 0]


def one_stages():
    """Ranks need not agree: if one has to stage, all do."""
    comm = fastreduce.Communicator(timeout=TIMEOUT)
    tensor = comm.empty(COUNT) if comm.rank else torch.from_numpy(np.zeros(COUNT, np.float32))
    return averaged(comm, tensor) and averaged(comm, tensor)


def test_one_rank_stages(ranks):
    assert all(ranks(3).run(one_stages))


def without_shm():
    """Segments are anonymous: nothing of a communicator has a name in /dev/shm."""
    before = shared_files()
    comm = fastreduce.Communicator(timeout=TIMEOUT)
    tensor = comm.empty(COUNT).fill_(1)
    comm.all_reduce(tensor, "sum")
    assert nothing_left(before)
    return tensor[0].item()


def test_nothing_named(ranks):
    assert ranks(2).run(without_shm) == [2.0, 2.0]


def test_too_much_memory_is_an_error(ranks):
    ranks(2).run(too_much)


def too_much():
    comm = fastreduce.Communicator(timeout=TIMEOUT)
    with pytest.raises((OSError, RuntimeError), match="reserving"):
        comm.empty(1 << 50, dtype=torch.uint8)
    comm.barrier()


def stranger(folder):
    """Connecting to a rank's socket without the group's token gives nothing."""
    if dist.get_rank() == 0:
        real = fastreduce._C.Listener
        address: list[bytes] = []

        def listen():
            listener = real()
            address.append(listener.address)
            # Comes before the peers and says too little, or the wrong thing.
            for greeting in [b"", b"x" * 36]:
                s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                s.connect(b"\0" + address[0])
                if greeting:
                    s.send(greeting)
                strangers.append(s)
            return listener

        strangers: list[socket.socket] = []
        fastreduce._C.Listener = listen
        comm = fastreduce.Communicator(timeout=TIMEOUT)
        fastreduce._C.Listener = real
        for s in strangers:
            s.settimeout(5)
            assert s.recv(100) == b""  # turned away
    else:
        comm = fastreduce.Communicator(timeout=TIMEOUT)
    tensor = torch.ones(4)
    comm.all_reduce(tensor, "sum")
    return repr(comm), tensor.tolist()


def test_strangers_are_turned_away(ranks):
    for text, values in ranks(2).run(stranger, tempfile.gettempdir()):
        assert "shared memory" in text and values == [2.0] * 4
