"""Each host compiles the functions that its workers call, and each of them once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.conftest import Cluster

PROGRAM = str(Path(__file__).with_name("compile_functions.py"))

WARM_UP = 1
"""The function with which a host prepares the compiler; it is not built."""


def compiled(cluster: Cluster, shares: tuple[int, ...], mesh: str, when: str) -> list[tuple[int, int]]:
    """How many functions the cache of each host has after the program, and how many libraries they were built as."""
    hosts = cluster(*shares)
    caches = [hosts.folder / f"compiled{host}" for host in range(len(shares))]
    for host, cache in list(enumerate(caches))[1:]:
        hosts.start_agent(host, TORCHINDUCTOR_CACHE_DIR=str(cache))
    how = "1" if when == "background" else "wait"
    code, out = hosts.finish([PROGRAM, mesh, when], TORCHINDUCTOR_CACHE_DIR=str(caches[0]), MOAI_COMPILE=how)
    assert code == 0, out
    assert hosts.end() == [0] * (len(shares) - 1)
    return [(functions(cache), len(list(cache.rglob("*.so")))) for cache in caches]


def functions(cache: Path) -> int:
    return len(list(cache.glob("fxgraph/*/*"))) - WARM_UP


@pytest.mark.parametrize("when", [pytest.param("background", marks=pytest.mark.exact), "beforehand"])
def test_a_host_divides_the_functions_among_its_workers(cluster: Cluster, when: str) -> None:
    # A share is built as one library: another one would be a function that was compiled again.
    assert compiled(cluster, (2, 1), "dp=3", when) == [(2, 2), (2, 1)]


def test_a_host_compiles_the_functions_of_its_stages_alone(cluster: Cluster) -> None:
    assert compiled(cluster, (1, 1), "pp=2", "background") == [(1, 1), (1, 1)]


def test_a_host_without_a_compiler_is_named(cluster: Cluster) -> None:
    hosts = cluster(1, 1)
    hosts.start_agent(1, CXX="/bin/false", TORCHINDUCTOR_CACHE_DIR=str(hosts.folder / "compiled"))
    code, out = hosts.finish([PROGRAM, "dp=2", "background"], MOAI_COMPILE="1", MOAI_LOG="info")
    assert code == 0, out
    assert out.count("functions could not be compiled on node1: ") == 1, out
