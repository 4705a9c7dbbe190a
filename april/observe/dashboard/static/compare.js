// Compare view: samples of two runs for the same prompts, those with the largest difference first.

import { addressOf, apiOf, ask, fill, h, note, number, sampleName, unlessLeft } from "./lib.js";
import { card } from "./group.js";

const AGAIN_MS = 1000;
const CARDS = 6;
/** Samples of a prompt that are shown for each run, the newest first. */

export async function compareView(place, { run, runs, address, signal }) {
  const { query } = address;
  const others = runs.filter(({ name, steps }) => name !== run.name && steps !== null);
  if (others.length === 0) return fill(place, h("h1", {}, "Compare"), note("There is one run alone here. Start `april dashboard` on the folder of several runs to compare two of them."));
  const other = others.find(({ name }) => name === query.get("with")) ?? others[0];
  const prompt = query.get("prompt"), steps = query.get("steps")?.split(",") ?? [];
  const offset = Number(query.get("offset")) || 0;
  const go = (change) => addressOf(run.name, "compare", [], { with: other.name, ...change });
  const select = h("select", { onchange: () => { location.hash = addressOf(run.name, "compare", [], { with: select.value }); } }, others.map(({ name }) => h("option", { value: name, selected: name === other.name }, name)));
  const body = h("div", { class: "view-part" }, note("Looking for prompts of which both have samples …"));
  fill(place, h("h1", {}, `${run.name} and ${other.name}`), h("div", { class: "tools" }, h("label", {}, "Compare with ", select), prompt && h("a", { class: "button", href: go({}) }, "All prompts")), body);
  return prompt ? onePrompt() : allPrompts();

  async function allPrompts() {
    const found = await ask(`api/compare?a=${encodeURIComponent(run.name)}&b=${encodeURIComponent(other.name)}&offset=${offset}`, signal);
    if (found.reading && !signal.aborted) setTimeout(() => signal.aborted || allPrompts().catch(unlessLeft(signal)), AGAIN_MS);
    if (!found.total) return fill(body, note(found.reading ? "Their samples are still being read …" : "No prompt has samples in both."));
    fill(body, h("p", { class: "count" }, `${number(found.total)} prompts have samples in both. Each is compared at the steps of both that are nearest to each other.${found.reading ? " Some are still being read." : ""}`),
      h("div", { class: "scroll" }, h("table", { class: "rows fold", "aria-label": "Prompts of both runs" }, h("thead", {}, h("tr", {}, ["Prompt", `Reward in ${run.name}`, `in ${other.name}`, "Difference", "Steps", "Samples"].map((text, n) => h("th", { scope: "col", class: n ? "figure" : "wide" }, text)))),
        h("tbody", {}, found.prompts.map((one) => h("tr", {}, h("th", { scope: "row", class: "wide" }, h("a", { class: "excerpt", dir: "auto", href: go({ prompt: one.prompt, steps: one.steps.join(",") }) }, one.text ?? one.prompt)),
          one.reward.map((reward) => h("td", { class: "figure" }, number(reward, 3))), h("td", { class: "figure" }, number(one.reward[1] - one.reward[0], 3)), h("td", { class: "figure" }, one.steps.map((step) => number(step)).join(" and ")), h("td", { class: "figure" }, one.samples.map((count) => number(count)).join(" and "))))))),
      found.total > found.page && h("div", { class: "pages" }, offset > 0 && h("a", { class: "button", href: go({ offset: Math.max(0, offset - found.page) || "" }) }, "Previous"), offset + found.page < found.total && h("a", { class: "button", href: go({ offset: offset + found.page }) }, "Next")));
  }

  async function onePrompt() {
    const sides = await Promise.all([run, other].map(async ({ name }, n) => {
      const [{ rows }, { total }] = await Promise.all([steps[n] ? `&step.min=${steps[n]}&step.max=${steps[n]}` : "", ""].map((bounds) => ask(`${apiOf(name)}/samples?prompt=${prompt}${bounds}`, signal)));
      const samples = await Promise.all(rows.slice(0, CARDS).map((row) => ask(`${apiOf(name)}/samples/${row.step}/${row.group}/${row.index}?fork=${row.fork ?? 0}`, signal)));
      return { name, samples, total, step: samples[0]?.step };
    }));
    const text = sides.flatMap(({ samples }) => samples)[0]?.prompt;
    fill(body, text !== undefined && h("section", { class: "speech prompt" }, h("h2", {}, "Prompt"), h("pre", { dir: "auto", tabindex: 0 }, text)),
      h("div", { class: "two" }, sides.map(({ name, samples, total, step }) => h("section", { "aria-label": name }, h("h2", {}, `${name}, step ${number(step)}`, h("a", { class: "note", href: addressOf(name, "samples", [], { prompt }) }, ` all ${number(total)} samples of this prompt`)),
        samples.map((sample) => card({ name }, sample, `Step ${sample.step}, ${sampleName(sample)}`))))));
  }
}
