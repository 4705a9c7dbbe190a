// Curves over the steps of one or several runs, on uPlot: one cursor for all curves; a click selects a step.

import { colour, h, short } from "./lib.js";

const HEIGHT = 168;
const DASHES = [[], [6, 4], [2, 3]];
const together = uPlot.sync("steps");

/**
 * spec: {title, unit, hint, series: [{column, label}]}; runs: [{name, colour, table, x}] with columns by name.
 * Returns {element, draw(runs, xLabel), destroy()}.
 */
export function chart(spec, choose) {
  const box = h("div", { class: "plot" });
  const values = h("div", { class: "values", "aria-hidden": "true" });
  const element = h("figure", { class: "chart", "aria-label": spec.title },
    h("figcaption", {}, h("span", { class: "title" }, spec.title), spec.unit && h("span", { class: "unit" }, spec.unit), values), box);
  let plot = null;
  let observer = null;

  function draw(runs, axis) {
    plot?.destroy();
    observer?.disconnect();
    const tables = [], series = [];
    for (const [n, run] of runs.entries())
      for (const [k, { column, label, points }] of spec.series.entries()) {
        const given = points ? run.points?.[column] : run.table[column] && [run.x, run.table[column]];
        if (!given || !given[1].some((value) => value !== null)) continue;
        tables.push(given);
        const line = runs.length > 1 ? run.colour : colour(`--line-${k + 1}`);
        series.push({
          label: runs.length > 1 ? `${run.name}: ${label}` : label, stroke: line, width: 1.6, spanGaps: true,
          dash: runs.length > 1 ? DASHES[k] : [], of: n, points: points || given[1].filter((value) => value !== null).length === 1 ? { show: true, size: 6, fill: line } : { show: false },
        });
      }
    element.classList.toggle("empty", series.length === 0);
    box.replaceChildren();
    if (series.length === 0) return box.append(h("p", { class: "note" }, spec.hint ?? "Nothing of this yet."));
    const data = uPlot.join(tables);
    describe(element, spec, series, data);
    const grid = { stroke: colour("--grid"), width: 1 };
    const font = "11px system-ui, sans-serif";
    plot = new uPlot({
      width: Math.max(200, box.clientWidth), height: HEIGHT, legend: { show: false }, padding: [8, 8, 0, 0],
      scales: { x: { time: false }, y: { range: (u, low, high) => spread(low, high, spec.from) } },
      cursor: { sync: { key: together.key, setSeries: false }, drag: { x: true, y: false }, points: { size: 6 } },
      axes: [
        { stroke: colour("--muted"), font, grid: { show: false }, ticks: { ...grid, size: 4 }, size: 26, incrs: axis.incrs ?? undefined, values: (u, ticks) => ticks.map((t) => axis.write(t)) },
        { stroke: colour("--muted"), font, grid, ticks: { show: false }, size: 46, values: (u, ticks) => ticks.map(short) },
      ],
      series: [{}, ...series],
      hooks: { setCursor: [(u) => tell(u, series)], ready: [(u) => clicks(u, runs)] },
    }, data, box);
    tell(plot, series);
    observer = new ResizeObserver(() => plot.setSize({ width: Math.max(200, box.clientWidth), height: HEIGHT }));
    observer.observe(box);
  }

  function tell(u, series) {
    const at = u.cursor.idx ?? u.data[0].length - 1;
    values.replaceChildren(...series.map((one, n) => {
      let row = at;
      while (row > 0 && (u.data[n + 1][row] === null || u.data[n + 1][row] === undefined)) row--;
      return h("span", { vars: { "--of": one.stroke } }, h("i", {}), one.label, " ", h("b", {}, short(u.data[n + 1][row])));
    }));
  }

  /** Whether the pointer press became a drag, which zooms. */
  function clicks(u, runs) {
    let pressed = 0;
    u.over.addEventListener("mousedown", (event) => { pressed = event.clientX; });
    u.over.addEventListener("click", (event) => Math.abs(event.clientX - pressed) < 4 && pick(u, runs));
  }

  function pick(u, runs) {
    if (u.cursor.idx === null || u.cursor.idx === undefined) return;
    const at = u.data[0][u.cursor.idx];
    const { x, table } = runs[0];
    let nearest = 0;
    for (let n = 0; n < x.length; n++) if (Math.abs(x[n] - at) < Math.abs(x[nearest] - at)) nearest = n;
    if (x.length) choose(table.step[nearest]);
  }

  return { element, draw, destroy: () => { plot?.destroy(); observer?.disconnect(); } };
}

/** Description of the curve for screen readers. */
function describe(element, spec, series, data) {
  const said = series.map(({ label }, n) => {
    const known = data[n + 1].filter((value) => value !== null && value !== undefined);
    return `${label} from ${short(known[0])} to ${short(known[known.length - 1])}`;
  });
  element.setAttribute("aria-label", `${spec.title}: ${said.join("; ")}`);
}

function spread(low, high, from) {
  if (low === null || high === null) return [0, 1];
  const least = from === undefined ? low : Math.min(from, low);
  const room = (high - least) * 0.06 || Math.abs(high) * 0.1 || 1;
  return [from === undefined ? least - room : least, high + room];
}
