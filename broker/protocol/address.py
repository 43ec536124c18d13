"""Where a server listens, as clusters and clients name it. Pure."""

from __future__ import annotations

from typing import NamedTuple


class Address(NamedTuple):
    """Written `host:port`, an IPv6 host in brackets."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read `host:port` of a server to connect to. Raises ValueError with a line fit for a person."""
        host, colon, port = text.strip().rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        if not colon or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
            raise ValueError(f"not a server address: {text!r}, expected host:port, as in kafka1.ewr:9092")
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
