"""Who asks for how much, and whom the cache serves."""

from __future__ import annotations

from ..panels import Dashboard, Look, Panel, Query, Row, Unit
from .queries import AT, DEVICE, SERVER, each, rate

NOT_DEVICE = 'tier!="device"'
ASKED = each("tenant", rate("kvtier_tenant_tokens_asked_total"))
BELOW = each("tenant", rate("kvtier_tenant_tokens_hit_total", NOT_DEVICE))
AT_ALL = each("tenant", rate("kvtier_tenant_tokens_hit_total"))
STORED = each("tenant", rate("kvtier_tenant_stored_blocks_total"))
IN_DEVICE = each("tenant", rate("kvtier_tenant_tokens_hit_total", DEVICE))
HOST_BYTES = f'kvtier_tenant_bytes{{{AT}, tier="host"}}'
LOWER_BYTES = f'kvtier_tenant_bytes{{{AT}, tier!="host"}}'
QUOTAS = f"max by (tenant, tier, limit) (kvtier_tenant_quota_bytes{{{AT}}})"
FULLNESS = f"max by (tenant) (kvtier_tenant_quota_used_ratio{{{AT}}})"
EVICTED = each("tenant", rate("kvtier_tenant_quota_evicted_blocks_total"))
REFUSED = each("tenant", rate("kvtier_tenant_quota_refused_blocks_total"))

TENANTS = Dashboard(
    name="tenants",
    title="kvtier: tenants",
    about="Who asks for how much, and whom the cache serves. No name: requests that name nobody.",
    variables=[SERVER],
    rows=[
        Row(
            "Whom does it serve?",
            [
                Panel(
                    "Tokens from kvtier",
                    "Prompt tokens that host, disk and Redis served.",
                    [Query(BELOW, "{{tenant}}")],
                    Unit.A_SECOND,
                    Look.AREAS,
                ),
                Panel(
                    "Hit ratio of kvtier",
                    "Of the tokens that the device did not hold.",
                    [Query(f"{BELOW} / ({ASKED} - {IN_DEVICE})", "{{tenant}}")],
                    Unit.RATIO,
                ),
                Panel(
                    "Hit ratio of all tiers",
                    "Of all prompt tokens in whole blocks, the device's own hits included.",
                    [Query(f"{AT_ALL} / {ASKED}", "{{tenant}}")],
                    Unit.RATIO,
                ),
            ],
        ),
        Row(
            "Who fills it?",
            [
                Panel(
                    "Tokens asked for",
                    "Prompt tokens in whole blocks.",
                    [Query(ASKED, "{{tenant}}")],
                    Unit.A_SECOND,
                    Look.AREAS,
                ),
                Panel(
                    "Blocks stored",
                    "Blocks that came into the host tier.",
                    [Query(STORED, "{{tenant}}")],
                    Unit.A_SECOND,
                    Look.AREAS,
                ),
                Panel(
                    "Tokens by tier",
                    "From where the tokens came, of all tenants together.",
                    [Query(each("tier", rate("kvtier_tenant_tokens_hit_total")), "{{tier}}")],
                    Unit.A_SECOND,
                    Look.AREAS,
                ),
            ],
        ),
        Row(
            "Who takes how much?",
            [
                Panel(
                    "Bytes in host memory",
                    "Of the blocks that are charged to a tenant.",
                    [Query(each("tenant", HOST_BYTES), "{{tenant}}")],
                    Unit.BYTES,
                    Look.AREAS,
                ),
                Panel(
                    "Bytes on disk and in Redis",
                    "Of the blocks that are charged to a tenant.",
                    [Query(each("tenant, tier", LOWER_BYTES), "{{tenant}}, {{tier}}")],
                    Unit.BYTES,
                    Look.AREAS,
                ),
                Panel(
                    "Limits",
                    "Of tenants with quotas; all counts the tiers together.",
                    [Query(QUOTAS, "{{tenant}}, {{tier}}, {{limit}}")],
                    Unit.BYTES,
                ),
            ],
        ),
        Row(
            "Who is at a limit?",
            [
                Panel(
                    "Share of the hard limit",
                    "The largest of a tenant's; at 100 % its own blocks go for each new one.",
                    [Query(FULLNESS, "{{tenant}}")],
                    Unit.RATIO,
                ),
                Panel(
                    "Evicted for a quota",
                    "Blocks that made room for the same tenant's, or for others'.",
                    [Query(EVICTED, "{{tenant}}")],
                    Unit.A_SECOND,
                ),
                Panel(
                    "Refused for a quota",
                    "Blocks for which nothing of the tenant's own could go.",
                    [Query(REFUSED, "{{tenant}}")],
                    Unit.A_SECOND,
                ),
            ],
        ),
    ],
)
