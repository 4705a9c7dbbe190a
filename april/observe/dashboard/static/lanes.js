// Lanes of workers and learner over time, on a canvas: spans of what each did and waited for, or shares of its time.

import { colour, duration, fill, h, number } from "./lib.js";

export const ROW = 22;
export const GAP = 5;
export const NAMES = 116;
export const TOP = 24;
const WAITS = [["wait-others", "--wait-others", "waits: others generate"], ["wait-learner", "--wait-learner", "waits: the learner trains"], ["wait-weights", "--wait-weights", "waits: weights are sent"], ["wait-else", "--wait-else", "waits: broker, scores"]];
const DOES = [["generate", "--line-1", "generating"], ["weights", "--line-3", "loading weights"], ["train", "--line-2", "training"]];
export const KINDS = [...DOES, ...WAITS];
export const MARKS = [["abort", "--muted", "abort"], ["joined", "--line-4", "joined"], ["lost", "--bad", "lost"]];

/** Room below the lanes for the time axis. */
const AXIS = 22;
const TICK_S = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];
const TICK_WIDTH = 90;

export const rowsOf = (shown) => [...(shown.learner ? [{ worker: "learner", spans: {}, instants: {}, ...shown.learner }] : []), ...shown.lanes];

export const legendOf = (kinds, marks) => h("span", { class: "legend" }, [...kinds, ...marks].map(([, line, text]) => h("span", { vars: { "--of": `var(${line})` } }, h("i", {}), text)));

/** A canvas as wide as its parent; returns [pen, width]. */
export function sized(element, height) {
  const width = element.parentElement.clientWidth, ratio = devicePixelRatio || 1;
  element.style.width = `${width}px`;
  element.style.height = `${height}px`;
  [element.width, element.height] = [width * ratio, height * ratio];
  const pen = element.getContext("2d");
  pen.scale(ratio, ratio);
  pen.font = "12px system-ui, sans-serif";
  return [pen, width];
}

/** Time since the run's beginning as H:MM:SS, with a fraction where ticks are close. */
function clock(seconds, tick) {
  const whole = Math.floor(seconds + 1e-9), two = (number) => String(number).padStart(2, "0");
  const fraction = tick < 1 ? (seconds - whole).toFixed(tick < 0.1 ? 2 : 1).slice(1) : "";
  return `${Math.floor(whole / 3600)}:${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}${fraction}`;
}

/** shown: {begin, end, origin, steps: [[time, step]], pauses}; rows: [{worker, spans or shares, instants}]; under(row): spans below the lane. */
export function drawLanes(element, shown, rows, kinds = KINDS, marks = MARKS, under = () => []) {
  const bottom = TOP + rows.length * (ROW + GAP) + 2;
  const [pen, width] = sized(element, bottom + AXIS);
  const at = (time) => NAMES + ((time - shown.begin) / (shown.end - shown.begin)) * (width - NAMES - 8);
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  const taken = [];
  const mark = (time, text, line) => {
    pen.fillStyle = colour(line);
    pen.fillRect(at(time), TOP - 6, 1, rows.length * (ROW + GAP) + 6);
    const right = at(time) - 2, left = right - pen.measureText(text).width;
    if (left < NAMES - 20 || taken.some(([begin, end]) => left < end + 6 && right > begin - 6)) return;
    pen.fillStyle = colour("--muted");
    pen.fillText(text, right, TOP - 12);
    taken.push([left, right]);
  };
  for (const [time, seconds] of shown.pauses ?? []) mark(time, `paused ${duration(seconds)}`, "--muted");
  for (const [time, step] of shown.steps) mark(time, `${step}`, "--grid");
  const tick = TICK_S.find((step) => (step * (width - NAMES - 8)) / (shown.end - shown.begin) >= TICK_WIDTH) ?? 86400 * Math.ceil((shown.end - shown.begin) / 86400 / 8);
  pen.textAlign = "center";
  for (let n = Math.ceil((shown.begin - shown.origin) / tick); shown.origin + n * tick <= shown.end; n++) {
    const x = at(shown.origin + n * tick);
    pen.fillStyle = colour("--rule");
    pen.fillRect(x, bottom, 1, 5);
    pen.fillStyle = colour("--muted");
    if (x < width - 30) pen.fillText(clock(n * tick, tick), x, bottom + 13);
  }
  pen.textAlign = "left";
  pen.fillText("time", 10, bottom + 13);
  const colours = Object.fromEntries([...kinds, ...marks].map(([kind, line]) => [kind, colour(line)]));
  rows.forEach((lane, n) => {
    const y = TOP + n * (ROW + GAP);
    pen.fillStyle = colour("--muted");
    pen.fillText(lane.worker.length > 15 ? `…${lane.worker.slice(-14)}` : lane.worker, 10, y + ROW / 2);
    pen.fillStyle = colour("--grid");
    pen.fillRect(NAMES, y + ROW - 1, width - NAMES - 8, 1);
    if (lane.shares) shares(pen, lane.shares, kinds, colours, y, width);
    for (const [kind] of kinds)
      for (const [begin, end] of lane.spans[kind] ?? []) {
        pen.fillStyle = colours[kind];
        const edge = kind === "weights" ? 2 : 4;
        pen.fillRect(at(begin), y + edge, Math.max(1, at(end) - at(begin)), ROW - 2 * edge);
      }
    pen.fillStyle = colour("--ink");
    for (const [begin, end] of under(lane)) pen.fillRect(at(begin), y + ROW - 3, Math.max(2, at(end) - at(begin)), 3);
    for (const [kind] of marks)
      for (const time of lane.instants[kind] ?? []) {
        pen.fillStyle = colours[kind];
        pen.fillRect(at(time) - 0.75, y, 1.5, ROW);
      }
  });
}

/** A lane of a long run, filled as high as the share of time that was spent so. */
function shares(pen, lane, kinds, colours, y, width) {
  const count = Math.max(...Object.values(lane).map((values) => values.length)), each = (width - NAMES - 8) / count;
  const filled = new Array(count).fill(0);
  for (const [kind] of kinds)
    (lane[kind] ?? []).forEach((share, n) => {
      pen.fillStyle = colours[kind];
      pen.fillRect(NAMES + n * each, y + (ROW - 2) * (1 - filled[n] - share), each + 0.5, (ROW - 2) * share);
      filled[n] += share;
    });
}

/** What the lanes show, in words for screen readers. */
export function tellLanes(element, shown, rows, kinds = KINDS) {
  const length = shown.end - shown.begin;
  const shareOf = (lane, kind) => lane.shares ? (lane.shares[kind] ?? []).reduce((sum, share) => sum + share, 0) / (lane.shares[kind]?.length || 1) : (lane.spans[kind] ?? []).reduce((sum, [begin, end]) => sum + end - begin, 0) / length;
  fill(element, h("ul", {}, rows.map((lane) => h("li", {}, `${lane.worker}: ${kinds.map(([kind, , text]) => [text, shareOf(lane, kind)]).filter(([, share]) => share).map(([text, share]) => `${text} ${number(Math.round(100 * share))} %`).join(", ") || "nothing"}`))));
}
