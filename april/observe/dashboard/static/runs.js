// Runs view: the list of all runs of a folder.

import { addressOf, duration, fill, h, number } from "./lib.js";

export function runsView(place, { runs }) {
  fill(place, h("h1", {}, "Runs"),
    h("div", { class: "scroll" }, h("table", { class: "rows" },
      h("thead", {}, h("tr", {}, ["Run", "State", "Steps", "Reward", "Time", "Schedule", "Model"].map((text, n) =>
        h("th", { scope: "col", class: [2, 3, 4].includes(n) ? "figure" : "" }, text)))),
      h("tbody", {}, runs.map((run) => h("tr", {},
        h("th", { scope: "row" }, h("a", { href: addressOf(run.name) }, run.name)),
        h("td", {}, h("span", { class: `chip ${run.state.replace(" ", "-")}` }, run.state)),
        h("td", { class: "figure" }, `${number(run.steps)} of ${number(run.max_steps)}`),
        h("td", { class: "figure" }, number(run.reward, 3)),
        h("td", { class: "figure" }, duration(run.wall_s)),
        h("td", {}, run.kind ?? ""),
        h("td", {}, run.model ?? "")))))));
}
