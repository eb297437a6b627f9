"""The kernels on one GPU, with 2 to 8 ranks in one process: see benchmarks/in_process.py."""

from __future__ import annotations

import time

import pytest
import torch
from conftest import make_inputs, needs_gpu, same_bits

import fastreduce
from fastreduce import enums, reference

pytestmark = needs_gpu()

pytest.importorskip("fastreduce._cuda", reason="built without nvcc")
from benchmarks.in_process import Group  # noqa: E402

FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


@pytest.fixture(params=[2, 3, 4, 8])
def group(request):
    made = Group(request.param)
    yield made
    made.close()


def count_of(algorithm: str, dtype: torch.dtype) -> list[int]:
    item = dtype.itemsize
    most = {"low_latency": 32 << 10, "one_shot": 128 << 10}.get(algorithm, 3 << 20) // item
    return [1, 3, 17, 1000, most // 3 + 5, most]


@pytest.mark.parametrize("dtype", enums.DTYPE)
@pytest.mark.parametrize("algorithm", ["low_latency", "one_shot", "two_shot", "ring"])
def test_all_reduce_has_the_bits_of_the_reference(group, algorithm, dtype):
    for number, count in enumerate(count_of(algorithm, dtype)):
        for op in ("sum", "mean", "min", "max") if count < 2000 else ("mean",):
            weighted = dtype.is_floating_point and op == "mean"
            weights = [rank + 0.5 for rank in range(group.world_size)] if weighted else None
            inputs = make_inputs(number, group.world_size, count, dtype, special=True)
            for rank in range(group.world_size):
                group.segments[rank][: inputs[0].nbytes + 64].fill_(0xA5)
            tensors = [group.place(rank, each) for rank, each in enumerate(inputs)]
            group.all_reduce(tensors, algorithm, op=op, weights=weights)
            how = reference.ring_all_reduce if algorithm == "ring" else reference.all_reduce
            expected = how(inputs, op, weights or 1.0, weights)
            for rank, tensor in enumerate(tensors):
                assert same_bits(tensor.cpu(), expected), (count, op, rank)
                around = group.segments[rank][inputs[0].nbytes : inputs[0].nbytes + 64]
                assert around.eq(0xA5).all()


def test_unaligned_tensors(group):
    """Off the packs, through what needs no symmetric memory."""
    inputs = make_inputs(3, group.world_size, 5000, torch.bfloat16)
    for algorithm in ("low_latency", "one_shot", "ring"):
        whole = [torch.zeros(5001, dtype=torch.bfloat16, device="cuda") for _ in inputs]
        tensors = [each[1:].copy_(given) for each, given in zip(whole, inputs, strict=True)]
        group.all_reduce(tensors, algorithm, op="sum")
        how = reference.ring_all_reduce if algorithm == "ring" else reference.all_reduce
        for tensor in tensors:
            assert same_bits(tensor.cpu(), how(inputs, "sum"))


def test_tensors_at_other_places_on_every_rank(group):
    inputs = make_inputs(4, group.world_size, 70000, torch.float32)
    tensors = [group.place(rank, each, 4096 * rank) for rank, each in enumerate(inputs)]
    group.all_reduce(tensors, "two_shot", op="mean")
    for tensor in tensors:
        assert same_bits(tensor.cpu(), reference.all_reduce(inputs))


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
def test_reduce_scatter_all_gather_broadcast(group, algorithm):
    world_size, count = group.world_size, 1234
    inputs = make_inputs(6, world_size, count * world_size, torch.float32)
    tensors = [group.place(rank, each) for rank, each in enumerate(inputs)]
    outputs = [torch.zeros(count, device="cuda") for _ in inputs]
    torch.cuda.synchronize()
    for rank in range(world_size):
        group.launch(
            rank, "reduce_scatter", tensors[rank], outputs[rank], count, algorithm=algorithm
        )
    torch.cuda.synchronize()
    for got, want in zip(outputs, reference.reduce_scatter(inputs, "sum"), strict=True):
        assert same_bits(got.cpu(), want)

    whole = [torch.zeros(count * world_size, device="cuda") for _ in inputs]
    parts = [group.place(rank, each[:count]) for rank, each in enumerate(inputs)]
    torch.cuda.synchronize()
    for rank in range(world_size):
        group.launch(rank, "all_gather", parts[rank], whole[rank], count, algorithm=algorithm)
    torch.cuda.synchronize()
    for got in whole:
        assert same_bits(got.cpu(), reference.all_gather([each[:count] for each in inputs]))

    for root in range(world_size):
        parts = [group.place(rank, each[:count]) for rank, each in enumerate(inputs)]
        torch.cuda.synchronize()
        for rank in range(world_size):
            group.launch(
                rank, "broadcast", parts[rank], parts[rank], count, algorithm=algorithm, root=root
            )
        torch.cuda.synchronize()
        for got in parts:
            assert same_bits(got.cpu(), inputs[root][:count])
    for core in group.cores:
        core.check()


@pytest.mark.parametrize("first_epoch", [2**32 - 9, 2**31 - 9])
def test_epochs_wrap_under_random_stalls(first_epoch):
    group = Group(4, first_epoch=first_epoch)
    generator = torch.Generator().manual_seed(first_epoch)
    for call in range(60):
        algorithm = ["low_latency", "one_shot", "two_shot", "ring"][call % 4]
        count = int(torch.randint(1, 16000, (1,), generator=generator))
        inputs = make_inputs(call, 4, count, torch.float32)
        tensors = [group.place(rank, each) for rank, each in enumerate(inputs)]
        torch.cuda.synchronize()
        for rank, tensor in enumerate(tensors):
            with torch.cuda.stream(group.streams[rank]):
                torch.cuda._sleep(int(torch.randint(0, 200000, (1,), generator=generator)))
            group.launch(rank, "all_reduce", tensor, tensor, count, algorithm=algorithm)
        torch.cuda.synchronize()
        how = reference.ring_all_reduce if algorithm == "ring" else reference.all_reduce
        for tensor in tensors:
            assert same_bits(tensor.cpu(), how(inputs, "sum")), (call, algorithm)
    group.close()


@pytest.mark.parametrize("algorithm", ["low_latency", "one_shot", "two_shot", "ring"])
def test_graphs_are_replayed_with_other_inputs(algorithm):
    group = Group(2)
    inputs = make_inputs(0, 2, 9000, torch.float32)
    tensors = [group.place(rank, each) for rank, each in enumerate(inputs)]
    group.all_reduce(tensors, algorithm)
    graphs = []
    for rank, tensor in enumerate(tensors):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=group.streams[rank]):
            for _ in range(2):
                group.launch(rank, "all_reduce", tensor, tensor, 9000, algorithm=algorithm)
        graphs.append(graph)
    how = reference.ring_all_reduce if algorithm == "ring" else reference.all_reduce
    for replay in range(1, 6):
        inputs = make_inputs(replay, 2, 9000, torch.float32)
        for rank, each in enumerate(inputs):
            group.place(rank, each)
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, group.streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        once = how(inputs, "sum")
        for tensor in tensors:
            assert same_bits(tensor.cpu(), how([once, once], "sum")), replay
    # And calls between replays.
    group.all_reduce(tensors, algorithm)
    group.close()


def failure_of(core) -> fastreduce.CommunicatorError:
    with pytest.raises(fastreduce.CommunicatorError) as caught:
        core.check()
    return caught.value


def test_a_rank_that_never_launches_is_named_and_the_context_lives_on():
    group = Group(3, timeout=1.0)
    tensors = [group.place(rank, torch.ones(1000)) for rank in range(3)]
    torch.cuda.synchronize()
    begin = time.monotonic()
    for rank in (0, 2):
        group.launch(rank, "all_reduce", tensors[rank], tensors[rank], 1000, algorithm="two_shot")
    torch.cuda.synchronize()
    assert time.monotonic() - begin < 10
    for rank in (0, 2):
        error = failure_of(group.cores[rank])
        assert isinstance(error, fastreduce.CommunicatorTimeoutError)
        assert (error.peer, error.phase, error.epoch) == (1, "enter", 1)
        assert tensors[rank].eq(1).all()
        with pytest.raises(fastreduce.CommunicatorTimeoutError):
            group.launch(rank, "barrier", tensors[rank], tensors[rank], 0, algorithm="one_shot")
    group.close()
    fresh = Group(2)
    again = [fresh.place(rank, torch.ones(10)) for rank in range(2)]
    fresh.all_reduce(again, "one_shot")
    assert again[0].eq(2).all()
    fresh.close()


def test_a_lost_peer_ends_the_wait():
    group = Group(2, timeout=60.0)
    tensor = group.place(0, torch.ones(100))
    torch.cuda.synchronize()
    begin = time.monotonic()
    group.launch(0, "all_reduce", tensor, tensor, 100, algorithm="low_latency")
    time.sleep(0.05)
    group.cores[0].lose(1)
    torch.cuda.synchronize()
    assert time.monotonic() - begin < 5
    assert isinstance(failure_of(group.cores[0]), fastreduce.PeerLostError)
    group.close()


def test_other_calls_on_the_ranks_are_a_mismatch_on_all():
    group = Group(3)
    tensors = [group.place(rank, torch.full((5000,), 1.0 + rank)) for rank in range(3)]
    torch.cuda.synchronize()
    for rank, tensor in enumerate(tensors):
        count = 100 if rank == 1 else 5000
        group.launch(rank, "all_reduce", tensor, tensor, count, algorithm="two_shot")
    torch.cuda.synchronize()
    for rank in range(3):
        error = failure_of(group.cores[rank])
        assert isinstance(error, fastreduce.MismatchError) and error.intact
        assert (error.expected, error.seen, error.peer) == (5000, 100, 1)
        assert tensors[rank].eq(1.0 + rank).all()
    group.close()


@pytest.mark.parametrize("flat_dtype", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_pack_and_unpack(dtype, flat_dtype, scale):
    shapes = [5, 0, 3 * 8192 + 17, 1, 4096, 8, 1000, *([7] * 1100)]  # more than one launch
    tensors = [make_inputs(i, 1, n, dtype, special=True)[0].cuda() for i, n in enumerate(shapes)]
    plan = fastreduce.BucketPlan(tensors)
    flat = torch.full((plan.numel,), 7, dtype=flat_dtype, device="cuda")
    plan.pack(tensors, flat, scale)
    expected = torch.cat([reference.convert(each.cpu(), flat_dtype, scale) for each in tensors])
    assert same_bits(flat.cpu(), expected)
    back = [torch.full_like(each, 7) for each in tensors]
    plan.unpack(flat, back, scale)
    for got, n, at in zip(back, shapes, plan.offsets, strict=True):
        assert same_bits(got.cpu(), reference.convert(expected[at : at + n], dtype, scale))


def test_a_list_of_160_tensors_is_one_launch():
    tensors = [torch.randn(1000 + i, device="cuda") for i in range(160)]
    plan = fastreduce.BucketPlan(tensors)
    flat = torch.empty(plan.numel, dtype=torch.bfloat16, device="cuda")
    activities = [torch.profiler.ProfilerActivity.CUDA]
    plan.pack(tensors, flat)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        plan.pack(tensors, flat)
        torch.cuda.synchronize()
    kernels = [event for event in profile.events() if "tiles" in event.name]
    assert len(kernels) == 1
