"""Who asks for how much, and whom the cache serves."""

from __future__ import annotations

from ..panels import Dashboard, Look, Panel, Query, Row, Unit
from .queries import DEVICE, SERVER, each, rate

NOT_DEVICE = 'tier!="device"'
ASKED = each("tenant", rate("kvtier_tenant_tokens_asked_total"))
BELOW = each("tenant", rate("kvtier_tenant_tokens_hit_total", NOT_DEVICE))
AT_ALL = each("tenant", rate("kvtier_tenant_tokens_hit_total"))
STORED = each("tenant", rate("kvtier_tenant_stored_blocks_total"))
IN_DEVICE = each("tenant", rate("kvtier_tenant_tokens_hit_total", DEVICE))

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
    ],
)
