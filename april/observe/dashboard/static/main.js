// Routing: the address holds the run, the view and its settings, so that every view can be linked to.

import { addressOf, ask, fill, h, isReport, note, problem, readAddress, unlessLeft } from "./lib.js";
import { compareView } from "./compare.js";
import { logsView } from "./logs.js";
import { nowView } from "./now.js";
import { runView } from "./run.js";
import { runsView } from "./runs.js";
import { sampleView } from "./sample.js";
import { groupView } from "./group.js";
import { samplesView } from "./samples.js";
import { timelineView } from "./timeline.js";

const VIEWS = [["run", "Run"], ["now", "Now"], ["timeline", "Timeline"], ["samples", "Samples"], ["compare", "Compare"], ["logs", "Logs"]];
const THEMES = { "": ["dark", "Auto"], dark: ["light", "Dark"], light: ["", "Light"] };

const view = document.getElementById("view");
let runs = [];
/** Aborts the requests and timers of the previous view. */
let leave = new AbortController();
let shown = null;

function chooseView({ view: name, rest }) {
  if (name === "samples") return rest.length >= 3 ? sampleView : rest.length === 2 ? groupView : samplesView;
  return { run: runView, now: nowView, timeline: timelineView, compare: compareView, logs: logsView }[name];
}

async function show() {
  leave.abort();
  const { signal } = (leave = new AbortController());
  if (runs.length === 0) runs = await ask("api/runs");
  if (signal.aborted) return;
  const address = readAddress();
  if (!address.run && runs.length === 1) return location.replace(addressOf(runs[0].name, runs[0].views[0]));
  if (address.run && !address.view) return location.replace(addressOf(address.run));
  header(address);
  const run = runs.find((run) => run.name === address.run);
  const place = h("div", { class: `view ${address.view || "runs"}` });
  const already = shown === location.hash.split("?")[0], first = shown === null;
  shown = location.hash.split("?")[0];
  fill(view, fill(place, note("Reading …")));
  if (!already) scrollTo(0, 0);
  if (!already && !first) view.focus({ preventScroll: true });
  if (!address.run) return runsView(place, { runs: (runs = await ask("api/runs")) });
  if (!run) return fill(place, problem(`There is no run ${address.run} here.`), h("a", { href: "#/" }, "All runs"));
  const draw = chooseView(address);
  if (!draw) return fill(place, problem(`There is no view ${address.view}.`), h("a", { href: addressOf(run.name) }, "To the run"));
  try {
    await draw(place, { run, runs, address, signal, follow: (take, now) => follow(run.name, take, signal, now) });
  } catch (error) {
    if (error.name !== "AbortError") fill(place, problem(sentence(error.message)));
  }
}

const sentence = (text) => `${text[0].toUpperCase()}${text.slice(1)}${/[.!?]$/.test(text) ? "" : "."}`;

/** Call take(topic, content) for each change of a run, until the view is left. */
function follow(name, take, signal, now) {
  if (isReport) return;
  const source = new EventSource(`events/${encodeURIComponent(name)}${now ? "?now=1" : ""}`);
  for (const topic of ["news", "now"])
    source.addEventListener(topic, (event) => {
      const content = JSON.parse(event.data);
      if (topic === "news") state(content.problem ? "unreadable" : content.state);
      Promise.resolve(take(topic, content)).catch(unlessLeft(signal));
    });
  signal.addEventListener("abort", () => source.close());
  addEventListener("pagehide", () => source.close(), { once: true, signal });
}

function header({ run, view: current, query }) {
  const select = document.getElementById("run");
  fill(select, runs.length > 1 && h("option", { value: "", selected: !run }, "All runs"),
    runs.map(({ name }) => h("option", { value: name, selected: name === run }, name)));
  select.onchange = () => { location.hash = select.value ? addressOf(select.value, VIEWS.some(([name]) => name === current) ? current : "run") : "#/"; };
  const known = runs.find(({ name }) => name === run)?.views ?? [];
  fill(document.getElementById("tabs"), !isReport && VIEWS.filter(([name]) => known.includes(name)).map(([name, text]) =>
    h("a", { href: addressOf(run, name), "aria-current": name === current ? "page" : undefined }, text)));
  document.title = run ? `${run} · ${VIEWS.find(([name]) => name === current)?.[1] ?? ""} · April` : "April";
  state(runs.find(({ name }) => name === run)?.state ?? "");
}

function state(text) {
  const chip = document.getElementById("state");
  if (chip.textContent === text) return;
  chip.textContent = text;
  chip.className = `chip ${text.replace(" ", "-")}`;
}

document.querySelector(".skip").onclick = (event) => {
  event.preventDefault();
  view.focus();
};

const button = document.getElementById("theme");
function theme(chosen) {
  if (chosen) document.documentElement.dataset.theme = chosen;
  else delete document.documentElement.dataset.theme;
  fill(button, THEMES[chosen][1]);
  button.setAttribute("aria-label", `Colours: ${THEMES[chosen][1]}`);
}
button.onclick = () => {
  const [next] = THEMES[document.documentElement.dataset.theme ?? ""];
  theme(next);
  show();
  localStorage.setItem("april-theme", next);
};
theme(document.documentElement.dataset.theme ?? "");

const safely = () => {
  const showing = show(), { signal } = leave;
  showing.catch((error) => signal.aborted || fill(view, problem(`The dashboard does not answer: ${error.message}.`), note("Is it still running? Load the page again when it is.")));
};
addEventListener("hashchange", safely);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", safely);
safely();
