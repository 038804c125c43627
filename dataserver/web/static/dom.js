// Elements, numbers and tables. Whatever comes from a server or a dataset becomes text, never markup.

const LONG = 14; // rows; longer tables scroll within themselves

export function h(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "width")
      node.style.width = value; // by the object model: the policy forbids style attributes
    else if (value !== undefined && value !== null && value !== false)
      node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

export function section(title, note, ...children) {
  return h("section", {}, h("h2", {}, title, note ? " " : null, note ? h("small", {}, note) : null), ...children);
}

// Columns: {title, cell: row -> text or node, num, kind, about}.
export function table(columns, rows, none = "none") {
  if (!rows.length) return h("p", { class: "note" }, none);
  const kind = (column) => (column.num ? "num" : (column.kind ?? ""));
  const head = columns.map((c) => h("th", { class: kind(c), title: c.about }, c.title));
  const body = rows.map((row) =>
    h(
      "tr",
      {},
      columns.map((c) => h("td", { class: kind(c) }, c.cell(row))),
    ),
  );
  return h(
    "div",
    { class: rows.length > LONG ? "wide scroll" : "wide", tabindex: rows.length > LONG ? "0" : null },
    h("table", {}, h("thead", {}, h("tr", {}, head)), h("tbody", {}, body)),
  );
}

// A bar of parts that add up to 1: [[class, share, title], ...].
export function bar(parts) {
  const bits = parts.map(([kind, share, title]) =>
    h("i", { class: kind, title, width: `${Math.min(share, 1) * 100}%` }),
  );
  return h("div", { class: "bar" }, bits);
}

// Puts new content into an element whose table stays scrolled to where it was, and focused if it was.
export function swap(host, ...nodes) {
  const before = host.querySelector(".wide");
  const [top, left, focused] = [before?.scrollTop ?? 0, before?.scrollLeft ?? 0, document.activeElement === before];
  host.replaceChildren(...nodes);
  const after = host.querySelector(".wide");
  if (!after) return;
  after.scrollTop = top;
  after.scrollLeft = left;
  if (before && focused) after.focus({ preventScroll: true });
}

export function key(names) {
  return h(
    "div",
    { class: "key" },
    names.map((name, n) => h("span", {}, h("i", { class: `k${n % 6}` }), name)),
  );
}

export function number(value, digits = 0) {
  if (value === null || value === undefined) return "-";
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

export function percent(share, digits = 0) {
  return share === null || share === undefined ? "-" : `${(100 * share).toFixed(digits)} %`;
}

export function bytes(value) {
  if (value === null || value === undefined) return "-";
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let n = 0;
  for (; value >= 1024 && n < units.length - 1; n++) value /= 1024;
  return `${n && value < 100 ? value.toFixed(1) : Math.round(value)} ${units[n]}`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "-";
  if (value < 120) return `${value.toFixed(value < 10 ? 1 : 0)} s`;
  return value < 7200 ? `${Math.round(value / 60)} min` : `${Math.round(value / 3600)} h`;
}

export function ms(ns) {
  return ns === null || ns === undefined ? "-" : number(ns / 1e6, 1);
}

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

const refusal = (message, passes) => Object.assign(new Error(message), { passes });

// JSON of this server; an error says what the server said.
export async function ask(path, fields = {}, signal = undefined) {
  const query = new URLSearchParams(fields).toString();
  let answer;
  try {
    answer = await fetch(query ? `${path}?${query}` : path, { signal: signal ?? AbortSignal.timeout(20000) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    const late = error.name === "TimeoutError";
    throw refusal(late ? "the web server does not answer" : "the web server cannot be reached", late);
  }
  const found = await answer.json().catch(() => ({ error: `the web server answered ${answer.status}` }));
  if (!answer.ok) throw refusal(found.error ?? `the web server answered ${answer.status}`, answer.status === 503);
  return found;
}

// What is worked out in the background: asks until it is found, and shows in `host` how far it is; null where it fails.
// What may pass, a server that is busy or late, ends it only where it happens several times in a row.
export async function worked(path, fields, host, closed) {
  for (let failures = 0; ; ) {
    let answer;
    try {
      answer = await ask(path, fields);
      failures = 0;
    } catch (error) {
      failures++;
      answer = error.passes && failures < 10 ? { passing: error.message } : { error: error.message };
    }
    if (closed()) return null;
    if (answer.found !== undefined) return answer.found;
    if (answer.error) {
      host.replaceChildren(h("p", { class: "bad" }, answer.error));
      return null;
    }
    const { done, of, begun } = answer.working ?? {};
    const far = of ? `working: ${number(done)} of ${number(of)}` : begun ? "working" : "waiting for its turn";
    host.replaceChildren(h("p", { class: "note", role: "status" }, answer.passing ?? far));
    await new Promise((resolve) => setTimeout(resolve, answer.passing ? 2000 : 700));
  }
}
