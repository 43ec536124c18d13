"""What the controller is shown of topics whose settings are not known."""

from __future__ import annotations

import uuid

import pytest

from millrace.broker.coordination.metadata_cache import MetadataCache
from millrace.broker.coordination.paths import TopicAssignment
from millrace.broker.coordination.picture import picture_of
from millrace.broker.storage.log_config import UNREADABLE


@pytest.mark.parametrize(
    ("config", "allowed"),
    [
        ({}, True),
        ({UNREADABLE: "why"}, False),
        ({"unclean.leader.election.enable": "perhaps"}, False),
        ({"unclean.leader.election.enable": "true", "retention.ms": "for ever"}, True),
    ],
)
def test_unclean_elections_are_allowed_only_by_settings_that_are_known(
    config: dict[str, str], allowed: bool
) -> None:
    cache = MetadataCache()
    cache.set_assignment("t", TopicAssignment(uuid.uuid4(), {0: (1,)}))
    cache.set_config("t", config)
    assert ("t" in picture_of(cache, unclean_by_default=True).unclean_topics) == allowed
