"""The functions of a program are divided among the ranks of each host that call them."""

from __future__ import annotations

import pytest

from moaic.passes.config import Config
from moaic.runtime.worker.compile_shares import called_functions, host_shares, shares
from tests.runtime.worker.test_stream_order import CASES, program

PIPELINE = Config(dp=2, tp=2, pp=2, micro_batches=2)


@pytest.mark.parametrize(("model", "config"), CASES, ids=str)
def test_one_host_divides_all_functions_among_all_ranks(model: str, config: Config) -> None:
    module = program(model, config)
    functions, ranks = called_functions(module), module.mesh.ranks
    everywhere = dict(enumerate(shares(functions, ranks)))
    assert host_shares(module, functions, range(ranks)) == everywhere
    assert host_shares(module, functions, range(ranks + 2)) == everywhere


def names(model: str, config: Config, local: range) -> list[str]:
    """What a host's ranks compile, of all their shares."""
    module = program(model, config)
    made = host_shares(module, called_functions(module), local)
    assert list(made) == list(local)
    return sorted(name for share in made.values() for name in share)


def test_replicas_on_two_hosts_compile_all_functions_on_each() -> None:
    config = Config(dp=2, micro_batches=2, distribute_param="use")
    both = sorted(called_functions(program("llama", config)))
    assert len(both) > 1
    assert [names("llama", config, range(rank, rank + 1)) for rank in range(2)] == [both, both]


def test_stages_on_two_hosts_compile_their_own_functions() -> None:
    ranks, every = range(8), sorted(called_functions(program("llama", PIPELINE)))
    first, second = (names("llama", PIPELINE, stage) for stage in (ranks[:4], ranks[4:]))
    assert names("llama", PIPELINE, ranks) == every == sorted({*first, *second})
    assert len(first) < len(every) > len(second)
    # The boundary of hosts need not be that of stages.
    assert names("llama", PIPELINE, ranks[:6]) == every
    assert names("llama", PIPELINE, ranks[6:]) == second


def test_workers_without_a_part_compile_nothing() -> None:
    module = program("llama", Config(tp=2))
    assert host_shares(module, called_functions(module), range(2, 4)) == {}
