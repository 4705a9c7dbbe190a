// Helpers of all views: elements, requests, addresses and number formatting.

/** Create an element. Known properties are set, others become attributes; strings are inserted as text, never as HTML. */
export function h(name, properties = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(properties ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "class") element.className = value;
    else if (key === "vars") for (const [name, text] of Object.entries(value)) element.style.setProperty(name, text);
    else if (key in element && !key.startsWith("aria")) element[key] = value;
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function fill(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** As `fill`, but only if the content changes, so that scrolling and screen readers are not disturbed. */
export function renew(element, ...children) {
  const next = fill(element.cloneNode(false), ...children);
  if (!next.isEqualNode(element)) element.replaceChildren(...next.childNodes);
  return element;
}

/** The answers that a report carries, by path without query; the dashboard's page asks its server. */
const carried = JSON.parse(document.getElementById("answers")?.textContent ?? "null");
export const isReport = carried !== null;

export async function ask(path, signal) {
  if (isReport) return carried[path.split("?")[0]];
  const answer = await fetch(path, { signal, headers: { accept: "application/json" } });
  const content = await answer.json().catch(() => {
    throw signal?.aborted ? signal.reason : new Error(`the dashboard answered ${answer.status}, and not to the end`);
  });
  if (!answer.ok) throw new Error(content.error ?? `the dashboard answered ${answer.status}`);
  return content;
}

/** Run a view's background requests; leaving the view, which aborts them, is not an error. */
export const unlessLeft = (signal) => (error) => { if (!signal.aborted) throw error; };

export const apiOf = (run) => `api/runs/${encodeURIComponent(run)}`;

/** Parse an address `#/RUN/VIEW/REST?QUERY` to {run, view, rest, query}. */
export function readAddress() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?", 2);
  const [run = "", view = "", ...rest] = path.split("/").map(decodeURIComponent);
  return { run, view, rest, query: new URLSearchParams(query) };
}

export function addressOf(run, view = "run", rest = [], query = {}) {
  const path = [run, view, ...rest].map((part) => encodeURIComponent(part)).join("/");
  const asked = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== "" && value != null)).toString();
  return `#/${path}${asked ? `?${asked}` : ""}`;
}

/** Address of a sample; each fork of an agent's session, and its discarded part, has its own row. */
export const sampleAddress = (run, row) => addressOf(run, "samples", [row.step, row.group, row.index, ...(row.fork ? [row.fork] : [])], { discarded: row.discarded });
export const sampleOf = (run, [step, group, index, fork = 0], discarded) => `${apiOf(run)}/samples/${step}/${group}/${index}?${new URLSearchParams({ fork, discarded: discarded ?? "" })}`;
export const sampleName = (row) => `${row.group}.${row.index}${row.fork ? `/${row.fork}` : ""}`;
export const samplesOf = (count) => `${number(count)} ${count === 1 ? "sample" : "samples"}`;
/** Why a sample was discarded: it is in no batch, or its batch was skipped. */
export const why = ({ discarded, attempts, error }) => `${discarded.replaceAll("_", " ")}${attempts ? `, ${attempts} failed ${attempts === 1 ? "attempt" : "attempts"}` : ""}${error ? `: ${error}` : ""}`;
/** That a sample is held out, with the set if that has a name of its own, and the weights; empty for other samples. */
export const heldOut = ({ held_out: set, step }) => set && `held out${set === "heldout" ? "" : `, ${set}`}: weights ${step}`;
/** Characters up to which a reference answer is shown whole beside a reward. */
export const LABEL = 60;
/** The reference answer, cut if it is long; its whole text is shown when pointed at. */
export const reference = (label) => h("span", { class: "reference", title: label?.length > LABEL ? label.slice(0, 2000) : null }, label ? (label.length > LABEL ? `${label.slice(0, LABEL)}…` : label) : "–");
/** The pictures in a sample's prompt, in order. */
export const shownImages = (run, { images }) => images?.length > 0 && h("p", { class: "shown-images" }, images.map((name, n) => h("img", { src: `${apiOf(run)}/images/${name}`, alt: `Image ${n + 1} of the prompt`, title: name })));
export const groupAddress = (run, row) => addressOf(run, "samples", [row.step, row.group]);

/** Format a number with four significant digits and separated thousands; a dash if it is unknown. */
export function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size >= 10000) return Math.round(value).toLocaleString("en");
  if (size !== 0 && size < 0.0005) return value.toExponential(1);
  return Number(value.toPrecision(digits)).toLocaleString("en", { maximumFractionDigits: 6 });
}

export function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]])
    if (Math.abs(value) >= size) return `${(value / (size === 1e4 ? 1e3 : size)).toFixed(1)}${unit}`;
  return number(value, 3);
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${String(Math.round(seconds % 60)).padStart(2, "0")} s`;
  return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
}

/** Announce a message to screen readers, but not too often. */
export const problem = (text) => h("p", { class: "problem", role: "alert" }, text);
export const note = (text) => h("p", { class: "note" }, text);

/** A group of toggle buttons, one of which is pressed. */
export function choices(label, options, chosen, choose) {
  const group = h("div", { class: "choices", role: "group", "aria-label": label });
  for (const [value, text, title] of options)
    group.append(h("button", {
      type: "button", title, "aria-pressed": String(value === chosen),
      onclick: () => {
        for (const button of group.children) button.setAttribute("aria-pressed", String(button.textContent === text));
        choose(value);
      },
    }, text));
  return group;
}

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
