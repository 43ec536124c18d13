"""Numbers in sentences."""

from __future__ import annotations

import pytest

from millrace.broker.wording import count_of


@pytest.mark.parametrize(
    ("number", "nouns", "text"),
    [
        (0, ("broker",), "0 brokers"),
        (1, ("broker",), "1 broker"),
        (2, ("broker",), "2 brokers"),
        (12_345, ("record",), "12,345 records"),
        (1, ("batch", "batches"), "1 batch"),
        (2, ("batch", "batches"), "2 batches"),
    ],
)
def test_noun_is_in_the_number_of_what_is_counted(number: int, nouns: tuple[str, ...], text: str) -> None:
    assert count_of(number, *nouns) == text
