// Group view: all samples of a group side by side.

import { addressOf, apiOf, ask, fill, h, heldOut, number, reference, sampleAddress, sampleName, samplesOf, shownImages, why } from "./lib.js";

export async function groupView(place, { run, address, signal }) {
  const [step, group] = address.rest;
  const samples = await ask(`${apiOf(run.name)}/groups/${step}/${group}`, signal);
  fill(place,
    h("p", { class: "path" }, h("a", { href: addressOf(run.name, "samples") }, "Samples"), " › ", h("a", { href: addressOf(run.name, "samples", [], { "step.min": step, "step.max": step }) }, `step ${step}`)),
    h("h1", {}, `Group ${group}`),
    h("p", { class: "note" }, `${samplesOf(samples.length)} of one prompt, rewards ${rewards(samples)}.`, heldOut(samples[0]) && ` ${heldOut(samples[0])}.`),
    h("section", { class: "speech prompt" }, h("h2", {}, "Prompt"), shownImages(run.name, samples[0]), h("pre", { dir: "auto", tabindex: 0 }, samples[0].prompt)),
    h("div", { class: "beside" }, samples.map((sample) => card(run, sample))));
}

export function card(run, sample, heading = sampleName(sample)) {
  const versions = [...new Set((sample.segments ?? []).map((segment) => segment.step))];
  return h("article", { class: "card" },
    h("h2", {}, h("a", { href: sampleAddress(run.name, sample) }, heading)),
    h("p", { class: "note" }, `reward ${number(sample.reward, 3)} · `, "reference ", reference(sample.label), ` · ${heldOut(sample) || `advantage ${number(sample.advantage, 3)}${sample.trained ? "" : " (no gradient)"}`} · ${number(sample.tokens)} tokens · version ${versions.join(", ")} · ${sample.finish_reason ?? ""}`),
    sample.discarded && h("p", { class: "chip failed" }, why(sample)),
    h("pre", { dir: "auto", tabindex: 0 }, sample.response));
}

function rewards(samples) {
  const known = samples.map(({ reward }) => reward).filter((reward) => reward !== null);
  if (known.length === 0) return "not known";
  const [low, high] = [Math.min(...known), Math.max(...known)];
  return low === high ? `all ${number(low, 3)}: without spread` : `${number(low, 3)} to ${number(high, 3)}`;
}
