"""Dashboards as data, and the JSON that Grafana reads. What they show is in `dashboards/`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

Json: TypeAlias = "str | int | float | bool | list[Json] | dict[str, Json] | None"

COLUMNS = 24
SCHEMA_VERSION = 39
SOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}


class Look(StrEnum):
    """How a panel shows its queries."""

    LINES = "timeseries"
    AREAS = "stacked"
    """Lines on top of each other, whose sum means something."""
    NUMBER = "stat"
    TABLE = "table"


class Unit(StrEnum):
    """What a panel's numbers are, in Grafana's words."""

    COUNT = "short"
    RATIO = "percentunit"
    BYTES = "bytes"
    BYTES_A_SECOND = "binBps"
    SECONDS = "s"
    A_SECOND = "cps"


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression. `legend` may name labels of its result, as `{{tier}}`."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel; `about` is the help that Grafana shows behind its title."""

    title: str
    about: str
    queries: Sequence[Query]
    unit: Unit = Unit.COUNT
    look: Look = Look.LINES
    width: int = 8
    height: int = 8
    red_from: float | None = None
    """A number is red from here on, and green below."""
    red_below: float | None = None
    """A number is red below this, and green from here on."""


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one heading, which is a question that they answer."""

    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True)
class Variable:
    """A choice at the top: all values of `label` in `series`."""

    name: str
    title: str
    series: str
    label: str


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One dashboard; `name` is its file's and its address's."""

    name: str
    title: str
    about: str
    variables: Sequence[Variable]
    rows: Sequence[Row]

    def panels(self) -> Iterator[Panel]:
        """Yield every panel."""
        for row in self.rows:
            yield from row.panels


def to_json(dashboard: Dashboard) -> Json:
    """Return what Grafana reads."""
    return {
        "uid": f"kvtier-{dashboard.name}",
        "title": dashboard.title,
        "description": dashboard.about,
        "tags": ["kvtier"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": False,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "timezone": "browser",
        "graphTooltip": 1,
        "links": [
            {
                "type": "dashboards",
                "title": "kvtier",
                "tags": ["kvtier"],
                "asDropdown": True,
                "keepTime": True,
            }
        ],
        "annotations": {"list": []},
        "templating": {"list": [_datasource(), *map(_variable, dashboard.variables)]},
        "panels": list(_placed(dashboard.rows)),
    }


def _placed(rows: Sequence[Row]) -> Iterator[Json]:
    """Yield rows and panels with ids and places: from left to right, as many as fit."""
    number, y = 0, 0
    for row in rows:
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "panels": [],
            "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1},
        }
        y += 1
        x, height = 0, 0
        for panel in row.panels:
            if x + panel.width > COLUMNS:
                x, y, height = 0, y + height, 0
            number += 1
            place: Json = {"x": x, "y": y, "w": panel.width, "h": panel.height}
            yield {"id": number, "gridPos": place, **_panel(panel)}
            x, height = x + panel.width, max(height, panel.height)
        y += height


def _panel(panel: Panel) -> dict[str, Json]:
    kind = Look.LINES if panel.look is Look.AREAS else panel.look
    return {
        "type": kind.value,
        "title": panel.title,
        "description": panel.about,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "options": _options(panel.look),
        "targets": [
            _target(chr(ord("A") + number), query, panel.look)
            for number, query in enumerate(panel.queries)
        ],
    }


def _target(ref: str, query: Query, look: Look) -> Json:
    at_once = look is Look.TABLE
    return {
        "refId": ref,
        "datasource": SOURCE,
        "editorMode": "code",
        "expr": query.expr,
        "legendFormat": query.legend or "__auto",
        "range": not at_once,
        "instant": at_once,
        "format": "table" if at_once else "time_series",
    }


def _defaults(panel: Panel) -> Json:
    defaults: dict[str, Json] = {"unit": panel.unit.value}
    if panel.look in (Look.LINES, Look.AREAS):
        stacked = panel.look is Look.AREAS
        defaults["min"] = 0
        defaults["custom"] = {
            "lineWidth": 1,
            "fillOpacity": 40 if stacked else 0,
            "showPoints": "never",
            "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
        }
    if panel.look is Look.NUMBER:
        defaults["thresholds"] = {"mode": "absolute", "steps": _steps(panel)}
    return defaults


def _steps(panel: Panel) -> list[Json]:
    if panel.red_from is not None:
        red: Json = {"color": "red", "value": panel.red_from}
        return [{"color": "green", "value": None}, red]
    if panel.red_below is not None:
        green: Json = {"color": "green", "value": panel.red_below}
        return [{"color": "red", "value": None}, green]
    return [{"color": "text", "value": None}]


def _options(look: Look) -> Json:
    match look:
        case Look.LINES | Look.AREAS:
            return {
                "legend": {"showLegend": True, "displayMode": "list", "placement": "bottom"},
                "tooltip": {"mode": "multi", "sort": "desc"},
            }
        case Look.NUMBER:
            return {
                "colorMode": "value",
                "graphMode": "area",
                "textMode": "auto",
                "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            }
        case Look.TABLE:
            return {"showHeader": True, "cellHeight": "sm"}


def _datasource() -> Json:
    return {"name": "datasource", "label": "Data", "type": "datasource", "query": "prometheus"}


def _variable(variable: Variable) -> Json:
    query = f"label_values({variable.series}, {variable.label})"
    return {
        "name": variable.name,
        "label": variable.title,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": variable.name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }
