"""Loads for the two message queues: AMQP 0-9-1 (RabbitMQ) and STOMP 1.2 (ActiveMQ), on raw sockets.

As with the raw loads for Kafka's protocol, what is sent is prepared once and what comes is counted by its
bytes, so that the queue is measured and not a client library: the figures are the best that any client could
get. Messages are persistent, consumers acknowledge automatically, a send is over when the server has answered
a request that stands behind it on the same connection.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tests.benchmarks.peers.kafka_load import MIB, RECORD_SIZE, connect, receive_exactly

BODY = b"x" * RECORD_SIZE
PERSISTENT = 2
FRAME_HEAD = 7
CHUNK = 200
"""Messages a write."""


def at_a_rate(exchange: Callable[[], None], count: int, per_second: float) -> list[float]:
    """Milliseconds from when each of `count` exchanges is due to its end. One that is late makes the next
    ones late, and that is counted (no coordinated omission)."""
    taken = []
    begun = time.perf_counter() + 0.05
    for number in range(count):
        due = begun + number / per_second
        time.sleep(max(0.0, due - time.perf_counter()))
        exchange()
        taken.append((time.perf_counter() - due) * 1e3)
    return taken


class Amqp:
    """One connection with one channel. Frames are made and read by pika's own codec."""

    def __init__(self, port: int) -> None:
        from pika import frame, spec
        from pika.credentials import PlainCredentials

        self._frame, self._spec = frame, spec
        self._socket = connect(port)
        self._rest = b""
        self._socket.sendall(frame.ProtocolHeader().marshal())
        self._expect(spec.Connection.Start)
        response = PlainCredentials("guest", "guest").response_for(spec.Connection.Start(mechanisms="PLAIN"))
        self._send(
            0, spec.Connection.StartOk(client_properties={}, mechanism=response[0], response=response[1])
        )
        tune = self._expect(spec.Connection.Tune)
        self._send(0, spec.Connection.TuneOk(tune.channel_max, tune.frame_max, 0))
        self._call(0, spec.Connection.Open(virtual_host="/"), spec.Connection.OpenOk)
        self._call(1, spec.Channel.Open(), spec.Channel.OpenOk)

    def declare(self, queue: str) -> None:
        self._call(1, self._spec.Queue.Declare(queue=queue, durable=True), self._spec.Queue.DeclareOk)

    def produce(self, queue: str, count: int) -> float:
        """Seconds until the server has taken `count` messages."""
        spec = self._spec
        chunk = self._message(queue) * CHUNK
        begun = time.perf_counter()
        for _ in range(count // CHUNK):
            self._socket.sendall(chunk)
        self._call(1, spec.Queue.Declare(queue=queue, passive=True, durable=True), spec.Queue.DeclareOk)
        return time.perf_counter() - begun

    def latency(self, queue: str, count: int, per_second: float) -> list[float]:
        """Milliseconds from when each message is due to its confirmation; one at a time."""
        spec = self._spec
        self._call(1, spec.Confirm.Select(), spec.Confirm.SelectOk)
        message = self._message(queue)

        def exchange() -> None:
            self._socket.sendall(message)
            self._expect(spec.Basic.Ack)

        return at_a_rate(exchange, count, per_second)

    def consume(self, queue: str, count: int) -> float:
        """Seconds from asking for messages to the arrival of the last of `count`."""
        spec = self._spec
        consume = spec.Basic.Consume(queue=queue, no_ack=True, consumer_tag="bench")
        begun = time.perf_counter()
        self._call(1, consume, spec.Basic.ConsumeOk)
        size = sum(self._skip_frame() for _ in range(3))  # method, header, body: all deliveries are alike
        left = (count - 1) * size - len(self._rest)
        scratch = bytearray(MIB)
        while left > 0:
            received = self._socket.recv_into(scratch)
            if not received:
                raise ConnectionError("RabbitMQ closed the connection")
            left -= received
        return time.perf_counter() - begun

    def close(self) -> None:
        self._socket.close()

    def _message(self, queue: str) -> bytes:
        properties = self._spec.BasicProperties(delivery_mode=PERSISTENT)
        return bytes(
            self._frame.Method(1, self._spec.Basic.Publish(exchange="", routing_key=queue)).marshal()
            + self._frame.Header(1, len(BODY), properties).marshal()
            + self._frame.Body(1, BODY).marshal()
        )

    def _send(self, channel: int, method: Any) -> None:
        self._socket.sendall(self._frame.Method(channel, method).marshal())

    def _call(self, channel: int, method: Any, answer: Any) -> Any:
        self._send(channel, method)
        return self._expect(answer)

    def _expect(self, kind: Any) -> Any:
        while True:
            consumed, frame = self._frame.decode_frame(self._rest)
            if frame is None:
                received = self._socket.recv(65_536)
                if not received:
                    raise ConnectionError("RabbitMQ closed the connection")
                self._rest += received
                continue
            self._rest = self._rest[consumed:]
            if isinstance(getattr(frame, "method", None), kind):
                return frame.method
            if isinstance(getattr(frame, "method", None), self._spec.Connection.Close):
                raise ConnectionError(f"RabbitMQ refused: {frame.method.reply_text}")

    def _skip_frame(self) -> int:
        while True:
            if len(self._rest) >= FRAME_HEAD:
                size = FRAME_HEAD + int.from_bytes(self._rest[3:7], "big") + 1
                if len(self._rest) >= size:
                    self._rest = self._rest[size:]
                    return size
            self._rest += self._socket.recv(4_096)


class Stomp:
    """One STOMP connection."""

    def __init__(self, port: int) -> None:
        self._socket = connect(port)
        self._socket.sendall(b"CONNECT\naccept-version:1.2\nhost:bench\nheart-beat:0,0\n\n\0")
        if not self._read_frame().startswith(b"CONNECTED"):
            raise ConnectionError("ActiveMQ refused the connection")

    def produce(self, queue: str, count: int) -> float:
        """Seconds until the server has taken `count` messages."""
        chunk = self._message(queue) * CHUNK
        begun = time.perf_counter()
        for _ in range(count // CHUNK - 1):
            self._socket.sendall(chunk)
        self._socket.sendall(chunk[: -len(chunk) // CHUNK])
        self._confirmed(queue)
        return time.perf_counter() - begun

    def latency(self, queue: str, count: int, per_second: float) -> list[float]:
        """Milliseconds from when each message is due to its receipt; one at a time."""
        return at_a_rate(lambda: self._confirmed(queue), count, per_second)

    def consume(self, queue: str, count: int) -> float:
        """Seconds from the subscription to the arrival of the last of `count` messages."""
        begun = time.perf_counter()
        self._socket.sendall(f"SUBSCRIBE\nid:0\ndestination:/queue/{queue}\nack:auto\n\n\0".encode())
        seen = 0
        scratch = bytearray(MIB)
        while seen < count:
            received = self._socket.recv_into(scratch)
            if not received:
                raise ConnectionError("ActiveMQ closed the connection")
            seen += scratch.count(b"\0", 0, received)
        return time.perf_counter() - begun

    def close(self) -> None:
        self._socket.close()

    def _message(self, queue: str, more: str = "") -> bytes:
        head = f"SEND\ndestination:/queue/{queue}\npersistent:true\n{more}content-length:{len(BODY)}\n\n"
        return head.encode() + BODY + b"\0"

    def _confirmed(self, queue: str) -> None:
        """Send one message and wait until the server has taken it."""
        self._socket.sendall(self._message(queue, "receipt:last\n"))
        if not self._read_frame().startswith(b"RECEIPT"):
            raise ConnectionError("ActiveMQ did not confirm a message")

    def _read_frame(self) -> bytes:
        frame = bytearray()
        while not frame.endswith(b"\0"):
            piece = receive_exactly(self._socket, 1)
            if frame or piece != b"\n":
                frame += piece
        return bytes(frame)
