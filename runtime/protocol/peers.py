"""The workers of several hosts, as each of them knows the others: where they listen, and by which name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Where a worker listens for the others, and the name in the certificate of its host."""

    address: str
    port: int
    name: str


@dataclass(frozen=True, slots=True)
class Peers:
    """The workers of all hosts by rank, those of this host, and what proves to the others that they belong here."""

    addresses: tuple[PeerAddress, ...]
    first: int
    """The first rank of this host; its others follow."""
    count: int
    certificate: bytes
    key: bytes
    authority: bytes
    store: int = 0
    """The port of the first worker's host where process groups meet; 0 if there are none."""

    @property
    def local(self) -> range:
        """The ranks of this host."""
        return range(self.first, self.first + self.count)

    def encoded(self) -> list[Any]:
        addresses = [[each.address, each.port, each.name] for each in self.addresses]
        return [addresses, self.first, self.count, self.certificate, self.key, self.authority, self.store]

    @staticmethod
    def decoded(data: Sequence[Any]) -> Peers:
        addresses, *rest = data
        return Peers(tuple(PeerAddress(*each) for each in addresses), *rest)
