// Sample view: turns of one sample with tokens coloured by a chosen figure, its history, and all its columns.

import { addressOf, apiOf, ask, choices, duration, fill, groupAddress, h, heldOut, LABEL, note, number, reference, sampleAddress, sampleName, sampleOf, shownImages, why } from "./lib.js";

const COLOURS = {
  version: ["Version", "The policy's version that has sampled the token"],
  gap: ["Gap", "Learner's minus engine's log-probability, in nats"],
  entropy: ["Entropy", "Of the learner's distribution at the token, in nats"],
  advantage: ["Advantage", "Of the sample, where its tokens are trained"],
  none: ["Plain", "No colours"],
};
const PART = 1000;
/** Tokens that are added to the page at once; more are added while scrolling. */
const HUES = 8;
const GAP_NATS = 1;
const ENTROPY_NATS = 3;
const SHOWN = new Set(["prompt", "response", "prompt_ids", "response_ids", "segments", "behaviour_logprobs", "learner_logprobs", "entropies", "pieces", "turns", "spans", "label", "held_out", "reward_details", "opened_at", "delivered_at", "generated_at", "scored_at", "step", "group", "index", "fork", "parent", "shared", "reward", "advantage", "trained", "finish_reason", "discarded", "discarded_from", "discarded_at", "attempts", "error", "chunks", "tokens", "images", "token_scores"]);

export async function sampleView(place, { run, address, signal }) {
  const [step, group, index] = address.rest;
  const discarded = address.query.get("discarded");
  const sample = await ask(sampleOf(run.name, address.rest, discarded), signal);
  const row = { step, group, index };
  const scores = scoresOf(sample);
  const ways = [...Object.entries(COLOURS).map(([way, [label, title]]) => [way, label, title]), ...scores.map(({ way, name }) => [way, name.replaceAll("_", " "), `What a scorer gave each token as ${name}`])];
  let by = ways.some(([way]) => way === address.query.get("by")) ? address.query.get("by") : "version";
  const versions = versionsOf(sample);
  const key = h("p", { class: "key" });
  const said = h("p", { class: "said", role: "status" }, "Point at a token, or choose the text and use the arrow keys.");
  const speech = h("div", { class: classOf(by) });
  const tokens = new Tokens(sample, versions, said, scores);
  tokens.colourBy(by);
  const colours = (value) => {
    by = value;
    speech.className = classOf(by);
    tokens.colourBy(by);
    history.replaceState(null, "", addressOf(run.name, "samples", address.rest, { discarded, by: by === "version" ? "" : by }));
    drawKey();
  };
  const drawKey = () => fill(key, keyOf(by, versions, sample, scores));

  fill(place,
    h("p", { class: "path" }, h("a", { href: addressOf(run.name, "samples") }, "Samples"), " › ",
      h("a", { href: addressOf(run.name, "samples", [], { "step.min": step, "step.max": step }) }, `step ${step}`), " › ",
      h("a", { href: groupAddress(run.name, row) }, `group ${group}`)),
    h("h1", {}, `Sample ${sampleName(sample)}`),
    sample.discarded && h("p", { class: "chip failed" }, `Discarded as ${why(sample)}${sample.discarded_from ? `, from token ${number(sample.discarded_from + 1)} on` : ""}`),
    sample.held_out && h("p", { class: "chip" }, heldOut(sample)),
    h("dl", { class: "facts small" }, facts(sample, versions)),
    h("div", { class: "tools sticky" }, choices("Colour tokens by", ways, by, colours), key,
      h("a", { class: "button", href: groupAddress(run.name, row) }, "The whole group"),
      h("a", { class: "button", href: addressOf(run.name, "samples", [], { prompt: await promptOf() }) }, "This prompt in other steps")),
    said,
    h("section", { class: "speech prompt" }, h("h2", {}, "Prompt", h("span", { class: "note" }, ` ${number(sample.prompt_ids?.length ?? 0)} tokens`)), shownImages(run.name, sample), h("pre", { dir: "auto", tabindex: 0 }, sample.prompt)),
    speech, sample.label?.length > LABEL && h("section", { class: "speech prompt" }, h("h2", {}, "Reference answer"), h("pre", { dir: "auto", tabindex: 0 }, sample.label)), life(run, address, sample), await session(run, sample, signal), further(sample));
  drawKey();
  fill(speech, sample.pieces ? sample.turns.map((turn) => tokens.turn(turn)) : [
    note("The tokeniser of the policy is not at hand, so that the text is shown as a whole."),
    h("section", { class: "speech policy" }, h("h2", {}, "Response"), h("pre", { dir: "auto", tabindex: 0 }, sample.response)),
    segmentTable(sample)]);
  signal.addEventListener("abort", () => tokens.end());

  async function promptOf() {
    const found = await ask(`${apiOf(run.name)}/samples?step.min=${step}&step.max=${step}&group.min=${group}&group.max=${group}`, signal);
    return found.rows[0]?.prompt ?? "";
  }
}

/** The turns of a response as tokens, one of which is selected. */
class Tokens {
  constructor(sample, versions, said, scores) {
    this.sample = sample;
    this.said = said;
    this.scores = scores;
    this.spans = [];
    this.of = new Array(sample.response_ids?.length ?? 0).fill(-1);
    for (const { start, end, incarnation, step } of sample.segments ?? [])
      this.of.fill(versions.findIndex((version) => version.step === step && version.incarnation === incarnation), start, end);
    this.versions = versions;
    this.watcher = new IntersectionObserver((entries) => entries.forEach((entry) => entry.isIntersecting && entry.target.more()), { rootMargin: "800px" });
  }

  end() {
    this.watcher.disconnect();
  }

  turn({ who, start, end }) {
    const text = h("pre", {
      class: "tokens", dir: "auto", tabindex: 0, role: "group", "aria-label": `${who === "policy" ? "What the policy said" : "What its environment or agent said"}; arrow keys go from token to token`,
      onkeydown: (event) => this.step(event, text),
      onpointermove: (event) => event.target.dataset.at && this.choose(event.target),
    });
    this.append(text, start, end);
    return h("section", { class: `speech ${who}` }, h("h2", {}, who === "policy" ? "Policy" : "Environment or agent", h("span", { class: "note" }, ` ${number(end - start)} tokens`)), text);
  }

  /** Append a part of the tokens as a block that is laid out only when visible; it ends at a line break if there is one. */
  append(text, start, end) {
    const { pieces } = this.sample;
    let until = Math.min(end, start + PART);
    for (let at = until; until < end && at > until - PART / 4; at--) if (pieces[at - 1].endsWith("\n")) { until = at; break; }
    const part = h("div", { class: "part" });
    for (let at = start; at < until; at++) part.append(this.token(at));
    text.append(part);
    if (until === end) return;
    const rest = h("button", { type: "button", class: "rest" }, `${number(end - until)} more tokens`);
    rest.more = () => { this.watcher.unobserve(rest); rest.remove(); this.append(text, until, end); };
    rest.onclick = rest.more;
    text.append(rest);
    this.watcher.observe(rest);
  }

  token(at) {
    const { pieces, behaviour_logprobs: engine, learner_logprobs: learner, entropies, advantage, trained } = this.sample;
    const span = document.createElement("span");
    span.textContent = pieces[at];
    span.dataset.at = at;
    const version = this.of[at];
    if (version < 0) return span;
    span.dataset.v = version % HUES;
    const style = span.style;
    if (learner && learner[at] !== null && engine?.[at] !== null) style.setProperty("--gap", clamp((learner[at] - engine[at]) / GAP_NATS));
    if (entropies && entropies[at] !== null) style.setProperty("--entropy", clamp(entropies[at] / ENTROPY_NATS));
    if (trained) style.setProperty("--advantage", clamp(advantage / 2));
    this.spans.push(span);
    this.paint(span);
    return span;
  }

  /** Colour the tokens, those that are added later too, by the token score of that name, if `way` is one. */
  colourBy(way) {
    this.score = this.scores.find((score) => score.way === way);
    if (this.score) this.spans.forEach((span) => this.paint(span));
  }

  paint(span) {
    if (this.score) span.style.setProperty("--score", clamp((this.score.values[span.dataset.at] ?? 0) / this.score.most));
  }

  choose(span) {
    if (this.current === span) return;
    this.current?.classList.remove("current");
    this.current = span;
    span.classList.add("current");
    const at = Number(span.dataset.at);
    const { pieces, response_ids: ids, behaviour_logprobs: engine, learner_logprobs: learner, entropies } = this.sample;
    const version = this.versions[this.of[at]];
    const came = cameAfter(this.sample, at);
    const parts = [`token ${number(at + 1)}`, `“${visible(pieces[at])}”`, `id ${ids[at]}`, version ? `version ${name(version)}` : "not the policy's"];
    if (engine?.[at] != null) parts.push(`engine ${number(engine[at], 3)}`);
    if (learner?.[at] != null) parts.push(`learner ${number(learner[at], 3)}`, `gap ${number(learner[at] - engine[at], 2)}`);
    if (entropies?.[at] != null) parts.push(`entropy ${number(entropies[at], 3)}`);
    for (const score of this.scores) if (version) parts.push(`${score.name} ${number(score.values[at], 3)}`);
    if (came !== null) parts.push(`came after ${duration(came)}`);
    this.said.textContent = parts.join(" · ");
  }

  step(event, text) {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const inside = this.current && text.contains(this.current);
    const at = inside ? Number(this.current.dataset.at) + by : Number(text.querySelector("span")?.dataset.at);
    const find = () => text.querySelector(`[data-at="${at}"]`);
    if (!find()) text.querySelector(".rest")?.more();
    const next = find();
    if (next) { this.choose(next); next.scrollIntoView({ block: "nearest" }); }
  }
}

const classOf = (by) => `speech-all by-${by.startsWith("score") ? "score" : by}`;
/** The token scores of a sample, each as a way to colour tokens, with its largest magnitude. */
const scoresOf = (sample) => (sample.token_scores ?? []).map(({ name, values }, n) => ({ way: `score${n}`, name, values, most: values.reduce((most, value) => Math.max(most, Math.abs(value ?? 0)), 0) || 1 }));
const clamp = (value) => Math.max(-1, Math.min(1, value)).toFixed(3);
const visible = (text) => JSON.stringify(text).slice(1, -1).replaceAll('\\"', '"') || "part of a character";
const name = ({ incarnation, step }) => (incarnation ? `${incarnation}.${step}` : `${step}`);

function versionsOf(sample) {
  const found = new Map();
  for (const { incarnation, step, start, end } of sample.segments ?? []) {
    const version = found.get(`${incarnation}.${step}`) ?? { incarnation, step, tokens: 0 };
    version.tokens += end - start;
    found.set(`${incarnation}.${step}`, version);
  }
  return [...found.values()];
}

function keyOf(by, versions, sample, scores) {
  const score = scores.find(({ way }) => way === by);
  if (score) return [h("span", { class: "scale score" }), `−${number(score.most, 3)} … ${number(score.most, 3)}`];
  if (by === "version") return versions.map((version, n) => h("span", { class: "swatch", "data-v": n % HUES }, `version ${name(version)}: ${number(version.tokens)} tokens${sample.held_out ? "" : `, age ${sample.step - 1 - version.step}`}`));
  if (by === "gap") return sample.learner_logprobs ? [h("span", { class: "scale gap" }), `engine thought it likelier by ${GAP_NATS} nat … learner`] : "The learner has not seen it: it has had no gradient.";
  if (by === "entropy") return sample.entropies ? [h("span", { class: "scale entropy" }), `0 … ${ENTROPY_NATS} nats`] : "There are no entropies of it.";
  if (by === "advantage") return [h("span", { class: "scale advantage" }), `${number(sample.advantage, 3)}${sample.trained ? ", of the whole sample" : ", and it has had no gradient"}`];
  return "";
}

function facts(sample, versions) {
  const gaps = (sample.learner_logprobs ?? []).map((value, at) => (value === null || sample.behaviour_logprobs?.[at] == null ? null : Math.abs(value - sample.behaviour_logprobs[at]))).filter((gap) => gap !== null);
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
  const known = (sample.entropies ?? []).filter((value) => value !== null);
  return [
    ["Reward", number(sample.reward, 4)],
    ["Reference", reference(sample.label)],
    !sample.held_out && ["Advantage", `${number(sample.advantage, 3)}${sample.trained ? "" : " (no gradient)"}`],
    ["Tokens", number(sample.tokens)],
    ["Versions", versions.map(name).join(", ")],
    ["Finish", sample.finish_reason || "–"],
    gaps.length > 0 && ["Mean gap", number(mean(gaps), 2)],
    known.length > 0 && ["Mean entropy", number(mean(known), 2)],
    sample.opened_at && endOf(sample) && ["Life", duration(endOf(sample) - sample.opened_at)],
    ...(sample.reward_details ?? []).map(({ name, value }) => [name.replaceAll("_", " "), number(value, 3)]),
  ].filter(Boolean).map(([name, value]) => h("div", { class: "fact" }, h("dt", { class: "name" }, name), h("dd", { class: "value" }, value)));
}

function segmentTable(sample) {
  return h("table", { class: "rows figures" }, h("thead", {}, h("tr", {}, ["Tokens", "Version"].map((text) => h("th", { scope: "col" }, text)))),
    h("tbody", {}, (sample.segments ?? []).map((segment) => h("tr", {}, h("td", {}, `${number(segment.start)} to ${number(segment.end)}`), h("td", {}, name(segment))))));
}

const endOf = ({ delivered_at: delivered, discarded_at: discarded }) => delivered ?? discarded;

/** Seconds from the opening of the group to the arrival of the token's chunk; null if unknown. */
function cameAfter({ chunks, opened_at: opened }, place) {
  const chunk = chunks?.find(({ end }) => place < end);
  return chunk?.at && opened ? Math.max(0, chunk.at - opened) : null;
}

/** The process that held the sample when a chunk arrived; clocks differ slightly. */
const whereAt = (spans, at) => (spans.findLast(({ what, began }) => what !== "score" && began <= at) ?? spans[0]).where;

/** The sample's history: which process held it when, from the opening of its group to its delivery. */
function life(run, address, sample) {
  const { spans = [], opened_at: opened } = sample;
  const chunks = (sample.chunks ?? []).filter(({ at }) => at);
  if (!spans?.length) return null;
  const begin = opened ?? Math.min(...spans.map(({ began }) => began));
  const end = endOf(sample) ?? Math.max(...spans.map(({ ended }) => ended));
  const share = (seconds) => `${(100 * seconds) / Math.max(1e-6, end - begin)}%`;
  return h("section", { class: "panel" }, h("h2", {}, "Its life", h("span", { class: "note" }, ` ${duration(end - begin)} from the opening of its group to ${sample.discarded_at ? "its discard" : "its delivery"}`)),
    h("div", { class: "lives" }, [...new Set(spans.map(({ where }) => where))].map((where) => h("div", {}, h("span", {}, where),
      h("div", { class: "track", "aria-hidden": "true" }, spans.filter((span) => span.where === where).map((span) => h("i", { class: span.what, title: told(span, begin), vars: { "--left": share(span.began - begin), "--width": share(span.ended - span.began) } })),
        chunks.filter(({ at }) => whereAt(spans, at) === where).map(({ at }) => h("i", { class: "chunk", vars: { "--left": share(Math.min(Math.max(at, begin), end) - begin) } })))))),
    h("ol", {}, spans.map((span) => h("li", {}, told(span, begin)))),
    chunks.length > 0 && h("details", {}, h("summary", {}, `Its tokens came in ${number(chunks.length)} chunks`),
      h("ol", {}, chunks.map(({ end: tokens, at }, n) => h("li", {}, `tokens ${number(n ? chunks[n - 1].end : 0)} to ${number(tokens)}: after ${duration(Math.max(0, at - begin))}`)))),
    h("a", { href: addressOf(run.name, "timeline", [], { from: begin.toFixed(3), to: end.toFixed(3), sample: address.rest.join("."), discarded: sample.discarded }) }, "Its life among the lanes of the run"));
}

const DOES = { generate: "generated", score: "scored", act: "with its agent" };
const told = ({ what, where, began, ended, start, end, how }, begin) =>
  `${DOES[what] ?? what} at ${where} from ${duration(Math.max(0, began - begin))} on, for ${duration(ended - began)}${end > start ? `, tokens ${number(start)} to ${number(end)}` : ""}: ${how.replaceAll("_", " ")}`;

/** The forks of an agent's session as a tree. */
async function session(run, sample, signal) {
  if (!sample.spans?.some(({ what }) => what === "act") && !sample.fork) return null;
  const rows = (await ask(`${apiOf(run.name)}/groups/${sample.step}/${sample.group}`, signal)).filter(({ index, discarded }) => index === sample.index && (discarded ?? "") === (sample.discarded ?? ""));
  if (rows.length < 2) return null;
  const known = new Set(rows.map(({ fork }) => fork));
  const below = (parent) => rows.filter((row) => (row.fork && known.has(row.parent) ? row.parent : null) === parent);
  const list = (found) => found.length > 0 && h("ul", {}, found.map((row) => h("li", {},
    h("a", { href: sampleAddress(run.name, row), "aria-current": row.fork === sample.fork ? "page" : undefined }, row.fork ? `Fork ${row.fork}` : "The root"),
    ` ${number(row.tokens)} tokens of the policy${row.fork ? `, forks from ${row.parent ? `fork ${row.parent}` : "the root"} after ${number(row.shared)} tokens` : ""}`,
    list(below(row.fork)))));
  return h("section", { class: "panel" }, h("h2", {}, "Its session"), list(below(null)));
}

/** All other columns of the sample. */
function further(sample) {
  const known = Object.entries(sample).filter(([name, value]) => !SHOWN.has(name) && value !== null && value !== "" && !(Array.isArray(value) && value.length === 0));
  if (known.length === 0) return null;
  return h("section", { class: "further" }, h("h2", {}, "What else is known of it"), h("dl", {}, known.map(([name, value]) => [h("dt", {}, name.replaceAll("_", " ")), h("dd", {}, written(name, value))])));
}

function written(name, value) {
  if (Array.isArray(value)) return h("ul", {}, value.map((one) => h("li", {}, written(name, one))));
  if (value !== null && typeof value === "object") return Object.entries(value).map(([key, one]) => `${key} ${typeof one === "object" ? JSON.stringify(one) : typeof one === "number" ? written(key, one) : one}`).join(" · ");
  if (typeof value !== "number") return String(value);
  if (value > 1e9 && value < 1e11) return new Date(value * 1000).toISOString().replace("T", " ").slice(0, 23);
  return name.endsWith("_s") ? duration(value) : number(value);
}
