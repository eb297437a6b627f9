"""Buckets in wire formats: what is sent of them, what that loses, and whether it counts."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.futures import Future

from fastreduce import _C, cuda, enums, lowrank
from fastreduce.accumulation import elements_of, is_dense
from fastreduce.communicator import Communicator
from fastreduce.exchange import CPU, Layout
from fastreduce.measure import Measurement, norm_of
from fastreduce.process_group import Done
from fastreduce.weights import Weight
from fastreduce.wire import FP32, SELECTED, Policy, Wire, key_of

# Gradients of others travel as they are.
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_NATIVE = {
    torch.float32: FP32,
    torch.float16: Wire("fp16", feedback=False),
    torch.bfloat16: Wire("bf16", feedback=False),
}


class Residual:
    """What encoding has lost of one parameter's gradients on this rank and has not made up for yet:
    of what it ``sent``, and of what it ``reduced`` for all. In units of the mean's sum over the
    ranks: the update that is missing is the mean of all ranks' ``sent`` plus the sum of all ranks'
    ``reduced``. New values are written beside the old ones, and count once :meth:`turn` is called.

    Args:
        count: elements, in the order of the parameter's memory.
        dtype: float32 or bfloat16.
        device: the gradient's.
    """

    def __init__(self, count: int, dtype: torch.dtype, device: torch.device) -> None:
        # Zeros that nobody touches take no memory, on a CPU: a rank reduces its part only.
        self._sent = [torch.zeros(count, dtype=dtype, device=device) for _ in range(2)]
        self._reduced = [torch.zeros(count, dtype=dtype, device=device) for _ in range(2)]
        self.now = 0
        self.holds = False  # something
        self.block = 0  # of what has been reduced: who reduces what depends on it

    @property
    def sent(self) -> Tensor:
        return self._sent[self.now]

    @property
    def reduced(self) -> Tensor:
        return self._reduced[self.now]

    @property
    def next(self) -> Tensor:
        """What ``sent`` will be."""
        return self._sent[1 - self.now]

    def reduce_in(self, block: int, world_size: int) -> None:
        """From now on ranks reduce in runs of ``block`` elements, or, with 0, do not reduce. What
        they kept back of other runs, they will send."""
        if self.block not in (0, block):
            self.sent.add_(self.reduced, alpha=world_size)
            for each in self._reduced:
                each.zero_()
        self.block = block

    def addresses(self) -> tuple[int, int, int, int]:
        """As csrc/wire.h's Residuals."""
        old, new = self.now, 1 - self.now
        return (
            self._sent[old].data_ptr(),
            self._sent[new].data_ptr(),
            self._reduced[old].data_ptr(),
            self._reduced[new].data_ptr(),
        )

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """It is used there, too, as long as it lives."""
        for each in (*self._sent, *self._reduced):
            each.record_stream(stream)

    def turn(self, holds: bool) -> None:
        """What is new becomes what is; what was is kept until the next step."""
        self.now = 1 - self.now
        self.holds = holds


@dataclass
class _Section:
    """A parameter in a bucket, in one phase."""

    name: str
    parameter: nn.Parameter
    offset: int
    count: int
    wire: Wire
    residual: Residual | None
    keeps: bool  # there will be a residual after this step


class _Part(Layout):
    """Parameters of a bucket that travel in one message."""

    def __init__(self, sections: list[_Section], world_size: int) -> None:
        rows = []
        for each in sections:
            number = enums.FORMAT.get(each.wire.format, 0)
            stochastic = each.wire.rounding == "stochastic"
            key = key_of(each.name)
            rows.append((each.offset, each.count, key, number, stochastic, each.wire.block))
        super().__init__(world_size, rows, sections[0].parameter.device)
        self.sections = sections
        self._addresses: dict[bytes, Tensor] = {}

    def residuals(self) -> Tensor:
        """The addresses of all residuals, as they are now: int64, 4 for every section. On a GPU
        made on the current stream, on which the residuals then are used."""
        turned = bytes(each.residual.now if each.residual else 0 for each in self.sections)
        if turned not in self._addresses:
            rows = [e.residual.addresses() if e.residual else (0, 0, 0, 0) for e in self.sections]
            if len(self._addresses) > 3:
                self._addresses.clear()
            table = torch.tensor(rows, dtype=torch.int64)
            if self.device.type == "cuda":
                table = cuda.on_device(table, self.device)
                for each in self.sections:
                    if each.residual is not None:
                        each.residual.record_stream(torch.cuda.current_stream(self.device))
            self._addresses[turned] = table
        return self._addresses[turned]

    def sent_bytes(self, rank: int) -> int:
        """What a rank sends to others in a step."""
        return sum(self.sizes) + (len(self.sizes) - 2) * self.sizes[rank]

    def rehearse(self, coding: _C.WireCoding, rank: int) -> None:
        """What a rank computes in a step, alone."""
        messages = self.memory("rehearsed", self.sizes)
        for chunk, message in enumerate(messages):
            coding.encode(chunk, message.data_ptr())
        own = messages[rank].data_ptr()
        coding.reduce([own] * len(self.sizes), own)
        for chunk, message in enumerate(messages):
            coding.decode(chunk, message.data_ptr())


class _Selected(_Part):
    """Parameters of which a few elements are sent."""

    def __init__(self, sections: list[_Section], world_size: int) -> None:
        super().__init__(sections, world_size)
        wire = sections[0].wire
        count = sum(each.count for each in sections)
        if count >= 2**32:
            raise ValueError(f"{wire.format}: expected less than 2^32 elements in a bucket")
        self.k = wire.chosen(count)
        self.checksum ^= zlib.crc32(repr((wire, self.k)).encode())
        self.message_bytes = 8 + 8 * self.k
        self._expected = 0  # by which the kernel begins to look; its choice does not depend on it

    def select(self, coding: _C.WireCoding, message: Tensor) -> None:
        """Writes this rank's."""
        wire = self.sections[0].wire
        threshold = wire.threshold if wire.format == "threshold" else 0.0
        random = wire.format == "randomk"
        at = message.data_ptr()
        self._expected = coding.select(random, self.k, threshold, self._expected, at)

    def sent_bytes(self, rank: int) -> int:
        return (len(self.sizes) - 1) * self.message_bytes

    def rehearse(self, coding: _C.WireCoding, rank: int) -> None:
        [message] = self.memory("rehearsed", [self.message_bytes])
        self.select(coding, message)
        coding.combine([message.data_ptr()] * len(self.sizes))


@dataclass
class _Bucket:
    """How a bucket's parameters are encoded, in one phase. The same on all ranks."""

    encoded: _Part | None
    selected: list[_Selected]
    factored: list[_Section]

    def parts(self) -> list[_Part]:
        """What the kernels encode."""
        return [self.encoded, *self.selected] if self.encoded else [*self.selected]

    def sections(self) -> list[_Section]:
        """All parameters."""
        return [*(each for part in self.parts() for each in part.sections), *self.factored]

    def sent_bytes(self, rank: int) -> int:
        """What a rank sends to others in a step."""
        factors = sum(lowrank.sent_bytes(each.parameter, each.wire.rank) for each in self.factored)
        return sum(part.sent_bytes(rank) for part in self.parts()) + factors


class Compression:
    """The wire formats of one model's gradients, and their residuals, by parameter name.

    Args:
        policy: which parameter travels how.
        seed: of stochastic rounding; the same on all ranks.
        residual_dtype: float32, or bfloat16.
        measurement: of its first passes.
    """

    def __init__(
        self,
        policy: Policy,
        seed: int,
        residual_dtype: torch.dtype,
        measurement: Measurement | None = None,
    ) -> None:
        if residual_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"residual_dtype: expected float32 or bfloat16, got {residual_dtype}")
        self.measurement = measurement
        self._policy = policy
        self._seed = seed & (2**64 - 1)
        self._residual_dtype = residual_dtype
        self._residuals: dict[str, Residual] = {}
        self._layouts: dict[tuple[Any, ...], _Bucket | None] = {}
        self._step = -1
        self._finite = True
        self._flags: list[cuda.Flag] = []  # what GPUs know of that
        self._ended: bool | None = None  # that a pass has, and whether it is to be discarded
        # Of a bucket's parameters: which layout they had last.
        self._latest: dict[tuple[str, ...], _Bucket] = {}
        self._starts: dict[str, Tensor] = {}  # of low-rank factors, the same on all ranks
        self._next_starts: dict[str, Tensor] = {}
        self._entered: list[_Section] = []  # of the pass under way
        self._turned: list[tuple[Residual, bool]] = []  # of the last one, and what they held before
        # The sum of the ranks' weights in the pass under way, as the two ways find it.
        self._totals: list[Any] = []
        self._chosen_totals: list[float] = []
        self._lock = threading.Lock()

    def connect(self, communicator: Communicator, device: torch.device = CPU) -> None:
        """Over which all is reduced, and where gradients lie. Collective between hosts and GPUs."""
        self._communicator = communicator
        elsewhere = device.type == "cuda" or not communicator.shared_memory
        if elsewhere and communicator.world_size > 1:
            communicator.exchange(device)

    # -- a pass -------------------------------------------------------------------------------

    def begin(self) -> None:
        """A synchronised pass begins."""
        self._conclude()
        self._flags = []
        self._step += 1
        self._finite = True
        self._entered = []
        self._turned = []
        self._next_starts = {}
        self._totals, self._chosen_totals = [], []

    def layout(
        self, parameters: Sequence[tuple[str, nn.Parameter]], dtype: torch.dtype
    ) -> _Bucket | None:
        """How a bucket with these parameters is encoded in this pass; None if it travels as it is.
        The same on all ranks: it depends on names, shapes, the step, and what steps before did."""
        if dtype not in _DTYPES:
            return None
        phase = self._policy.phase(self._step)
        names = tuple(name for name, _ in parameters)
        held = bytes(name in self._residuals and self._residuals[name].holds for name in names)
        key = names, dtype, phase, held
        if key not in self._layouts:
            self._layouts[key] = self._lay_out(parameters, dtype)
        bucket = self._layouts[key]
        if bucket is not None and self._latest.get(names) is not bucket:
            self._prepare(bucket)
            self._latest[names] = bucket
        return bucket

    def _lay_out(
        self, parameters: Sequence[tuple[str, nn.Parameter]], dtype: torch.dtype
    ) -> _Bucket | None:
        sections = []
        nbytes: dict[Wire, int] = {}
        native = _NATIVE[dtype]
        offset = 0
        for name, parameter in parameters:
            wire = self._policy.of(name, parameter.shape, self._step)
            smaller = wire.format != "lowrank" or lowrank.pays(parameter, wire.rank)
            if self._communicator.world_size == 1 or not wire.loses(dtype) or not smaller:
                wire = native
            count = elements_of(parameter)
            nbytes[wire] = nbytes.get(wire, 0) + count * dtype.itemsize
            sections.append(_Section(name, parameter, offset, count, wire, None, False))
            offset += count
        for each in sections:
            if self._policy.stays_uncompressed(nbytes[each.wire]):
                each.wire = native
            each.keeps = each.wire is not native and each.wire.feedback
            found = self._residuals.get(each.name)
            if found is not None and found.holds and not each.keeps:
                each.wire = FP32  # what is left is sent, and nothing is lost
            elif each.keeps and found is None:
                found = Residual(each.count, self._residual_dtype, each.parameter.device)
                self._residuals[each.name] = found
            elif not each.keeps:
                found = None
            each.residual = found
        if all(each.wire is native and each.residual is None for each in sections):
            return None
        world_size = self._communicator.world_size
        by_wire: dict[Wire, list[_Section]] = {}
        rest, factored = [], []
        for each in sections:
            if each.wire.format in SELECTED:
                by_wire.setdefault(each.wire, []).append(each)
            elif each.wire.format == "lowrank":
                factored.append(each)
            else:
                rest.append(each)
        if by_wire and self._residual_dtype != torch.float32:
            raise ValueError("residual_dtype: topk, randomk and threshold need float32")
        selected = [_Selected(each, world_size) for each in by_wire.values()]
        return _Bucket(_Part(rest, world_size) if rest else None, selected, factored)

    def _prepare(self, bucket: _Bucket) -> None:
        """What was kept back by ranks that reduce, and will not reduce the same any more, they
        send."""
        for section in bucket.sections():
            if section.residual is not None:
                block = section.wire.block if section.wire.format in enums.FORMAT else 0
                section.residual.reduce_in(block, self._communicator.world_size)

    def all_reduce(
        self,
        bucket: _Bucket,
        buffer: Tensor,
        *,
        absent: set[str],
        scale: float,
        weight: Weight | None,
        here: bool,
        done: Done | None,
    ) -> Future[Tensor]:
        """``buffer`` becomes the mean over the ranks, as far as the formats can tell.

        Args:
            bucket: :meth:`layout`'s, of this bucket in this pass.
            absent: parameters that this rank has not used: of them it sends nothing, not even what
                it had kept back, for DDP drops what nobody has used.
            scale, weight, done: as for :meth:`Communicator.all_reduce`.
            here: wait for the end.
        """
        chosen = bucket.selected or bucket.factored
        if buffer.is_cuda and (chosen or self.measurement is not None):
            raise RuntimeError(
                "wire: topk, randomk, threshold, lowrank and measure need gradients on the CPU, "
                f"got {buffer.device}"
            )
        average = partial(
            self._average, bucket, buffer, absent=absent, scale=scale, weight=weight, done=done
        )
        if self.measurement is None or not self.measurement.passes:
            return average(here=here)
        self._measure(self.measurement, bucket, buffer, absent, scale, weight, average)
        future: Future[Tensor] = Future()
        future.set_result(buffer)
        return future

    def _measure(
        self,
        measurement: Measurement,
        bucket: _Bucket,
        buffer: Tensor,
        absent: set[str],
        scale: float,
        weight: Weight | None,
        average: Callable[..., Future[Tensor]],
    ) -> None:
        sections, rank = bucket.sections(), self._communicator.rank

        def encode(copy: Tensor) -> None:
            for part in bucket.parts():
                part.rehearse(self._coding(part, copy, 1.0, absent), rank)

        measurement.compare(
            tuple(each.name for each in sections),
            self._communicator,
            buffer,
            scale=scale,
            weight=weight,
            wire_bytes=bucket.sent_bytes(rank),
            encode=encode,
            average=lambda: average(here=False).wait(),
            kept=lambda: norm_of([each.residual.next for each in sections if each.residual]),
        )

    def _average(
        self,
        bucket: _Bucket,
        buffer: Tensor,
        *,
        absent: set[str],
        scale: float,
        weight: Weight | None,
        here: bool,
        done: Done | None,
    ) -> Future[Tensor]:
        ends: list[Future[Tensor]] = []
        ranks = self._communicator.world_size
        total = float(ranks)
        if weight is not None and (bucket.selected or bucket.factored):
            if not self._chosen_totals:
                self._chosen_totals.append(self._communicator.total(weight))
            total = self._chosen_totals[0]
        factor = scale * ranks / total if total else 0.0
        for each in bucket.factored:
            self._factor(each, buffer, factor, absent)
        for part in bucket.selected:
            used = self._coding(part, buffer, factor, absent)
            ends.append(
                self._communicator.all_gather_encoded(
                    buffer,
                    part,
                    part.message_bytes,
                    partial(part.select, used),
                    partial(self._combine, part, used),
                    here=here,
                )
            )
        if bucket.encoded is not None:
            encoded = bucket.encoded
            ends.append(
                self._communicator.all_reduce_encoded(
                    buffer,
                    encoded,
                    lambda factor: self._coding(encoded, buffer, factor, absent),
                    partial(self._settle, encoded),
                    scale=scale,
                    weight=weight,
                    totals=self._totals,
                    here=here,
                    done=done,
                )
            )
        if len(ends) == 1 and bucket.encoded is not None:
            return ends[0]

        def whole(futures: Future[list[Future[Tensor]]]) -> Tensor:
            for each in futures.value():
                each.value()
            if done is not None and bucket.encoded is None:
                done(total, None)
            return buffer

        return torch.futures.collect_all(ends).then(whole)

    def _coding(self, part: _Part, buffer: Tensor, factor: float | Tensor, absent: set[str]) -> Any:
        """For the kernels of the buffer's device."""
        flags = None
        if absent:
            flags = torch.tensor([each.name in absent for each in part.sections], dtype=torch.uint8)
        if buffer.is_cuda:
            return cuda.WireCoding(
                part.spans,
                buffer,
                self._communicator.rank,
                factor,
                part.residuals(),
                self._residual_dtype,
                None if flags is None else cuda.on_device(flags, buffer.device),
                self._seed,
                self._step & 0xFFFFFFFF,
            )
        return _C.WireCoding(
            part.spans,
            buffer.data_ptr(),
            enums.DTYPE[buffer.dtype],
            self._communicator.rank,
            float(factor),
            part.residuals().data_ptr(),
            enums.DTYPE[self._residual_dtype],
            0 if flags is None else flags.data_ptr(),
            self._seed,
            self._step & 0xFFFFFFFF,
        )

    def _combine(self, part: _Selected, coding: _C.WireCoding, messages: list[Tensor]) -> None:
        coding.combine([each.data_ptr() for each in messages])
        self._settle(part, coding)

    def _settle(self, part: _Part, coding: _C.WireCoding | cuda.WireCoding) -> None:
        with self._lock:
            if isinstance(coding, _C.WireCoding):
                self._finite = self._finite and coding.finite
            elif coding.finite is not None:
                self._flags.append(coding.finite)
            self._entered += part.sections

    def _factor(self, section: _Section, buffer: Tensor, factor: float, absent: set[str]) -> None:
        """A matrix, at once: how its factors are computed is no kernel of ours."""
        residual = section.residual
        flat = buffer[section.offset : section.offset + section.count]
        matrix = _shaped(flat, section.parameter).float()
        matrix = torch.zeros_like(matrix) if factor == 0 else matrix * factor
        if residual is not None:
            matrix += _shaped(residual.sent, section.parameter).float()
        if section.name in absent:
            matrix.zero_()
        mean, start = lowrank.all_reduce(
            self._communicator,
            matrix,
            section.wire.rank,
            self._starts.get(section.name),
            section.name,
        )
        _shaped(flat, section.parameter).copy_(mean)
        if residual is not None:
            new = matrix - _shaped(flat, section.parameter).float()
            if section.name in absent:
                new += _shaped(residual.sent, section.parameter)
            _shaped(residual.next, section.parameter).copy_(new)
        with self._lock:
            self._finite = self._finite and bool(flat.isfinite().all())
            self._entered.append(section)
            if start is not None:
                self._next_starts[section.name] = start

    def watch(self, gradient: Tensor) -> None:
        """Of a bucket that has been averaged uncompressed: whether it is finite counts, too."""
        if self._residuals:
            values = gradient._values() if gradient.is_sparse else gradient
            finite = values.isfinite().all()
            with self._lock:
                if values.is_cuda:
                    self._flags.append(cuda.Flag(finite))
                else:
                    self._finite = self._finite and bool(finite)

    def end(self, *, discard: bool = False) -> None:
        """All buckets of a pass have been averaged: their residuals count, if all are finite and
        the gradients are not discarded."""
        self._ended = discard
        if not self._flags:
            self._conclude()
        if self.measurement is not None:
            self.measurement.end_pass()

    def _conclude(self) -> None:
        """Whether the last pass counts. A GPU has told the host behind its last kernels, but that
        is waited for only before the residuals are used again: by then the optimizer's step and
        the next forward pass have been launched, and the GPU does not run dry."""
        if self._ended is None:
            return
        discard, self._ended = self._ended, None
        if all([self._finite, *map(bool, self._flags)]) and not discard:
            for each in self._entered:
                if each.residual is None:
                    continue
                self._turned.append((each.residual, each.residual.holds))
                each.residual.turn(each.keeps)
            self._starts.update(self._next_starts)
        self._entered = []

    def discard(self) -> None:
        """The last pass's gradients are not used: everything is as it was before."""
        self._conclude()
        for residual, held in self._turned:
            residual.turn(held)
        self._turned = []

    def rescale(self, factor: float) -> None:
        """Gradients will be so many times larger from now on."""
        self._conclude()
        self._turned = []
        for residual in self._residuals.values():
            residual.sent.mul_(factor)
            residual.reduced.mul_(factor)

    # -- saving -------------------------------------------------------------------------------

    def state_dict(self, parameters: Mapping[str, nn.Parameter], *, merge: bool) -> dict[str, Any]:
        """This rank's residuals, by name and in the shapes of the parameters (complex ones with a
        last dimension of 2); with ``merge``, collectively, one that all ranks of any number can
        load."""
        self._conclude()
        saved = {}
        for name in sorted(self._residuals):
            residual = self._residuals[name]
            own = [residual.sent.clone(), residual.reduced.clone()]
            if merge:
                own = [each.float() for each in own]
                self._communicator.all_reduce(own[0], "mean")
                self._communicator.all_reduce(own[1], "sum")
                own = [own[0] + own[1], torch.zeros_like(own[1])]
            shaped = [_shaped(each, parameters[name]).contiguous() for each in own]
            saved[name] = {"sent": shaped[0], "reduced": shaped[1]}
        rank = None if merge else self._communicator.rank
        return {
            "blocks": {name: 0 if merge else self._residuals[name].block for name in saved},
            "starts": {name: each.clone() for name, each in self._starts.items()},
            "step": self._step,
            "rank": rank,
            "world_size": self._communicator.world_size,
            "residuals": saved,
        }

    def load_state_dict(
        self, states: Sequence[Mapping[str, Any]], parameters: Mapping[str, nn.Parameter]
    ) -> None:
        """Takes over what :meth:`state_dict` gave: this rank's own, a merged one, or those of all
        ranks of a group of another size, whose residuals are then shared out."""
        first = states[0]
        here = self._communicator
        ranks = [(each["rank"], each["world_size"]) for each in states]
        own = len(states) == 1 and ranks[0] in [(here.rank, here.world_size), (None, ranks[0][1])]
        if not own and ranks != [(rank, len(states)) for rank in range(ranks[0][1])]:
            raise ValueError(
                f"compression: expected the state of rank {here.rank} of {here.world_size}, those "
                "of all ranks of a group in order, or one saved with merge=True, got "
                + ", ".join(f"rank {rank} of {world_size}" for rank, world_size in ranks)
            )
        loaded: dict[str, Residual] = {}
        for name, saved in first["residuals"].items():
            if tuple(saved["sent"].shape) != _shape_of(parameters[name]):
                raise ValueError(
                    f"compression: {name}: expected {_shape_of(parameters[name])}, got "
                    f"{tuple(saved['sent'].shape)}"
                )
            residual = loaded[name] = Residual(
                elements_of(parameters[name]), self._residual_dtype, parameters[name].device
            )
            sent, reduced = saved["sent"], saved["reduced"]
            if not own:
                all_sent = [each["residuals"][name]["sent"].double() for each in states]
                all_reduced = [each["residuals"][name]["reduced"].double() for each in states]
                sent = torch.stack(all_sent).mean(0) + torch.stack(all_reduced).sum(0)
                reduced = torch.zeros_like(sent)
            _shaped(residual.sent, parameters[name]).copy_(sent)
            _shaped(residual.reduced, parameters[name]).copy_(reduced)
            residual.holds = True
            residual.block = first["blocks"][name] if own else 0
        self._residuals = loaded
        self._layouts.clear()
        self._latest.clear()
        self._starts = {name: each.clone() for name, each in first["starts"].items()}
        self._step = first["step"]
        self._entered, self._turned = [], []
        self._ended = None


def _shape_of(parameter: nn.Parameter) -> tuple[int, ...]:
    return (*parameter.shape, 2) if parameter.is_complex() else tuple(parameter.shape)


def _shaped(flat: Tensor, parameter: nn.Parameter) -> Tensor:
    """A view of what lies in the order of the parameter's memory."""
    if not is_dense(parameter):
        return flat.view(_shape_of(parameter))
    if parameter.is_complex():
        strides = (*(2 * stride for stride in parameter.stride()), 1)
        return flat.as_strided(_shape_of(parameter), strides)
    return flat.as_strided(parameter.shape, parameter.stride())
