"""Types of the compiled module; see csrc/bindings.cpp."""

from collections.abc import Sequence
from datetime import timedelta

MAX_RANKS: int
MAX_BLOCKS: int
NORM_BYTES: int
NORM_BITS: int
NORM_HIGHEST: int

def instruction_set() -> str: ...
def plan(kind: int, dtype: int, op: int, algorithm: int, shape: int, /) -> int:
    """What stays the same in calls alike, for ``run`` and ``submit``."""

def pack(
    tensors: Sequence[int],
    counts: Sequence[int],
    offsets: Sequence[int],
    flat: int,
    tensor_dtype: int,
    flat_dtype: int,
    scale: float,
) -> None: ...
def unpack(
    tensors: Sequence[int],
    counts: Sequence[int],
    offsets: Sequence[int],
    flat: int,
    tensor_dtype: int,
    flat_dtype: int,
    scale: float,
) -> None: ...

class CannotShareError(RuntimeError):
    """The ranks cannot share memory, for a reason of this machine."""

class WirePlan:
    """How a buffer's parameters are encoded, and who reduces which part: csrc/wire.h's Plan."""

    def __init__(
        self,
        world: int,
        spans: Sequence[tuple[int, int, int, int, bool, int]],
        servers: Sequence[int] = ...,
        grain: int = 0,
    ) -> None:
        """``spans``: offset and count of elements, key of the name, format, whether it is rounded
        stochastically, elements of a run. ``servers``: the ranks that reduce, none for all, whose
        parts begin with multiples of ``grain`` elements, or with any run."""

    def message_bytes(self, chunk: int, /) -> int: ...

class WireCoding:
    """One buffer in one step on one rank: csrc/wire.h's Coding. ``residuals`` is the address of 4
    pointers for every span, ``absent`` of a byte for each, or 0. Both are copied."""

    def __init__(
        self,
        plan: WirePlan,
        gradient: int,
        dtype: int,
        rank: int,
        factor: float,
        residuals: int,
        residual_dtype: int,
        absent: int,
        seed: int,
        step: int,
        lands: bool = False,
    ) -> None: ...
    @property
    def address(self) -> int:
        """The ``in`` of an encoded call."""

    @property
    def finite(self) -> bool:
        """Whether all results so far are."""

    def encode(self, chunk: int, to: int, /) -> None: ...
    def reduce(self, from_: Sequence[int], to: int, /) -> None: ...
    def decode(self, chunk: int, from_: int, /) -> None: ...
    def select(self, random: bool, k: int, threshold: float, expected: int, to: int) -> int:
        """Writes 8 + 8 k bytes, and returns what is ``expected`` the next time, 0 at first; see
        csrc/topk.h."""

    def combine(self, k: int, from_: Sequence[int], /) -> None: ...

class Norms:
    """What calls of one rank have measured: csrc/norm.h. ``ends`` are those of the sections, in
    elements; one call at a time."""

    def __init__(self, ends: Sequence[int], blocks: int = 1) -> None: ...
    @property
    def address(self) -> int:
        """The ``norms`` of a call."""

    def clear(self) -> None: ...
    def measure(self, rank: int, world: int, dtype: int, tensor: int, count: int, /) -> None:
        """Counts a rank's part of a tensor that has been reduced."""

    def save(self, to: int, /) -> None:
        """Writes NORM_BYTES for every section."""

    def add(self, from_: int, /) -> None:
        """Adds what another one has saved."""

    def values(self) -> list[tuple[int, int, int, int, float, int]]:
        """Of every section: the sum of squares in three parts, the highest one's place, the largest
        magnitude, and how many elements are not finite."""

class Rates:
    """What is the same for all elements in an optimizer's step: csrc/optimizer.h."""

    def __init__(self, rule: int) -> None: ...
    maximize: bool
    first: bool
    nesterov: bool
    scale: float
    rate: float
    decay: float
    momentum: float
    dampening: float
    beta1: float
    beta2: float
    correction2: float
    eps: float

class Shares:
    """Ranges of a buffer for every rank, in ascending order: csrc/schedule.h."""

    def __init__(self, ranks: Sequence[Sequence[tuple[int, int]]], /) -> None: ...
    @property
    def address(self) -> int:
        """The ``shares`` of a call."""

class Update:
    """An optimizer's step on runs of elements: where gradient, parameter, copy in the accumulator's
    type, moment and square begin (0: there is none), elements, rates."""

    def __init__(self, runs: Sequence[tuple[int, int, int, int, int, int, Rates]], /) -> None: ...
    @property
    def address(self) -> int:
        """The ``update`` of a call."""

    def run(self, dtype: int, /) -> None:
        """Of gradients that have been reduced."""

class Listener:
    def __init__(self) -> None: ...
    @property
    def address(self) -> bytes: ...

class Work:
    def done(self) -> bool: ...
    def wait(self, timeout: timedelta) -> bool: ...
    @property
    def total(self) -> float:
        """Of a call that is done: the sum of the ranks' weights."""

    @property
    def account(self) -> tuple[int, int, int, int, int]:
        """Of a call that is done, if it was recorded, in ns: when it began and when it ended
        (time.monotonic_ns()), how long it waited for peers, for which peer's beginning the
        longest (-1: none), and how long."""

class Allocation:
    def __init__(self, owner: HostCommunicator, nbytes: int) -> None: ...

class HostCommunicator:
    def __init__(
        self,
        listener: Listener,
        rank: int,
        addresses: Sequence[bytes],
        processes: Sequence[int],
        token: bytes,
        *,
        timeout: timedelta,
        connect_timeout: timedelta,
        blocks: int,
        slot_bytes: int,
        stage_bytes: int,
        block_bytes: int,
        foreground_ns: tuple[int, int],
        background_ns: tuple[int, int],
        first_epoch: int,
    ) -> None: ...
    def run(
        self,
        plan: int,
        input: int,
        output: int,
        count: int,
        root: int,
        scale: float,
        weight: float,
        segment: int,
        shares: int,
        norms: int,
        update: int,
        /,
    ) -> None: ...
    def sum_norms(
        self, plan: int, world: int, norms: Sequence[tuple[Norms, Norms]], told: float, /
    ) -> list[float]:
        """An all-gather of the first ones' counts, of which all ranks' are added up in the second
        ones, and of what each has told."""

    def run_told(
        self,
        plan: int,
        input: int,
        output: int,
        count: int,
        root: int,
        scale: float,
        weight: float,
        segment: int,
        shares: int,
        norms: int,
        update: int,
        /,
    ) -> tuple[float, tuple[int, int, int, int, int]]:
        """``run``, and what a Work knows: its total and its account."""

    def submit(
        self,
        plan: int,
        input: int,
        output: int,
        count: int,
        root: int,
        scale: float,
        weight: float,
        segment: int,
        shares: int,
        norms: int,
        update: int,
        notify: int,
        /,
    ) -> Work: ...
    def record(self, on: bool, /) -> None: ...
    @property
    def blocks(self) -> int: ...
    def next_completed(self) -> list[tuple[int, Work]]: ...
    def add_segment(self, fd: int, base: int, nbytes: int, /) -> int: ...
    def remove_segment(self, segment: int, /) -> None: ...
    def is_allocation(self, base: int, /) -> bool: ...
    def close(self, drain: bool) -> bool: ...
    def refuse_child(self) -> None: ...
    @property
    def forked(self) -> bool: ...
