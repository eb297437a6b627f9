"""What a communicator raises, and how the kernels' failure record becomes words."""

from __future__ import annotations

import struct

KINDS = (
    *("all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier"),
    *("reduce_scatter_v", "all_gather_v"),
)
DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8")
OPS = ("sum", "mean", "min", "max")
ALGORITHMS = ("one_shot", "two_shot", "ring", "low_latency", "multimem", "encoded")
# csrc/codec.h
FORMATS = ("fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "int8", "int4", "onebit")
PHASES = ("enter", "reduce", "gather", "exit")

# csrc/signal.h: Failure and Field, in order.
_FAILURES = ("none", "mismatch", "lost", "closed", "timeout", "interrupted", "sibling", "broken")
_FIELDS = (
    *("none", "kind", "dtype", "op", "root", "numel", "shape"),
    *("algorithm", "scale", "weight"),
)


class CommunicatorError(RuntimeError):
    """A collective call could not be completed. The communicator refuses further work.

    Attributes:
        rank: the rank that raises this.
        found_by: the rank that gave up first; -1 where all ranks found it alike.
        peer: the rank that was waited for, or that differs.
        phase: where in the call this rank was: ``enter``, ``reduce``, ``gather`` or ``exit``.
        epoch: number of the call within the communicator.
        expected, seen: counter value (or, for a mismatch, rank 0's and the peer's value; of shapes,
            their checksums).
        intact: True if the call's tensors hold what they held before.
        ran: True if this rank has done its own part of the call, and only waited for others' to
            end; where it found their memory mapped, its output is whole.
    """

    rank: int
    found_by: int
    peer: int
    phase: str
    epoch: int
    expected: object
    seen: object
    intact: bool
    ran: bool


class MismatchError(CommunicatorError):
    """Ranks made different calls: another collective, shape, dtype, op, root or algorithm, or
    some gave a weight and others did not."""


class PeerLostError(CommunicatorError):
    """A peer's process has ended, or runs another program."""


class PeerClosedError(CommunicatorError):
    """A peer, or this rank itself, closed its communicator while the call needed it."""


class CommunicatorTimeoutError(CommunicatorError, TimeoutError):
    """A peer did not come in time: it is stopped, busy, or never made the call."""


class UnsynchronizedError(RuntimeError):
    """An optimizer was about to use gradients that have not been averaged over the ranks."""


_CLASSES: dict[str, type[CommunicatorError]] = {
    "mismatch": MismatchError,
    "lost": PeerLostError,
    "closed": PeerClosedError,
    "timeout": CommunicatorTimeoutError,
}


def _value(field: str, raw: int) -> object:
    names = {"kind": KINDS, "dtype": DTYPES, "op": OPS, "algorithm": ALGORITHMS}.get(field)
    if names is not None:
        return names[raw]
    if field == "weight":
        return bool(raw)
    if field == "scale":
        return struct.unpack("d", struct.pack("Q", raw))[0]
    return raw


def from_record(
    rank: int,
    failure: int,
    field: int,
    kind: int,
    phase: int,
    written: bool,
    ran: bool,
    found_by: int,
    peer: int,
    epoch: int,
    expected: int,
    seen: int,
) -> CommunicatorError:
    """The exception for a failure record of csrc/signal.h, as ``rank`` reports it."""
    reason = _FAILURES[failure]
    call = KINDS[kind]
    where = f"{call}, phase {PHASES[phase]}, epoch {epoch}"
    counters: tuple[object, object] = (expected, seen)
    if reason == "mismatch":
        name = _FIELDS[field]
        counters = (_value(name, expected), _value(name, seen))
        if name == "shape":
            difference = (
                f"ranks 0 and {peer} have tensors of one size but of another shape, or in other "
                "wire formats (or of dtypes that no reduction knows)"
            )
        elif name == "weight":
            difference = f"rank {peer} gives {'a' if seen else 'no'} weight, others do otherwise"
        else:
            difference = f"rank 0 has {name} {counters[0]}, rank {peer} has {name} {counters[1]}"
        what = f"ranks disagree in call {epoch} of this communicator: {difference}"
    else:
        what = {
            "lost": f"the process of rank {peer} has ended (or runs another program)",
            "closed": f"rank {peer} closed its communicator",
            "sibling": f"a thread of rank {found_by} gave up",
            "timeout": f"rank {peer} did not arrive before the timeout",
            "interrupted": f"rank {found_by} was interrupted",
            "broken": f"rank {found_by} failed inside the call",
        }[reason]
        finder = "" if found_by == rank else f"rank {found_by} gave up: "
        what = f"{finder}{what} ({where}: expected {expected}, seen {seen})"
    state = "may be written in part" if written else "are unchanged"
    error = _CLASSES.get(reason, CommunicatorError)(
        f"rank {rank}: {what}; the tensors of the call {state}. "
        "Close the communicator and create a new one to go on."
    )
    error.rank, error.found_by, error.peer = rank, found_by, peer
    error.phase, error.epoch = PHASES[phase], epoch
    error.expected, error.seen = counters
    error.intact, error.ran = not written, ran
    return error
