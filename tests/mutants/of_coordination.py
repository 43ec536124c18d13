"""The broker's rules about what the cluster is and who leads in it, each taken out."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

COORDINATION = "tests/unit/coordination"

OF_COORDINATION = (
    Mutant(
        name="election-outside-in-sync-set",
        promise="Only a member of the in-sync set is elected, unless the topic allows otherwise.",
        file="broker/coordination/controller.py",
        rule="    in_sync = tuple(broker for broker in state.isr if broker in staying)\n",
        instead="    in_sync = tuple(staying)\n",
        red=(
            "tests/unit/coordination/test_controller.py::test_election_follows_the_table",
            "tests/unit/coordination/test_controller.py"
            "::test_unclean_election_only_where_allowed_and_only_when_no_member_lives",
        ),
    ),
    Mutant(
        name="restarted-broker-stays-in-sync",
        promise="A broker that ended uncleanly leaves each in-sync set that has another member.",
        file="broker/coordination/broker_registry.py",
        rule="    if was_clean or not others:\n",
        instead="    if was_clean or others:\n",
        red=("tests/unit/coordination/test_restarted_broker.py",),
    ),
    Mutant(
        name="restarted-broker-taken-in-for-what-it-had",
        promise="A broker that ended uncleanly is not taken into an in-sync set for what it had before.",
        file="broker/coordination/broker_registry.py",
        rule="        return state if may_be_taken_in and not was_clean else None\n",
        instead="        return None\n",
        red=(
            "tests/unit/coordination/test_late_expansion.py"
            "::test_a_follower_that_lost_power_is_not_taken_into_the_in_sync_set_for_what_it_had_before",
        ),
    ),
    Mutant(
        name="replica-taken-in-after-its-move-was-called-off",
        promise="A replica that a partition loses is not taken into the in-sync set any more.",
        file="broker/coordination/reassignment.py",
        rule="        goes = not set(partition.replicas) <= set(replicas)\n",
        instead="        goes = False\n",
        red=(
            "tests/unit/coordination/test_late_expansion.py"
            "::test_a_replica_whose_move_was_called_off_is_not_taken_into_the_in_sync_set",
        ),
    ),
    Mutant(
        name="unreadable-topic-keeps-its-in-sync-sets",
        promise="A restarted broker leaves in-sync sets of topics that are not in its picture, too.",
        file="broker/coordination/broker_registry.py",
        rule="        changed += await _restart_unread(session, cache, broker_id, name, was_clean)\n",
        instead="        continue\n",
        red=(
            "tests/unit/coordination/test_restarted_broker.py"
            "::test_restarted_broker_leaves_the_in_sync_sets_of_a_topic_that_nobody_can_read",
        ),
    ),
    Mutant(
        name="unreadable-settings-are-none",
        promise="A topic whose settings cannot be read is not served by the defaults, which would delete.",
        file="broker/coordination/paths.py",
        rule="        return {UNREADABLE: ",
        instead="        return {} if error else {UNREADABLE: ",
        red=(
            "tests/unit/coordination/test_cluster_watcher.py"
            "::test_a_topic_whose_settings_cannot_be_read_is_shown_with_a_mark_until_they_can",
        ),
    ),
    Mutant(
        name="deleted-topic-forgotten-later",
        promise="What groups committed in a deleted topic is forgotten before another of its name is shown.",
        file="broker/coordination/cluster_watcher.py",
        rule="            self._topics_gone(gone)\n",
        instead="            asyncio.get_running_loop().call_later(1, self._topics_gone, gone)\n",
        red=(
            "tests/unit/coordination/test_cluster_watcher.py"
            "::test_a_topic_has_gone_before_another_of_its_name_is_shown",
        ),
    ),
    Mutant(
        name="half-a-round-told",
        promise="Nobody hears of a reading of the cluster that was interrupted.",
        file="broker/coordination/cluster_watcher.py",
        rule="                raise interrupted\n",
        instead="                self._tell()\n                raise interrupted\n",
        red=(
            "tests/unit/coordination/test_cluster_watcher.py"
            "::test_of_a_round_that_was_interrupted_nothing_is_told",
        ),
    ),
    Mutant(
        name="unreadable-state-written-over",
        promise="A partition's state that nobody can read is left as it is.",
        file="broker/coordination/controller.py",
        rule="if partition.is_unreadable:\n                continue\n            if not picture.offline",
        instead="if not picture.offline",
        red=(
            "tests/unit/coordination/test_controller.py"
            "::test_a_state_that_cannot_be_read_is_neither_written_over_nor_counted",
            "tests/unit/coordination/test_controllers_own_writes.py"
            "::test_a_state_that_cannot_be_read_is_left_as_it_is",
        ),
    ),
    Mutant(
        name="one-state-holds-up-all",
        promise="A state that is not as the controller read it keeps no other partition without a leader.",
        file="broker/coordination/controller_runner.py",
        rule="_OVERTAKEN = (VersionConflict, NodeExists, NodeMissing)",
        instead="_OVERTAKEN = (VersionConflict,)",
        red=(
            "tests/unit/coordination/test_controllers_own_writes.py"
            "::test_a_state_that_is_there_unknown_or_gone_holds_up_no_other",
        ),
    ),
    Mutant(
        name="topic-before-its-settings",
        promise="A topic is never there without its settings, whatever happens to who makes it.",
        file="broker/coordination/controller_client.py",
        rule="                await self._session.commit(created)\n",
        instead="                await self._session.commit(created[:1])\n"
        "                await self._session.commit(created[1:])\n",
        red=(f"{COORDINATION}/test_topics_made_anew.py::test_topic_and_settings_come_in_one_transaction",),
    ),
    Mutant(
        name="transactions-of-any-size",
        promise="What grows with a topic's partitions is cut into transactions that ZooKeeper takes.",
        file="broker/coordination/transactions.py",
        rule="(size + more > MOST_BYTES or ",
        instead="(",
        red=(
            f"{COORDINATION}/test_transactions.py::test_runs_are_full_and_in_order",
            f"{COORDINATION}/test_transactions.py::test_what_stands_beside_each_run_takes_its_room",
        ),
    ),
    Mutant(
        name="another-topic-of-that-name-removed",
        promise="A controller removes the topic that it looked at, and none that came in its place.",
        file="broker/coordination/controller_runner.py",
        rule="Delete(topic_path, found.version)",
        instead="Delete(topic_path)",
        red=(
            f"{COORDINATION}/test_topics_made_anew.py"
            "::test_a_topic_that_changed_since_the_controller_looked_is_not_removed",
        ),
    ),
    Mutant(
        name="controller-that-was-replaced-writes-on",
        promise="Who is no controller any more writes nothing as one, though it has not heard of it.",
        file="broker/coordination/controller_runner.py",
        rule="[Check(paths.CONTROLLER_EPOCH, self._epoch_version), *operations]",
        instead="operations",
        red=(f"{COORDINATION}/test_controllers_own_writes.py::test_check_of_the_office_comes_first",),
    ),
    Mutant(
        name="office-of-nobody",
        promise="An election whose answer was lost leaves no office that nobody holds.",
        file="broker/coordination/controller_runner.py",
        rule="        if node.owner == self._session.id:\n",
        instead="        if node.owner == 0:\n",
        red=(
            f"{COORDINATION}/test_controller_runner.py"
            "::test_an_office_that_its_own_broker_does_not_know_of_is_given_back",
        ),
    ),
    Mutant(
        name="setting-of-one-broker-overruled",
        promise="A setting of one broker wins over that of all, and both over its file.",
        file="broker/coordination/dynamic_configs.py",
        rule="        for level in levels\n",
        instead="        for level in reversed([*levels])\n",
        red=(
            f"{COORDINATION}/test_dynamic_configs.py"
            "::test_one_brokers_setting_wins_over_that_of_all_and_that_over_the_file",
        ),
    ),
    Mutant(
        name="offline-replicas-told-all-or-none",
        promise="Of offline replicas that no znode can name all of, as many are told as fit.",
        file="broker/coordination/offline_replicas.py",
        rule="told = fitting(wanted)",
        instead="told = wanted",
        red=(
            "tests/unit/coordination/test_offline_replicas.py"
            "::test_of_more_than_a_znode_takes_a_part_is_told_and_the_rest_is_named_once",
        ),
    ),
)
