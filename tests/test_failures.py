"""What goes wrong is an exception on every surviving rank, and never a hang.

Ranks that fail run as fresh processes. Timeouts are long unless a test waits for one, so a test
that expects another error fails if the failure is only noticed by its timeout.
"""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

import fastreduce
from fastreduce import rendezvous as module

LONG = 60.0
SHORT = 1.0


def survivor(timeout, count, algorithm, async_op, where):
    """Makes calls until one fails; tells how, and what the communicator does afterwards."""
    comm = fastreduce.Communicator(timeout=timeout)
    tensor = comm.empty(count) if where == "shared" else torch.empty(count)
    calls = 0
    try:
        while True:
            tensor.fill_(calls)
            if async_op:
                comm.all_reduce(tensor, "sum", algorithm, async_op=True).wait()
            else:
                comm.all_reduce(tensor, "sum", algorithm)
            calls += 1
    except fastreduce.CommunicatorError as error:
        first = error
    assert not first.intact or bool((tensor == calls).all())
    # It refuses further work with the same reason.
    with pytest.raises(fastreduce.CommunicatorError) as again:
        comm.all_reduce(torch.ones(1))
    assert again.value.peer == first.peer and again.value.epoch == first.epoch
    comm.close()
    return describe(first)


def describe(error: fastreduce.CommunicatorError) -> dict:
    return {
        "type": type(error).__name__,
        "text": str(error),
        "rank": error.rank,
        "found_by": error.found_by,
        "peer": error.peer,
        "phase": error.phase,
        "epoch": error.epoch,
        "expected": error.expected,
        "seen": error.seen,
        "intact": error.intact,
    }


def victim(timeout, calls, count, algorithm, where, how):
    comm = fastreduce.Communicator(timeout=timeout)
    tensor = comm.empty(count) if where == "shared" else torch.empty(count)
    for _ in range(calls):
        comm.all_reduce(tensor.fill_(1), "sum", algorithm)
    if how == "close":
        comm.close()
    elif how == "raise":
        try:
            with comm:
                raise KeyError("mine")
        except KeyError:
            pass
    elif how == "sleep":
        time.sleep(4 * SHORT)
    else:
        os.kill(os.getpid(), getattr(signal, how))
    return True


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "count, algorithm, where",
    [
        (10, "one_shot", "private"),
        (3_000_000, "two_shot", "shared"),
        (3_000_000, "ring", "private"),
    ],
)
@pytest.mark.parametrize("async_op", [False, True])
def test_killed_peer(ranks, world_size, count, algorithm, where, async_op):
    group = ranks(world_size)
    group.start(0, victim, LONG, 3, count, algorithm, where, "SIGKILL")
    for rank in range(1, world_size):
        group.start(rank, survivor, LONG, count, algorithm, async_op, where)
    for rank in range(1, world_size):
        error = group.result(rank, timeout=LONG / 2)
        assert error["type"] == "PeerLostError"
        assert error["peer"] == 0 and error["rank"] == rank and error["epoch"] == 4
        assert "rank 0 has ended" in error["text"]
        assert error["expected"] == 4 and error["seen"] == 3 and error["intact"]


def working_victim(count, where, go):
    comm = fastreduce.Communicator(timeout=LONG)
    tensor = comm.empty(count) if where == "shared" else torch.empty(count)
    threading.Timer(go, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    while True:
        comm.all_reduce(tensor.fill_(1), "sum", "two_shot")


@pytest.mark.parametrize("where", ["shared", "private"])
@pytest.mark.parametrize("seed", range(4))
def test_killed_at_any_moment(ranks, where, seed):
    group = ranks(3)
    group.start(2, working_victim, 400_000, where, 0.05 + 0.013 * seed)
    for rank in range(2):
        group.start(rank, survivor, LONG, 400_000, "two_shot", False, where)
    for rank in range(2):
        error = group.result(rank, timeout=LONG / 2)
        assert error["type"] == "PeerLostError" and error["peer"] == 2


def test_stopped_peer(ranks):
    group = ranks(3)
    group.start(1, victim, LONG, 2, 10, "auto", "private", "SIGSTOP")
    for rank in (0, 2):
        group.start(rank, survivor, SHORT, 10, "auto", False, "private")
    try:
        for rank in (0, 2):
            error = group.result(rank)
            assert error["type"] == "CommunicatorTimeoutError"
            assert error["peer"] == 1 and error["phase"] == "enter" and error["intact"]
    finally:
        os.kill(group.processes[1].pid, signal.SIGCONT)
    group.result(1)


@pytest.mark.parametrize("how", ["close", "raise"])
def test_peer_leaves(ranks, how):
    group = ranks(2)
    group.start(0, victim, LONG, 2, 10, "auto", "private", how)
    group.start(1, survivor, LONG, 10, "auto", False, "private")
    error = group.result(1, timeout=LONG / 2)
    assert error["type"] == "PeerClosedError" and error["peer"] == 0 and error["intact"]
    group.result(0)


def test_peer_that_never_calls(ranks):
    group = ranks(2)
    group.start(0, victim, LONG, 2, 10, "auto", "private", "sleep")
    group.start(1, survivor, SHORT, 10, "auto", False, "private")
    error = group.result(1)
    assert error["type"] == "CommunicatorTimeoutError"
    assert (error["peer"], error["phase"], error["expected"], error["seen"]) == (0, "enter", 3, 2)
    group.result(0)


def late_caller():
    """The late rank learns that the other has given up, at once."""
    comm = fastreduce.Communicator(timeout=LONG if dist.get_rank() == 0 else SHORT)
    if dist.get_rank() == 0:
        time.sleep(3 * SHORT)
    with pytest.raises(fastreduce.CommunicatorError) as failure:
        comm.all_reduce(torch.ones(4))
        comm.all_reduce(torch.ones(4))
    return describe(failure.value)


def test_late_caller_learns_of_the_timeout(ranks):
    late, early = ranks(2).run(late_caller)
    assert early["type"] == "CommunicatorTimeoutError"
    assert late["type"] == "CommunicatorTimeoutError" and late["found_by"] == 1
    assert "rank 1 gave up" in late["text"]


def handler_closes(what, where="call"):
    """A signal handler that calls into the communicator while this rank waits in a call of it."""
    comm = fastreduce.Communicator(timeout=LONG)
    seen = []

    def handle(number, frame):
        if what == "close":
            comm.close()
            return
        try:
            comm.barrier()
        except RuntimeError as error:
            seen.append(str(error))

    signal.signal(signal.SIGALRM, handle)
    tensor = torch.ones(4)
    if comm.rank == 0:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
    else:
        time.sleep(SHORT)
    if where == "queue":
        work = comm.all_reduce(tensor, async_op=True)
    if where == "work":
        work = comm.all_reduce(tensor, async_op=True)
        with pytest.raises(fastreduce.PeerClosedError):
            work.wait()
        comm.close()
    elif what == "close":
        with pytest.raises(fastreduce.PeerClosedError):
            comm.all_reduce(tensor)
        if comm.rank == 0:
            with pytest.raises(RuntimeError, match="closed"):
                comm.all_reduce(tensor)
        comm.close()
    else:
        comm.all_reduce(tensor, "sum")
        assert tensor.tolist() == [2.0] * 4
        comm.close()
    return seen


@pytest.mark.parametrize("where", ["call", "queue", "work"])
def test_handler_closes_the_communicator(ranks, where):
    assert ranks(2).run(handler_closes, "close", where) == [[], []]


def test_handler_makes_a_call(ranks):
    [first], second = ranks(2).run(handler_closes, "barrier")
    assert "called by a signal handler within a call" in first and second == []


def other_program():
    """A rank that becomes another program has left, although its process goes on."""
    comm = fastreduce.Communicator(timeout=LONG)
    comm.barrier()
    if comm.rank == 1:
        os.execv("/bin/sleep", ["sleep", str(LONG)])
    with pytest.raises(fastreduce.PeerLostError) as failure:
        comm.barrier()
    return describe(failure.value)


def test_peer_becomes_another_program(ranks):
    group = ranks(2)
    for rank in range(2):
        group.start(rank, other_program)
    assert group.result(0, timeout=LONG / 2)["peer"] == 1
    group.kill()


def handler_raises_while_the_group_forms():
    """What a signal handler raises is not taken for a reason to do without shared memory."""

    class Preempted(TimeoutError):
        pass

    def handle(number, frame):
        raise Preempted

    if dist.get_rank() == 1:
        module._C.HostCommunicator = lambda *args, **kwargs: time.sleep(LONG)
    signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    with pytest.raises(Preempted):
        fastreduce.Communicator(timeout=LONG)


def test_handler_raises_while_the_group_forms(ranks):
    group = ranks(2)
    group.run(handler_raises_while_the_group_forms)
    group.failed = True  # gloo has half a call behind it


def dies_while_the_group_forms(how):
    """Between the first word of all ranks and their meeting."""
    real = module._C.HostCommunicator

    def die(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGKILL)

    if dist.get_rank() == 1:
        if how == "dies":
            module._C.HostCommunicator = die
        else:
            module._C.HostCommunicator = lambda *args, **kwargs: time.sleep(LONG)
    elif how == "interrupt":

        def handle(number, frame):
            raise KeyboardInterrupt

        signal.signal(signal.SIGALRM, handle)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
    began = time.monotonic()
    try:
        fastreduce.Communicator(timeout=LONG)
    except (RuntimeError, KeyboardInterrupt) as error:
        return type(error).__name__, time.monotonic() - began
    finally:
        module._C.HostCommunicator = real
    return None


@pytest.mark.parametrize("how", ["dies", "interrupt"])
def test_while_the_group_forms(ranks, how):
    group = ranks(2)
    for rank in range(2):
        group.start(rank, dies_while_the_group_forms, how)
    name, seconds = group.result(0)
    assert name == ("RuntimeError" if how == "dies" else "KeyboardInterrupt")
    assert seconds < module._CONNECT_SECONDS / 2  # not by its time limit
    group.failed = True
    group.kill()


def mismatched(case):
    comm = fastreduce.Communicator(timeout=LONG)
    odd = comm.rank == comm.world_size - 1
    n = comm.world_size
    tensor = torch.full((8,), 1.0 + comm.rank)
    if case == "size":
        tensor = torch.full((10 if odd else 100_000,), 1.0)
    before = tensor.clone()
    with pytest.raises(fastreduce.MismatchError) as failure:
        if case == "numel":
            comm.all_reduce(tensor[:7] if odd else tensor)
        elif case == "size":
            comm.all_reduce(tensor)
        elif case == "shape":
            comm.all_reduce(tensor.view(4, 2) if odd else tensor.view(2, 4))
        elif case == "broadcast dtype":
            comm.broadcast(tensor.view(torch.int32) if odd else tensor)
        elif case == "dtype of bytes":
            comm.broadcast(tensor.view(torch.int16) if odd else tensor.view(torch.complex64))
        elif case == "dtype":
            other = tensor.view(torch.int32) if odd else tensor
            comm.all_reduce(other, "sum")
        elif case == "op":
            comm.all_reduce(tensor, "min" if odd else "max")
        elif case == "algorithm":
            comm.all_reduce(tensor, "sum", "ring" if odd else "two_shot")
        elif case == "root":
            comm.broadcast(tensor, 1 if odd else 0)
        elif case == "kind":
            if odd:
                comm.all_gather(torch.empty(8 * n), tensor)
            else:
                comm.all_reduce(tensor)
    assert torch.equal(tensor, before)
    comm.close()
    return describe(failure.value)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    "case, first, other",
    [
        ("numel", 8, 7),
        ("size", 100_000, 10),
        ("broadcast dtype", "float32", "int32"),
        ("dtype", "float32", "int32"),
        ("op", "max", "min"),
        ("algorithm", "two_shot", "ring"),
        ("root", 0, 1),
        ("kind", "all_reduce", "all_gather"),
    ],
)
def test_mismatch(ranks, world_size, case, first, other):
    errors = ranks(world_size).run(mismatched, case)
    for rank, error in enumerate(errors):
        assert error["rank"] == rank and error["peer"] == world_size - 1 and error["intact"]
        assert (error["expected"], error["seen"]) == (first, other)
        # The same words on all ranks, but for whose they are.
        assert error["text"].partition(": ")[2] == errors[0]["text"].partition(": ")[2]


@pytest.mark.parametrize("case", ["shape", "dtype of bytes"])
def test_other_shapes_of_one_size(ranks, case):
    for error in ranks(2).run(mismatched, case):
        assert error["intact"] and error["expected"] != error["seen"]
        assert "of another shape" in error["text"]


def interrupt_soon():
    # A shell's background processes, and what they start, ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()


def interrupted():
    comm = fastreduce.Communicator(timeout=LONG)
    if comm.rank == 0:
        interrupt_soon()
        with pytest.raises(KeyboardInterrupt):
            comm.barrier()
        with pytest.raises(fastreduce.CommunicatorError, match="interrupted"):
            comm.barrier()
        return "interrupted"
    time.sleep(1)
    with pytest.raises(fastreduce.CommunicatorError, match="rank 0 was interrupted"):
        comm.barrier()
    return "told"


def test_interrupt(ranks):
    assert ranks(2).run(interrupted) == ["interrupted", "told"]


def rebuilt():
    """After an error the ranks close, create anew, and go on."""
    comm = fastreduce.Communicator(timeout=LONG)
    with pytest.raises(fastreduce.MismatchError):
        comm.all_reduce(torch.ones(4 + comm.rank))
    works = []
    with pytest.raises(fastreduce.MismatchError):
        works.append(comm.all_reduce(torch.ones(4), async_op=True))
    comm.close()
    with fastreduce.Communicator(timeout=LONG) as again:
        tensor = torch.full((300_000,), float(again.rank))
        again.all_reduce(tensor, "sum")
    return tensor[-1].item()


def test_rebuilt_after_an_error(ranks):
    assert ranks(3).run(rebuilt) == [3.0] * 3


def queue_behind_failure():
    """Everything in the queue behind a failed call fails with its reason."""
    comm = fastreduce.Communicator(timeout=LONG)
    works = [comm.all_reduce(torch.ones(4), async_op=True)]
    works += [comm.all_reduce(torch.ones(5 + comm.rank), async_op=True)]
    try:
        for _ in range(3):
            works.append(comm.all_reduce(torch.ones(4), async_op=True))
    except fastreduce.MismatchError:
        pass  # the failure was already there
    works[0].wait()
    for work in works[1:]:
        with pytest.raises(fastreduce.MismatchError):
            work.wait()
    return True


def test_queue_behind_a_failure(ranks):
    assert all(ranks(2).run(queue_behind_failure))


def closed_under_a_call():
    """close() from another thread ends a call that waits for a peer that does not come."""
    comm = fastreduce.Communicator(timeout=LONG)
    if comm.rank == 1:
        time.sleep(1.5)
        comm._close(drain=False)
        return True
    threading.Timer(0.3, lambda: comm._close(drain=False)).start()
    with pytest.raises(fastreduce.PeerClosedError):
        comm.barrier()
    return True


def test_closed_under_a_call(ranks):
    assert all(ranks(2).run(closed_under_a_call))


def idle(async_op):
    """Waits a second for a peer that computes, and tells what it cost."""
    comm = fastreduce.Communicator(timeout=LONG)
    comm.barrier()
    if comm.rank == 0:
        time.sleep(1)
        comm.barrier()
        return 0.0
    begin = time.process_time()
    work = comm.barrier(async_op=async_op)
    if work is not None:
        work.wait()
    return time.process_time() - begin


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("async_op", [False, True])
def test_waiting_burns_no_core(ranks, world_size, async_op):
    """Processor time, which a busy machine does not change."""
    assert max(ranks(world_size).run(idle, async_op)) < 0.1


def culprit(how):
    """Rank 2 has left, rank 0 is late: rank 1 names rank 2."""
    comm = fastreduce.Communicator(timeout=LONG)
    comm.barrier()
    if comm.rank == 0:
        time.sleep(2)
        return None
    if comm.rank == 2:
        if how == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        comm.close()
        return None
    with pytest.raises(fastreduce.CommunicatorError) as failure:
        comm.barrier()
    return describe(failure.value)


@pytest.mark.parametrize("how, kind", [("SIGKILL", "PeerLostError"), ("close", "PeerClosedError")])
def test_the_right_peer_is_named(ranks, how, kind):
    group = ranks(3)
    for rank in range(3):
        group.start(rank, culprit, how)
    error = group.result(1)
    assert error["type"] == kind and error["peer"] == 2 and "rank 2" in error["text"]
    group.result(0)


def freed_then_lost():
    """Messages about memory do not hide that the peer has gone."""
    comm = fastreduce.Communicator(timeout=LONG)
    tensor = comm.empty(100_000).fill_(1)
    comm.all_reduce(tensor)
    comm.barrier()
    if comm.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.3)
    del tensor
    other = comm.empty(100_000)
    with pytest.raises(fastreduce.PeerLostError) as failure:
        comm.all_reduce(other)
    return describe(failure.value)


def test_freed_then_lost(ranks):
    group = ranks(2)
    for rank in range(2):
        group.start(rank, freed_then_lost)
    assert group.result(1)["peer"] == 0


def no_descriptor():
    """A tensor that cannot be shared is staged: the order of calls stays."""
    comm = fastreduce.Communicator(timeout=LONG)
    tensors = [torch.full((200_000,), 10.0 * i + comm.rank) for i in range(3)]
    if comm.rank == 1:
        real = comm._shared._add

        def refuse(storage):
            comm._shared._add = real
            raise OSError("too many open files")

        comm._shared._add = refuse
    for future in [comm.all_reduce_future(t, "sum") for t in tensors]:
        future.wait()
    return [t[5].item() for t in tensors]


def test_no_descriptor(ranks):
    assert ranks(2).run(no_descriptor) == [[1.0, 21.0, 41.0]] * 2


def interrupted_in_the_queue():
    """Ctrl-C in a call that waits behind an asynchronous one, and in close()."""
    comm = fastreduce.Communicator(timeout=LONG)
    if comm.rank == 1:
        time.sleep(2)
        with pytest.raises(fastreduce.CommunicatorError, match="rank 0 was interrupted"):
            comm.barrier()
        return True
    comm.all_reduce(torch.ones(4), async_op=True)
    interrupt_soon()
    with pytest.raises(KeyboardInterrupt):
        comm.barrier()
    return True


def interrupted_in_close():
    comm = fastreduce.Communicator(timeout=LONG)
    if comm.rank == 1:
        time.sleep(2)
        return True
    comm.all_reduce(torch.ones(4), async_op=True)
    interrupt_soon()
    with pytest.raises(KeyboardInterrupt):
        comm.close()
    return True


@pytest.mark.parametrize("task", [interrupted_in_the_queue, interrupted_in_close])
def test_interrupt_behind_asynchronous_work(ranks, task):
    assert ranks(2).run(task) == [True, True]
