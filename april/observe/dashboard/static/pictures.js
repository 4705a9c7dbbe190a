// The curves of the run view: what is drawn, and how to read it.

import { number, short } from "./lib.js";

const OLDEST_AGE = 6;
const MOST_DETAILS = 6;
const AGES = Array.from({ length: OLDEST_AGE + 1 }, (_, age) => ({ column: `staleness.tokens_by_age.${age}`, label: `age ${age}${age === OLDEST_AGE ? " or more" : ""}`, colour: `--age-${age}` }));
const PHASES = [
  ["wait_s", "waits for a batch", "--rule"], ["prepare_s", "prepares", "--age-0"], ["forward_s", "forward", "--age-2"], ["backward_s", "backward", "--age-4"],
  ["optimizer_s", "optimizer", "--line-1"], ["metrics_s", "metrics", "--muted"], ["gather_s", "gathers weights", "--line-2"], ["canary_s", "scores the canary", "--line-4"],
  ["publish_wait_s", "waits for the last weights to be sent", "--wait-weights"], ["checkpoint_s", "checkpoint", "--bad"],
].map(([name, label, colour]) => ({ column: `learner.${name}`, label, colour }));
/** An external trainer may report only how long a step took. */
const TRAINS = { column: "learner.train_s", label: "trains", colour: "--age-3" };
const percent = (share) => `${number(100 * share, 2)} %`;

/**
 * {title, unit, why, hint, from, write, optional, stack, axis, series: [{column, label, colour}] or (run) => [...], columns}
 * A series may have its own `data` [x, y] instead of a column. `columns`: those that `series` reads, if it is a function.
 */
export const CHARTS = [
  { title: "Reward", series: rewards, columns: ["reward"], why: "The mean reward of each trained batch, and the accuracy on held-out prompts, or their mean reward where it is not known which responses were correct. Both should rise, and rise together." },
  { title: "What the reward is made of", optional: true, series: details, columns: ["reward_details.*"], why: "Means of the details that the reward has named. One that rises while another falls shows what the policy has found out." },
  { title: "Gradient", unit: "share of the batch", from: 0, write: percent, series: [{ column: "gradient.tokens", label: "tokens" }, { column: "gradient.groups", label: "groups" }], why: "What bore a gradient. A group whose rewards are all equal bears none: near 0 the prompts are too easy or too hard, or the reward does not tell responses apart." },
  { title: "Entropy", unit: "nats", series: [{ column: "learner.entropy", label: "entropy" }], why: "Entropy that falls towards 0 ends exploration." },
  { title: "Loss", series: [{ column: "learner.loss", label: "loss" }], why: "Of each step's batch." },
  { title: "Gradient norm", series: [{ column: "learner.grad_norm", label: "norm" }], why: "A norm that jumps, with a loss that does, announces steps that are too large." },
  { title: "Learning rate", series: [{ column: "learner.lr", label: "rate" }], why: "As the schedule has set it." },
  { title: "Rollout speed", unit: "tokens/s", from: 0, series: [{ column: "rollout_tokens_per_s", label: "tokens/s" }], why: "Acknowledged tokens divided by the time in which generation was under way. A fall without longer responses points at waiting or lost workers." },
  { title: "Trained tokens by age", unit: "tokens", from: 0, stack: true, series: AGES, why: "How many policy steps old the tokens of each step were." },
  { title: "Age of trained tokens", unit: "policy steps", from: 0, series: [{ column: "staleness.mean", label: "mean of tokens" }, { column: "staleness.max", label: "oldest" }], why: "Mostly old tokens: too many groups are started." },
  { title: "Effective sample size", unit: "share", from: 0, series: [{ column: "learner.sequence_ess", label: "responses" }, { column: "learner.ess", label: "tokens" }, { column: "learner.weight_ess", label: "weights" }], why: "What the corrections of stale tokens leave of a batch. A share that falls announces trouble before the reward does." },
  { title: "Corrections of stale tokens", unit: "share of tokens", from: 0, write: percent, series: [{ column: "learner.off_policy_share", label: "off-policy" }, { column: "learner.clip_fraction", label: "clipped" }, { column: "learner.truncated_fraction", label: "weight capped" }, { column: "learner.mask_fraction", label: "masked" }], why: "Tokens that were clipped or masked have moved the weights little or not at all." },
  { title: "Learner − engine gap", unit: "nats, k3", series: [{ column: "learner.k3", label: "k3" }], hint: "The learner says nothing of the gap.", why: "How far the learner's log-probabilities are from the engine's." },
  { title: "Response lengths", unit: "samples in ¼ doubling, by tokens", from: 0, write: percent, axis: { write: (power) => short(2 ** power), incrs: [1, 2, 3] }, series: lengths, columns: [], why: "Filled: all samples of settled cohorts as they were created; outlined: the trained ones. Where the outline leaves the filled shape, training sees other lengths than the policy produces." },
  { title: "Lengths by step", unit: "tokens", from: 0, series: [{ column: "lengths.trained.mean", label: "mean" }, { column: "lengths.trained.p95", label: "p95" }, { column: "lengths.trained.p50", label: "median" }], why: "Growth is often what is learnt. Growth towards sampling.max_response_tokens with a falling reward is not." },
  { title: "Truncated responses", unit: "share of responses", from: 0, write: percent, series: [{ column: "lengths.truncated_share", label: "truncated" }], why: "Responses that ended at sampling.max_response_tokens. Where these have no answer, their reward says nothing of how the policy reasons." },
  { title: "Learner's time", unit: "seconds a step", from: 0, stack: true, series: phases, columns: [...PHASES, TRAINS].map(({ column }) => column), why: "A learner that mostly waits for batches wants more workers; one that never does keeps them waiting." },
  { title: "Tokens under way", unit: "ledger", from: 0, series: [{ column: "tokens_ledger.open", label: "open" }, { column: "tokens_ledger.ready", label: "ready" }, { column: "tokens_ledger.delivered", label: "delivered" }], why: "Generated, and not yet trained." },
];
export const COLUMNS = ["time", "samples", ...new Set(CHARTS.flatMap(({ series, columns }) => columns ?? series.map(({ column }) => column)))];

function rewards({ heldOut }) {
  return [{ column: "reward", label: "trained" }, ...heldOut.map(({ label, x, y }, n) => ({ label, data: [x, y], points: true, colour: `--line-${2 + (n % 5)}` }))];
}

/** Of many details those that vary most. */
function details({ table }) {
  const spread = (column) => {
    const known = table[column].filter((value) => value !== null), mean = known.reduce((sum, value) => sum + value, 0) / known.length;
    return known.reduce((sum, value) => sum + (value - mean) ** 2, 0) / known.length || 0;
  };
  const names = Object.keys(table).filter((name) => name.startsWith("reward_details.") && table[name]);
  const chosen = names.sort((one, other) => spread(other) - spread(one)).slice(0, MOST_DETAILS).sort();
  return chosen.map((column) => ({ column, label: column.slice("reward_details.".length) }));
}

function phases({ table }) {
  return PHASES.some(({ column }) => table[column]?.some((value) => value !== null)) ? PHASES : [TRAINS];
}

function lengths({ lengths: { created, trained } }) {
  const said = (label, { mean }) => (mean === null ? label : `${label}, mean ${short(mean)} tokens`);
  return [
    created && { label: said("created", created), data: [created.edges, created.shares], colour: "--muted", steps: "filled" },
    trained && { label: said("trained", trained), data: [trained.edges, trained.shares], colour: "--line-1", steps: "outlined" },
  ].filter(Boolean);
}
