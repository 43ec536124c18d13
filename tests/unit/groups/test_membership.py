"""The rules of one group, situation by situation."""

from __future__ import annotations

import pytest
from kio.schema.errors import ErrorCode

from millrace.broker.groups.config import GroupConfig
from millrace.broker.groups.membership import NEW_MEMBER_JOIN_TIMEOUT_MS, Group
from millrace.broker.groups.values import GroupState, Moment, Protocol

ROUND_ROBIN = (Protocol("roundrobin", b"rr"),)


def stable_pair(driver):
    """Two members in generation 2 of a stable group."""
    first = driver.join()
    driver.settle(first)
    one = driver.joins[first].member_id
    second = driver.join()
    again = driver.join(one)
    two = driver.settle(again, second)[1]
    assert driver.group.state is GroupState.STABLE
    assert driver.group.generation == 2
    return one, two


def test_first_member_leads_and_gets_what_it_assigns(new_driver):
    driver = new_driver()
    ticket = driver.join()
    result = driver.joins[ticket]
    assert (result.error, result.generation, result.leader) == (ErrorCode.none, 1, result.member_id)
    assert [member.metadata for member in result.members] == [b"rr"]
    synced = driver.sync(result.member_id, 1, {result.member_id: b"all of it"})
    assert driver.syncs[synced].assignment == b"all of it"
    assert driver.group.state is GroupState.STABLE


def test_initial_delay_waits_for_more_members_and_is_extended_by_them(new_driver):
    driver = new_driver(initial_rebalance_delay_ms=3_000)
    first = driver.join()
    driver.advance(2_000)
    second = driver.join()
    driver.advance(1_000)
    assert first not in driver.joins, "a member that came meanwhile extends the delay"
    driver.advance(3_000)
    assert driver.joins[first].generation == driver.joins[second].generation == 1


def test_initial_delay_ends_with_the_rebalance_timeout_however_many_come(new_driver):
    driver = new_driver(initial_rebalance_delay_ms=3_000)
    first = driver.join(rebalance_timeout_ms=7_000)
    for _ in range(7):
        driver.advance(999)
        driver.join(rebalance_timeout_ms=7_000)
    driver.advance(7)
    assert driver.joins[first].generation == 1


def test_who_comes_after_the_only_member_left_brings_any_protocol(new_driver):
    driver = new_driver(initial_rebalance_delay_ms=3_000)
    driver.join()
    driver.leave("m1")
    ticket = driver.join(protocols=(Protocol("range", b"r"),), protocol_type="connect")
    driver.advance(6_000)
    assert driver.joins[ticket].error is ErrorCode.none
    assert (driver.group.protocol_type, driver.joins[ticket].protocol_name) == ("connect", "range")


def test_join_without_id_from_version_4_is_given_an_id_first(new_driver):
    driver = new_driver()
    refused = driver.joins[driver.join(known_id_required=True)]
    assert refused.error is ErrorCode.member_id_required
    joined = driver.joins[driver.join(refused.member_id, known_id_required=True)]
    assert (joined.error, joined.member_id) == (ErrorCode.none, refused.member_id)


def test_id_given_out_lapses_after_the_session_timeout(new_driver):
    driver = new_driver()
    member_id = driver.joins[driver.join(known_id_required=True)].member_id
    driver.advance(10_001)
    assert driver.joins[driver.join(member_id)].error is ErrorCode.unknown_member_id


def test_id_given_out_holds_up_the_rebalance_until_it_joins(new_driver):
    driver = new_driver()
    one, two = stable_pair(driver)
    pending = driver.joins[driver.join(known_id_required=True)].member_id
    driver.leave(two)
    rejoin = driver.join(one)
    assert rejoin not in driver.joins
    driver.join(pending)
    assert driver.joins[rejoin].generation == 3


def test_second_member_starts_a_rebalance_that_the_first_hears_of_by_heartbeat(new_driver):
    driver = new_driver()
    first = driver.join()
    (one,) = driver.settle(first)
    assert driver.heartbeat(one, 1) is ErrorCode.none
    second = driver.join()
    assert driver.heartbeat(one, 1) is ErrorCode.rebalance_in_progress
    again = driver.join(one)
    assert driver.joins[again].generation == driver.joins[second].generation == 2
    assert len(driver.joins[again].members) == 2
    assert driver.joins[second].members == ()


class UnwalkedMembers(dict):
    """Counts the walks over all of them."""

    walks = 0

    def values(self):
        self.walks += 1
        return super().values()

    def __iter__(self):
        self.walks += 1
        return super().__iter__()


def test_a_join_costs_the_same_in_a_group_of_thousands(new_driver):
    """Walks over the members at each join stood the loop still for seconds while a large group assembled."""
    driver = new_driver(initial_rebalance_delay_ms=3_000)
    driver.join()
    driver.group.roster.members = members = UnwalkedMembers(driver.group.roster.members)
    pending = [driver.joins[driver.join(known_id_required=True)].member_id for _ in range(5)]
    waiting = [driver.join(member_id) for member_id in pending]
    assert driver.heartbeat(pending[0], 0) is ErrorCode.rebalance_in_progress
    assert members.walks == 0
    driver.advance(6_000)
    assert driver.joins[waiting[-1]].generation == 1


def test_member_that_does_not_rejoin_in_time_is_removed(new_driver):
    driver = new_driver()
    one, _two = stable_pair(driver)
    newcomer = driver.join()
    for _ in range(6):
        driver.advance(5_000)
        driver.heartbeat(one, 2)
    assert one not in driver.group.roster.members
    assert driver.joins[newcomer].leader == driver.joins[newcomer].member_id


def test_silent_member_expires_and_the_others_rebalance(new_driver):
    driver = new_driver()
    one, two = stable_pair(driver)
    for _ in range(3):
        driver.advance(4_000)
        driver.heartbeat(one, 2)
    assert two not in driver.group.roster.members
    assert driver.heartbeat(two, 2) is ErrorCode.unknown_member_id
    assert driver.heartbeat(one, 2) is ErrorCode.rebalance_in_progress


def test_member_that_waits_for_the_others_does_not_expire(new_driver):
    driver = new_driver()
    one, two = stable_pair(driver)
    waiting = driver.join(one, protocols=(Protocol("roundrobin", b"changed"),))
    for _ in range(5):
        driver.advance(5_900)
        assert driver.heartbeat(two, 2) is ErrorCode.rebalance_in_progress
    assert waiting not in driver.joins
    driver.advance(500)
    assert driver.joins[waiting].error is ErrorCode.none
    assert two not in driver.group.roster.members


def test_new_member_nobody_hears_of_again_is_forgotten_in_the_end(new_driver):
    driver = new_driver(initial_rebalance_delay_ms=2 * NEW_MEMBER_JOIN_TIMEOUT_MS)
    ticket = driver.join(rebalance_timeout_ms=4 * NEW_MEMBER_JOIN_TIMEOUT_MS)
    driver.advance(NEW_MEMBER_JOIN_TIMEOUT_MS)
    assert driver.joins[ticket].error is ErrorCode.unknown_member_id
    assert not len(driver.group.roster)


def test_last_member_leaving_empties_the_group_and_saves_that(new_driver):
    driver = new_driver()
    (one,) = driver.settle(driver.join())
    assert driver.leave(one) is ErrorCode.none
    assert driver.group.state is GroupState.EMPTY
    assert (driver.writes[-1].snapshot.generation, driver.writes[-1].snapshot.members) == (2, ())
    assert driver.leave(one) is ErrorCode.unknown_member_id


def test_leaving_member_that_waits_is_answered(new_driver):
    driver = new_driver()
    one, _ = stable_pair(driver)
    waiting = driver.join(one, protocols=(Protocol("roundrobin", b"changed"),))
    driver.leave(one)
    assert driver.joins[waiting].error is ErrorCode.unknown_member_id


def test_requests_of_an_old_generation_are_refused(new_driver):
    driver = new_driver()
    one, _ = stable_pair(driver)
    assert driver.heartbeat(one, 1) is ErrorCode.illegal_generation
    assert driver.syncs[driver.sync(one, 1)].error is ErrorCode.illegal_generation
    assert driver.check_commit(one, 1) is ErrorCode.illegal_generation
    assert driver.check_commit(one, 2) is ErrorCode.none


def test_commit_rules_by_sender(new_driver):
    driver = new_driver()
    assert driver.check_commit("", -1) is ErrorCode.none, "nobody is in the group: anyone may"
    one, _ = stable_pair(driver)
    assert driver.check_commit("", -1) is ErrorCode.unknown_member_id
    assert driver.check_commit("stranger", 2) is ErrorCode.unknown_member_id
    assert driver.check_commit(one, 2) is ErrorCode.none


def test_commit_is_a_sign_of_life(new_driver):
    driver = new_driver()
    (one,) = driver.settle(driver.join())
    for _ in range(3):
        driver.advance(6_000)
        assert driver.check_commit(one, 1) is ErrorCode.none


def test_commit_while_rebalancing_is_taken_from_the_old_generation_only_until_it_ends(new_driver):
    driver = new_driver()
    (one,) = driver.settle(driver.join())
    driver.join()
    assert driver.check_commit(one, 1) is ErrorCode.none
    driver.join(one)
    assert driver.group.state is GroupState.COMPLETING_REBALANCE
    assert driver.check_commit(one, 2) is ErrorCode.rebalance_in_progress
    assert driver.check_commit(one, 1) is ErrorCode.illegal_generation


def test_assignment_is_told_only_after_it_is_saved(new_driver):
    driver = new_driver()
    driver.saves_at_once = False
    one = driver.joins[driver.join()].member_id
    synced = driver.sync(one, 1, {one: b"mine"})
    assert synced not in driver.syncs
    driver.saved(driver.writes[-1])
    assert driver.syncs[synced].assignment == b"mine"


def test_assignment_that_could_not_be_saved_starts_another_rebalance(new_driver):
    driver = new_driver()
    driver.saves_at_once = False
    one = driver.joins[driver.join()].member_id
    synced = driver.sync(one, 1, {one: b"mine"})
    driver.saved(driver.writes[-1], ErrorCode.not_enough_replicas)
    assert driver.syncs[synced].error is ErrorCode.coordinator_not_available
    assert driver.group.state is GroupState.PREPARING_REBALANCE
    assert driver.joins[driver.join(one)].generation == 2


def test_late_save_of_an_old_generation_changes_nothing(new_driver):
    driver = new_driver()
    driver.saves_at_once = False
    one = driver.joins[driver.join()].member_id
    synced = driver.sync(one, 1, {one: b"old"})
    driver.join()
    assert driver.syncs[synced].error is ErrorCode.rebalance_in_progress
    driver.join(one)
    driver.saved(driver.writes[0])
    assert driver.group.state is GroupState.COMPLETING_REBALANCE
    assert driver.group.roster.members[one].assignment == b""


def test_leader_that_syncs_twice_saves_one_assignment(new_driver):
    driver = new_driver()
    driver.saves_at_once = False
    one = driver.joins[driver.join()].member_id
    driver.sync(one, 1, {one: b"first"})
    again = driver.sync(one, 1, {one: b"second"})
    assert len(driver.writes) == 1
    driver.saved(driver.writes[0])
    assert driver.syncs[again].assignment == b"first"


def test_member_that_never_syncs_is_removed_after_the_rebalance_timeout(new_driver):
    driver = new_driver()
    one, two = stable_pair(driver)
    join_one = driver.join(one, protocols=(Protocol("roundrobin", b"changed"),))
    driver.join(two)
    assert driver.joins[join_one].generation == 3
    for _ in range(8):
        driver.advance(4_000)
        driver.heartbeat(one, 3)
        driver.heartbeat(two, 3)
        if driver.group.state is GroupState.COMPLETING_REBALANCE:
            driver.sync(one, 3, {one: b"1", two: b"2"})
    assert two not in driver.group.roster.members


def test_lost_join_answer_is_given_again(new_driver):
    driver = new_driver()
    first = driver.joins[driver.join()]
    again = driver.joins[driver.join(first.member_id)]
    assert again == first


def test_follower_that_rejoins_unchanged_keeps_the_generation_but_a_leader_starts_a_new_one(new_driver):
    driver = new_driver()
    one, two = stable_pair(driver)
    follower = driver.joins[driver.join(two)]
    assert (follower.error, follower.generation, follower.leader) == (ErrorCode.none, 2, one)
    assert driver.group.state is GroupState.STABLE
    driver.join(one)
    assert driver.group.state is GroupState.PREPARING_REBALANCE


def test_newer_join_of_a_member_takes_the_place_of_the_one_that_waits(new_driver):
    driver = new_driver()
    one, two = stable_pair(driver)
    stale = driver.join(one)
    fresh = driver.join(one)
    assert driver.joins[stale].error is ErrorCode.rebalance_in_progress
    driver.join(two)
    assert driver.joins[fresh].generation == 3


def test_protocols_without_a_common_one_are_refused(new_driver):
    driver = new_driver()
    driver.settle(driver.join())
    other = driver.join(protocols=(Protocol("range", b""),))
    assert driver.joins[other].error is ErrorCode.inconsistent_group_protocol
    other_type = driver.join(protocol_type="connect")
    assert driver.joins[other_type].error is ErrorCode.inconsistent_group_protocol
    nothing = driver.join(protocols=())
    assert driver.joins[nothing].error is ErrorCode.inconsistent_group_protocol


def test_protocol_with_most_first_votes_among_common_ones_is_chosen(new_driver):
    a, b, c = Protocol("a", b""), Protocol("b", b""), Protocol("c", b"")
    driver = new_driver(initial_rebalance_delay_ms=100)
    tickets = [driver.join(protocols=offered) for offered in [(a, b), (c, b, a), (b, a), (a, b), (b, a)]]
    driver.advance(300)
    assert {driver.joins[ticket].protocol_name for ticket in tickets} == {"b"}


def test_sync_with_another_protocol_than_the_chosen_one_is_refused(new_driver):
    driver = new_driver()
    one = driver.joins[driver.join()].member_id
    synced = driver.sync(one, 1, {one: b"x"}, protocol_name="range")
    assert driver.syncs[synced].error is ErrorCode.inconsistent_group_protocol


def test_full_group_refuses_more_members(new_driver):
    driver = new_driver(max_size=2)
    one, _ = stable_pair(driver)
    assert driver.joins[driver.join()].error is ErrorCode.group_max_size_reached
    assert driver.heartbeat(one, 2) is ErrorCode.none


def test_static_member_that_restarts_keeps_its_assignment_without_a_rebalance(new_driver):
    driver = new_driver()
    first = driver.joins[driver.join(instance_id="host-1")]
    driver.sync(first.member_id, 1, {first.member_id: b"kept"}, instance_id="host-1")
    back = driver.joins[driver.join(instance_id="host-1")]
    assert (back.generation, back.skip_assignment, back.leader) == (1, True, back.member_id)
    assert back.member_id != first.member_id
    assert [member.member_id for member in back.members] == [back.member_id]
    assert driver.writes[-1].snapshot.members[0].member_id == back.member_id
    synced = driver.sync(back.member_id, 1, {}, instance_id="host-1")
    assert driver.syncs[synced].assignment == b"kept"


def test_static_leader_of_an_old_client_is_not_told_that_it_leads(new_driver):
    driver = new_driver()
    first = driver.joins[driver.join(instance_id="host-1")]
    driver.sync(first.member_id, 1, {}, instance_id="host-1")
    back = driver.joins[driver.join(instance_id="host-1", can_skip_assignment=False)]
    assert (back.leader, back.members, back.skip_assignment) == (first.member_id, (), False)


def test_older_incarnation_of_a_static_member_is_fenced(new_driver):
    driver = new_driver()
    first = driver.joins[driver.join(instance_id="host-1")]
    driver.sync(first.member_id, 1, {}, instance_id="host-1")
    driver.join(instance_id="host-1")
    assert driver.heartbeat(first.member_id, 1, "host-1") is ErrorCode.fenced_instance_id
    assert driver.check_commit(first.member_id, 1, "host-1") is ErrorCode.fenced_instance_id
    assert driver.leave(first.member_id, "host-1") is ErrorCode.fenced_instance_id
    assert driver.heartbeat("", 1, "unheard-of") is ErrorCode.unknown_member_id


def test_static_member_with_another_protocol_rebalances(new_driver):
    driver = new_driver()
    first = driver.joins[driver.join(instance_id="host-1")]
    driver.sync(first.member_id, 1, {}, instance_id="host-1")
    prefers_another = (Protocol("range", b""), *ROUND_ROBIN)
    back = driver.joins[driver.join(instance_id="host-1", protocols=prefers_another)]
    assert (back.generation, back.protocol_name) == (2, "range")


def test_static_replacement_that_could_not_be_saved_is_undone(new_driver):
    driver = new_driver()
    first = driver.joins[driver.join(instance_id="host-1")]
    driver.sync(first.member_id, 1, {}, instance_id="host-1")
    driver.saves_at_once = False
    back = driver.join(instance_id="host-1")
    assert back not in driver.joins
    driver.saved(driver.writes[-1], ErrorCode.kafka_storage_error)
    assert driver.joins[back].error is ErrorCode.not_coordinator
    assert driver.heartbeat(first.member_id, 1, "host-1") is ErrorCode.none


def test_static_replacement_overtaken_by_a_rebalance_joins_the_new_generation(new_driver):
    driver = new_driver()
    first = driver.joins[driver.join(instance_id="host-1")]
    driver.sync(first.member_id, 1, {}, instance_id="host-1")
    driver.saves_at_once = False
    back = driver.join(instance_id="host-1")
    driver.join(known_id_required=True)
    newcomer = driver.join()
    assert back not in driver.joins, "an id that was given out holds the rebalance up"
    driver.saved(driver.writes[-1])
    assert back not in driver.joins
    driver.advance(30_000)
    assert driver.joins[back].generation == driver.joins[newcomer].generation == 2


def test_static_member_leaves_by_its_instance(new_driver):
    driver = new_driver()
    driver.settle(driver.join(instance_id="host-1"))
    assert driver.leave("", "host-1") is ErrorCode.none
    assert driver.group.state is GroupState.EMPTY


def test_static_members_survive_a_rebalance_they_miss_until_their_session_ends(new_driver):
    driver = new_driver()
    first = driver.joins[driver.join(instance_id="host-1", session_timeout_ms=60_000)]
    driver.sync(first.member_id, 1, {}, instance_id="host-1")
    newcomer = driver.join()
    driver.advance(30_000)
    assert driver.joins[newcomer].generation == 2
    assert first.member_id in driver.group.roster.members
    driver.advance(60_000)
    assert first.member_id not in driver.group.roster.members


def test_closing_answers_everyone_who_waits(new_driver):
    driver = new_driver()
    one, _ = stable_pair(driver)
    waiting = driver.join(one)
    driver.carry_out(driver.group.close(ErrorCode.not_coordinator, driver.now_ms))
    assert driver.joins[waiting].error is ErrorCode.not_coordinator
    assert driver.heartbeat(one, 2) is ErrorCode.coordinator_not_available


def test_restored_group_goes_on_where_it_was(new_driver):
    driver = new_driver()
    one, two = stable_pair(driver)
    restored = Group.restore(
        "flights-readers",
        driver.group.snapshot(),
        GroupConfig(),
        Moment(steady_ms=50_000, now_ms=driver.now_ms),
    )
    later = new_driver(restored)
    later.steady_ms = 50_000
    assert later.heartbeat(one, 2) is ErrorCode.none
    assert later.syncs[later.sync(two, 2)].assignment == two.encode()
    later.advance(9_999)
    assert len(restored.roster) == 2
    later.heartbeat(one, 2)
    later.advance(2)
    assert set(restored.roster.members) == {one}


@pytest.mark.parametrize("settled", [True, False])
def test_description_tells_assignments_only_while_stable(new_driver, settled):
    driver = new_driver()
    ticket = driver.join()
    if settled:
        driver.settle(ticket)
    description = driver.group.describe()
    assert description.state == ("Stable" if settled else "CompletingRebalance")
    assert description.protocol_name == ("roundrobin" if settled else "")
    assert bool(description.members[0].assignment) is settled


def test_only_an_empty_group_can_be_deleted(new_driver):
    driver = new_driver()
    (one,) = driver.settle(driver.join())
    assert driver.group.deletion_refusal() is ErrorCode.non_empty_group
    driver.leave(one)
    assert driver.group.deletion_refusal() is ErrorCode.none
    driver.group.bury(driver.now_ms)
    assert driver.group.deletion_refusal() is ErrorCode.group_id_not_found


@pytest.mark.parametrize("jump_ms", [-3_600_000, 3_600_000])
def test_no_timer_of_a_group_follows_the_time_of_day(new_driver, jump_ms):
    driver = new_driver(initial_rebalance_delay_ms=3_000)
    asked = driver.join(known_id_required=True)
    first = driver.join(driver.joins[asked].member_id)
    driver.now_ms += jump_ms
    driver.advance(2_999)
    assert first not in driver.joins, "the first wait of a group"
    driver.advance(1)
    (one,) = driver.settle(first)

    driver.now_ms += jump_ms
    driver.advance(9_999)
    assert driver.heartbeat(one, 1) is ErrorCode.none, "a session"
    newcomer = driver.join()
    driver.now_ms += jump_ms
    driver.advance(9_999)
    assert driver.heartbeat(one, 1) is ErrorCode.rebalance_in_progress
    driver.advance(9_999)
    assert driver.heartbeat(one, 1) is ErrorCode.rebalance_in_progress
    assert newcomer not in driver.joins
    driver.advance(10_002)
    assert driver.joins[newcomer].generation == 2, "the wait for members to join again"
    assert one not in driver.group.roster.members

    driver.now_ms += jump_ms
    two = driver.joins[newcomer].member_id
    for _ in range(4):
        assert driver.group.state is GroupState.COMPLETING_REBALANCE
        driver.advance(7_499)
        driver.heartbeat(two, 2)
    driver.advance(4)
    assert driver.group.state is GroupState.EMPTY, "the wait for members to ask for their assignment"


def test_what_is_written_down_of_a_group_has_the_time_of_day(new_driver):
    driver = new_driver()
    driver.settle(driver.join())
    driver.now_ms -= 3_600_000
    driver.advance(10_001)
    assert driver.group.state is GroupState.EMPTY
    assert driver.writes[-1].snapshot.state_since_ms == driver.now_ms - 1
    driver.group.bury(driver.now_ms)
    assert driver.group.snapshot().state_since_ms == driver.now_ms
