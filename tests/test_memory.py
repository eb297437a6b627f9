"""What is moved into shared memory, what is staged, and that the log says why, once."""

from __future__ import annotations

import gc
import os
import socket
import tempfile
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import Lines, shared_files

import fastreduce
from fastreduce import memory

TIMEOUT = 60.0
COUNT = 300_000


def averaged(comm: fastreduce.Communicator, tensor: torch.Tensor) -> bool:
    tensor.fill_(comm.rank)
    comm.all_reduce_future(tensor, "sum").wait()
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
    assert shared_files() <= before
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
