// Elements, text and numbers. Every text of a run enters the page through `text`, which makes text nodes only.
"use strict";
const R = { pages: {} };

R.h = (tag, attributes, ...children) => {
  const [name, ...classes] = tag.split(".");
  const element = document.createElement(name || "div");
  if (classes.length) element.className = classes.join(" ");
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "style") for (const [property, set] of Object.entries(value)) element.style.setProperty(property, set);
    else if (key === "value" || key === "checked" || key === "selected") element[key] = value;
    else element.setAttribute(key, value === true ? "" : String(value));
  }
  R.add(element, children);
  return element;
};

R.add = (element, children) => {
  for (const child of [children].flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
};

R.fill = (element, ...children) => R.add((element.replaceChildren(), element), children);

// Characters that are invisible or change how others are drawn are shown by name: text must look like what it is.
R.hidden = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]|\udb40[\udc00-\udfff]/gu;

R.named = (text) => {
  const parts = [];
  let end = 0;
  for (const found of text.matchAll(R.hidden)) {
    if (found.index > end) parts.push(text.slice(end, found.index));
    const code = found[0].codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
    parts.push(R.h("span.hidden", { title: "a character that is not visible" }, `⟨U+${code}⟩`));
    end = found.index + found[0].length;
  }
  parts.push(text.slice(end));
  return parts;
};

// Nodes of a text; occurrences of `mark` are highlighted.
R.text = (value, mark) => {
  const text = value === null || value === undefined ? "" : String(value);
  if (!mark) return R.named(text);
  const parts = [];
  const [low, needle] = [text.toLowerCase(), mark.toLowerCase()];
  let at = 0;
  for (let next = low.indexOf(needle); next >= 0 && low.length === text.length; next = low.indexOf(needle, at)) {
    parts.push(R.named(text.slice(at, next)), R.h("mark", {}, R.named(text.slice(next, next + needle.length))));
    at = next + needle.length;
  }
  parts.push(R.named(text.slice(at)));
  return parts;
};

// A text of a run in its own box: `dir="auto"` and isolation keep right-to-left text from reordering what is around it.
R.MOST = 6000;
R.prose = (value, { mark = "", most = R.MOST, missing = 0, tag = "div.prose" } = {}) => {
  const text = value === null || value === undefined ? "" : String(value);
  const box = R.h(tag, { dir: "auto" });
  const more = missing ? R.h("p.faint", {}, `${R.count(missing)} more characters are not in this ${R.mode()}`) : null;
  const show = (all) => {
    const shown = all || text.length <= most ? text : text.slice(0, most);
    R.fill(box, R.text(shown, mark));
    if (shown.length < text.length)
      box.append(R.h("button.more", { type: "button", onclick: () => show(true) }, `Show all ${R.count(text.length)} characters`));
    else if (more) box.append(more);
    if (!text) box.append(R.h("span.faint", {}, "empty"));
  };
  show(false);
  return box;
};

R.mode = () => document.documentElement.dataset.mode;
R.count = (value) => Math.round(value).toLocaleString("en");
R.known = (value) => value !== null && value !== undefined && !Number.isNaN(value);
R.number = (value, digits = 3) => {
  if (!R.known(value)) return "–";
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 10000) return R.count(value);
  if (size < 0.001) return value.toExponential(1);
  return String(Number(value.toPrecision(Math.max(digits, String(Math.trunc(size)).length))));
};
R.signed = (value) => (R.known(value) ? (value > 0 ? "+" : "") + R.number(value).replace("-", "−") : "–");
R.percent = (value) => (R.known(value) ? `${(100 * value).toFixed(1)}%` : "–");
R.seconds = (value) => {
  if (!R.known(value)) return "–";
  if (value < 0.095) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 90) return `${R.number(value)} s`;
  const minutes = Math.round(value / 60);
  return minutes < 90 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
};
R.when = (seconds) => (R.known(seconds) ? new Date(seconds * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "medium" }) : "");
R.plural = (count, name) => `${R.count(count)} ${name}${count === 1 ? "" : "s"}`;

// A link to a page; only given parameters are in it.
R.link = (page, parameters) => {
  const given = Object.entries({ run: R.run ? R.run : null, ...parameters }).filter(([, value]) => R.known(value) && value !== "" && value !== false);
  const query = new URLSearchParams(given.map(([key, value]) => [key, String(value)]));
  return `#/${page}${given.length ? `?${query}` : ""}`;
};
R.a = (page, parameters, ...children) => R.h("a", { href: R.link(page, parameters) }, ...children);
