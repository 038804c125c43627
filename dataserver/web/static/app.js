// Which page is shown, and in which theme. A page is a function from its element to {update, close, theme}.
import { h } from "./dom.js";
import { datasetPage } from "./dataset.js";
import { fleetPage } from "./fleet.js";
import { stepPage } from "./step.js";

const PAGES = { fleet: ["Fleet", fleetPage], dataset: ["Dataset", datasetPage], step: ["Step", stepPage] };
const dark = matchMedia("(prefers-color-scheme: dark)");
let shown = null;

function theme() {
  return localStorage.getItem("theme") ?? (dark.matches ? "dark" : "light");
}

function paint() {
  document.documentElement.dataset.theme = theme();
  document.getElementById("theme").textContent = theme() === "dark" ? "Light" : "Dark";
  shown?.page.theme?.();
}

// The other theme; chosen once more, it is again the system's.
function nextTheme() {
  if (localStorage.getItem("theme")) localStorage.removeItem("theme");
  else localStorage.setItem("theme", theme() === "dark" ? "light" : "dark");
  paint();
}

export function state(text, bad = false) {
  const node = document.getElementById("state");
  node.textContent = text;
  node.className = bad ? "bad" : "";
}

function open() {
  const [name, query] = location.hash.slice(1).split("?", 2);
  const wanted = Object.hasOwn(PAGES, name) ? name : "fleet";
  if (shown?.name === wanted) {
    shown.page.moved?.(new URLSearchParams(query ?? ""));
    return;
  }
  shown?.page.close();
  document
    .getElementById("pages")
    .replaceChildren(
      ...Object.entries(PAGES).map(([key, [title]], n) =>
        h("a", { href: `#${key}`, "aria-current": key === wanted ? "page" : null, title: `key: ${n + 1}` }, title),
      ),
    );
  document.title = `${PAGES[wanted][0]} - DistTrain`;
  state("");
  const host = document.getElementById("page");
  host.replaceChildren();
  shown = { name: wanted, page: PAGES[wanted][1](host, state, new URLSearchParams(query ?? "")) };
}

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) return;
  const name = Object.keys(PAGES)[Number(event.key) - 1];
  if (name) location.hash = name;
  else if (event.key === "t") nextTheme();
  else if (event.key === "/") {
    event.preventDefault();
    document.querySelector("main input")?.focus();
  }
});
document.getElementById("theme").addEventListener("click", nextTheme);
dark.addEventListener("change", paint);
addEventListener("hashchange", open);
paint();
open();
