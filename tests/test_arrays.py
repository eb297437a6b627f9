"""Arrays of other libraries, in place: NumPy for real, a GPU's by a stand-in."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import make_inputs, same_bits

import fastreduce
from fastreduce import arrays, reference


class Export:
    """Nothing but DLPack."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **kwargs):
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def reduce_numpy(state: dict) -> tuple[np.ndarray, np.ndarray, list[str]]:
    world_size = dist.get_world_size()
    inputs = make_inputs(9, world_size, 5000, torch.float32)
    with fastreduce.Communicator() as communicator:
        array = inputs[communicator.rank].numpy().copy()
        communicator.all_reduce(array, "mean")
        strided = np.zeros((4, 6), dtype=np.float64)
        strided[:, ::2] = communicator.rank + 1
        communicator.all_reduce(strided[:, ::2], "sum")
        gathered = np.zeros(2 * world_size)
        communicator.all_gather(gathered, np.full(2, communicator.rank + 1.0))
        part = torch.zeros(2, dtype=torch.float64)
        communicator.reduce_scatter(part, gathered, "sum")
        sent = np.array([communicator.rank, 7])
        communicator.broadcast(tensor=sent, root=1)
        communicator.all_gather(input=np.full(2, communicator.rank + 1.0), output=gathered)
        assert (gathered == [1, 1, 2, 2]).all() and sent.tolist() == [1, 7]
        assert part.tolist() == [2.0 * (communicator.rank + 1)] * 2
        errors = []
        frozen = np.zeros(3)
        frozen.flags.writeable = False
        exported = Export(frozen) if np.lib.NumpyVersion(np.__version__) >= "2.1.0" else frozen
        wrongs = [frozen, [1.0, 2.0], np.zeros(3, dtype=np.complex64)]
        wrongs += [exported, np.ones(6)[::-1], Export(np.ones(6)[::-1]), np.zeros(3, ">f4")]
        for wrong in wrongs:
            try:
                communicator.all_reduce(wrong)
            except (TypeError, ValueError) as error:
                errors.append(str(error))
        return array, strided, errors


def test_numpy_in_place(pool):
    expected = reference.all_reduce(make_inputs(9, 2, 5000, torch.float32), "mean")
    for array, strided, errors in pool(2).run(reduce_numpy):
        assert same_bits(torch.from_numpy(array), expected)
        assert (strided[:, ::2] == 3).all() and (strided[:, 1::2] == 0).all()
        words = ["writable", "got list", "complex64", "writable", "negative", "negative", "byte"]
        assert len(errors) == len(words)
        assert all(word in error for word, error in zip(words, errors, strict=True)), errors


class Interface:
    """An array of CuPy's kind; its memory stands for a GPU's."""

    def __init__(self, stream: int | None, read_only: bool = False) -> None:
        self.__cuda_array_interface__ = {
            "shape": (4,),
            "typestr": "<f4",
            "data": (4096, read_only),
            "version": 3,
            "stream": stream,
        }


@pytest.mark.parametrize("handle", [None, 1, 2, 1 << 40])
def test_work_runs_on_the_stream_that_an_array_names(monkeypatch, handle):
    entered = []

    @contextlib.contextmanager
    def on(stream):
        entered.append(stream)
        yield

    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda: "legacy")
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda at: f"stream {at}")
    tensor = torch.zeros(4)
    monkeypatch.setattr(torch, "as_tensor", lambda array, device: tensor)
    array = Interface(handle)
    with pytest.raises(ValueError, match="in place"), arrays.borrowed(array):
        pass  # what torch would make of it is a copy
    entered.clear()
    array.__cuda_array_interface__["data"] = (tensor.data_ptr(), False)
    with arrays.borrowed(array) as borrowed:
        assert borrowed is tensor
    assert entered == {None: [], 1: ["legacy"]}.get(handle, [f"stream {handle}"])


def test_a_read_only_array_of_a_gpu_is_refused():
    with pytest.raises(ValueError, match="writable"), arrays.borrowed(Interface(None, True)):
        pass


def test_dlpack_alone_is_enough():
    inner = torch.zeros(3)
    with arrays.borrowed(Export(inner)) as tensor:
        tensor.add_(2)
    assert inner.eq(2).all()
