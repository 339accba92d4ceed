"""Pages of one file each, from ``templates/``: Jinja escapes what it puts in."""

from __future__ import annotations

from typing import Any

import jinja2


def render(template: str, **values: Any) -> str:
    """The page of this template; a missing value is an error."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("distlab.classes", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = lambda value: f"{value:,.1f}".removesuffix(".0")
    return environment.get_template(template).render(**values)
