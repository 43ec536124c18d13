"""`meta.properties` in every data folder: which broker of which cluster the data belongs to.

A broker that is started over another cluster's data (a mistyped ZooKeeper path, an exchanged folder) would
take every partition for a deleted one. It refuses to start instead. The file is Apache Kafka's:

    version=0
    broker.id=1
    cluster.id=8gqv4J8wQkyhpT0GfLZ0Ng
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from millrace.broker.errors import ConfigError, DataFolderNotWritable
from millrace.broker.storage.checkpoints import replace_file

FILE_NAME = "meta.properties"


def check_identity(folders: Iterable[Path], broker_id: int, cluster_id: str) -> None:
    """Compare what the folders say with what this broker is; mark the new ones.

    Raises ConfigError, DataFolderNotWritable.
    """
    mine = {"broker.id": str(broker_id), "cluster.id": cluster_id}
    for folder in folders:
        path = folder / FILE_NAME
        try:
            found = _read(path)
            for key, value in mine.items():
                if found.get(key, value) != value:
                    raise ConfigError(
                        str(path),
                        f"{key}={found[key]}",
                        f"{key}={value}, which this broker is; name this broker's own data folder, or the "
                        "ZooKeeper path of the data's cluster",
                    )
            if found.keys() < mine.keys() | {"version"}:
                lines = ["version=0", *(f"{key}={value}" for key, value in mine.items()), ""]
                replace_file(path, "\n".join(lines).encode(), sync=True)
        except OSError as error:
            raise DataFolderNotWritable(f"{path}: {error.strerror}; make the folder writable") from None


def _read(path: Path) -> dict[str, str]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))
    return {key.strip(): value.strip() for key, value in pairs}
