// Run view: curves over the steps of one or several runs, and the figures of one selected step or two.

import { addressOf, apiOf, ask, choices, duration, fill, h, number, short, unlessLeft } from "./lib.js";
import { chart } from "./charts.js";

const CHARTS = [
  { title: "Reward", series: [{ column: "reward", label: "trained" }, { column: "accuracy", label: "held-out", points: true }] },
  { title: "Response length", unit: "tokens", from: 0, series: [{ column: "lengths.trained.mean", label: "mean" }, { column: "lengths.trained.p95", label: "p95" }] },
  { title: "Staleness as trained", unit: "policy steps", from: 0, series: [{ column: "staleness.mean", label: "mean of tokens" }, { column: "staleness.max", label: "oldest" }] },
  { title: "Rollout speed", unit: "tokens/s", from: 0, series: [{ column: "rollout_tokens_per_s", label: "tokens/s" }] },
  { title: "Learner − engine gap", unit: "nats, k3", series: [{ column: "learner.k3", label: "k3" }], hint: "The learner says nothing of the gap." },
  { title: "Entropy", unit: "nats", series: [{ column: "learner.entropy", label: "entropy" }] },
  { title: "Loss", series: [{ column: "learner.loss", label: "loss" }] },
  { title: "Gradient", unit: "share of tokens", from: 0, series: [{ column: "gradient.tokens", label: "with gradient" }, { column: "learner.clip_fraction", label: "clipped" }] },
  { title: "Effective sample size", unit: "share", from: 0, series: [{ column: "learner.sequence_ess", label: "responses" }, { column: "learner.ess", label: "tokens" }, { column: "learner.weight_ess", label: "weights" }] },
  { title: "Tokens under way", unit: "ledger", from: 0, series: [{ column: "tokens_ledger.open", label: "open" }, { column: "tokens_ledger.ready", label: "ready" }, { column: "tokens_ledger.delivered", label: "delivered" }] },
];
const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000];
const AXES = {
  step: { label: "Step", of: (table) => table.step, write: (value) => short(value), incrs: WHOLE },
  samples: { label: "Samples", of: (table) => running(table.samples), write: (value) => short(value) },
  time: { label: "Time", of: (table) => since(table.time), write: (value) => `${short(value)} min` },
};
const PLACES = [["trained", "Trained"], ["delivered", "Delivered"], ["ready", "Ready"], ["open", "Open"]];
const COLUMNS = ["time", "samples", ...new Set(CHARTS.flatMap(({ series }) => series.filter((one) => !one.points).map((one) => one.column)))];

function running(counts) {
  let sum = 0;
  return (counts ?? []).map((count) => (sum += count ?? 0));
}

const heldOut = (held) => {
  const sets = Object.entries(held?.sets ?? {});
  return (sets.length ? sets : [["Held-out", held?.accuracy]]).map(([name, accuracy]) => [name, number(accuracy, 3), held && `at step ${held.step}`]);
};

const since = (times) => (times ?? []).map((time) => (time - times[0]) / 60);

export async function runView(place, { run, runs, address, signal, follow }) {
  const { query } = address;
  let axis = AXES[query.get("x")] ? query.get("x") : "step";
  const extra = (query.get("more") ?? "").split(",").filter(Boolean);
  const names = [run.name, ...(query.get("with") ?? "").split(",").filter((name) => runs.some((other) => other.name === name) && name !== run.name)];
  let picked = (query.get("steps") ?? "").split(",").map(Number).filter(Boolean).slice(0, 2);
  const loaded = new Map();

  const top = h("section", { class: "facts", "aria-label": "Figures" });
  const alarms = h("section", { class: "alarms", "aria-live": "polite" });
  const ledger = h("section", { class: "ledger", "aria-label": "Where every generated token is" });
  const chosen = h("section", { class: "chosen", "aria-label": "Chosen steps" });
  const charts = h("section", { class: "charts", "aria-label": "Curves" });
  const more = h("select", { "aria-label": "Another figure to draw" });
  const go = (change) => { location.hash = addressOf(run.name, "run", [], { x: axis === "step" ? "" : axis, with: names.slice(1).join(","), more: extra.join(","), steps: picked.join(","), ...change }); };
  const others = runs.filter(({ name, live, steps }) => name !== run.name && !(live && steps === null));
  fill(place, h("h1", { class: "hidden" }, `Run ${run.name}`), top, alarms, ledger,
    h("div", { class: "tools" },
      choices("Over", Object.entries(AXES).map(([key, { label }]) => [key, label]), axis, (value) => { axis = value; remember(); draw(); }),
      others.length > 0 && h("details", { class: "menu" }, h("summary", {}, names.length > 1 ? `${names.length} runs` : "Lay over …"),
        h("div", { class: "list" }, others.map(({ name }) => h("label", {}, h("input", { type: "checkbox", checked: names.includes(name), onchange: (event) => {
          const next = event.target.checked ? [...names.slice(1), name] : names.slice(1).filter((other) => other !== name);
          go({ with: next.join(",") });
        } }), name)))),
      more,
      h("label", { class: "step-choice" }, "Step ", h("input", { type: "number", min: 1, onchange: (event) => { if (event.target.value) choose(Number(event.target.value)); event.target.value = ""; } })),
      h("span", { class: "note grow" }, "Click a curve to choose a step; two are compared. Drag to zoom, double click to see all."),
      names.length > 1 && h("span", { class: "legend" }, names.map((name, n) => h("span", { vars: { "--of": `var(--line-${n + 1})` } }, h("i", {}), name)))),
    chosen, charts);
  const remember = () => history.replaceState(null, "", addressOf(run.name, "run", [], { x: axis === "step" ? "" : axis, with: names.slice(1).join(","), more: extra.join(","), steps: picked.join(",") }));

  const specs = [...CHARTS, ...extra.map((column) => ({ title: column, series: [{ column, label: column.split(".").at(-1) }] }))];
  const drawn = specs.map((spec) => chart(spec, choose));
  fill(charts, drawn.map(({ element }) => element));
  signal.addEventListener("abort", () => drawn.forEach((one) => one.destroy()));

  async function load(name) {
    const before = loaded.get(name)?.table;
    const after = before?.step.at(-1) ?? 0;
    const columns = [...COLUMNS, ...extra].join(",");
    const [about, table] = await Promise.all([
      ask(apiOf(name), signal), ask(`${apiOf(name)}/steps?columns=${encodeURIComponent(columns)}&after=${after}`, signal)]);
    if (before) for (const key of Object.keys(table)) table[key] = table[key] === null && before[key] === null ? null : [...(before[key] ?? before.step.map(() => null)), ...(table[key] ?? table.step.map(() => null))];
    loaded.set(name, { about, table });
  }

  function draw() {
    const tables = names.map((name, n) => {
      const { about, table } = loaded.get(name);
      const x = AXES[axis].of(table);
      const at = new Map(table.step.map((step, row) => [step, x[row]]));
      const held = about.evaluation.filter(({ step }) => at.has(step) || (step === 0 && x.length));
      return { name, colour: `${getComputedStyle(document.documentElement).getPropertyValue(`--line-${n + 1}`).trim()}`, table, x,
        points: { accuracy: [held.map(({ step }) => (step === 0 ? (axis === "step" ? 0 : x[0] - 1e-6) : at.get(step))), held.map(({ accuracy }) => accuracy)] } };
    });
    drawn.forEach((one) => one.draw(tables, AXES[axis]));
  }

  function facts() {
    const { about, table } = loaded.get(run.name);
    const { summary } = about;
    const last = (column) => table[column]?.findLast((value) => value !== null);
    const held = about.evaluation.at(-1);
    const max = summary.max_steps ?? run.max_steps;
    const shown = [
      ["Step", number(last("step")), max && `of ${number(max)}`],
      ["Reward", number(summary.reward?.last3 ?? last("reward"), 3), summary.reward?.first != null && `first ${number(summary.reward.first, 3)}`],
      ...heldOut(held),
      ["Rollout", short(summary.rollout_tokens_per_s ?? last("rollout_tokens_per_s")), "tokens/s"],
      ["Staleness", number(summary.staleness?.mean ?? last("staleness.mean"), 2), summary.staleness && `at most ${summary.staleness.max}`],
      ["Time", duration(summary.wall_s), about.all_read ? "" : "still reading"],
    ];
    fill(top, shown.map(([name, value, beside]) => h("div", { class: "fact" }, h("span", { class: "name" }, name), h("span", { class: "value" }, value), h("span", { class: "beside" }, beside || " "))));
    const raised = Object.entries(about.alarms);
    const latest = raised.at(-1);
    fill(alarms, about.problem && h("p", { class: "problem" }, about.problem),
      latest && h("details", { open: Number(latest[0]) >= last("step") - 2 }, h("summary", {}, `Alarms in ${raised.length} steps, last in step ${latest[0]}`),
        h("ul", {}, latest[1].map(({ name, sentence, page }) => h("li", {}, h("b", {}, name.replaceAll("_", " ")), ` ${sentence} `, h("span", { class: "note" }, page))))));
    drawLedger(about.ledger);
  }

  function drawLedger(book) {
    if (!book || !book.generated) return fill(ledger);
    const parts = [...PLACES.map(([key, label]) => [key, label, book[key]]), ...Object.entries(book.discarded).map(([reason, count]) => ["discarded", `Discarded: ${reason.replaceAll("_", " ")}`, count])].filter(([, , count]) => count);
    const closes = parts.reduce((sum, [, , count]) => sum + count, 0) === book.generated;
    fill(ledger, h("div", { class: "bar", "aria-hidden": "true" }, parts.map(([key, , count]) => h("i", { class: key, vars: { "--share": `${(100 * count) / book.generated}%` } }))),
      h("p", {}, h("b", {}, short(book.generated)), " tokens generated ", parts.map(([key, label, count]) => h("span", { class: `part ${key}`, title: number(count) }, h("i", {}), `${label} ${short(count)}`)),
        h("span", { class: closes ? "closes" : "open problem" }, closes ? "the ledger closes" : "the ledger does not close")));
  }

  async function choose(step) {
    picked = picked.includes(step) ? picked.filter((one) => one !== step) : [...picked, step].slice(-2);
    remember();
    await showChosen().catch(unlessLeft(signal));
  }

  async function showChosen() {
    if (picked.length === 0) return fill(chosen);
    const table = await ask(`${apiOf(run.name)}/steps`, signal);
    const at = picked.map((step) => table.step.indexOf(step)).filter((row) => row >= 0);
    if (at.length === 0) return fill(chosen);
    const columns = Object.keys(table).filter((name) => name !== "step" && name !== "time" && at.some((row) => table[name]?.[row] != null));
    fill(chosen, h("div", { class: "head" }, h("h2", {}, at.length > 1 ? "Two steps" : `Step ${picked[0]}`),
      at.map((row) => h("a", { class: "button", href: addressOf(run.name, "samples", [], { "step.min": table.step[row], "step.max": table.step[row] }) }, `Samples of step ${table.step[row]}`)),
      h("button", { type: "button", onclick: () => { picked = []; remember(); fill(chosen); } }, "Close")),
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Figures of the chosen steps" }, h("table", { class: "rows figures" },
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Figure"), at.map((row) => h("th", { scope: "col", class: "figure" }, `Step ${table.step[row]}`)), at.length > 1 && h("th", { scope: "col", class: "figure" }, "Difference"))),
      h("tbody", {}, columns.map((name) => {
        const values = at.map((row) => table[name][row]);
        return h("tr", {}, h("th", { scope: "row" }, name), values.map((value) => h("td", { class: "figure" }, number(value))),
          at.length > 1 && h("td", { class: "figure" }, values.includes(null) ? "–" : number(values[1] - values[0])));
      })))));
  }

  await Promise.all(names.map(load));
  const known = loaded.get(run.name).about.columns;
  fill(more, h("option", { value: "" }, "Another figure …"), known.filter((name) => !["step", "time"].includes(name) && !extra.includes(name)).map((name) => h("option", { value: name }, name)));
  more.onchange = () => go({ more: [...extra, more.value].join(",") });
  facts();
  draw();
  await showChosen();
  let busy = false, said = "", seen = "";
  follow((topic, news) => {
    if (topic !== "news") return;
    said = `${news.steps} ${news.state} ${news.all_read}`;
    if (!busy) update();
  });

  /** Load until the newest progress is shown; more may arrive while steps are being read. */
  async function update() {
    busy = true;
    try {
      while (seen !== said) {
        seen = said;
        const before = loaded.get(run.name).table.step.length;
        await load(run.name);
        facts();
        if (loaded.get(run.name).table.step.length !== before) draw();
      }
    } catch (error) {
      if (error.name !== "AbortError") throw error;
    } finally {
      busy = false;
    }
  }
}
