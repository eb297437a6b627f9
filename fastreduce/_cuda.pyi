"""Types of the compiled module, which only a build with nvcc has; see csrc/cuda_bindings.cpp."""

from collections.abc import Sequence
from datetime import timedelta
from typing import ClassVar

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

NORM_WORDS: int

def norm(
    dtype: int,
    tensor: int,
    begin: int,
    end: int,
    ends: int,
    sections: int,
    bins: int,
    stream: int,
    /,
) -> None:
    """Measures elements of a tensor, from a unit's first on: csrc/device_norm.h. ``ends`` are those
    of the sections, ``bins`` NORM_WORDS for each; both on the device."""

def norms_of(bins: int, sections: int, to: int, /) -> None:
    """Of bins in the host's memory, _C.NORM_BYTES for every section."""

SEARCH_BYTES: int
DIGITS: int

class SelectStep:
    count: ClassVar[SelectStep]
    settle: ClassVar[SelectStep]
    tally: ClassVar[SelectStep]
    emit: ClassVar[SelectStep]
    find: ClassVar[SelectStep]
    combine: ClassVar[SelectStep]

class WirePlan:
    """As _C.WirePlan: rows of offset, count, key, format, stochastic, run."""

    def __init__(
        self, world: int, spans: Sequence[tuple[int, int, int, int, bool, int]]
    ) -> None: ...
    def message_bytes(self, chunk: int, /) -> int: ...
    def tiles(self) -> int:
        """Of all spans, as csrc/device_topk.h cuts them."""

    def image(self) -> bytes:
        """The kernels' tables, for the device's memory; to be on 8 bytes."""

    def place(self, address: int, /) -> None:
        """Where they lie there."""

class WireCoding:
    """As _C.WireCoding. All addresses are the device's: ``factor_at``, if not 0, of a float32 in
    place of ``factor``; ``residuals`` of 4 addresses for every span, which can be 0; ``absent`` of
    a byte for each, or 0; ``finite`` of 32 bits, which become 0 where the result is not."""

    def __init__(
        self,
        plan: WirePlan,
        gradient: int,
        dtype: int,
        rank: int,
        factor: float,
        factor_at: int,
        residuals: int,
        residual_dtype: int,
        absent: int,
        seed: int,
        step: int,
        finite: int,
    ) -> None: ...
    @property
    def address(self) -> int:
        """In place of the input of an encoded all-reduce; for as long as this lives."""

    def encode(self, to: int, stream: int, /) -> None:
        """All messages, one after the other."""

    def reduce(self, messages: int, to: int, stream: int, /) -> None:
        """Of the ranks' messages, one after the other."""

    def decode(self, results: int, stride: int, stream: int, /) -> None:
        """Of all results, so many bytes apart."""

    def select(
        self,
        step: SelectStep,
        digit: int,
        random: bool,
        k: int,
        threshold: float,
        search: int,
        table: int,
        messages: int,
        stream: int,
    ) -> None:
        """A step of csrc/device_topk.h, on SEARCH_BYTES, zero at first, and a table of 32-bit
        words: 2 for every tile, and, to find and to combine, one for every tile and rank, and for
        every rank."""

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
