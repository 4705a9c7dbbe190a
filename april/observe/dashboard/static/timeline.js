// Timeline view: activities of workers and learner, and one sample's history, in a time window that is chosen on the strip
// above or by dragging.

import { addressOf, apiOf, ask, colour, duration, fill, h, note, sampleName, sampleOf } from "./lib.js";
import { drawLanes, GAP, KINDS, legendOf, MARKS, NAMES, ROW, rowsOf, sized, tellLanes, TOP } from "./lanes.js";

const OF_A_SAMPLE = [["score", "--line-4", "scoring"], ["act", "--line-5", "with its agent"]];
const CHUNK = ["chunk", "--ink", "its tokens come"];
const LEAST_S = 0.05;
/** Columns of the lanes of many steps. */
const SHARE_INTERVALS = 120;

export async function timelineView(place, { run, address, signal, follow }) {
  const { query } = address;
  let [from, to] = [Number(query.get("from")) || null, Number(query.get("to")) || null];
  const sample = query.get("sample") ? await ask(sampleOf(run.name, query.get("sample").split("."), query.get("discarded")), signal) : null;
  const kinds = sample ? [...KINDS, ...OF_A_SAMPLE] : KINDS;
  const marks = sample?.chunks?.length ? [...MARKS, CHUNK] : MARKS;
  let shown = null;
  let request = new AbortController();
  signal.addEventListener("abort", () => request.abort());

  const strip = h("canvas", { class: "strip", height: 56, tabindex: 0, role: "slider", "aria-valuemin": 0, "aria-valuemax": 0, "aria-valuenow": 0, "aria-valuetext": "not read yet", "aria-label": "The stretch of the run that is shown; arrow keys move it, plus and minus zoom" });
  const lanes = h("canvas", { class: "lanes", role: "img", "aria-label": "Lanes of the learner and the workers, not read yet" });
  const said = h("p", { class: "said", role: "status" }, "");
  const words = h("div", { class: "hidden" });
  const zoom = (factor) => shown && choose((shown.begin + shown.end) / 2 - ((shown.end - shown.begin) * factor) / 2, (shown.begin + shown.end) / 2 + ((shown.end - shown.begin) * factor) / 2);
  const move = (share) => shown && choose(shown.begin + share * (shown.end - shown.begin), shown.end + share * (shown.end - shown.begin));
  fill(place, h("h1", { class: "hidden" }, `Timeline of ${run.name}`),
    h("div", { class: "tools" }, [["Earlier", () => move(-0.5)], ["Later", () => move(0.5)], ["Closer", () => zoom(0.5)], ["Wider", () => zoom(2)], ["All", () => shown && choose(shown.origin, shown.last)], ["Newest", () => choose(null, null)]].map(([text, act]) => h("button", { type: "button", onclick: act }, text)),
      legendOf(kinds, marks)),
    strip, said, h("div", { class: "scroll" }, lanes), words);

  let table = await ask(`${apiOf(run.name)}/steps?columns=time,rollout_tokens_per_s,reward`, signal);
  if (!table.step.length) return fill(place, note("No step has been trained yet."));

  async function choose(begin, end) {
    if (!shown) return;
    [from, to] = [begin, end];
    history.replaceState(null, "", addressOf(run.name, "timeline", [], { from: from?.toFixed(3), to: to?.toFixed(3), sample: query.get("sample"), discarded: query.get("discarded") }));
    await load();
  }

  async function load() {
    request.abort();
    request = new AbortController();
    try {
      shown = await ask(`${apiOf(run.name)}/timeline${from && to ? `?from=${from}&to=${to}` : ""}`, request.signal);
    } catch (error) {
      if (error.name === "AbortError") return;
      throw error;
    }
    drawAll();
  }

  const rows = () => [...(sample ? [laneOf(sample, shown)] : []), ...rowsOf(shown)];
  const spansOf = (lane) => (sample?.spans ?? []).filter(({ where, began, ended }) => where === lane.worker && ended >= shown.begin && began <= shown.end);

  function drawStrip() {
    const [pen, width] = sized(strip, 56);
    const [first, last] = [shown.origin, shown.last];
    const at = (time) => ((time - first) / Math.max(1e-6, last - first)) * width;
    const speeds = table.rollout_tokens_per_s ?? [];
    const most = Math.max(1, ...speeds.filter((speed) => speed !== null));
    pen.beginPath();
    pen.moveTo(0, 56);
    table.time.forEach((time, n) => pen.lineTo(at(time), 54 - (46 * (speeds[n] ?? 0)) / most));
    pen.lineTo(width, 56);
    pen.fillStyle = colour("--v0");
    pen.fill();
    pen.fillStyle = "rgb(127 127 127 / 18%)";
    const [left, right] = [Math.max(0, at(shown.begin)), Math.min(width, at(shown.end))];
    pen.fillRect(left, 0, Math.max(3, right - left), 56);
    pen.strokeStyle = colour("--accent");
    pen.lineWidth = 1.5;
    pen.strokeRect(left + 0.75, 0.75, Math.max(3, right - left - 1.5), 54.5);
    strip.setAttribute("aria-valuemin", 0);
    strip.setAttribute("aria-valuemax", Math.round(last - first));
    strip.setAttribute("aria-valuenow", Math.round(shown.begin - first));
    strip.setAttribute("aria-valuetext", `${duration(shown.end - shown.begin)} from ${duration(Math.max(0, shown.begin - first))} on`);
  }

  function drawAll() {
    drawStrip();
    drawLanes(lanes, shown, rows(), kinds, marks, (lane) => spansOf(lane).map(({ began, ended }) => [Math.max(began, shown.begin), Math.min(ended, shown.end)]));
    const length = shown.end - shown.begin;
    said.textContent = `${duration(length)} from ${duration(Math.max(0, shown.begin - shown.origin))} on, ${shown.lanes.length} workers.${shown.learner?.shares ? " Each column shows how one of its steps was spent; look closer to see every span." : ""}`;
    lanes.setAttribute("aria-label", `Lanes of the learner and ${shown.lanes.length} workers over ${duration(length)}`);
    tellLanes(words, shown, rows(), kinds);
    sayPointed();
  }

  /** Select a time window by dragging over a canvas; `time(x)` converts a position to a time. */
  function dragging(element, time, click) {
    let start = null;
    element.addEventListener("pointerdown", (event) => { start = event.offsetX; element.setPointerCapture(event.pointerId); });
    element.addEventListener("pointerup", (event) => {
      if (start === null) return;
      const [low, high] = [Math.min(start, event.offsetX), Math.max(start, event.offsetX)];
      start = null;
      if (high - low < 4) return click(event);
      choose(time(low), Math.max(time(high), time(low) + LEAST_S));
    });
  }
  const stripTime = (x) => shown.origin + (x / strip.clientWidth) * (shown.last - shown.origin);
  const laneTime = (x) => shown.begin + (Math.max(0, x - NAMES) / (lanes.clientWidth - NAMES - 8)) * (shown.end - shown.begin);
  dragging(strip, stripTime, (event) => { const half = (shown.end - shown.begin) / 2, middle = stripTime(event.offsetX); choose(middle - half, middle + half); });
  dragging(lanes, laneTime, () => {});
  let pointer = null;
  lanes.addEventListener("pointermove", (event) => { pointer = { x: event.offsetX, y: event.offsetY }; sayPointed(); });
  lanes.addEventListener("pointerleave", () => { pointer = null; });
  function sayPointed() {
    const lane = pointer && rows()[Math.floor((pointer.y - TOP) / (ROW + GAP))];
    if (!lane || pointer.x < NAMES) return;
    const time = laneTime(pointer.x);
    const column = Math.floor(((time - shown.begin) / (shown.end - shown.begin)) * SHARE_INTERVALS);
    const doing = lane.shares ? kinds.filter(([kind]) => lane.shares[kind]?.[column]).map(([kind, , text]) => `${text} ${Math.round(100 * lane.shares[kind][column])} %`) : kinds.flatMap(([kind, , text]) => (lane.spans[kind] ?? []).filter(([begin, end]) => begin <= time && time <= end).map(([begin, end]) => `${text} for ${duration(end - begin)}`));
    said.textContent = `${lane.worker}: ${doing.join(", ") || "waiting"}${spansOf(lane).some(({ began, ended }) => began <= time && time <= ended) ? ` · has sample ${sampleName(sample)}` : ""} · ${duration(Math.max(0, time - shown.origin))} after the beginning`;
  }
  strip.addEventListener("keydown", (event) => {
    const act = { ArrowLeft: () => move(-0.25), ArrowRight: () => move(0.25), "+": () => zoom(0.5), "-": () => zoom(2) }[event.key];
    if (act) { event.preventDefault(); act(); }
  });
  const observer = new ResizeObserver(() => shown && drawAll());
  observer.observe(place);
  signal.addEventListener("abort", () => observer.disconnect());

  await load();
  let steps = table.step.length;
  follow(async (topic, news) => {
    if (topic !== "news" || news.steps === steps) return;
    steps = news.steps;
    table = await ask(`${apiOf(run.name)}/steps?columns=time,rollout_tokens_per_s,reward`, signal);
    if (from === null) await load();
    else drawStrip();
  });
}

/** A lane with the history of one sample. */
function laneOf(sample, { begin, end }) {
  const spans = {};
  for (const { what, began, ended } of sample.spans ?? [])
    if (ended >= begin && began <= end) (spans[what] ??= []).push([Math.max(began, begin), Math.min(ended, end)]);
  const chunk = (sample.chunks ?? []).map(({ at }) => at).filter((at) => at && at >= begin && at <= end);
  return { worker: `sample ${sampleName(sample)}`, spans, instants: { chunk } };
}
