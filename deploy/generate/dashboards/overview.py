"""Is kvtier up, is it worth it, and is it quick?"""

from __future__ import annotations

from ..panels import Dashboard, Look, Panel, Query, Row, Unit
from .queries import AT, DEVICE, LOOKUP, SERVER, each, quantile, quantiles, rate

OVERVIEW = Dashboard(
    name="overview",
    title="kvtier: overview",
    about="Is kvtier up, is it worth it, and is it quick?",
    variables=[SERVER],
    rows=[
        Row(
            "Is it up?",
            [
                Panel(
                    "Servers that answer",
                    "Share of the servers whose metrics were scraped last time.",
                    [Query('avg(up{job="kvtier"})')],
                    Unit.RATIO,
                    Look.NUMBER,
                    width=4,
                    height=5,
                    red_below=1,
                ),
                Panel(
                    "Tiers left alone",
                    "Lower tiers that failed or were too slow, and are only probed now.",
                    [Query(f"count(kvtier_tier_up{{{AT}}} == 0) or vector(0)")],
                    look=Look.NUMBER,
                    width=4,
                    height=5,
                    red_from=1,
                ),
                Panel(
                    "Engines",
                    "Engines that are connected: sessions of schedulers.",
                    [Query(f'sum(kvtier_sessions{{role="scheduler", {AT}}})')],
                    look=Look.NUMBER,
                    width=4,
                    height=5,
                ),
                Panel(
                    "Alerts",
                    "Alerts that fire now; docs/runbooks.md says what to do. Empty is good.",
                    [Query('ALERTS{alertname=~"Kvtier.*", alertstate="firing"}')],
                    look=Look.TABLE,
                    width=12,
                    height=5,
                ),
            ],
        ),
        Row(
            "Is it worth it?",
            [
                Panel(
                    "Token hit ratio",
                    "Prompt tokens that any tier served, the engine's own cache included, of all "
                    "that could have been reused.",
                    [
                        Query(f"kvtier:token_hit_ratio:rate5m{{{AT}}}", "{{instance}}, 5 minutes"),
                        Query(f"kvtier:token_hit_ratio:rate1h{{{AT}}}", "{{instance}}, 1 hour"),
                    ],
                    Unit.RATIO,
                ),
                Panel(
                    "Tokens by tier",
                    "Where prompt tokens came from. What no tier had was computed.",
                    [
                        Query(each("tier", rate("kvtier_tokens_hit_total")), "{{tier}}"),
                        Query(
                            f"sum({rate('kvtier_tokens_asked_total', DEVICE)}) - "
                            f"sum({rate('kvtier_tokens_hit_total')})",
                            "computed",
                        ),
                    ],
                    Unit.A_SECOND,
                    Look.AREAS,
                ),
                Panel(
                    "Hit ratio of each tier",
                    "Of the tokens that the tiers above it did not hold.",
                    [Query(f"kvtier:tier_token_hit_ratio:rate5m{{{AT}}}", "{{instance}} {{tier}}")],
                    Unit.RATIO,
                ),
            ],
        ),
        Row(
            "Is it quick?",
            [
                Panel(
                    "Lookups",
                    "Questions of engines.",
                    [Query(each("instance", rate("kvtier_lookups_total")), "{{instance}}")],
                    Unit.A_SECOND,
                ),
                Panel(
                    "Time for a lookup",
                    "What the server took to answer, without waiting for lower tiers.",
                    quantiles("kvtier_frame_seconds", LOOKUP),
                    Unit.SECONDS,
                ),
                Panel(
                    "Waiting for lower tiers",
                    "How long lookups waited for disk and Redis.",
                    quantiles("kvtier_wait_seconds"),
                    Unit.SECONDS,
                ),
                Panel(
                    "Lookups that waited",
                    "How their waiting ended. overdue: loads.wait_seconds were over.",
                    [Query(each("outcome", rate("kvtier_waits_total")), "{{outcome}}")],
                    Unit.A_SECOND,
                    Look.AREAS,
                ),
                Panel(
                    "How late the loop is",
                    "Everything waits for the loop. An engine gives a call up after deadline_ms.",
                    [
                        Query(
                            f"kvtier:loop_lag_seconds:p99_rate5m{{{AT}}}",
                            "{{instance}}, timers, p99",
                        )
                    ],
                    Unit.SECONDS,
                ),
                Panel(
                    "CPU",
                    "Cores that the server uses. One is what its loop can have; threads copy "
                    "beside it.",
                    [Query(rate("process_cpu_seconds_total"), "{{instance}}")],
                ),
                Panel(
                    "What holds the loop",
                    "CPU time of single pieces of work: an engine's frame, or what a lower tier "
                    "handed over.",
                    [
                        Query(
                            quantile(0.99, "kvtier_loop_hold_seconds", by="work"), "{{work}}, p99"
                        ),
                    ],
                    Unit.SECONDS,
                ),
            ],
        ),
        Row(
            "What does the server itself need?",
            [
                Panel(
                    "Memory",
                    "In RAM, and all of the address space.",
                    [
                        Query(f"process_resident_memory_bytes{{{AT}}}", "{{instance}}, resident"),
                        Query(f"process_virtual_memory_bytes{{{AT}}}", "{{instance}}, virtual"),
                    ],
                    Unit.BYTES,
                ),
                Panel(
                    "Open files",
                    "File descriptors as a share of those that the process may open.",
                    [Query(f"process_open_fds{{{AT}}} / process_max_fds{{{AT}}}", "{{instance}}")],
                    Unit.RATIO,
                ),
                Panel(
                    "Running for",
                    "Since its last start.",
                    [Query(f"time() - process_start_time_seconds{{{AT}}}", "{{instance}}")],
                    Unit.SECONDS,
                ),
            ],
        ),
        Row(
            "What becomes of blocks and sessions?",
            [
                Panel(
                    "Stores",
                    "Blocks that engines offered. no_slot: there was no room.",
                    [Query(each("outcome", rate("kvtier_stores_total")), "{{outcome}}")],
                    Unit.A_SECOND,
                    Look.AREAS,
                    width=6,
                ),
                Panel(
                    "Sessions",
                    "Each engine has one of its scheduler and one of each worker.",
                    [Query(each("role", f"kvtier_sessions{{{AT}}}"), "{{role}}")],
                    width=6,
                ),
                Panel(
                    "Ends of sessions",
                    "bye, disconnect and shutdown are normal; docs/runbooks.md has the others.",
                    [Query(each("reason", rate("kvtier_session_closes_total")), "{{reason}}")],
                    Unit.A_SECOND,
                    width=6,
                ),
                Panel(
                    "HTTP requests that are not let in",
                    "By reason; docs/runbooks.md has what to do about many refused logins.",
                    [Query(each("reason", rate("kvtier_http_refusals_total")), "{{reason}}")],
                    Unit.A_SECOND,
                    width=6,
                ),
                Panel(
                    "Recordings",
                    "Lookups for kvtier replay; nothing without recording.path.",
                    [Query(each("outcome", rate("kvtier_recorded_lookups_total")), "{{outcome}}")],
                    Unit.A_SECOND,
                    width=6,
                ),
            ],
        ),
    ],
)
