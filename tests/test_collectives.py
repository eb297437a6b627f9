"""Every collective gives the reference's bits: dtypes, ops, sizes, placements, ranks."""

from __future__ import annotations

import pytest
import torch
from conftest import make_inputs, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

import fastreduce
from fastreduce import reference

WORLDS = [1, 2, 3, 4, 8]
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.uint8,
]
FLOATS = DTYPES[:4]
OPS = ["sum", "mean", "min", "max"]
# Around lines, tiles, pieces and chunks.
COUNTS = st.one_of(
    st.integers(0, 70),
    st.sampled_from([255, 256, 511, 513, 4096, 65535, 65537, 100_003]),
    st.integers(0, 20_000),
)

few = settings(max_examples=25, deadline=None)


def communicator(state: dict, **kwargs: object) -> fastreduce.Communicator:
    """The rank's communicator for these arguments; its epochs wrap after a few calls."""
    key = str(kwargs)
    if key not in state:
        state[key] = fastreduce.Communicator(timeout=60, _first_epoch=2**32 - 5, **kwargs)
    return state[key]


def place(comm: fastreduce.Communicator, where: str, count: int, dtype: torch.dtype, skip: int):
    """A tensor of ``count`` elements that begins ``skip`` elements into its memory."""
    if where == "shared":
        whole = comm.empty(count + skip, dtype=dtype)
    elif where == "torch":
        whole = torch.empty(count + skip, dtype=dtype).share_memory_()
    else:
        whole = torch.empty(count + skip, dtype=dtype)
    return whole[skip:]


def placement(where: str, rank: int) -> str:
    return where if where != "mixed" else ["shared", "private", "torch"][rank % 3]


def poison(tensor: torch.Tensor) -> None:
    tensor.fill_(77)


def reduce_task(state, seed, count, dtype, op, algorithm, where, skip, scale, special, threads):
    comm = communicator(state, threads=threads)
    inputs = make_inputs(seed, comm.world_size, count, dtype, special)
    tensor = place(comm, placement(where, comm.rank), count, dtype, skip)
    tensor.copy_(inputs[comm.rank])
    expected = reference.ring_all_reduce if algorithm == "ring" else reference.all_reduce
    if scale != "own":
        comm.all_reduce(tensor, op, algorithm, scale=scale)
        return same_bits(tensor, expected(inputs, op, scale))
    # A factor for every rank, 0 for some: whatever it holds, NaN too, does not count.
    scales = [0.0 if (seed + rank) % 3 == 0 else rank + 0.3 for rank in range(comm.world_size)]
    weights = scales if op == "mean" else None
    comm.all_reduce(
        tensor, op, algorithm, scale=scales[comm.rank], weight=weights and weights[comm.rank]
    )
    return same_bits(tensor, expected(inputs, op, scales, weights))


@pytest.mark.parametrize("world_size", WORLDS)
@few
@given(data=st.data())
def test_all_reduce(pool, world_size, data):
    draw = data.draw
    dtype = draw(st.sampled_from(DTYPES))
    count = draw(COUNTS)
    algorithms = ["auto", "two_shot", "ring"]
    if count * dtype.itemsize <= 1 << 18:
        algorithms.append("one_shot")
    good = pool(world_size).run(
        reduce_task,
        draw(st.integers(0, 2**40)),
        count,
        dtype,
        draw(st.sampled_from(OPS)),
        draw(st.sampled_from(algorithms)),
        draw(st.sampled_from(["shared", "private", "torch", "mixed"])),
        draw(st.integers(0, 5)),
        draw(st.sampled_from([1.0, 0.3, -2.0, "own"])) if dtype.is_floating_point else 1.0,
        draw(st.booleans()),
        draw(st.sampled_from([1, 3])),
    )
    assert all(good)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("where", ["shared", "private"])
def test_large(pool, world_size, dtype, where):
    """Many pieces, several threads per rank, on both sides of the probe of distances."""
    for call in range(3):
        good = pool(world_size).run(
            reduce_task, call, 1_300_003, dtype, "mean", "two_shot", where, 0, 1.0, False, 3
        )
        assert all(good)


def both_algorithms(state, seed, count, dtype):
    comm = communicator(state)
    results = []
    for algorithm in ["one_shot", "two_shot"]:
        tensor = make_inputs(seed, comm.world_size, count, dtype)[comm.rank]
        comm.all_reduce(tensor, "sum", algorithm)
        results.append(tensor)
    return results


@pytest.mark.parametrize("dtype", FLOATS)
def test_same_bits_on_every_rank_and_for_both_algorithms(pool, dtype):
    results = pool(8).run(both_algorithms, 3, 30_001, dtype)
    first = results[0][0]
    assert all(same_bits(tensor, first) for result in results for tensor in result)


def layouts(state, seed, cuts):
    """The same values reduced in one piece and in several: bucket layout changes no bit."""
    comm = communicator(state)
    whole = make_inputs(seed, comm.world_size, 50_000, torch.float32)[comm.rank]
    parts = [part.clone() for part in whole.tensor_split(cuts)]
    comm.all_reduce(whole)
    for part in parts:
        comm.all_reduce(part)
    return same_bits(torch.cat(parts), whole)


@few
@given(cuts=st.lists(st.integers(0, 50_000), max_size=4).map(sorted))
def test_bits_do_not_depend_on_the_layout(pool, cuts):
    assert all(pool(3).run(layouts, 5, cuts))


def reduce_scatter_task(state, seed, count, dtype, op, where, in_place, special):
    comm = communicator(state, threads=2)
    n, rank = comm.world_size, comm.rank
    inputs = make_inputs(seed, n, n * count, dtype, special)
    whole = place(comm, placement(where, rank), n * count, dtype, 0)
    whole.copy_(inputs[rank])
    output = (
        whole[rank * count : (rank + 1) * count] if in_place else torch.empty(count, dtype=dtype)
    )
    if not in_place:
        poison(output)
    comm.reduce_scatter(output, whole, op)
    expected = reference.all_reduce(inputs, op)[rank * count : (rank + 1) * count]
    untouched = in_place or same_bits(whole, inputs[rank])
    return same_bits(output, expected) and untouched


@pytest.mark.parametrize("world_size", WORLDS)
@few
@given(data=st.data())
def test_reduce_scatter(pool, world_size, data):
    draw = data.draw
    assert all(
        pool(world_size).run(
            reduce_scatter_task,
            draw(st.integers(0, 2**40)),
            draw(COUNTS),
            draw(st.sampled_from(DTYPES)),
            draw(st.sampled_from(OPS)),
            draw(st.sampled_from(["shared", "private", "mixed"])),
            draw(st.booleans()),
            draw(st.booleans()),
        )
    )


def all_gather_task(state, seed, count, dtype, where, in_place):
    comm = communicator(state, threads=2)
    n, rank = comm.world_size, comm.rank
    inputs = make_inputs(seed, n, count, dtype, True)
    output = place(comm, placement(where, rank), n * count, dtype, 0)
    poison(output)
    own = output[rank * count : (rank + 1) * count] if in_place else inputs[rank].clone()
    own.copy_(inputs[rank])
    comm.all_gather(output, own)
    return same_bits(output, reference.all_gather(inputs))


@pytest.mark.parametrize("world_size", WORLDS)
@few
@given(data=st.data())
def test_all_gather(pool, world_size, data):
    draw = data.draw
    assert all(
        pool(world_size).run(
            all_gather_task,
            draw(st.integers(0, 2**40)),
            draw(COUNTS),
            draw(st.sampled_from(DTYPES)),
            draw(st.sampled_from(["shared", "private", "mixed"])),
            draw(st.booleans()),
        )
    )


def broadcast_task(state, seed, count, dtype, where, root):
    comm = communicator(state, threads=2)
    tensor = place(comm, placement(where, comm.rank), count, dtype, 0)
    inputs = make_inputs(seed, comm.world_size, count, dtype, True)
    tensor.copy_(inputs[comm.rank])
    comm.broadcast(tensor, root)
    return same_bits(tensor, inputs[root])


@pytest.mark.parametrize("world_size", WORLDS)
@few
@given(data=st.data())
def test_broadcast(pool, world_size, data):
    draw = data.draw
    assert all(
        pool(world_size).run(
            broadcast_task,
            draw(st.integers(0, 2**40)),
            draw(COUNTS),
            draw(st.sampled_from(DTYPES)),
            draw(st.sampled_from(["shared", "private", "mixed"])),
            draw(st.integers(0, world_size - 1)),
        )
    )


def async_task(state, seed):
    """Calls of all kinds in flight at once, and synchronous ones behind them."""
    comm = communicator(state)
    n, rank = comm.world_size, comm.rank
    checks, works = [], []
    for call in range(12):
        count = [3, 40_000, 300_000][call % 3]
        inputs = make_inputs(seed + call, n, count, torch.float32)
        tensor = inputs[rank].clone()
        works.append(comm.all_reduce(tensor, "sum", async_op=True))
        checks.append((tensor, reference.all_reduce(inputs, "sum")))
        if call % 4 == 3:
            comm.barrier()
            assert all(work.is_completed() for work in works)
    gathered = torch.empty(n, dtype=torch.int64)
    works.append(comm.all_gather(gathered, torch.tensor([rank]), async_op=True))
    works.append(comm.broadcast(torch.ones(3), async_op=True))
    works.append(comm.reduce_scatter(torch.empty(1), torch.ones(n), async_op=True))
    works.append(comm.barrier(async_op=True))
    for work in works:
        work.wait(60)
    assert gathered.tolist() == list(range(n))
    return all(same_bits(got, want) for got, want in checks)


@pytest.mark.parametrize("world_size", [2, 4])
def test_async(pool, world_size):
    assert all(pool(world_size).run(async_task, 11))


def future_task(state, seed):
    comm = communicator(state)
    inputs = make_inputs(seed, comm.world_size, 100_000, torch.float32)
    tensor = inputs[comm.rank].clone()
    future = comm.all_reduce_future(tensor)
    result = future.wait()
    assert result.data_ptr() == tensor.data_ptr() and not tensor.is_shared()
    assert comm.error is None
    bad = comm.all_reduce_future(torch.zeros(4, dtype=torch.complex64))
    with pytest.raises(TypeError, match="dtype"):
        bad.wait()
    assert isinstance(comm.error, TypeError)
    return same_bits(tensor, reference.all_reduce(inputs))


def test_future(pool):
    assert all(pool(2).run(future_task, 1))


def strided_task(state):
    comm = communicator(state)
    n, rank = comm.world_size, comm.rank
    base = torch.arange(24.0).reshape(4, 6)
    inputs = [base + r for r in range(n)]
    transposed = inputs[rank].clone().t()
    comm.all_reduce(transposed)
    assert same_bits(transposed.contiguous(), reference.all_reduce([x.t() for x in inputs]))
    # The ranks' strides may differ: elements are matched by index.
    mixed = inputs[rank].clone() if rank % 2 else inputs[rank].t().contiguous().t()
    comm.all_reduce(mixed)
    assert same_bits(mixed.contiguous(), reference.all_reduce(inputs))
    leaf = torch.ones(3, requires_grad=True)
    comm.all_reduce(leaf, "sum")
    assert leaf.tolist() == [n] * 3
    return True


def test_strided_and_leaf(pool):
    assert all(pool(2).run(strided_task))


def refused_task(state):
    """Bad arguments raise before anything is sent: the communicator stays usable."""
    comm = communicator(state)
    n = comm.world_size
    good = torch.ones(4)
    cases = [
        (TypeError, "dtype", lambda: comm.all_reduce(torch.ones(2, dtype=torch.complex64))),
        (TypeError, "dtype", lambda: comm.all_reduce(torch.ones(2, dtype=torch.int16))),
        (ValueError, "op", lambda: comm.all_reduce(good, "product")),
        (ValueError, "algorithm", lambda: comm.all_reduce(good, "sum", "tree")),
        (ValueError, "at most", lambda: comm.all_reduce(torch.ones(10**6), "sum", "one_shot")),
        (ValueError, "scale", lambda: comm.all_reduce(torch.ones(2, dtype=torch.int32), scale=2.0)),
        (ValueError, "weight", lambda: comm.all_reduce(good, "sum", weight=1.0)),
        (ValueError, "weight", lambda: comm.all_reduce(good.int(), weight=1.0)),
        (ValueError, "weight", lambda: comm.all_reduce(good, weight=-1.0)),
        (ValueError, "weight", lambda: comm.all_reduce(good, weight=float("nan"))),
        (ValueError, "overlapping", lambda: comm.all_reduce(torch.ones(1).expand(3))),
        (ValueError, "contiguous", lambda: comm.all_reduce(torch.ones(3, 2).t(), async_op=True)),
        (ValueError, "layout", lambda: comm.all_reduce(torch.eye(3).to_sparse())),
        (ValueError, "root", lambda: comm.broadcast(good, n)),
        (ValueError, "contiguous", lambda: comm.broadcast(torch.ones(3, 2).t())),
        (ValueError, "times", lambda: comm.all_gather(torch.ones(4 * n + 1), good)),
        (ValueError, "dtype", lambda: comm.all_gather(torch.ones(4 * n), good.double())),
        (ValueError, "times", lambda: comm.reduce_scatter(good, torch.ones(4 * n - 1))),
    ]
    whole = torch.ones(4 * n)
    cases.append((ValueError, "overlap", lambda: comm.all_gather(whole, whole[1:5])))
    cases.append((ValueError, "overlap", lambda: comm.reduce_scatter(whole[1:5], whole)))
    for kind, text, call in cases:
        with pytest.raises(kind, match=text):
            call()
    with pytest.raises(ValueError, match="threads"):
        fastreduce.Communicator(threads=99)
    with pytest.raises(ValueError, match="timeout"):
        fastreduce.Communicator(timeout=0)
    comm.all_reduce(good, "sum")
    assert good.tolist() == [n] * 4
    return True


def test_bad_arguments(pool):
    assert all(pool(2).run(refused_task))


def deterministic_task(state):
    comm = communicator(state, deterministic=True)
    with pytest.raises(RuntimeError, match="order of summation"):
        comm.all_reduce(torch.ones(4), "sum", "ring")
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError, match="order of summation"):
            communicator(state).all_reduce(torch.ones(4), "sum", "ring")
    finally:
        torch.use_deterministic_algorithms(False)
    comm.all_reduce(torch.ones(4))
    return True


def test_deterministic(pool):
    assert all(pool(2).run(deterministic_task))
