"""One HTML page that needs nothing beside it: tables, notes, and plots as embedded PNG."""

from __future__ import annotations

import base64
from dataclasses import dataclass

from clients.errors import InvalidInput

#: What to do where a package of this extra is missing.
BENCH_EXTRA = "pip install 'encoder-lanes[bench]'"
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ page.title }}</title>
<style>
body { font: 15px/1.45 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; color: #1a202c }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem; border-bottom: 1px solid #e2e8f0 }
table { border-collapse: collapse; margin: .6rem 0 } th, td { padding: .2rem .7rem; border-bottom: 1px solid #edf2f7 }
th { text-align: left } td { font-variant-numeric: tabular-nums } td + td, th + th { text-align: right }
caption { text-align: left; color: #4a5568; padding-bottom: .3rem }
.note { color: #c53030; font-weight: 600 } figure { margin: .8rem 0 } figcaption { color: #4a5568 }
img { max-width: 100%; height: auto }
</style>
</head>
<body>
<h1>{{ page.title }}</h1>
{% for line in page.lines %}<p>{{ line }}</p>
{% endfor %}
{% for section in page.sections %}
<h2>{{ section.title }}</h2>
{% for note in section.notes %}<p class="note">{{ note }}</p>
{% endfor %}
{% for table in section.tables %}
<table><caption>{{ table.title }}</caption><tr>{% for name in table.columns %}<th>{{ name }}</th>{% endfor %}</tr>
{% for row in table.rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table>
{% endfor %}
{% for image in section.images %}
<figure><img alt="{{ image.title }}" src="data:image/png;base64,{{ encoded(image) }}">
<figcaption>{{ image.title }}</figcaption></figure>
{% endfor %}
{% endfor %}
</body>
</html>
"""


@dataclass(frozen=True)
class Grid:
    """A table of finished cells; the first column holds names, the others figures."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Image:
    """A plot: `name` is its file name without ending, `png` its bytes."""

    name: str
    title: str
    png: bytes


@dataclass(frozen=True)
class PageSection:
    """A part of the page; notes are warnings."""

    title: str
    tables: tuple[Grid, ...] = ()
    images: tuple[Image, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Page:
    """The whole page."""

    title: str
    lines: tuple[str, ...]
    sections: tuple[PageSection, ...]


def render(page: Page) -> str:
    """The page as HTML; every text of it is escaped.

    Raises:
        InvalidInput: Jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError as error:
        raise InvalidInput(f"{error.name} is not installed", remedy=BENCH_EXTRA) from None
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_PAGE).render(page=page, encoded=lambda image: base64.b64encode(image.png).decode())
