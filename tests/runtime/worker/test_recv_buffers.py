from __future__ import annotations

import torch

from moaic.runtime.worker.recv_buffers import RecvBuffers


def test_memory_is_used_again_when_nothing_reads_it() -> None:
    buffers = RecvBuffers(torch.device("cpu"))
    first = buffers.take((4, 2), torch.float32)
    address = first.data_ptr()
    del first
    assert buffers.take((4, 2), torch.float32).data_ptr() == address


def test_memory_that_a_view_reads_is_left_alone() -> None:
    buffers = RecvBuffers(torch.device("cpu"))
    view = buffers.take((4, 2), torch.float32)[1:]
    address = view.untyped_storage().data_ptr()
    other = buffers.take((4, 2), torch.float32)
    assert other.data_ptr() != address
    del view
    assert buffers.take((4, 2), torch.float32).data_ptr() == address


def test_another_type_or_shape_has_memory_of_its_own() -> None:
    buffers = RecvBuffers(torch.device("cpu"))
    addresses = {
        buffers.take(shape, dtype).data_ptr() for shape in ((4, 2), (2, 4)) for dtype in (torch.float32, torch.int32)
    }
    assert len(addresses) == 4


def test_as_many_are_kept_as_were_read_at_a_time() -> None:
    buffers = RecvBuffers(torch.device("cpu"))
    addresses: set[int] = set()
    for _ in range(3):
        held = [buffers.take((8,), torch.float64) for _ in range(3)]
        addresses |= {tensor.data_ptr() for tensor in held}
        del held
    assert len(addresses) == 3
