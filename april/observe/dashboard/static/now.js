// Now view: who waits for whom at the moment, from the broker's status.

import { duration, fill, h, note, number, renew, short } from "./lib.js";

/** Activities of samples in a slot, and `admission`, of those waiting for one. */
const DOES = [["generating", "generate"], ["weights", "wait for weights"], ["tool", "wait for a tool"], ["idle", "idle"], ["admission", "wait for admission"]];
/** Share of its credit (bytes that a worker may leave unread) from which it is highlighted. */
const WORTH_SAYING = 0.01;
const STATES = ["leased", "acting", "scoring", "generated", "partial", "waiting", "done", "dead"];
const WHY = {
  admission: "the engine has yet to admit what waits",
  barrier: "barrier: the learner has yet to make the next weights",
  weights: "weights: it has yet to load them",
  drain: "drained, or the run is over",
  "nothing to hand out": "nothing may be handed out",
};

export async function nowView(place, { run, follow }) {
  const sentence = h("p", { class: "sentence" }, "Asking the broker …");
  const aloud = h("p", { class: "hidden", role: "status" });
  const alarms = h("section", { class: "alarms", "aria-label": "Alarms" });
  const figures = h("section", { class: "facts", "aria-label": "Figures" });
  const workers = h("section", { class: "panel", "aria-label": "Workers" });
  const groups = h("section", { class: "panel", "aria-label": "Groups that hold the batch up" });
  const queue = h("section", { class: "panel", "aria-label": "Queue" });
  const silent = h("section", { class: "panel", "aria-label": "Silent leases" });
  fill(place, h("h1", { class: "hidden" }, `${run.name} now`), aloud, sentence, alarms, figures, h("div", { class: "columns" }, workers, h("div", { class: "stack" }, queue, silent, groups)));

  follow((topic, said) => {
    if (topic !== "now") return;
    if (said.away) {
      say("No broker answers.");
      renew(figures, h("div", { class: "fact" }, note(`${said.away}.`), note("What the run has left behind is in the other views.")));
      return [alarms, workers, groups, queue, silent].forEach((section) => fill(section));
    }
    say(said.sentence);
    draw(said.status);
  }, true);

  /** Announced when the sentence changes, not when only its numbers do. */
  function say(text) {
    const gist = (words) => words.replace(/[\d,.]+ ?(min|h|s)?/g, "");
    if (gist(aloud.textContent) !== gist(text)) fill(aloud, text);
    if (sentence.textContent !== text) fill(sentence, text);
  }

  function draw(status) {
    const { standing } = status;
    renew(alarms, [...status.step_alarms, ...status.alarms].map(({ name, sentence, page }) => h("p", { class: "problem" }, `${name.replaceAll("_", " ")}: ${sentence} (${page})`)));
    renew(figures, facts(status));
    renew(workers, h("h2", {}, "Workers"), key(), status.workers.length ? h("div", { class: "scroll inner" }, h("table", { class: "rows fold", "aria-label": "Workers" },
      h("thead", {}, h("tr", {}, ["Worker", "Version", "Tokens/s", "Slots", "Else"].map((text, n) => h("th", { scope: "col", class: n === 2 ? "figure" : n === 4 ? "wide" : "" }, text)))),
      h("tbody", {}, status.workers.map(worker)))) : note("None is connected."), others(status));
    renew(queue, h("h2", {}, "Queue"), states("Training", standing.queue.training, status.queues.training_age_s), states("Evaluation", standing.queue.evaluation, status.queues.evaluation_age_s),
      note(`The oldest has waited ${duration(status.queues.oldest_waiting_s)}; the longest lease is ${duration(status.queues.longest_lease_s)} old.`));
    renew(silent, standing.silent.length > 0 && [h("h2", {}, "Silent leases"), h("ul", {}, standing.silent.map((one) =>
      h("li", {}, `${one.group}.${one.index} at ${one.with}: not renewed for ${duration(one.silent_s)}, ends in ${duration(one.expires_in_s)}`)))]);
    renew(groups, h("h2", {}, `Groups that batch ${standing.batch.step} waits for`), holders(standing.holding_up), standing.groups.length ? standing.groups.slice(0, 24).map(group) : note("None."),
      standing.batch.missing > 24 && note(`and ${number(standing.batch.missing - 24)} more`));
  }

  function facts(status) {
    const { batch, learner, journal_sync_s: sync } = status.standing;
    return [
      ["Step", number(status.step), `of ${number(status.max_steps)}`],
      ["Batch", `${batch.ready} of ${batch.needed}`, `groups, ${number(batch.open)} open`],
      ["Phase", status.phase, status.drain || " "],
      ["Learner", learner.does, learner.silent_s === null ? " " : `heard ${duration(learner.silent_s)} ago`],
      ["Rollout", short(status.workers.reduce((sum, one) => sum + one.tokens_per_s, 0)), "tokens/s"],
      ["Journal", `${number(sync * 1000, 2)} ms`, "the last sync"],
    ].map(([name, value, beside]) => h("div", { class: "fact" }, h("span", { class: "name" }, name), h("span", { class: "value" }, value), h("span", { class: "beside" }, beside)));
  }

  const key = () => h("p", { class: "slots-key note", "aria-hidden": "true" }, DOES.map(([kind, text]) => h("span", {}, h("i", { class: kind }), text)));

  function worker(one) {
    const { why, unread_bytes: unread, credit_bytes: credit, ...does } = one.does;
    const total = Math.max(1, DOES.reduce((sum, [kind]) => sum + does[kind], 0));
    const bar = DOES.filter(([kind]) => does[kind]).map(([kind]) => h("i", { class: kind, vars: { "--share": `${(100 * does[kind]) / total}%` } }));
    const said = DOES.filter(([kind]) => does[kind] && kind !== "generating").map(([kind, text]) => `${number(does[kind])} ${text}${kind === "idle" && why ? `: ${WHY[why] ?? why}` : ""}`);
    if (unread > credit * WORTH_SAYING) said.push(`${number(unread / 2 ** 20, 2)} of ${number(credit / 2 ** 20)} MiB unread`);
    return h("tr", {}, h("th", { scope: "row" }, one.name), h("td", {}, one.version), h("td", { class: "figure" }, short(one.tokens_per_s)),
      h("td", { class: "slots" }, h("span", { class: "bar", "aria-hidden": "true" }, bar), h("span", {}, `${number(does.generating)} of ${number(one.slots)} generate`)),
      h("td", { class: "why wide" }, said.join("; ") || "–"));
  }

  const others = (status) => [...status.scorers.map((one) => [one, "scores"]), ...status.agents.map((one) => [one, "runs agents"])].map(([one, does]) =>
    note(`${one.name} ${does}: ${number(one.leased)} of ${number(one.capacity)}`));

  function states(label, counts, ages = {}) {
    const known = STATES.filter((state) => counts[state]);
    const most = Math.max(1, ...known.map((state) => counts[state]));
    return known.length > 0 && h("dl", { class: "states" }, h("dt", { class: "head" }, label), h("dd"), known.map((state) => [h("dt", {}, state), h("dd", {}, h("i", { vars: { "--share": `${(65 * counts[state]) / most}%` } }), number(counts[state]), ages[state] !== undefined && h("span", { class: "note" }, ` oldest ${duration(ages[state])}`))]));
  }

  const holders = (held) => held.length > 0 && h("div", { class: "scroll inner" }, h("table", { class: "rows fold", "aria-label": "Who holds them" },
    h("thead", {}, h("tr", {}, ["Held by", "Groups", "Samples", "Longest", "For"].map((text, n) => h("th", { scope: "col", class: n ? "figure" : "" }, text)))),
    h("tbody", {}, held.slice(0, 8).map((one) => h("tr", {}, h("th", { scope: "row" }, one.with || "nobody yet"), [number(one.groups), number(one.samples), `${number(one.tokens)} tokens`, one.for_s ? duration(one.for_s) : "–"].map((text) => h("td", { class: "figure" }, text)))))));

  function group(one) {
    return h("div", { class: "group" }, h("b", {}, `Group ${one.group}`), note(` ${one.left} of ${one.samples} left`), h("ul", {}, alike(one.waits_for).map((samples) => {
      const [{ state, with: holder }] = samples, longest = (name) => Math.max(...samples.map((sample) => sample[name]));
      const indices = samples.map(({ index }) => `.${index}`).join(" "), least = Math.min(...samples.map(({ tokens }) => tokens)), attempts = longest("attempts");
      return h("li", {}, `${indices} ${state}${holder ? ` at ${holder}` : ""}, ${least < longest("tokens") ? `${number(least)} to ` : ""}${number(longest("tokens"))} tokens${longest("for_s") ? `, for ${samples.length > 1 ? "up to " : ""}${duration(longest("for_s"))}` : ""}${attempts ? `, ${attempts} ${attempts === 1 ? "attempt" : "attempts"} lost` : ""}`);
    })));
  }

  /** The samples of a group, those together that are in the same state at the same process. */
  function alike(samples) {
    const found = new Map();
    for (const sample of samples) found.set(`${sample.state} ${sample.with}`, [...(found.get(`${sample.state} ${sample.with}`) ?? []), sample]);
    return [...found.values()];
  }
}
