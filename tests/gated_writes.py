"""Writes of large batches to a log that wait until they are told to go on."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from millrace.broker.storage.segment import LogFile
from tests.waiting import patience


class GatedWrites:
    """Of more than `size` bytes; none may be on the event loop's thread, which makes this."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
        self._began = threading.Event()
        self.may_go_on = threading.Event()
        write, loop_thread = LogFile.write, threading.get_ident()

        def waiting(file: LogFile, data: Any, position: int) -> None:
            if len(data) > size:
                assert threading.get_ident() != loop_thread
                self._began.set()
                assert self.may_go_on.wait(patience(30))
            write(file, data, position)

        monkeypatch.setattr(LogFile, "write", waiting)

    async def one_has_begun(self) -> None:
        assert await asyncio.to_thread(self._began.wait, patience(30))
