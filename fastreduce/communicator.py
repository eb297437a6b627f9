"""Communicator: the ranks of a process group, and what they share."""

from __future__ import annotations

import functools
import logging
import math
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from fastreduce import _C, arrays, cuda, enums, policy, tuning, weights
from fastreduce.exchange import CPU, Coding, CudaExchange, Exchange, Layout
from fastreduce.hierarchy import HierarchicalTransport, Hosts
from fastreduce.memory import NOT_SHARED, SharedTensors
from fastreduce.norms import Norms
from fastreduce.norms import check as check_norms
from fastreduce.process_group import Account, Done, ProcessGroupTransport, as_timedelta, fail
from fastreduce.rendezvous import connect_gpus, host, share_memory
from fastreduce.shares import Shares

if TYPE_CHECKING:
    from types import TracebackType

    from torch.distributed import ProcessGroup

logger = logging.getLogger("fastreduce")

Op = Literal["sum", "mean", "min", "max"]
Algorithm = Literal["auto", "one_shot", "two_shot", "ring", "low_latency", "multimem"]

# Those of the host's ranks; the others need a GPU's way to store.
_HOST_ALGORITHMS = {name: enums.ALGORITHM[name] for name in ("one_shot", "two_shot", "ring")}
_ONE_SHOT, _TWO_SHOT, _RING = _HOST_ALGORITHMS.values()
_ALGORITHMS = {name: number for name, number in enums.ALGORITHM.items() if name != "encoded"}
_BARRIER = (
    enums.plan("barrier", torch.uint8, "sum", "one_shot", 0),
    0,
    0,
    0,
    0,
    1.0,
    1.0,
    NOT_SHARED,
    0,
    0,
    0,
)

_MAX_PLANS = 4096

Number = TypeVar("Number", int, float)

# A call as the core takes it: plan, input, output, count, root, scale, weight, segment, and the
# addresses of shares, norms and an update.
_Call = tuple[int, int, int, int, int, float, float, int, int, int, int]
# A Future, its tensor, who else wants to know of the call's end, and what is counted in.
_Promise = tuple["Future[Tensor]", Tensor, "Done | None", "Norms | None"]


class Work(Protocol):
    """An asynchronous call, under way: what one with ``async_op=True`` returns."""

    def wait(self, timeout: float | timedelta | None = None) -> None:
        """Blocks until the call has completed; raises what it raised. ``timeout`` in seconds:
        TimeoutError once it has passed, the call goes on. On a GPU, without a timeout, it is the
        current stream that waits."""

    def is_completed(self) -> bool:
        """Whether wait() would return, or raise, at once."""


class _HostWork:
    def __init__(self, work: _C.Work, release: Callable[[], None]) -> None:
        self._work = work
        self._release = release

    def wait(self, timeout: float | timedelta | None = None) -> None:
        limit = as_timedelta(math.inf if timeout is None else timeout)
        if not self._work.wait(limit):
            raise TimeoutError(f"the call has not completed after {limit.total_seconds()} s")
        self._release()

    def is_completed(self) -> bool:
        return self._work.done()


class Communicator:
    """All-reduce and its relatives among the ranks of a ``torch.distributed`` group.

    Where all ranks can share memory (one host, one network namespace, one user), the calls run
    in this library's kernels over shared memory. Between hosts of which some has several ranks,
    all-reduces of floating tensors on the CPU run in them within the hosts, and through gloo
    between them (see :mod:`fastreduce.hierarchy`); everything else goes through the group's own
    backend, and the log says why. CUDA tensors run in CUDA kernels where the ranks' GPUs reach each
    other's memory, else through the group's backend; the first call with one is when that is found
    out (do not capture that one into a graph). Creating a communicator is collective: all ranks of
    the group, and only they, call the constructor. Calls are collective too, and every rank makes
    them in the same order. Several communicators, of any groups, can exist at once.

    Sums run over a fixed binary tree of ranks, in float32 for 16-bit types, rounded once: the
    same bits on every rank, for every size, for ``one_shot``, ``two_shot`` and ``low_latency``.
    ``ring`` sums in ring order, ``multimem`` in the switch's, the process group in its own;
    ``hierarchical`` over that tree where hosts are parts of it.
    Integers wrap; their mean truncates towards zero. Which NaN comes out, where there is one, is
    not specified.

    Args:
        group: a process group of which this process is a member; None for the default group.
        timeout: seconds (or a timedelta) that any one wait for a peer may take.
        threads: threads with which this rank moves large buffers, 1 to 16. By default the
            rank's share of the host's cores; the smallest value of any rank counts.
        deterministic: refuse what cannot promise the order of summation (``ring``,
            ``multimem``, the process group). ``torch.use_deterministic_algorithms(True)`` does
            the same.

    Attributes:
        rank, world_size: of the group.
        shared_memory: False if the calls go through the process group.
        threads: that move large buffers.

    Raises:
        ValueError: this process is no member of ``group``, or an argument is out of range.
        RuntimeError: ``deterministic`` was asked for and the ranks cannot share memory.
    """

    def __init__(
        self,
        group: ProcessGroup | None = None,
        timeout: float | timedelta = 600.0,
        *,
        threads: int | None = None,
        deterministic: bool = False,
        _first_epoch: int = 0,
        _within: Sequence[int] | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise ValueError("torch.distributed is not initialised: call init_process_group first")
        rank = dist.get_rank(group)
        if rank < 0:
            raise ValueError("this process is not a member of the group")
        members = range(dist.get_world_size(group)) if _within is None else _within
        self.rank: int = members.index(rank)
        self.world_size: int = len(members)
        if threads is not None and not 1 <= threads <= _C.MAX_BLOCKS:
            raise ValueError(f"threads: expected 1 to {_C.MAX_BLOCKS}, got {threads}")
        self.timeout = as_timedelta(timeout)
        if self.timeout <= timedelta(0):
            raise ValueError(f"timeout: expected more than 0 s, got {timeout}")
        self.deterministic = deterministic
        self._group = ProcessGroupTransport(group, members)
        self._core, self.topology, reason = share_memory(
            self._group, self.rank, self.world_size, self.timeout, threads, _first_epoch
        )
        self.shared_memory = self._core is not None
        self.threads: int = 1 if self._core is None else self._core.blocks
        self._said: set[str] = set()
        self._gpus: dict[torch.device, cuda.CudaTransport | None] = {}
        self._first_epoch = _first_epoch
        # For all_reduce, by dtype, shape, op and algorithm.
        self._plans: dict[tuple[torch.dtype, torch.Size, str, str], tuple[int, int, bool]] = {}
        # Calls of the communication thread, in order, and the tensors they work on.
        self._pending: deque[tuple[list[_C.Work], tuple[Tensor, ...], Norms | None]] = deque()
        self._futures: dict[int, _Promise] = {}
        self._errors: list[Exception] = []
        self._notifier: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._next_future = 0
        self._norm_plans: dict[int, int] = {}  # by bytes
        self._exchanges: dict[torch.device, Exchange | CudaExchange] = {}
        if self._core is None and _within is None:
            by_hosts = self._by_hosts(group, threads)
            if by_hosts is not None:
                self._group = by_hosts
            if deterministic and not (by_hosts and by_hosts.hosts.keep_order):
                self._group.close()
                raise RuntimeError(
                    f"deterministic=True: rank {self.rank} would use the process group, which "
                    f"does not promise an order of summation, because {reason}"
                )
            if by_hosts is None:
                self._say(f"using the process group, because {reason}")
            else:
                self._say(f"sums by hosts, over {len(by_hosts.hosts.members)}, because {reason}")
        elif self._core is None:
            pass  # said by the communicator that this is a part of
        else:
            self._shared = SharedTensors(self._core, self.world_size)
            # Ends it with this object, or with the interpreter if nobody has closed it by then.
            weakref.finalize(self, _end, self._core, self._notifier, False)

    def _by_hosts(
        self, group: ProcessGroup | None, threads: int | None
    ) -> HierarchicalTransport | None:
        """Collective: the way over several hosts, where some has several ranks."""
        hosts = Hosts.of(self._group.all_gather_object(host()))
        if len(hosts.members) == 1 or hosts.columns == 1:
            return None
        mates = hosts.members[hosts.host_of(self.rank)]
        inside = [
            Communicator(group, self.timeout, threads=threads, _within=mates) for _ in range(2)
        ]
        if not all(self._group.all_gather_object(all(each.shared_memory for each in inside))):
            for each in inside:
                each.close()
            return None
        return HierarchicalTransport(group, self.rank, hosts, (inside[0], inside[1]), self.timeout)

    # -- collectives --------------------------------------------------------------------------

    def all_reduce(
        self,
        tensor: Tensor | arrays.Array,
        op: Op = "mean",
        algorithm: Algorithm = "auto",
        async_op: bool = False,
        *,
        scale: float = 1.0,
        weight: weights.Weight | None = None,
        move: bool = False,
        deterministic: bool = False,
        norms: Norms | None = None,
        done: Done | None = None,
    ) -> Work | None:
        """Replaces ``tensor``, in place, by the reduction over all ranks.

        Args:
            tensor: any shape, the same on all ranks; float32, float64, float16, bfloat16, int32,
                int64 or uint8. Zero-copy if it lies in shared memory on every rank (see
                :meth:`empty`), staged otherwise. Or an array of another library, by DLPack or
                ``__cuda_array_interface__`` (NumPy, CuPy ...).
            op: ``mean`` is sum x (1/N), in the accumulator, before the one rounding.
            algorithm: ``one_shot`` up to 256 KiB, ``two_shot``, ``ring``, or the fastest. On GPUs
                ``one_shot`` up to 512 KiB, ``low_latency`` up to 256 KiB and 8 ranks, and
                ``multimem`` where an NVLink switch adds (float32, float16, bfloat16).
            async_op: return a :class:`Work` at once and run on the communication thread. The
                tensor must be contiguous and must not be touched before ``wait()`` returns.
            scale: factor on this rank's input, applied in the accumulator (floating types). 0 makes
                it 0, whatever it holds. On GPUs, ranks with different ones give a weight, or name
                the algorithm.
            weight: this rank's part of the divisor of a mean, instead of 1: the result is
                sum(scale x tensor) / sum(weight). All ranks give one, or none does. A weighted mean
                is ``scale=n, weight=n``. Where the weights' sum is 0, so must be the scales, and
                the result is 0. 0, or 1e-30 to 1e30. A rank that cannot know whether the others
                give weights is ``"absent"``: it counts as 0 if they do and as 1 if not;
                ``"ordinary"`` is None where some rank may be absent.
            deterministic: as for the constructor, in this call.
            norms: what this rank stores of the result is counted there, at no further pass over
                memory (but for ``ring``, tensors that are staged, and the process group; a GPU
                reads its rank's part again, behind the reduction); :meth:`sum_norms` then brings
                the ranks' counts together. Of sums and means of floating types; not before an
                asynchronous call has ended.
            done: called once a call that is not asynchronous has succeeded, with the sum of the
                ranks' weights and the call's times (see ``_C.Work.account``). Where tensors of the
                CPU share memory only.
            move: a tensor in private memory is moved into shared memory, in place and under all
                its views, if that can be done. For buffers that live long and that torch alone
                holds, such as DDP's buckets: whoever has a raw pointer into it (a DLPack
                consumer, a call of another communicator) is left with memory that is gone.

        Raises:
            ValueError, TypeError: an argument is not allowed; nothing was sent.
            CommunicatorError: see :mod:`fastreduce.errors`.
        """
        core = self._core
        if not isinstance(tensor, Tensor):
            with arrays.borrowed(tensor) as borrowed:
                return self.all_reduce(
                    borrowed,
                    op,
                    algorithm,
                    async_op,
                    scale=scale,
                    weight=weight,
                    deterministic=deterministic,
                    norms=norms,
                )
        counts = 0
        if norms is not None:
            check_norms(tensor, op)
            counts = norms.address
        if not tensor.is_contiguous() or tensor.is_neg():
            self._all_reduce_strided(
                tensor, op, algorithm, async_op, scale, weight, deterministic, norms
            )
            return None
        if core is None or not tensor.is_cpu:
            return self._all_reduce_elsewhere(
                tensor, op, algorithm, async_op, scale, weight, deterministic, norms
            )
        key = (tensor.dtype, tensor.shape, op, algorithm)
        plan, count, two_shot = self._plans.get(key) or self._plan(key)
        part = weights.ORDINARY
        if deterministic and algorithm == "ring":
            self._refuse_if_deterministic("ring", True)
        if scale != 1.0 or weight is not None:
            part = _check_factors(scale, weight, op, tensor)
        segment = self._segment_of(tensor, move) if two_shot else NOT_SHARED
        at = tensor.data_ptr()
        if async_op:
            return self._submit(
                (plan, at, at, count, 0, scale, part, segment, 0, counts, 0), tensor, norms=norms
            )
        if done is None:
            core.run(plan, at, at, count, 0, scale, part, segment, 0, counts, 0)
        else:
            done(*core.run_told(plan, at, at, count, 0, scale, part, segment, 0, counts, 0))
        return None

    def all_reduce_future(
        self,
        tensor: Tensor,
        op: Op = "mean",
        *,
        scale: float = 1.0,
        weight: weights.Weight | None = None,
        move: bool = False,
        deterministic: bool = False,
        norms: Norms | None = None,
        done: Done | None = None,
    ) -> Future[Tensor]:
        """An all-reduce on the communication thread whose end is a torch Future of ``tensor``.

        Never raises: errors, of the arguments too, travel through the Future.

        Args:
            tensor, op, scale, weight, move, deterministic, norms: as for :meth:`all_reduce`;
                contiguous.
            done: as for :meth:`all_reduce`, before the Future is completed; times are known only
                where they are recorded. On the CPU only.
        """
        on_gpu = isinstance(tensor, Tensor) and tensor.is_cuda
        # A Future without devices would not make its reader's stream wait.
        future: Future[Tensor] = Future(devices=[tensor.device] if on_gpu else None)
        try:
            self._submit_future(future, tensor, op, scale, weight, move, deterministic, norms, done)
        except Exception as error:
            fail(future, error, self._errors)
        return future

    def _submit_future(
        self,
        future: Future[Tensor],
        tensor: Tensor,
        op: Op,
        scale: float,
        weight: weights.Weight | None,
        move: bool,
        deterministic: bool,
        norms: Norms | None,
        done: Done | None,
    ) -> None:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"tensor: expected a torch.Tensor, got {type(tensor).__name__}")
        _check_dense("tensor", tensor)
        _number("dtype", enums.DTYPE, tensor.dtype)
        _number("op", enums.OP, op)
        part = _check_factors(scale, weight, op, tensor)
        if norms is not None:
            check_norms(tensor, op)
        core = self._core
        gpu = self._gpu(tensor)
        if gpu is not None:
            weighted = weight is not None
            name = self._gpu_algorithm(gpu, tensor, op, "auto", weighted, deterministic)
            if name != "process_group":
                shape = _checksum(tensor.shape)
                with gpu.aside(tensor):
                    gpu.all_reduce(tensor, op, name, scale, shape, part)
                    if norms is not None:
                        norms.measure(tensor, self.rank, self.world_size)
                    future.set_result(tensor)  # whose readers' streams wait for this one
                return
        if core is None or not tensor.is_cpu:
            if not self._group.keeps_order(tensor, op):
                self._refuse_if_deterministic("the process group", deterministic)
            if norms is not None and not tensor.is_cpu:
                raise ValueError(f"norms: expected None for the process group on {tensor.device}")
            done = self._measuring(tensor, norms, done)
            self._group.all_reduce_future(future, tensor, op, scale, weight, self._errors, done)
            return
        core.refuse_child()
        key = (tensor.dtype, tensor.shape, op, "auto")
        plan, count, two_shot = self._plans.get(key) or self._plan(key)
        segment = self._segment_of(tensor, move) if two_shot else NOT_SHARED
        at = tensor.data_ptr()
        counts = 0 if norms is None else norms.address
        call = (plan, at, at, count, 0, scale, part, segment, 0, counts, 0)
        self._promise(future, tensor, call, done, norms)

    def _measuring(self, tensor: Tensor, norms: Norms | None, done: Done | None) -> Done | None:
        """``done``, and before it every rank counts all of what it has then."""
        if norms is None:
            return done

        def measured(total: float, account: Account | None) -> None:
            norms.measure(tensor, 0, 1, of_all=True)
            if done is not None:
                done(total, account)

        return measured

    def _promise(
        self,
        future: Future[Tensor],
        tensor: Tensor,
        call: _Call,
        done: Done | None,
        norms: Norms | None = None,
    ) -> None:
        """Queues a call that completes a Future. What it needs lives as long as ``done``."""
        core = self._core
        assert core is not None
        with self._lock:
            number = self._next_future
            self._next_future += 1
            if not self._notifier:
                notifier = threading.Thread(
                    target=_notify,
                    args=(core, self._futures, self._errors),
                    name="fastreduce-futures",
                    daemon=True,
                )
                notifier.start()
                self._notifier.append(notifier)
        self._futures[number] = (future, tensor, done, norms)
        try:
            core.submit(*call, number)
        except BaseException:
            del self._futures[number]
            raise

    def all_reduce_encoded(
        self,
        tensor: Tensor,
        layout: Layout,
        coding: Coding,
        settle: Callable[[_C.WireCoding], None],
        *,
        scale: float,
        weight: weights.Weight | None,
        totals: list[Any],
        here: bool,
        lands: bool,
        done: Done | None,
    ) -> Future[Tensor]:
        """The mean over the ranks in wire formats; see :mod:`fastreduce.compression`.

        Args:
            tensor: contiguous, on the CPU or, with a layout for it, on a GPU.
            layout: how it is encoded; the same on all ranks.
            coding: makes what the kernels are given, for a rank's factor (which kernels that share
                memory find by themselves).
            settle: called with that, once the call has succeeded; on a GPU, been launched.
            scale, weight, done: as for :meth:`all_reduce`.
            totals: one list for all calls with these ranks' weights, empty at first.
            here: run in this thread, if ranks share memory.
            lands: it stays with the rank that has reduced it. On the CPU only.
        """
        part = _check_factors(scale, weight, "mean", tensor)
        future: Future[Tensor] = Future(devices=[tensor.device] if tensor.is_cuda else None)
        gpu = self._encoding_gpu(tensor.device) if tensor.is_cuda else None
        if gpu is not None:
            try:
                with gpu.aside(tensor):
                    used = coding(1.0)
                    gpu.all_reduce_encoded(tensor, used, scale, layout.checksum, part)
                    settle(used)
                    future.set_result(tensor)  # whose readers' streams wait for this one
            except Exception as error:
                fail(future, error, self._errors)
            return future
        if self._core is None or tensor.is_cuda:
            self.exchange(tensor.device).all_reduce(
                future,
                tensor,
                layout,
                coding,
                settle,
                scale,
                weight,
                totals,
                self._errors,
                done,
                lands,
            )
            return future
        self._core.refuse_child()
        used = coding(1.0)
        kind = "reduce_scatter_v" if lands else "all_reduce"
        plan = enums.plan(kind, tensor.dtype, "mean", "encoded", layout.checksum)
        at = tensor.data_ptr()
        call = (plan, used.address, at, tensor.numel(), 0, scale, part, NOT_SHARED, 0, 0, 0)

        def told(total: float, account: Account | None) -> None:
            settle(used)
            if done is not None:
                done(total, account)

        if here:
            told(*self._core.run_told(*call))
            future.set_result(tensor)
        else:
            self._promise(future, tensor, call, told)
        return future

    def all_gather_encoded(
        self,
        tensor: Tensor,
        layout: Layout,
        nbytes: int,
        prepare: Callable[[Tensor], None],
        finish: Callable[[list[Tensor]], None],
        *,
        here: bool,
    ) -> Future[Tensor]:
        """Messages of ``nbytes`` from every rank to all.

        Args:
            tensor: the Future's.
            layout, here: as for :meth:`all_reduce_encoded`.
            prepare: writes this rank's message.
            finish: reads all of them.
        """
        future: Future[Tensor] = Future(devices=[tensor.device] if tensor.is_cuda else None)
        if self._core is None or tensor.is_cuda:
            exchange = self.exchange(tensor.device)
            exchange.all_gather(future, tensor, layout, nbytes, prepare, finish, self._errors)
            return future
        self._core.refuse_child()
        [message] = layout.memory("message", [nbytes])
        messages = layout.memory("messages", [nbytes] * self.world_size)
        prepare(message)
        algorithm = "one_shot"
        if nbytes > policy.one_shot_limit(self.world_size, self.topology):
            algorithm = "two_shot"
        plan = enums.plan("all_gather", torch.uint8, "sum", algorithm, layout.checksum)
        at = messages[0].data_ptr()
        call = (plan, message.data_ptr(), at, nbytes, 0, 1.0, weights.ORDINARY, NOT_SHARED, 0, 0, 0)
        if here:
            self._core.run(*call)
            finish(messages)
            future.set_result(tensor)
        else:
            self._promise(future, tensor, call, lambda _, __: finish(messages))
        return future

    def reduce_scatter_v(
        self,
        tensor: Tensor,
        shares: Shares,
        *,
        scale: float = 1.0,
        weight: weights.Weight | None = None,
        move: bool = False,
        op: Literal["mean", "sum"] = "mean",
        update: _C.Update | None = None,
        here: bool = False,
    ) -> Future[Tensor]:
        """In place: this rank's share of ``tensor`` becomes the mean over all ranks' tensors, or
        their sum (between ranks that share memory); the rest stays as it is.

        Args:
            tensor: flat, of a floating type, on the CPU.
            shares: the same on all ranks.
            scale, weight, move: as for :meth:`all_reduce`.
            update: done with the result, in the same loop over memory where ranks share it.
            here: run in this thread.
        """
        part = _check_factors(scale, weight, op, tensor)
        future: Future[Tensor] = Future()
        if self._core is None:
            assert op == "mean"
            self._refuse_if_deterministic("the process group")
            self._group.reduce_scatter_v(
                future, tensor, shares, self.rank, scale, weight, self._errors
            )
            if here:
                future.wait()
            if update is not None:
                future.wait()
                update.run(enums.DTYPE[tensor.dtype])
            return future
        self._core.refuse_child()
        algorithm, segment = self._way_of(tensor, move)
        checksum = _checksum(tensor.shape) ^ shares.checksum
        plan = enums.plan("reduce_scatter_v", tensor.dtype, op, algorithm, checksum)
        at, table = tensor.data_ptr(), shares.table(range(self.world_size))
        call = (plan, at, at, tensor.numel(), 0, scale, part, segment, table.address, 0)
        if here:
            self._core.run(*call, 0 if update is None else update.address)
            future.set_result(tensor)
        else:
            assert update is None
            self._promise(future, tensor, (*call, 0), None)
        return future

    def all_gather_v(
        self, tensor: Tensor, shares: Shares, distances: Sequence[int] | None = None
    ) -> None:
        """In place: all ranks' shares of ``tensor`` become what they are on their ranks; where that
        fails through the process group, nothing has been changed.

        Args:
            tensor: flat, on the CPU.
            shares: the same on all ranks.
            distances: only from those ranks that come so many before this one, cyclically; the same
                on all ranks, None for all.
        """
        distances = range(1, self.world_size) if distances is None else distances
        sources = [(self.rank - distance) % self.world_size for distance in distances]
        if self._core is None:
            self._group.all_gather_v(tensor, shares, self.rank, distances)
            return
        _number("dtype", enums.DTYPE, tensor.dtype)
        algorithm, segment = self._way_of(tensor)
        checksum = _checksum(tensor.shape) ^ shares.checksum ^ len(sources)
        plan = enums.plan("all_gather_v", tensor.dtype, "sum", algorithm, checksum)
        at, table = tensor.data_ptr(), shares.table([self.rank, *sources])
        call = (plan, at, at, tensor.numel(), 0, 1.0, weights.ORDINARY, segment, table.address)
        self._core.run(*call, 0, 0)

    def sum_norms(self, *norms: Norms, told: float = 0.0) -> list[float]:
        """Brings together what the ranks have counted; collective, but where all-reduces went
        through the process group: there every rank has counted all. The same on all of them.

        Returns:
            What every rank that takes part has ``told``.
        """
        if all(each.of_all for each in norms):
            for each in norms:
                each.settle([each.saved()])
            return [told]
        if self._core is not None:
            self._core.refuse_child()
            # At once: between two buckets the interpreter's memory is in no cache.
            pairs = [each.to_be_summed() for each in norms]
            nbytes = 8 + sum(each.nbytes for each in norms)
            plan = self._norm_plans.get(nbytes)
            if plan is None:
                limit = policy.one_shot_limit(self.world_size, self.topology)
                way = "one_shot" if nbytes <= limit else "two_shot"
                plan = enums.plan("all_gather", torch.uint8, "sum", way, 0)
                self._norm_plans[nbytes] = plan
            heard = self._core.sum_norms(plan, self.world_size, pairs, told)
            for each in norms:
                each.know()
            return heard
        saved = [each.saved() for each in norms]
        note = torch.tensor([told], dtype=torch.float64).view(torch.int64)
        own = torch.cat([*(table.view(-1) for table in saved), note])
        every = torch.empty(self.world_size, own.numel(), dtype=own.dtype)
        self.all_gather(every.view(-1), own)
        begin = 0
        for each, table in zip(norms, saved, strict=True):
            end = begin + table.numel()
            each.settle(every[:, begin:end].contiguous())
            begin = end
        notes: list[float] = every[:, -1].contiguous().view(torch.float64).tolist()
        return notes

    def total(self, weight: weights.Weight, device: torch.device = CPU) -> float:
        """The sum of the ranks' weights; added up where backends of the group work."""
        parts = torch.tensor(weights.announcement(weight), dtype=torch.float64, device=device)
        self.all_reduce(parts, "sum")
        return weights.agreed(parts)

    def shares_memory(self, device: torch.device) -> bool:
        """Whether all ranks encode and decode in memory that they share, without the messages of
        :meth:`exchange`. Collective the first time for a GPU."""
        if device.type == "cpu":
            return self.shared_memory
        return self._encoding_gpu(device) is not None

    def _encoding_gpu(self, device: torch.device) -> cuda.CudaTransport | None:
        gpu = self._gpu_on(device)
        if gpu is None or policy.reaches_all(gpu.topology):
            return gpu
        self._say(
            "wire formats between GPUs go through NCCL, because the ranks run on "
            f"{gpu.topology.hosts} hosts without a switch between their GPUs"
        )
        return None

    def exchange(self, device: torch.device = CPU) -> Exchange | CudaExchange:
        """The way of encoded messages through a backend. Collective the first time for a device."""
        found = self._exchanges.get(device)
        if found is None:
            way = self._group, self.rank, self.world_size, self.timeout
            found = Exchange(*way) if device.type == "cpu" else CudaExchange(*way, device)
            self._exchanges[device] = found
        return found

    @arrays.accepted
    def reduce_scatter(
        self,
        output: Tensor | arrays.Array,
        input: Tensor | arrays.Array,
        op: Op = "mean",
        async_op: bool = False,
        *,
        scale: float = 1.0,
    ) -> Work | None:
        """``output`` becomes the rank's part of the reduction over all ranks' ``input``.

        Args:
            output: contiguous, ``input.numel() / world_size`` elements, same dtype. May be the
                rank's own part of ``input``, otherwise they must not overlap.
            input: contiguous, ``world_size`` equal parts in rank order.
            op, async_op, scale: as for :meth:`all_reduce`.
        """
        assert isinstance(input, Tensor) and isinstance(output, Tensor)
        _check_pair("input", input, "output", output, self.world_size)
        _number("dtype", enums.DTYPE, output.dtype)
        _number("op", enums.OP, op)
        _check_factors(scale, None, op, output)
        self._check_overlap(whole=input, part=output)
        gpu = self._gpu(output)
        if gpu is not None:
            shape = _checksum(output.shape)
            return _on_gpu(
                gpu,
                lambda: gpu.reduce_scatter(output, input, op, scale, shape),
                async_op,
                output,
                input,
            )
        if self._core is None or not output.is_cpu:
            self._refuse_if_deterministic("the process group")
            return self._group.reduce_scatter(output, input, op, async_op, scale)
        return self._call("reduce_scatter", input, output, output, async_op, op=op, scale=scale)

    @arrays.accepted
    def all_gather(
        self, output: Tensor | arrays.Array, input: Tensor | arrays.Array, async_op: bool = False
    ) -> Work | None:
        """``output`` becomes all ranks' ``input``, in rank order.

        Args:
            output: contiguous, ``world_size * input.numel()`` elements, same dtype.
            input: contiguous; may be the rank's own part of ``output``, otherwise they must not
                overlap.
        """
        assert isinstance(input, Tensor) and isinstance(output, Tensor)
        _check_pair("output", output, "input", input, self.world_size)
        self._check_overlap(whole=output, part=input)
        gpu = self._gpu(input)
        if gpu is not None:
            shape = _checksum(input.shape, input.dtype)
            return _on_gpu(
                gpu, lambda: gpu.all_gather(output, input, shape), async_op, output, input
            )
        if self._core is None or not input.is_cpu:
            return self._group.all_gather(output, input, async_op)
        return self._call("all_gather", input, output, input, async_op)

    @arrays.accepted
    def broadcast(
        self, tensor: Tensor | arrays.Array, root: int = 0, async_op: bool = False
    ) -> Work | None:
        """``tensor`` becomes what it is on rank ``root`` (a rank of the group).

        Args:
            tensor: contiguous, the same shape and dtype on all ranks, any dtype.
        """
        assert isinstance(tensor, Tensor)
        if not 0 <= root < self.world_size:
            raise ValueError(f"root: expected 0 to {self.world_size - 1}, got {root}")
        _check_dense("tensor", tensor)
        gpu = self._gpu(tensor)
        if gpu is not None:
            shape = _checksum(tensor.shape, tensor.dtype)
            return _on_gpu(gpu, lambda: gpu.broadcast(tensor, root, shape), async_op, tensor)
        if self._core is None or not tensor.is_cpu:
            return self._group.broadcast(tensor, root, async_op)
        return self._call("broadcast", tensor, tensor, tensor, async_op, root=root)

    def algorithm(
        self,
        tensor: Tensor,
        op: Op = "mean",
        *,
        weighted: bool = False,
        deterministic: bool = False,
    ) -> str:
        """Which algorithm ``auto`` takes for such a tensor; between hosts ``hierarchical``, or
        ``process_group``."""
        gpu = self._gpu(tensor)
        if gpu is not None:
            return self._gpu_algorithm(gpu, tensor, op, "auto", weighted, deterministic)
        if self._core is None or not tensor.is_cpu:
            return self._group.algorithm(tensor, op)
        return policy.choose_algorithm(tensor.nbytes, self.world_size, self.topology)

    def barrier(self, async_op: bool = False) -> Work | None:
        """Returns on no rank before all ranks have called it."""
        if self._core is None:
            return self._group.barrier(async_op)
        if async_op:
            return self._submit(_BARRIER)
        self._core.run(*_BARRIER)
        return None

    def empty(
        self,
        *shape: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | int | None = None,
    ) -> Tensor:
        """An uninitialised tensor in memory that the peers can map: calls on it are zero-copy. (One
        of a few KiB, up to where ``one_shot`` is the faster, is an ordinary tensor.)

        On the CPU not collective; works without /dev/shm. The memory is reserved here and given
        back when the tensor and its views are gone, after the next call. On a GPU collective: all
        ranks make the same tensors in the same order. Where GPUs do not reach each other's memory,
        an ordinary tensor.

        Raises:
            RuntimeError: there is not that much memory.
        """
        dtype = dtype or torch.get_default_dtype()
        if device is not None and torch.device(device).type != "cpu":
            place = _cuda_device(device)
            gpu = self._gpu_on(place)
            if gpu is None:
                return torch.empty(shape, dtype=dtype, device=place)
            return gpu.empty(shape, dtype)
        count = torch.Size(shape).numel()
        nbytes = count * dtype.itemsize
        # One for each segment would be used up by descriptors. Small tensors never need theirs.
        if self._core is None or nbytes <= policy.one_shot_limit(self.world_size, self.topology):
            return torch.empty(shape, dtype=dtype)
        return self._allocate(nbytes, dtype)[:count].view(shape)

    def _allocate(self, nbytes: int, dtype: torch.dtype) -> Tensor:
        """Zeros that peers can map, however few."""
        assert self._core is not None
        self._core.refuse_child()
        return torch.frombuffer(_C.Allocation(self._core, nbytes), dtype=dtype)

    def ballot(self) -> Tensor:
        """A small tensor of uint8, which ``two_shot`` finds in shared memory where there is any."""
        if self._core is None:
            return torch.zeros(1, dtype=torch.uint8)
        return self._allocate(1024, torch.uint8)

    def connect(self, device: torch.device | str | int) -> bool:
        """Connects the ranks' GPUs now, instead of in the first call with a tensor on ``device``:
        before a graph is captured, say. Collective.

        Returns:
            Whether calls there run in this library's kernels.
        """
        return self._gpu_on(_cuda_device(device)) is not None

    def tune(
        self,
        device: torch.device | str | int,
        *,
        sizes: Sequence[int] | None = None,
        remember: bool = True,
        progress: Callable[[int], object] | None = None,
    ) -> tuning.Times:
        """Measures which algorithm is the fastest for which size between these ranks, or their
        GPUs, and uses that from now on: results do not depend on it, but for GPUs where
        ``multimem`` or NCCL sum. Remembers it in a file of this machine's (see
        :mod:`fastreduce.tuning`), for later communicators. Collective; takes some seconds.

        Args:
            device: ``cpu``, or the rank's GPU.
            sizes: bytes, ascending, multiples of 16. What was measured of other sizes than the
                usual ones is not remembered.
            remember: False to use it in this communicator only.
            progress: called with each size, once it has been measured.

        Returns:
            Algorithm -> bytes -> seconds, of the slowest rank; medians, the same on all ranks.

        Raises:
            ValueError: of ``sizes``.
            RuntimeError: there is one rank, or tensors on ``device`` go through the process group.
        """
        on_host = not isinstance(device, int) and torch.device(device).type == "cpu"
        place = CPU if on_host else _cuda_device(device)
        usual = tuning.HOST_SIZES if on_host else tuning.GPU_SIZES
        sizes = usual if sizes is None else tuple(sizes)
        if not sizes or any(size < 16 or size % 16 for size in sizes):
            raise ValueError(f"sizes: expected multiples of 16 bytes, got {list(sizes)}")
        if self.world_size == 1:
            raise RuntimeError("tune: expected 2 ranks or more, got 1")
        gpu = None if on_host else self._gpu_on(place)
        if (self._core if on_host else gpu) is None:
            raise RuntimeError(f"tune: tensors on {place} go through the process group")
        topology, machine = self._topology_on(place), self._machine(place)
        if gpu is None:
            buffer = self._allocate(max(sizes), torch.uint8)
            run = self._reduce_on_host
        else:
            buffer = gpu.empty((max(sizes),), torch.uint8)
            run = functools.partial(self._reduce_on_gpu, gpu)
        times = tuning.measure(self, run, buffer, topology, sizes, progress)
        limits = policy.limits_of(times)
        if gpu is None:
            self.topology = replace(self.topology, limits=limits)
            self._plans.clear()
            self._norm_plans.clear()
        else:
            gpu.topology = replace(gpu.topology, limits=limits)
        if remember and self.rank == 0 and sizes == usual:
            try:
                tuning.remember(machine, limits)
            except (OSError, RuntimeError) as error:  # no room, no right, no home
                self._say(f"tune: what was measured is not remembered: {error}")
        return times

    # -- lifetime -----------------------------------------------------------------------------

    def close(self) -> None:
        """Completes what has been submitted, tells the peers, frees all. Later calls raise."""
        self._close(drain=True)

    def _close(self, *, drain: bool) -> None:
        exchanges, self._exchanges = self._exchanges, {}
        for exchange in exchanges.values():
            exchange.close(drain=drain)
        self._group.close(drain=drain)
        gpus, self._gpus = self._gpus, {}
        for gpu in gpus.values():
            if gpu is not None:
                gpu.close(drain=drain)
        if self._core is not None:
            _end(self._core, self._notifier, drain)
            self._pending.clear()

    @property
    def error(self) -> Exception | None:
        """The first exception that went into a Future of :meth:`all_reduce_future`. From the hook,
        DDP raises it out of ``backward()`` as a RuntimeError with its text; this is itself."""
        return self._errors[0] if self._errors else None

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Peers may not come any more if this rank leaves because of an error.
        self._close(drain=kind is None)

    def __getstate__(self) -> None:
        raise TypeError(
            "a Communicator holds connections to other processes and cannot be pickled or "
            "deep-copied: of a DDP model with a hook, copy or save the module inside"
        )

    def __repr__(self) -> str:
        path = "shared memory" if self.shared_memory else "process group"
        return f"<Communicator rank {self.rank} of {self.world_size} over {path}>"

    # -- the less travelled ways --------------------------------------------------------------

    def _call(
        self,
        kind: str,
        input: Tensor,
        output: Tensor,
        smaller: Tensor,
        async_op: bool,
        *,
        op: str = "sum",
        root: int = 0,
        scale: float = 1.0,
    ) -> Work | None:
        core = self._core
        assert core is not None
        algorithm, segment = self._way_of(input)
        dtype, count = smaller.dtype, smaller.numel()
        if dtype not in enums.DTYPE:  # moved as bytes
            dtype, count = torch.uint8, smaller.nbytes
        shape = _checksum(smaller.shape, smaller.dtype)
        plan = enums.plan(kind, dtype, op, algorithm, shape)
        call = (
            plan,
            input.data_ptr(),
            output.data_ptr(),
            count,
            root,
            scale,
            weights.ORDINARY,
            segment,
            0,
            0,
            0,
        )
        if async_op:
            return self._submit(call, input, output)
        core.run(*call)
        return None

    def _way_of(self, tensor: Tensor, move: bool = False) -> tuple[str, int]:
        """The algorithm, and the segment, of a call that is no all-reduce."""
        if tensor.nbytes <= policy.one_shot_limit(self.world_size, self.topology):
            return "one_shot", NOT_SHARED
        return "two_shot", self._segment_of(tensor, move)

    def _submit(self, call: _Call, *tensors: Tensor, norms: Norms | None = None) -> _HostWork:
        """Queues a call. Its tensors live until it has ended, whatever its caller drops."""
        assert self._core is not None
        self._core.refuse_child()
        self._release()
        entry: list[_C.Work] = []
        with self._lock:
            self._pending.append((entry, tensors, norms))  # before the thread can touch them
            try:
                entry.append(self._core.submit(*call, -1))
            except BaseException:
                self._pending.pop()
                raise
        return _HostWork(entry[0], self._release)

    def _segment_of(self, tensor: Tensor, move: bool) -> int:
        unless = (lambda: self._in_flight(tensor)) if move else None
        return self._shared.segment_of(tensor, move_unless=unless)

    def _in_flight(self, tensor: Tensor) -> bool:
        """Whether a call that has not ended holds a pointer into the tensor's storage."""
        self._release()
        storage = tensor.untyped_storage()._cdata
        held = [each for _, tensors, _ in list(self._pending) for each in tensors]
        held += [promise[1] for promise in list(self._futures.values())]
        return any(each.untyped_storage()._cdata == storage for each in held)

    def _release(self) -> None:
        """Lets go of the tensors of calls that have ended."""
        with self._lock:
            while self._pending and self._pending[0][0] and self._pending[0][0][0].done():
                self._pending.popleft()

    def _plan(self, key: tuple[torch.dtype, torch.Size, str, str]) -> tuple[int, int, bool]:
        """How to all-reduce such a tensor: the plan, the elements, and whether it is two_shot."""
        dtype, shape, op, name = key
        _number("dtype", enums.DTYPE, dtype)
        _number("op", enums.OP, op)
        count = shape.numel()
        nbytes = count * dtype.itemsize
        if name == "auto":
            name = policy.choose_algorithm(nbytes, self.world_size, self.topology)
        if name in policy.GPU_ALGORITHMS and name not in _HOST_ALGORITHMS:
            raise ValueError(f"algorithm: {name} is for tensors on GPUs, got one on the CPU")
        algorithm = _number("algorithm", _HOST_ALGORITHMS, name)
        if algorithm == _ONE_SHOT and nbytes > policy.SLOT_BYTES:
            raise ValueError(f"one_shot: expected at most {policy.SLOT_BYTES} bytes, got {nbytes}")
        code = enums.plan("all_reduce", dtype, op, name, _checksum(shape))
        plan = code, count, algorithm == _TWO_SHOT
        if len(self._plans) >= _MAX_PLANS:
            self._plans.clear()
        if algorithm == _RING:
            self._refuse_if_deterministic("ring")  # asked anew in every call
        else:
            self._plans[key] = plan
        return plan

    def _refuse_if_deterministic(self, what: str, this_call: bool = False) -> None:
        if self.world_size == 1:
            return  # nothing is summed
        reason = f"deterministic: {what} does not promise an order of summation"
        if self.deterministic or this_call:
            raise RuntimeError(reason)
        if torch.are_deterministic_algorithms_enabled():
            if not torch.is_deterministic_algorithms_warn_only_enabled():
                raise RuntimeError(reason)
            self._say(reason)

    def _all_reduce_elsewhere(
        self,
        tensor: Tensor,
        op: Op,
        algorithm: str,
        async_op: bool,
        scale: float,
        weight: weights.Weight | None,
        deterministic: bool,
        norms: Norms | None,
    ) -> Work | None:
        """Errors of the arguments, and tensors or groups that do not share memory."""
        _number("dtype", enums.DTYPE, tensor.dtype)
        _number("op", enums.OP, op)
        if algorithm != "auto":
            _number("algorithm", _ALGORITHMS, algorithm)
        gpu = self._gpu(tensor)
        if gpu is not None:
            part = _check_factors(scale, weight, op, tensor)
            name = self._gpu_algorithm(
                gpu, tensor, op, algorithm, weight is not None, deterministic
            )
            if name != "process_group":
                shape = _checksum(tensor.shape)

                def reduce() -> None:
                    gpu.all_reduce(tensor, op, name, scale, shape, part)
                    if norms is not None:
                        norms.measure(tensor, self.rank, self.world_size)

                return _on_gpu(gpu, reduce, async_op, tensor)
        elif algorithm != "auto":
            raise ValueError(
                f'algorithm: expected "auto" where memory is not shared, got "{algorithm}"'
            )
        _check_factors(scale, weight, op, tensor)
        if self._core is not None and not tensor.is_cpu and not tensor.is_cuda:
            self._say(f"tensors on {tensor.device.type} go through the process group")
        if not self._group.keeps_order(tensor, op):
            self._refuse_if_deterministic("the process group", deterministic)
        if norms is not None and async_op:
            raise ValueError("norms: expected None for async_op=True through the process group")
        work = self._group.all_reduce(tensor, op, async_op, scale, weight)
        if norms is not None:
            norms.measure(tensor, 0, 1, of_all=True)
        return work

    def _gpu(self, tensor: Tensor) -> cuda.CudaTransport | None:
        """What runs calls on the tensor's GPU; None where the process group does."""
        return self._gpu_on(tensor.device) if tensor.is_cuda else None

    def _gpu_on(self, device: torch.device) -> cuda.CudaTransport | None:
        """Collective the first time that a device is seen."""
        if device not in self._gpus:
            self._gpus[device] = self._connect(device)
        return self._gpus[device]

    def _connect(self, device: torch.device) -> cuda.CudaTransport | None:
        if self.world_size == 1:
            return None
        if not cuda.problem() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "the first call with a CUDA tensor connects the ranks' GPUs, which cannot be "
                "captured: make one call before the capture"
            )
        gpu, reason = connect_gpus(
            self._group,
            self._group.group,
            self.rank,
            device,
            self.timeout,
            tuning.recall(self._machine(device)),
            self._first_epoch,
        )
        if gpu is None:
            self._say(f"CUDA tensors go through the process group, because {reason}")
        return gpu

    def _reduce_on_host(self, algorithm: str, tensor: Tensor) -> None:
        self.all_reduce(tensor, "sum", cast(Algorithm, algorithm))

    def _reduce_on_gpu(self, gpu: cuda.CudaTransport, algorithm: str, tensor: Tensor) -> None:
        """By any algorithm, the process group's too."""
        if algorithm == "process_group":
            self._group.all_reduce(tensor, "sum", False, 1.0)
        else:
            gpu.all_reduce(tensor, "sum", algorithm, 1.0, _checksum(tensor.shape))

    def _topology_on(self, device: torch.device) -> policy.Topology | policy.GpuTopology:
        """What ``auto`` chooses by there. Collective the first time for a GPU."""
        if device.type == "cpu":
            return self.topology
        gpu = self._gpu_on(device)
        return policy.GpuTopology("none") if gpu is None else gpu.topology

    def _machine(self, device: torch.device) -> str:
        """What limits measured there hold for; "" where there are no GPUs to measure."""
        if device.type == "cpu":
            return tuning.host(self.topology)
        if cuda.problem():
            return ""
        return tuning.gpus(self.world_size, torch.cuda.get_device_name(device))

    def _gpu_algorithm(
        self,
        gpu: cuda.CudaTransport,
        tensor: Tensor,
        op: str,
        algorithm: str,
        weighted: bool,
        deterministic: bool,
    ) -> str:
        ordered = (
            deterministic or self.deterministic or torch.are_deterministic_algorithms_enabled()
        )
        if algorithm != "auto":
            if algorithm in ("ring", "multimem"):
                self._refuse_if_deterministic(algorithm, deterministic)
            return algorithm
        topology = gpu.topology
        # The switch rounds a float16 sum before it is scaled, so that a mean could overflow; and it
        # knows no factors.
        if (
            weighted
            or tensor.dtype not in (torch.float32, torch.bfloat16)
            or op not in ("sum", "mean")
        ):
            topology = replace(topology, multicast=False)
        return policy.choose_algorithm(
            tensor.nbytes, self.world_size, topology, deterministic=ordered
        )

    def _all_reduce_strided(
        self,
        tensor: Tensor,
        op: Op,
        algorithm: Algorithm,
        async_op: bool,
        scale: float,
        weight: weights.Weight | None,
        deterministic: bool,
        norms: Norms | None,
    ) -> None:
        """Through a contiguous copy: the ranks' strides need not be alike."""
        if tensor.layout is not torch.strided:
            raise ValueError(f"tensor: expected layout torch.strided, got {tensor.layout}")
        if async_op:
            raise ValueError("tensor: expected a contiguous one for async_op=True")
        if any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True)):
            raise ValueError("tensor: expected one without overlapping elements (an expanded one?)")
        copy = tensor.detach().contiguous().resolve_neg()
        self.all_reduce(
            copy,
            op,
            algorithm,
            scale=scale,
            weight=weight,
            deterministic=deterministic,
            norms=norms,
        )
        tensor.detach().copy_(copy)

    def _check_overlap(self, *, whole: Tensor, part: Tensor) -> None:
        begin, end = whole.data_ptr(), whole.data_ptr() + whole.nbytes
        at = part.data_ptr()
        own = begin + self.rank * part.nbytes
        if at != own and at < end and begin < at + part.nbytes:
            raise ValueError("input and output overlap, and not as the rank's own part")

    def _say(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            logger.warning("rank %d: %s", self.rank, what)


def said_by_all(communicator: Communicator, number: float) -> list[float]:
    """Every rank's number (float64), in rank order; collective."""
    own = torch.tensor([number], dtype=torch.float64)
    every = own.repeat(communicator.world_size)
    communicator.all_gather(every, own)
    numbers: list[float] = every.tolist()
    return numbers


def _notify(
    core: _C.HostCommunicator,
    futures: dict[int, _Promise],
    errors: list[Exception],
) -> None:
    """Completes Futures as their calls end, beside the communication thread, which therefore
    never waits for the interpreter. Ends when the communicator has been closed."""
    while completed := core.next_completed():
        for number, work in completed:
            future, tensor, done, _ = futures.pop(number)
            try:
                work.wait(timedelta(0))
                if done is not None:
                    done(work.total, work.account)
            except Exception as error:
                fail(future, error, errors)
            else:
                future.set_result(tensor)


def _cuda_device(device: torch.device | str | int) -> torch.device:
    """With its index. Where there is no GPU, one all the same: connecting says what is missing."""
    place = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if place.type != "cuda":
        raise ValueError(f"device: expected a CUDA device, got {place}")
    if place.index is None:
        place = torch.device("cuda", 0 if cuda.problem() else torch.cuda.current_device())
    return place


def _on_gpu(
    gpu: cuda.CudaTransport, call: Callable[[], None], async_op: bool, *tensors: Tensor
) -> Work | None:
    """On the current stream, or beside it."""
    if not async_op:
        call()
        return None
    with gpu.aside(*tensors):
        call()
        return gpu.work()


def _end(core: _C.HostCommunicator, notifier: list[threading.Thread], drain: bool) -> None:
    """Closes a core; a second time, or in a forked child, does nothing. A signal handler within a
    call only asks for it: that call then gives up and closes."""
    if not core.close(drain):
        return
    for thread in notifier:
        if thread is not threading.current_thread() and not core.forked:
            thread.join()


def _number(what: str, table: dict[Any, Number], key: Any) -> Number:
    number = table.get(key)
    if number is None:
        allowed = ", ".join(str(k) for k in table)
        kind = TypeError if what == "dtype" else ValueError
        raise kind(f"{what}: expected one of {allowed}, got {key}")
    return number


@functools.lru_cache(maxsize=4096)
def _checksum(shape: torch.Size, dtype: torch.dtype | None = None) -> int:
    """32 bits by which ranks compare the shapes of their tensors, and dtypes of any kind."""
    return zlib.crc32(repr((tuple(shape), dtype)).encode())


def _check_factors(scale: float, weight: weights.Weight | None, op: str, tensor: Tensor) -> float:
    """What this rank announces as its weight."""
    if scale != 1.0 and not tensor.is_floating_point():
        raise ValueError(f"scale: expected 1.0 for {tensor.dtype}, got {scale}")
    if weight is None:
        return weights.ORDINARY
    if op != "mean" or not tensor.is_floating_point():
        raise ValueError(
            f"weight: expected None but for the mean of a floating type, got {weight} for the {op} "
            f"of {tensor.dtype}"
        )
    if isinstance(weight, str):
        return _number("weight", weights.WORDS, weight)
    weights.check("weight", weight)
    weights.check("scale", abs(scale))
    return float(weight)


def _check_dense(name: str, tensor: Tensor) -> None:
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name}: expected layout torch.strided, got {tensor.layout}")
    if not tensor.is_contiguous() or tensor.is_neg():
        raise ValueError(f"{name}: expected a contiguous tensor")


def _check_pair(
    whole_name: str, whole: Tensor, part_name: str, part: Tensor, world_size: int
) -> None:
    _check_dense(whole_name, whole)
    _check_dense(part_name, part)
    if whole.dtype != part.dtype or whole.device != part.device:
        raise ValueError(
            f"{whole_name} and {part_name}: expected one dtype and device, got {whole.dtype} on "
            f"{whole.device} and {part.dtype} on {part.device}"
        )
    if whole.numel() != world_size * part.numel():
        raise ValueError(
            f"{whole_name}: expected {world_size} times the {part.numel()} elements of "
            f"{part_name}, got {whole.numel()}"
        )
