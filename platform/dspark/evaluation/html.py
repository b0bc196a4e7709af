"""Parts of a page that loads nothing else: plots, tables, figures as text."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from dspark.provenance import write_bytes

DASH = "–"

STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #f6f7f9; margin: 0; }
main { max-width: 1040px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 26px; margin: 0; } h2 { font-size: 18px; margin: 36px 0 10px; }
p.note { color: #666; margin: 4px 0 12px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin-top: 20px; }
.card, .panel { background: #fff; border: 1px solid #e3e6ea; border-radius: 8px; padding: 12px 14px; }
.panel { overflow-x: auto; }
.card b { display: block; font-size: 20px; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.card span { color: #666; font-size: 13px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 6px 10px; border-bottom: 1px solid #e3e6ea; text-align: left; white-space: nowrap; }
th.number, td.number { text-align: right; }
th { font-size: 13px; color: #555; } tr:last-child td { border-bottom: 0; } tr.total td { font-weight: 600; }
img { width: 100%; height: auto; display: block; }
"""


def write_page(path: str | Path, title: str, sections: Sequence[str]) -> None:
    """One HTML file of the sections that are not empty."""
    body = "\n".join(section for section in sections if section)
    page = (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><main>\n{body}\n</main></body></html>\n"
    )
    write_bytes(path, page.encode("utf-8"))


def picture(title: str, uri: str | None, note: str) -> str:
    """A titled plot; nothing when there is none."""
    if uri is None:
        return ""
    heading = f"<h2>{escape(title)}</h2><p class='note'>{escape(note)}</p>"
    return f"{heading}<div class='panel'><img alt='{escape(title, quote=True)}' src='{uri}'></div>"


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, num_text: int, note: str = "") -> str:
    """A titled table whose columns after the first `num_text` hold numbers; nothing when there are no rows."""
    if not rows:
        return ""
    classes = ["" if n < num_text else " class='number'" for n in range(len(columns))]
    head = "".join(f"<th{c}>{escape(column)}</th>" for c, column in zip(classes, columns, strict=True))
    lines = []
    for row in rows:
        cells = "".join(f"<td{c}>{escape(cell)}</td>" for c, cell in zip(classes, row, strict=True))
        lines.append(f"<tr class='total'>{cells}</tr>" if "overall" in row[:num_text] else f"<tr>{cells}</tr>")
    shown_note = f"<p class='note'>{escape(note)}</p>" if note else ""
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    return f"<h2>{escape(title)}</h2>{shown_note}<div class='panel'>{table}</div>"


def decimal(value: float | None, digits: int = 2) -> str:
    """With thousands separated, a dash for None."""
    return DASH if value is None else f"{value:,.{digits}f}"


def percent(value: float | None) -> str:
    """A share as percent, a dash for None."""
    return DASH if value is None else f"{100 * value:.2f} %"


def count(value: Any) -> str:
    """With thousands separated."""
    return f"{value:,}" if isinstance(value, int) else str(value)


def interval(bounds: Sequence[float] | None) -> str:
    """From … to, a dash for None."""
    return DASH if bounds is None else f"{bounds[0]:.2f} … {bounds[1]:.2f}"
