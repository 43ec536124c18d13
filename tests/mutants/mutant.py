"""What a mutant is: one rule of the product taken out, as data, and what has to turn red without it.

The lists are in the modules `of_...`, together in `catalogue`. Pure, but for reading the files that a mutant
names.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_COMPILED = "@njit"


@dataclass(frozen=True, slots=True)
class Mutant:
    """`rule` stands exactly once in `file` (a path from the project's root); `instead` takes its place.

    `promise` is what the product no longer keeps then, in one sentence. `red` are tests of the normal suite,
    as pytest names them, of which at least one must fail by an assertion.
    """

    name: str
    promise: str
    file: str
    rule: str
    instead: str
    red: tuple[str, ...]

    def staleness(self, project: Path) -> str:
        """Why the mutant no longer fits the source below `project`; "" while it does."""
        path = project / self.file
        if not path.is_file():
            return f"there is no {self.file}"
        text = path.read_text(encoding="utf-8")
        count = text.count(self.rule)
        if count != 1:
            return f"its rule stands {count} times in {self.file}, not once: {first_line(self.rule)}"
        if self.rule == self.instead:
            return "it changes nothing"
        missing = [test for test in self.red if not _is_there(test, project)]
        if missing:
            return f"there is no test {missing[0]}"
        return "" if self.red else "it names no test"

    def applied_to(self, text: str) -> str:
        return text.replace(self.rule, self.instead)


def is_compiled(text: str) -> bool:
    """Whether a file holds kernels that numba compiles."""
    return _COMPILED in text


def first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _is_there(test: str, project: Path) -> bool:
    """Whether the file of a test is there, and its function where one is named."""
    file, _, name = test.partition("::")
    path = project / file
    return path.is_file() and (not name or f"def {name.partition('[')[0]}(" in path.read_text("utf-8"))
