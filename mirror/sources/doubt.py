"""What a partition does not believe of what it was given, and when it has asked often enough. Pure.

Held by `pipeline`, one for each fetch offset: what is in doubt there is fetched again, with more of what
follows it where that can tell, and then looked at (`source_logs.survey`). Each way ends: with a batch that is
believed, with damage, or with a word of what is not taken (`reason`), which becomes the partition's trouble.
"""

from __future__ import annotations

from dataclasses import dataclass

from millrace.mirror.sources.fetch_sizes import larger_look

# A batch whose checksum is wrong is fetched this often before it counts as corrupt at the source.
MAX_CORRUPT_FETCHES = 3
# A batch behind a hole that came alone is fetched this often with more of what follows. Then it is believed
# where nothing follows it that the source may give (in an open transaction, say); otherwise it is looked at
# first. In a healthy log that finds nothing: no answer goes on from one file of it into the next.
MAX_TIMES_ALONE = 3
# Looks at the log that find nothing wrong with what is out of order all the same; then it is damage.
MAX_TIMES_CLEARED = 2


@dataclass(slots=True)
class Doubt:
    """What was wrong with the answers at one fetch offset; the first batch that is taken ends it.

    `reason` is the newest, for people. `needed_size` is how much the next answer has to hold at least, 0: as
    much as comes. `stands_alone`: what follows is not given, whatever is asked for. `times_cleared`: looks
    that found nothing wrong.
    """

    fetches: int = 0
    was_beyond_the_end: bool = False
    times_alone: int = 0
    needed_size: int = 0
    is_out_of_order: bool = False
    stands_alone: bool = False
    times_cleared: int = 0
    reason: str = ""

    @property
    def trusts_hole(self) -> bool:
        """Whether a batch that comes alone is believed: more was asked for often enough, and where there
        should be more, a look found why it does not come."""
        return self.times_alone >= MAX_TIMES_ALONE and (not self.stands_alone or self.times_cleared > 0)

    @property
    def was_looked_at(self) -> bool:
        """Whether there was a look at what comes alone, and it came to nothing: that is worth a word."""
        return self.stands_alone and self.times_alone > MAX_TIMES_ALONE

    @property
    def is_damage(self) -> bool:
        return self.fetches >= MAX_CORRUPT_FETCHES

    @property
    def is_cleared_in_vain(self) -> bool:
        """Whether looks found nothing wrong with offsets that contradict each other still."""
        return self.is_out_of_order and self.times_cleared >= MAX_TIMES_CLEARED

    def came_alone(self, given: int, needed: int, *, more_may_come: bool) -> None:
        """An answer of `given` bytes does not tell; one of `needed` bytes may (0: not known).
        `more_may_come`: behind what claims to follow a hole lies something that the source may give."""
        self.times_alone += 1
        self.needed_size = max(self.needed_size, larger_look(given, self.times_alone, needed))
        self.stands_alone = more_may_come and self.times_alone >= MAX_TIMES_ALONE
