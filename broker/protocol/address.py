"""Where a server is, as people write it: `host:port`. Pure.

Whatever names a server (config files, options, listeners, client settings) is read here, so that the same
text means the same everywhere, and a wrong one is told in the same words.
"""

from __future__ import annotations

import re
from typing import NamedTuple

ADDRESS_EXPECTED = "host:port, such as 127.0.0.1:9092 or [::1]:9092"
CONNECT_EXPECTED = "host:port[,host:port...][/chroot]"
"""ZooKeeper's connect string"""

ALL_IPV4, ALL_IPV6 = "0.0.0.0", "::"
LARGEST_PORT = 65_535

# Without its brackets an IPv6 address and a port cannot be told apart.
_WRITTEN = re.compile(r"(?:\[([0-9A-Fa-f.]*:[0-9A-Fa-f:.]*(?:%[\w.-]+)?)\]|([^\s:/,\[\]]*)):([0-9]{1,5})")


class Address(NamedTuple):
    """`host` is a name or an IP address, an IPv6 one without its brackets."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read `host:port` to connect to. Raises ValueError, whose text says what was expected."""
        address = _read(text)
        if not address.host or not address.port:
            raise ValueError(ADDRESS_EXPECTED)
        return address

    @classmethod
    def parse_listener(cls, text: str) -> Address:
        """Read `host:port` to listen on: port 0 is any free one, and without a host (`:9092`) it is all
        interfaces. Raises ValueError, whose text says what was expected."""
        address = _read(text)
        return address if address.host else cls(ALL_IPV4, address.port)

    @property
    def is_everywhere(self) -> bool:
        """It names no interface, but all of a machine's: nothing that others could connect to."""
        return self.host in (ALL_IPV4, ALL_IPV6)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_servers(text: str) -> list[Address]:
    """Read `host:port,host:port`, servers to connect to. Raises ValueError, whose text says what was
    expected."""
    return [Address.parse(each) for each in text.split(",")]


def _read(text: str) -> Address:
    found = _WRITTEN.fullmatch(text.strip())
    if found is None or int(found[3]) > LARGEST_PORT:
        raise ValueError(ADDRESS_EXPECTED)
    return Address(found[1] or found[2], int(found[3]))
