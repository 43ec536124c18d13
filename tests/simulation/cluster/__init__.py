"""A cluster in one process: the brokers' pure rules over a virtual clock, network, disk and ZooKeeper.

    world.py        virtual time and the network: delay, loss, duplication, reordering, cuts, frozen processes
    loop.py         asyncio in virtual time: the product's shells run as they are
    connections.py  requests and answers, in order
    zookeeper.py    versioned nodes, sessions that expire, transactions, watches
    disk.py         a partition's log: what survives a crash and what a loss of power takes
    broker.py       one broker: the shells' work around the pure rules, message by message
    fetching.py     the follower's side of replication, leading.py the leader's
    assignment.py   the replicas' places in ZooKeeper, and what a broker makes of them
    coordinators.py the product's coordinators, transaction gate and handlers over such a broker
    product_log.py  what the product logs: into the trace; a defect ends the history
    truth.py        who sees everything: invariants 1 to 4, checked as they are broken
    exactly_once.py what idempotent and transactional clients were promised: invariant 6
    group_promises.py  what members of groups were promised: invariant 5
    clients.py      producers and consumers
    requester.py    a client that waits for answers; of its kind are
    numbered.py     idempotent producers, streams.py transactional ones, group_members.py members of groups
    committed_reader.py  a consumer of committed data
    loads.py        which of these are there, and their verdict
    operators.py    who moves partitions, and asks for preferred leaders
    history.py      one seeded history from start to verdict

`python -m tests.simulation.cluster SEED` replays one history and prints what happened in it.
"""
