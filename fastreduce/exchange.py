"""Encoded messages between hosts, over gloo: all-to-all of what every rank sends to those that
reduce, all-gather of what they send back. The link carries the encoded bytes."""

from __future__ import annotations

import math
import queue
import threading
import uuid
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from fastreduce import _C
from fastreduce.process_group import Done, ProcessGroupTransport, fail
from fastreduce.weights import Weight, announcement, total_of

if TYPE_CHECKING:
    from datetime import timedelta

# A coding for a rank's factor.
Coding = Callable[[float], _C.WireCoding]


class Layout:
    """What of a buffer goes to whom, and in which bytes: the same on all ranks.

    Attributes:
        spans: the kernels' plan.
        checksum: 32 bits by which ranks compare theirs.
        sizes: bytes of a message to, and from, each rank.
    """

    def __init__(
        self, world_size: int, rows: Sequence[tuple[int, int, int, int, bool, int]]
    ) -> None:
        self.spans = _C.WirePlan(world_size, rows)
        self.checksum = zlib.crc32(repr(rows).encode())
        self.sizes = [self.spans.message_bytes(chunk) for chunk in range(world_size)]
        self.known = False  # that all ranks have the same
        self._memory: dict[str, list[Tensor]] = {}

    def memory(self, name: str, sizes: Sequence[int]) -> list[Tensor]:
        """Room for messages of so many bytes. It is kept for the next step: fresh memory costs as
        much time as a copy."""
        found = self._memory.get(name)
        if found is None:
            found = list(torch.empty(sum(sizes), dtype=torch.uint8).split(list(sizes)))
            self._memory[name] = found
        return found


class _Lane(threading.Thread):
    """Does what it is given, in order. Does not keep the interpreter from ending."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._steps: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.put = self._steps.put
        self.start()

    def run(self) -> None:
        while (step := self._steps.get()) is not None:
            step()
            del step  # and the tensors that it holds

    def close(self) -> None:
        """Waits for all that has been put."""
        self.put(None)
        self.join()


class Exchange:
    """The transport. Creating one is collective among the ranks of ``group``.

    Backends match calls by their order, so nobody else may call in between: it has process groups
    of its own, one for either way, each with a thread of its own. While one buffer comes back, the
    next goes out.
    """

    def __init__(
        self, group: ProcessGroupTransport, rank: int, world_size: int, timeout: timedelta
    ) -> None:
        self.rank, self.world_size = rank, world_size
        # Each rank begins with another one.
        self._others = [(rank + hop) % world_size for hop in range(1, world_size)]
        # new_group() names one after its ranks: a second one would find the first one's addresses.
        token = group.all_gather_object(uuid.uuid4().hex)[0]
        store = dist.distributed_c10d._get_default_store()
        prefixed = dist.PrefixStore  # type: ignore[attr-defined]
        self._out, self._back = (
            self._connect(prefixed(f"fastreduce-{token}-{way}", store), timeout)
            for way in ("out", "back")
        )
        self._going, self._coming = _Lane("fastreduce-out"), _Lane("fastreduce-back")
        self._error: Exception | None = None
        self._lock = threading.Lock()

    def _connect(self, store: Any, timeout: timedelta) -> Any:
        return dist.ProcessGroupGloo(store, self.rank, self.world_size, timeout)

    def close(self, *, drain: bool) -> None:
        """Ends what is under way, or, without ``drain``, leaves it: its peers may never come."""
        if not drain:
            for group in (self._out, self._back):
                if not hasattr(group, "abort"):  # of an older torch
                    return
                group.abort()
        self._going.close()
        self._coming.close()
        del self._out, self._back

    def all_reduce(
        self,
        future: Future[Tensor],
        tensor: Tensor,
        layout: Layout,
        coding: Coding,
        settle: Callable[[_C.WireCoding], None],
        scale: float,
        weight: Weight | None,
        totals: list[float],
        errors: list[Exception],
        done: Done | None,
    ) -> None:
        """``tensor`` becomes the mean; then ``settle`` is called, and ``future`` is completed. An
        exception is also added to ``errors``, and ends all later calls. ``totals`` takes the sum of
        the ranks' weights, if it is empty: calls that share it find it once."""
        guarded = partial(self._guarded, future, errors)

        def go() -> None:
            self._agree(layout)
            total = float(self.world_size)
            if weight is not None:
                if not totals:
                    totals.append(self._total(weight))
                total = totals[0]
            used = coding(scale * self.world_size / total if total else 0.0)
            own = layout.sizes[self.rank]
            sent = layout.memory("sent", layout.sizes)
            arrived = layout.memory("arrived", [own] * self.world_size)
            results = layout.memory("results", layout.sizes)
            out, back = self._receive(self._out, arrived), self._receive(self._back, results)
            for chunk in self._others:
                used.encode(chunk, sent[chunk].data_ptr())
                out += self._send(self._out, sent[chunk], chunk)
            used.encode(self.rank, arrived[self.rank].data_ptr())
            for work in out:
                work.wait()
            self._coming.put(guarded(lambda: come(used, total, arrived, results, back)))

        def come(
            used: _C.WireCoding,
            total: float,
            arrived: list[Tensor],
            results: list[Tensor],
            back: list[Any],
        ) -> None:
            used.reduce([each.data_ptr() for each in arrived], results[self.rank].data_ptr())
            for rank in self._others:
                back += self._send(self._back, results[self.rank], rank)
            for work in back:
                work.wait()
            for chunk, message in enumerate(results):
                used.decode(chunk, message.data_ptr())
            settle(used)
            if done is not None:
                done(total, None)
            future.set_result(tensor)

        self._going.put(guarded(go))

    def all_gather(
        self,
        future: Future[Tensor],
        tensor: Tensor,
        layout: Layout,
        nbytes: int,
        prepare: Callable[[Tensor], None],
        finish: Callable[[list[Tensor]], None],
        errors: list[Exception],
    ) -> None:
        """Messages of ``nbytes`` from every rank to all: ``prepare`` writes one, ``finish`` reads
        all. Then ``future`` is completed with ``tensor``."""
        guarded = partial(self._guarded, future, errors)

        def go() -> None:
            self._agree(layout)
            messages = layout.memory("messages", [nbytes] * self.world_size)
            works = self._receive(self._out, messages)
            prepare(messages[self.rank])
            for rank in self._others:
                works += self._send(self._out, messages[self.rank], rank)
            for work in works:
                work.wait()
            self._coming.put(guarded(lambda: come(messages)))

        def come(messages: list[Tensor]) -> None:
            finish(messages)
            future.set_result(tensor)

        self._going.put(guarded(go))

    def _guarded(
        self, future: Future[Tensor], errors: list[Exception], step: Callable[[], None]
    ) -> Callable[[], None]:
        def run() -> None:
            try:
                if self._error is not None:
                    raise RuntimeError(f"an earlier call has failed: {self._error}")
                step()
            except Exception as error:
                with self._lock:
                    self._error = self._error or error
                fail(future, error, errors)

        return run

    def _receive(self, group: Any, messages: list[Tensor]) -> list[Any]:
        """From all others. Before anything is sent: on gloo's one connection for a pair of ranks,
        what says that a rank is ready would wait behind the data that it sends (measured: twice the
        time on 2 hosts, and gloo's own all-to-all takes that)."""
        return [group.recv([messages[p]], p, 0) for p in self._others if messages[p].numel()]

    def _send(self, group: Any, message: Tensor, rank: int) -> list[Any]:
        return [group.send([message], rank, 0)] if message.numel() else []

    def _total(self, weight: Weight) -> float:
        parts = torch.tensor(announcement(weight), dtype=torch.float64)
        self._out.allreduce([parts]).wait()
        total = float(total_of(parts))
        if math.isnan(total):
            raise RuntimeError("some ranks gave a weight, and others did not")
        return total

    def _agree(self, layout: Layout) -> None:
        """Once for every layout: whether all ranks have the same."""
        if layout.known:
            return
        sums = torch.empty(self.world_size, dtype=torch.int64)
        self._out._allgather_base(sums, torch.tensor([layout.checksum])).wait()
        for rank, found in enumerate(sums.tolist()):
            if found != sums[0]:
                raise RuntimeError(
                    f"rank {self.rank}: rank {rank} encodes other parameters, or in other formats, "
                    "than rank 0 in the same call: do all ranks have the same wire and model?"
                )
        layout.known = True
