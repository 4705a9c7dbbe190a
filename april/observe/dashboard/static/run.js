// Run view: curves over the steps of one or several runs, the figures of one selected step or two, the lanes of the workers,
// some samples, and all that is known of the run. A report is this view with its data inside.

import { addressOf, apiOf, ask, choices, colour, duration, fill, h, note, number, short, unlessLeft } from "./lib.js";
import { chart } from "./charts.js";
import { drawLanes, KINDS, legendOf, MARKS, rowsOf, tellLanes } from "./lanes.js";
import { CHARTS, COLUMNS } from "./pictures.js";

const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000];
const AXES = {
  step: { label: "Step", of: (table) => table.step, write: (value) => short(value), incrs: WHOLE },
  samples: { label: "Samples", of: (table) => running(table.samples).map((count) => count * (table.steps_a_row ?? 1)), write: (value) => short(value) },
  time: { label: "Time", of: (table) => since(table.time), write: (value) => `${short(value)} min` },
};
const MEANINGS = {
  trained: "in batches that the learner has consumed", delivered: "handed to the learner, not yet consumed",
  ready: "in complete groups that wait for a batch", open: "in groups that are still being generated",
};
const SMOOTHING = [["", "Smoothing: auto"], ["0", "Smoothing: none"], ["5", "Mean of 5 steps"], ["20", "Mean of 20 steps"], ["100", "Mean of 100 steps"]];
/** Steps up to which the lanes of the whole run are enough. */
const FEW_STEPS = 12;

function running(counts) {
  let sum = 0;
  return (counts ?? []).map((count) => (sum += count ?? 0));
}

const heldOut = (held) => {
  const sets = Object.entries(held?.sets ?? {});
  return (sets.length ? sets : [["Held-out", held?.value]]).map(([name, value]) => [name, number(value, 3), held && `${held.measure} at step ${held.step}${held.not_evaluated ? `, ${held.not_evaluated} prompts not evaluated` : ""}`]);
};

const since = (times) => (times ?? []).map((time) => (time - times[0]) / 60);

export async function runView(place, { run, runs, address, signal, follow }) {
  const { query } = address;
  let axis = AXES[query.get("x")] ? query.get("x") : "step";
  const drawing = { smooth: query.get("smooth") ?? "", log: query.get("log") === "1" };
  const extra = (query.get("more") ?? "").split(",").filter(Boolean);
  const names = [run.name, ...(query.get("with") ?? "").split(",").filter((name) => runs.some((other) => other.name === name) && name !== run.name)];
  let picked = (query.get("steps") ?? "").split(",").map(Number).filter(Boolean).slice(0, 2);
  const loaded = new Map();
  let drawParts = () => {};

  const top = h("section", { class: "facts", "aria-label": "Figures" });
  const alarms = h("section", { class: "alarms", "aria-live": "polite" });
  const ledger = h("section", { class: "ledger", "aria-label": "Where every generated token is" });
  const chosen = h("section", { class: "chosen", "aria-label": "Chosen steps" });
  const charts = h("section", { class: "charts", "aria-label": "Curves" });
  const workers = h("section", { class: "panel lanes", "aria-label": "Workers" });
  const examples = h("section", { class: "panel", "aria-label": "Some samples" });
  const rest = h("section", { class: "panel", "aria-label": "Summary" });
  const more = h("select", { "aria-label": "Another figure to draw" });
  const here = () => ({ x: axis === "step" ? "" : axis, smooth: drawing.smooth, log: drawing.log ? "1" : "", with: names.slice(1).join(","), more: extra.join(","), steps: picked.join(",") });
  const go = (change) => { location.hash = addressOf(run.name, "run", [], { ...here(), ...change }); };
  const others = runs.filter(({ name, live, steps }) => name !== run.name && !(live && steps === null));
  fill(place, h("h1", { class: "hidden" }, `Run ${run.name}`), top, alarms, ledger,
    h("div", { class: "tools" },
      choices("Over", Object.entries(AXES).map(([key, { label }]) => [key, label]), axis, (value) => { axis = value; remember(); draw(); }),
      h("select", { "aria-label": "Smoothing", onchange: (event) => { drawing.smooth = event.target.value; remember(); draw(); } }, SMOOTHING.map(([value, text]) => h("option", { value, selected: value === drawing.smooth }, text))),
      h("label", {}, h("input", { type: "checkbox", checked: drawing.log, onchange: (event) => { drawing.log = event.target.checked; remember(); draw(); } }), " Log axis"),
      others.length > 0 && h("details", { class: "menu" }, h("summary", {}, names.length > 1 ? `${names.length} runs` : "Lay over …"),
        h("div", { class: "list" }, others.map(({ name }) => h("label", {}, h("input", { type: "checkbox", checked: names.includes(name), onchange: (event) => {
          const next = event.target.checked ? [...names.slice(1), name] : names.slice(1).filter((other) => other !== name);
          go({ with: next.join(",") });
        } }), name)))),
      more,
      h("label", { class: "step-choice" }, "Step ", h("input", { type: "number", min: 1, onchange: (event) => { if (event.target.value) choose(Number(event.target.value)); event.target.value = ""; } })),
      h("span", { class: "note whole" }, "A chart's figures are of the newest step, or of the one that is pointed at. Click a curve to choose a step; two are compared. Drag to zoom, double click to see all."),
      names.length > 1 && h("span", { class: "legend" }, names.map((name, n) => h("span", { vars: { "--of": `var(--line-${n + 1})` } }, h("i", {}), name)))),
    chosen, charts, workers, examples, rest);
  const remember = () => history.replaceState(null, "", addressOf(run.name, "run", [], here()));

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
      const at = (step) => (!x.length ? undefined : step === 0 ? (axis === "step" ? 0 : x[0] - 1e-6) : x[table.step.findIndex((other) => other >= step)]);
      const heldOut = about.held_out.map(({ label, steps, values }) => {
        const known = steps.map((step, n) => [at(step), values[n]]).filter(([x]) => x !== undefined);
        return { label, x: known.map(([x]) => x), y: known.map(([, y]) => y) };
      });
      const marks = about.resumes.map((step) => table.step.findLastIndex((other) => other <= step)).map((row) => (x[row] + (x[row + 1] ?? x[row])) / 2);
      return { name, colour: colour(`--line-${n + 1}`), table, x, heldOut, marks, lengths: about.lengths };
    });
    drawn.forEach((one) => one.draw(tables, AXES[axis], drawing));
  }

  function facts() {
    const { about, table } = loaded.get(run.name);
    const { summary } = about;
    const last = (column) => table[column]?.findLast((value) => value !== null);
    const held = about.evaluation;
    const max = summary.max_steps ?? run.max_steps;
    const shown = [
      ["Step", number(last("step")), max && `of ${number(max)}`],
      ["Reward", number(summary.reward?.last3 ?? last("reward"), 3), summary.reward?.last3 != null ? `mean of the last 3 steps; first ${number(summary.reward.first, 3)}` : "newest step"],
      ...heldOut(held),
      ["Rollout", short(summary.rollout_tokens_per_s ?? last("rollout_tokens_per_s")), summary.rollout_tokens_per_s ? "tokens/s, whole run" : "tokens/s, newest step"],
      ["Age", number(summary.staleness?.mean ?? last("staleness.mean"), 2), summary.staleness ? `policy steps, mean of the run; at most ${summary.staleness.max}` : "policy steps, newest step"],
      ["Time", duration(summary.wall_s), about.all_read ? "" : "still reading"],
    ];
    fill(top, shown.map(([name, value, beside]) => h("div", { class: "fact" }, h("span", { class: "name" }, name), h("span", { class: "value" }, value), h("span", { class: "beside" }, beside || " "))));
    const raised = about.alarms;
    fill(alarms, about.problem && h("p", { class: "problem" }, about.problem), summary.failure && h("p", { class: "problem failure" }, summary.failure),
      raised && h("details", { open: raised.step >= last("step") - 2 }, h("summary", {}, `Alarms in ${raised.steps} steps, last in step ${raised.step}`),
        h("ul", {}, raised.raised.map(({ name, sentence, page }) => h("li", {}, h("b", {}, name.replaceAll("_", " ")), ` ${sentence} `, h("span", { class: "note" }, page))))));
    drawLedger(about.ledger);
    fill(rest, h("h2", {}, "Summary"), h("div", { class: "scroll inner", tabindex: 0, role: "region", "aria-label": "What is known of the run" }, h("table", { class: "rows", "aria-label": "Summary" }, h("tbody", {}, about.facts.map(([name, text]) => h("tr", {}, h("th", { scope: "row", class: "path" }, name), h("td", { class: "wide" }, text)))))),
      h("details", {}, h("summary", {}, "Resolved configuration"), h("pre", { tabindex: 0 }, about.config)));
  }

  function drawLedger(book) {
    if (!book || !book.generated) return fill(ledger, note("No token has been generated yet."));
    const states = book.states.filter(([, count]) => count);
    const classOf = (name) => (name in MEANINGS ? name : "discarded");
    const percent = (count) => `${((100 * count) / book.generated).toFixed(1)} %`;
    const line = (name, count, share, meaning, kind = "") => h("tr", { class: kind }, h("th", { scope: "row" }, name), h("td", { class: "figure" }, number(count)), h("td", { class: "figure" }, share), h("td", { class: "wide note" }, meaning));
    fill(ledger, h("div", { class: "bar", "aria-hidden": "true" }, states.map(([name, count]) => h("i", { class: classOf(name), vars: { "--share": `${(100 * count) / book.generated}%` } }))),
      h("p", {}, h("b", {}, short(book.generated)), " tokens generated ", states.map(([name, count]) => h("span", { class: `part ${classOf(name)}`, title: number(count) }, h("i", {}), `${name.replaceAll("_", " ")} ${short(count)}`)),
        h("span", { class: book.closed ? "closes" : "open problem" }, book.closed ? "all tokens accounted for" : "some tokens not accounted for")),
      h("details", {}, h("summary", {}, "Where every token is"), h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Tokens by state" }, h("table", { class: "rows", "aria-label": "Tokens by state" },
        h("thead", {}, h("tr", {}, ["Tokens", "Count", "Share", "Where they are"].map((text, n) => h("th", { scope: "col", class: n === 1 || n === 2 ? "figure" : "" }, text)))),
        h("tbody", {}, line("generated", book.generated, percent(book.generated), "acknowledged policy tokens", "sum"),
          book.states.map(([name, count]) => [line(name.replaceAll("_", " "), count, percent(count), MEANINGS[name] ?? "in groups that were given up, with the reason"),
            name === "trained" && book.with_gradient !== null && line("– of them with a gradient", book.with_gradient, percent(book.with_gradient), "which have moved the weights")]),
          line("sum of all states", sum(book), percent(sum(book)), "equals generated if all tokens are accounted for", "sum"),
          book.outside.map(([name, count]) => line(name, count, "", "counted beside the ledger")))))));
  }

  const sum = ({ states }) => states.reduce((total, [, count]) => total + count, 0);

  /** The lanes of the last steps and of the whole run. */
  async function drawWorkers() {
    const { about } = loaded.get(run.name);
    const [last, whole] = await Promise.all(["timeline?workers=24", "lanes"].map((what) => ask(`${apiOf(run.name)}/${what}`, signal)));
    const pictures = [whole.lanes && ["Of the whole run", whole], (!whole.lanes || about.steps > FEW_STEPS) && last.lanes.length > 0 && ["Of the last steps", last]].filter(Boolean);
    const toTimeline = run.views.includes("timeline") && h("a", { class: "button", href: addressOf(run.name, "timeline") }, "Timeline");
    const parts = pictures.map(([title, shown]) => ({ title, shown, rows: rowsOf(shown), canvas: h("canvas", { class: "lanes", role: "img", "aria-label": `Lanes of the workers: ${title.toLowerCase()}` }), words: h("div", { class: "hidden" }) }));
    fill(workers, h("div", { class: "tools" }, h("h2", {}, "Workers"), parts.length ? legendOf(KINDS, MARKS) : note("Nothing of them yet."), toTimeline),
      parts.map(({ title, shown, canvas, words }) => h("figure", {}, h("figcaption", { class: "note" }, `${title}, ${duration(shown.end - shown.begin)}${shown.pauses?.length ? ", pauses left out" : ""}${shown.workers > shown.lanes.length ? `; the first ${number(shown.lanes.length)} of ${number(shown.workers)} workers` : ""}.${shown.activity ? ` Of all workers' time: ${shown.activity}.` : ""}`), h("div", {}, canvas), words)));
    drawParts = () => parts.forEach(({ shown, rows, canvas }) => drawLanes(canvas, shown, rows));
    drawParts();
    parts.forEach(({ shown, rows, words }) => tellLanes(words, shown, rows));
  }

  async function drawExamples() {
    const found = await ask(`${apiOf(run.name)}/examples`, signal).catch((error) => ({ error: error.message }));
    if (signal.aborted) return;
    fill(examples, h("h2", {}, "Some samples"), found.error ? note(found.error) : found.length ? found.map(({ kind, headline, prompt, response, label }) => h("details", { open: kind === "worst" }, h("summary", {}, `${kind}: ${headline}`),
      h("pre", { dir: "auto", tabindex: 0 }, h("span", { class: "path" }, prompt), response), label && h("p", { class: "note" }, "Reference answer: ", label))) : note("No samples are kept."));
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
      table.steps_a_row > 1 && note(`Means of ${table.steps_a_row} steps.`),
      run.views.includes("samples") && at.map((row) => h("a", { class: "button", href: addressOf(run.name, "samples", [], { "step.min": table.step[row], "step.max": table.step[row] }) }, `Samples of step ${table.step[row]}`)),
      h("button", { type: "button", onclick: () => { picked = []; remember(); fill(chosen); } }, "Close")),
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Figures of the chosen steps" }, h("table", { class: "rows figures", "aria-label": "Figures of the chosen steps" },
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
  await Promise.all([showChosen(), drawWorkers(), drawExamples()]);
  const observer = new ResizeObserver(() => drawParts());
  observer.observe(workers);
  signal.addEventListener("abort", () => observer.disconnect());
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
        if (loaded.get(run.name).table.step.length === before) continue;
        draw();
        await Promise.all([drawWorkers(), drawExamples()]);
      }
    } catch (error) {
      if (error.name !== "AbortError") throw error;
    } finally {
      busy = false;
    }
  }
}
