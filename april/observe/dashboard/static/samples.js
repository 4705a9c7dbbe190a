// Samples view: a table of all kept samples; filters, sorting and search are in the address.

import { addressOf, apiOf, ask, fill, groupAddress, h, note, number, problem, reference, sampleAddress, sampleName, samplesOf } from "./lib.js";

const COLUMNS = [
  ["step", "Step"], ["group", "Sample"], ["reward", "Reward"], ["", "Reference"], ["advantage", "Advantage"], ["tokens", "Tokens"], ["versions", "Versions"], ["staleness", "Age"],
];
const RANGES = [["step", "Step", 1], ["reward", "Reward", "any"], ["tokens", "Tokens", 1], ["versions", "Versions", 1], ["staleness", "Age", 1]];
const WORDS = { finish_reason: "Finish", discarded: "Discarded", held_out: "Held out", worker: "Worker" };
const titled = (name) => (name === "life_s" ? "Life, s" : name.replaceAll("_", " "));
const AGAIN_MS = 3000;
/** Interval at which the table is refreshed while its files are still being read. */
const PAUSE_MS = 150;

export async function samplesView(place, { run, address, signal, follow }) {
  const asked = new URLSearchParams(address.query);
  let request = new AbortController();
  /** Steps that were read when the table was last filled. */
  let read = -1;
  let filled = 0;

  const count = h("p", { class: "count", role: "status" });
  const body = h("tbody");
  const head = h("tr");
  const pages = h("div", { class: "pages" });
  const form = h("form", { class: "filters", role: "search", "aria-label": "Filters of samples", onsubmit: (event) => event.preventDefault() });
  fill(place, h("h1", { class: "hidden" }, `Samples of ${run.name}`), form, count,
    h("div", { class: "scroll" }, h("table", { class: "rows fold samples", onkeydown: walk }, h("caption", { class: "hidden" }, "Samples"), h("thead", {}, head), body)), pages);

  let timer = 0;
  const soon = (key, value) => {
    clearTimeout(timer);
    timer = setTimeout(() => set(key, value), PAUSE_MS);
  };
  function set(key, value) {
    clearTimeout(timer);
    if (value === "" || value === null) asked.delete(key);
    else asked.set(key, value);
    if (key !== "offset") asked.delete("offset");
    history.replaceState(null, "", addressOf(run.name, "samples", [], Object.fromEntries(asked)));
    return load();
  }
  signal.addEventListener("abort", () => { request.abort(); clearTimeout(timer); });

  function drawForm(answer) {
    const text = h("input", { type: "search", name: "text", placeholder: "Search prompts and responses", "aria-label": "Search prompts and responses", value: asked.get("text") ?? "", oninput: (event) => soon("text", event.target.value) });
    const ranges = [...RANGES, ...answer.further.map((name) => [name, titled(name), "any"])];
    const filtered = [...asked.keys()].some((key) => /\.(min|max)$|^is\.|^prompt$|^text$/.test(key));
    fill(form, text, ranges.map(([name, label, step]) => h("fieldset", {}, h("legend", {}, label), ["min", "max"].map((end) =>
      h("input", { type: "number", step, name: `${name}.${end}`, placeholder: end, "aria-label": `${label}, ${end === "min" ? "least" : "most"}`, value: asked.get(`${name}.${end}`) ?? "", oninput: (event) => soon(`${name}.${end}`, event.target.value) })))),
    Object.entries(answer.words).filter(([, words]) => words.length > 1).map(([name, words]) => h("label", {}, h("span", {}, WORDS[name] ?? name),
      h("select", { name, onchange: (event) => set(`is.${name}`, event.target.value === "any" ? "" : event.target.value || " ") },
        h("option", { value: "any" }, "any"), words.map((word) => h("option", { value: word, selected: asked.get(`is.${name}`) === (word || " ") }, word || "none"))))),
    asked.get("prompt") && h("span", { class: "chip" }, "of one prompt"),
    h("button", { type: "button", hidden: !filtered, onclick: () => { for (const key of [...asked.keys()]) if (key !== "sort") asked.delete(key); formOf = ""; set("offset", ""); } }, "Clear"));
  }

  function drawHead(answer) {
    const sorted = asked.get("sort") ?? "-step";
    const more = answer.further.map((name) => [name, titled(name)]);
    fill(head, [...COLUMNS, ...more].map(([name, label]) => {
      const falling = sorted === `-${name}`, rising = sorted === name;
      if (!name) return h("th", { scope: "col" }, label);
      return h("th", { scope: "col", class: name === "group" ? "" : "figure", "aria-sort": falling ? "descending" : rising ? "ascending" : undefined },
        h("button", { type: "button", disabled: Boolean(asked.get("text")), onclick: () => set("sort", falling ? name : `-${name}`) }, label, h("span", { "aria-hidden": "true" }, falling ? " ↓" : rising ? " ↑" : "")));
    }), h("th", { scope: "col" }, "Finish"), h("th", { scope: "col", class: "wide" }, "Prompt and response"));
  }

  function line(row, answer) {
    const text = h("td", { class: "wide" }), label = h("td", {});
    const element = h("tr", { onclick: (event) => { if (!event.target.closest("a") && !getSelection().toString()) location.hash = sampleAddress(run.name, row); } },
      h("td", { class: "figure" }, number(row.step)),
      h("th", { scope: "row" }, h("a", { href: sampleAddress(run.name, row), "aria-label": `Sample ${sampleName(row)} of step ${row.step}` }, sampleName(row))),
      h("td", { class: "figure" }, number(row.reward)),
      label,
      h("td", { class: "figure" }, row.trained ? number(row.advantage, 3) : h("span", { class: "note", title: "It has had no gradient" }, number(row.advantage, 3))),
      h("td", { class: "figure" }, number(row.tokens)),
      h("td", { class: "figure" }, number(row.versions)),
      h("td", { class: "figure" }, number(row.staleness)),
      answer.further.map((name) => h("td", { class: "figure" }, number(row[name]))),
      h("td", {}, row.finish_reason, row.discarded && [" ", h("span", { class: "chip failed" }, row.discarded)], row.held_out && [" ", h("span", { class: "chip" }, "held out")]), text);
    return { element, text, label, row };
  }

  async function excerpts(lines) {
    if (lines.length === 0) return;
    const texts = await ask(`${apiOf(run.name)}/excerpts?of=${lines.map(({ row }) => `${row.step}.${row.place}`).join(",")}`, request.signal);
    for (const [n, { text, label }] of lines.entries()) {
      fill(label, reference(texts[n]?.label));
      fill(text, texts[n] ? h("div", { class: "excerpt", dir: "auto" }, h("span", { class: "prompt" }, texts[n].prompt), texts[n].response) : note("its file is gone"));
    }
  }

  let formOf = "";
  function around(answer) {
    const form = JSON.stringify([answer.words, answer.further]);
    if (form !== formOf) drawForm(answer);
    formOf = form;
    drawHead(answer);
  }

  async function load() {
    request.abort();
    request = new AbortController();
    const current = request;
    const parameters = new URLSearchParams(asked);
    for (const [key, value] of asked) if (key.startsWith("is.")) parameters.set(key, value.trim());
    try {
      const answer = await ask(`${apiOf(run.name)}/samples?${parameters}`, request.signal);
      read = answer.read;
      filled = performance.now();
      around(answer);
      if (asked.get("text")) return await find(parameters, answer);
      const lines = answer.rows.map((row) => line(row, answer));
      fill(body, lines.map(({ element }) => element));
      say(answer, lines.length);
      await excerpts(lines);
    } catch (error) {
      if (error.name !== "AbortError" && current === request) fill(count, problem(error.message));
    }
  }

  function say(answer, shown) {
    const offset = Number(asked.get("offset") ?? 0);
    const reading = answer.read < answer.kept ? ` ${number(answer.read)} of ${number(answer.kept)} steps are read so far.` : "";
    const text = answer.total ? `${samplesOf(answer.total)}, ${number(offset + 1)} to ${number(offset + shown)} shown.` : answer.kept ? "No sample is like that." : "No samples are kept of this run.";
    fill(count, text + reading, answer.unreadable.length > 0 && problem(`Cannot be read: ${answer.unreadable.join("; ")}`));
    fill(pages, answer.total > answer.page && [h("button", { type: "button", disabled: offset === 0, onclick: () => set("offset", Math.max(0, offset - answer.page) || "") }, "Previous"),
      h("button", { type: "button", disabled: offset + shown >= answer.total, onclick: () => set("offset", offset + answer.page) }, "Next")]);
  }

  /** Search the text in the files, newest step first; hits are shown as they arrive. */
  async function find(parameters, answer) {
    fill(body);
    fill(pages);
    fill(count, "Searching …");
    const found = await fetch(`${apiOf(run.name)}/search?${parameters}`, { signal: request.signal });
    if (!found.ok) throw new Error((await found.json()).error);
    const reader = found.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "", hits = 0, waiting = [];
    const flush = async () => { const lines = waiting; waiting = []; await excerpts(lines); };
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const text of lines) {
        const said = JSON.parse(text);
        if (said.row) {
          const one = line(said.row, answer);
          body.append(one.element);
          waiting.push(one);
          hits++;
        }
        if (said.searched) fill(count, `${number(hits)} found, down to step ${number(said.searched)} …`);
        if (said.done === false) fill(pages, h("button", { type: "button", onclick: () => set("before", said.before) }, `Search on before step ${number(said.before)}`));
        if ("done" in said) fill(count, `${number(hits)} found${said.done ? "" : `, down to step ${number(said.before)}`}.`);
      }
      if (waiting.length >= 20) await flush();
    }
    await flush();
  }

  /** Arrow keys up and down move between samples. */
  function walk(event) {
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const links = [...body.querySelectorAll("th a")];
    const at = links.indexOf(document.activeElement);
    if (!by || at < 0) return;
    event.preventDefault();
    links[at + by]?.focus();
  }

  await load();
  follow((topic, news) => {
    if (topic !== "news" || !news.samples || news.samples.files === read) return;
    if (news.samples.files < news.samples.kept && performance.now() - filled < AGAIN_MS) return;
    if (!asked.get("text") && !asked.get("offset") && !body.contains(document.activeElement)) load();
  });
}
