"use strict";
// The example browser, the influences on queries, and the zoom into a matrix. Text of examples only ever becomes textContent.
(() => {
  const STATES = ["selected", "rejected", "validation", "anchor", "warmup", "pool"];
  const PAGE = 25, CHUNK = 200, KEEP = 80;
  const el = (id) => document.getElementById(id);

  function make(tag, className, text) {
    const node = document.createElement(tag);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;
    return node;
  }

  async function unpack(id) {
    const raw = atob(el(id).textContent);
    const bytes = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return JSON.parse(await new Response(stream).text());
  }

  function show(value) {
    if (value === null || value === undefined) return "–";
    if (Number.isInteger(value)) return value.toLocaleString("en");
    const size = Math.abs(value);
    return size >= 0.01 && size < 1e5 ? value.toPrecision(4) : value.toExponential(2);
  }

  // --- examples -----------------------------------------------------------------------------

  const chunks = new Map();
  let columns = null, order = [], page = 0, down = true, ticket = 0;
  let near = new Set(), prefix = "";

  async function chunk(at) {
    if (!el("text-" + at)) return null;
    if (chunks.has(at)) return chunks.get(at);
    const rows = await unpack("text-" + at);
    chunks.set(at, rows);
    if (chunks.size > KEEP) chunks.delete(chunks.keys().next().value);
    return rows;
  }

  function shown(row, what) {
    const state = columns.state[row];
    if (what === "all") return true;
    if (what === "pool") return state <= 1 || state === 5;
    if (what === "near") return near.has(row);
    if (what === "others") return state >= 2 && state <= 4;
    if (what === "rejected") return state === 1 || state === 5;
    return state === STATES.indexOf(what);
  }

  function sorted(rows, key) {
    const values = columns[key], sign = down ? -1 : 1;
    return rows.sort((a, b) => {
      const x = values[a], y = values[b];
      if (x === y) return a - b;
      if (x === null) return 1;
      if (y === null) return -1;
      return sign * (x - y);
    });
  }

  async function matching(rows, words, mine) {
    const found = new Uint8Array(columns.id.length);
    const wanted = new Map();
    for (const row of rows) {
      if (columns.id[row].toLowerCase().includes(words)) found[row] = 1;
      const at = Math.floor(row / CHUNK);
      if (!wanted.has(at)) wanted.set(at, []);
      wanted.get(at).push(row);
    }
    let done = 0, last = performance.now();
    for (const [at, members] of wanted) {
      const texts = await chunk(at);
      if (mine !== ticket) return null;
      if (texts) {
        for (const row of members) {
          if (texts[row % CHUNK].join("").toLowerCase().includes(words)) found[row] = 1;
        }
      }
      done += 1;
      if (performance.now() - last > 100) {
        el("status").textContent = "Searching … " + Math.round((100 * done) / wanted.size) + " %";
        await new Promise((resume) => setTimeout(resume));
        last = performance.now();
      }
    }
    return rows.filter((row) => found[row]);
  }

  async function refresh() {
    const mine = ++ticket;
    const what = el("show").value, words = el("query").value.trim().toLowerCase();
    let rows = [];
    for (let i = 0; i < columns.id.length; i++) if (shown(i, what)) rows.push(i);
    if (words) rows = await matching(rows, words, mine);
    if (mine !== ticket || rows === null) return;
    order = sorted(rows, el("sort").value);
    page = 0;
    await render(mine);
  }

  async function render(mine) {
    const pages = Math.max(1, Math.ceil(order.length / PAGE));
    const rows = order.slice(page * PAGE, (page + 1) * PAGE);
    const nodes = [heading(columns.heads)];
    for (const row of rows) nodes.push(await example(row, columns.heads.map(([key]) => columns[key][row])));
    if (mine !== ticket) return;
    el("rows").replaceChildren(...nodes);
    el("status").textContent = order.length.toLocaleString("en") + " examples";
    el("where").textContent = "page " + (page + 1).toLocaleString("en") + " of " + pages.toLocaleString("en");
    el("previous").disabled = page === 0;
    el("next").disabled = page + 1 >= pages;
    el("browser").dataset.shown = String(mine);
  }

  function heading(heads) {
    const line = make("div", "line heading");
    line.append(make("span", "", "state"));
    for (const [, name] of heads) line.append(make("span", "value", name));
    line.append(make("span", "", "text"));
    return line;
  }

  // What the first texts begin with, in whole words: a template or a system prompt. Previews skip it.
  async function findPrefix() {
    const texts = ((await chunk(0)) || []).map((turns) => turns.join("")).sort();
    const first = texts[0] || "", last = texts[texts.length - 1] || "";
    let end = 0;
    while (end < first.length && first[end] === last[end]) end += 1;
    if (first === last) end = 0;
    while (end > 0 && !/[\s!-/:-@[-`{-~]/.test(first[end - 1])) end -= 1;
    prefix = first.slice(0, end);
  }

  function begin(text) {
    const skipped = text.length > prefix.length && text.startsWith(prefix) ? prefix.length : 0;
    const part = [...text.slice(skipped, skipped + 600)].slice(0, 300).join("");
    const more = skipped + part.length < text.length;
    return (skipped ? "… " : "") + part.replace(/\s+/g, " ") + (more ? " …" : "");
  }

  async function example(row, values) {
    const texts = await chunk(Math.floor(row / CHUNK));
    const turns = texts ? texts[row % CHUNK] : [];
    const box = make("details", "example"), line = make("summary", "line");
    box.dataset.row = String(row);
    const state = STATES[columns.state[row]];
    line.append(make("span", "state " + state, state));
    for (const value of values) line.append(make("span", "value", show(value)));
    const preview = make("span", "preview", begin(turns.join("")));
    preview.dir = "auto";
    line.append(preview);
    box.append(line);
    box.addEventListener("toggle", () => {
      if (box.open && box.childElementCount === 1) open(box, row, turns);
    });
    return box;
  }

  function open(box, row, turns) {
    const rank = columns.rank[row], bound = columns.bound[row];
    const facts = ["id " + columns.id[row], "line " + columns.line[row].toLocaleString("en"),
      columns.tokens[row].toLocaleString("en") + " tokens"];
    if (rank !== null) facts.push("rank " + rank.toLocaleString("en"));
    if (bound) facts.push("score known to ± " + show(bound));
    if (near.has(row)) facts.push("near the boundary");
    box.append(make("p", "facts", facts.join(" · ")));
    write(box, turns);
  }

  function write(box, turns) {
    turns.forEach((text, i) => {
      if (!text) return;
      const turn = make("div", i % 2 ? "turn response" : "turn", text);
      turn.dir = "auto";
      box.append(turn);
    });
  }

  async function move(step) {
    page += step;
    await render(++ticket);
    el("examples").scrollIntoView();
  }

  async function startExamples() {
    if (!el("examples-data")) return;
    columns = await unpack("examples-data");
    near = new Set(columns.near);
    columns.heads = columns.heads || [["score", "score"], ["loss", "loss"], ["response", "resp. tokens"]];
    await findPrefix();
    if (el("show").value === "selected" && !columns.state.includes(0)) el("show").value = "all";
    if (columns.score.every((value) => value === null)) el("sort").value = "line";
    el("browser").hidden = false;
    let waiting = 0;
    el("show").addEventListener("change", refresh);
    el("sort").addEventListener("change", refresh);
    el("query").addEventListener("input", () => {
      clearTimeout(waiting);
      waiting = setTimeout(refresh, 200);
    });
    el("direction").addEventListener("click", () => {
      down = !down;
      el("direction").textContent = down ? "high first" : "low first";
      refresh();
    });
    el("previous").addEventListener("click", () => move(-1));
    el("next").addEventListener("click", () => move(1));
    await refresh();
  }

  // --- queries ------------------------------------------------------------------------------

  const QUERIES = 5;
  let queries = [], asked = [], askedPage = 0, askedTicket = 0;

  async function holds(row, words) {
    const texts = await chunk(Math.floor(row / CHUNK));
    const text = texts ? texts[row % CHUNK].join("") : "";
    return text.toLowerCase().includes(words) || columns.id[row].toLowerCase().includes(words);
  }

  // A query that holds the words is shown with all its examples, another with those that hold them.
  async function filterQueries() {
    const mine = ++askedTicket, words = el("asked").value.trim().toLowerCase(), found = [];
    for (const query of queries) {
      const whole = !words || query.text.join("").toLowerCase().includes(words);
      const sides = { helps: [], hurts: [] };
      for (const side of ["helps", "hurts"]) {
        for (const pair of query[side]) if (whole || (await holds(pair[0], words))) sides[side].push(pair);
      }
      if (mine !== askedTicket) return;
      if (whole || sides.helps.length || sides.hurts.length) found.push({ ...query, ...sides });
    }
    asked = found;
    askedPage = 0;
    await renderQueries(mine);
  }

  async function renderQueries(mine) {
    const pages = Math.max(1, Math.ceil(asked.length / QUERIES)), nodes = [];
    for (const query of asked.slice(askedPage * QUERIES, (askedPage + 1) * QUERIES)) nodes.push(await answer(query));
    if (mine !== askedTicket) return;
    el("answers").replaceChildren(...nodes);
    el("asked-status").textContent = asked.length.toLocaleString("en") + " queries";
    el("asked-where").textContent = "page " + (askedPage + 1).toLocaleString("en") + " of " + pages.toLocaleString("en");
    el("asked-previous").disabled = askedPage === 0;
    el("asked-next").disabled = askedPage + 1 >= pages;
    el("answers").dataset.shown = String(mine);
  }

  async function answer(query) {
    const box = make("article", "query");
    box.append(make("h3", "", "Query " + query.line.toLocaleString("en")));
    box.append(make("p", "facts", "id " + query.id + " · loss " + show(query.loss)));
    write(box, query.text);
    const sides = make("div", "sides");
    for (const [side, title] of [["helps", "Helps"], ["hurts", "Hurts"]]) {
      const part = make("div", side);
      part.append(make("h4", "", title));
      if (query[side].length) part.append(heading([["", "influence"], ["", "score"], ["", "loss"]]));
      else part.append(make("p", "facts", "No example."));
      for (const [row, influence] of query[side]) {
        part.append(await example(row, [influence, columns.score[row], columns.loss[row]]));
      }
      sides.append(part);
    }
    box.append(sides);
    return box;
  }

  async function moveQueries(step) {
    askedPage += step;
    await renderQueries(++askedTicket);
    el("queries").scrollIntoView();
  }

  async function startQueries() {
    if (!el("queries-data")) return;
    queries = await unpack("queries-data");
    el("questions").hidden = false;
    let waiting = 0;
    el("asked").addEventListener("input", () => {
      clearTimeout(waiting);
      waiting = setTimeout(filterQueries, 200);
    });
    el("asked-previous").addEventListener("click", () => moveQueries(-1));
    el("asked-next").addEventListener("click", () => moveQueries(1));
    await filterQueries();
  }

  // --- the mask -----------------------------------------------------------------------------

  function svg(tag, attributes) {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    return node;
  }

  function zoom(cell) {
    const target = el("zoom"), nodes = [make("h3", "", cell.name)];
    const size = cell.shape ? cell.shape.reduce((a, b) => a * b, 1) : null;
    let words = cell.count.toLocaleString("en") + " entries selected";
    if (size) {
      words += " of " + size.toLocaleString("en") + " (" + ((100 * cell.count) / size).toFixed(2) + " %), shape " + cell.shape.join(" × ");
    }
    nodes.push(make("p", "", words));
    if (cell.grid) {
      const side = 15, rows = cell.grid.length, wide = cell.grid[0].length;
      const most = Math.max(...cell.grid.flat()) || 1;
      const picture = svg("svg", { width: wide * side, height: rows * side, viewBox: "0 0 " + wide * side + " " + rows * side });
      cell.grid.forEach((line, y) => line.forEach((share, x) => {
        const field = svg("rect", { x: x * side, y: y * side, width: side - 1, height: side - 1, class: "heat", "fill-opacity": 0.04 + (0.96 * share) / most });
        const title = svg("title", {});
        title.textContent = (100 * share).toFixed(2) + " % of this block";
        field.append(title);
        picture.append(field);
      }));
      const frame = make("div", "scroll");
      frame.append(picture);
      nodes.push(frame);
      nodes.push(make("p", "", "Rows (outputs) down, columns (inputs) across, in " + rows + " × " + wide +
        " blocks; the strongest has " + (100 * most).toFixed(2) + " % selected."));
    }
    target.replaceChildren(...nodes);
    target.hidden = false;
  }

  async function startMask() {
    if (!el("mask-data")) return;
    const cells = await unpack("mask-data");
    const fields = document.querySelectorAll("svg.heat .cell");
    for (const field of fields) {
      field.addEventListener("click", () => {
        fields.forEach((other) => other.classList.remove("on"));
        field.classList.add("on");
        zoom(cells[Number(field.dataset.cell)]);
      });
    }
    const label = make("label", "", "Look inside "), list = make("select");
    list.id = "inside";
    list.append(new Option("choose a matrix", ""));
    cells.forEach((cell, i) => list.append(new Option(cell.name, String(i))));
    list.addEventListener("change", () => list.value && zoom(cells[Number(list.value)]));
    label.append(list);
    el("zoom").before(label);
  }

  async function start() {
    await startExamples();
    await startQueries();
    document.documentElement.dataset.ready = performance.now().toFixed(0);
    await startMask();
    document.documentElement.dataset.complete = performance.now().toFixed(0);
  }
  start().catch((problem) => {
    document.documentElement.dataset.failed = String(problem);
    if (el("status")) el("status").textContent = "This browser cannot read the data: " + problem;
    console.error(problem);
  });
})();
