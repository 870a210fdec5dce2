"""Storages of the device, and unchanged storages of the host."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import UntypedStorage

pytestmark = pytest.mark.usefixtures("accelerator")

MOAI = "moai"


@pytest.mark.parametrize("source", ["cpu", MOAI])
def test_a_copy_into_the_storage_of_a_tensor(source: str) -> None:
    x = torch.zeros(2, 3, device=MOAI)
    x.t().untyped_storage().copy_(torch.arange(6.0, device=source).untyped_storage())
    assert x.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_copy_of_another_size_is_refused() -> None:
    for device in ("cpu", MOAI):
        with pytest.raises(RuntimeError, match="8 bytes"):
            UntypedStorage(4, device=device).copy_(UntypedStorage(8))


def test_a_storage_that_nothing_was_written_to_has_its_size_on_the_host() -> None:
    assert UntypedStorage(8, device=MOAI).cpu().nbytes() == 8


@pytest.mark.parametrize("device", ["cpu", MOAI])
@pytest.mark.parametrize("as_a_zip", [True, False])
def test_saving_in_both_formats(device: str, as_a_zip: bool) -> None:
    file, x = io.BytesIO(), torch.arange(6.0, device=device).view(2, 3)
    torch.save(x.t(), file, _use_new_zipfile_serialization=as_a_zip)
    file.seek(0)
    loaded = torch.load(file)
    assert loaded.device == x.device
    assert loaded.tolist() == x.t().tolist()


def test_bytes_of_the_host_are_swapped() -> None:
    x = torch.tensor([1, 256], dtype=torch.int16)
    storage: Any = x.untyped_storage()
    storage.byteswap(torch.int16)
    assert x.tolist() == [256, 1]
