"""What a command says of words that cannot be sent to a cluster, and of a file of client properties."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from millrace.deploy.commands.cluster_session import with_cluster


def test_name_that_is_no_text_is_refused() -> None:
    """The shell passes any bytes on."""

    async def command(_cluster: object) -> None:
        "bad\udcff".encode()

    with pytest.raises(typer.BadParameter, match="is not a text in UTF-8"):
        with_cluster("127.0.0.1:9", command)


def test_mistyped_properties_are_a_warning_and_not_a_part_of_the_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def command(_cluster: object) -> None:
        print("[]")

    path = tmp_path / "client.properties"
    path.write_text("securty.protocol=SSL\n")
    with_cluster("127.0.0.1:9", command, path)
    found = capsys.readouterr()
    assert found.out == "[]\n"
    assert found.err == (
        "millrace: client.properties: passed over, as no client has such a setting: "
        "securty.protocol (did you mean security.protocol?)\n"
    )
