"""Images in the forms that vision-language architectures of `transformers` take, and the text that goes with them.

A processor would make these; its files are not here. The forms are tried in turn until plain PyTorch trains with one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Batch = dict[str, Tensor]

IGNORED = -100


def seen(model: Any, text: Batch, generator: torch.Generator) -> Batch:
    """A picture for every row, before its text as many tokens as it has features where the model wants them."""
    failed: list[Exception] = []
    for picture in _pictures(model, len(text["input_ids"]), generator):
        for join in (_before_text, _beside_text):
            try:
                batch = join(model, picture, text)
                model(**batch).loss.backward()
            except Exception as error:
                failed.append(error)
            else:
                model.zero_grad()
                return batch
    raise failed[-1]


def _pictures(model: Any, rows: int, generator: torch.Generator) -> Iterator[Batch]:
    taken = _parameters(model.forward) | _parameters(_features(model))
    for names, form in _FORMS:
        if names <= taken:
            yield from form(_vision(model), rows, generator)


def _vision(model: Any) -> Any:
    return getattr(model.config, "vision_config", None) or model.config


def _features(model: Any) -> Callable[..., Any] | None:
    holders = (model, getattr(model, "model", None))
    return next((found for each in holders if (found := getattr(each, "get_image_features", None))), None)


def _parameters(function: Callable[..., Any] | None) -> set[str]:
    return set(inspect.signature(function).parameters) if function else set()


def _number(config: Any, names: str, otherwise: int) -> int:
    """The first of these settings that is there; of a list its first element."""
    found: Any = next((value for name in names.split() if (value := getattr(config, name, None))), otherwise)
    return int(found if isinstance(found, int) else found[0])


def _channels(config: Any) -> int:
    return _number(config, "num_channels in_channels in_chans channels", 3)


def _side(config: Any) -> int:
    return _number(config, "image_size input_size", 32)


def _patch(config: Any) -> int:
    return _number(config, "patch_size encoder_patch_size", 8)


def _drawn(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator)


def _grids(config: Any, rows: int, generator: torch.Generator) -> Iterator[Batch]:
    """Patches of all pictures after each other, and how many there are in time, height and width of each."""
    patch, channels = _patch(config), _channels(config)
    frames = _number(config, "temporal_patch_size", 1)
    merged = 2 * _number(config, "spatial_merge_size merge_size", 2)
    count = rows * merged * merged
    grid = {"image_grid_thw": torch.tensor([[1, merged, merged]] * rows)}
    sizes = {"image_merge_sizes": torch.tensor([merged // 2] * rows)}
    yield {"pixel_values": _drawn(generator, count, channels * frames * patch * patch), **grid}
    yield {"pixel_values": _drawn(generator, count, channels * frames * patch * patch), **grid, **sizes}
    yield {"pixel_values": _drawn(generator, count, channels, patch, patch), **grid}
    yield {"pixel_values": _drawn(generator, 1, count, channels, patch, patch), **grid}


def _sized(config: Any, rows: int, generator: torch.Generator) -> Iterator[Batch]:
    """Pictures with their heights and widths, whole or as tiles."""
    side, channels = _side(config), _channels(config)
    sizes = {"image_sizes": torch.tensor([[side, side]] * rows)}
    yield {"pixel_values": _drawn(generator, rows, channels, side, side), **sizes}
    for tiles in (2, 3, 5):
        yield {"pixel_values": _drawn(generator, rows, tiles, channels, side, side), **sizes}


def _patches(config: Any, rows: int, generator: torch.Generator) -> Iterator[Batch]:
    """Patches of each picture in a row, and its height and width in patches."""
    patch, across = _patch(config), 4
    yield {
        "pixel_values": _drawn(generator, rows, across * across, _channels(config) * patch * patch),
        "spatial_shapes": torch.tensor([[across, across]] * rows),
        "pixel_attention_mask": torch.ones(rows, across * across, dtype=torch.int64),
    }


def _tiles(config: Any, rows: int, generator: torch.Generator) -> Iterator[Batch]:
    """One picture per row in as many tiles as the model takes, of which two are seen by every token."""
    side, tiles = _side(config), _number(config, "max_num_tiles", 4)
    mask = torch.zeros(rows, 1, tiles, dtype=torch.int64)
    mask[..., :2] = 1
    yield {
        "pixel_values": _drawn(generator, rows, 1, tiles, _channels(config), side, side),
        "aspect_ratio_ids": torch.full((rows, 1), 2),
        "aspect_ratio_mask": mask,
    }


def _flattened(config: Any, rows: int, generator: torch.Generator) -> Iterator[Batch]:
    """Patches of each picture in a row, each led by its own row and column, counted from one."""
    patch, across = _patch(config), 3
    places = torch.cartesian_prod(torch.arange(1.0, across + 1), torch.arange(1.0, across + 1)).expand(rows, -1, -1)
    drawn = _drawn(generator, rows, across * across, _channels(config) * patch * patch)
    yield {"flattened_patches": torch.cat([places, drawn], 2)}


def _plain(config: Any, rows: int, generator: torch.Generator) -> Iterator[Batch]:
    side, channels = _side(config), _channels(config)
    yield {"pixel_values": _drawn(generator, rows, channels, side, side)}
    one = {"pixel_values": _drawn(generator, rows, 1, channels, side, side)}
    yield one
    yield {**one, "pixel_attention_mask": torch.ones(rows, 1, side, side, dtype=torch.bool)}


_FORMS: tuple[tuple[set[str], Callable[[Any, int, torch.Generator], Iterator[Batch]]], ...] = (
    ({"image_grid_thw"}, _grids),
    ({"spatial_shapes"}, _patches),
    ({"aspect_ratio_ids"}, _tiles),
    ({"flattened_patches"}, _flattened),
    ({"image_sizes"}, _sized),
    ({"pixel_values"}, _plain),
)
"""Inputs that tell a form, and what makes it."""


def _before_text(model: Any, picture: Batch, text: Batch) -> Batch:
    """As many tokens of a picture before each row's text as the picture has features."""
    ids, token = text["input_ids"], _token(model.config)
    front = torch.full((len(ids), _counted(model, picture, text)), token)
    batch = {
        **picture,
        "input_ids": torch.cat([front, ids.masked_fill(ids == token, 2)], 1),
        "attention_mask": torch.cat([torch.ones_like(front), text["attention_mask"]], 1),
        "labels": torch.cat([torch.full_like(front, IGNORED), text["labels"]], 1),
    }
    kinds = torch.cat([torch.ones_like(front), torch.zeros_like(ids)], 1)
    taken = _parameters(model.forward)
    named = {name: kinds for name in ("mm_token_type_ids", "token_type_ids") if name in taken}
    places = {"image_embeds_position_mask": kinds} if "image_embeds_position_mask" in taken else {}
    return {**batch, **named, **places, **_asked(model, text)}


def _beside_text(model: Any, picture: Batch, text: Batch) -> Batch:
    """The text as it is: the model attends to the picture by itself."""
    given = dict(text) if "input_ids" in _parameters(model.forward) else {"labels": text["labels"]}
    if "cross_attention_mask" in _parameters(model.forward) and "aspect_ratio_mask" in picture:
        tiles = picture["aspect_ratio_mask"]
        given["cross_attention_mask"] = tiles[:, None].expand(-1, text["input_ids"].shape[1], -1, -1).clone()
    if "image_attention_mask" in _parameters(model.forward):
        given["image_attention_mask"] = torch.ones(*text["input_ids"].shape, 1, dtype=torch.int64)
    return {**picture, **given, **_asked(model, text)}


def _asked(model: Any, text: Batch) -> Batch:
    """The question, again, for those that ask it of the picture too."""
    return {"qformer_input_ids": text["input_ids"]} if "qformer_input_ids" in _parameters(model.forward) else {}


def _token(config: Any) -> int:
    names = ("image_token_id", "image_token_index", "media_placeholder_token_id", "image_patch_token_id")
    return next(value for name in names if (value := getattr(config, name, None)) is not None)


def _counted(model: Any, picture: Batch, text: Batch) -> int:
    rows = len(text["input_ids"])
    features = _features(model)
    if features is None:
        return int(model.config.latent_query_num)
    taken = _parameters(features)
    given = {name: value for name, value in (picture | _asked(model, text)).items() if name in taken}
    with torch.no_grad():
        found = features(**given)
    found = getattr(found, "pooler_output", found)
    return sum(len(each.reshape(-1, each.shape[-1])) for each in found) // rows
