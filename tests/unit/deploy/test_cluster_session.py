"""What a command says of words that cannot be sent to a cluster."""

from __future__ import annotations

import pytest
import typer

from millrace.deploy.commands.cluster_session import with_cluster


def test_name_that_is_no_text_is_refused() -> None:
    """The shell passes any bytes on."""

    async def command(_cluster: object) -> None:
        "bad\udcff".encode()

    with pytest.raises(typer.BadParameter, match="is not a text in UTF-8"):
        with_cluster("127.0.0.1:9", command)
