"""Rules that protect an operator's data and cluster, each taken out: the sandbox's and the controller's."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

OF_OPERATION = (
    Mutant(
        name="any-folder-deleted",
        promise="`local down --delete` removes a sandbox's folder, and no other.",
        file="deploy/local/sandbox.py",
        rule="        if not is_sandbox(self.folder):\n            raise FatalError(",
        instead="        if not self.folder.exists():\n            raise FatalError(",
        red=("tests/unit/deploy/test_sandbox.py::test_folder_that_is_not_a_sandboxs_is_never_deleted",),
    ),
    Mutant(
        name="time-before-1970-taken",
        promise="A time before 1970 is refused: -1 would be the end, and the history skipped in silence.",
        file="broker/times.py",
        rule="    if milliseconds < 0:",
        instead="    if milliseconds is None:",
        red=(
            "tests/unit/test_times.py"
            "::test_what_is_no_time_says_what_was_expected_and_what_a_number_would_have_been",
        ),
    ),
    Mutant(
        name="any-number-taken-for-milliseconds",
        promise="-1, seconds since 1970 and a date without dashes are not where a mirror starts.",
        file="broker/times.py",
        rule="        if value == 0 or _FIRST_MS <= value <= _LAST_MS:",
        instead="        if value <= _LAST_MS:",
        red=(
            "tests/unit/mirror/test_config.py::test_wrong_setting_is_named_with_path_value_and_expectation",
        ),
    ),
    Mutant(
        name="mistyped-offsets-passed-over",
        promise="Of offsets that were named for deletion, one that is not there is told, and none deleted.",
        file="deploy/commands/groups.py",
        rule="    if missing:\n        if not committed",
        instead="    if not going:\n        if not committed",
        red=(
            "tests/unit/deploy/test_groups_delete.py"
            "::test_what_has_no_offsets_is_named_and_then_none_is_deleted",
        ),
    ),
)
