"""A model's gradients in wire formats, step by step: what is sent, and whether it counts."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.futures import Future

from fastreduce import _C, cuda, enums, lowrank
from fastreduce.accumulation import elements_of, shape_of, shaped
from fastreduce.communicator import Communicator, said_by_all
from fastreduce.encoding import Bucket, Part, Section, Selected
from fastreduce.exchange import CPU
from fastreduce.measure import Measurement, norm_of
from fastreduce.process_group import Done
from fastreduce.residual import Residual
from fastreduce.weights import Weight
from fastreduce.wire import FP32, NATIVE, SELECTED, Policy, Wire, key_of, part_of

# Gradients of others travel as they are.
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Step:
    """A synchronised pass, as far as it has come.

    Args:
        number: of the pass, from 0 on.
        weighted: its ranks give weights.
    """

    def __init__(self, number: int, weighted: bool) -> None:
        self.number = number
        self.weighted = weighted
        self.finite = True
        self.flags: list[cuda.Flag] = []  # what GPUs know of that
        self.entered: list[Section] = []  # whose new residuals have been written
        self.undo: dict[Residual, tuple[Any, ...]] = {}  # what they were before
        self.drained: dict[str, Residual] = {}  # of which all has been sent, but by absent ranks
        self.absent: set[str] = set()  # parameters that this rank has not used
        self.starts: dict[str, Tensor] = {}  # new ones, of low-rank factors
        self.starts_before: dict[str, Tensor] | None = None
        # The sum of the ranks' weights, as the calls between hosts find it, and as others do.
        self.totals: list[Any] = []
        self.total: float | None = None
        self.ended: bool | None = None  # and whether it is to be discarded
        self.concluded = False


class Compression:
    """The wire formats of one model's gradients, and their residuals, by parameter name.

    Args:
        policy: which parameter travels how.
        seed: of stochastic rounding; the same on all ranks.
        residual_dtype: float32, or bfloat16.
        measurement: of its first passes.
        servers: the ranks that reduce, and of how many elements their parts of a parameter consist;
            the mean then stays with the rank that has reduced it, and all are to be told by
            :meth:`end` whether it is finite. None: all reduce, and all get everything.
    """

    def __init__(
        self,
        policy: Policy,
        seed: int,
        residual_dtype: torch.dtype,
        measurement: Measurement | None = None,
        servers: tuple[Sequence[int], int] | None = None,
    ) -> None:
        if residual_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"residual_dtype: expected float32 or bfloat16, got {residual_dtype}")
        self.measurement = measurement
        self._policy = policy
        self._seed = seed & (2**64 - 1)
        self._residual_dtype = residual_dtype
        self._servers = servers
        self._residuals: dict[str, Residual] = {}
        self._layouts: dict[tuple[Any, ...], Bucket | None] = {}
        self._starts: dict[str, Tensor] = {}  # of low-rank factors, the same on all ranks
        self._last: Step
        self.clear(0)
        self._lock = threading.Lock()

    def connect(
        self,
        communicator: Communicator,
        shapes: Mapping[str, torch.Size],
        device: torch.device = CPU,
    ) -> None:
        """Over which all is reduced, the parameters, and where gradients lie. Collective between
        hosts and GPUs."""
        wires = self._policy.wires(shapes)
        selects = any(wire.format in SELECTED for wire in wires)
        if self._servers is not None:
            for wire in wires:
                if wire.format in (*SELECTED, "lowrank") or self._servers[1] % wire.block:
                    raise ValueError(
                        "wire: expected a format that encodes every element, in blocks that divide "
                        f"{self._servers[1]}, got {wire}"
                    )
        if selects and self._residual_dtype != torch.float32:
            raise ValueError("residual_dtype: topk, randomk and threshold need float32")
        self._communicator = communicator
        self._device = device
        self._shapes = shapes
        shared = communicator.world_size == 1 or communicator.shares_memory(device)
        # GPUs compare layouts as they meet them: here they would be waited for in every pass.
        self._compares = not shared and device.type == "cpu"
        chosen_on_gpus = selects and device.type == "cuda" and communicator.world_size > 1
        if not shared or chosen_on_gpus:
            communicator.exchange(device)

    # -- a pass -------------------------------------------------------------------------------

    def begin(self, *, weighted: bool) -> Step:
        """A synchronised pass begins, with weights or without. Collective between hosts: whether
        all ranks encode alike."""
        self._conclude()
        if self._last.ended is None:  # it failed
            self._take_back(self._last)
        self._drain(self._last)
        step = self._last = Step(self._last.number + 1, weighted)
        if self._compares:
            self._agree(step)
        for bucket in self._layouts.values():
            if bucket is not None and bucket.step + 1 < step.number:  # DDP has rebuilt its buckets
                bucket.release()
        return step

    def _drain(self, step: Step) -> None:
        """Whoever has not used a parameter has sent nothing of what it keeps back, and the others
        cannot see that. Collective, where something was sent for the last time."""
        names = sorted(step.drained)
        if not names:
            return
        kept = torch.tensor([name in step.absent for name in names], dtype=torch.uint8)
        kept = cuda.on_device(kept, self._device)
        self._communicator.all_reduce(kept, "max")
        for name, by_some in zip(names, kept.tolist(), strict=True):
            if not by_some:
                step.drained[name].drain()

    def _agree(self, step: Step) -> None:
        """Ranks of which one encodes and another does not would wait for each other."""
        held = sorted(name for name, each in self._residuals.items() if each.holds)
        own = (
            step.number,
            step.weighted,
            self._seed,
            self._policy.fingerprint(self._shapes, step.number),
            held,
        )
        every = said_by_all(self._communicator, zlib.crc32(repr(own).encode()))
        for rank, found in enumerate(every):
            if found != every[0]:
                raise RuntimeError(
                    f"rank {rank} encodes step {step.number} otherwise than rank 0: do all have "
                    "the same wire, schedule, seed and loaded state, and all give weights or none?"
                )

    def layout(
        self, step: Step, parameters: Sequence[tuple[str, nn.Parameter]], dtype: torch.dtype
    ) -> Bucket | None:
        """How a bucket with these parameters is encoded in this step; None if it travels as it is.
        The same on all ranks: it depends on names, shapes, the step, and what steps before did."""
        if dtype not in _DTYPES:
            return None
        phase = self._policy.phase(step.number)
        names = tuple(name for name, _ in parameters)
        held = bytes(name in self._residuals and self._residuals[name].holds for name in names)
        key = names, dtype, phase, held, step.weighted
        if key not in self._layouts:
            self._layouts[key] = self._lay_out(step, parameters, dtype)
        bucket = self._layouts[key]
        if bucket is not None:
            bucket.step = step.number
            for section in bucket.sections():
                residual = section.residual
                if residual is not None and residual.place != section.place:
                    step.undo.setdefault(residual, residual.saved())
                    residual.move(section.place, self._communicator.world_size)
        return bucket

    def _lay_out(
        self, step: Step, parameters: Sequence[tuple[str, nn.Parameter]], dtype: torch.dtype
    ) -> Bucket | None:
        ranks, rank = self._communicator.world_size, self._communicator.rank
        sections = []
        nbytes: dict[Wire, int] = {}
        offset = 0
        for name, parameter in parameters:
            wire = self._policy.of(name, parameter.shape, step.number)
            count = elements_of(parameter)
            each = Section(name, parameter, offset, count, wire)
            if wire.format == "lowrank" and not parameter.is_complex():
                each.factors = lowrank.factors(parameter.shape, wire.rank)
            larger = wire.format == "lowrank" and each.factors is None
            each.plain = ranks == 1 or larger or not wire.loses(dtype)
            if not each.plain:
                nbytes[wire] = nbytes.get(wire, 0) + count * dtype.itemsize
            sections.append(each)
            offset += count
        # In its own format a 16-bit gradient loses nothing, unless it is multiplied before.
        native = FP32 if step.weighted else NATIVE[dtype]
        for each in sections:
            each.plain = each.plain or self._policy.stays_uncompressed(nbytes[each.wire])
            each.keeps = not each.plain and each.wire.feedback
            found = self._residuals.get(each.name)
            if each.keeps and found is None:
                found = Residual(each.count, self._residual_dtype, each.parameter.device)
                self._residuals[each.name] = found
            if each.keeps or (found is not None and found.holds):
                each.residual = found
            if each.residual is not None and not each.keeps:
                each.wire, each.plain = FP32, False  # what is left is sent, and nothing is lost
            elif each.plain:
                each.wire = native
            kept = each.residual is not None and each.wire.format in enums.FORMAT
            if kept and self._servers is None:
                each.place = part_of(each.count, each.wire.block, key_of(each.name), ranks, rank)
        if all(each.plain for each in sections):
            return None
        by_wire: dict[Wire, list[Section]] = {}
        rest, factored = [], []
        for each in sections:
            if each.wire.format in SELECTED:
                by_wire.setdefault(each.wire, []).append(each)
            elif each.wire.format == "lowrank":
                factored.append(each)
            else:
                rest.append(each)
        selected = [Selected(each, ranks) for each in by_wire.values()]
        encoded = Part(rest, ranks, self._servers or ((), 0)) if rest else None
        return Bucket(ranks, encoded, selected, factored)

    def all_reduce(
        self,
        step: Step,
        bucket: Bucket,
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
        step.absent |= absent
        average = partial(
            self._average,
            step,
            bucket,
            buffer,
            absent=absent,
            scale=scale,
            weight=weight,
            done=done,
        )
        if self.measurement is None or not self.measurement.passes:
            return average(here=here)
        self._measure(self.measurement, step, bucket, buffer, absent, scale, weight, average)
        future: Future[Tensor] = Future()
        future.set_result(buffer)
        return future

    def _measure(
        self,
        measurement: Measurement,
        step: Step,
        bucket: Bucket,
        buffer: Tensor,
        absent: set[str],
        scale: float,
        weight: Weight | None,
        average: Callable[..., Future[Tensor]],
    ) -> None:
        sections, rank = bucket.sections(), self._communicator.rank

        def encode(copy: Tensor) -> None:
            for part in bucket.parts():
                part.rehearse(self._coding(step, part, copy, 1.0, absent), rank)

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
        step: Step,
        bucket: Bucket,
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
            if step.total is None:
                step.total = self._communicator.total(weight, buffer.device)
            total = step.total
        factor = scale * ranks / total if total else 0.0
        for each in bucket.factored:
            self._factor(step, each, buffer, factor, absent)
        for part in bucket.selected:
            coding = partial(self._coding, step, part, buffer, factor, absent)
            ends.append(self._select(step, part, buffer, coding, here=here))
        if bucket.encoded is not None:
            encoded = bucket.encoded
            ends.append(
                self._communicator.all_reduce_encoded(
                    buffer,
                    encoded,
                    lambda factor: self._coding(step, encoded, buffer, factor, absent),
                    partial(self._settle, step, encoded),
                    scale=scale,
                    weight=weight,
                    totals=step.totals,
                    here=here,
                    lands=self._servers is not None,
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

    def _coding(
        self, step: Step, part: Part, buffer: Tensor, factor: float | Tensor, absent: set[str]
    ) -> Any:
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
                step.number & 0xFFFFFFFF,
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
            step.number & 0xFFFFFFFF,
            self._servers is not None,
        )

    def _select(
        self, step: Step, part: Selected, buffer: Tensor, coding: Callable[[], Any], *, here: bool
    ) -> Future[Tensor]:
        used: list[Any] = []  # made where, and on the stream on which, it is used

        def prepare(message: Tensor) -> None:
            used.append(coding())
            part.select(used[0], message)

        def finish(messages: list[Tensor]) -> None:
            part.combine(used[0], messages)
            self._settle(step, part, used[0])

        return self._communicator.all_gather_encoded(
            buffer, part, part.message_bytes, prepare, finish, here=here
        )

    def _settle(self, step: Step, part: Part, coding: _C.WireCoding | cuda.WireCoding) -> None:
        with self._lock:
            if isinstance(coding, _C.WireCoding):
                step.finite = step.finite and coding.finite
            elif coding.finite is not None:
                step.flags.append(coding.finite)
            step.entered += part.sections

    def _factor(
        self, step: Step, section: Section, buffer: Tensor, factor: float, absent: set[str]
    ) -> None:
        """A matrix, at once: how its factors are computed is no kernel of ours."""
        residual = section.residual
        flat = buffer[section.offset : section.offset + section.count]
        matrix = shaped(flat, section.parameter).float()
        matrix = torch.zeros_like(matrix) if factor == 0 else matrix * factor
        if residual is not None:
            matrix += shaped(residual.sent, section.parameter).float()
        if section.name in absent:
            matrix.zero_()
        mean, start = lowrank.all_reduce(
            self._communicator,
            matrix,
            section.wire.rank,
            self._starts.get(section.name),
            section.name,
        )
        shaped(flat, section.parameter).copy_(mean)
        if residual is not None:
            new = matrix - shaped(flat, section.parameter).float()
            if section.name in absent:
                new += shaped(residual.sent, section.parameter)
            shaped(residual.next, section.parameter).copy_(new)
        self._see(step, flat)
        with self._lock:
            step.entered.append(section)
            step.starts[section.name] = start

    def watch(self, step: Step, gradient: Tensor) -> None:
        """Of a bucket that has been averaged uncompressed: whether it is finite counts, too."""
        if not self._residuals and not self._policy.may_lose(step.number):
            return
        self._see(step, gradient._values() if gradient.is_sparse else gradient)

    def _see(self, step: Step, values: Tensor) -> None:
        """Whether they are finite."""
        finite = values.isfinite().all()
        with self._lock:
            if values.is_cuda:
                step.flags.append(cuda.Flag(finite))
            else:
                step.finite = step.finite and bool(finite)

    def end(self, step: Step, *, discard: bool = False) -> None:
        """All buckets of a pass have been averaged: their residuals count, if all are finite and
        the gradients are not discarded."""
        step.ended = discard
        if not step.flags:
            self._conclude()
        if self.measurement is not None:
            self.measurement.end_pass()

    def _conclude(self) -> None:
        """Whether the last pass counts. A GPU has told the host behind its last kernels, but that
        is waited for only before the residuals are used again: by then the optimizer's step and
        the next forward pass have been launched, and the GPU does not run dry."""
        step = self._last
        if step.ended is None or step.concluded:
            return
        step.concluded = True
        if not all([step.finite, *map(bool, step.flags)]) or step.ended:
            self._take_back(step)
            return
        for each in step.entered:
            if each.residual is not None:
                step.undo.setdefault(each.residual, each.residual.saved())
                each.residual.turn()
                if not each.keeps:
                    step.drained[each.name] = each.residual
        step.starts_before = self._starts
        self._starts = self._starts | step.starts

    def _take_back(self, step: Step) -> None:
        for residual, saved in step.undo.items():
            residual.restore(saved)
        step.undo, step.drained = {}, {}
        if step.starts_before is not None:
            self._starts = step.starts_before

    def discard(self) -> None:
        """The last pass's gradients are not used: everything is as it was before."""
        self._conclude()
        self._take_back(self._last)

    def rescale(self, factor: float) -> None:
        """Gradients will be so many times larger from now on."""
        self._conclude()
        tensors = [each for residual in self._residuals.values() for each in residual.tensors()]
        tensors += [each for saved in self._last.undo.values() for each in saved[0]]
        for each in {id(each): each for each in tensors}.values():
            each.mul_(factor)

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
            sent, reduced = (shaped(each, parameters[name]).contiguous() for each in own)
            saved[name] = {"sent": sent, "reduced": reduced}
        rank = None if merge else self._communicator.rank
        return {
            "places": {name: self._residuals[name].place for name in saved} if not merge else {},
            "starts": {name: each.clone() for name, each in self._starts.items()},
            "step": self._last.number,
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
        for each in states:
            if (
                each["step"] != first["step"]
                or each["residuals"].keys() != first["residuals"].keys()
            ):
                raise ValueError("compression: expected states of one step, got others")
        loaded: dict[str, Residual] = {}
        for name in first["residuals"]:
            if name not in parameters:
                raise ValueError(f"compression: {name} is unknown to this model")
            shape = shape_of(parameters[name])
            kinds = [
                [each["residuals"][name][kind] for each in states] for kind in ("sent", "reduced")
            ]
            for each in (*kinds[0], *kinds[1]):
                if tuple(each.shape) != shape:
                    raise ValueError(
                        f"compression: {name}: expected {shape}, got {tuple(each.shape)}"
                    )
            sent, reduced = kinds[0][0], kinds[1][0]
            place = first["places"].get(name, (0, 0, 0))
            if not own:
                sent = torch.stack([each.double() for each in kinds[0]]).mean(0)
                sent = sent + torch.stack([each.double() for each in kinds[1]]).sum(0)
                place = (0, 0, 0)
            residual = loaded[name] = Residual(
                elements_of(parameters[name]), self._residual_dtype, parameters[name].device
            )
            flat = torch.empty(residual.sent.numel(), dtype=torch.float32)
            kept = [flat, torch.empty_like(flat)]
            for to, each in zip(kept, (sent, reduced), strict=True):
                shaped(to, parameters[name]).copy_(each)
            residual.set(kept[0], kept[1], tuple(place))
        self.clear(first["step"] + 1)
        self._residuals = loaded
        self._starts = {
            name: each.to(parameters[name].device, copy=True)
            for name, each in first["starts"].items()
        }

    def clear(self, passes: int) -> None:
        """As at the beginning of a run, but for so many passes."""
        self._residuals = {}
        self._layouts.clear()
        self._starts = {}
        self._last = Step(passes - 1, weighted=False)
        self._last.ended, self._last.concluded = False, True
