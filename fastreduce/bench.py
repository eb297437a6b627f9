"""All-reduces to be timed (see :mod:`fastreduce.timing`): by every algorithm that the ranks at hand
can take, and by the process group itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from fastreduce import policy
from fastreduce.communicator import Communicator
from fastreduce.timing import Method

Op = Literal["sum", "mean"]
Call = Callable[[Tensor], object]

GRAPH_CALLS = 10
# Of all buffers that take turns on a GPU: more than its caches hold.
COLD_BYTES = 256 * policy.MIB
# Elements that are checked at a time: a multiple of the pattern's seven.
_CHECKED = 7 << 17


def all_reduce_calls(
    communicator: Communicator, nbytes: int, device: torch.device, op: Op
) -> dict[str, Call]:
    """Name -> what reduces a tensor of that size in place: every algorithm that can, what ``auto``
    takes, and the process group's own."""
    names = _algorithms(communicator, nbytes, device)
    found: dict[str, Call] = {
        name: lambda x, name=name: communicator.all_reduce(x, op, name)  # type: ignore[misc]
        for name in names
    }
    found["fastreduce"] = lambda x: communicator.all_reduce(x, op)
    found[group_name(device)] = lambda x: group_all_reduce(x, op)
    return found


def group_name(device: torch.device) -> str:
    """The process group's backend for tensors there."""
    return "nccl" if device.type == "cuda" else "gloo"


def all_reduce_methods(
    communicator: Communicator, nbytes: int, dtype: torch.dtype, device: torch.device, op: Op
) -> dict[str, Method]:
    """Collective: the calls, each on a buffer of its own, in memory that the peers reach, but for
    the process group's."""
    methods = {}
    for name, call in all_reduce_calls(communicator, nbytes, device, op).items():
        reached = name != group_name(device)
        buffers = buffers_for(communicator, nbytes, dtype, device, reached=reached)
        methods[name] = method_of(communicator, call, buffers, op)
    return methods


def _algorithms(communicator: Communicator, nbytes: int, device: torch.device) -> list[str]:
    if device.type == "cuda":
        gpu = communicator._gpu_on(device)
        if gpu is None:
            return []
        able = policy.candidates(nbytes, communicator.world_size, gpu.topology)
        return [*(name for name in able if name != "process_group"), "ring"]
    if not communicator.topology.shared_memory or communicator.world_size == 1:
        return []
    return [*(["one_shot"] if nbytes <= policy.SLOT_BYTES else []), "two_shot", "ring"]


def group_all_reduce(tensor: Tensor, op: Op) -> None:
    """What DDP does without a hook."""
    dist.all_reduce(tensor)
    if op == "mean":
        tensor.div_(dist.get_world_size())


@lru_cache(maxsize=1)
def _fresh(count: int, dtype: torch.dtype) -> Tensor:
    """What the methods of a case all begin with."""
    return torch.randn(count).to(dtype)


def method_of(communicator: Communicator, call: Call, buffers: Sequence[Tensor], op: Op) -> Method:
    """Collective: a call on a buffer that its owner has just written. On a GPU ten of them, in a
    CUDA graph where the call can be captured, each on the next of ``buffers``, so that no cache
    holds what it reads."""
    first = buffers[0]

    def wrong() -> int:
        return wrong_elements(communicator, call, first, op)

    if first.device.type == "cpu":
        fresh = _fresh(first.numel(), first.dtype)
        return Method(lambda: call(first), lambda: first.copy_(fresh), wrong=wrong)

    def several() -> None:
        for number in range(GRAPH_CALLS):
            call(buffers[number % len(buffers)])

    for buffer in buffers:
        buffer.zero_()  # stays so, however often it is added up
    several()
    torch.cuda.synchronize(first.device)
    run: Callable[[], object] = several
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            several()
        run = graph.replay
    except RuntimeError:  # cannot be captured
        torch.cuda.synchronize(first.device)
    return Method(run, calls=GRAPH_CALLS, wrong=wrong)


def buffers_for(
    communicator: Communicator,
    nbytes: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    reached: bool = True,
) -> list[Tensor]:
    """What :func:`method_of` wants, in memory that the peers reach (collective on GPUs), or in
    torch's."""
    copies = 1 if device.type == "cpu" else min(GRAPH_CALLS, max(2, -(-COLD_BYTES // nbytes)))
    count = nbytes // dtype.itemsize
    if not reached or not (device.type == "cuda" or communicator.shared_memory):
        return [torch.empty(count, dtype=dtype, device=device) for _ in range(copies)]
    if device.type == "cuda":
        return [communicator.empty(count, dtype=dtype, device=device) for _ in range(copies)]
    # Also where empty() gives a small tensor ordinary memory.
    return [communicator._allocate(nbytes, torch.uint8)[:nbytes].view(dtype)]


def wrong_elements(communicator: Communicator, call: Call, buffer: Tensor, op: Op) -> int:
    """Collective: elements of a call's result that differ from the exact one, on all ranks. Inputs
    are so small that sums of up to 64 ranks are at most 256, which bfloat16 holds exactly; of a
    float32 mean the last bit depends on whether a method divides, or multiplies by 1 / N."""
    ranks = communicator.world_size
    pattern = torch.arange(min(_CHECKED, buffer.numel()), device=buffer.device)
    # Squares: of 0 to 6 plus the rank, any seven ranks in a row would add up to the same.
    exact = torch.zeros_like(pattern)
    for rank in range(ranks):
        exact += (pattern + rank**2) % 7
    expected = (exact / ranks if op == "mean" else exact).to(buffer.dtype)
    spare = torch.finfo(torch.float32).eps * expected if op == "mean" else 0 * expected
    for part in buffer.split(_CHECKED):
        part.copy_((pattern[: part.numel()] + communicator.rank**2) % 7)
    result = call(buffer)
    got = result if isinstance(result, Tensor) else buffer
    count = 0
    for part in got.split(_CHECKED):
        size = part.numel()
        right = (part - expected[:size]).abs() <= spare[:size]  # what is no number is not
        count += size - int(right.sum())
    buffer.zero_()
    total = torch.tensor([count])
    communicator.all_reduce(total, "sum")
    return int(total.item())
