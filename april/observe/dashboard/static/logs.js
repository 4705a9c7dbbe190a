// Logs view: the end of each log of the run, and its configuration.

import { addressOf, apiOf, ask, fill, h, note, number } from "./lib.js";

const CONFIG = "config.toml";

export async function logsView(place, { run, address, signal, follow }) {
  const { files } = await ask(`${apiOf(run.name)}/logs`, signal);
  const names = [...files, CONFIG];
  const chosen = names.includes(address.query.get("file")) ? address.query.get("file") : names[0];
  const said = h("p", { class: "note" }), text = h("pre", { class: "log", dir: "auto", tabindex: 0, role: "region", "aria-label": chosen });
  fill(place, h("h1", { class: "hidden" }, `Logs of ${run.name}`),
    h("nav", { class: "tools", "aria-label": "Logs" }, names.map((name) => h("a", { class: "button", href: addressOf(run.name, "logs", [], { file: name }), "aria-current": name === chosen ? "page" : undefined }, name))),
    said, text);

  async function load() {
    if (chosen === CONFIG) return fill(text, (await ask(apiOf(run.name), signal)).config);
    const log = await ask(`${apiOf(run.name)}/logs?file=${encodeURIComponent(chosen)}`, signal);
    const isAtEnd = text.scrollTop + text.clientHeight >= text.scrollHeight - 4;
    fill(said, log.left_out ? `${number(log.left_out)} bytes before these lines are left out; the whole log is in the run folder, logs/${chosen}.` : "");
    fill(text, log.text || note("Nothing has been written to it."));
    if (isAtEnd) text.scrollTop = text.scrollHeight;
  }

  await load();
  text.scrollTop = text.scrollHeight;
  follow((topic) => topic === "news" && chosen !== CONFIG && load());
}
