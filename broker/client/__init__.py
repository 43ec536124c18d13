"""A Kafka-protocol client on asyncio that moves whole record batches.

It speaks to Apache Kafka 3 and 4 and to Millrace's own broker alike, and never decodes a record unless it
is asked to: `raw_fetch` hands out the bytes of batches, `raw_produce` sends them on. The mirror and the
audit build on it.
"""
