"""What every training script of the tutorials does alike: flags, labels, and the line that it prints."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any, cast

import torch
from families import FAMILIES
from prepared import BLOCK_SIZE, folder_of, positive
from torch import Tensor, nn

IGNORED = -100
"""Label of a position that the loss leaves out."""


def arguments(family: str) -> argparse.Namespace:
    """What a person can say when `family` is trained."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument(
        "--model-name-or-path",
        default="small",
        help=f"a local folder with a model, or a built-in size: {', '.join(FAMILIES[family].sizes)}",
    )
    parser.add_argument("--batch-size", type=positive, default=8, help="rows of a step, on all devices together")
    parser.add_argument("--block-size", type=positive, default=BLOCK_SIZE, help="tokens of a row, padding included")
    parser.add_argument("--epochs", type=positive, default=1)
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of AdamW")
    parser.add_argument("--log-interval", type=positive, default=4, help="steps between two lines")
    parser.add_argument("--save-path", default=str(folder_of(family) / "checkpoint"), help="where the model is written")
    return parser.parse_args()


def mask_pads(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Labels that leave padding out of the loss; the model itself shifts them by one."""
    return input_ids.masked_fill(attention_mask == 0, IGNORED)


class Meter:
    """Counts steps and tokens, padding included, and makes the line that is printed every few steps."""

    def __init__(self, model: Any, steps: int) -> None:
        if steps == 0:
            sys.exit("the prepared rows do not fill one batch; take a smaller --batch-size, or prepare more --rows")
        self.step = 0
        self._steps = steps
        self._model = model
        self._multiplied = multiplied_parameters(model)
        self._flops = 0.0
        self._tokens = 0
        self._since = time.perf_counter()

    def count(self, input_ids: Tensor) -> None:
        """One step more, which trained on `input_ids` (rows, tokens)."""
        self.step += 1
        self._tokens += input_ids.numel()
        self._flops += input_ids.numel() * flops_per_token(self._model.config, self._multiplied, input_ids.shape[1])

    def line(self, loss: float) -> str:
        """What was done since the last line; to be asked once the device has done it."""
        seconds = time.perf_counter() - self._since
        peak = cast("float", torch.moai.peak_flops(self._model.dtype))
        text = (
            f"[Step {self.step}/{self._steps}] | Loss: {loss:.6f} | Duration: {seconds:.2f} | "
            f"Throughput: {self._tokens / seconds:.2f} tokens/sec | MFU: {self._flops / seconds / peak:.1%}"
        )
        self._tokens, self._flops, self._since = 0, 0.0, time.perf_counter()
        return text


def flops_per_token(config: Any, parameters: int, length: int) -> float:
    """FLOPs of one token's forward and backward in rows of `length`: 6 N + 12 L H Q T.

    N are the parameters that every token is multiplied with, L layers, H Q the width of all heads together, T the
    length: appendix B of PaLM (Chowdhery et al., 2022), which counts attention as if no token were masked.
    """
    return 6 * parameters + 12 * config.num_hidden_layers * config.hidden_size * length


def multiplied_parameters(model: Any) -> int:
    """All parameters but tables that are only looked up in; one that is also the output head multiplies too."""
    head = model.get_output_embeddings().weight
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)} - {head}
    return sum(parameter.numel() for parameter in model.parameters() if parameter not in tables)
