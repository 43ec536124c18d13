"""Whether a state is one that this configuration goes on with, and where its folders may lie. Pure.

Called by `job` before anything is counted. Each refusal is a ConfigError that names the setting.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from millrace.audit.config import AuditConfig, audited_topic, duration_text
from millrace.audit.keeping.state import Commit
from millrace.audit.keeping.state_files import is_remote
from millrace.audit.spark.masters import is_elsewhere
from millrace.broker.errors import ConfigError


def check_place(config: AuditConfig, master: str, *, in_cluster: bool = False) -> None:
    """A folder of this machine is another one on every worker: their cells would not be found. A driver that
    runs in the cluster takes its folders with it when it ends."""
    if in_cluster and not is_remote(config.report):
        raise ConfigError(
            config.where("report"),
            str(config.report),
            "a place that is there when the driver is gone, such as hdfs:// or s3a://; or deploy mode client",
        )
    if is_elsewhere(master) and not is_remote(config.state):
        raise ConfigError(
            config.where("state"),
            str(config.state),
            f"a place that the workers of {master} share with this machine, such as hdfs:// or s3a://; "
            f"a folder that is mounted on all of them is file://{Path(config.state).absolute()}",
        )


def check_window(config: AuditConfig, before: Commit) -> None:
    """Cells know their window, not the times in it: a state cannot be read in another length."""
    if before.number and before.window_ms != config.window_ms:
        raise ConfigError(
            config.where("window"),
            duration_text(config.window_ms),
            f"{duration_text(before.window_ms)}, in which {config.state} was counted; "
            "for another window use another state",
        )


def check_names(config: AuditConfig, before: Commit) -> None:
    """Cells know their place by the topic's names in the cluster: with other names they would be read again,
    and every record would look doubled."""
    for key in before.offsets:
        cluster, place, _ = key.rsplit("/", 2)
        topic = audited_topic(place)
        if cluster not in config.clusters or topic not in config.topics:
            continue
        places = config.clusters[cluster].places(topic)
        if place not in places.values() and (place == topic or len(places) == 1):
            raise ConfigError(
                config.where(f"clusters.{cluster}.topics.{topic}"),
                ", ".join(places),
                f"as many names as {config.state} was counted with; for others use another state",
            )


def check_clusters(config: AuditConfig, before: Commit, cluster_ids: Mapping[str, str]) -> None:
    """A name may stand for another cluster than the one that was counted: its offsets would be taken for
    those of that one, and every topic for made anew."""
    counted = {key.rsplit("/", 2)[0] for key in before.offsets}
    if counted and not counted & set(config.clusters):
        raise ConfigError(
            config.where("state"),
            str(config.state),
            f"a state of this audit: it is of another, of the clusters {', '.join(sorted(counted))}",
        )
    for name, id_ in cluster_ids.items():
        known = before.clusters.get(name, "")
        if known and id_ and known != id_:
            raise ConfigError(
                config.where(f"clusters.{name}.bootstrap"),
                f"cluster {id_}",
                f"cluster {known}, with which {config.state} was counted; for another use another state",
            )
