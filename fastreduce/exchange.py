"""Encoded messages where no memory is shared, over gloo or NCCL: all-to-all of what every
rank sends to those that reduce, all-gather of what they send back. The link carries the encoded
bytes."""

from __future__ import annotations

import queue
import threading
import uuid
import weakref
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from fastreduce import _C, cuda
from fastreduce.process_group import Done, ProcessGroupTransport, fail
from fastreduce.weights import Weight, agreed, announcement, total_of

if TYPE_CHECKING:
    from datetime import timedelta

CPU = torch.device("cpu")

# A coding, of the device's kernels, for a rank's factor, which on a GPU can lie in its memory.
Coding = Callable[[float | Tensor], Any]


# What is under way as the interpreter ends is waited for so long.
EXIT_SECONDS = 5.0


class Layout:
    """What of a buffer goes to whom, and in which bytes: the same on all ranks.

    Args:
        servers: the ranks that reduce, none for all, and of how many elements their parts consist,
            0 for any number.

    Attributes:
        spans: the kernels' plan.
        checksum: 32 bits by which ranks compare theirs.
        sizes: bytes of a message to, and from, each rank.
    """

    def __init__(
        self,
        world_size: int,
        rows: Sequence[tuple[int, int, int, int, bool, int]],
        device: torch.device = CPU,
        servers: tuple[Sequence[int], int] = ((), 0),
    ) -> None:
        self.device = device
        self.spans: Any = (
            _C.WirePlan(world_size, rows, *servers)
            if device.type == "cpu"
            else cuda.WirePlan(world_size, rows, device)
        )
        self.checksum = zlib.crc32(repr((rows, servers)).encode())
        self.sizes = [self.spans.message_bytes(chunk) for chunk in range(world_size)]
        self.known = False  # that all ranks have the same
        self._memory: dict[str, list[Tensor]] = {}

    def memory(self, name: str, sizes: Sequence[int]) -> list[Tensor]:
        """Room for messages of so many bytes. It is kept for the next step: fresh memory costs as
        much time as a copy."""
        found = self._memory.get(name)
        if found is None:
            whole = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
            found = self._memory[name] = list(whole.split(list(sizes)))
        return found

    def release(self) -> None:
        """Frees that memory."""
        self._memory.clear()


class Lane(threading.Thread):
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

    def close(self, timeout: float | None = None) -> None:
        """Waits for all that has been put."""
        self.put(None)
        self.join(timeout)


def end(groups: list[Any], lanes: list[Lane], timeout: float | None = None) -> None:
    """Lets lanes end what they were given, then lets go of the groups that they use."""
    for lane in lanes:
        lane.close(timeout)
    groups.clear()


def _store(name: str) -> Any:
    """By which the ranks of a new process group find each other."""
    store = dist.distributed_c10d._get_default_store()
    return dist.PrefixStore(name, store)  # type: ignore[attr-defined]


def abort(groups: list[Any]) -> bool:
    """Ends what is under way in them; False where this torch, an older one, cannot."""
    if not all(hasattr(group, "abort") for group in groups):
        return False
    for group in groups:
        group.abort()
    return True


def connect_gloo(name: str, rank: int, world_size: int, timeout: timedelta) -> Any:
    """Collective: a process group of that name, on which nobody else calls."""
    return dist.ProcessGroupGloo(_store(name), rank, world_size, timeout)


class _Way:
    """What the two transports have in common: after an error, all calls end with it."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._error: Exception | None = None
        self._lock = threading.Lock()

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

    def _agree(self, layout: Layout, group: Any) -> None:
        """Once for every layout: whether all ranks have the same. Waits for them."""
        if layout.known:
            return
        own = cuda.on_device(torch.tensor([layout.checksum]), layout.device)
        sums = torch.empty(self.world_size, dtype=torch.int64, device=layout.device)
        group._allgather_base(sums, own).wait()
        found = sums.tolist()
        for rank, each in enumerate(found):
            if each != found[0]:
                raise RuntimeError(
                    f"rank {self.rank}: rank {rank} encodes other parameters, or in other formats, "
                    "than rank 0 in the same call: do all ranks have the same wire and model?"
                )
        layout.known = True


class Exchange(_Way):
    """The transport between CPUs. Creating one is collective among the ranks of ``group``.

    Backends match calls by their order, so nobody else may call in between: it has process groups
    of its own, one for either way, each with a thread of its own. While one buffer comes back, the
    next goes out.
    """

    def __init__(
        self, group: ProcessGroupTransport, rank: int, world_size: int, timeout: timedelta
    ) -> None:
        super().__init__(rank, world_size)
        # Each rank begins with another one.
        self._others = [(rank + hop) % world_size for hop in range(1, world_size)]
        # new_group() names one after its ranks: a second one would find the first one's addresses.
        token = group.all_gather_object(uuid.uuid4().hex)[0]
        self._groups = [
            connect_gloo(f"fastreduce-{token}-{way}", rank, world_size, timeout)
            for way in ("out", "back")
        ]
        lanes = [Lane("fastreduce-out"), Lane("fastreduce-back")]
        self._going, self._coming = lanes
        # With this object, or before the interpreter: torch aborts where threads of a group are
        # left then.
        self._last = weakref.finalize(self, end, self._groups, lanes, EXIT_SECONDS)

    @property
    def _out(self) -> Any:
        return self._groups[0]

    @property
    def _back(self) -> Any:
        return self._groups[1]

    def close(self, *, drain: bool) -> None:
        """Ends what is under way, or, without ``drain``, leaves it: its peers may never come."""
        self._last.detach()
        if not drain and not abort(self._groups):
            return
        end(self._groups, [self._going, self._coming])

    def all_reduce(
        self,
        future: Future[Tensor],
        tensor: Tensor,
        layout: Layout,
        coding: Coding,
        settle: Callable[[_C.WireCoding], None],
        scale: float,
        weight: Weight | None,
        totals: list[Any],
        errors: list[Exception],
        done: Done | None,
        lands: bool = False,
    ) -> None:
        """``tensor`` becomes the mean; then ``settle`` is called, and ``future`` is completed. An
        exception is also added to ``errors``, and ends all later calls. ``totals`` takes the sum of
        the ranks' weights, if it is empty: calls that share it find it once. ``lands``: the mean
        stays with the rank that has reduced it, and nothing comes back."""
        guarded = partial(self._guarded, future, errors)

        def go() -> None:
            self._agree(layout, self._out)
            total = float(self.world_size)
            if weight is not None:
                if not totals:
                    totals.append(self._total(weight))
                total = totals[0]
            used = coding(scale * self.world_size / total if total else 0.0)
            own = layout.sizes[self.rank]
            sent = layout.memory("sent", layout.sizes)
            arrived = layout.memory("arrived", [own] * self.world_size)
            results = [] if lands else layout.memory("results", layout.sizes)
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
            own = (results or arrived)[self.rank].data_ptr()
            used.reduce([each.data_ptr() for each in arrived], own)
            for rank in self._others if results else ():
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
            self._agree(layout, self._out)
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

    def _receive(self, group: Any, messages: list[Tensor]) -> list[Any]:
        """From all others. Before anything is sent: on gloo's one connection for a pair of ranks,
        what says that a rank is ready would wait behind the data that it sends (measured: twice the
        time on 2 hosts, and gloo's own all-to-all takes that)."""
        expected = [p for p in self._others if messages and messages[p].numel()]
        return [group.recv([messages[p]], p, 0) for p in expected]

    def _send(self, group: Any, message: Tensor, rank: int) -> list[Any]:
        return [group.send([message], rank, 0)] if message.numel() else []

    def _total(self, weight: Weight) -> float:
        parts = torch.tensor(announcement(weight), dtype=torch.float64)
        self._out.allreduce([parts]).wait()
        return agreed(parts)


class CudaExchange(_Way):
    """The transport between GPUs. Creating one is collective among the ranks of ``group``.

    All is launched in order on a stream of its own, over a process group of its own: beside the
    backward pass, and without waiting for the device, but for a layout that is new.
    """

    def __init__(
        self,
        group: ProcessGroupTransport,
        rank: int,
        world_size: int,
        timeout: timedelta,
        device: torch.device,
    ) -> None:
        super().__init__(rank, world_size)
        reason = cuda.problem()
        if not reason and not dist.is_nccl_available():
            reason = "this torch has no NCCL"
        answers = group.all_gather_object((uuid.uuid4().hex, reason))
        if reason := cuda.first_reason([each for _, each in answers]):
            raise RuntimeError(f"wire: gradients on GPUs cannot be encoded: {reason}")
        self._device = device
        self._group = self._connect(answers[0][0], timeout)
        self._stream = torch.cuda.Stream(device, priority=-1)

    def _connect(self, token: str, timeout: timedelta) -> Any:
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timeout
        store = _store(f"fastreduce-{token}")
        return dist.ProcessGroupNCCL(store, self.rank, self.world_size, options)

    def close(self, *, drain: bool) -> None:
        """Ends what is under way, or, without ``drain``, leaves it: its peers may never come."""
        if drain:
            self._stream.synchronize()
            self._group.shutdown()
        else:
            self._group.abort()
        del self._group

    def all_reduce(
        self,
        future: Future[Tensor],
        tensor: Tensor,
        layout: Layout,
        coding: Coding,
        settle: Callable[[Any], None],
        scale: float,
        weight: Weight | None,
        totals: list[Any],
        errors: list[Exception],
        done: Done | None,
        lands: bool = False,
    ) -> None:
        """As :meth:`Exchange.all_reduce`, but that nothing ``lands``, and that ``future`` is
        completed once all is launched; whoever reads it lets its streams wait. ``done`` is not
        called: what the ranks' weights come to is known to the device alone, where mixed ones make
        a NaN."""

        def launch() -> None:
            own, longest = layout.sizes[self.rank], max(layout.sizes)
            self._agree(layout, self._group)
            if weight is not None and not totals:
                totals.append(self._total(weight))
            used = coding(scale if weight is None else self._factor(scale, totals[0]))
            [sent] = layout.memory("sent", [sum(layout.sizes)])
            [arrived] = layout.memory("arrived", [own * self.world_size])
            [reduced] = layout.memory("reduced", [longest])  # a backend gathers equal parts
            [results] = layout.memory("results", [longest * self.world_size])
            used.encode(sent)
            # The wait() of a work is the current stream's.
            splits = [own] * self.world_size, layout.sizes
            self._group.alltoall_base(arrived, sent, *splits).wait()
            used.reduce(arrived, reduced)
            self._group._allgather_base(results, reduced).wait()
            used.decode(results, longest)
            settle(used)

        self._launch(future, tensor, errors, launch)

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
        """As :meth:`Exchange.all_gather`; the messages that ``finish`` reads lie one after the
        other."""

        def launch() -> None:
            self._agree(layout, self._group)
            [message] = layout.memory("message", [nbytes])
            [messages] = layout.memory("messages", [nbytes * self.world_size])
            prepare(message)
            self._group._allgather_base(messages, message).wait()
            finish([*messages.split(nbytes)])

        self._launch(future, tensor, errors, launch)

    def _launch(
        self,
        future: Future[Tensor],
        tensor: Tensor,
        errors: list[Exception],
        launch: Callable[[], None],
    ) -> None:
        """On the stream of this transport, after what the current one has been given so far."""

        def step() -> None:
            launch()
            future.set_result(tensor)  # at this point of the current stream

        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            tensor.record_stream(self._stream)
            with torch.cuda.stream(self._stream):
                self._guarded(future, errors, step)()

    def _total(self, weight: Weight) -> Tensor:
        parts = torch.tensor(announcement(weight), dtype=torch.float64)
        parts = cuda.on_device(parts, self._device)
        self._group.allreduce([parts]).wait()
        return total_of(parts)

    def _factor(self, scale: float, total: Tensor) -> Tensor:
        share = torch.where(total == 0, total, self.world_size / total)
        return (share * scale).float()
