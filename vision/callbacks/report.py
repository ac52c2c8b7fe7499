"""One self-contained HTML page: everything in it is escaped or inlined, nothing is fetched, nothing is executed."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 62rem; margin: 2rem auto; }
body { padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; border-bottom: 1px solid #ddd; }
.result { font-size: 1.9rem; font-weight: 600; margin: .6rem 0 0; }
.note { color: #666; margin: 0; }
img { max-width: 100%; height: auto; }
table { border-collapse: collapse; font-size: .92rem; }
td, th { padding: .15rem .9rem .15rem 0; text-align: left; vertical-align: top; }
tbody th { font-weight: 400; color: #666; white-space: nowrap; }
thead th { border-bottom: 1px solid #bbb; }
.numbers td:not(:first-child), .numbers th:not(:first-child) { text-align: right; }
pre { background: #f5f5f5; padding: .7rem .9rem; overflow-x: auto; font-size: .85rem; }
"""
META = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'


def page(title: str, sections: Iterable[str]) -> str:
    """The whole page; the sections are HTML."""
    head = f"{META}<title>{escape(title)}</title><style>{STYLE}</style>"
    body = "\n".join(sections)
    return f'<!doctype html>\n<html lang="en">\n<head>{head}</head>\n<body>\n{body}\n</body>\n</html>\n'


def heading(title: str, result: str = "", note: str = "") -> str:
    parts = [f"<h1>{escape(title)}</h1>"]
    parts += [f'<p class="result">{escape(result)}</p>'] if result else []
    parts += [f'<p class="note">{escape(note)}</p>'] if note else []
    return "\n".join(parts)


def section(title: str, *parts: str) -> str:
    """A headline and what belongs to it; nothing without the latter."""
    content = "\n".join(part for part in parts if part)
    return f"<h2>{escape(title)}</h2>\n{content}" if content else ""


def facts(pairs: Iterable[tuple[str, object]]) -> str:
    """A table of names and values; values that are empty are left out."""
    rows = [f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>" for name, value in pairs if value not in (None, "")]
    return f"<table><tbody>{''.join(rows)}</tbody></table>" if rows else ""


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table whose columns, but the first, hold numbers."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return f'<table class="numbers"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def text(paragraph: str) -> str:
    return f'<p class="note">{escape(paragraph)}</p>'


def code(lines: str) -> str:
    return f"<pre>{escape(lines)}</pre>"


def folded(summary: str, content: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def picture(path: Path, description: str) -> str:
    """A PNG file, inlined."""
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<p><img alt="{escape(description)}" src="data:image/png;base64,{data}"></p>'
