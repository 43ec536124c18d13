"""The mirror's rules about which topics are carried, and under whose name, each taken out."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

UNIT = "tests/unit/mirror"

OF_MIRROR_ROUTES = (
    Mutant(
        name="second-name-of-a-cluster-let-in",
        promise="Of two sources that are one cluster one is carried, or every record would be there twice.",
        file="mirror/topics/route_guard.py",
        rule="        if self.second_names.refuses(cluster.name, topics, names, told):\n",
        instead="        if not names and self.second_names.refuses(cluster.name, topics, names, told):\n",
        red=(
            f"{UNIT}/test_second_names.py::test_nothing_of_a_second_name_is_let_in_while_the_first_is_there",
        ),
    ),
    Mutant(
        name="second-name-of-a-cluster-preferred",
        promise="Of two sources that are one cluster the one that is carried already stays.",
        file="mirror/topics/second_names.py",
        rule="                since.get(name, sys.maxsize),\n",
        instead="",
        red=(
            f"{UNIT}/test_second_names.py"
            "::test_source_that_is_carried_stays_and_otherwise_the_one_that_was_seen_first",
        ),
    ),
    Mutant(
        name="second-name-of-a-cluster-reloaded",
        promise="A reload takes no source that is a cluster which the mirror has under another name.",
        file="mirror/control/operators.py",
        rule="            if finding.where in added:\n",
        instead="            if finding.where not in clusters:\n",
        red=(f"{UNIT}/test_second_names.py::test_reload_takes_no_second_name_for_a_cluster_that_is_there",),
    ),
    Mutant(
        name="topics-of-two-sources-mixed-by-a-dot",
        promise="Topics of two sources are not mixed where their names are to tell them apart.",
        file="mirror/topics/name_clashes.py",
        rule="        given_up = {**yielding(names, since), **(taken or {})}\n",
        instead="        given_up = yielding(names, since)\n",
        red=(f"{UNIT}/test_name_clashes.py::test_names_that_are_to_say_the_source_are_not_shared_by_two",),
    ),
    Mutant(
        name="loop-under-another-name-let-in",
        promise="Records that come back to a cluster under another name go round, and are not let in.",
        file="mirror/topics/routes.py",
        rule="    return None if found is None else Loop(",
        instead="    return None if not found or found[0][0].source_topic != route.target_topic else Loop(",
        red=(f"{UNIT}/test_routes.py::test_prefixed_names_break_a_loop_only_while_the_prefixed_topic_stays",),
    ),
    Mutant(
        name="copy-let-in-by-an-unknown-mirror",
        promise="A topic that is named as a copy of the target's own, and that nobody tells of, is refused.",
        file="mirror/topics/route_guard.py",
        rule="            if original in there\n",
        instead="            if original in there and original == topic\n",
        red=(
            f"{UNIT}/test_route_guard.py"
            "::test_copy_of_the_targets_topic_is_refused_by_its_name_where_nobody_tells_who_writes_it",
        ),
    ),
    Mutant(
        name="copy-unsaid-by-check",
        promise="`check` tells of a topic that has the name of a copy of the target's own.",
        file="mirror/checks/check.py",
        rule="            if original in target.topics and before is None",
        instead="            if original == each.topic and before is None",
        red=(f"{UNIT}/test_check_loops.py::test_copy_of_the_targets_topic_is_told_by_its_name",),
    ),
)
