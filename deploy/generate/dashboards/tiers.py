"""What the tiers hold, what leaves them, and how quick and how well they are."""

from __future__ import annotations

from ..panels import Dashboard, Look, Panel, Query, Row, Unit
from .queries import AT, SERVER, each, rate

TIERS = Dashboard(
    name="tiers",
    title="kvtier: tiers and eviction",
    about="What the tiers hold, what leaves them, and how quick and how well they are.",
    variables=[SERVER],
    rows=[
        Row(
            "What do they hold?",
            [
                Panel(
                    "How full",
                    "Of each tier's budget. Full is normal: eviction makes room.",
                    [
                        Query(
                            f"kvtier_used_bytes{{{AT}}} / kvtier_capacity_bytes{{{AT}}}",
                            "{{instance}} {{tier}}",
                        )
                    ],
                    Unit.RATIO,
                ),
                Panel(
                    "Bytes",
                    "Of blocks. Of Redis, what these servers wrote.",
                    [Query(each("tier", f"kvtier_used_bytes{{{AT}}}"), "{{tier}}")],
                    Unit.BYTES,
                ),
                Panel(
                    "Blocks",
                    "Blocks in each tier.",
                    [Query(each("tier", f"kvtier_blocks{{{AT}}}"), "{{tier}}")],
                ),
            ],
        ),
        Row(
            "What leaves?",
            [
                Panel(
                    "Evictions",
                    "Blocks that left. slab_move: another namespace took their slab.",
                    [
                        Query(
                            each("tier, reason", rate("kvtier_evictions_total")),
                            "{{tier}}, {{reason}}",
                        )
                    ],
                    Unit.A_SECOND,
                ),
                Panel(
                    "Evictions for room, by policy",
                    "The policy that chose the blocks; after a change, the lines show both.",
                    [
                        Query(
                            each(
                                "tier, policy",
                                rate("kvtier_evictions_total", 'reason=~"capacity|slab_move"'),
                            )
                            + " > 0",
                            "{{tier}}, {{policy}}",
                        )
                    ],
                    Unit.A_SECOND,
                ),
                Panel(
                    "How long a block stays",
                    "If it goes on as in the last 15 minutes; no line where nothing is evicted.",
                    [
                        Query(
                            f"kvtier:block_residence_seconds:rate15m{{{AT}}}",
                            "{{instance}} {{tier}}",
                        )
                    ],
                    Unit.SECONDS,
                ),
                Panel(
                    "Slots of the host tier",
                    "Each is in one state. limbo: a scheduler was lost while its workers live.",
                    [Query(each("state", f"kvtier_slots{{{AT}}}"), "{{state}}")],
                    look=Look.AREAS,
                ),
                Panel(
                    "Pinned",
                    "Bytes of the host tier that an operator keeps there, whatever is evicted.",
                    [Query(f"kvtier_pinned_bytes{{{AT}}}", "{{instance}}")],
                    Unit.BYTES,
                ),
            ],
        ),
        Row(
            "How well are the lower tiers?",
            [
                Panel(
                    "In use",
                    "1 while a tier is asked, 0 while it is left alone.",
                    [Query(f"kvtier_tier_up{{{AT}}}", "{{instance}} {{tier}}")],
                ),
                Panel(
                    "Faults",
                    "Failures of a tier as a whole, and how often it began to be left alone.",
                    [
                        Query(
                            each("tier, fault", rate("kvtier_tier_faults_total")),
                            "{{tier}}, {{fault}}",
                        ),
                        Query(
                            each("tier", rate("kvtier_breaker_openings_total")),
                            "{{tier}}, left alone",
                        ),
                    ],
                    Unit.A_SECOND,
                ),
                Panel(
                    "Time of one operation",
                    "What 19 of 20 operations take at most, in a thread of the tier.",
                    [
                        Query(
                            f"kvtier:tier_seconds:p95_rate5m{{{AT}}}",
                            "{{instance}} {{tier}} {{op}}, p95",
                        )
                    ],
                    Unit.SECONDS,
                ),
            ],
        ),
        Row(
            "How fast are they, as measured lately?",
            [
                Panel(
                    "Bandwidth of reads",
                    "What decides whether a load is worth it; 0 before the first reads.",
                    [Query(f"kvtier_tier_read_bytes_per_second{{{AT}}}", "{{instance}} {{tier}}")],
                    Unit.BYTES_A_SECOND,
                    width=12,
                ),
                Panel(
                    "Latency",
                    "Of a question without payload; 0 before the first one.",
                    [Query(f"kvtier_tier_latency_seconds{{{AT}}}", "{{instance}} {{tier}}")],
                    Unit.SECONDS,
                    width=12,
                ),
            ],
        ),
        Row(
            "What is read and written?",
            [
                Panel(
                    "Reads",
                    "corrupt records are dropped and never used.",
                    [
                        Query(
                            each("tier, outcome", rate("kvtier_reads_total")),
                            "{{tier}}, {{outcome}}",
                        )
                    ],
                    Unit.A_SECOND,
                    width=6,
                ),
                Panel(
                    "Writes",
                    "queue_full: it can't keep up. down: it is left alone. full: it takes none.",
                    [
                        Query(
                            each("tier, outcome", rate("kvtier_writes_total")),
                            "{{tier}}, {{outcome}}",
                        )
                    ],
                    Unit.A_SECOND,
                    width=6,
                ),
                Panel(
                    "Bytes",
                    "Of blocks.",
                    [
                        Query(each("tier", rate("kvtier_read_bytes_total")), "{{tier}}, read"),
                        Query(
                            each("tier", rate("kvtier_written_bytes_total")), "{{tier}}, written"
                        ),
                    ],
                    Unit.BYTES_A_SECOND,
                    width=6,
                ),
                Panel(
                    "Admission",
                    "What was said of blocks that were offered: admitted, or why not for now.",
                    [
                        Query(
                            each("tier, outcome", rate("kvtier_admissions_total")),
                            "{{tier}}, {{outcome}}",
                        )
                    ],
                    Unit.A_SECOND,
                    Look.AREAS,
                    width=6,
                ),
                Panel(
                    "Waiting for a tier",
                    "Bytes of blocks that are to be read or written, or are just now.",
                    [Query(each("tier, op", f"kvtier_queued_bytes{{{AT}}}"), "{{tier}}, {{op}}")],
                    Unit.BYTES,
                    width=6,
                ),
                Panel(
                    "Compression",
                    "How many bytes of blocks lie in one byte of the tier.",
                    [
                        Query(
                            f"{each('tier', rate('kvtier_codec_raw_bytes_total'))} / "
                            f"({each('tier', rate('kvtier_codec_stored_bytes_total'))} > 0)",
                            "{{tier}}",
                        )
                    ],
                    width=6,
                ),
                Panel(
                    "Time for compression",
                    "Threads that are busy with it, on average.",
                    [
                        Query(
                            each("tier, op", rate("kvtier_codec_seconds_total")), "{{tier}}, {{op}}"
                        )
                    ],
                    width=6,
                ),
                Panel(
                    "Stores and writes without room",
                    "Share of the blocks that engines offered to the host tier, and of those that "
                    "were to be written to a lower tier.",
                    [
                        Query(f"kvtier:stores_no_slot_ratio:rate5m{{{AT}}}", "{{instance}} host"),
                        Query(
                            f"kvtier:writes_queue_full_ratio:rate5m{{{AT}}}",
                            "{{instance}} {{tier}}",
                        ),
                    ],
                    Unit.RATIO,
                    width=6,
                ),
            ],
        ),
        Row(
            "What comes back up?",
            [
                Panel(
                    "Promotions",
                    "Blocks to be copied to the host tier. no_slot: it is full of leases.",
                    [
                        Query(
                            each("tier, outcome", rate("kvtier_promotions_total")),
                            "{{tier}}, {{outcome}}",
                        )
                    ],
                    Unit.A_SECOND,
                ),
                Panel(
                    "Computed instead",
                    "Blocks that a tier has and that were computed, because that was sooner.",
                    [
                        Query(
                            each("tier", rate("kvtier_loads_skipped_blocks_total")),
                            "{{tier}}",
                        )
                    ],
                    Unit.A_SECOND,
                ),
                Panel(
                    "Time that this saved",
                    "Seconds a second, as expected when it was decided.",
                    [Query(each("tier", rate("kvtier_loads_skipped_seconds_total")), "{{tier}}")],
                ),
            ],
        ),
    ],
)
