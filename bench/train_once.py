"""One process of one system: the example's model, data and optimizer, trained in one way.

Prints a JSON line per step: its number, its loss, the seconds that it took and the clock at its end. Several processes
of one peer find each other through RANK, WORLD_SIZE and a rendezvous file; each takes its share of every batch.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from model_parallel import Pipeline, in_parallel
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from train_llama2 import build

TRACED = 4
"""Steps of a trace."""


def eager(model: Any) -> Any:
    return model


def inductor(model: Any) -> Any:
    compiled: Any = torch.compile(model)
    return compiled


def ddp(model: Any) -> Any:
    compiled: Any = torch.compile(DistributedDataParallel(model, gradient_as_bucket_view=True))
    return compiled


def fsdp2(model: Any) -> Any:
    """Each layer compiled and sharded, then the rest: the usual recipe."""
    policy = MixedPrecisionPolicy()
    for layer in model.model.layers:
        layer.compile()
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model


def moai(model: Any) -> Any:
    compiled: Any = torch.compile(model, backend="moai")
    return compiled


def dtensor(model: Any) -> Any:
    return in_parallel(model)


def dtensor_compiled(model: Any) -> Any:
    compiled: Any = torch.compile(in_parallel(model))
    return compiled


PIPELINES = {"pipeline": False, "pipeline_compiled": True}
"""Ways of PyTorch's own pipelines, and whether their stages are compiled."""

SAME_BATCH = ("dtensor", "dtensor_compiled", *PIPELINES)
"""Ways in which every process gets the whole batch."""

WAYS: Mapping[str, Callable[[Any], Any]] = {
    f.__name__: f for f in (eager, inductor, ddp, fsdp2, moai, dtensor, dtensor_compiled)
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("way", choices=(*WAYS, *PIPELINES))
    parser.add_argument("--parts", type=int, default=8, help="micro-batches of a pipeline")
    parser.add_argument("data", help="file of batches")
    parser.add_argument("--rendezvous", help="file through which several processes meet")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--intermediate", type=int, default=1536)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--trace", help="file for what the workers did in a few more steps; moai only")
    return parser.parse_args()


def stepper(args: Any, model: Any, device: str, rank: int) -> tuple[Callable[[Mapping[str, Any]], Any], Any]:
    """Forward and backward of one batch, and the parameters that this process trains."""
    if args.way in PIPELINES:
        pipeline = Pipeline(model, rank, args.parts, compiled=PIPELINES[args.way])
        return pipeline.step, list(pipeline.parameters())
    trained = WAYS[args.way](model)

    def step(share: Mapping[str, Any]) -> Any:
        loss = trained(**{name: tensor.to(device) for name, tensor in share.items()}).loss
        loss.backward()
        return loss

    return step, list(trained.parameters())


def traced(train: Callable[[int], Any]) -> list[dict[int, list[Any]]]:
    """What each worker did in each of a few steps."""
    from moaic.runtime.controller import session

    accelerator = session.accelerator()
    accelerator.trace(on=True)
    steps: list[dict[int, list[Any]]] = []
    for number in range(TRACED):
        train(number)
        steps.append({rank: list(map(astuple, done)) for rank, done in accelerator.trace(on=True).items()})
    return steps


def main() -> None:
    args = arguments()
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{args.rendezvous}", rank=rank, world_size=ranks)
    device = "moai" if args.way == "moai" else "cpu"
    data = torch.load(args.data)
    torch.set_default_dtype(getattr(torch, args.dtype))
    model: Any = build(args)
    torch.set_default_dtype(torch.float32)
    model.to(device)
    step, parameters = stepper(args, model, device, rank)
    # One optimizer for each kind of parameter: the fused one takes no mixture of DTensors and others.
    kinds: set[type] = {type(parameter) for parameter in parameters}
    sorts = [[each for each in parameters if type(each) is kind] for kind in kinds]
    optimizers = [torch.optim.AdamW(sort, lr=1e-3, fused=True) for sort in sorts]
    whole = args.way in SAME_BATCH

    def train(number: int) -> Any:
        batch = data[number % len(data)]
        share = batch if whole else {name: tensor.chunk(ranks)[rank] for name, tensor in batch.items()}
        loss = step(share)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        torch.get_device_module(device).synchronize()
        return loss

    for number in range(args.steps):
        start = time.perf_counter()
        loss = train(number)
        if whole:
            dist.barrier()
        seconds = time.perf_counter() - start
        shown = loss.item() if isinstance(loss, torch.Tensor) else loss
        print(json.dumps({"step": number, "loss": shown, "seconds": seconds, "clock": time.time()}), flush=True)
    if args.trace:
        Path(args.trace).write_text(json.dumps(traced(train)), encoding="utf-8")
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
