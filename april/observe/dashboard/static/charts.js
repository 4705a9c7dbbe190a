// Curves over the steps of one or several runs, on uPlot: one cursor for all curves; a click selects a step.

import { colour, h, short } from "./lib.js";

const HEIGHT = 168;
const DASHES = [[], [6, 4], [2, 3]];
/** Steps above which a line is faint and has its moving mean over it, and a stack has one outline instead of bars. */
const MANY_STEPS = 60;
const together = uPlot.sync("steps");

/**
 * spec: one of CHARTS in pictures.js; runs: [{name, colour, table, x, marks}] with columns by name and the positions of resumes.
 * Returns {element, draw(runs, axis), destroy()}.
 */
export function chart(spec, choose) {
  const box = h("div", { class: "plot" });
  const values = h("div", { class: "values", "aria-hidden": "true" });
  const element = h("figure", { class: "chart", "aria-label": spec.title },
    h("figcaption", {}, h("span", { class: "title" }, spec.title), spec.unit && h("span", { class: "unit" }, spec.unit), values), box, spec.why && h("p", { class: "note" }, spec.why));
  const write = spec.write ?? short;
  let plot = null;
  let observer = null;

  function draw(runs, axisOfAll, { smooth = "", log = false } = {}) {
    plot?.destroy();
    observer?.disconnect();
    const axis = spec.axis ?? axisOfAll;
    const lines = linesOf(spec, runs);
    element.classList.toggle("empty", lines.length === 0);
    element.hidden = Boolean(spec.optional) && lines.length === 0;
    box.replaceChildren();
    if (lines.length === 0) return box.append(h("p", { class: "note" }, spec.hint ?? "Nothing of this yet."));
    const isLog = log && !spec.stack && !spec.axis;
    const drawn = lines.flatMap((line) => faintAndMean(isLog ? { ...line, y: line.y.map((value) => (value > 0 ? Math.log10(value) : null)) } : line, smooth));
    const data = uPlot.join(drawn.map(({ x, y }) => [x, y]));
    const own = uPlot.join(lines.map(({ x, y, own }) => [x, own ?? y]));
    describe(element, spec, lines, own);
    const grid = { stroke: colour("--grid"), width: 1 };
    const font = "11px system-ui, sans-serif";
    const side = spec.stack ? (data[0].at(-1) - data[0][0]) / (data[0].length - 1) / 2 || 0.5 : 0;
    plot = new uPlot({
      width: Math.max(200, box.clientWidth), height: HEIGHT, legend: { show: false }, padding: [8, 16, 0, 0],
      scales: { x: { time: false, range: (u, low, high) => [low - side, high + side] }, y: { range: (u, low, high) => spread(low, high, isLog ? undefined : spec.from) } },
      cursor: { sync: spec.axis ? undefined : { key: together.key, setSeries: false }, drag: { x: true, y: false }, points: { size: 6 } },
      axes: [
        { stroke: colour("--muted"), font, grid: { show: false }, ticks: { ...grid, size: 4 }, size: 26, incrs: axis.incrs ?? undefined, values: (u, ticks) => ticks.map((t) => axis.write(t)) },
        { stroke: colour("--muted"), font, grid, ticks: { show: false }, size: 46, values: (u, ticks) => ticks.map((tick) => write(isLog ? 10 ** tick : tick)) },
      ],
      series: [{}, ...drawn.map((line) => styled(spec, line))],
      hooks: { setCursor: [(u) => tell(u, lines, own)], ready: [(u) => !spec.axis && clicks(u, runs)], draw: [(u) => !spec.axis && resumes(u, runs[0].marks)] },
    }, data, box);
    tell(plot, lines, own);
    observer = new ResizeObserver(() => plot.setSize({ width: Math.max(200, box.clientWidth), height: HEIGHT }));
    observer.observe(box);
  }

  function tell(u, lines, own) {
    const at = u.cursor.idx ?? own[0].length - 1;
    const shown = lines.map((line, n) => {
      let row = at;
      while (row > 0 && (own[n + 1][row] === null || own[n + 1][row] === undefined)) row--;
      return h("span", { vars: { "--of": line.stroke } }, h("i", {}), line.name, line.steps ? null : [" ", h("b", {}, write(own[n + 1][row]))]);
    });
    values.replaceChildren(...(spec.stack ? shown.reverse() : shown));
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

/** The lines that have values: [{name, stroke, dash, x, y, own, points, steps}]; a stack is of the first run alone. */
function linesOf(spec, runs) {
  const many = runs.length > 1 && !spec.stack;
  return (spec.stack ? runs.slice(0, 1) : runs).flatMap((run) => {
    const series = typeof spec.series === "function" ? spec.series(run) : spec.series;
    const lines = series.map((one, k) => {
      const [x, y] = one.data ?? [run.x, run.table[one.column]];
      return {
        x, y, points: one.points, steps: one.steps, name: many ? `${run.name}: ${one.label}` : one.label,
        stroke: many ? run.colour : colour(one.colour ?? `--line-${k + 1}`), dash: many ? DASHES[k] : [],
      };
    }).filter(({ y }) => y?.some((value) => value !== null && (!spec.stack || value)));
    return spec.stack ? stacked(lines) : lines;
  });
}

/** Each part on top of those before it, with its `own` values; the highest comes first, and the others are drawn over it. */
function stacked(parts) {
  let below = parts[0]?.y.map(() => 0);
  return parts.map((part) => {
    below = part.y.map((value, row) => below[row] + (value ?? 0));
    return { ...part, y: below, own: part.y };
  }).reverse();
}

/** The line, faint, and its moving mean over `smooth` steps; by default over some where there are many, otherwise the line alone. */
function faintAndMean(line, smooth) {
  const { x, y, own, points, steps, stroke } = line;
  const radius = smooth === "" ? (x.length > MANY_STEPS ? Math.floor(x.length / 60) + 1 : 0) : Math.floor(Number(smooth) / 2);
  if (own || points || steps || !radius) return [line];
  const mean = y.map((_, row) => {
    const known = y.slice(Math.max(0, row - radius), row + radius + 1).filter((value) => value !== null);
    return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
  });
  return [{ ...line, stroke: `color-mix(in srgb, ${stroke} 35%, transparent)` }, { ...line, y: mean }];
}

function styled(spec, { name, x, y, stroke, dash, points, steps }) {
  const alone = y.filter((value) => value !== null).length === 1;
  const line = { label: name, stroke, width: 1.6, spanGaps: true, dash, points: (points || alone) && !steps && !spec.stack ? { show: true, size: 6, fill: stroke } : { show: false } };
  if (spec.stack) return { ...line, width: 0, fill: stroke, paths: x.length > MANY_STEPS ? uPlot.paths.stepped({ align: -1 }) : uPlot.paths.bars({ size: [1, Infinity] }) };
  if (steps === "filled") return { ...line, width: 0, fill: `color-mix(in srgb, ${stroke} 35%, transparent)`, paths: uPlot.paths.stepped({ align: 1 }) };
  return steps ? { ...line, paths: uPlot.paths.stepped({ align: 1 }) } : line;
}

/** Dotted lines where the run was resumed. */
function resumes(u, marks) {
  const { ctx, bbox } = u;
  ctx.save();
  ctx.strokeStyle = colour("--muted");
  ctx.setLineDash([2 * devicePixelRatio, 3 * devicePixelRatio]);
  ctx.beginPath();
  for (const x of marks.filter((x) => x >= u.scales.x.min && x <= u.scales.x.max)) {
    const left = Math.round(u.valToPos(x, "x", true));
    ctx.moveTo(left, bbox.top);
    ctx.lineTo(left, bbox.top + bbox.height);
  }
  ctx.stroke();
  ctx.restore();
}

/** Description of the curve for screen readers. */
function describe(element, spec, lines, data) {
  const said = lines.map(({ name }, n) => {
    const known = data[n + 1].filter((value) => value !== null && value !== undefined);
    return `${name} from ${short(known[0])} to ${short(known[known.length - 1])}`;
  });
  element.setAttribute("aria-label", `${spec.title}: ${said.join("; ")}`);
}

function spread(low, high, from) {
  if (low === null || high === null) return [0, 1];
  const least = from === undefined ? low : Math.min(from, low);
  const room = (high - least) * 0.06 || Math.abs(high) * 0.1 || 1;
  return [from === undefined ? least - room : least, high + room];
}
