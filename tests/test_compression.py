"""What lossy wire formats keep back: by parameter name, through all that happens to a run."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from selections import SELECTIONS, compare_selected
from torch import Tensor, nn
from torch.futures import Future
from wires import Host

from fastreduce import Wire, reference
from fastreduce.compression import Compression
from fastreduce.exchange import Layout
from fastreduce.wire import Policy

LOSSY = [
    *(Wire(name) for name in ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "int8", "int4", "onebit")),  # type: ignore[arg-type]
    Wire("int4", rounding="stochastic", block=32),
    Wire("topk", k=0.1),
    Wire("randomk", k=7),
    Wire("threshold", k=0.5, threshold=0.01),
    Wire("lowrank", rank=1),
]
SHAPES = {"a": (9, 40), "b": (129,), "c": (3, 5), "d": (1,), "e": (2, 8, 33)}


def name_of(wire: Wire) -> str:
    return f"{wire.format}-{wire.rounding}"


class Rank:
    """A rank's communicator, as far as Compression needs one: calls wait until all ranks have made
    theirs, and then run in the kernels, one rank after the other."""

    def __init__(self, group: Group, rank: int) -> None:
        self.group, self.rank, self.world_size = group, rank, group.world_size

    def shares_memory(self, device: torch.device) -> bool:
        return True

    def all_reduce_encoded(
        self,
        tensor: Tensor,
        layout: Layout,
        coding: Any,
        settle: Any,
        *,
        scale: float,
        **_: Any,
    ) -> Future[Tensor]:
        future: Future[Tensor] = Future()
        self.group.arrive("encoded", (self, tensor, layout, coding(scale), settle, future))
        return future

    def all_gather_encoded(
        self, tensor: Tensor, layout: Layout, nbytes: int, prepare: Any, finish: Any, *, here: bool
    ) -> Future[Tensor]:
        future: Future[Tensor] = Future()
        message = torch.empty(nbytes, dtype=torch.uint8)
        prepare(message)
        self.group.arrive("gathered", (self, tensor, layout, message, finish, future))
        return future

    def all_reduce(self, tensor: Tensor, op: str) -> None:
        whole = self.group.meet(self.rank, tensor)
        tensor.copy_(reference.all_reduce(whole, op))

    def broadcast(self, tensor: Tensor) -> None:
        tensor.copy_(self.group.meet(self.rank, tensor)[0])


class Group:
    """Ranks of one process in lockstep, each with a thread of its own."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.calls: dict[str, list[Any]] = {}
        self.lock = threading.Lock()
        self.barrier = threading.Barrier(world_size, timeout=60)
        self.values: dict[int, Tensor] = {}
        self.threads = ThreadPoolExecutor(world_size)

    def each(self, function: Callable[[int], Any]) -> list[Any]:
        """What it returns for every rank."""
        return list(self.threads.map(function, range(self.world_size)))

    def meet(self, rank: int, value: Tensor) -> list[Tensor]:
        """Every rank's."""
        self.values[rank] = value.clone()
        self.barrier.wait()
        values = [self.values[each] for each in range(self.world_size)]
        self.barrier.wait()
        return values

    def arrive(self, kind: str, call: Any) -> None:
        with self.lock:
            calls = self.calls.setdefault(kind, [])
            calls.append(call)
            if len(calls) < self.world_size:
                return
            self.calls[kind] = []
            calls.sort(key=lambda call: call[0].rank)
        assert len({layout.checksum for _, _, layout, *_ in calls}) == 1
        if kind == "gathered":
            messages = [message for _, _, _, message, _, _ in calls]
            for _, tensor, _, _, finish, future in calls:
                finish(messages)
                future.set_result(tensor)
            return
        sizes = calls[0][2].sizes
        sent = [[torch.empty(n, dtype=torch.uint8) for n in sizes] for _ in calls]
        back = [torch.empty(n, dtype=torch.uint8) for n in sizes]
        for own, (_, _, _, coding, _, _) in zip(sent, calls, strict=True):
            for chunk, message in enumerate(own):
                coding.encode(chunk, message.data_ptr())
        for rank, (_, _, _, coding, _, _) in enumerate(calls):
            coding.reduce([own[rank].data_ptr() for own in sent], back[rank].data_ptr())
        for _, tensor, _, coding, settle, future in calls:
            for chunk, message in enumerate(back):
                coding.decode(chunk, message.data_ptr())
            settle(coding)
            future.set_result(tensor)


def zeros() -> dict[str, Tensor]:
    return {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}


class Run:
    """A training run's gradients: what was applied, what should have been, what is kept back."""

    def __init__(
        self, ranks: int, wire: Any, dtype: torch.dtype = torch.float32, **how: Any
    ) -> None:
        self.dtype, self.wire, self.how = dtype, wire, how
        self.parameters = {
            name: nn.Parameter(torch.zeros(shape, dtype=dtype)) for name, shape in SHAPES.items()
        }
        self.applied = {
            name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()
        }
        self.wanted = {
            name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()
        }
        self.order = list(SHAPES)
        self.cut = 2
        self.step = 0
        self.loss_scale = 1.0
        self.begin(ranks)

    def begin(self, ranks: int) -> None:
        if hasattr(self, "group"):
            self.group.threads.shutdown()
        group = self.group = Group(ranks)
        self.ranks = []
        for rank in range(ranks):
            policy = Policy(self.wire, self.how.get("warmup_steps", 0), self.how.get("small", 0))
            compression = Compression(policy, 3, self.how.get("residual_dtype", torch.float32))
            shapes = {name: torch.Size(shape) for name, shape in SHAPES.items()}
            compression.connect(Rank(group, rank), shapes)  # type: ignore[arg-type]
            self.ranks.append(compression)

    def buckets(self) -> list[list[str]]:
        return [each for each in (self.order[: self.cut], self.order[self.cut :]) if each]

    def backward(
        self,
        seed: int,
        *,
        unused: tuple[str, ...] = (),
        by: int | None = None,
        poison: tuple[str, float] | None = None,
        count: Callable[[], bool] = lambda: True,
    ) -> bool:
        """One synchronised pass. ``unused`` parameters are so on all ranks, or on rank ``by``.
        Returns whether the averaged gradients are finite; only then the step is taken."""
        generator = torch.Generator().manual_seed(seed)
        gradients = []
        size = 0.1 * self.loss_scale
        for rank in range(len(self.ranks)):
            own = {
                name: (torch.randn(shape, generator=generator) * size).to(self.dtype)
                for name, shape in SHAPES.items()
            }
            for name in unused:
                if by is None or by == rank:
                    own[name].zero_()
            gradients.append(own)
        if poison is not None:
            gradients[-1][poison[0]].view(-1)[-1] = poison[1]
        steps = self.group.each(lambda rank: self.ranks[rank].begin(weighted=False))
        means: dict[str, Tensor] = {}
        for names in self.buckets():
            flats = [torch.cat([own[n].flatten() for n in names]) for own in gradients]

            def launch(rank: int, names: list[str] = names, flats: list[Tensor] = flats) -> Any:
                compression = self.ranks[rank]
                parameters = [(n, self.parameters[n]) for n in names]
                step = steps[rank]
                layout = compression.layout(step, parameters, self.dtype)
                if layout is None:
                    return None
                absent = {n for n in unused if n in names and (by is None or by == rank)}
                how: Any = {"absent": absent, "scale": 1.0, "weight": None}
                how |= {"here": False, "done": None}
                return compression.all_reduce(step, layout, flats[rank], **how)

            ends = self.group.each(launch)
            if None in ends:
                assert ends == [None] * len(ends), "ranks do not agree"
                mean = reference.all_reduce(flats, "mean")
                for flat, compression, step in zip(flats, self.ranks, steps, strict=True):
                    flat.copy_(mean)
                    compression.watch(step, flat)
            else:
                for each in ends:
                    each.wait()
            for flat in flats:
                assert torch.equal(flat.nan_to_num(3e38), flats[0].nan_to_num(3e38)), "ranks differ"
            parts = flats[0].split([self.parameters[n].numel() for n in names])
            means |= {n: p.view(SHAPES[n]) for n, p in zip(names, parts, strict=True)}
        for compression, step in zip(self.ranks, steps, strict=True):
            compression.end(step)
        self.step += 1
        finite = all(mean.isfinite().all() for mean in means.values())
        if finite and count():
            for name, mean in means.items():
                if name in unused and by is None:
                    continue  # DDP leaves its gradient alone
                self.applied[name] += mean.double() / self.loss_scale
                whole = torch.stack([own[name].double() for own in gradients])
                self.wanted[name] += whole.mean(0) / self.loss_scale
        return finite

    def kept(self) -> dict[str, Tensor]:
        """What the updates still lack."""
        lacking = zeros()
        for compression in self.ranks:
            for name, residual in compression._residuals.items():
                own = residual.sent.double() / len(self.ranks) + residual.reduced.double()
                lacking[name] += own.view(SHAPES[name]) / self.loss_scale
        return lacking

    def check(self, tolerance: float = 2e-6) -> None:
        kept = self.kept()
        for name, applied in self.applied.items():
            missing = (applied + kept[name] - self.wanted[name]).abs().max().item()
            assert missing <= tolerance * (1 + self.step), f"{name}: {missing}"

    def rescale(self, factor: float) -> None:
        self.loss_scale *= factor
        for compression in self.ranks:
            compression.rescale(factor)

    def bits(self) -> list[dict[str, list[Tensor]]]:
        return [
            {n: [r.sent.clone(), r.reduced.clone()] for n, r in c._residuals.items()}
            for c in self.ranks
        ]

    def save(self) -> list[dict[str, Any]]:
        return [c.state_dict(self.parameters, merge=False) for c in self.ranks]

    def load(self, states: list[dict[str, Any]], ranks: int) -> None:
        self.begin(ranks)
        for rank, compression in enumerate(self.ranks):
            mine = [states[rank]] if ranks == len(states) else states
            compression.load_state_dict(mine, self.parameters)


def unchanged(run: Run, before: list[dict[str, list[Tensor]]]) -> None:
    """A step that was not taken has changed no residual; new ones are zero."""
    for now, then in zip(run.bits(), before, strict=True):
        for name, kept in now.items():
            old = then.get(name, [torch.zeros_like(each) for each in kept])
            assert all(torch.equal(p, q) for p, q in zip(kept, old, strict=True)), name


EVENTS = st.one_of(
    st.just("step"),
    st.just("step"),
    st.just("rebuild"),
    st.just("resume"),
    st.integers(1, 5),  # another number of ranks
    st.sampled_from(["inf", "nan"]),
    st.just("unused"),
    st.just("unused by one"),
    st.just("discard"),
    st.just("scale"),
)


@pytest.mark.parametrize("wire", LOSSY, ids=name_of)
@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.lists(EVENTS, min_size=3, max_size=14), st.integers(0, 2**20))
def test_nothing_is_lost_in_any_history(wire, ranks, events, seed):
    """The sum of the applied updates, and what is kept back, is the sum of the true means."""
    play(Run(ranks, wire), events, seed)


def play(run: Run, events: list[Any], seed: int) -> None:
    names = list(SHAPES)
    for number, event in enumerate(events):
        now = seed + number
        if event == "rebuild":
            shuffled = torch.randperm(len(names), generator=torch.Generator().manual_seed(now))
            run.order = [names[i] for i in shuffled]
            run.cut = now % (len(names) + 1)
        elif event == "resume":
            run.load(run.save(), len(run.ranks))
        elif isinstance(event, int):
            run.load(run.save(), event)
        elif event in ("inf", "nan"):
            before = run.bits()
            assert not run.backward(now, poison=(names[now % 5], float(event)))
            unchanged(run, before)
        elif event == "unused":
            run.backward(now, unused=(names[now % 5], names[(now + 2) % 5]))
        elif event == "unused by one":
            run.backward(now, unused=(names[now % 5],), by=0)
        elif event == "discard":
            before = run.bits()
            run.backward(now, count=lambda: False)
            for compression in run.ranks:
                compression.discard()
            unchanged(run, before)
        else:
            if event == "scale":
                run.rescale(2.0 if now % 2 else 0.25)
            assert run.backward(now)
        run.check()


def test_a_schedule_loses_nothing_either():
    """From one format to another, other blocks, formats that do not reduce, and back to fp32, which
    sends what is left."""
    schedule = {
        0: "int8",
        2: Wire("int4", block=32),
        4: Wire("topk", k=0.05),
        6: "onebit",
        8: Wire("lowrank", rank=1),
        10: Wire("int8", block=1024),
        12: "fp32",
    }
    run = Run(3, schedule, warmup_steps=1)
    for step in range(16):
        run.backward(step)
        run.check()
    for kept in run.kept().values():
        assert kept.abs().max() == 0
    assert all(not r.holds for c in run.ranks for r in c._residuals.values())


@pytest.mark.parametrize("by", [None, 0, 1], ids=["nobody", "rank 1", "rank 0"])
@pytest.mark.parametrize(
    ("wire", "dtype"),
    [
        ("int8", torch.float32),
        ("onebit", torch.float32),
        (Wire("topk", k=0.05), torch.float32),
        (Wire("lowrank", rank=1), torch.float32),
        ("int8", torch.bfloat16),
        ("onebit", torch.bfloat16),
    ],
    ids=str,
)
def test_what_is_left_is_sent_once_it_can_be(wire, dtype, by):
    """Also of parameters that are not used in just the pass in which others send theirs."""
    run = Run(2, {0: wire, 3: "fp32"}, dtype)
    for step in range(8):
        unused = ("a", "e") if step in (3, 4) else ()
        run.backward(step, unused=unused, by=by)
        if step in (3, 4):
            assert all(c._residuals["a"].holds for c in run.ranks)
            assert run.kept()["a"].abs().max() > 0
        if dtype == torch.float32:
            run.check()
    run.load(run.save(), 2)
    for kept in run.kept().values():
        assert kept.abs().max() == 0
    run.backward(8)
    run.backward(9)
    assert not any(r.holds for c in run.ranks for r in c._residuals.values())


SCHEDULE = {
    0: "int8",
    2: Wire("int4", block=32),
    4: Wire("topk", k=0.05),
    6: lambda name, shape: "fp32" if name in "bd" else Wire("onebit", block=1024),
    9: "fp32",
    11: "bf16",
}


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.lists(EVENTS, min_size=8, max_size=16), st.integers(0, 2**20))
def test_nothing_is_lost_in_any_history_of_a_schedule(ranks, events, seed):
    """Also where uncompressed buckets stand beside compressed ones, and formats change in a step
    that is not taken."""
    play(Run(ranks, SCHEDULE), events, seed)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wire", ["int8", "fp8_e5m2", "onebit"])
def test_gradients_of_16_bits(wire, dtype):
    """What is rounded away as the mean is stored comes back, too."""
    run = Run(2, wire, dtype)
    for step in range(10):
        run.backward(step)
        run.check()


def test_without_feedback_something_is_lost():
    """The negative control of all the above."""
    run = Run(2, Wire("int4", feedback=False))
    for step in range(5):
        run.backward(step)
    with pytest.raises(AssertionError):
        run.check()


def test_in_bfloat16():
    run = Run(2, "int8", residual_dtype=torch.bfloat16)
    for step in range(5):
        run.backward(step)
    run.check(tolerance=1e-5)
    with pytest.raises(ValueError, match="residual_dtype: topk"):
        Run(2, "topk", residual_dtype=torch.bfloat16)


def test_loss_scale_is_followed():
    """Gradients twice as large: so is what was kept back."""
    run = Run(2, "int4")
    run.backward(0)
    before, bits = run.kept(), run.bits()
    run.rescale(2.0)
    for name, kept in run.kept().items():  # in units of the loss
        assert torch.equal(kept, before[name])
    for now, then in zip(run.bits(), bits, strict=True):
        assert all(torch.equal(p, 2 * q) for n in now for p, q in zip(now[n], then[n], strict=True))
    for compression in run.ranks:
        compression.discard()
    assert all(each.abs().max() == 0 for each in run.kept().values())


def test_a_merged_state_holds_the_same_mass():
    run = Run(3, "int4")
    for step in range(4):
        run.backward(step)
    before = run.kept()
    run.load(run.save(), 5)
    for name, kept in run.kept().items():
        assert torch.allclose(kept, before[name], rtol=0, atol=1e-7)


def test_layouts_do_not_depend_on_buckets():
    """The same bits, whatever the order and number of buckets (but for top-k, which is of one)."""
    results = []
    for order, cut in ((list("abcde"), 2), (list("edcba"), 3), (list("cabed"), 0)):
        run = Run(
            3, {0: "int8", 2: Wire("onebit", block=64), 4: Wire("int4", rounding="stochastic")}
        )
        run.order, run.cut = order, cut
        for step in range(6):
            run.backward(step)
        results.append(run.applied)
    for other in results[1:]:
        for name, applied in results[0].items():
            assert torch.equal(applied, other[name])


@pytest.mark.parametrize("wire", SELECTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_selected_bits_of_the_reference(wire, dtype):
    compare_selected(wire, dtype, Host())


def test_bad_policies_are_refused():
    for wire, message in (
        ("int7", "wire: expected one of"),
        (lambda: Wire("int8", block=100), "block"),
        (lambda: Wire("onebit", rounding="stochastic"), "rounding"),
        (lambda: Wire("topk", k=0), "k: "),
        (lambda: Wire("topk", k=1.5), "k: "),
        (lambda: Wire("topk", k=True), "k: "),
        (lambda: Wire("lowrank", rank=0), "rank"),
        (lambda: Wire("int8", k=5), "k: int8 has none, only topk"),
        (lambda: Wire("topk", block=64), "block: topk has none"),
        (lambda: Wire("topk", threshold=1.0), "threshold: topk has none"),
        (lambda: Wire("int8", rank=3), "rank: int8 has none"),
        ({-1: "int8"}, "steps"),
        ({0: "fp12"}, "wire: expected one of"),
    ):
        with pytest.raises(ValueError, match=message):
            Policy(wire() if callable(wire) else wire, 0, 0)
    with pytest.raises(ValueError, match="wire: expected one of"):
        Policy(lambda name, shape: "int9", 0, 0).of("a", torch.Size([3]), 0)


def test_policy_by_name_shape_and_step():
    def choice(name: str, shape: torch.Size) -> str | Wire:
        return "fp32" if len(shape) < 2 else Wire("topk", k=10) if name == "embedding" else "int8"

    policy = Policy({0: choice, 10: "bf16"}, 5, 0)
    matrix = torch.Size([4, 4])
    assert policy.of("w", matrix, 4).format == "fp32"
    assert policy.of("w", matrix, 5).format == "int8"
    assert policy.of("embedding", matrix, 14).format == "topk"
    assert policy.of("norm", torch.Size([4]), 14).format == "fp32"
    assert policy.of("norm", torch.Size([4]), 15).format == "bf16"


def test_small_ones_stay_uncompressed():
    run = Run(2, lambda name, shape: "int8" if len(shape) > 1 else "int4", small=4 * 200)
    run.cut = 5  # one bucket: b and d together have 130 elements
    run.backward(0)
    kept = run.kept()
    assert kept["b"].abs().max() == 0 and kept["d"].abs().max() == 0
    assert kept["a"].abs().max() > 0
    run.check()


def test_an_inf_beside_compressed_buckets_counts_from_the_first_step_on():
    """It is in a bucket that travels as it is, and comes before there is any residual."""
    run = Run(2, lambda name, shape: "fp32" if name in "bd" else "int8")
    run.order, run.cut = list("bdace"), 2
    before = run.bits()
    assert not run.backward(0, poison=("b", math.inf))
    unchanged(run, before)
    assert run.backward(1)
    run.check()


def test_what_comes_late_of_a_failed_pass_does_not_count():
    run = Run(2, "int8")
    assert run.backward(0)
    step = run.ranks[0].begin(weighted=False)
    layout = run.ranks[0].layout(step, list(run.parameters.items()), torch.float32)
    assert layout is not None and layout.encoded is not None
    for compression in run.ranks[1:]:
        compression.begin(weighted=False)
    before = run.bits()
    for compression in run.ranks:
        again = compression.begin(weighted=False)
        if compression is run.ranks[0]:
            step.entered += layout.encoded.sections
        compression.end(again)
    unchanged(run, before)


def test_a_rank_keeps_what_it_reduces_and_no_more():
    ranks = 3
    run = Run(ranks, "int8")
    run.backward(0)
    for name, shape in SHAPES.items():
        sizes = [
            [each.numel() for each in compression._residuals[name].tensors()]
            for compression in run.ranks
        ]
        count = math.prod(shape)
        assert all(own[:2] == [count, count] and own[2] == own[3] for own in sizes)
        assert sum(own[2] for own in sizes) == count
