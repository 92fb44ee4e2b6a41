"""The report's looks: one style sheet, light and dark, and the few lines of script behind the hover text."""

CSS = """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --ink: #1a202c; --soft: #64748b; --line: #e4e8ee; --grid: #eef1f5;
  --good: #0f8a5f; --bad: #c9364f; --warn: #b06a00; --set: #eef4ff;
  --c0: #2f6fed; --c1: #e8833a; --c2: #17a589; --c3: #8e5bd9; --c4: #d9487d; --c5: #7a8699; --c6: #c2a11d; --c7: #3aa0c9;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0f1319; --card: #171c24; --ink: #e6eaf0; --soft: #94a1b3; --line: #262d38; --grid: #212833;
    --good: #43c491; --bad: #f0738a; --warn: #e5a54b; --set: #1c2a42;
    --c0: #6c9dfc; --c1: #f5a667; --c2: #45cdb1; --c3: #b28cf2; --c4: #f27ba8; --c5: #93a0b4; --c6: #e0c452; --c7: #6cc4e8;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI",
  Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif; font-variant-numeric: tabular-nums; }
main { max-width: 1240px; margin: 0 auto; padding: 36px 24px 60px; }
header { display: flex; align-items: baseline; gap: 14px; flex-wrap: wrap; }
h1 { font-size: 26px; margin: 0; letter-spacing: -0.015em; }
h2 { font-size: 17px; margin: 40px 0 14px; letter-spacing: -0.005em; }
h3 { font-size: 14px; margin: 0; font-weight: 600; }
.lead { color: var(--soft); margin: 6px 0 0; }
.badge { font-size: 12px; font-weight: 600; padding: 2px 10px; border-radius: 999px; border: 1px solid currentColor; }
.badge.finished { color: var(--good); } .badge.interrupted, .badge.unfinished { color: var(--warn); } .badge.failed { color: var(--bad); }
.error { border-left: 3px solid var(--bad); padding: 8px 14px; margin: 18px 0 0; background: var(--card);
  white-space: pre-wrap; overflow-wrap: anywhere; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(172px, 1fr)); gap: 14px; margin-top: 24px; }
.tile, .plot, .card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.tile { padding: 14px 16px; }
.tile .name { color: var(--soft); font-size: 13px; }
.tile .value { font-size: 25px; font-weight: 650; letter-spacing: -0.02em; line-height: 1.3; white-space: nowrap; }
.tile .more { font-size: 13px; color: var(--soft); }
.up { color: var(--good); font-weight: 600; } .down { color: var(--bad); font-weight: 600; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(360px, 1fr)); gap: 14px; }
.plot { margin: 0; padding: 14px 14px 6px; min-width: 0; display: flex; flex-direction: column; }
.plot svg { margin-top: auto; }
.plot figcaption { display: flex; flex-wrap: wrap; align-items: baseline; gap: 2px 10px; padding: 0 4px 6px; }
.note { color: var(--soft); font-size: 12px; }
.legend { width: 100%; display: flex; flex-wrap: wrap; gap: 2px 14px; font-size: 12.5px; color: var(--soft); }
.legend b { color: var(--ink); font-weight: 600; }
.key i { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 5px; background: var(--c); }
svg { width: 100%; height: auto; display: block; touch-action: none; }
.grid { stroke: var(--grid); stroke-width: 1; }
.tick { fill: var(--soft); font-size: 11px; }
.line { fill: none; stroke: var(--c); stroke-width: 1.9; stroke-linejoin: round; stroke-linecap: round; }
.line.raw { stroke-width: 1; opacity: .35; }
.dot { fill: var(--card); stroke: var(--c); stroke-width: 2; }
rect { fill: var(--c); }
.cursor { stroke: var(--soft); stroke-width: 1; stroke-dasharray: 3 3; visibility: hidden; }
#hover { position: fixed; pointer-events: none; display: none; background: var(--ink); color: var(--page); font-size: 12px;
  line-height: 1.45; padding: 6px 10px; border-radius: 6px; white-space: pre; z-index: 9; }
.c0 { --c: var(--c0); } .c1 { --c: var(--c1); } .c2 { --c: var(--c2); } .c3 { --c: var(--c3); }
.c4 { --c: var(--c4); } .c5 { --c: var(--c5); } .c6 { --c: var(--c6); } .c7 { --c: var(--c7); }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(360px, 1fr)); gap: 14px; align-items: start; }
.card { padding: 6px 18px; overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th { text-align: left; font-weight: 500; color: var(--soft); }
td, th { padding: 7px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child td, tr:last-child th { border-bottom: 0; }
td + td, th + td, td.n, th.n { text-align: right; padding-left: 18px; }
td { overflow-wrap: anywhere; }
.bar { display: flex; height: 14px; border-radius: 4px; overflow: hidden; margin: 12px 0 6px; }
.bar i { background: var(--c); }
.samples { display: grid; grid-template-columns: repeat(auto-fill, minmax(360px, 1fr)); gap: 14px; }
.sample { padding: 12px 16px 14px; min-width: 0; }
.sample .head { display: flex; gap: 12px; font-size: 12.5px; color: var(--soft); }
.sample .head b { margin-left: auto; }
.sample pre { margin: 8px 0 0; padding: 8px 10px; background: var(--page); border-radius: 6px; max-height: 260px; overflow: auto; }
.sample pre.prompt { color: var(--soft); }
pre { font: 12.5px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; margin: 0; }
details.card { padding: 12px 18px; }
summary { cursor: pointer; font-weight: 600; }
.recipe { margin-top: 10px; columns: 3 320px; column-gap: 28px; }
.recipe .set { background: var(--set); border-radius: 3px; }
footer { color: var(--soft); font-size: 13px; margin-top: 36px; }
@media print { body { background: #fff; } .plot, .tile, .card { break-inside: avoid; } }
"""

SCRIPT = """
const box = document.getElementById("hover");
for (const svg of document.querySelectorAll("svg[data-hover]")) {
  const rows = JSON.parse(svg.dataset.hover), cursor = svg.querySelector(".cursor"), wide = svg.viewBox.baseVal.width;
  svg.addEventListener("pointermove", (event) => {
    const frame = svg.getBoundingClientRect(), at = (event.clientX - frame.left) / frame.width;
    let best = rows[0];
    for (const row of rows) if (Math.abs(row[1] - at) < Math.abs(best[1] - at)) best = row;
    cursor.setAttribute("x1", best[1] * wide); cursor.setAttribute("x2", best[1] * wide);
    cursor.style.visibility = "visible";
    box.textContent = best[0] + "\\n" + best[2];
    box.style.display = "block";
    const right = event.clientX + 16 + box.offsetWidth > innerWidth;
    box.style.left = (right ? event.clientX - 16 - box.offsetWidth : event.clientX + 16) + "px";
    box.style.top = Math.min(event.clientY + 14, innerHeight - box.offsetHeight - 6) + "px";
  });
  svg.addEventListener("pointerleave", () => { box.style.display = "none"; cursor.style.visibility = "hidden"; });
}
"""
