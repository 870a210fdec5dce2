"""Candidates that differ in one decision: where a faster one fits, those that would save memory are not needed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from moaic.passes.config import Config
from moaic.planner.stage_speeds import Speeds


class Relatives:
    """Candidates that differ in one decision."""

    def __init__(self, speeds: Speeds | None = None) -> None:
        self.speeds = speeds
        """Of workers that are not equally fast."""
        self.known: set[Config] = set()
        self.values: dict[str, list[int]] = {"micro_batches": [], "loss_chunks": []}
        self._faster: dict[Config, list[Config]] = {}

    def add(self, configs: Iterable[Config]) -> None:
        """More candidates: all of those on some meshes."""
        self.known |= {*configs}
        self.values = {name: sorted({getattr(config, name) for config in self.known}) for name in self.values}

    def faster(self, config: Config) -> list[Config]:
        """The faster relatives: saved activations, gathered keys, shares by speed, fewer micro-batches or chunks.

        A candidate is worth compiling only if all of these are too large. A pipeline keeps its micro-batches.
        """
        if config not in self._faster:
            others = [replace(config, recompute="saved"), replace(config, gather_keys=True)]
            if self.speeds is not None:
                others.append(replace(config, stage_shares=self.speeds.shares(config)[0]))
            found = [each for each in others if each != config and each in self.known]
            whole = self._next(config, "micro_batches") if config.pp == 1 else None
            more = (whole, self._next(config, "loss_chunks"))
            self._faster[config] = [*found, *(each for each in more if each is not None)]
        return self._faster[config]

    def with_more_parts(self, config: Config) -> Iterator[Config]:
        """The relatives with more micro-batches."""
        more = (replace(config, micro_batches=n) for n in self.values["micro_batches"] if n > config.micro_batches)
        return (each for each in more if each in self.known)

    def _next(self, config: Config, name: str) -> Config | None:
        """The relative with the next smaller value of `name`."""
        fewer = (value for value in reversed(self.values[name]) if value < getattr(config, name))
        return next((each for value in fewer if (each := replace(config, **{name: value})) in self.known), None)
