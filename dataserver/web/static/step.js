// One step: planned beside measured, what its time is spent on, and what other ways to run it would cost.
import { ask, bar, colour, h, key, ms, number, percent, section, table, worked } from "./dom.js";
import { TimelineView } from "./timeline.js";

const tile = (value, what) => h("div", {}, h("b", {}, value), h("span", {}, what));

export function stepPage(host, state, query) {
  let closed = false,
    step = Number(query.get("step") ?? 0) || 0,
    job = query.get("job") ?? "",
    jobs = [],
    asked = 0, // grows with every question: an answer to an older one is thrown away
    found = null,
    measured = null,
    which = "after";
  const field = h("input", { type: "search", inputmode: "numeric", class: "short", "aria-label": "Step", value: step });
  const picker = h("select", { "aria-label": "Job", hidden: true, onchange: choose });
  const turn = (by) => () => go(Math.max(step + by, found?.first_step ?? 0));
  const form = h(
    "form",
    {
      class: "row",
      onsubmit: (event) => {
        event.preventDefault();
        go(Number(field.value) || 0);
      },
    },
    picker,
    h("button", { type: "button", onclick: turn(-1) }, "Back"),
    field,
    h("button", { type: "button", onclick: turn(1) }, "Next"),
    h("span", { class: "note", role: "status" }),
  );
  const body = h("div");
  const view = new Map();
  let timeline = null;
  host.append(form, body);

  function go(to, of = job) {
    location.hash = `step?${new URLSearchParams({ step: to, ...(of ? { job: of } : {}) })}`;
  }

  const fields = () => ({ step, ...(job ? { job } : {}) });

  function choose() {
    const first = jobs.find((one) => one.job === picker.value)?.first_step ?? 0;
    go(first, picker.value);
  }

  // The jobs of a server; of a file there is one, and nothing to choose.
  async function list() {
    const answer = await ask("/api/jobs").catch(() => ({ jobs: [] })); // what is wrong is told of the step
    if (closed) return;
    jobs = answer.jobs;
    picker.hidden = !jobs.length;
    picker.replaceChildren(
      ...jobs.map((one) =>
        h("option", { value: one.job }, `${one.job.slice(0, 12)}, ${one.layout}, ${one.datasets.join(" + ")}`),
      ),
    );
    picker.value = job || found?.job || jobs[0]?.job || "";
  }

  async function start() {
    const mine = ++asked;
    const over = () => closed || mine !== asked;
    timeline?.close();
    timeline = null;
    measured = null;
    which = "after";
    field.value = step;
    found = null;
    form.lastChild.textContent = "";
    const answer = await worked("/api/step", fields(), body, over);
    if (!answer) return;
    if (answer.step !== step) {
      go(answer.step); // the job begins with a later one
      return;
    }
    found = answer;
    job ||= found.job; // all that is asked from here on is of this one, whatever jobs come and go
    if (!picker.hidden) picker.value = found.job;
    const ids = `job ${found.job.slice(0, 12)}, plan ${found.plan.slice(0, 12)}`;
    form.lastChild.textContent = `of ${number(found.num_steps)}; ${ids}, ${found.layout}`;
    build();
    const times = await worked("/api/step/measured", fields(), view.get("measured"), over);
    if (!times) return;
    measured = times;
    showMeasured();
    showTimeline();
  }

  function build() {
    for (const name of ["tabs", "timeline", "measured", "policies"]) view.set(name, h("div"));
    const gain = found.before.makespan_ns / Math.max(found.after.makespan_ns, 1);
    const compare = h("button", { type: "button", onclick: showPolicies }, "Compare");
    view
      .get("policies")
      .append(h("p", { class: "note" }, "Plans this step again in every other way; it may take a minute."), compare);
    body.replaceChildren(
      h(
        "section",
        { class: "tiles" },
        tile(`${ms(found.after.makespan_ns)} ms`, "planned"),
        tile(`${ms(found.before.makespan_ns)} ms`, "baseline, canonical order"),
        tile(`${gain.toFixed(2)} x`, "faster than the baseline"),
        tile(found.bound_ns ? percent(found.after.makespan_ns / found.bound_ns - 1, 1) : "-", "above the lower bound"),
        tile(percent(found.after.bubble, 1), "bubble"),
        tile(number(found.samples), `samples, ${number(found.images)} images, ${number(found.tokens)} tokens`),
      ),
      section(
        "Timeline",
        "as simulated; framed is the critical path",
        view.get("tabs"),
        key(found.after.modules),
        view.get("timeline"),
      ),
      h(
        "div",
        { class: "columns" },
        section("What the step's time is spent on", "the critical path, by node", costs()),
        section("Longest on the critical path", "with the largest sample of each", operations()),
        section("From the baseline to the plan", "one change at a time", ablation()),
        section("Loads of the ranks", "forward time; light is the baseline", loads()),
      ),
      section("Measured", "as trainers reported it", view.get("measured")),
      section("Other ways to run it", null, view.get("policies")),
      h(
        "div",
        { class: "columns" },
        section(
          "Plans compared",
          null,
          table(
            [
              { title: "plan", kind: "text", cell: (c) => c.name },
              { title: "ms", num: true, cell: (c) => ms(c.step_ns) },
            ],
            found.candidates,
            "the policies leave no choice",
          ),
        ),
        section(
          "Decisions",
          null,
          table(
            [
              { title: "about", kind: "name", cell: (d) => d.subject },
              { title: "chosen", kind: "text", cell: (d) => d.chosen },
              { title: "why", kind: "text", cell: (d) => d.reason },
            ],
            found.decisions,
            "none",
          ),
        ),
      ),
    );
    timeline = new TimelineView(view.get("timeline"));
    showTimeline();
    drawLoads();
  }

  function showTimeline() {
    const all = { before: found.before, after: found.after, measured: measured?.timeline };
    const longest = Math.max(
      ...Object.values(all)
        .filter(Boolean)
        .map((one) => one.makespan_ns),
    );
    const part =
      measured && measured.replaced < measured.expected
        ? ` (${number(measured.replaced)} of ${number(measured.expected)} measured)`
        : "";
    const names = { before: "Baseline", after: "Planned", measured: "Measured passes" };
    view.get("tabs").replaceChildren(
      h(
        "div",
        { class: "row" },
        Object.entries(names)
          .filter(([name]) => all[name])
          .map(([name, title]) =>
            h(
              "button",
              {
                type: "button",
                "aria-pressed": String(name === which),
                onclick: () => {
                  which = name;
                  showTimeline();
                },
              },
              `${title}: ${ms(all[name].makespan_ns)} ms${name === "measured" ? part : ""}`,
            ),
          ),
      ),
    );
    timeline.show(all[which], longest);
    const hidden = all[which].nodes - all[which].labels.length;
    timeline.about.textContent = hidden > 0 ? `${number(hidden)} more nodes are not drawn` : "";
  }

  function costs() {
    const whole = Math.max(found.after.makespan_ns, 1);
    const modules = Object.entries(found.after.critical_ns)
      .map(([name, ns]) => `${name} ${percent(ns / whole)}`)
      .join(", ");
    return h(
      "div",
      {},
      table(
        [
          { title: "node", kind: "name", cell: (c) => c.node },
          { title: "ms", num: true, cell: (c) => ms(c.ns) },
          { title: "", cell: (c) => bar([["k0", c.ns / whole, percent(c.ns / whole)]]) },
          { title: "of the step", num: true, cell: (c) => percent(c.ns / whole) },
        ],
        found.costly_nodes,
      ),
      h("p", { class: "note" }, modules),
    );
  }

  function operations() {
    const sample = (o) =>
      o.sample
        ? h(
            "a",
            { href: `#dataset?${new URLSearchParams({ dataset: o.sample.dataset, key: o.sample.key })}` },
            o.sample.key || "unknown",
          )
        : "-";
    return table(
      [
        { title: "node", kind: "name", cell: (o) => o.node },
        { title: "pass", kind: "name", cell: (o) => `${o.kind} ${o.microbatch}` },
        { title: "ms", num: true, cell: (o) => ms(o.ns) },
        { title: "largest sample", kind: "text", cell: sample },
        { title: "size", num: true, cell: (o) => (o.sample ? `${number(o.sample.size)} ${o.sample.unit}` : "") },
        { title: "share", num: true, cell: (o) => (o.sample ? percent(o.sample.share) : "") },
      ],
      found.costly_operations,
    );
  }

  function ablation() {
    const most = Math.max(...found.ablation.map((row) => row.step_ns ?? 0), 1);
    return table(
      [
        { title: "", kind: "text", cell: (row) => row.name },
        { title: "ms", num: true, cell: (row) => ms(row.step_ns) },
        { title: "", cell: (row) => (row.step_ns === null ? "cannot be planned" : bar([["k0", row.step_ns / most]])) },
        { title: "of the one before", num: true, cell: (row) => row.of_before?.toFixed(3) ?? "-" },
        { title: "of the first", num: true, cell: (row) => row.of_first?.toFixed(3) ?? "-" },
      ],
      found.ablation,
    );
  }

  function loads() {
    return h(
      "div",
      {},
      found.loads.map((load, n) =>
        h(
          "div",
          {},
          h(
            "p",
            { class: "note" },
            `${load.module}, ${number(load.ranks)} ranks: largest / mean ${load.imbalance_before.toFixed(3)}, `,
            `planned ${load.imbalance_after.toFixed(3)}`,
          ),
          h("canvas", { class: "grid loads", "data-load": n, role: "img", "aria-label": `loads of ${load.module}` }),
        ),
      ),
    );
  }

  function drawLoads() {
    for (const canvas of body.querySelectorAll("canvas.loads")) {
      const load = found.loads[Number(canvas.dataset.load)],
        width = canvas.parentElement.clientWidth,
        height = 70,
        dense = devicePixelRatio;
      canvas.width = width * dense;
      canvas.height = height * dense;
      canvas.style.height = `${height}px`;
      const pen = canvas.getContext("2d"),
        most = Math.max(...load.before, ...load.after, 1),
        wide = width / load.after.length;
      pen.scale(dense, dense);
      load.after.forEach((after, rank) => {
        const gap = wide > 4 ? 2 : 0,
          tall = (ns) => (ns / most) * height;
        pen.fillStyle = colour("bar");
        pen.fillRect(rank * wide, height - tall(load.before[rank]), wide - gap, tall(load.before[rank]));
        pen.fillStyle = colour(`c${Number(canvas.dataset.load) % 6}`);
        pen.fillRect(rank * wide + wide / 5, height - tall(after), wide * 0.6 - gap / 2, tall(after));
      });
    }
  }

  function showMeasured() {
    const slow = [...measured.rows].sort((a, b) => b.wait_ns - a.wait_ns || b.computed_ns - a.computed_ns).slice(0, 50);
    const left = measured.left_out ? `; ${number(measured.left_out)} reports fit no rank of the job` : "";
    const replaced = measured.timeline
      ? `The timeline has measured passes of ${number(measured.replaced)} of ${number(measured.expected)}.`
      : measured.rows.length
        ? "Their passes cannot stand in the timeline: several chunks, or modules, share the reported times."
        : "";
    view.get("measured").replaceChildren(
      table(
        [
          { title: "module", kind: "name", cell: (r) => r.module },
          { title: "rank", num: true, cell: (r) => number(r.rank) },
          { title: "stage", num: true, cell: (r) => number(r.stage) },
          {
            title: "waited for data, ms",
            num: true,
            cell: (r) => h("span", { class: r.wait_ns > 0.05 * r.step_ns ? "warn" : "" }, ms(r.wait_ns)),
          },
          { title: "of the step", num: true, cell: (r) => (r.step_ns ? percent(r.wait_ns / r.step_ns, 1) : "-") },
          { title: "computed, ms", num: true, cell: (r) => ms(r.computed_ns) },
          { title: "planned, ms", num: true, cell: (r) => ms(r.planned_ns) },
          { title: "step, ms", num: true, cell: (r) => ms(r.step_ns) },
        ],
        slow,
        `no server ${measured.silent.length ? "that answers " : ""}has reports of this step`,
      ),
      h("p", { class: "note" }, `${number(measured.rows.length)} ranks and stages reported${left}. ${replaced}`),
      ...measured.silent.slice(0, 8).map((one) => h("p", { class: "bad" }, `${one.server}: ${one.why}`)),
      measured.silent.length > 8 ? h("p", { class: "bad" }, `and ${number(measured.silent.length - 8)} more`) : "",
    );
  }

  async function showPolicies() {
    const mine = asked,
      target = view.get("policies");
    const rows = await worked("/api/step/policies", fields(), target, () => closed || mine !== asked);
    if (!rows) return;
    rows.sort((a, b) => (a.step_ns ?? Infinity) - (b.step_ns ?? Infinity));
    target.replaceChildren(
      table(
        [
          { title: "what varies", kind: "text", cell: (r) => r.heading },
          { title: "choice", kind: "text", cell: (r) => (r.own ? `${r.name} (this job)` : r.name) },
          { title: "ms", num: true, cell: (r) => ms(r.step_ns) },
          { title: "of this job", num: true, cell: (r) => r.of_own?.toFixed(3) ?? "-" },
          { title: "bubble", num: true, cell: (r) => percent(r.bubble, 1) },
          {
            title: "",
            kind: "text",
            cell: (r) => r.refusal || h("code", {}, Object.keys(r.changes).length ? JSON.stringify(r.changes) : ""),
          },
        ],
        rows,
      ),
    );
  }

  list();
  start();
  return {
    close() {
      closed = true;
      timeline?.close();
    },
    moved(to) {
      step = Number(to.get("step") ?? step) || 0;
      job = to.get("job") ?? "";
      list();
      start();
    },
    theme() {
      timeline?.draw();
      if (found) drawLoads();
    },
  };
}
