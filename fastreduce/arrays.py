"""Arrays of other libraries as tensors that share their memory."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

Method = TypeVar("Method", bound=Callable[..., Any])


class Array(Protocol):
    """Anything with DLPack; or, for a GPU, with ``__cuda_array_interface__``."""

    def __dlpack__(self, **kwargs: Any) -> Any: ...


@contextlib.contextmanager
def borrowed(array: Any, name: str = "tensor") -> Iterator[Tensor]:
    """The array as a tensor over the same memory. Work on it inside the context is ordered after
    what its library has been given so far, and before what it will be given:

    - ``__cuda_array_interface__`` (CuPy) names a stream; it becomes torch's current one.
    - DLPack lets torch's current stream wait for the array's. The library's own further work has to
      be ordered after that stream by its user.

    Args:
        name: of the argument, for errors.

    Raises:
        TypeError: neither is there, or torch has no such elements.
        ValueError: the array is read-only, or has negative strides.
    """
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is not None:
        address, read_only = interface["data"]
        if read_only:
            raise ValueError(f"{name}: expected a writable array")
        with _stream(interface.get("stream")):
            tensor = _tensor(array, name)
            if tensor.numel() != 0 and tensor.data_ptr() != address:
                raise ValueError(f"{name}: torch cannot use this array's memory in place")
            yield tensor
        return
    if not hasattr(array, "__dlpack__") or not hasattr(array, "__dlpack_device__"):
        raise TypeError(
            f"{name}: expected a torch.Tensor or an array with DLPack or "
            f"__cuda_array_interface__, got {type(array).__name__}"
        )
    if getattr(getattr(array, "flags", None), "writeable", True) is False:
        raise ValueError(f"{name}: expected a writable array")
    _check_export(array, name)
    yield _tensor(array, name)


def accepted(method: Method) -> Method:
    """For a method whose parameters named ``output``, ``input`` and ``tensor`` are tensors: arrays
    are taken too, see :func:`borrowed`."""
    signature = inspect.signature(method)
    names = list(signature.parameters)[1:]
    taken = [name for name in ("output", "input", "tensor") if name in names]

    @functools.wraps(method)
    def taking(self: Any, *arguments: Any, **named: Any) -> Any:
        given = {**dict(zip(names, arguments, strict=False)), **named}
        foreign = [name for name in taken if name in given and not isinstance(given[name], Tensor)]
        if not foreign:
            return method(self, *arguments, **named)
        bound = signature.bind(self, *arguments, **named)
        with contextlib.ExitStack() as stack:
            for name in foreign:
                bound.arguments[name] = stack.enter_context(borrowed(given[name], name))
            return method(*bound.args, **bound.kwargs)

    return cast("Method", taking)


def _tensor(array: Any, name: str) -> Tensor:
    """DLPack says on which device an array lies; the other interface does not."""
    if not hasattr(array, "__dlpack__"):
        return torch.as_tensor(array, device="cuda")
    try:
        return torch.utils.dlpack.from_dlpack(array)
    except (BufferError, RuntimeError) as error:
        raise TypeError(f"{name}: torch cannot take this array: {error}") from error


class _DLTensor(ctypes.Structure):
    """The DLPack specification's."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_uint32),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    )


_READ_ONLY = 1


def _check_export(array: Any, name: str) -> None:
    """What torch does not look at: it takes a read-only array for a writable one, and ends the
    process over negative strides."""
    try:
        try:
            capsule = array.__dlpack__(max_version=(1, 0))
        except TypeError:  # an exporter from before version 1
            capsule = array.__dlpack__()
    except BufferError as error:
        raise TypeError(f"{name}: torch cannot take this array: {error}") from error
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    valid = ctypes.pythonapi.PyCapsule_IsValid
    valid.restype, valid.argtypes = ctypes.c_int, [ctypes.py_object, ctypes.c_char_p]
    if valid(capsule, b"dltensor_versioned"):
        at = pointer(capsule, b"dltensor_versioned")
        managed = _DLManagedTensorVersioned.from_address(at)
        if managed.flags & _READ_ONLY:
            raise ValueError(f"{name}: expected a writable array")
        exported = managed.tensor
    elif valid(capsule, b"dltensor"):
        exported = _DLTensor.from_address(pointer(capsule, b"dltensor"))
    else:
        return
    if exported.strides and any(exported.strides[i] < 0 for i in range(exported.ndim)):
        raise ValueError(f"{name}: expected an array without negative strides")


def _stream(handle: int | None) -> contextlib.AbstractContextManager[Any]:
    """torch's current stream becomes the one of this handle; see the interface's version 3: None
    says that there is nothing to wait for, 1 is the legacy default stream, 2 the thread's."""
    if handle is None:
        return contextlib.nullcontext()
    if handle == 1:
        return torch.cuda.stream(torch.cuda.default_stream())
    return torch.cuda.stream(torch.cuda.ExternalStream(handle))
