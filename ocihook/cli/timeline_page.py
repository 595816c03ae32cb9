"""A timeline as one HTML page: a picture and a table, without scripts or external resources."""

import math
import time
from collections.abc import Iterator
from html import escape

from ocihook.cli.render import format_bytes
from ocihook.session.timeline import Bar, Timeline

_LABELS, _PLOT, _MARGIN = 230, 900, 24  # widths in units of the picture
_ROW, _BAR, _AXIS = 20, 15, 26  # heights
_CHARACTER = 6.2  # width of one in a bar's label, at most
_SMALLEST = 1.5  # so that what took no time is visible
_TICKS = 8

_DRIVER = {"lock", "checkpoint", "restore", "unlock", "gpu lock", "gpu checkpoint", "gpu resume", "release"}
_COPIES = (
    *("pack", "stage", "assemble", "store", "move out", "give back", "write back", "memory ", "unpack"),
    *("merge", "snapshot "),
)

_STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --text: #1b1f24; --faint: #5b6570; --line: #d5dae0;
  --driver: #b9d4f5; --copy: #bfe3c4; --criu: #f5d9ae; --other: #dde1e6; --failed: #f3b5b0; --edge: #57606a; }
@media (prefers-color-scheme: dark) { :root { --page: #14171a; --text: #e6e9ec; --faint: #9aa4af; --line: #333a42;
  --driver: #24507f; --copy: #27593a; --criu: #6e4d17; --other: #3b434c; --failed: #85302b; --edge: #aab4be; } }
body { background: var(--page); color: var(--text); font: 14px/1.45 system-ui, sans-serif; margin: 24px auto;
  max-width: 1180px; padding: 0 16px; }
h1 { font-size: 20px; margin: 0 0 4px; } p { margin: 4px 0; color: var(--faint); overflow-wrap: anywhere; }
p.error { color: var(--text); border-left: 4px solid var(--failed); padding-left: 8px; }
figure { margin: 16px 0; overflow-x: auto; } svg { width: 100%; min-width: 760px; height: auto; display: block; }
svg text { font: 11px system-ui, sans-serif; fill: var(--text); } svg .faint { fill: var(--faint); }
svg line { stroke: var(--line); } svg rect { stroke: var(--edge); stroke-width: .5; }
.driver { fill: var(--driver); background: var(--driver); } .copy { fill: var(--copy); background: var(--copy); }
.criu { fill: var(--criu); background: var(--criu); } .other { fill: var(--other); background: var(--other); }
.failed { fill: var(--failed); background: var(--failed); } svg rect.estimated { stroke-dasharray: 3 2; opacity: .75; }
.key span { display: inline-block; padding: 0 8px; margin-right: 8px; color: var(--text); border-radius: 3px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 3px 8px; border-bottom: 1px solid var(--line); overflow-wrap: anywhere; }
th { color: var(--faint); font-weight: 600; } .number { text-align: right; white-space: nowrap; }
"""


def page(timeline: Timeline) -> str:
    """Return the page. Names in it, which containers chose, are escaped."""
    title = f"{timeline.act} of {timeline.who}"
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(timeline.began))
    facts = [f"session {timeline.session}", when, f"{timeline.seconds:.3f} s", timeline.outcome]
    facts += [f"checkpoint {timeline.checkpoint}"] if timeline.checkpoint else []
    error = f'<p class="error">{escape(timeline.error)} ({escape(timeline.error_code)})</p>' if timeline.error else ""
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>{_STYLE}</style></head><body>
<h1>{escape(title)}</h1><p>{escape(" · ".join(facts))}</p>{error}
<figure>{_picture(timeline, title)}</figure>
<p class="key"><span class="driver">CUDA driver</span><span class="copy">memory copied</span>
<span class="criu">CRIU</span><span class="other">other</span><span class="failed">failed</span>
Dashed: as long as CRIU says; where it begins is estimated.</p>
<table><thead><tr><th>Who</th><th>What</th><th class="number">Start</th><th class="number">Duration</th>
<th class="number">Bytes</th><th class="number">Rate</th></tr></thead><tbody>
{"".join(_table_row(bar) for bar in timeline.bars)}</tbody></table></body></html>
"""


def _picture(timeline: Timeline, title: str) -> str:
    scale = _PLOT / max(timeline.seconds, 1e-3)
    shapes: list[str] = []
    top = _AXIS
    for lane in timeline.lanes:
        rows = _rows([bar for bar in timeline.bars if bar.lane == lane], scale)
        label = lane if len(lane) <= 34 else f"{lane[:19]}…{lane[-12:]}"
        shapes.append(f'<line x1="0" x2="{_LABELS + _PLOT}" y1="{top}" y2="{top}"/>')
        shapes.append(f'<text x="0" y="{top + 14}">{escape(label)}<title>{escape(lane)}</title></text>')
        for number, row in enumerate(rows):
            shapes += _shapes(row, top + number * _ROW + (_ROW - _BAR) / 2, scale)
        top += len(rows) * _ROW + 4
    axis = "".join(
        f'<line x1="{_LABELS + at * scale:.1f}" x2="{_LABELS + at * scale:.1f}" y1="{_AXIS - 8}" y2="{top}"/>'
        f'<text class="faint" x="{_LABELS + at * scale + 3:.1f}" y="{_AXIS - 10}">{at:g} s</text>'
        for at in _ticks(timeline.seconds)
    )
    width = _LABELS + _PLOT + _MARGIN
    return f'<svg viewBox="0 0 {width} {top}" role="img" aria-label="{escape(title)}">{axis}{"".join(shapes)}</svg>'


def _rows(bars: list[Bar], scale: float) -> list[list[Bar]]:
    """Put bars that would overlap into separate rows."""
    rows: list[list[Bar]] = []
    for bar in sorted(bars, key=lambda bar: bar.start_s):
        for row in rows:
            if row[-1].start_s + max(row[-1].seconds, _SMALLEST / scale) <= bar.start_s + 1e-4:
                row.append(bar)
                break
        else:
            rows.append([bar])
    return rows


def _shapes(row: list[Bar], y: float, scale: float) -> Iterator[str]:
    for bar, after in zip(row, [*row[1:], None], strict=True):
        x, width = _LABELS + bar.start_s * scale, max(bar.seconds * scale, _SMALLEST)
        kind = _kind(bar) + (" estimated" if bar.is_estimated else "")
        tip = escape(f"{bar.name}: {_duration(bar)} from {bar.start_s:.3f} s on{_moved(bar)}")
        yield (
            f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{_BAR}" rx="2">'
            f"<title>{tip}</title></rect>"
        )
        end = _LABELS + (after.start_s * scale if after else _PLOT + _MARGIN)
        for label in (f"{bar.name} {_duration(bar)}", bar.name):
            room = len(label) * _CHARACTER + 8
            if room <= width or room <= end - x - width:
                at = x + 4 if room <= width else x + width + 4
                yield f'<text x="{at:.1f}" y="{y + 11.5:.1f}" pointer-events="none">{escape(label)}</text>'
                break


def _kind(bar: Bar) -> str:
    if bar.failed:
        return "failed"
    if bar.lane.startswith("CRIU"):
        return "criu"
    if bar.name in _DRIVER or bar.lane.startswith("GPU-"):
        return "driver"
    return "copy" if bar.name.removeprefix("gpu ").startswith(_COPIES) else "other"


def _ticks(seconds: float) -> list[float]:
    step = 10 ** math.floor(math.log10(max(seconds, 1e-3) / _TICKS))
    step = next(step * factor for factor in (1, 2, 5, 10) if max(seconds, 1e-3) / (step * factor) <= _TICKS)
    return [round(number * step, 9) for number in range(int(seconds / step) + 1)]


def _duration(bar: Bar) -> str:
    return f"{bar.seconds:.2f} s" if bar.seconds >= 1 else f"{bar.seconds * 1000:.1f} ms"


def _moved(bar: Bar) -> str:
    rate = bar.bytes_per_s
    return f", {format_bytes(bar.bytes)}, {format_bytes(int(rate))}/s" if rate else ""


def _table_row(bar: Bar) -> str:
    rate = bar.bytes_per_s
    numbers = [f"{'≈ ' if bar.is_estimated else ''}{bar.start_s:.3f} s", _duration(bar)]
    numbers += [format_bytes(bar.bytes) if bar.bytes else "", f"{format_bytes(int(rate))}/s" if rate else ""]
    name = bar.name + (" (failed)" if bar.failed else "")
    cells = "".join(f'<td class="number">{number}</td>' for number in numbers)
    return f"<tr><td>{escape(bar.lane)}</td><td>{escape(name)}</td>{cells}</tr>\n"
