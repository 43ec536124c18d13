"""A command on a terminal of its own: what a person would see on a screen of so many columns and rows.

The screen does what xterm and the Linux console do, as far as our commands ask for it; anything else that
they send is an error of the test.
"""

from __future__ import annotations

import codecs
import errno
import fcntl
import os
import pty
import re
import signal
import struct
import sys
import termios
from collections.abc import Callable, Sequence
from pathlib import Path

from millrace.deploy.processes import spawn
from tests.servers import PROGRAM
from tests.waiting import patience, source_of, until

_PIECE = re.compile(r"\x1b\[(?P<numbers>[0-9;]*)(?P<letter>[A-Za-z])|(?P<plain>[^\x1b])", re.DOTALL)


class Screen:
    """Rows of characters. `scrolled` are those that left it at the top, `wrapped` counts lines that were too
    long for it; `is_whole`: what was written last was the end of a look of `--watch`."""

    def __init__(self, columns: int, rows: int) -> None:
        self.columns = columns
        self.scrolled: list[str] = []
        self.wrapped = 0
        self.is_whole = False
        self._cells = [[" "] * columns for _ in range(rows)]
        self._row = self._column = 0
        self._is_full = False  # the last column was written to: the next character begins a new row

    @property
    def lines(self) -> list[str]:
        """What is on it, without what is empty at the ends of rows and below the last one."""
        found = ["".join(cells).rstrip() for cells in self._cells]
        while found and not found[-1]:
            found.pop()
        return found

    def show(self, text: str) -> str:
        """Takes what a program has written; the end that is not complete yet comes back."""
        at = 0
        while at < len(text):
            piece = _PIECE.match(text, at)
            if piece is None:
                assert len(text) - at < 16, f"not understood: {text[at : at + 40]!r}"
                break
            if piece["plain"] is not None:
                self._write(piece["plain"])
            else:
                self._obey(piece["letter"], piece["numbers"])
            self.is_whole = piece["letter"] == "J"
            at = piece.end()
        return text[at:]

    def _write(self, character: str) -> None:
        if character == "\r":
            self._column, self._is_full = 0, False
        elif character == "\n":
            self._is_full = False
            self._down()
        else:
            assert character.isprintable(), f"not understood: {character!r}"
            if self._is_full:
                self.wrapped += 1
                self._column, self._is_full = 0, False
                self._down()
            self._cells[self._row][self._column] = character
            self._is_full = self._column == self.columns - 1
            self._column = min(self._column + 1, self.columns - 1)

    def _down(self) -> None:
        if self._row < len(self._cells) - 1:
            self._row += 1
            return
        self.scrolled.append("".join(self._cells.pop(0)).rstrip())
        self._cells.append([" "] * self.columns)

    def _obey(self, letter: str, numbers: str) -> None:
        if letter == "m":
            return  # a colour
        assert numbers == "" and letter in "HKJ", f"not understood: ESC [ {numbers}{letter}"
        if letter == "H":
            self._row = self._column = 0
            self._is_full = False
            return
        # From the cursor on, which a full row leaves on its last character.
        self._cells[self._row][self._column :] = [" "] * (self.columns - self._column)
        if letter == "J":
            for number in range(self._row + 1, len(self._cells)):
                self._cells[number] = [" "] * self.columns


class Terminal:
    """`millrace …` on a terminal, as a process of its own, which `with` ends. What it says on standard error
    goes to `log_path`."""

    def __init__(self, words: Sequence[str], log: Path, columns: int = 80, rows: int = 24) -> None:
        self.log_path = log
        self.screen = Screen(columns, rows)
        self._rest = ""
        self._decode = codecs.getincrementaldecoder("utf-8")().decode
        self._ours, theirs = pty.openpty()
        os.set_blocking(self._ours, False)
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        try:
            self._process = spawn(
                [sys.executable, *PROGRAM, *words],
                log=log,
                stdout=theirs,
                environment={"COLUMNS": "", "LINES": "", "TERM": "xterm"},  # not those of who runs the tests
                die_with_parent=True,
            )
        finally:
            os.close(theirs)

    @property
    def lines(self) -> list[str]:
        """What is on the screen now."""
        while data := self._read():
            self._rest = self.screen.show(self._rest + self._decode(data))
        return self.screen.lines

    def look(self, shows: Callable[[list[str]], bool]) -> list[str]:
        """What `--watch` shows, once it does."""

        def seen() -> list[str] | None:
            lines = self.lines
            return lines if self.screen.is_whole and shows(lines) else None

        found = until(seen, source_of(shows), logs_of=[self])
        assert found is not None
        return found

    def _read(self) -> bytes:
        try:
            return os.read(self._ours, 1 << 16)
        except BlockingIOError:
            return b""
        except OSError as error:
            if error.errno == errno.EIO:  # the other side is closed: so says Linux
                return b""
            raise

    def ended(self) -> int:
        """The exit status, once it has ended of itself."""
        until(lambda: self.lines is not None and self._process.poll() is not None, logs_of=[self])
        assert self.lines is not None
        return self._process.wait()

    def interrupt(self) -> int:
        """As Ctrl-C does; the exit status."""
        self._process.send_signal(signal.SIGINT)
        return self.ended()

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(patience())
        os.close(self._ours)
