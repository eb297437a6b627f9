"""BucketPlan: many tensors in one flat buffer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

from fastreduce import _C, cuda, enums, errors


class BucketPlan:
    """Where each of a list of tensors lies in a flat buffer, one after the other.

    Args:
        tensors: the tensors, or others of the same shapes.

    Attributes:
        shapes: the tensors' shapes.
        offsets: element of the flat buffer at which each begins.
        numel: elements of the flat buffer.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.shapes = [tensor.shape for tensor in tensors]
        self._counts = [shape.numel() for shape in self.shapes]
        ends = list(accumulate(self._counts, initial=0))
        self.offsets = ends[:-1]
        self.numel = ends[-1]

    def pack(self, tensors: Sequence[Tensor], flat: Tensor, scale: float = 1.0) -> None:
        """``flat`` becomes the tensors, each times ``scale``, cast to the dtype of ``flat``.

        One pass. The product is taken in float64 if either dtype is, else in float32, and
        rounded once. Tensors: contiguous, one dtype, all on the CPU or all on one GPU; there it is
        one launch on the current stream (a launch for every 1,000 tensors). Integer dtypes:
        ``flat`` has the same one, and ``scale`` is 1.
        """
        arguments = self._arguments(tensors, flat, scale)
        if flat.is_cuda:
            cuda.convert(list(tensors), self._parts(flat), scale, flat.device)
        else:
            _C.pack(*arguments)

    def unpack(self, flat: Tensor, tensors: Sequence[Tensor], scale: float = 1.0) -> None:
        """The tensors become their parts of ``flat``; scale and cast as in :meth:`pack`."""
        arguments = self._arguments(tensors, flat, scale)
        if flat.is_cuda:
            cuda.convert(self._parts(flat), list(tensors), scale, flat.device)
        else:
            _C.unpack(*arguments)

    def _parts(self, flat: Tensor) -> list[Tensor]:
        return list(flat.detach().view(-1).split(self._counts))

    def _arguments(
        self, tensors: Sequence[Tensor], flat: Tensor, scale: float
    ) -> tuple[list[int], list[int], list[int], int, int, int, float]:
        if [tensor.shape for tensor in tensors] != self.shapes:
            raise ValueError(
                f"tensors: expected shapes {[tuple(s) for s in self.shapes]}, "
                f"got {[tuple(t.shape) for t in tensors]}"
            )
        dtypes = {tensor.dtype for tensor in tensors} or {flat.dtype}
        if len(dtypes) > 1:
            raise ValueError(f"tensors: expected one dtype, got {sorted(map(str, dtypes))}")
        dtype = dtypes.pop()
        for name, tensor in [("flat", flat), *(("tensors", t) for t in tensors)]:
            if tensor.dtype not in enums.DTYPE:
                raise TypeError(
                    f"{name}: expected one of {', '.join(errors.DTYPES)}, got {tensor.dtype}"
                )
            if not tensor.is_contiguous() or tensor.is_neg():
                raise ValueError(f"{name}: expected contiguous tensors")
            if tensor.device != flat.device or not (tensor.is_cpu or tensor.is_cuda):
                raise ValueError(
                    f"{name}: expected all tensors on the CPU or on one GPU, got {tensor.device} "
                    f"beside {flat.device}"
                )
        if flat.numel() != self.numel:
            raise ValueError(f"flat: expected {self.numel} elements, got {flat.numel()}")
        floating = dtype.is_floating_point and flat.dtype.is_floating_point
        if not floating and (dtype != flat.dtype or scale != 1.0):
            raise ValueError(
                f"expected equal dtypes and scale 1 where integers are involved, got {dtype}, "
                f"{flat.dtype} and {scale}"
            )
        return (
            [tensor.data_ptr() for tensor in tensors],
            self._counts,
            self.offsets,
            flat.data_ptr(),
            enums.DTYPE[dtype],
            enums.DTYPE[flat.dtype],
            scale,
        )
