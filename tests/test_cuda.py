"""The Python side of the CUDA target without a GPU: what stands in for streams, kernels and peers'
memory is written out below. (With one: tests/gpu.)"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import Lines, make_inputs, same_bits

import fastreduce
from fastreduce import cuda, enums, policy, reference, rendezvous
from fastreduce.policy import MIB, GpuTopology

# -- without a device -----------------------------------------------------------------------------


class OnGpu(torch.Tensor):
    """A tensor that says that it lies on a GPU."""

    is_cuda = True
    is_cpu = False
    device = torch.device("cuda", 0)


def pass_a_cuda_tensor(state: dict) -> tuple[torch.Tensor, list[str], bool]:
    lines = Lines()
    inputs = make_inputs(5, dist.get_world_size(), 100, torch.float32)
    with fastreduce.Communicator() as communicator:
        tensor = inputs[communicator.rank].as_subclass(OnGpu)
        for device in ("cpu", "meta"):
            with pytest.raises(ValueError, match="CUDA device"):
                communicator.connect(device)
        if not torch.cuda.is_available():
            assert not communicator.connect("cuda")
            with pytest.raises(RuntimeError, match="process group"):
                communicator.tune(0)
        with pytest.raises(ValueError, match="on GPUs"):
            communicator.all_reduce(torch.ones(3), algorithm="multimem")
        with pytest.raises(ValueError, match="algorithm: expected one of"):
            communicator.all_reduce(tensor, algorithm="encoded")  # whose input is no tensor
        for _ in range(2):
            communicator.all_reduce(tensor, "sum")
        return tensor.as_subclass(torch.Tensor), lines.lines, torch.cuda.is_available()


def test_a_cuda_tensor_without_a_device(pool):
    results = pool(2).run(pass_a_cuda_tensor)
    once = reference.all_reduce(make_inputs(5, 2, 100, torch.float32), "sum")
    for tensor, lines, available in results:
        assert same_bits(tensor, reference.all_reduce([once, once], "sum"))
        if available:
            continue
        assert len(lines) == 1
        assert "CUDA tensors go through the process group, because on rank 0, " in lines[0]
        assert "without CUDA" in lines[0] or "CUDA does not work on this machine" in lines[0]


def test_what_is_missing_is_said(monkeypatch):
    monkeypatch.setattr(cuda, "_cuda", None)
    assert "no nvcc" in cuda.problem()
    with pytest.raises(RuntimeError, match="no nvcc"):
        cuda.convert([torch.zeros(1)], [torch.zeros(1)], 1.0, torch.device("cpu"))


def test_the_compiled_module_imports_without_a_driver():
    if cuda._cuda is None:
        pytest.skip("built without nvcc")
    assert cuda._cuda.GRID_LIMIT >= 32
    small = cuda._cuda.area_bytes(2, 1, 4096, 4096, 1024)
    assert cuda._cuda.area_bytes(8, 32, 4096, 4096, 1024) > small
    if not torch.cuda.is_available() and cuda.problem():
        with pytest.raises(RuntimeError, match="CUDA"):
            cuda._cuda.resident_blocks()
        with pytest.raises(RuntimeError, match="CUDA"):
            cuda._cuda.CudaCommunicator(
                0,
                [4096, 8192],
                blocks=1,
                slot_bytes=64,
                stage_bytes=1024,
                inbox_bytes=64,
                timeout=timedelta(seconds=1),
                first_epoch=0,
            )
        with pytest.raises(ValueError, match="ranks"):
            cuda._cuda.CudaCommunicator(
                0,
                [4096],
                blocks=1,
                slot_bytes=64,
                stage_bytes=1024,
                inbox_bytes=64,
                timeout=timedelta(seconds=1),
                first_epoch=0,
            )


# -- stand-ins ------------------------------------------------------------------------------------


@dataclass(eq=False)
class Stream:
    """Remembers what it was told to wait for."""

    cuda_stream: int
    capturing: bool = False
    waited: list[Stream] = field(default_factory=list)

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(other)

    def wait_event(self, event: Event) -> None:
        assert event.stream is not None
        self.waited.append(event.stream)


class Event:
    """Remembers where it was recorded."""

    def __init__(self) -> None:
        self.stream: Stream | None = None

    def record(self, stream: Stream) -> None:
        assert not stream.capturing
        self.stream = stream


class Streams:
    """torch.cuda's notion of a current stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.main = Stream(10)
        self.current = self.main
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(
            torch.cuda, "is_current_stream_capturing", lambda: self.current.capturing
        )
        monkeypatch.setattr(torch.cuda, "Stream", lambda *a, **k: Stream(11))
        monkeypatch.setattr(torch.cuda, "Event", Event)

    @contextlib.contextmanager
    def on(self, stream: Stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


class Core:
    """Kernels for ranks that all hold the same: a sum multiplies by their number."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.segments: dict[int, tuple[int, int, int]] = {}
        self.runs: list[tuple] = []
        self.error: Exception | None = None
        self.memory: list[torch.Tensor] = []

    def add_segment(self, number, bases, everywhere, nbytes):
        self.segments[number] = (bases[0], nbytes, everywhere)

    def remove_segment(self, number):
        self.segments.pop(number, None)

    def find(self, memory, nbytes, everywhere):
        for number, (base, size, multicast) in self.segments.items():
            inside = base <= memory and memory + nbytes <= base + size
            if inside and memory % 16 == 0 and (multicast or not everywhere):
                return number
        return -1

    def _floats(self, address: int, count: int) -> torch.Tensor:
        for memory in self.memory:
            begin = address - memory.data_ptr()
            if begin >= 0 and begin + 4 * count <= memory.nbytes:
                return (
                    memory.view(-1).view(torch.uint8)[begin : begin + 4 * count].view(torch.float32)
                )
        raise AssertionError("an address of nobody's")

    def run(self, plan, source, target, count, root, scale, weight, blocks, stream):
        if self.error is not None:
            raise self.error
        kind, algorithm = plan & 0xFF, plan >> 24 & 0xFF
        self.runs.append((kind, algorithm, source, target, count, blocks, stream))
        self.said = plan >> 32, scale, weight
        if algorithm == enums.ALGORITHM["encoded"]:
            return
        if kind == 0:
            out = self._floats(target, count)
            out.copy_(self._floats(source, count) * self.world_size * scale / abs(weight))
        elif kind == 1:  # as rank 0
            out = self._floats(target, count)
            out.copy_(self._floats(source, count * self.world_size)[:count] * self.world_size)

    def check(self):
        if self.error is not None:
            raise self.error

    def close(self, drain):
        self.runs.append(("close", drain))


PIECE = 4096


class Rank:
    """A transport whose staging holds PIECE bytes."""

    def __init__(self, monkeypatch, world_size: int = 2, *, multicast: bool = False) -> None:
        self.streams = Streams(monkeypatch)
        self.core = Core(world_size)
        self.area = torch.zeros(64 + PIECE, dtype=torch.uint8)
        self.core.memory.append(self.area)
        at = self.area.data_ptr()
        memory = cuda.SymmetricMemory(
            self.area, [at] * world_size, 1 << 40 if multicast else 0, None
        )

        def exchange(value):
            return [value] * world_size

        def allocate(nbytes, device, group, exchange):
            self.core.memory.append(torch.full((nbytes,), 7, dtype=torch.uint8))
            local = self.core.memory[-1]
            return cuda.SymmetricMemory(local, [local.data_ptr()] * world_size, 0, None)

        monkeypatch.setattr(cuda, "allocate", allocate)
        self.transport = cuda.CudaTransport(
            self.core, memory, 64, GpuTopology("switch", multicast), 32, exchange, None
        )

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        self.core.memory.append(tensor)
        return tensor


# -- launches -------------------------------------------------------------------------------------


def test_a_tensor_that_peers_reach_is_worked_on_where_it_lies(monkeypatch):
    rank = Rank(monkeypatch)
    tensor = rank.transport.empty((5000,), torch.float32)
    tensor.fill_(3)
    rank.transport.all_reduce(tensor, "sum", "two_shot", 1.0, 0)
    assert tensor.eq(6).all()
    step = PIECE // 4
    assert [run[4] for run in rank.core.runs] == [step] * 4 + [5000 - 4 * step]
    assert [run[2] - tensor.data_ptr() for run in rank.core.runs] == [PIECE * i for i in range(5)]
    assert all(run[2] == run[3] and run[6] == 10 for run in rank.core.runs)


@pytest.mark.parametrize("algorithm", ["two_shot", "multimem"])
def test_any_other_goes_through_the_staging_in_the_same_pieces(monkeypatch, algorithm):
    rank = Rank(monkeypatch, multicast=True)
    tensor = rank.own(torch.arange(5000, dtype=torch.float32))
    rank.transport.all_reduce(tensor, "sum", algorithm, 0.5, 0)
    assert tensor.equal(torch.arange(5000, dtype=torch.float32))
    step = PIECE // 4
    assert [run[4] for run in rank.core.runs] == [step] * 4 + [5000 - 4 * step]
    assert {run[2] for run in rank.core.runs} == {rank.area.data_ptr() + 64}


def test_memory_without_a_multicast_address_is_staged_for_multimem(monkeypatch):
    rank = Rank(monkeypatch, multicast=True)
    tensor = rank.transport.empty((8,), torch.float32)  # of this one the switch knows nothing
    rank.transport.all_reduce(tensor, "sum", "multimem", 1.0, 0)
    rank.transport.all_reduce(tensor, "sum", "two_shot", 1.0, 0)
    staged, direct = rank.core.runs
    assert staged[2] == rank.area.data_ptr() + 64
    assert direct[2] == tensor.data_ptr()


@pytest.mark.parametrize("algorithm", ["low_latency", "one_shot", "ring"])
def test_other_algorithms_need_no_staging(monkeypatch, algorithm):
    rank = Rank(monkeypatch)
    tensor = rank.own(torch.ones(3000))
    rank.transport.all_reduce(tensor, "sum", algorithm, 1.0, 0)
    assert tensor.eq(2).all()
    assert [run[2] for run in rank.core.runs] == [tensor.data_ptr()]


def test_memory_that_is_gone_is_not_taken_for_another_at_its_place(monkeypatch):
    rank = Rank(monkeypatch)
    tensor = rank.transport.empty((64,), torch.float32)
    at = tensor.data_ptr()
    assert rank.core.find(at, 256, False) == 1
    del tensor
    rank.core.memory = [each for each in rank.core.memory if each.data_ptr() != at]
    # Another tensor, of nobody's knowledge, has come to the same address.
    other = rank.own(torch.full((64,), 2.0))
    rank.core.segments[1] = (other.data_ptr(), 256, 0)
    rank.transport.all_reduce(other, "sum", "two_shot", 1.0, 0)
    assert rank.core.runs[-1][2] == rank.area.data_ptr() + 64  # staged
    assert other.eq(4).all() and list(rank.core.segments) == [0]
    # The next empty() hands the number on.
    assert rank.transport._segments[1].expired()
    again = rank.transport.empty((64,), torch.float32)
    assert list(rank.core.segments) == [0, 1]
    assert rank.core.segments[1][0] == again.data_ptr()


def test_reduce_scatter_and_gather_in_pieces(monkeypatch):
    monkeypatch.setattr(policy, "GPU_SLOT_BYTES", 256)
    rank = Rank(monkeypatch)
    whole = rank.own(torch.arange(6000, dtype=torch.float32))
    out = rank.own(torch.zeros(3000))
    rank.transport.reduce_scatter(out, whole, "sum", 1.0, 0)
    assert out.equal(2 * whole[:3000])
    assert sum(run[4] for run in rank.core.runs) == 3000 and len(rank.core.runs) == 6
    small = rank.own(torch.ones(8))
    out = rank.own(torch.zeros(4))
    rank.transport.reduce_scatter(out, small, "sum", 1.0, 0)
    assert out.eq(2).all()
    assert rank.core.runs[-1][2] == small.data_ptr()


def test_an_error_of_the_kernels_is_raised_and_nothing_is_copied_back(monkeypatch):
    rank = Rank(monkeypatch)
    tensor = torch.ones(2000)
    rank.core.error = fastreduce.PeerLostError("rank 0: gone")
    with pytest.raises(fastreduce.PeerLostError):
        rank.transport.all_reduce(tensor, "sum", "two_shot", 1.0, 0)
    assert tensor.eq(1).all()


def test_blocks_of_a_launch(monkeypatch):
    rank = Rank(monkeypatch)
    tensor = rank.own(torch.ones(64))
    rank.transport.all_reduce(tensor, "sum", "low_latency", 1.0, 0)
    assert rank.core.runs[-1][5] == policy.blocks("low_latency", 256, 2, 32) == 1


class Coding:
    """A cuda.WireCoding of somebody's tensor."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cuda, "Flag", lambda found: found)
        self.made = cuda.WireCoding.__new__(cuda.WireCoding)
        self.made.finite = None
        self.made._core = SimpleNamespace(address=4096)  # type: ignore[assignment]
        self.made._found = torch.ones(1)


def test_wire_formats_are_one_launch_on_the_tensor_itself(monkeypatch):
    rank, coding = Rank(monkeypatch), Coding(monkeypatch).made
    tensor = torch.ones(PIECE)  # larger than the staging
    rank.transport.all_reduce_encoded(tensor, coding, 0.5, 77, 2.0)
    blocks = policy.blocks("encoded", tensor.nbytes, 2, 32)
    at = tensor.data_ptr()
    assert rank.core.runs == [(0, enums.ALGORITHM["encoded"], 4096, at, PIECE, blocks, 10)]
    assert rank.core.said == (77, 0.5, 2.0)
    assert coding.finite is not None


def test_wire_formats_that_are_not_launched_are_not_told_of(monkeypatch):
    rank, coding = Rank(monkeypatch), Coding(monkeypatch).made
    rank.core.error = fastreduce.PeerLostError("rank 0: gone")
    with pytest.raises(fastreduce.PeerLostError):
        rank.transport.all_reduce_encoded(torch.ones(8), coding, 1.0, 0)
    assert coding.finite is None


# -- streams and graphs ---------------------------------------------------------------------------


def test_calls_of_two_streams_run_one_after_the_other(monkeypatch):
    streams = Streams(monkeypatch)
    order = cuda.CallOrder()
    a, b = Stream(1), Stream(2)
    for stream in (a, a, b, a):
        with streams.on(stream):
            order.enter(stream)
            order.leave(stream)
    assert b.waited == [a] and a.waited == [b]


def test_a_captured_call_waits_only_for_what_is_captured_with_it(monkeypatch):
    streams = Streams(monkeypatch)
    order = cuda.CallOrder()
    eager, first, second = Stream(1), Stream(2, capturing=True), Stream(3, capturing=True)
    for stream in (eager, first, second):
        with streams.on(stream):
            order.enter(stream)
            order.leave(stream)
    assert first.waited == [] and second.waited == [first]
    first.capturing = second.capturing = False
    third = Stream(4, capturing=True)  # of another graph
    with streams.on(third):
        order.enter(third)
        order.leave(third)
    assert third.waited == []
    # After the capture, an eager call has nothing to wait for but what the caller says.
    third.capturing = False
    with streams.on(eager):
        order.enter(eager)
    assert eager.waited == []


def test_the_first_call_cannot_be_captured(monkeypatch):
    streams = Streams(monkeypatch)
    streams.main.capturing = True
    monkeypatch.setattr(cuda, "problem", lambda: "")
    monkeypatch.setattr(fastreduce.Communicator, "__init__", lambda self: None)
    communicator = fastreduce.Communicator()
    communicator._gpus, communicator.world_size = {}, 2
    with pytest.raises(RuntimeError, match="before the capture"):
        communicator._gpu_on(torch.device("cuda", 0))


# -- peers ----------------------------------------------------------------------------------------


def probe_all(world_size: int, peer_of) -> list[str]:
    """What every rank finds, with ranks as threads. ``peer_of(reader, owner, memories)``."""
    memories = [torch.zeros(1 << 16, dtype=torch.uint8) for _ in range(world_size)]
    meeting = threading.Barrier(world_size)
    found = [""] * world_size

    def run(rank: int) -> None:
        def peer(owner: int, begin: int, size: int) -> torch.Tensor:
            return peer_of(rank, owner, memories)[begin : begin + size]

        memory = cuda.SymmetricMemory(memories[rank], [0] * world_size, 0, peer)
        found[rank] = rendezvous.probe(memory, rank, meeting.wait, 4096)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert all(not memory.any() for memory in memories)
    return found


def test_probe_of_memory_that_is_shared():
    assert probe_all(3, lambda reader, owner, memories: memories[owner]) == ["", "", ""]


def test_probe_of_reads_that_give_something_else():
    other = torch.zeros(1 << 16, dtype=torch.uint8)
    found = probe_all(
        2, lambda reader, owner, memories: other if reader > owner else memories[owner]
    )
    assert "reads wrong values from rank 0" in found[1]
    # And what it writes there does not arrive.
    assert "what rank 1 writes into rank 0's memory does not arrive" in found[0]


def test_probe_of_writes_that_get_lost():
    found = probe_all(
        2,
        lambda reader, owner, memories: (
            memories[owner].clone() if reader == 0 and owner == 1 else memories[owner]
        ),
    )
    assert found[0] == "" or "reads wrong" in found[0]
    assert "what rank 0 writes into rank 1's memory does not arrive" in found[1]


class Losses:
    def __init__(self) -> None:
        self.lost: list[int] = []

    def lose(self, peer: int) -> None:
        self.lost.append(peer)


def wait_until(holds) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_peer_on_another_host_that_falls_silent_is_reported():
    store = dist.HashStore()
    cores = [Losses(), Losses(), Losses()]
    watches = [
        rendezvous.Heartbeat(
            core, rank, [p for p in range(3) if p != rank], store, period=0.02, silence=4.0
        )
        for rank, core in enumerate(cores)
    ]
    for watch in watches:
        watch.start()
    time.sleep(1.0)
    assert [core.lost for core in cores] == [[], [], []]
    watches[1].stop()
    wait_until(lambda: cores[0].lost == [1] and cores[2].lost == [1])
    watches[0].stop()
    watches[2].stop()


def test_memory_that_one_rank_does_not_have_is_refused_by_all(monkeypatch):
    from torch.distributed import _symmetric_memory as symmetric

    met = []

    def exchange(reason):
        met.append(reason)
        return ["", reason, "on rank 2, out of memory"]

    def rendezvous(*_):
        raise AssertionError("nobody meets")

    monkeypatch.setattr(symmetric, "rendezvous", rendezvous)
    with pytest.raises(RuntimeError, match=r"symmetric memory|rank 2"):
        cuda.allocate(64, torch.device("cuda", 0), None, exchange)
    assert len(met) == 1


def test_a_store_that_is_gone_ends_the_watch():
    class Gone:
        def set(self, *_):
            raise RuntimeError("connection reset")

    core = Losses()
    watch = rendezvous.Heartbeat(core, 0, [1], Gone(), period=0.02, silence=0.1)
    watch.start()
    time.sleep(0.3)
    watch.stop()
    assert core.lost == []


def test_the_pieces_of_the_staging_fit_what_is_allocated():
    assert policy.GPU_PIECE_BYTES % (16 * MIB) == 0
    assert rendezvous._PROBE_BYTES <= policy.GPU_PIECE_BYTES


@pytest.mark.parametrize("world_size", [2, 8, 12, 13, 64])
def test_the_staging_has_room_for_the_longest_run_of_every_rank(world_size):
    """See csrc/all_reduce.h: EncodedSlots."""
    room = policy.gpu_stage_bytes(world_size) // (5 * (world_size + 1)) // 64 * 64
    assert room >= 1024 * 4
