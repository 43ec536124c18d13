"""What answers at a port where Kafka's protocol is not spoken, in words. Pure; for `connection.py`."""

from __future__ import annotations

_SIZE_LENGTH = 4
# How an alert and a handshake record of TLS begin.
_TLS_RECORDS = (b"\x15\x03", b"\x16\x03")
_SHOWN_SIZE = 32


def foreign_answer(received: bytes) -> str:
    """`received` is the beginning of the first answer, four bytes or more, of which the first four are no
    size that an answer could have: letters are larger numbers, and so is the head of a record of TLS."""
    if received[:2] in _TLS_RECORDS:
        return "the port speaks TLS; set security.protocol to SSL or SASL_SSL"
    line = received[:_SHOWN_SIZE].splitlines()[0]
    is_text = len(line) >= _SIZE_LENGTH and line.isascii() and line.decode("ascii").isprintable()
    begins = f" (its answer begins with {line.decode('ascii')!r})" if is_text else ""
    return f"what answers there does not speak Kafka's protocol{begins}"
