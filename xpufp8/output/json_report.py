"""The report as JSON, schema version 1, and its JSON Schema."""

from __future__ import annotations

import json

from xpufp8.report import Report


def render(report: Report) -> str:
    """The report as indented JSON, in ASCII: an escape character in what a probe saw cannot reach a terminal."""
    return json.dumps(report.model_dump(mode="json"), indent=2, ensure_ascii=True) + "\n"


def schema() -> str:
    """JSON Schema (draft 2020-12) of the report."""
    data = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "xpufp8 report, schema version 1"}
    return json.dumps(data | Report.model_json_schema(mode="serialization"), indent=2) + "\n"
