// Runs view: the list of all runs of a folder, sorted by any column.

import { addressOf, duration, fill, h, number, readAddress } from "./lib.js";

const heldOut = (run) => run.held_out && h("span", { title: `${run.held_out.measure} on held-out prompts at step ${run.held_out.step}` }, number(run.held_out.value, 3), h("span", { class: "note" }, ` ${run.held_out.measure}, step ${run.held_out.step}`));
/** [key, heading, whether it is a figure, value to sort by, content of the cell] */
const COLUMNS = [
  ["name", "Run", false, (run) => run.name],
  ["state", "State", false, (run) => run.state, (run) => h("span", { class: `chip ${run.state.replace(" ", "-")}` }, run.state)],
  ["steps", "Steps", true, (run) => run.steps, (run) => `${number(run.steps)} of ${number(run.max_steps)}`],
  ["reward", "Reward, last 3 steps", true, (run) => run.reward, (run) => number(run.reward, 3)],
  ["held_out", "Held out", true, (run) => run.held_out?.value, (run) => heldOut(run) ?? "–"],
  ["best", "Best", true, (run) => run.best_held_out, (run) => number(run.best_held_out, 3)],
  ["time", "Time", true, (run) => run.wall_s, (run) => duration(run.wall_s)],
  ["kind", "Schedule", false, (run) => run.kind ?? ""],
  ["model", "Model", false, (run) => run.model ?? ""],
];

export function runsView(place, { runs }) {
  const sorted = readAddress().query.get("sort") ?? "name";
  const column = COLUMNS.find(([key]) => key === sorted.replace("-", "")) ?? COLUMNS[0], falling = sorted.startsWith("-");
  const value = (run) => column[3](run) ?? null;
  const compare = (one, other) => (typeof one === "string" ? one.localeCompare(other, "en", { numeric: true }) : one - other) * (falling ? -1 : 1);
  const rows = [...runs].sort((a, b) => (value(a) === null || value(b) === null ? (value(a) === null) - (value(b) === null) : compare(value(a), value(b))));
  const sort = (key, isFigure) => { location.hash = `#/?sort=${key === column[0] ? (falling ? key : `-${key}`) : isFigure ? `-${key}` : key}`; };
  fill(place, h("h1", {}, "Runs"),
    h("div", { class: "scroll" }, h("table", { class: "rows", "aria-label": "Runs" },
      h("thead", {}, h("tr", {}, COLUMNS.map(([key, text, isFigure]) => h("th", { scope: "col", class: isFigure ? "figure" : "", "aria-sort": key === column[0] ? (falling ? "descending" : "ascending") : undefined },
        h("button", { type: "button", onclick: () => sort(key, isFigure) }, text, h("span", { "aria-hidden": "true" }, key === column[0] ? (falling ? " ↓" : " ↑") : "")))))),
      h("tbody", {}, rows.map((run) => h("tr", {}, COLUMNS.map(([key, , isFigure, of, cell]) => key === "name"
        ? h("th", { scope: "row" }, h("a", { href: addressOf(run.name) }, run.name))
        : h("td", { class: isFigure ? "figure" : "" }, (cell ?? of)(run)))))))));
}
