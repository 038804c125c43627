// The fleet: what it does now, what limits it, and who is behind.
import { ask, bar, bytes, colour, h, key, number, percent, seconds, section, swap, table } from "./dom.js";
import { Chart } from "./chart.js";

const STAGES = ["planning", "decoding", "consumer"];
const SHOWN = 50;

const tile = (value, what, kind = "") => h("div", {}, h("b", { class: kind }, value), h("span", {}, what));

export function fleetPage(host, state) {
  const at = (name) => parts[name];
  const parts = {
    tiles: h("section", { class: "tiles" }),
    servers: h("div"),
    ranks: h("div"),
    list: h("div"),
    caches: h("div"),
    failures: h("div"),
    failed: h("div"),
    checks: h("div"),
    images: h("div"),
    waits: h("div"),
    grid: h("canvas", { class: "grid", role: "img" }),
    about: h("p", { class: "note" }),
  };
  const filter = h("input", {
    type: "search",
    placeholder: "module, rank, job or server",
    "aria-label": "Filter ranks",
  });
  filter.addEventListener("input", () => newest && showRanks(newest));
  host.append(
    at("tiles"),
    h(
      "div",
      { class: "columns" },
      section("Throughput", "of all servers", at("images")),
      section("What streams wait for", "streams waiting at a time; consumer is the trainer", at("waits")),
    ),
    section("Servers", null, at("servers")),
    section(
      "Ranks",
      "those furthest behind first",
      h("div", { class: "row" }, filter),
      at("grid"),
      at("about"),
      at("list"),
    ),
    h(
      "div",
      { class: "columns" },
      section("Failures", "since each server began", at("failures")),
      section("Caches", null, at("caches")),
    ),
    section("Failed samples and shards", "as servers remember them, the newest first", at("failed")),
    section("Checks", "what dataserver doctor says", at("checks")),
  );
  const charts = [
    new Chart(at("images"), [{ label: "images/s", colour: "c0", value: (v) => number(v, v < 10 ? 1 : 0) }]),
    new Chart(
      at("waits"),
      STAGES.map((label, n) => ({ label, colour: `c${n}`, value: (v) => number(v, 1) })),
    ),
  ];
  let newest = null,
    timer = null,
    closed = false;

  function showTiles(found) {
    const up = found.servers.filter((server) => !server.problem);
    const sum = (name) => {
      const values = up.map((server) => server[name]).filter((value) => value !== null && value !== undefined);
      return values.length ? values.reduce((total, value) => total + value, 0) : null;
    };
    const silent = found.servers.length - up.length;
    const verdict = found.verdict;
    const limit = !verdict
      ? ["-", "no stream waits"]
      : [verdict.stage === "consumer" ? "trainers" : verdict.stage, `limits: ${percent(verdict.share)} of all waiting`];
    at("tiles").replaceChildren(
      tile(`${up.length} / ${found.servers.length}`, "servers answer", silent ? "bad" : ""),
      tile(number(sum("images_s")), "images/s"),
      tile(number(sum("megabytes_s"), 1), "MB/s"),
      tile(number(sum("streams")), "streams"),
      tile(...limit),
      tile(
        `${number(sum("cores"))} / ${number(sum("wanted_cores"), 1)}`,
        found.cores || "cores: available / wanted",
        sum("wanted_cores") > sum("cores") ? "warn" : "",
      ),
    );
  }

  function showServers(found) {
    const rows = [...found.servers].sort((a, b) => Boolean(b.problem) - Boolean(a.problem));
    const of = (make) => (server) => (server.problem ? "" : make(server));
    const waits = (server) => {
      const total = STAGES.reduce((sum, stage) => sum + server.waits[stage], 0);
      return total > 0
        ? bar(
            STAGES.map((stage, n) => {
              const share = server.waits[stage] / total;
              return [`k${n}`, share, `${stage} ${percent(share)}`];
            }),
          )
        : "-";
    };
    const count = (name) => of((s) => h("span", { class: s[name] ? "warn" : "" }, number(s[name])));
    swap(
      at("servers"),
      table(
        [
          { title: "server", kind: "name", cell: (s) => s.address },
          { title: "waits for", cell: (s) => (s.problem ? h("span", { class: "bad" }, s.problem) : waits(s)) },
          { title: "images/s", num: true, cell: of((s) => number(s.images_s)) },
          { title: "MB/s", num: true, cell: of((s) => number(s.megabytes_s, 1)) },
          { title: "streams", num: true, cell: of((s) => number(s.streams)) },
          {
            title: "ready",
            num: true,
            about: "microbatches that wait for their ranks",
            cell: of((s) => number(s.ready)),
          },
          { title: "preparing", num: true, about: "microbatches in the making", cell: of((s) => number(s.preparing)) },
          {
            title: "ahead",
            num: true,
            about: "share of the memory for working ahead",
            cell: of((s) => (s.prefetch_limit ? percent(s.prefetch_used / s.prefetch_limit) : "-")),
          },
          { title: "memory", num: true, cell: of((s) => bytes(s.resident)) },
          { title: "cores", num: true, cell: of((s) => (s.cores ? number(s.cores) : "-")) },
          { title: "wanted", num: true, cell: of((s) => (s.cores ? number(s.wanted_cores, 1) : "-")) },
          { title: "invalid", num: true, about: "images, since the start", cell: count("invalid_images") },
          { title: "storage", num: true, about: "failed reads, since the start", cell: count("storage_errors") },
          { title: "up", num: true, cell: of((s) => seconds(s.uptime_s)) },
        ],
        rows,
        found.named ? "the servers are being asked" : "no server is named: dataserver web ADDRESS...",
      ),
      key(STAGES),
    );
  }

  function showRanks(found) {
    const ranks = found.ranks,
      word = filter.value.trim().toLowerCase();
    const all = [...ranks.rank.keys()];
    const name = (n) => `${ranks.job[n]} ${ranks.module[n]} ${ranks.rank[n]} ${ranks.server[n]}`.toLowerCase();
    const fitting = word ? all.filter((n) => name(n).includes(word)) : all;
    drawGrid(ranks, all);
    const lags = all.filter((n) => ranks.lag[n] > 0).length,
      starved = all.filter((n) => !ranks.ready[n]).length,
      waited = all.filter((n) => ranks.wait[n] !== null);
    const longest = Math.max(...waited.map((n) => ranks.wait[n]), 0);
    const facts = [
      `${number(found.num_ranks)} ranks, one square each by module and rank: ${number(lags)} behind the first of`,
      `their module, ${number(starved)} with nothing ready`,
    ];
    if (waited.length) facts.push(`; the longest wait for data was ${percent(longest, 1)} of the time`);
    if (fitting.length > SHOWN) facts.push(`; ${SHOWN} of ${number(fitting.length)} are listed`);
    at("about").textContent = found.num_ranks ? facts.join(" ").replaceAll(" ;", ";") : "";
    at("grid").hidden = !all.length;
    swap(
      at("list"),
      table(
        [
          { title: "module", kind: "name", cell: (n) => ranks.module[n] },
          { title: "rank", num: true, cell: (n) => number(ranks.rank[n]) },
          { title: "step", num: true, cell: (n) => number(ranks.step[n]) },
          {
            title: "lag",
            num: true,
            about: "steps behind the first rank of its module",
            cell: (n) => number(ranks.lag[n]),
          },
          ...(waited.length
            ? [
                {
                  title: "data wait",
                  num: true,
                  about: "share of the last half minute or so for which it waited for data",
                  cell: (n) => h("span", { class: ranks.wait[n] > 0.05 ? "warn" : "" }, percent(ranks.wait[n], 1)),
                },
              ]
            : []),
          { title: "ready", num: true, about: "microbatches that wait for it", cell: (n) => number(ranks.ready[n]) },
          { title: "preparing", num: true, cell: (n) => number(ranks.preparing[n]) },
          {
            title: "unread",
            num: true,
            about: "time since it last took something",
            cell: (n) => seconds(ranks.unread_s[n]),
          },
          { title: "job", kind: "name", cell: (n) => h("code", {}, ranks.job[n]) },
          { title: "server", kind: "name", cell: (n) => ranks.server[n] },
        ],
        fitting.slice(0, SHOWN),
        word ? "no rank fits the filter" : "no rank reads from these servers",
      ),
    );
  }

  // A square a rank: blue where it is level with the first of its module, the redder the further behind, grey unknown.
  function drawGrid(ranks, all) {
    const canvas = at("grid"),
      size = 12,
      width = canvas.parentElement.clientWidth - 32;
    const order = [...all].sort(
      (a, b) =>
        ranks.job[a].localeCompare(ranks.job[b]) ||
        ranks.module[a].localeCompare(ranks.module[b]) ||
        ranks.rank[a] - ranks.rank[b],
    );
    const across = Math.max(Math.floor(width / size), 1),
      down = Math.ceil(order.length / across),
      dense = devicePixelRatio;
    canvas.width = width * dense;
    canvas.height = down * size * dense;
    canvas.style.height = `${down * size}px`;
    canvas.setAttribute("aria-label", `${order.length} ranks by lag`);
    const pen = canvas.getContext("2d");
    pen.scale(dense, dense);
    const most = Math.max(1, ...all.map((n) => ranks.lag[n] ?? 0));
    order.forEach((n, i) => {
      const x = (i % across) * size,
        y = Math.floor(i / across) * size,
        lag = ranks.lag[n];
      pen.globalAlpha = lag ? 0.4 + 0.6 * (Math.log1p(lag) / Math.log1p(most)) : 1;
      pen.fillStyle = lag ? colour("bad") : lag === null ? colour("bar") : colour("c0");
      pen.fillRect(x, y, size - 2, size - 2);
    });
    canvas.onmousemove = (event) => {
      const column = Math.floor(event.offsetX / size); // the last one may be cut off
      const n = column < across ? order[Math.floor(event.offsetY / size) * across + column] : undefined;
      canvas.title =
        n === undefined
          ? ""
          : `${ranks.module[n]} ${ranks.rank[n]}: step ${number(ranks.step[n])}, lag ${number(ranks.lag[n])}`;
    };
  }

  function showRest(found) {
    swap(
      at("failures"),
      table(
        [
          { title: "kind", cell: (f) => f.kind },
          { title: "count", num: true, cell: (f) => number(f.count) },
          { title: "servers", num: true, cell: (f) => number(f.servers) },
          { title: "most at", kind: "name", cell: (f) => f.most },
        ],
        found.failures,
        "nothing failed",
      ),
    );
    swap(
      at("failed"),
      table(
        [
          { title: "dataset", kind: "name", cell: (f) => f.dataset },
          { title: "shard", kind: "name", cell: (f) => f.shard },
          { title: "key", kind: "name", cell: (f) => f.key || "-" },
          { title: "kind", cell: (f) => f.kind },
          { title: "count", num: true, cell: (f) => number(f.count) },
          { title: "last", cell: (f) => new Date(f.last * 1000).toLocaleTimeString() },
          { title: "server", kind: "name", cell: (f) => f.server },
          { title: "why", kind: "text", cell: (f) => f.reason },
        ],
        found.failed,
        "none is remembered",
      ),
    );
    swap(
      at("caches"),
      table(
        [
          { title: "", cell: (c) => c.name },
          { title: "", cell: (c) => bar([["k0", c.used / c.of, percent(c.used / c.of)]]) },
          { title: "share", num: true, cell: (c) => percent(c.used / c.of) },
          { title: "of", num: true, cell: (c) => (c.unit === "bytes" ? bytes(c.of) : number(c.of)) },
        ],
        found.caches,
        "no cache was asked yet",
      ),
    );
    const checks = found.checks;
    swap(
      at("checks"),
      !checks
        ? h("p", { class: "note" }, "the servers are being asked")
        : table(
            [
              {
                title: "servers",
                kind: "text",
                cell: (f) =>
                  f.servers.slice(0, 4).join(", ") + (f.servers.length > 4 ? ` and ${f.servers.length - 4} more` : ""),
              },
              { title: "found", kind: "text", cell: (f) => f.what },
              { title: "remedy", kind: "text", cell: (f) => f.remedy },
            ],
            checks.findings,
            checks.releases.length ? `nothing is wrong; release ${checks.releases.join(", ")}` : "no server is named",
          ),
    );
  }

  function show(found) {
    newest = found;
    showTiles(found);
    showServers(found);
    showRanks(found);
    showRest(found);
    charts[0].set([found.history.time, found.history.images_s]);
    charts[1].set([found.history.time, ...STAGES.map((stage) => found.history.waiting[stage])]);
  }

  async function update() {
    try {
      if (!document.hidden) {
        const found = await ask("/api/fleet");
        if (closed) return;
        show(found);
        const looked = found.looked_at && `looked at ${new Date(found.looked_at * 1000).toLocaleTimeString()}`;
        if (found.defects.length) state(found.defects.join("; "), true);
        else state(looked || "asking the servers");
      }
    } catch (error) {
      if (!closed) state(error.message, true);
    }
    if (!closed) timer = setTimeout(update, (newest?.looked_at ? newest.interval_s : 0.5) * 1000);
  }

  update();
  return {
    close() {
      closed = true;
      clearTimeout(timer);
      charts.forEach((chart) => chart.close());
    },
    theme() {
      charts.forEach((chart) => chart.draw());
      if (newest) showRanks(newest);
    },
  };
}
