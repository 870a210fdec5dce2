"""Clusters of hosts that are network namespaces of this one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.cluster.hosts import Hosts, Network, may_make_namespaces

has_namespaces = cache(may_make_namespaces)

Cluster = Callable[..., Hosts]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Makes a cluster of hosts with so many workers each; the first host is the program's."""
    made: list[Hosts] = []

    def make(*workers: int) -> Hosts:
        network = Network(os.getpid() % 100_000, len(workers), has_namespaces())
        network.make()
        hosts = Hosts(network, workers, tmp_path)
        made.append(hosts)
        hosts.write()
        return hosts

    yield make
    for hosts in made:
        hosts.close()
        hosts.network.remove()
