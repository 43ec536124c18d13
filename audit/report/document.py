"""`summary.json` as types: what every field is, for users' programs and for the test that holds us to it.

`summary.schema.json` beside this file is its JSON Schema (draft 2020-12), made by `schema_text()`; a test
compares both and checks that what `summarise` makes is what is told here. Nothing at run time depends on it.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

VerdictWord = Literal["PROVEN", "COUNT_MATCH", "UNKNOWN", "DUPLICATE", "LOSS"]
StateWord = Literal["PROVEN", "COUNT_MATCH", "UNKNOWN", "DUPLICATE", "LOSS", "OPEN"]
Count = Annotated[int, Field(ge=0)]
Sequences = Annotated[
    list[tuple[int, int]],
    Field(description="Inclusive ranges of sequence numbers; empty where records cannot be named."),
]
WindowStart = Annotated[
    str | None, Field(description="ISO 8601, UTC; null where no window can be named (a lost tail).")
]
Hop = Annotated[tuple[str, str], Field(description="The last tier that had it, the first that has not.")]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Counts(_Part):
    acknowledged: Count
    seen: Annotated[dict[str, Count], Field(description="Distinct records by tier.")]
    missing: Count
    duplicates: Annotated[Count, Field(description="Extra copies.")]
    unreported: Count
    unknown: Count
    explained: Count
    in_flight: Count


class Place(_Part):
    tier: Annotated[str, Field(description="The cluster.")]
    partition: int
    offsets: Annotated[tuple[int, int], Field(description="Between these offsets, inclusive.")]


class Neighbour(Place):
    sequence: int


class LostAt(_Part):
    sequences: tuple[int, int]
    held: Annotated[list[Place], Field(description="Where the upstream tier has them.")]
    held_more: int = 0
    before: Neighbour | None = None
    after: Neighbour | None = None


class _Named(_Part):
    topic: str
    producer: str
    stream: Annotated[str, Field(description="16 hexadecimal digits.")]
    window_start: WindowStart
    sequences: Sequences
    count: Count
    waived: Annotated[bool, Field(description="A standing waiver covers it.")] = False


class Loss(_Named):
    lost_between: Hop
    places: list[LostAt]


class Duplicate(_Named):
    tier: Annotated[str, Field(description="The first tier with the extra copies.")]


class LossesMore(_Part):
    topic: str
    lost_between: Hop
    findings: Annotated[Count, Field(description="Windows of streams that are not named.")]
    count: Count


class DuplicatesMore(_Part):
    topic: str
    tier: str
    findings: Annotated[Count, Field(description="Windows of streams that are not named.")]
    count: Count


class Differing(_Part):
    """A window in which records arrived with other content than was sent."""

    topic: str
    producer: str
    stream: Annotated[str, Field(description="16 hexadecimal digits.")]
    window_start: WindowStart
    where: Annotated[list[str], Field(description="Between which tiers, or of copies in which one.")]
    waived: Annotated[bool, Field(description="A standing waiver covers it.")] = False


class DifferingMore(_Part):
    topic: str
    where: list[str]
    findings: Annotated[Count, Field(description="Windows of streams that are not named.")]


class Tier(_Part):
    name: str
    upstream: Annotated[list[str], Field(description="`produced` or the tiers that it is compared with.")]


class TopicTier(_Part):
    tier: str
    seen: Count
    missing: Count
    duplicates: Count
    windows: dict[StateWord, Count]


class Topic(_Part):
    topic: str
    verdict: VerdictWord
    windows: dict[StateWord, Count]
    waived: Annotated[
        dict[VerdictWord, Count], Field(description="Those that a standing waiver covers.")
    ] = {}
    acknowledged: Count
    missing: Count
    duplicates: Count
    unreported: Count
    unknown: Count
    explained: Count
    in_flight: Count
    tiers: list[TopicTier]


class Producer(_Part):
    topic: str
    producer: str
    published: Count
    consumed: Annotated[dict[str, Count], Field(description="Records by tier, repeats included.")]
    missing: Count
    duplicates: Count
    verdict: VerdictWord


class Late(_Part):
    topic: str
    producer: str
    window_start: WindowStart
    by_ms: Count
    kind: Literal["records", "report"]


class LateMore(_Part):
    topic: str
    kind: Literal["records", "report"]
    windows: Count


class Latency(_Part):
    topic: str
    between: Hop
    windows: Count
    p50_ms: int
    p99_ms: int
    max_ms: int


class Content(_Part):
    compared: Count
    not_compared: Count
    differs: Count


class WaiverEntry(_Part):
    topic: str
    window_start: WindowStart
    who: str
    why: str
    at: str | None
    stream: str = ""
    verdict: VerdictWord | None = None
    stands: bool = True


class Revision(_Part):
    topic: str
    producer: str
    window_start: WindowStart
    revision: Annotated[int, Field(ge=1)]
    before: str
    after: str


class StepBack(_Part):
    topic: str
    before: str | None
    after: str | None


class Untrusted(_Part):
    what: str
    count: Count
    waived: Annotated[bool, Field(description="A standing waiver accepts it.")] = False
    older: Annotated[bool, Field(description="Of before the horizon: it decides no more.")] = False
    holds: Annotated[
        list[str], Field(description="Topics whose watermark waits until it is gone or waived.")
    ] = []


class UntrustedWaiver(_Part):
    untrusted: Annotated[str, Field(description="It covers what has these words in its name.")]
    count: Annotated[Count, Field(description="How much there was when it was given.")]
    who: str
    why: str
    at: str | None
    stands: bool


class Reason(_Part):
    reason: str
    count: Count


class Foreign(_Part):
    """Records in a topic that came with the identity of another topic's stream."""

    topic: str
    tier: str
    count: Count


class OpenWindows(_Part):
    """Windows that are not settled: the verdict does not speak of them, `counts` has their records too."""

    windows: Count
    acknowledged: Count
    in_flight: Count


class Older(_Part):
    """Findings of before the verdict's horizon, which were told for long enough: in no other count."""

    since: str | None
    windows: dict[StateWord, Count]
    streams: Annotated[Count, Field(description="Those in doubt as a whole: lost tails, silence.")]
    losses: list[Loss]
    duplicates: list[Duplicate]
    differing: list[Differing] = []
    losses_more: list[LossesMore] = []
    duplicates_more: list[DuplicatesMore] = []
    differing_more: list[DifferingMore] = []


class RunCost(_Part):
    """What the run took."""

    records: Annotated[Count, Field(description="Read of all clusters.")]
    bytes: Annotated[Count, Field(description="Read of all clusters, as they lie in their logs.")]
    seconds: Annotated[float, Field(ge=0, description="Up to the report.")]
    state_bytes: Count
    state_files: Count


class SummaryDocument(_Part):
    """The audit's answer for machines. Keys may be added; `version` rises when one changes its meaning."""

    version: Literal[1]
    verdict: VerdictWord
    exit_status: Annotated[int, Field(ge=0, le=2)]
    sentence: str
    next: str
    counts: Counts
    losses: list[Loss]
    duplicates: list[Duplicate]
    losses_more: Annotated[list[LossesMore], Field(description="Beyond those that are named.")] = []
    duplicates_more: Annotated[list[DuplicatesMore], Field(description="Beyond those named.")] = []
    differing: Annotated[list[Differing], Field(description="Losses of content.")] = []
    differing_more: Annotated[list[DifferingMore], Field(description="Beyond those named.")] = []
    windows: dict[StateWord, Count]
    open: OpenWindows = OpenWindows(windows=0, acknowledged=0, in_flight=0)
    tiers: list[Tier]
    topics: list[Topic]
    producers: list[Producer]
    late: list[Late]
    late_more: Annotated[list[LateMore], Field(description="Beyond those that are named.")] = []
    latency: list[Latency]
    content: Content
    watermarks: Annotated[dict[str, str | None], Field(description="By topic, ISO 8601; null: none yet.")]
    watermark_steps_back: list[StepBack] = []
    waivers: list[WaiverEntry]
    revisions: list[Revision]
    revisions_more: Annotated[Count, Field(description="Beyond those that are named.")] = 0
    untrusted: list[Untrusted]
    untrusted_waivers: list[UntrustedWaiver] = []
    reasons: list[Reason]
    notes: Annotated[list[str], Field(description="Sentences that change no verdict.")] = []
    unaudited: Annotated[dict[str, Count], Field(description="Records without identity, by tier.")]
    foreign: list[Foreign] = []
    older: Older | None = None
    at: str | None
    window_ms: Annotated[int, Field(ge=1)]
    run: RunCost | None = None
    rows_at_rest: Annotated[
        list[str],
        Field(description="Files of the report with rows of windows at rest, beside reconciliation.parquet."),
    ] = []


def schema_text() -> str:
    """What `summary.schema.json` holds. A reader must let unknown keys pass, so the schema does too."""
    schema = SummaryDocument.model_json_schema(mode="validation")
    return json.dumps(_open(schema), indent=2, sort_keys=True) + "\n"


def _open(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _open(each) for name, each in value.items() if name != "additionalProperties" or each}
    return [_open(each) for each in value] if isinstance(value, list) else value
