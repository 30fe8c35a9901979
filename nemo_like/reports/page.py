"""Parts of a self-contained HTML page: style, sections, tables; no scripts, no external resources."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

STYLE = """
:root { color-scheme: light dark;
  --paper: #fcfcfa; --ink: #20211f; --muted: #6d6e69; --rule: #e3e2dc; --room: #f0efea; --panel: #f6f5f1;
  --real: #35618e; --padding: #e0a458; --mark: #a9a9a2; --budget: #b3452c; --mean: #20211f; --chosen: #eef3f8;
  --weights: #2f5579; --gradients: #4d7ca8; --optimizer: #86a9c9; --ema: #a8c3da; --reference: #8a79a8; --gathered: #4f8f86; --dequantized: #7fb3ab;
  --teacher: #6f8f4a;
  --activations: #d09a45; --logits: #b9674b; --backward: #b9674b; --on-part: #ffffff; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #16181b; --ink: #e6e4de; --muted: #9a9b96; --rule: #2d3035; --room: #202327; --panel: #1c1f23;
  --real: #7aa9d6; --padding: #c58a3f; --mark: #63666a; --budget: #e2795d; --mean: #e6e4de; --chosen: #1f2a35;
  --weights: #5c8dbd; --gradients: #3f6c98; --optimizer: #2d4f71; --ema: #24405c; --reference: #77669a; --gathered: #3f7d74; --dequantized: #2c5c55;
  --teacher: #5d7a3c;
  --activations: #b07f35; --logits: #a9573d; --backward: #a9573d; --on-part: #f4f3ef; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1024px; margin: 0 auto; padding: 48px 32px 72px; }
h1 { font-size: 25px; font-weight: 620; letter-spacing: -0.012em; margin: 0 0 6px; }
h2 { font-size: 16.5px; font-weight: 620; margin: 52px 0 4px; }
p { margin: 0 0 14px; max-width: 78ch; }
.note { font-size: 13.5px; border-left: 3px solid var(--mark); padding-left: 12px; margin-bottom: 8px; }
.lead, .caption { color: var(--muted); }
.caption { font-size: 13.5px; margin-bottom: 16px; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(146px, 1fr)); gap: 1px; margin: 30px 0 0;
  background: var(--rule); border: 1px solid var(--rule); border-radius: 8px; overflow: hidden; }
.figure { background: var(--paper); padding: 15px 17px 13px; }
.figure b { display: block; font-size: 23px; font-weight: 600; letter-spacing: -0.015em; font-variant-numeric: tabular-nums; }
.figure span { color: var(--muted); font-size: 12.5px; line-height: 1.35; display: block; }
.scroll { overflow-x: auto; margin-top: 14px; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 6px 0 6px 14px; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th { font-weight: 500; color: var(--muted); font-size: 12.5px; vertical-align: bottom; white-space: normal; line-height: 1.3; }
th:first-child, td:first-child { text-align: left; padding-left: 8px; }
td:last-child, th:last-child { padding-right: 8px; }
tr.chosen td { background: var(--chosen); font-weight: 600; }
.meter { display: inline-block; width: 74px; height: 7px; margin-left: 9px; background: var(--room); border-radius: 2px;
  text-align: left; }
.meter i { display: block; height: 7px; background: var(--real); border-radius: 2px; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { font: 11.5px system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; fill: var(--muted);
  font-variant-numeric: tabular-nums; }
svg text.name { font-size: 12.5px; font-weight: 600; fill: var(--ink); }
svg text.label { fill: var(--ink); }
svg text.on-part { fill: var(--on-part); }
.real { fill: var(--real); } .padding { fill: var(--padding); } .room { fill: var(--room); }
.axis { stroke: var(--mark); } .grid { stroke: var(--rule); } .mark { stroke: var(--mark); }
.budget { stroke: var(--budget); stroke-width: 1.4; } .mean { stroke: var(--mean); stroke-dasharray: 3 2.5; stroke-width: 1.2; }
.part-weights { fill: var(--weights); } .part-gradients { fill: var(--gradients); } .part-optimizer { fill: var(--optimizer); } .part-ema { fill: var(--ema); }
.part-reference { fill: var(--reference); } .part-gathered { fill: var(--gathered); } .part-dequantized { fill: var(--dequantized); } .part-teacher { fill: var(--teacher); } .part-logits { fill: var(--logits); }
.part-activations { fill: var(--activations); } .part-backward { fill: var(--backward); }
.legend { display: flex; flex-wrap: wrap; gap: 4px 20px; font-size: 12.5px; color: var(--muted); margin: 0 0 14px; }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 7px; vertical-align: -1px; }
.legend i.thin { width: 14px; height: 0; border-top: 2px solid; border-radius: 0; vertical-align: 3px; }
.legend i.dashed { border-top-style: dashed; }
ul { padding-left: 18px; margin: 10px 0 0; font-size: 13.5px; color: var(--muted); }
li { margin-bottom: 7px; max-width: 92ch; }
footer { margin-top: 56px; padding-top: 14px; border-top: 1px solid var(--rule); color: var(--muted); font-size: 12.5px; }
@media (max-width: 640px) { main { padding: 28px 16px 48px; } }
@media print { main { max-width: none; padding: 0; } h2 { break-after: avoid; } svg, tr { break-inside: avoid; } }
"""


def page(title: str, body: Iterable[str], footer: str) -> str:
    """Return the complete document."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><main>\n"
        + "\n".join(body)
        + f"\n<footer>{escape(footer)}</footer>\n</main></body></html>\n"
    )


def section(title: str, caption: str, *content: object) -> str:
    """Return a section with a heading, a caption and its content."""
    return (
        f'<section><h2>{escape(title)}</h2><p class="caption">{escape(caption)}</p>'
        + "".join(map(str, content))
        + "</section>"
    )


def figures(values: Iterable[tuple[str, str]]) -> str:
    """Return the key figures, (number, description) each."""
    cells = "".join(
        f'<div class="figure"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
        for value, name in values
    )
    return f'<div class="figures">{cells}</div>'


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """Return the legend of a chart from (color, meaning): `-budget` is a line, `--mean` a dashed one."""
    marks = []
    for color, meaning in entries:
        name = color.lstrip("-")
        num_dashes = len(color) - len(name)
        kind = ("", "thin", "thin dashed")[num_dashes]
        style = f"border-color:var(--{name})" if kind else f"background:var(--{name})"
        marks.append(f'<span><i class="{kind}" style="{style}"></i>{escape(meaning)}</span>')
    return f'<div class="legend">{"".join(marks)}</div>'


def table(heads: Sequence[str], rows: Iterable[tuple[Sequence[str], bool]]) -> str:
    """Return a table with one (cells, is chosen) per row; cells are HTML with escaped text."""
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = ""
    for cells, is_chosen in rows:
        kind = " class=chosen" if is_chosen else ""
        columns = "".join(f"<td>{cell}</td>" for cell in cells)
        body += f"<tr{kind}>{columns}</tr>"
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def meter(share: float) -> str:
    """Return a small bar behind a number, for a share from 0 to 1."""
    percent = 100 * min(max(share, 0.0), 1.0)
    return f'<span class="meter"><i style="width:{percent:.1f}%"></i></span>'


def bullets(lines: Iterable[str]) -> str:
    """Return a list with one item per line."""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>"
