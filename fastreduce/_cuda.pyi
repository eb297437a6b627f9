"""Types of the compiled module, which only a build with nvcc has; see csrc/cuda_bindings.cpp."""

from collections.abc import Sequence
from datetime import timedelta

GRID_LIMIT: int

def problem() -> str:
    """Why there is no device to work with, or ""."""

def resident_blocks() -> int:
    """Blocks of any kernel that the current device holds at once."""

def area_bytes(
    world_size: int, blocks: int, slot_bytes: int, stage_bytes: int, inbox_bytes: int, /
) -> int:
    """Bytes of a rank's control area."""

def convert(
    sources: Sequence[int],
    targets: Sequence[int],
    counts: Sequence[int],
    source_dtype: int,
    target_dtype: int,
    scale: float,
    stream: int,
    /,
) -> None: ...

class CudaCommunicator:
    def __init__(
        self,
        rank: int,
        areas: Sequence[int],
        *,
        blocks: int,
        slot_bytes: int,
        stage_bytes: int,
        inbox_bytes: int,
        timeout: timedelta,
        first_epoch: int,
    ) -> None: ...
    def add_segment(
        self, number: int, bases: Sequence[int], everywhere: int, nbytes: int, /
    ) -> None: ...
    def remove_segment(self, number: int, /) -> None: ...
    def find(self, memory: int, nbytes: int, everywhere: bool, /) -> int: ...
    def run(
        self,
        plan: int,
        input: int,
        output: int,
        count: int,
        root: int,
        scale: float,
        weight: float,
        blocks: int,
        stream: int,
        /,
    ) -> None: ...
    def check(self) -> None: ...
    def lose(self, peer: int, /) -> None: ...
    def watch(self, processes: dict[int, int], /) -> None: ...
    def close(self, drain: bool) -> None: ...
