"""The consumer of the old model: groups that live in ZooKeeper. What users import; see `consumer.py`.

consumer.py     the blocking and the asyncio face
connector.py    carries out the rules: session, rebalances, commits
rules.py        pure: shares, filters, Algorithm 1 of the Kafka paper as a run of steps
paths.py        pure: the znodes' payloads
registry.py     the znodes: watches, claims, offsets
fetching.py     one fetch loop for each leader
streams.py      bounded queues between the loop and the user's threads
messages.py     batches unpacked
options.py      settings under Kafka 0.8's names
"""

from millrace.broker.coordination.zookeeper_consumer.connector import CommitFailed, NotOwned, StreamsExist
from millrace.broker.coordination.zookeeper_consumer.consumer import (
    AsyncMessageStream,
    AsyncZookeeperConsumer,
    ConsumerTimeout,
    MessageStream,
    ZookeeperConsumer,
)
from millrace.broker.coordination.zookeeper_consumer.messages import Message
from millrace.broker.coordination.zookeeper_consumer.registry import ConsumerIdTaken
from millrace.broker.coordination.zookeeper_consumer.rules import RebalanceFailed
from millrace.broker.coordination.zookeeper_consumer.streams import ConsumerClosed

__all__ = [
    "AsyncMessageStream",
    "AsyncZookeeperConsumer",
    "CommitFailed",
    "ConsumerClosed",
    "ConsumerIdTaken",
    "ConsumerTimeout",
    "Message",
    "MessageStream",
    "NotOwned",
    "RebalanceFailed",
    "StreamsExist",
    "ZookeeperConsumer",
]
