"""Wire formats on GPUs: the kernels' bits with any number of ranks on one GPU, in three steps and
all in one; and the way between GPUs over NCCL with one rank on one GPU, and, where there are
several, training."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import needs_gpu
from selections import SELECTIONS, compare_selected
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from wires import CASES, SEED, Group, compare, same_bits

import fastreduce
from fastreduce import cuda, enums, policy, reference
from fastreduce.errors import FORMATS
from fastreduce.exchange import CudaExchange, Layout
from fastreduce.process_group import ProcessGroupTransport
from fastreduce.weights import ORDINARY
from fastreduce.wire import Wire, key_of

pytestmark = needs_gpu()

pytest.importorskip("fastreduce._cuda", reason="built without nvcc")
from benchmarks import in_process  # noqa: E402

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class OnGpu:
    """The kernels, as tests/wires.py has them. With ``factor_at``, factors lie in memory."""

    device = torch.device("cuda", 0)

    def __init__(self, *, factor_at: bool = False) -> None:
        self._factor_at = factor_at

    def plan(self, ranks: int, rows: list[Any]) -> cuda.WirePlan:
        self._ranks = ranks
        return cuda.WirePlan(ranks, rows, self.device)

    def coding(self, plan, gradient, rank, factor, residuals, residual_dtype, absent, step):
        if self._factor_at:
            factor = torch.tensor(factor, dtype=torch.float32, device=self.device)
        arguments = (plan, gradient, rank, factor, residuals, residual_dtype, absent, SEED, step)
        return _Coding(cuda.WireCoding(*arguments), self._ranks, gradient, factor)


class _Coding:
    def __init__(
        self, core: cuda.WireCoding, ranks: int, gradient: torch.Tensor, factor: Any
    ) -> None:
        self.encode, self.reduce = core.encode, core.reduce
        self.core, self.gradient, self.factor = core, gradient, factor
        self._ranks = ranks

    @property
    def finite(self) -> bool:
        return bool(self.core.finite)

    def decode(self, results: torch.Tensor) -> None:
        self.core.decode(results, results.numel() // self._ranks)


class Fused(Group):
    """All of a reduction in one kernel of every rank, which has a stream of its own."""

    def _exchange(self, codings: Sequence[Any]) -> None:
        launch_fused(codings, [0] * self.ranks).close()


def launch_fused(codings: Sequence[_Coding], shapes: list[int]) -> in_process.Group:
    """The ranks, once their calls have ended."""
    made = in_process.Group(len(codings))
    for rank, coding in enumerate(codings):
        gradient = coding.gradient
        made.cores[rank].run(
            enums.plan("all_reduce", gradient.dtype, "mean", "encoded", shapes[rank]),
            coding.core._core.address,
            gradient.data_ptr(),
            gradient.numel(),
            0,
            coding.factor,
            ORDINARY,
            policy.blocks("encoded", gradient.nbytes, len(codings), made.blocks),
            made.streams[rank].cuda_stream,
        )
    torch.cuda.synchronize()
    for coding in codings:
        coding.core.all_reduce(lambda address: None)  # to allocate a flag can wait for the device
    if len(set(shapes)) == 1:
        for core in made.cores:
            core.check()
    return made


@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_bits_of_the_reference(format, dtype, stochastic):
    compare(format, dtype, stochastic, OnGpu())


@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_bits_of_the_reference_in_one_kernel(format, dtype, stochastic):
    compare(format, dtype, stochastic, OnGpu(), CASES[1:], Fused)


@pytest.mark.parametrize("ranks", [4, 6, 7, 9])
def test_any_number_of_ranks_in_one_kernel(ranks):
    compare("int4", torch.float32, False, OnGpu(), [(ranks, 32, [33, 64, 5])], Fused)


def test_other_layouts_are_a_mismatch_on_all():
    target = OnGpu()
    plan = target.plan(3, [(0, 1000, 7, enums.FORMAT["int8"], False, 128)])
    gradients = [torch.full((1000,), 1.0 + rank, device="cuda") for rank in range(3)]
    none = torch.zeros(1, 4, dtype=torch.int64, device="cuda")
    codings = [
        target.coding(plan, each, rank, 1.0, none, torch.float32, None, 0)
        for rank, each in enumerate(gradients)
    ]
    group = launch_fused(codings, [5, 5, 6])
    for rank, core in enumerate(group.cores):
        with pytest.raises(fastreduce.MismatchError, match="shape") as caught:
            core.check()
        assert caught.value.intact and caught.value.peer == 2
        assert gradients[rank].eq(1.0 + rank).all() and not codings[rank].finite
    group.close()


@pytest.mark.parametrize("ranks", [4, 6, 7, 9, 16, 21])
@pytest.mark.parametrize("format", FORMATS)
def test_any_number_of_ranks(format, ranks):
    compare(format, torch.float32, False, OnGpu(), [(ranks, 32, [33, 64, 5])])


def test_factors_in_memory():
    compare("fp8_e4m3", torch.bfloat16, True, OnGpu(factor_at=True), CASES)


@pytest.mark.parametrize("format", FORMATS)
def test_a_large_buffer(format):
    """Every warp has several runs, every block several pieces. Beside the host's kernels: the
    reference would take long."""
    counts = [3_000_000, 17, 0, 1_000_001]
    gradients = [[torch.randn(n) for n in counts] for _ in range(2)]

    def reduced(target: Any, make: type[Group] = Group) -> list[torch.Tensor]:
        kept = [[[torch.zeros(n) for n in counts] for _ in range(2)] for _ in range(2)]
        outputs, finite = make(format, counts, 2, target=target).reduce(gradients, *kept)
        assert finite
        return [*outputs[0], *kept[0][0]]

    wanted = reduced(None)
    for found in (reduced(OnGpu()), reduced(OnGpu(), Fused)):
        for got, want in zip(found, wanted, strict=True):
            assert same_bits(got, want)


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_not_finite_is_told(format):
    group = Group(format, [500], 3, target=OnGpu())
    gradients = [[torch.randn(500)] for _ in range(3)]
    assert group.reduce(gradients)[1]
    gradients[1][0][301] = torch.nan
    assert not group.reduce(gradients)[1]


def test_residuals_in_bfloat16():
    gradients = [[torch.randn(1000)] for _ in range(2)]

    def reduced(target: Any) -> list[torch.Tensor]:
        narrow = torch.bfloat16
        kept = [[[torch.zeros(1000, dtype=narrow)] for _ in range(2)] for _ in range(2)]
        group = Group("int8", [1000], 2, target=target)
        for _ in range(2):
            outputs, _ = group.reduce(gradients, *kept)
        return [outputs[0][0], kept[0][0][0]]

    for got, want in zip(reduced(OnGpu()), reduced(None), strict=True):
        assert same_bits(got, want)


class SelectingOnGpu(OnGpu):
    """Of codings that select."""

    def coding(self, plan, gradient, rank, factor, residuals, residual_dtype, absent, step):
        arguments = (plan, gradient, rank, factor, residuals, residual_dtype, absent, SEED, step)
        return cuda.WireCoding(*arguments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wire", SELECTIONS, ids=str)
def test_selections_have_the_bits_of_the_reference(wire, dtype):
    compare_selected(wire, dtype, SelectingOnGpu())


@pytest.mark.parametrize("ranks", [2, 9, 40])
def test_selections_of_any_number_of_ranks(ranks):
    compare_selected(Wire("topk", k=0.05), torch.float32, SelectingOnGpu(), ranks)


@pytest.mark.parametrize("wire", ["topk", "randomk", "threshold"])
def test_a_large_selection(wire):
    """As the host's, of more tiles than there are warps."""
    wire = Wire(wire, k=0.01, threshold=0.1 if wire == "threshold" else 0.0)
    counts = [10_000_000, 3_000_001]
    compare_selected(wire, torch.float32, SelectingOnGpu(), 2, counts)


# -- over NCCL ------------------------------------------------------------------------------------


def exchange_alone(format: str) -> list[str]:
    """A rank that sends to itself alone, on a GPU that is busy: nothing waits for it."""
    wrong = []
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    exchange = CudaExchange(ProcessGroupTransport(None), 0, 1, timedelta(seconds=60), device)
    layout = Layout(1, [(0, 100_000, 7, enums.FORMAT[format], False, 128)], device)
    kept = torch.zeros(4, 100_000, device=device)
    table = torch.tensor([[each.data_ptr() for each in kept]], device=device)
    errors: list[Exception] = []
    for call in range(6):
        given = torch.randn(100_000)
        gradient = given.to(device)
        if call:
            torch.cuda._sleep(200_000_000)
        gradient.mul_(2.0)  # on the current stream, as a backward pass
        settled: list[cuda.WireCoding] = []
        future: Future[torch.Tensor] = Future(devices=[device])

        def coding(factor: Any, gradient: torch.Tensor = gradient) -> cuda.WireCoding:
            return cuda.WireCoding(
                layout.spans, gradient, 0, factor, table, torch.float32, None, 0, 0
            )

        weight = 3.0 if call % 2 else None
        exchange.all_reduce(
            *(future, gradient, layout, coding, settled.append, 1.0, weight, []), *(errors, None)
        )
        # At first ranks compare their layouts, and memory of the host is pinned.
        if call >= 2 and torch.cuda.current_stream().query():
            wrong.append(f"call {call} has waited for the device")
        got = future.wait().cpu()  # which lets the current stream wait
        old = torch.zeros(100_000)
        factors = [1 / 3 if weight else 1.0]
        expected = reference.all_reduce_encoded(
            [given * 2.0], format, sent=[old], reduced=old, factors=factors, key=7
        )
        if errors or not (settled and same_bits(got, expected.gradient)):
            wrong.append(f"call {call}: {errors}")
        if not bool(settled[0].finite) or not same_bits(kept[1].cpu(), expected.sent[0]):
            wrong.append(f"call {call}: residuals")
    exchange.close(drain=True)
    return wrong


@pytest.mark.parametrize("format", ["int8", "onebit"])
def test_exchange_alone(ranks, format):
    assert ranks(1).run(exchange_alone, format) == [[]]


class Model(torch.nn.Module):
    """Whose gradients are its inputs."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


def train(format: str, steps: int) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Every step's averaged gradient; in one step, rank 0's holds an inf."""
    rank = dist.get_rank()
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    ddp = DistributedDataParallel(Model(100_000).to(device), device_ids=[device.index])
    state = fastreduce.attach(ddp, wire=format, wire_min_bytes=0)
    found = []
    for step in range(steps):
        ddp.zero_grad()
        ddp(gradient_of(rank, step).to(device)).backward()
        [parameter] = ddp.parameters()
        assert parameter.grad is not None
        found.append(parameter.grad.cpu())
    saved = state.state_dict()["compression"]["residuals"]["weight"]
    state.close()
    return found, {name: each.cpu() for name, each in saved.items()}


def gradient_of(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    gradient = torch.randn(100_000, generator=generator)
    if step == 2 and rank == 0:
        gradient[5] = torch.inf
    return gradient


def train_measured(wire: Any, steps: int) -> tuple[list[torch.Tensor], str]:
    """What is sent comes to the mean in the end, and the measuring says so."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    model = torch.nn.Linear(64, 48, bias=False).to(device)
    ddp = DistributedDataParallel(model, device_ids=[device.index])
    state = fastreduce.attach(ddp, wire=wire, wire_min_bytes=0, measure=2)
    applied = torch.zeros(48, 64, device=device)
    true = torch.zeros(48, 64, device=device)
    for step in range(steps):
        ddp.zero_grad()
        inputs = [
            torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * step + each))
            for each in range(world_size)
        ]
        ddp(inputs[rank].to(device)).sum().backward()
        assert model.weight.grad is not None
        applied += model.weight.grad
        true += torch.stack([each.sum(0) for each in inputs]).mean(0).to(device)
    saved = state.state_dict(merge=True)["compression"]["residuals"]["weight"]["sent"]
    verdict = state.measurement.verdict
    state.close()
    return [(applied + saved.to(device)).cpu(), true.cpu()], verdict


@pytest.mark.parametrize(
    "wire", [Wire("topk", k=0.1), Wire("lowrank", rank=2), Wire("int8")], ids=str
)
def test_nothing_is_lost(ranks, wire):
    if torch.cuda.device_count() < 2 and "NCCL_MULTI_RANK_GPU_ENABLE" not in os.environ:
        pytest.skip("needs two GPUs")
    for (got, want), verdict in ranks(2).run(train_measured, wire, 6):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)
        assert verdict


@pytest.mark.parametrize("format", FORMATS[1:])
def test_training_has_the_bits_of_the_reference(ranks, format):
    """With residuals from step to step, but for the step that is not finite."""
    if torch.cuda.device_count() < 2 and "NCCL_MULTI_RANK_GPU_ENABLE" not in os.environ:
        pytest.skip("needs two GPUs")
    results = ranks(2).run(train, format, 5)
    sent, reduced = [torch.zeros(100_000) for _ in range(2)], torch.zeros(100_000)
    for step in range(5):
        expected = reference.all_reduce_encoded(
            [gradient_of(rank, step) for rank in range(2)],
            format,
            sent=sent,
            reduced=reduced,
            key=key_of("weight"),
            step=step,
        )
        for found, _ in results:
            assert same_bits(found[step], expected.gradient), step
        if expected.gradient.isfinite().all():
            sent, reduced = expected.sent, expected.reduced
    for rank, (_, saved) in enumerate(results):
        assert same_bits(saved["sent"], sent[rank])
    together = results[0][1]["reduced"] + results[1][1]["reduced"]
    assert same_bits(together, reduced)
