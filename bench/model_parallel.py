"""The example's model under PyTorch's own pipelines and tensor parallelism, for comparison with moaic's pp and tp."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy

VOCABULARY = 8192


class Half(nn.Module):
    """The first or the second half of a Llama, cut between layers."""

    def __init__(self, model: Any, rank: int) -> None:
        super().__init__()
        middle = len(model.model.layers) // 2
        self.first = rank == 0
        self.layers = model.model.layers[:middle] if self.first else model.model.layers[middle:]
        self.rotary = model.model.rotary_emb
        self.embedding = model.model.embed_tokens if self.first else None
        self.norm = None if self.first else model.model.norm
        self.head = None if self.first else model.lm_head

    def forward(self, given: Tensor) -> Tensor:
        hidden: Any = given if self.embedding is None else self.embedding(given)
        places = torch.arange(hidden.shape[1])[None]
        around = self.rotary(hidden, places)
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=around, attention_mask=None, position_ids=places)
        return hidden if self.norm is None or self.head is None else self.head(self.norm(hidden))


def causal_loss(logits: Tensor, labels: Tensor) -> Tensor:
    shifted = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    return cross_entropy(logits.float().flatten(0, 1), shifted.flatten())


class Pipeline:
    """One worker's stage under 1F1B with so many micro-batches; steps give the loss on the last worker."""

    def __init__(self, model: Any, rank: int, parts: int, *, compiled: bool) -> None:
        half = Half(model, rank)
        self.parameters = half.parameters
        stage: Any = torch.compile(half) if compiled else half
        self._first = rank == 0
        self._schedule = Schedule1F1B(PipelineStage(stage, rank, 2, torch.device("cpu")), parts, loss_fn=causal_loss)

    def step(self, batch: Mapping[str, Tensor]) -> float:
        if self._first:
            self._schedule.step(batch["input_ids"])
            return 0.0
        losses: list[Tensor] = []
        self._schedule.step(target=batch["labels"], losses=losses)
        return torch.stack(losses).mean().item()


def in_parallel(model: Any) -> Any:
    """Tensor parallelism by DTensor, as its tutorial has it: each layer's matmuls by columns, then by rows."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    columns, rows = ColwiseParallel, RowwiseParallel
    for layer in model.model.layers:
        plan: dict[str, ParallelStyle] = {f"self_attn.{name}_proj": columns() for name in "qkv"}
        plan |= {"self_attn.o_proj": rows(), "mlp.down_proj": rows()}
        plan |= {"mlp.gate_proj": columns(), "mlp.up_proj": columns()}
        parallelize_module(layer, mesh, plan)
    return model
