"""Modules on the device: moving, tying, copying, saving, loading."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("accelerator")

MOAI = "moai"


def tied() -> Any:
    """An embedding and a projection with one weight."""
    model: Any = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False))
    model[1].weight = model[0].weight
    return model


def test_moving_keeps_parameters_what_they_are() -> None:
    model = tied()
    weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = weight.detach().clone()
    model.to(MOAI)
    assert model[0].weight is model[1].weight is weight
    assert isinstance(weight, nn.Parameter)
    assert weight.device.type == MOAI
    model(torch.tensor([1, 2], device=MOAI)).sum().backward()
    optimizer.step()
    model.cpu()
    assert model[0].weight is model[1].weight is weight
    assert weight.grad is not None
    assert weight.grad.device.type == weight.device.type == "cpu"
    assert not torch.equal(weight, before)


def test_tied_weights_train_as_on_the_cpu() -> None:
    losses: list[list[float]] = []
    for device in ("cpu", MOAI):
        torch.manual_seed(0)
        model = tied().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        ids = torch.tensor([1, 2, 3], device=device)
        losses.append([])
        for _ in range(3):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(ids), ids.flip(0))
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)


def test_moving_after_compile_keeps_ties() -> None:
    model = tied()
    compiled = torch.compile(model, backend="eager")
    compiled(torch.tensor([1]))
    model.to(MOAI)
    assert model[0].weight is model[1].weight
    assert compiled(torch.tensor([1], device=MOAI)).device.type == MOAI


def test_a_graph_older_than_the_move_says_so() -> None:
    model = nn.Linear(3, 3)
    loss = model(torch.ones(2, 3)).sum()
    model.to(MOAI)
    with pytest.raises(RuntimeError, match=r"moved to or from device moai since its forward"):
        loss.backward()
    model(torch.ones(2, 3, device=MOAI)).sum().backward()
    assert model.weight.grad is not None


def test_hooks_and_attributes_move_along() -> None:
    model: Any = nn.Linear(3, 3)
    calls: list[str] = []

    def double(gradient: Tensor) -> Tensor:
        calls.append("gradient")
        return gradient * 2

    def note(_: Tensor) -> None:
        calls.append("accumulated")

    model.weight.register_hook(double)
    model.weight.register_post_accumulate_grad_hook(note)
    model.weight.mark = 3
    model.to(MOAI)
    model(torch.ones(1, 3, device=MOAI)).sum().backward()
    assert calls == ["gradient", "accumulated"]
    assert model.weight.mark == 3
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[2, 2, 2]] * 3


def test_dtype_changes_keep_the_object() -> None:
    model = nn.Linear(3, 3).to(MOAI)
    weight = model.weight
    model.to(torch.bfloat16)
    assert model.weight is weight
    assert weight.dtype == torch.bfloat16


def test_moves_between_other_devices_are_those_of_pytorch() -> None:
    model = nn.Linear(3, 2).to("meta")
    assert model.weight.device.type == "meta"
    assert isinstance(model.weight, nn.Parameter)
    strided = torch.ones(4, 6, device=MOAI)[:, ::2].t().to("meta")
    assert (strided.device.type, strided.shape, strided.stride()) == ("meta", (3, 4), (1, 3))


def test_meta_then_to_empty() -> None:
    with torch.device("meta"):
        model = tied()
    model.to_empty(device=MOAI)
    assert model[0].weight is model[1].weight
    nn.init.ones_(model[0].weight)
    assert model(torch.tensor([1], device=MOAI)).tolist() == [[4.0] * 10]


def test_deepcopy() -> None:
    x = torch.arange(6.0, device=MOAI).view(2, 3)
    y = copy.deepcopy(x.t())
    x.zero_()
    assert y.tolist() == [[0, 3], [1, 4], [2, 5]]
    model = tied().to(MOAI)
    twin = copy.deepcopy(model)
    assert twin[0].weight is twin[1].weight
    assert twin[0].weight is not model[0].weight
    with torch.no_grad():
        twin[0].weight.zero_()
    assert model[0].weight.abs().sum().item() > 0


def stay(storage: Any, _: str) -> Any:
    return storage


PLACES: list[Any] = [None, "cpu", MOAI, "moai:0", torch.device(MOAI), {"moai:0": "cpu"}, stay]


@pytest.mark.parametrize("place", PLACES)
def test_save_and_load(place: Any, tmp_path: Path) -> None:
    model = nn.Linear(3, 2).to(MOAI)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    state = torch.load(tmp_path / "model.pt", map_location=place)
    on_host = place == "cpu" or isinstance(place, dict) or callable(place)
    assert state["weight"].device.type == ("cpu" if on_host else MOAI)
    assert torch.equal(state["weight"].cpu(), model.weight.cpu())
    for other in (nn.Linear(3, 2), nn.Linear(3, 2).to(MOAI)):
        other.load_state_dict(state)
        assert torch.equal(other.weight.cpu(), model.weight.cpu())


def test_saving_keeps_what_is_shared(tmp_path: Path) -> None:
    x = torch.arange(6.0, device=MOAI).view(2, 3)
    torch.save({"all": x, "row": x[1]}, tmp_path / "x.pt")
    loaded = torch.load(tmp_path / "x.pt")
    loaded["all"].zero_()
    assert loaded["row"].tolist() == [0, 0, 0]


def test_a_file_from_the_host_loads_on_the_device() -> None:
    file = io.BytesIO()
    torch.save({"x": torch.ones(3), "i": torch.tensor([1, 2])}, file)
    file.seek(0)
    loaded = torch.load(file, map_location=MOAI)
    assert loaded["x"].sum().item() == 3
    assert loaded["i"].tolist() == [1, 2]
    assert loaded["i"].device.type == MOAI


def test_whole_modules_and_optimizers_are_saved() -> None:
    model = nn.Linear(3, 2).to(MOAI)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3, device=MOAI)).sum().backward()
    optimizer.step()
    file = io.BytesIO()
    torch.save((model, optimizer.state_dict()), file)
    file.seek(0)
    loaded, state = torch.load(file, weights_only=False)
    assert torch.equal(loaded.weight.cpu(), model.weight.cpu())
    optimizer.load_state_dict(state)
    optimizer.step()


def test_pickle() -> None:
    x = torch.arange(6.0, device=MOAI, requires_grad=True)
    y: Tensor = pickle.loads(pickle.dumps(x))
    assert y.device.type == MOAI
    assert y.requires_grad
    assert y.tolist() == x.tolist()
    assert isinstance(pickle.loads(pickle.dumps(nn.Parameter(x.detach()))), nn.Parameter)


def test_storages() -> None:
    storage = torch.UntypedStorage(8, device=MOAI)
    assert storage.device.type == MOAI
    assert storage.nbytes() == 8
    empty: Any = torch.empty(0, device=MOAI)
    x: Any = empty.set_(storage, 0, (2,))
    x.fill_(1.0)
    assert x.untyped_storage().cpu().tolist() == [0, 0, 128, 63] * 2
    assert torch.UntypedStorage([1, 2, 3], device=MOAI).cpu().tolist() == [1, 2, 3]
    assert len(repr(x.untyped_storage())) > 0
    bits: Any = torch.empty(0, dtype=torch.int32, device=MOAI)
    bits.set_(x.untyped_storage()).add_(1 << 23)
    assert x.tolist() == [2, 2]
    with pytest.raises(NotImplementedError, match="cannot be swapped"):
        x.untyped_storage().byteswap(torch.float32)


def test_parameters_share_with_data() -> None:
    parameter = nn.Parameter(torch.ones(3, device=MOAI))
    parameter.data.add_(1)
    assert parameter.tolist() == [2, 2, 2]
    parameter.data = torch.zeros(3, device=MOAI)
    assert parameter.tolist() == [0, 0, 0]
