"""Ranks of one process on one GPU: each has a stream and memory of its own, and their kernels run
side by side. What several GPUs would do over NVLink, this does in one GPU's memory."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from fastreduce import _cuda, enums, policy
from fastreduce.weights import ORDINARY

SEGMENT_BYTES = 64 << 20


class Group:
    """Ranks on one GPU. ``timeout``: seconds of any one wait."""

    def __init__(self, world_size: int, *, timeout: float = 20.0, first_epoch: int = 0) -> None:
        self.world_size = world_size
        blocks = min(_cuda.resident_blocks() // world_size, 32)
        sizes = (policy.GPU_SLOT_BYTES, policy.GPU_STAGE_BYTES, policy.GPU_INBOX_BYTES)
        nbytes = _cuda.area_bytes(world_size, blocks, *sizes)
        device = torch.device("cuda")
        self.blocks = blocks
        self.areas = [
            torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(world_size)
        ]
        self.segments = [
            torch.zeros(SEGMENT_BYTES, dtype=torch.uint8, device=device) for _ in range(world_size)
        ]
        self.streams = [torch.cuda.Stream() for _ in range(world_size)]
        torch.cuda.synchronize()
        self.cores = [
            _cuda.CudaCommunicator(
                rank,
                [area.data_ptr() for area in self.areas],
                blocks=blocks,
                slot_bytes=sizes[0],
                stage_bytes=sizes[1],
                inbox_bytes=sizes[2],
                timeout=timedelta(seconds=timeout),
                first_epoch=first_epoch,
            )
            for rank in range(world_size)
        ]
        for core in self.cores:
            core.add_segment(1, [each.data_ptr() for each in self.segments], 0, SEGMENT_BYTES)

    def place(self, rank: int, tensor: Tensor, offset: int = 0) -> Tensor:
        """The tensor's values in memory that the other ranks reach."""
        nbytes = tensor.nbytes
        there = self.segments[rank][offset : offset + nbytes].view(tensor.dtype)
        return there.copy_(tensor)

    def launch(
        self,
        rank: int,
        kind: str,
        source: Tensor,
        target: Tensor,
        count: int,
        *,
        algorithm: str,
        op: str = "sum",
        weight: float | None = None,
        root: int = 0,
        blocks: int | None = None,
    ) -> None:
        plan = enums.plan(kind, source.dtype, op, algorithm, 0)
        self.cores[rank].run(
            plan,
            source.data_ptr(),
            target.data_ptr(),
            count,
            root,
            1.0 if weight is None else weight,
            ORDINARY if weight is None else weight,
            blocks
            or min(policy.blocks(algorithm, source.nbytes, self.world_size, 32), self.blocks),
            self.streams[rank].cuda_stream,
        )

    def all_reduce(
        self,
        tensors: list[Tensor],
        algorithm: str,
        weights: list[float] | None = None,
        **kwargs: Any,
    ) -> None:
        torch.cuda.synchronize()
        for rank, tensor in enumerate(tensors):
            self.launch(
                rank,
                "all_reduce",
                tensor,
                tensor,
                tensor.numel(),
                algorithm=algorithm,
                weight=None if weights is None else weights[rank],
                **kwargs,
            )
        torch.cuda.synchronize()
        for core in self.cores:
            core.check()

    def close(self) -> None:
        for core in self.cores:
            core.close(drain=True)
