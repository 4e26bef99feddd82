"""A host and a port, as users write them."""

from dataclasses import dataclass

from coterie.errors import CoterieError


@dataclass(frozen=True)
class Address:
    """Where a server listens. Port 0 takes any free port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, *, option: str) -> "Address":
        """``host:port`` or ``[IPv6]:port``. Raises ``CoterieError``, naming the ``option``, for anything else."""
        host, colon, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not (colon and host and port.isascii() and port.isdigit() and int(port) <= 65535):
            raise CoterieError(f"Expected {option} as host:port, such as 127.0.0.1:9092, found {text!r}")
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
