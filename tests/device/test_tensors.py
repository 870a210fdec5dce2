"""Tensors of the device: creation, copies, views, in-place ops, indexing, resizing, printing."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from moaic.device.cpu_fallback import HostWarning
from moaic.device.handles import tensor_of, view_of
from moaic.runtime.controller import session

pytestmark = pytest.mark.usefixtures("accelerator")

MOAI = "moai"

TORCH: Any = torch


def same(make: Callable[[str], Any]) -> None:
    """What `make` makes must be equal on both devices, bit for bit, strides too."""
    torch.manual_seed(3)
    expected: Tensor = make("cpu")
    torch.manual_seed(3)
    found: Tensor = make(MOAI)
    assert found.device == torch.device("moai:0")
    assert found.dtype == expected.dtype
    assert found.stride() == expected.stride()
    assert torch.equal(found.cpu(), expected)


CREATED: list[Callable[[str], Tensor]] = [
    lambda d: torch.zeros(2, 3, device=d),
    lambda d: torch.ones(2, 3, device=d, dtype=torch.int64),
    lambda d: torch.full((3,), 2.5, device=d),
    lambda d: torch.full((3,), 7, device=d),
    lambda d: torch.full((3,), True, device=d),
    lambda d: torch.full((2,), 1 + 2j, device=d),
    lambda d: torch.arange(5, device=d),
    lambda d: torch.arange(0, 1, 0.25, device=d),
    lambda d: torch.arange(0, 2, 0.25, device=d),
    lambda d: torch.linspace(0, 1, 7, device=d),
    lambda d: torch.eye(3, device=d),
    lambda d: torch.tensor([[1, 2], [3, 4]], device=d),
    lambda d: torch.tensor(3.5, device=d, dtype=torch.bfloat16),
    lambda d: torch.zeros(0, 4, device=d),
    lambda d: torch.zeros_like(torch.ones(2, 3, device=d).t()),
    lambda d: torch.ones(2, 3, device=d).new_full((2,), 4),
    lambda d: torch.tril_indices(3, 3, device=d),
    lambda d: torch.scalar_tensor(3, device=d),
    lambda d: torch.zeros(1, 2, 3, 4, device=d).to(memory_format=torch.channels_last),
    lambda d: torch.empty(2, 3, device=d).fill_(1).double(),
    lambda d: torch.empty(1, 2, 3, 4, device=d, memory_format=torch.channels_last).fill_(1),
    lambda d: TORCH.ones(3, device=d).set_().resize_(2).fill_(torch.tensor(2.0)),
    lambda d: TORCH.ones(3, device=d).set_() + 1,
    lambda d: TORCH._efficientzerotensor((3,), device=d) + 1,
    lambda d: TORCH._lazy_clone(torch.ones(3, device=d)) + 1,
]


@pytest.mark.parametrize("make", CREATED)
def test_creation_equals_the_cpu(make: Callable[[str], Tensor]) -> None:
    same(make)


RANDOM: list[Callable[[str], Tensor]] = [
    lambda d: torch.rand(40, device=d),
    lambda d: torch.randn(5, 7, device=d),
    lambda d: torch.randint(0, 9, (33,), device=d),
    lambda d: torch.randperm(20, device=d),
    lambda d: torch.rand_like(torch.ones(3, device=d)),
    lambda d: torch.nn.functional.dropout(torch.ones(50, device=d), 0.3),
    lambda d: torch.bernoulli(torch.full((9,), 0.4, device=d)),
    lambda d: torch.empty(8, device=d).exponential_(),
    lambda d: torch.multinomial(torch.ones(5, device=d), 3),
    lambda d: torch.normal(torch.zeros(4, device=d), 1.0),
    lambda d: torch.nn.init.trunc_normal_(torch.empty(5, 4, device=d)),
    lambda d: torch.nn.functional.rrelu(torch.randn(9, device=d), training=True),
    lambda d: torch.randn(4, 3, device=d).t().uniform_(),
    lambda d: torch.randn(5, generator=torch.Generator().manual_seed(2), device=d),
]


@pytest.mark.parametrize("make", RANDOM)
def test_random_numbers_are_those_of_the_cpu(make: Callable[[str], Tensor]) -> None:
    same(make)


COMPUTED: list[Callable[[str], Tensor]] = [
    lambda d: torch.arange(6.0, device=d).view(2, 3).t() + torch.ones(2, device=d),
    lambda d: torch.arange(6.0, device=d).view(2, 3) @ torch.ones(3, 2, device=d),
    lambda d: torch.arange(6.0, device=d).unfold(0, 3, 2),
    lambda d: torch.arange(24.0, device=d).view(2, 3, 4)[:, 1:, ::2].sum(1),
    lambda d: torch.cat([torch.ones(2, device=d), torch.zeros(1, device=d)]),
    lambda d: torch.stack(torch.arange(6.0, device=d).view(2, 3).unbind(0)),
    lambda d: torch.arange(6, device=d) / 4,
    lambda d: torch.ones(3, device=d, dtype=torch.int32) * 2.5,
    lambda d: torch.ones(2, 1, device=d).expand(2, 3).contiguous(),
    lambda d: torch.arange(4.0, device=d).view(torch.int32),
    lambda d: torch.view_as_complex(torch.ones(3, 2, device=d)),
    lambda d: torch.view_as_real(torch.view_as_complex(torch.ones(3, 2, device=d)) * 2),
    lambda d: (
        (torch.ones(2, 2, device=d, dtype=torch.complex64) * 1j).conj() @ torch.eye(2, device=d).to(torch.complex64)
    ),
    lambda d: torch.ones(3, device=d, dtype=torch.complex64).mul(2j).conj().imag,
    lambda d: torch.nn.functional.embedding_bag(
        torch.tensor([0, 1, 1], device=d), torch.arange(6.0, device=d).view(2, 3), torch.tensor([0, 2], device=d)
    ),
    lambda d: torch.sort(torch.tensor([3.0, 1.0, 2.0], device=d), descending=True).values,
    lambda d: torch.nn.functional.one_hot(torch.tensor([0, 2], device=d), 3),
    lambda d: (torch.eye(3, device=d) * 2).inverse(),
    lambda d: cast("Tensor", torch.fft.fft(torch.arange(8.0, device=d))).abs(),
    lambda d: torch.nn.functional.conv2d(torch.ones(1, 2, 4, 4, device=d), torch.ones(3, 2, 3, 3, device=d), padding=1),
    lambda d: torch.where(torch.arange(4, device=d) > 1, 1.0, torch.arange(4.0, device=d)),
    lambda d: torch.arange(4, device=d).float().var(),
    lambda d: torch.histc(torch.arange(6.0, device=d), 4),
    lambda d: torch.nn.functional.relu(torch.ones(2, device=d)).add_(torch.tensor(2.0)),
]


@pytest.mark.filterwarnings("ignore::moaic.device.cpu_fallback.HostWarning")
@pytest.mark.parametrize("make", COMPUTED)
def test_results_equal_the_cpu(make: Callable[[str], Tensor]) -> None:
    same(make)


def test_views_share_their_buffer() -> None:
    x = torch.arange(24.0, device=MOAI).view(2, 3, 4)
    x[0, 1] = 0
    x.transpose(1, 2)[1].mul_(2)
    expected = torch.arange(24.0).view(2, 3, 4)
    expected[0, 1] = 0
    expected.transpose(1, 2)[1].mul_(2)
    assert torch.equal(x.cpu(), expected)
    assert view_of(x).buffer is view_of(x.detach().t_() if x.dim() == 2 else x.data[0]).buffer
    x.view(-1).zero_()
    assert x.sum().item() == 0


def test_assignment_by_mask_index_and_slice() -> None:
    def make(device: str) -> Tensor:
        x = torch.tensor([0.0, 1.0, 2.0, 3.0], device=device)
        x[x > 1] = 5
        x[torch.tensor([0])] = 7.0  # an index on the host
        x[1] = torch.tensor(3.0)
        x[3:] = torch.tensor([9.0])
        x[torch.tensor([2], device=device)] += 1
        return x

    same(make)


def test_copies_convert_and_broadcast() -> None:
    target = torch.zeros(2, 3, device=MOAI)
    target.copy_(torch.tensor([1, 2, 3]))
    target[1].copy_(torch.ones((), device=MOAI, dtype=torch.float64))
    assert target.tolist() == [[1, 2, 3], [1, 1, 1]]
    host = torch.zeros(3, dtype=torch.int64)
    host.copy_(target[0])
    assert host.tolist() == [1, 2, 3]
    with pytest.raises(RuntimeError, match="broadcast shape"):
        target.copy_(torch.ones(4))


def test_a_copy_to_the_host_is_its_own() -> None:
    x = torch.ones(3, device=MOAI)
    x.cpu().zero_()
    x.to("cpu", torch.float64).zero_()
    assert x.tolist() == [1, 1, 1]


def test_a_copy_into_what_is_read_conjugated_or_negated() -> None:
    def make(device: str, *, is_negated: bool) -> Tensor:
        x = torch.zeros(2, dtype=torch.complex64, device=device)
        if is_negated:
            x.conj().imag.copy_(torch.tensor([1.0, 2.0], device=device))
        else:
            x.conj().copy_(torch.tensor([1j, 2], device=device))
        return x

    same(lambda device: make(device, is_negated=False))
    same(lambda device: make(device, is_negated=True))


def test_copies_that_other_backends_of_pytorch_ask_for() -> None:
    x = torch.zeros(2, device=MOAI)
    TORCH._copy_from(torch.tensor([1.0, 2.0]), x)
    assert x.tolist() == [1, 2]
    TORCH._copy_from_and_resize(torch.arange(3.0), x)
    assert x.tolist() == [0, 1, 2]


def test_what_a_tensor_is_set_to() -> None:
    x = torch.ones(2, 3, device=MOAI)
    assert x.is_set_to(x.view(2, 3))
    for other in (x.clone(), x[1:], x[:1], x.view(3, 2), x.as_strided((2, 3), (1, 2))):
        assert not x.is_set_to(other)


def test_integers_are_counted_as_other_accelerators_do() -> None:
    """The CPU has no kernel for them."""
    counts = torch.histc(torch.arange(6, device=MOAI), 4)
    assert counts.dtype == torch.int64
    assert counts.tolist() == torch.histc(torch.arange(6.0), 4).tolist()


def test_lists_may_hold_scalars_of_the_host() -> None:
    def make(device: str) -> Tensor:
        tensors = [torch.ones(2, device=device), torch.ones(2, device=device)]
        TORCH._foreach_add_(tensors, [torch.tensor(2.0), torch.tensor(3.0)])
        return torch.stack(tensors)

    same(make)
    with pytest.raises(RuntimeError, match=r"moai:0 and cpu! Move the tensor of shape \[2\]"):
        TORCH._foreach_add_([torch.ones(2, device=MOAI)], [torch.ones(2)])


def test_more_shapes_than_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moaic.device.generic_kernels._CACHE_LIMIT", 2)

    def make(device: str) -> Tensor:
        rows = [torch.arange(float(count), device=device).square().mul_(3) for count in (2, 3, 4, 5, 2)]
        return torch.cat(rows)

    same(make)


def test_an_upload_is_taken_at_once() -> None:
    host = torch.ones(3)
    x = host.to(MOAI)
    host.zero_()
    assert x.tolist() == [1, 1, 1]


def test_scalars_of_the_host_take_part_by_value() -> None:
    x = torch.ones(3, device=MOAI)
    factor = torch.tensor(5.0)
    y = x * factor
    factor.zero_()
    assert y.tolist() == [5, 5, 5]
    assert (x * torch.tensor(2.0, dtype=torch.float64)).dtype == torch.float32
    loss = x.sum()
    assert (loss * 0.5).dtype == torch.float32
    assert (loss * torch.tensor(2.0, dtype=torch.float64)).dtype == torch.float64


def test_tensors_of_the_host_do_not() -> None:
    with pytest.raises(RuntimeError, match=r"moai:0 and cpu! Move the tensor of shape \[3\]"):
        torch.add(torch.ones(3, device=MOAI), torch.ones(3))


def test_resize_keeps_what_fits_and_grows() -> None:
    x = torch.arange(6.0, device=MOAI)
    x.resize_(2, 2)
    assert x.tolist() == [[0, 1], [2, 3]]
    x.resize_(4, 3)
    assert x.view(-1)[:4].tolist() == [0, 1, 2, 3]
    x.set_(torch.ones(2, device=MOAI))  # pyright: ignore[reportArgumentType] the stubs know only storages
    assert x.tolist() == [1, 1]


def test_out_grows_to_the_result() -> None:
    out = torch.empty(0, device=MOAI)
    torch.add(torch.ones(3, device=MOAI), 1, out=out)
    assert out.tolist() == [2, 2, 2]
    values, indices = torch.empty(0, device=MOAI), torch.empty(0, dtype=torch.int64, device=MOAI)
    torch.sort(torch.tensor([3.0, 1.0], device=MOAI), out=(values, indices))
    assert (values.tolist(), indices.tolist()) == ([1, 3], [1, 0])
    with pytest.warns(UserWarning, match="was resized"):
        torch.mul(torch.ones(3, device=MOAI), 3, out=torch.ones(2, device=MOAI))


def test_out_grows_also_where_indices_bind_the_operands() -> None:
    def make(device: str) -> Tensor:
        x, rows = torch.arange(3.0, device=device).view(1, 3), torch.zeros(2, 3, dtype=torch.int64, device=device)
        return torch.gather(x, 0, rows, out=torch.empty(0, device=device))

    same(make)


def test_data_dependent_ops_run_on_the_host_and_say_so_once() -> None:
    from moaic.device import cpu_fallback

    cpu_fallback._warn_once.cache_clear()  # pyright: ignore[reportPrivateUsage]
    x = torch.tensor([0.0, 1.0, 2.0], device=MOAI)
    with pytest.warns(HostWarning, match="nonzero on device moai runs on the host"):
        assert x.nonzero().tolist() == [[1], [2]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x.nonzero()
    with pytest.warns(HostWarning, match=r"index\.Tensor"):
        assert x[x > 0].tolist() == [1, 2]
    with pytest.warns(HostWarning, match="masked_select"):
        assert torch.masked_select(x, x > 1).tolist() == [2]


def test_reading_values() -> None:
    x = torch.tensor([1.5, 2.0], device=MOAI)
    assert x[0].item() == 1.5
    assert float(x[1]) == 2
    assert x.tolist() == [1.5, 2]
    assert bool((x > 1).all())
    assert torch.equal(x, x.clone())
    assert not torch.allclose(x, x + 1)
    assert [float(value) for value in x] == [1.5, 2]
    assert 2.0 in x
    with pytest.raises(TypeError, match=r"Use Tensor\.cpu\(\)"):
        x.numpy()


def test_printing() -> None:
    x = torch.arange(4.0, device=MOAI).view(2, 2)
    assert re.sub(r"\s+", " ", repr(x)) == "tensor([[0., 1.], [2., 3.]], device='moai:0')"
    assert f"{x.sum():.2f}" == "6.00"
    assert "Parameter containing" in repr(torch.nn.Parameter(x))
    assert "grad_fn" in repr(torch.ones(2, device=MOAI, requires_grad=True) * 2)


def test_the_device_context() -> None:
    torch.manual_seed(1)
    with torch.device(MOAI):
        layer = torch.nn.Linear(3, 3)
        x = torch.ones(2, 3)
    torch.manual_seed(1)
    assert x.device.type == MOAI
    assert torch.equal(layer.weight.cpu(), torch.nn.Linear(3, 3).weight)
    assert layer(x).shape == (2, 3)


def test_the_backends_way_in_and_out() -> None:
    buffer = session.accelerator().buffer("f32", (2, 3), (3, 1))
    session.accelerator().upload(buffer, torch.arange(6.0).view(2, 3))
    x = tensor_of(buffer, (2, 3), (3, 1), requires_grad=True)
    assert x.is_leaf
    assert x.requires_grad
    view = view_of(x.detach().t()[1:])
    assert view.buffer is buffer
    assert (view.shape, view.strides, view.offset) == ((2, 2), (1, 3), 1)
    assert x.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_buffer_goes_with_its_last_tensor() -> None:
    import weakref

    x = torch.ones(3, device=MOAI)
    buffer = weakref.ref(view_of(x).buffer)
    y = x[1:]
    del x
    assert buffer() is not None
    del y
    assert buffer() is None


def test_methods_named_after_the_device() -> None:
    tensor: Any = torch.ones(3)
    module: Any = torch.nn.Linear(2, 2)
    assert tensor.moai().is_moai
    assert module.moai().weight.device.type == MOAI
