"""Communicators come and go: several at once, sub-groups, forks, exits with and without close()."""

from __future__ import annotations

import copy
import gc
import math
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import fastreduce

TIMEOUT = 60.0


def value_of(comm: fastreduce.Communicator, count: int = 5) -> float:
    tensor = torch.full((count,), float(dist.get_rank() + 1))
    comm.all_reduce(tensor, "sum")
    return tensor[0].item()


def members():
    rank = dist.get_rank()
    even, low = dist.new_group([0, 2]), dist.new_group([0, 1, 2])
    whole = fastreduce.Communicator(timeout=TIMEOUT)
    results = [value_of(whole)]
    for group, inside in [(even, rank in (0, 2)), (low, rank < 3)]:
        if inside:
            comm = fastreduce.Communicator(group, timeout=TIMEOUT)
            results += [value_of(comm), value_of(comm, 100_000)]
        else:
            with pytest.raises(ValueError, match="not a member"):
                fastreduce.Communicator(group)
    results.append(value_of(whole))
    return results


def test_subgroups(ranks):
    results = ranks(4).run(members)
    assert results[0] == results[2] == [10, 4, 4, 6, 6, 10]
    assert results[1] == [10, 6, 6, 10]
    assert results[3] == [10, 10]


def many():
    comms = [fastreduce.Communicator(timeout=TIMEOUT) for _ in range(4)]
    works = []
    tensors = [torch.full((200_000,), float(i)) for i in range(4)]
    order = range(4) if dist.get_rank() == 0 else reversed(range(4))
    # Order matters within a communicator only.
    for i in order:
        works.append(comms[i].all_reduce(tensors[i], "sum", async_op=True))
    for work in works:
        work.wait()
    return [tensor[7].item() for tensor in tensors]


def test_several_at_once(ranks):
    assert ranks(2).run(many) == [[0, 2, 4, 6]] * 2


def recreate():
    before = len(os.listdir("/proc/self/fd"))
    threads = threading.active_count()
    for i in range(20):
        comm = fastreduce.Communicator(timeout=TIMEOUT)
        tensor = comm.empty(100_000).fill_(i)
        comm.all_reduce(tensor, "sum")
        comm.all_reduce(tensor, "sum", async_op=True).wait()
        comm.all_reduce_future(tensor).wait()
        comm.close()
        comm.close()
        with pytest.raises(RuntimeError, match="closed"):
            comm.barrier()
        assert tensor[0].item() == i * 4
        del tensor
    assert threading.active_count() == threads
    maps = Path("/proc/self/maps").read_text()
    return len(os.listdir("/proc/self/fd")) - before, maps.count("fastreduce (deleted)")


def test_recreated_many_times_leaks_nothing(ranks):
    for descriptors, mappings in ranks(2).run(recreate):
        assert descriptors <= 2 and mappings == 0


def mapped() -> int:
    """Bytes of this process's mappings of fastreduce's segments."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "fastreduce" in line and "memfd" in line:
            begin, end = line.split()[0].split("-")
            total += int(end, 16) - int(begin, 16)
    return total


def allocations():
    """Peers unmap what its owner has freed, at the next call."""
    comm = fastreduce.Communicator(timeout=TIMEOUT)
    comm.barrier()
    base = mapped()
    for _ in range(30):
        tensor = comm.empty(1 << 20)
        view = tensor[5:]
        del tensor
        comm.all_reduce(view.fill_(1), "sum")
        assert view[0].item() == comm.world_size
        del view
    gc.collect()
    comm.barrier()
    kept = comm.empty(1000)
    comm.close()
    kept.fill_(3)  # outlives its communicator
    return (mapped() - base) / (4 << 20)


def test_freed_allocations_are_unmapped(ranks):
    assert all(left < 1 for left in ranks(2).run(allocations))


def moved_storages():
    """Storages that were moved and freed make room for others at the same address."""
    comm = fastreduce.Communicator(timeout=TIMEOUT)
    for i in range(30):
        tensor = torch.full((300_000,), float(i + comm.rank))
        assert comm.all_reduce_future(tensor, "sum", move=True).wait()[0].item() == 2 * i + 1
        assert tensor.is_shared()
        del tensor
        private = torch.full((300_000,), float(i))
        comm.all_reduce(private, "sum")
        assert private[-1].item() == 2 * i
    return len(comm._shared._segments)


def test_moved_storages_come_and_go(ranks):
    assert all(left <= 2 for left in ranks(2).run(moved_storages))


def failed_futures():
    """What a failed Future held is freed with it."""
    references = []
    for _ in range(3):
        comm = fastreduce.Communicator(timeout=TIMEOUT)
        tensor = torch.ones(4, dtype=torch.complex64)
        with pytest.raises(TypeError):
            comm.all_reduce_future(tensor).wait()
        comm.close()
        references += [weakref.ref(comm), weakref.ref(tensor)]
        del comm, tensor
    gc.collect()
    return [reference() for reference in references]


def test_failed_futures_are_freed(ranks):
    assert ranks(2).run(failed_futures) == [[None] * 6] * 2


def forks():
    """A forked child has a copy that refuses work, and its end disturbs nobody."""
    comm = fastreduce.Communicator(timeout=TIMEOUT)
    tensor = comm.empty(1000).fill_(1)
    comm.all_reduce(tensor, "sum", async_op=True).wait()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            comm.all_reduce(tensor)
        except RuntimeError as error:
            code = 0 if "after the fork" in str(error) else 2
        comm.close()
        del comm, tensor
        gc.collect()
        os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    comm.all_reduce(tensor, "sum")
    return tensor[0].item()


def test_fork(ranks):
    assert ranks(2).run(forks) == [4.0, 4.0]


SCRIPT = """
import sys, tempfile, torch, torch.distributed as dist, fastreduce
rank, store, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
comm = fastreduce.Communicator(timeout=60)
tensor = comm.empty(100_000).fill_(1)
comm.all_reduce(tensor, "sum")
future = comm.all_reduce_future(tensor)
future.wait()
if how == "async":
    work = comm.all_reduce(tensor, async_op=True)
    work.wait()
if how == "raise" and rank == 0:
    dist.destroy_process_group()
    raise SystemExit(3)
if how == "raise":
    try:
        comm.barrier()
    except fastreduce.PeerClosedError:
        print("told")
dist.destroy_process_group()
if how == "close":
    comm.close()
"""


@pytest.mark.parametrize("how", ["close", "forget", "async", "raise"])
def test_exit(tmp_path, how):
    """With or without close(), after asynchronous work, and while the peer still waits."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path / "store"), how],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=120) for process in processes]
    expected = [3 if how == "raise" else 0, 0]
    assert [process.returncode for process in processes] == expected, outputs
    if how == "raise":
        assert outputs[1][0].splitlines()[-1] == "told"  # gloo may print, too
    for _, errors in outputs:
        assert "Traceback" not in errors and "terminate" not in errors


def dropped():
    """An asynchronous call's tensors live until it has ended, whatever the caller drops."""
    comm = fastreduce.Communicator(timeout=TIMEOUT)
    if comm.rank == 1:
        time.sleep(0.3)
    for _ in range(3):
        comm.all_reduce(torch.ones(3_000_000), "sum", async_op=True)
    others = [torch.zeros(3_000_000) for _ in range(3)]
    comm.barrier()
    return max(t.abs().max().item() for t in others)


def test_dropped_work(ranks):
    assert ranks(2).run(dropped) == [0.0, 0.0]


def after_close():
    """What is done with a closed communicator does not reach another one."""
    closed = fastreduce.Communicator(timeout=TIMEOUT)
    shared = torch.ones(200_000).share_memory_()
    closed.close()
    comm = fastreduce.Communicator(timeout=TIMEOUT)
    if comm.rank == 0:
        closed.empty(100_000).fill_(7)
        for call in [closed.all_reduce, lambda t: closed.all_reduce_future(t).wait()]:
            with pytest.raises(RuntimeError, match="closed"):
                call(shared)
    tensor = comm.empty(100_000).fill_(comm.rank)
    comm.all_reduce(tensor, "sum")
    return tensor.unique().tolist()


def test_after_close(ranks):
    assert ranks(2).run(after_close) == [[1.0], [1.0]]


def child_allocates():
    """What a forked child does with its copy does not reach the parent's peers."""
    comm = fastreduce.Communicator(timeout=TIMEOUT)
    comm.barrier()
    pending = comm.all_reduce(torch.ones(4), async_op=True)
    child = os.fork()
    if child == 0:
        code = 0
        for call in [
            lambda: comm.empty(100_000),
            lambda: comm.all_reduce(torch.ones(200_000).share_memory_()),
            lambda: comm.all_reduce(torch.ones(4), async_op=True),
            lambda: comm.all_reduce_future(torch.ones(4)).wait(),
            pending.wait,
        ]:
            try:
                call()
                code = 1
            except RuntimeError as error:
                code |= 0 if "parent" in str(error) else 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    pending.wait()
    tensor = comm.empty(100_000).fill_(comm.rank)
    comm.all_reduce(tensor, "sum")
    return tensor.unique().tolist()


def test_child_allocates(ranks):
    assert ranks(2).run(child_allocates) == [[1.0], [1.0]]


def many_segments():
    """More segments than a socket holds messages: made, used in one call each, freed."""
    comm = fastreduce.Communicator(timeout=20)
    base = mapped()
    tensors = [comm.empty(5_000) for _ in range(700)]
    works = [comm.all_reduce(t.fill_(i), "sum", async_op=True) for i, t in enumerate(tensors)]
    for i, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
        work.wait()
        assert tensor[0].item() == 2 * i
    del tensor, tensors, works, work
    gc.collect()
    for i in range(60):
        last = comm.empty(5_000).fill_(i)
        comm.all_reduce(last, "sum")
        assert last[-1].item() == 2 * i
    return (mapped() - base) // (5_000 * 4)


def test_many_segments(ranks):
    assert all(left < 20 for left in ranks(2).run(many_segments))


def threads_differ(threads):
    comm = fastreduce.Communicator(timeout=TIMEOUT, threads=threads[dist.get_rank()])
    return comm.shared_memory and value_of(comm, 1_000_000)


@pytest.mark.parametrize("threads", [(None, 2), (3, None), (5, 1)])
def test_threads_differ(ranks, threads):
    assert ranks(2).run(threads_differ, threads) == [3.0, 3.0]


def endless():
    with fastreduce.Communicator(timeout=math.inf) as comm:
        comm.all_reduce(torch.ones(4), async_op=True).wait(1e12)
        return value_of(comm)


def test_endless_timeout(ranks):
    assert ranks(2).run(endless) == [3.0, 3.0]


def test_hook_state_is_not_copied_silently(ranks):
    ranks(2).run(copies)


def copies():
    comm = fastreduce.Communicator(timeout=TIMEOUT)
    state = fastreduce.HookState(comm)
    with pytest.raises(TypeError, match="copy or save the module inside"):
        pickle.dumps(state)
    with pytest.raises(TypeError, match="copy or save the module inside"):
        copy.deepcopy(state)
    state.close()
    comm.barrier()  # still the caller's


def test_without_a_group():
    with pytest.raises(ValueError, match="init_process_group"):
        fastreduce.Communicator()
