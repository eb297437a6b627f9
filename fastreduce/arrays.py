"""Arrays of other libraries as tensors that share their memory."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

Method = TypeVar("Method", bound=Callable[..., Any])


class Array(Protocol):
    """Anything with DLPack; or, for a GPU, with ``__cuda_array_interface__``."""

    def __dlpack__(self, **kwargs: Any) -> Any: ...


@contextlib.contextmanager
def borrowed(array: Any) -> Iterator[Tensor]:
    """The array as a tensor over the same memory. Work on it inside the context is ordered after
    what its library has been given so far, and before what it will be given:

    - ``__cuda_array_interface__`` (CuPy) names a stream; it becomes torch's current one.
    - DLPack lets torch's current stream wait for the array's. The library's own further work has to
      be ordered after that stream by its user.

    Raises:
        TypeError: neither is there.
        ValueError: the array is read-only.
    """
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is not None:
        address, read_only = interface["data"]
        if read_only:
            raise ValueError("array: expected a writable one")
        with _stream(interface.get("stream")):
            tensor = _tensor(array)
            if tensor.numel() != 0 and tensor.data_ptr() != address:
                raise ValueError("array: torch cannot use its memory in place")
            yield tensor
        return
    if not hasattr(array, "__dlpack__"):
        raise TypeError(
            f"tensor: expected a torch.Tensor or an array with DLPack or __cuda_array_interface__, "
            f"got {type(array).__name__}"
        )
    flags = getattr(array, "flags", None)
    if getattr(flags, "writeable", True) is False:
        raise ValueError("array: expected a writable one")
    yield _tensor(array)


def accepted(count: int) -> Callable[[Method], Method]:
    """For a method whose first ``count`` arguments are tensors: arrays are taken too, see
    :func:`borrowed`."""

    def wrap(method: Method) -> Method:
        @functools.wraps(method)
        def taking(self: Any, *arguments: Any, **named: Any) -> Any:
            given = arguments[:count]
            if all(isinstance(each, Tensor) for each in given):
                return method(self, *arguments, **named)
            with contextlib.ExitStack() as stack:
                tensors = [
                    each if isinstance(each, Tensor) else stack.enter_context(borrowed(each))
                    for each in given
                ]
                return method(self, *tensors, *arguments[count:], **named)

        return cast("Method", taking)

    return wrap


def _tensor(array: Any) -> Tensor:
    """DLPack says on which device an array lies; the other interface does not."""
    if hasattr(array, "__dlpack__"):
        return torch.utils.dlpack.from_dlpack(array)
    return torch.as_tensor(array, device="cuda")


def _stream(handle: int | None) -> contextlib.AbstractContextManager[Any]:
    """torch's current stream becomes the one of this handle; see the interface's version 3: None
    says that there is nothing to wait for, 1 is the legacy default stream, 2 the thread's."""
    if handle is None:
        return contextlib.nullcontext()
    if handle == 1:
        return torch.cuda.stream(torch.cuda.default_stream())
    return torch.cuda.stream(torch.cuda.ExternalStream(handle))
