// A timeline of nodes on a canvas: dark is forward, light backward, framed is the critical path.
import { colour, h, ms } from "./dom.js";

const ROW = 18,
  LEFT = 150;

export class TimelineView {
  constructor(host) {
    this.canvas = h("canvas", { class: "grid timeline", tabindex: "0", role: "img" });
    this.filter = h("input", { type: "search", placeholder: "filter nodes", "aria-label": "Filter nodes" });
    this.filter.addEventListener("input", () => this.draw());
    this.about = h("p", { class: "note", role: "status" });
    this.from = 0;
    this.to = 1;
    host.append(
      h(
        "div",
        { class: "row" },
        h("button", { type: "button", onclick: () => this.zoom(0.5) }, "Zoom in"),
        h("button", { type: "button", onclick: () => this.zoom(2) }, "Zoom out"),
        this.filter,
        h("span", { class: "note" }, "arrow keys move, + and - zoom"),
      ),
      h("div", { class: "tall" }, this.canvas),
      this.about,
    );
    this.canvas.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -0.25, ArrowRight: 0.25 }[event.key],
        zoom = { "+": 0.5, "-": 2 }[event.key];
      if (move) this.move(move);
      if (zoom) this.zoom(zoom);
      if (move || zoom) event.preventDefault();
    });
    this.canvas.addEventListener("mousemove", (event) => this.point(event));
    this.seen = new ResizeObserver(() => this.draw());
    this.seen.observe(host);
  }

  show(found, longest) {
    this.found = found;
    this.longest = Math.max(longest, 1);
    this.draw();
  }

  // The rows whose labels fit the filter, in order.
  rows() {
    const word = this.filter.value.trim().toLowerCase();
    return [...this.found.labels.keys()].filter((row) => this.found.labels[row].toLowerCase().includes(word));
  }

  move(by) {
    const span = this.to - this.from,
      from = Math.min(Math.max(this.from + by * span, 0), 1 - span);
    [this.from, this.to] = [from, from + span];
    this.draw();
  }

  zoom(by) {
    const middle = (this.from + this.to) / 2,
      span = Math.min(Math.max((this.to - this.from) * by, 1 / 512), 1);
    this.from = Math.min(Math.max(middle - span / 2, 0), 1 - span);
    this.to = this.from + span;
    this.draw();
  }

  scale() {
    const width = this.canvas.parentElement.clientWidth,
      left = Math.min(LEFT, width / 3);
    const begin = this.from * this.longest,
      span = (this.to - this.from) * this.longest;
    return {
      width,
      left,
      x: (ns) => left + ((ns - begin) / span) * (width - left),
      ns: (x) => begin + ((x - left) / (width - left)) * span,
    };
  }

  draw() {
    if (!this.found) return;
    const { bars, kinds } = this.found,
      rows = this.rows(),
      labels = rows.map((row) => this.found.labels[row]),
      at = new Map(rows.map((row, n) => [row, n])),
      { width, left, x } = this.scale(),
      dense = devicePixelRatio;
    const height = labels.length * ROW + 20;
    this.canvas.width = width * dense;
    this.canvas.height = height * dense;
    this.canvas.style.height = `${height}px`;
    this.canvas.setAttribute("aria-label", `timeline of ${labels.length} nodes, ${ms(this.found.makespan_ns)} ms`);
    const pen = this.canvas.getContext("2d"),
      colours = this.found.modules.map((_, n) => colour(`c${n % 6}`));
    pen.scale(dense, dense);
    pen.font = "11px system-ui, sans-serif";
    pen.fillStyle = colour("bar");
    pen.save();
    pen.beginPath();
    pen.rect(left, 0, width - left, height);
    pen.clip();
    labels.forEach((_, row) => pen.fillRect(x(0), row * ROW + 1, x(this.found.makespan_ns) - x(0), ROW - 2));
    const frames = [];
    for (let n = 0; n < bars.row.length; n++) {
      const a = x(bars.start[n]),
        b = x(bars.end[n]);
      if (b < left || a > width) continue;
      if (!at.has(bars.row[n])) continue;
      const top = at.get(bars.row[n]) * ROW + 1,
        wide = Math.max(b - a - 0.5, 0.5);
      pen.globalAlpha = kinds[bars.kind[n]] === "backward" ? 0.55 : 1;
      pen.fillStyle = kinds[bars.kind[n]] === "interaction" ? colour("ink") : colours[bars.module[n]];
      pen.fillRect(a, top, wide, ROW - 2);
      if (bars.critical[n]) frames.push([a, top, wide]);
      const text = String(bars.microbatch[n]);
      if (wide > 7 * text.length + 4) {
        pen.globalAlpha = 1;
        pen.fillStyle = colour("card");
        pen.fillText(text, a + (wide - 6 * text.length) / 2, top + 12);
      }
    }
    pen.globalAlpha = 1;
    pen.strokeStyle = colour("ink");
    for (const [a, top, wide] of frames) pen.strokeRect(a + 0.5, top + 0.5, Math.max(wide - 1, 0.5), ROW - 3);
    pen.restore();
    pen.fillStyle = colour("soft");
    labels.forEach((label, row) => pen.fillText(label, 0, row * ROW + 13, left - 8));
    const ticks = width < 600 ? 2 : 4;
    for (let tick = 0; tick <= ticks; tick++) {
      const middle = left + ((width - left) * tick) / ticks,
        text = `${ms(this.scale().ns(middle))} ms`;
      pen.textAlign = tick === ticks ? "right" : tick ? "center" : "left";
      pen.fillText(text, middle, height - 5);
    }
    pen.textAlign = "left";
  }

  point(event) {
    if (!this.found) return;
    const { bars, kinds, labels, modules } = this.found,
      ns = this.scale().ns(event.offsetX),
      row = this.rows()[Math.floor(event.offsetY / ROW)];
    const n = bars.row.findIndex((r, i) => r === row && bars.start[i] <= ns && ns < bars.end[i]);
    this.about.textContent =
      n < 0
        ? (labels[row] ?? "")
        : `${labels[row]}: ${kinds[bars.kind[n]]} of ${modules[bars.module[n]]}, ` +
          `microbatch ${bars.microbatch[n]}, ${ms(bars.start[n])} to ${ms(bars.end[n])} ms` +
          (bars.critical[n] ? ", on the critical path" : "");
  }

  close() {
    this.seen.disconnect();
  }
}
