"""Wire formats between GPUs, without one: the transport over gloo and the host's kernels, with
streams that only remember; when residuals count; what the bindings refuse. (With GPUs: tests/gpu.)
"""

from __future__ import annotations

import contextlib
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import Lines
from torch.futures import Future
from wires import HostCoding, same_bits

import fastreduce
from fastreduce import _C, cuda, enums, reference
from fastreduce.compression import Compression
from fastreduce.exchange import CPU, CudaExchange, Layout
from fastreduce.policy import GpuTopology
from fastreduce.process_group import ProcessGroupTransport
from fastreduce.residual import Residual
from fastreduce.wire import Policy

COUNT = 1000
KEY = 11

# -- the transport --------------------------------------------------------------------------------


class Stream:
    """Notes what is done on which stream."""

    current: Stream
    log: list[tuple[str, ...]]

    def __init__(self, name: str) -> None:
        self.name = name

    def wait_stream(self, other: Stream) -> None:
        self.log.append(("wait", self.name, other.name))

    def synchronize(self) -> None:
        self.log.append(("synchronize", self.name))


def note(what: str) -> None:
    Stream.log.append((what, Stream.current.name))


@contextlib.contextmanager
def on(stream: Stream):
    before, Stream.current = Stream.current, stream
    yield
    Stream.current = before


class Coding:
    """As cuda.WireCoding."""

    finite = True

    def __init__(self, world_size: int, *arguments: Any) -> None:
        self._host = HostCoding(arguments[0], world_size, *arguments[1:])

    def encode(self, sent: torch.Tensor) -> None:
        note("encode")
        self._host.encode(sent)

    def reduce(self, arrived: torch.Tensor, result: torch.Tensor) -> None:
        note("reduce")
        self._host.reduce(arrived, result)

    def decode(self, results: torch.Tensor, stride: int) -> None:
        note("decode")
        assert results.numel() % stride == 0
        self._host.decode(results)


class Gloo:
    """The backend, whose works are done when they are waited for."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            note(name)
            return getattr(self._group, name)(*arguments)

        return call

    def shutdown(self) -> None:
        note("shutdown")

    def abort(self) -> None:
        note("abort")


@contextlib.contextmanager
def without_a_device():
    Stream.current, Stream.log = Stream("main"), []

    def connect(self: CudaExchange, token: str, timeout: Any) -> Gloo:
        store = dist.PrefixStore(token, dist.distributed_c10d._get_default_store())
        return Gloo(dist.ProcessGroupGloo(store, self.rank, self.world_size, timeout))

    with (
        mock.patch.object(cuda, "problem", lambda: ""),
        mock.patch.object(dist, "is_nccl_available", lambda: True),
        mock.patch.object(CudaExchange, "_connect", connect),
        mock.patch.object(torch.cuda, "Stream", lambda device, priority: Stream("side")),
        mock.patch.object(torch.cuda, "current_stream", lambda device: Stream.current),
        mock.patch.object(torch.cuda, "stream", on),
        mock.patch.object(torch.cuda, "device", lambda device: contextlib.nullcontext()),
        mock.patch.object(torch.Tensor, "record_stream", lambda self, stream: None),
    ):
        yield


class Rank:
    """One that reduces buffers of one parameter."""

    def __init__(self) -> None:
        group = ProcessGroupTransport(None)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        timeout = timedelta(seconds=30)
        self.exchange = CudaExchange(group, self.rank, self.world_size, timeout, CPU)
        self.errors: list[Exception] = []

    def layout(self, format: str, count: int = COUNT) -> Layout:
        return Layout(self.world_size, [(0, count, KEY, enums.FORMAT[format], False, 128)])

    def reduce(
        self,
        layout: Layout,
        gradient: torch.Tensor,
        scale: float = 1.0,
        weight: Any = None,
        totals: list[Any] | None = None,
    ) -> tuple[Future[torch.Tensor], list[Any]]:
        residuals = torch.zeros(1, 4, dtype=torch.int64)
        settled: list[Any] = []

        def coding(factor: Any) -> Coding:
            number = enums.DTYPE[gradient.dtype]
            at = gradient.data_ptr(), number, self.rank, float(factor), residuals.data_ptr()
            return Coding(self.world_size, layout.spans, *at, enums.DTYPE[torch.float32], 0, 0, 0)

        future: Future[torch.Tensor] = Future()
        future.then(lambda _: note("completed"))
        totals = [] if totals is None else totals
        self.exchange.all_reduce(
            *(future, gradient, layout, coding, settled.append, scale, weight, totals),
            *(self.errors, None),
        )
        return future, settled


def inputs(world_size: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(COUNT, generator=generator) for _ in range(world_size)]


def reduce_some(state: dict) -> list[str]:
    wrong = []
    with without_a_device():
        rank = Rank()
        for format in ("int4", "bf16"):
            layout = rank.layout(format)
            for call in range(3):
                gradients = inputs(rank.world_size, call)
                own = gradients[rank.rank].clone()
                Stream.log = []
                future, settled = rank.reduce(layout, own)
                expected = reference.all_reduce_encoded(gradients, format, key=KEY).gradient
                if not (future.done() and same_bits(future.wait(), expected) and settled):
                    wrong.append(f"{format}, call {call}")
                steps = ["encode", "alltoall_base", "reduce", "_allgather_base", "decode"]
                steps = [*(["_allgather_base"] if call == 0 else []), *steps, "completed"]
                if Stream.log != [("wait", "side", "main"), *((step, "side") for step in steps)]:
                    wrong.append(f"{format}, call {call}: {Stream.log}")
        rank.exchange.close(drain=True)
        if Stream.log[-2:] != [("synchronize", "side"), ("shutdown", "main")]:
            wrong.append(f"close: {Stream.log[-2:]}")
    return wrong


@pytest.mark.parametrize("world_size", [2, 3])
def test_bits_and_order(pool, world_size):
    assert pool(world_size).run(reduce_some) == [[]] * world_size


def reduce_weighted(state: dict) -> list[str]:
    wrong = []
    with without_a_device():
        rank = Rank()
        layout = rank.layout("fp8_e4m3")
        gradients = inputs(rank.world_size, 5)
        weights = [0.0, 2.0, 0.5][: rank.world_size]
        gradients[0].fill_(float("nan"))  # the mean over no samples
        factors = [weight * rank.world_size / sum(weights) for weight in weights]
        weighted = reference.all_reduce_encoded(gradients, "fp8_e4m3", key=KEY, factors=factors)
        totals: list[Any] = []
        # A loss that is a mean over so many samples becomes their sum: the scale is the weight.
        for _ in range(2):
            own = gradients[rank.rank].clone()
            before = len([each for each in Stream.log if each[0] == "allreduce"])
            weight = weights[rank.rank]
            future, _ = rank.reduce(layout, own, weight, weight, totals)
            if not same_bits(future.wait(), weighted.gradient):
                wrong.append("weights")
            after = len([each for each in Stream.log if each[0] == "allreduce"])
            if after - before != (1 if before == 0 else 0):
                wrong.append("weights are to be summed once")
        # Some gave none: nobody can say so before the step is over.
        own = torch.ones(COUNT)
        future, _ = rank.reduce(layout, own, weight="ordinary" if rank.rank else 1.0)
        if not future.wait().isnan().all():
            wrong.append("mixed weights")
        rank.exchange.close(drain=False)
    return wrong


def test_weights(pool):
    assert pool(3).run(reduce_weighted) == [[]] * 3


def gather_some(state: dict) -> list[str]:
    wrong = []
    with without_a_device():
        rank = Rank()
        layout = rank.layout("fp32")
        tensor = torch.zeros(3)
        for call in range(2):
            found: list[torch.Tensor] = []
            future: Future[torch.Tensor] = Future()
            future.then(lambda _: note("completed"))

            def prepare(message: torch.Tensor, call: int = call) -> None:
                note("prepare")
                message.fill_(10 * call + rank.rank)

            def finish(messages: list[torch.Tensor], found: list[torch.Tensor] = found) -> None:
                note("finish")
                found += messages

            Stream.log = []
            rank.exchange.all_gather(future, tensor, layout, 24, prepare, finish, rank.errors)
            if future.wait() is not tensor or rank.errors:
                wrong.append(f"call {call}: {rank.errors}")
            told = [each.tolist() for each in found]
            if told != [[10 * call + other] * 24 for other in range(rank.world_size)]:
                wrong.append(f"call {call}: {told}")
            begins = [each.data_ptr() - found[0].data_ptr() for each in found]
            if begins != [24 * other for other in range(rank.world_size)]:
                wrong.append(f"call {call}: the messages do not lie one after the other: {begins}")
            steps = ["prepare", "_allgather_base", "finish", "completed"]
            steps = [*(["_allgather_base"] if call == 0 else []), *steps]
            if Stream.log != [("wait", "side", "main"), *((step, "side") for step in steps)]:
                wrong.append(f"call {call}: {Stream.log}")
        rank.exchange.close(drain=True)
    return wrong


def test_messages_of_all_to_all(pool):
    assert pool(3).run(gather_some) == [[]] * 3


def reduce_differently(state: dict) -> list[str]:
    with without_a_device():
        rank = Rank()
        layout = rank.layout("int8", COUNT - rank.rank)
        texts = []
        for _ in range(2):
            future, settled = rank.reduce(layout, torch.ones(COUNT))
            with pytest.raises(RuntimeError) as caught:
                future.wait()
            assert not settled
            texts.append(str(caught.value))
        assert len(rank.errors) == 1
    return texts


def test_another_layout_is_an_error_on_all_ranks_and_ends_all(pool):
    for first, second in pool(2).run(reduce_differently):
        assert "rank 1 encodes other parameters" in first
        assert "an earlier call has failed" in second


def connect_without_a_device(state: dict) -> str:
    with fastreduce.Communicator() as communicator:
        try:
            communicator.exchange(torch.device("cuda", 0))
        except RuntimeError as error:
            return str(error)
    return ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_what_is_missing_is_said_on_all_ranks(pool):
    for text in pool(2).run(connect_without_a_device):
        assert "gradients on GPUs cannot be encoded" in text


# -- over peers' memory --------------------------------------------------------------------------


class Transport:
    """As cuda.CudaTransport."""

    def __init__(self, topology: GpuTopology) -> None:
        self.topology = topology
        self.error: Exception | None = None
        self.calls: list[Any] = []

    @contextlib.contextmanager
    def aside(self, tensor: torch.Tensor):
        self.calls.append("aside")
        yield
        self.calls.append("back")

    def all_reduce_encoded(self, tensor: torch.Tensor, *arguments: Any) -> None:
        if self.error is not None:
            raise self.error
        self.calls.append(arguments)


GPU = torch.device("cuda", 0)


def communicator_of(monkeypatch: pytest.MonkeyPatch, topology: GpuTopology | None) -> Any:
    """One of two ranks whose GPUs are connected so, or not."""
    monkeypatch.setattr(fastreduce.Communicator, "__init__", lambda self: None)
    monkeypatch.setattr(fastreduce.communicator, "Future", lambda devices: Future())
    made: Any = fastreduce.Communicator()
    made.rank, made.world_size, made._core = 0, 2, None
    made._errors, made._said = [], set()
    made._gpus = {GPU: None if topology is None else Transport(topology)}
    made.exchanges = []
    made.exchange = lambda device: made.exchanges.append(device) or mock.Mock()
    return made


def reduce_through(communicator: Any, weight: Any = 3.0) -> tuple[Future[torch.Tensor], list[Any]]:
    tensor: Any = SimpleNamespace(is_cuda=True, device=GPU, is_floating_point=lambda: True)
    settled: list[Any] = []
    future = communicator.all_reduce_encoded(
        tensor,
        SimpleNamespace(checksum=77),
        lambda factor: f"coding for {factor}",
        settled.append,
        scale=0.5,
        weight=weight,
        totals=[],
        here=False,
        lands=False,
        done=None,
    )
    return future, settled


def test_gpus_that_reach_each_other_need_no_messages(monkeypatch):
    communicator = communicator_of(monkeypatch, GpuTopology("mesh"))
    Compression(Policy("int8", 0, 0), 0, torch.float32).connect(communicator, {}, GPU)
    future, settled = reduce_through(communicator)
    gpu = communicator._gpus[GPU]
    assert gpu.calls == ["aside", ("coding for 1.0", 0.5, 77, 3.0), "back"]
    assert future.done() and settled == ["coding for 1.0"] and communicator.exchanges == []
    # A call before has failed.
    gpu.error = fastreduce.PeerLostError("rank 1: gone")
    future, settled = reduce_through(communicator)
    with pytest.raises(fastreduce.PeerLostError):
        future.wait()
    assert settled == [] and communicator.error is gpu.error


@pytest.mark.parametrize("topology", [None, GpuTopology("mesh", hosts=2), GpuTopology("none")])
def test_other_gpus_send_messages(monkeypatch, topology):
    communicator = communicator_of(monkeypatch, topology)
    lines = Lines()
    Compression(Policy("int8", 0, 0), 0, torch.float32).connect(communicator, {}, GPU)
    for _ in range(2):
        _, settled = reduce_through(communicator)
        assert settled == []
    assert communicator.exchanges == [GPU] * 3
    # Who is not connected has been told why, as the GPUs were to be.
    assert len(lines.lines) == (topology is not None)
    assert all("go through NCCL, because" in line for line in lines.lines)


# -- residuals ------------------------------------------------------------------------------------


class Told:
    """A cuda.Flag."""

    def __init__(self, value: bool) -> None:
        self.value = value
        self.asked = 0

    def __bool__(self) -> bool:
        self.asked += 1
        return self.value


def ended(flags: list[bool], *, discard: bool = False) -> tuple[Compression, Residual, list[Told]]:
    """After a pass in which one parameter kept something back."""
    compression = Compression(Policy("int8", 0, 0), 0, torch.float32)
    communicator: Any = SimpleNamespace(shares_memory=lambda _: True, world_size=2, rank=0)
    compression.connect(communicator, {})
    residual = Residual(4, torch.float32, CPU)
    told = [Told(each) for each in flags]
    step = compression.begin(weighted=False)
    for each in told:
        section = SimpleNamespace(residual=residual, keeps=True)
        part = SimpleNamespace(sections=[section] if each is told[0] else [])
        compression._settle(step, part, SimpleNamespace(finite=each))  # type: ignore[arg-type]
    compression.end(step, discard=discard)
    return compression, residual, told


@pytest.mark.parametrize("flags", [[True], [True, True], [True, False], [False]])
@pytest.mark.parametrize("discard", [False, True])
def test_whether_a_pass_counts_is_asked_by_the_next(flags, discard):
    compression, residual, told = ended(flags, discard=discard)
    assert residual.now == 0 and not any(each.asked for each in told)
    compression.begin(weighted=False)
    counts = all(flags) and not discard
    assert (residual.now, residual.holds) == (int(counts), counts)
    assert all(each.asked == 1 for each in told) or not all(flags)
    compression.begin(weighted=False)  # a pass that has not ended says nothing
    assert residual.now == int(counts)


def test_a_pass_that_is_discarded_is_asked_first():
    compression, residual, told = ended([True])
    compression.discard()
    assert told[0].asked == 1
    assert (residual.now, residual.holds) == (0, False)


def test_a_state_and_a_rescaling_are_of_what_counts():
    for use in (
        lambda compression: compression.state_dict({}, merge=False),
        lambda compression: compression.rescale(2.0),
    ):
        compression, residual, _ = ended([True])
        use(compression)
        assert residual.now == 1


# -- bindings -------------------------------------------------------------------------------------


def test_plans_are_those_of_the_host():
    if cuda._cuda is None:
        pytest.skip("built without nvcc")
    rows = [(0, 300, 5, enums.FORMAT["int4"], False, 128), (300, 7, 6, 0, False, 32)]
    here, there = _C.WirePlan(3, rows), cuda._cuda.WirePlan(3, rows)
    assert [there.message_bytes(n) for n in range(3)] == [here.message_bytes(n) for n in range(3)]
    # 2 spans, 3 times 2 parts and an end, 3 messages and an end; 24 bytes each.
    assert len(there.image()) == 24 * (2 + 9 + 4)
    numbers = (4096, enums.DTYPE[torch.float32], 0, 1.0, 0)
    with pytest.raises(RuntimeError, match="not on the device"):
        cuda._cuda.WireCoding(there, *numbers, 4096, 0, 0, 0, 0, 4096)
    there.place(4096)
    cuda._cuda.WireCoding(there, *numbers, 4096, 0, 0, 0, 0, 4096)
    with pytest.raises(ValueError, match="expected addresses"):
        cuda._cuda.WireCoding(there, *numbers, 0, 0, 0, 0, 0, 4096)
    with pytest.raises(ValueError, match="rank: expected 0 to 2, got 3"):
        cuda._cuda.WireCoding(there, 4096, 0, 3, 1.0, 0, 4096, 0, 0, 0, 0, 4096)
    with pytest.raises(ValueError, match="run: expected"):
        cuda._cuda.WirePlan(3, [(0, 300, 5, 0, False, 6)])
