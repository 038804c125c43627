// A dataset: its card, its findings, and its samples as pictures with captions.
import { ask, bar, bytes, h, number, section, table, worked } from "./dom.js";

export function datasetPage(host, state, query) {
  let closed = false,
    name = query.get("dataset") ?? "",
    next = null,
    shown = [],
    opened = null,
    page = 0, // grows with every search and every dataset: an answer to an older question is thrown away
    dataset = 0, // the same of datasets alone
    listed = 0; // the same of pages of findings
  const picker = h("select", { "aria-label": "Dataset", onchange: () => go({ dataset: picker.value }) });
  const facts = h("span", { class: "note" });
  const card = h("div", { class: "columns" }),
    findings = h("div"),
    grid = h("div", { class: "samples" });
  const said = h("p", { class: "note", role: "status" });
  const input = (field, placeholder, kind) =>
    h("input", {
      name: field,
      placeholder,
      "aria-label": placeholder,
      class: kind,
      value: query.get(field) ?? "",
      spellcheck: "false",
      ...(kind ? { inputmode: "numeric" } : { type: "search" }),
    });
  const fields = [
    input("key", "key contains"),
    input("filter", "filter, such as width >= 512 and punsafe < 0.1"),
    input("least", "side from", "short"),
    input("most", "side to", "short"),
  ];
  const form = h(
    "form",
    {
      class: "row",
      onsubmit: (event) => {
        event.preventDefault();
        search();
      },
    },
    fields,
    h("button", { type: "submit" }, "Search"),
  );
  const more = h("button", { type: "button", onclick: () => look(false) }, "More");
  const dialog = h("dialog", { "aria-label": "Sample" });
  dialog.addEventListener("keydown", (event) => {
    if (event.key === "ArrowRight") step(1);
    else if (event.key === "ArrowLeft") step(-1);
  });
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  host.append(
    h("div", { class: "row" }, picker, facts),
    section("Samples", "arrow keys go from one to the next", form, grid, said, more),
    section("Findings", "problems found while indexing", findings),
    card,
    dialog,
  );

  function go(changes) {
    location.hash = `dataset?${new URLSearchParams(changes)}`;
  }

  async function start() {
    const mine = ++dataset;
    page++;
    shown = [];
    grid.replaceChildren();
    const over = () => closed || mine !== dataset;
    try {
      const found = await ask("/api/datasets");
      if (over()) return;
      const names = found.datasets.map((dataset) => dataset.name);
      if (!names.includes(name)) name = names[0] ?? "";
      picker.replaceChildren(...names.map((each) => h("option", { value: each, selected: each === name }, each)));
      picker.hidden = !names.length;
      const own = found.datasets.find((dataset) => dataset.name === name);
      const withheld = found.withheld
        ? `${number(found.withheld)} more may not be shown: no server lists them for these credentials. `
        : "";
      if (!own) {
        host.replaceChildren(
          section(
            "Dataset",
            null,
            h(
              "p",
              { class: "note" },
              withheld || "No dataset is named: start dataserver web with --dataset NAME=PATH.",
            ),
          ),
        );
        return;
      }
      facts.textContent =
        `${number(own.samples)} samples, ${number(own.shards)} shards. ${withheld}` +
        (own.of_servers && own.of_servers !== own.fingerprint ? "Servers have another version of it." : "");
      if (query.get("shard")) showSample(Number(query.get("shard")), Number(query.get("row")));
      look(true);
      showCard();
      showFindings("", 0);
    } catch (error) {
      if (!over()) state(error.message, true);
    }
  }

  async function showCard() {
    const mine = dataset;
    const found = await worked("/api/dataset/card", { dataset: name }, card, () => closed || mine !== dataset);
    if (!found) return;
    card.replaceChildren(
      ...found.map((part) =>
        section(
          part.title,
          null,
          table(
            [
              { title: "", kind: "text", cell: (row) => row.label },
              { title: "", num: true, cell: (row) => row.value },
              ...(part.rows.some((row) => row.share !== null)
                ? [{ title: "", cell: (row) => (row.share === null ? "" : bar([["k0", row.share]])) }]
                : []),
              ...(part.rows.some((row) => row.note) ? [{ title: "", kind: "text", cell: (row) => row.note }] : []),
            ],
            part.rows,
          ),
        ),
      ),
    );
  }

  async function showFindings(kind, first) {
    const mine = dataset,
      asked = ++listed,
      own = name;
    const over = () => closed || mine !== dataset || asked !== listed;
    const found = await worked("/api/dataset/findings", { dataset: own, kind, first }, findings, over);
    if (!found) return;
    const kinds = h(
      "select",
      { "aria-label": "Kind of findings", onchange: () => showFindings(kinds.value, 0) },
      h("option", { value: "" }, "all kinds"),
      found.counts.map((count) =>
        h(
          "option",
          { value: count.kind, selected: count.kind === kind },
          `${count.kind}: ${number(count.count)} (${count.effect})`,
        ),
      ),
    );
    const turn = (label, to) =>
      h(
        "button",
        { type: "button", disabled: to < 0 || to >= found.listed, onclick: () => showFindings(kind, to) },
        label,
      );
    const step = 100,
      last = Math.min(first + step, found.listed);
    findings.replaceChildren(
      ...(found.counts.length
        ? [
            h(
              "div",
              { class: "row" },
              kinds,
              turn("Back", first - step),
              turn("Next", first + step),
              h(
                "span",
                { class: "note" },
                `${number(first + 1)} to ${number(last)} of ${number(found.listed)}` +
                  (found.unlisted ? `; ${number(found.unlisted)} more are counted and not listed` : ""),
              ),
            ),
          ]
        : []),
      table(
        [
          { title: "kind", kind: "name", cell: (f) => f.kind },
          { title: "effect", kind: "name", cell: (f) => f.effect },
          { title: "shard", kind: "text", cell: (f) => f.shard },
          {
            title: "key",
            kind: "text",
            cell: (f) =>
              f.key && f.effect !== "left out"
                ? h("a", { href: `#dataset?${new URLSearchParams({ dataset: own, key: f.key })}` }, f.key)
                : f.key,
          },
          { title: "detail", kind: "text", cell: (f) => f.detail },
        ],
        found.findings,
        "no findings",
      ),
    );
  }

  function search() {
    const filled = fields.filter((field) => field.value.trim()).map((field) => [field.name, field.value.trim()]);
    go({ dataset: name, ...Object.fromEntries(filled) });
  }

  async function look(anew) {
    const filled = Object.fromEntries(fields.filter((f) => f.value.trim()).map((f) => [f.name, f.value.trim()]));
    const from = anew ? {} : next,
      own = name;
    if (anew) page++;
    const mine = page;
    if (anew) {
      next = null;
      shown = [];
      grid.replaceChildren();
    }
    more.disabled = true;
    said.textContent = "looking";
    said.className = "note";
    try {
      const found = await ask("/api/dataset/samples", { dataset: own, ...filled, ...from });
      if (closed || mine !== page) return;
      next = found.next;
      shown.push(...found.samples);
      grid.append(...found.samples.map((sample) => tile(own, sample)));
      more.disabled = !next;
      said.textContent = next
        ? `${number(shown.length)} samples so far; shard ${number(next.shard + 1)} of ${number(found.shards)} is next`
        : `${number(shown.length)} samples: that is all`;
    } catch (error) {
      if (closed || mine !== page) return;
      more.disabled = !next;
      said.textContent = error.message;
      said.className = "note bad";
    }
  }

  const pictured = (of, { shard, row }, image, side) =>
    `/api/dataset/picture?${new URLSearchParams({ dataset: of, shard, row, image, side })}`;

  function picture(of, sample, image, side, alt) {
    const img = h("img", { src: pictured(of, sample, image, side), loading: "lazy", alt });
    img.addEventListener("error", () => img.replaceWith(h("span", { class: "none" }, "no picture")));
    return img;
  }

  function tile(of, sample) {
    const media = sample.videos ? "video" : sample.clips ? "audio" : "";
    const size = sample.sizes.length ? `${sample.sizes[0][0]} x ${sample.sizes[0][1]}` : media || "text alone";
    const images = sample.images - sample.clips - sample.videos;
    const counts =
      (images > 1 ? `, ${images} images` : "") +
      (sample.clips ? `, ${sample.clips} clips` : "") +
      (sample.videos ? `, ${sample.videos} videos` : "");
    return h(
      "button",
      { type: "button", class: "sample", onclick: () => showSample(sample.shard, sample.row) },
      sample.first_image === null
        ? h("span", { class: "none" }, media || "text")
        : picture(of, sample, sample.first_image, 240, ""),
      h("span", { class: "caption" }, sample.text || "(no text)"),
      h("small", {}, `${sample.key}, ${size}${counts}`),
    );
  }

  function step(by) {
    const at = shown.findIndex((sample) => opened && sample.shard === opened.shard && sample.row === opened.row) + by;
    if (shown[at]) showSample(shown[at].shard, shown[at].row);
  }

  async function showSample(shard, row) {
    const mine = { shard, row },
      own = name;
    opened = mine;
    if (!dialog.open) dialog.showModal();
    try {
      const found = await ask("/api/dataset/sample", { dataset: own, shard, row });
      if (closed || opened !== mine) return;
      dialog.replaceChildren(...sampleParts(own, found));
    } catch (error) {
      if (!closed && opened === mine) dialog.replaceChildren(h("p", { class: "bad" }, error.message), closer());
    }
  }

  const closer = () => h("button", { type: "button", onclick: () => dialog.close() }, "Close");

  const extent = (item) =>
    item.is_audio
      ? `${(item.width / item.height).toFixed(1)} s of ${number(item.height)} Hz, ${item.orientation} channels`
      : `${item.width} x ${item.height}` +
        (item.is_video ? `, ${number(item.frames)} frames, ${(item.microseconds / 1e6).toFixed(1)} s` : "");

  function sampleParts(of, found) {
    const images = found.images.map((image, n) =>
      h(
        "figure",
        {},
        image.served && !image.is_audio
          ? picture(of, found, n, 768, image.is_video ? `first frame of video ${n}` : `image ${n}`)
          : h("span", { class: "none" }, image.is_audio ? "audio" : "no picture"),
        h(
          "figcaption",
          {},
          h(
            "div",
            {},
            `${image.format}, ${extent(image)}, ${bytes(image.bytes)} at ${number(image.offset)}`,
          ),
          image.fault ? h("div", { class: "bad" }, image.fault) : null,
          h("pre", { class: "hex" }, image.hex),
        ),
      ),
    );
    return [
      h("div", { class: "row" }, h("h2", {}, found.key), h("span", { class: "note" }, found.name), closer()),
      ...images,
      found.more_images ? h("p", { class: "note" }, `${found.more_images} more images`) : "",
      ...found.texts.map((text) => h("p", { class: "text" }, text)),
      found.more_texts ? h("p", { class: "note" }, `${found.more_texts} more texts`) : "",
      table(
        [
          { title: "column", kind: "name", cell: (c) => c.name },
          { title: "value", kind: "text", cell: (c) => String(c.value) },
        ],
        found.columns,
        "no columns",
      ),
    ];
  }

  start();
  return {
    close() {
      closed = true;
    },
    moved(to) {
      query = to;
      const other = (to.get("dataset") ?? name) !== name;
      name = to.get("dataset") ?? name;
      fields.forEach((field) => {
        field.value = to.get(field.name) ?? "";
      });
      dialog.close();
      opened = null;
      if (other) start();
      else if (to.get("shard")) showSample(Number(to.get("shard")), Number(to.get("row")));
      else look(true);
    },
  };
}
