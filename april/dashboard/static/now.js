// Now: who waits for whom at one moment, as the broker says it.

import { duration, fill, h, note, number, short } from "./lib.js";

const STATES = ["leased", "acting", "scoring", "generated", "partial", "waiting", "done", "dead"];
const WHY = {
  barrier: "barrier: the learner has yet to make the next weights",
  weights: "weights: it has yet to load them",
  drain: "drained, or the run is over",
  "nothing to hand out": "nothing may be handed out",
};

export async function nowView(place, { run, follow }) {
  const sentence = h("p", { class: "sentence", role: "status", "aria-live": "polite" }, "Asking the broker …");
  const figures = h("section", { class: "facts", "aria-label": "Figures" });
  const workers = h("section", { class: "panel", "aria-label": "Workers" });
  const groups = h("section", { class: "panel", "aria-label": "Groups that hold the batch up" });
  const queue = h("section", { class: "panel", "aria-label": "Queue" });
  const silent = h("section", { class: "panel", "aria-label": "Silent leases" });
  fill(place, h("h1", { class: "hidden" }, `${run.name} now`), sentence, figures, h("div", { class: "columns" }, workers, h("div", { class: "stack" }, queue, silent, groups)));

  follow((topic, said) => {
    if (topic !== "now") return;
    if (said.away) {
      fill(sentence, "No broker answers.");
      fill(figures, h("div", { class: "fact" }, note(`${said.away}.`), note("What the run has left behind is in the other views.")));
      return [workers, groups, queue, silent].forEach((section) => fill(section));
    }
    fill(sentence, said.sentence);
    draw(said.status);
  }, true);

  function draw(status) {
    const { standing } = status;
    fill(figures, facts(status));
    fill(workers, h("h2", {}, "Workers"), key(), status.workers.length ? h("div", { class: "scroll inner" }, h("table", { class: "rows" },
      h("thead", {}, h("tr", {}, ["Worker", "Version", "Slots", "Doing", "Tokens/s", "Unread"].map((text, n) => h("th", { scope: "col", class: n > 3 ? "figure" : "" }, text)))),
      h("tbody", {}, status.workers.map(worker)))) : note("None is connected."), others(status));
    fill(queue, h("h2", {}, "Queue"), states("Training", standing.queue.training), states("Evaluation", standing.queue.evaluation),
      note(`The oldest has waited ${duration(status.queues.oldest_waiting_s)}; the longest lease is ${duration(status.queues.longest_lease_s)} old.`));
    fill(silent, standing.silent.length > 0 && [h("h2", {}, "Silent leases"), h("ul", {}, standing.silent.map((one) =>
      h("li", {}, `${one.group}.${one.index} at ${one.with}: not renewed for ${duration(one.silent_s)}, ends in ${duration(one.expires_in_s)}`)))]);
    fill(groups, h("h2", {}, `Groups that batch ${standing.batch.step} waits for`), holders(standing.holding_up), standing.groups.length ? standing.groups.slice(0, 24).map(group) : note("None."),
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

  const key = () => h("p", { class: "slots-key note", "aria-hidden": "true" }, [["generating", "generating"], ["admission", "leased, waiting for admission"], ["idle", "idle"]].map(([kind, text]) => h("span", {}, h("i", { class: kind }), text)));

  function worker(one) {
    const { generating, admission, idle, why, unread_bytes: unread } = one.does;
    const total = Math.max(1, generating + admission + idle);
    const bar = [["generating", generating], ["admission", admission], ["idle", idle]].map(([kind, count]) => h("i", { class: kind, vars: { "--share": `${(100 * count) / total}%` } }));
    return h("tr", {}, h("th", { scope: "row" }, one.name), h("td", {}, one.version),
      h("td", { class: "slots" }, h("span", { class: "bar", "aria-hidden": "true" }, bar), h("span", {}, `${number(generating)} of ${number(one.slots)}`)),
      h("td", { class: "why" }, [admission && `${number(admission)} wait for admission`, why && `${number(idle)} idle: ${WHY[why] ?? why}`].filter(Boolean).join("; ") || "all generate"),
      h("td", { class: "figure" }, short(one.tokens_per_s)), h("td", { class: "figure" }, unread > 0 ? `${short(unread)} B` : "0"));
  }

  const others = (status) => [...status.scorers.map((one) => [one, "scores"]), ...status.agents.map((one) => [one, "runs agents"])].map(([one, does]) =>
    note(`${one.name} ${does}: ${number(one.leased)} of ${number(one.capacity)}`));

  function states(label, counts) {
    const known = STATES.filter((state) => counts[state]);
    const most = Math.max(1, ...known.map((state) => counts[state]));
    return known.length > 0 && h("dl", { class: "states" }, h("dt", { class: "head" }, label), h("dd"), known.map((state) => [h("dt", {}, state), h("dd", {}, h("i", { vars: { "--share": `${(90 * counts[state]) / most}%` } }), number(counts[state]))]));
  }

  const holders = (held) => held.length > 0 && h("div", { class: "scroll inner" }, h("table", { class: "rows" },
    h("thead", {}, h("tr", {}, ["Held by", "Groups", "Samples", "Longest", "For"].map((text, n) => h("th", { scope: "col", class: n ? "figure" : "" }, text)))),
    h("tbody", {}, held.slice(0, 8).map((one) => h("tr", {}, h("th", { scope: "row" }, one.with || "nobody yet"), [number(one.groups), number(one.samples), `${number(one.tokens)} tokens`, one.for_s ? duration(one.for_s) : "–"].map((text) => h("td", { class: "figure" }, text)))))));

  function group(one) {
    return h("div", { class: "group" }, h("b", {}, `Group ${one.group}`), note(` ${one.left} of ${one.samples} left`), h("ul", {}, one.waits_for.map((sample) =>
      h("li", {}, `.${sample.index} ${sample.state}${sample.with ? ` at ${sample.with}` : ""}, ${number(sample.tokens)} tokens${sample.for_s ? `, for ${duration(sample.for_s)}` : ""}${sample.attempts ? `, ${sample.attempts} attempts lost` : ""}`))));
  }
}
