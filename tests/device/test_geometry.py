"""Results have the shapes and strides that they have on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

pytestmark = pytest.mark.filterwarnings("ignore::moaic.device.cpu_fallback.HostWarning")

MATRIX = torch.tensor([[4.0, 1.0, 0.5], [1.0, 3.0, 0.25], [0.5, 0.25, 2.0]])
CUBE = torch.arange(24.0).reshape(2, 3, 4)


def same(given: Tensor, wanted: Tensor) -> None:
    assert given.device.type == "moai"
    assert (given.shape, given.stride(), given.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)
    torch.testing.assert_close(given.cpu(), wanted)


GROWING: list[Callable[..., object]] = [torch.geqrf, torch.linalg.qr, torch.linalg.eigh]


@pytest.mark.parametrize("op", GROWING)
@pytest.mark.usefixtures("accelerator")
def test_what_grows_under_out_lies_as_on_the_cpu(op: Callable[..., object]) -> None:
    ours, theirs = ([torch.empty(0, device=device) for _ in range(2)] for device in ("moai", "cpu"))
    op(MATRIX.to("moai"), out=tuple(ours))
    op(MATRIX, out=tuple(theirs))
    for given, wanted in zip(ours, theirs, strict=True):
        same(given, wanted)


def singular_values(x: Tensor) -> list[Tensor]:
    return list(torch.ops.aten.linalg_svd(x))


def nonzero_places(x: Tensor) -> list[Tensor]:
    return [torch.nonzero_static(x, size=10)]


def margin_of_one_row(x: Tensor) -> list[Tensor]:
    return [nn.functional.multilabel_margin_loss(x[:1], torch.zeros_like(x[:1], dtype=torch.int64))]


@pytest.mark.parametrize("call", [singular_values, torch.svd, nonzero_places, margin_of_one_row])
@pytest.mark.usefixtures("accelerator")
def test_results_lie_as_on_the_cpu(call: Callable[[Tensor], list[Tensor]]) -> None:
    for given, wanted in zip(call(MATRIX.to("moai")), call(MATRIX), strict=True):
        same(given, wanted)


@pytest.mark.usefixtures("accelerator")
def test_pixels_that_lie_channel_by_channel_are_unpooled_so() -> None:
    image = torch.arange(32.0).reshape(1, 2, 4, 4).contiguous(memory_format=torch.channels_last)
    pooled, places = nn.functional.max_pool2d(image, 2, return_indices=True)
    wanted = nn.functional.max_unpool2d(pooled, places, [2, 2])
    same(nn.functional.max_unpool2d(pooled.to("moai"), places.to("moai"), [2, 2]), wanted)


@pytest.mark.parametrize(("op", "arguments"), [(torch.split_with_sizes_copy, ([1, 3], 2)), (torch.unbind_copy, (0,))])
@pytest.mark.usefixtures("accelerator")
def test_copies_of_views_fill_lists_of_any_shape(op: Callable[..., object], arguments: tuple[object, ...]) -> None:
    ours, theirs = ([torch.empty(0, device=device) for _ in range(2)] for device in ("moai", "cpu"))
    op(CUBE.to("moai"), *arguments, out=ours)
    op(CUBE, *arguments, out=theirs)
    for given, wanted in zip(ours, theirs, strict=True):
        same(given, wanted)


@pytest.mark.usefixtures("accelerator")
def test_a_padded_batch_stays_dense_in_an_encoder() -> None:
    """In evaluation PyTorch makes a nested tensor of one where the device says that it can."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 1).eval()
    batch, padding = torch.randn(2, 4, 8), torch.tensor([[False] * 4, [False, False, True, True]])
    with torch.inference_mode(False):
        wanted = encoder(batch, src_key_padding_mask=padding)
        given = encoder.to("moai")(batch.to("moai"), src_key_padding_mask=padding.to("moai"))
    kept = ~padding
    torch.testing.assert_close(given.cpu()[kept], wanted[kept])


def group_norm(x: Tensor) -> Tensor:
    return nn.functional.group_norm(x, 3)


def strided(*shape: int, order: tuple[int, ...]) -> Tensor:
    """Numbers whose dims lie in another order."""
    return torch.randn([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(len(shape))])


@pytest.mark.parametrize(
    ("op", "x"),
    [
        (group_norm, strided(2, 6, 4, 5, order=(0, 2, 3, 1))),
        (group_norm, strided(2, 6, 5, 4, order=(3, 1, 2, 0))),
        (nn.functional.pdist, strided(6, 4, order=(1, 0))),
    ],
)
@pytest.mark.usefixtures("accelerator")
def test_kernels_that_count_on_one_order_get_it(op: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """With the gradient in an order of its own, as a layer behind leaves it."""
    ours, theirs = x.to("moai").requires_grad_(), x.clone().requires_grad_()
    given, wanted = op(ours), op(theirs)
    grad = strided(*wanted.shape, order=(0, 2, 3, 1)) if wanted.dim() == 4 else torch.randn_like(wanted)
    given.backward(grad.to("moai"))
    wanted.backward(grad)
    assert ours.grad is not None
    assert theirs.grad is not None
    torch.testing.assert_close(given.detach().cpu(), wanted.detach())
    torch.testing.assert_close(ours.grad.cpu(), theirs.grad)
