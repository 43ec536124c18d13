"""A user changes one import: every call of confluent-kafka's clients is there, with its arguments.

Its clients are written in C and have no signatures, but the line of each call's documentation has its
arguments in their order.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer

from millrace.audit.consumer import AuditedConsumer
from millrace.audit.producer import AuditedProducer

CALLS = [
    (ours, client, name)
    for ours, client in ((AuditedProducer, Producer), (AuditedConsumer, Consumer))
    for name in dir(client)
    if not name.startswith("_")
]


def documented(call: Any) -> list[str]:
    """`[topic=None], [timeout=-1]` as names; none where the documentation has no such line."""
    found = re.search(r"py:function:: \w+\((.*?)\)\n", f"{call.__doc__ or ''}\n")
    return re.findall(r"(\w+)(?:=[^,\]]*)?", found[1]) if found else []


@pytest.mark.parametrize(("ours", "client", "name"), CALLS, ids=lambda each: getattr(each, "__name__", each))
def test_a_call_takes_what_the_clients_own_takes(ours: type, client: type, name: str):
    call = getattr(ours, name)
    if name not in vars(ours):
        assert call is getattr(client, name)
        return
    arguments = list(inspect.signature(call).parameters)[1:]
    wanted = documented(getattr(client, name))
    assert [each for each in arguments if each in wanted] == wanted


def test_the_documentation_is_read():
    """Else the test above asks nothing."""
    told = [documented(getattr(client, name)) for _, client, name in CALLS]
    assert documented(Producer.produce)[:3] == ["topic", "value", "key"] and sum(map(bool, told)) >= 18
