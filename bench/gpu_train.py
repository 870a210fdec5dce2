"""One way of training a Llama, for `bench/gpu_llama.py`: reads commands line by line, and answers in JSON.

`start` builds the model and runs steps until all is compiled, `steps N` runs N more.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.initialization import no_init_weights

WARM_UP = 4
"""Steps, once all is compiled, that are left out: graphs are captured in them."""

BLOCK = (1 << 24) - 3
"""Random numbers that are drawn; parameters are filled with them again and again, which takes a second per GB."""

SPREAD = 0.02
"""Standard deviation of the weights of a new Llama."""


def model_of(sizes: Mapping[str, Any]) -> nn.Module:
    """A Llama in bfloat16 on the host, the same every time."""
    config: Any = LlamaConfig
    torch.set_default_dtype(torch.bfloat16)
    with no_init_weights():
        model = LlamaForCausalLM(
            config(
                hidden_size=sizes["hidden"],
                intermediate_size=sizes["intermediate"],
                num_hidden_layers=sizes["layers"],
                num_attention_heads=sizes["heads"],
                num_key_value_heads=sizes["kv_heads"],
                vocab_size=sizes["vocabulary"],
                max_position_embeddings=sizes["tokens"],
                tie_word_embeddings=sizes["tied"],
                use_cache=False,
            )
        )
    torch.set_default_dtype(torch.float32)
    model.tie_weights()
    fill(model)
    return model.train()


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Norms begin with ones, everything else with random numbers."""
    block = SPREAD * torch.randn(BLOCK, generator=torch.Generator().manual_seed(0))
    for parameter in model.parameters():
        if parameter.dim() < 2:
            parameter.fill_(1.0)
            continue
        flat = parameter.view(-1)
        for start in range(0, flat.numel(), BLOCK):
            part = flat[start : start + BLOCK]
            part.copy_(block[: part.numel()])


class Trainer:
    """A model on its device with AdamW, and one row that it learns by heart."""

    def __init__(self, way: str, device: str, sizes: Mapping[str, Any]) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._model = model_of(sizes).to(device)
        self._call = CALLS[way](self._model)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, fused=True)
        generator = torch.Generator().manual_seed(1)
        self._ids = torch.randint(0, sizes["vocabulary"], (1, sizes["tokens"]), generator=generator).to(device)

    def steps(self, count: int) -> dict[str, Any]:
        """Seconds of each step, and of this process's CPU time in it; the last loss, and the most memory so far."""
        seconds: list[float] = []
        busy: list[float] = []
        loss = torch.zeros(())
        for _ in range(count):
            start, own = time.perf_counter(), time.process_time()
            loss = self._step()
            self._module.synchronize()
            seconds.append(time.perf_counter() - start)
            busy.append(time.process_time() - own)
        return {
            "steps": seconds,
            "busy": busy,
            "loss": float(loss),
            "memory": self._peak(),
            "repeated": repeated_steps() if self._device == "moai" else 0,
        }

    def _step(self) -> Tensor:
        loss: Tensor = self._call(input_ids=self._ids, labels=self._ids).loss
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()

    def _peak(self) -> int:
        """Bytes, as the device's allocator counts them; on the CPU those of the process."""
        if self._device == "cpu":
            return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return int(self._module.max_memory_allocated())


def repeated_steps() -> int:
    """Runs of programs that recordings stood for, on the one worker."""
    from moaic.runtime.controller import session

    (worker,) = session.accelerator().stats().workers
    return sum(program.repeated for program in worker.programs.values())


def is_compiling() -> bool:
    from moaic.runtime.controller import session

    return session.accelerator().is_compiling


def ours(model: nn.Module) -> Callable[..., Any]:
    return torch.compile(model, backend="moai")


def ours_without_graphs(model: nn.Module) -> Callable[..., Any]:
    return torch.compile(model, backend="moai", options={"cuda_graphs": False})


def compiled(model: nn.Module) -> Callable[..., Any]:
    return torch.compile(model)


def compiled_repeated(model: nn.Module) -> Callable[..., Any]:
    return torch.compile(model, mode="reduce-overhead")


def eager(model: nn.Module) -> Callable[..., Any]:
    return model


CALLS: Mapping[str, Callable[[nn.Module], Callable[..., Any]]] = {
    "moaic": ours,
    "moaic, own kernels": ours,
    "moaic, no graphs": ours_without_graphs,
    "torch.compile": compiled,
    "torch.compile, reduce-overhead": compiled_repeated,
    "eager": eager,
}


def answers(way: str, device: str, sizes: Mapping[str, Any], commands: TextIO) -> Iterator[dict[str, Any]]:
    """One for each line."""
    trainer: Trainer | None = None
    for line in commands:
        command, *words = line.split()
        if command == "start":
            begin = time.perf_counter()
            trainer = Trainer(way, device, sizes)
            first = {"loss": trainer.steps(1)["loss"], "first_step": time.perf_counter() - begin}
            while device == "moai" and is_compiling():
                trainer.steps(1)
            trainer.steps(WARM_UP)
            yield first
        elif trainer is not None and command == "steps":
            yield trainer.steps(int(words[0]))


@contextmanager
def private_output() -> Generator[TextIO]:
    """Where answers go; whatever else is printed goes where errors go."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1) as output:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        yield output


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("way", choices=CALLS)
    parser.add_argument("device", choices=("moai", "cuda", "cpu"))
    parser.add_argument("sizes", type=json.loads, help="those of gpu_llama.Llama, in JSON")
    args = parser.parse_args()
    with private_output() as output:
        try:
            for answer in answers(args.way, args.device, args.sizes, sys.stdin):
                output.write(json.dumps(answer) + "\n")
        except Exception as error:
            output.write(json.dumps({"error": f"{type(error).__name__}: {str(error).strip()[:400]}"}) + "\n")
            raise


if __name__ == "__main__":
    main()
