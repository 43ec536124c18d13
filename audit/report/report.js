"use strict";
// The page is complete without this script. It tells what a square of a heatmap stands for, pages and filters
// the reconciliation, and sorts the producers. All text goes in as textContent, never as markup.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const STATES = data.states;
  const WORDS = data.words;
  const CALM = data.calm; // a place in STATES, worst first: from there on nothing needs attention
  const PAGE = matchMedia("(max-width: 760px)").matches ? 25 : 100;
  const id = (name) => document.getElementById(name);
  const number = (value) => value.toLocaleString("en-US");
  const element = (name, text, kind) => {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    if (kind) made.className = kind;
    return made;
  };
  const DAY = 86400000;
  const time = (ms) => {
    const at = new Date(ms);
    if (Number.isNaN(at.getTime())) return `${ms} ms`;
    const text = at.toISOString();
    if (data.daily && ms % DAY === 0) return text.slice(0, -14);
    return text.slice(0, ms % 1000 ? -1 : ms % 60000 ? -5 : -8).replace("T", " ");
  };

  // On a narrow screen a row becomes a card: its cells carry their headings, and roles keep it a table.
  const carded = (table, rows) => {
    const labels = [...table.tHead.rows[0].cells].map((each) => each.textContent.trim());
    for (const row of rows) {
      row.setAttribute("role", "row");
      [...row.cells].forEach((each, column) => { each.dataset.label = labels[column]; each.setAttribute("role", "cell"); });
    }
    return rows;
  };
  for (const each of document.querySelectorAll("table")) {
    each.classList.add("cards");
    each.setAttribute("role", "table");
    for (const group of [each.tHead, each.tBodies[0]]) group.setAttribute("role", "rowgroup");
    each.tHead.rows[0].setAttribute("role", "row");
    for (const heading of each.tHead.rows[0].cells) heading.setAttribute("role", "columnheader");
    carded(each, each.tBodies[0].rows);
  }

  // ---- heatmaps -------------------------------------------------------------------------------------------
  const told = id("told");
  const describe = (map, square) => {
    const [, , start, state, name, published = 0, seen = 0, missing = 0, twice = 0] = square;
    const [topic, tier] = map.names[name];
    told.replaceChildren(
      `${topic} in ${tier}, ${time(map.base_ms + start * map.square_ms)}: `, element("b", WORDS[state], STATES[state]),
      ` · published ${number(published)}, seen ${number(seen)}` + (missing ? `, missing ${number(missing)}` : "")
        + (twice ? `, extra copies ${number(twice)}` : ""));
  };
  for (const svg of document.querySelectorAll("svg.map")) {
    const map = data.maps[Number(svg.dataset.map)];
    const squares = new Map(map.squares.map((each) => [each[0] + "/" + each[1], each]));
    const lines = [...new Set(map.squares.map((each) => each[1]))].sort((a, b) => a - b);
    const place = (each) => [map.left + each[0] * 14, map.top + each[1] * map.line];
    let cursor = null, at = null;
    const show = (square) => {
      at = square;
      if (!cursor) {
        cursor = document.createElementNS(svg.namespaceURI, "path");
        cursor.setAttribute("class", "cursor");
        svg.append(cursor);
      }
      const [x, y] = place(square);
      cursor.setAttribute("d", `M${x - 0.5} ${y - 0.5}h13v13h-13z`);
      describe(map, square);
    };
    const under = (event) => {
      const box = svg.getBoundingClientRect();
      const x = Math.floor((event.clientX - box.left - map.left) / 14);
      const high = event.clientY - box.top - map.top;
      const y = lines.find((line) => high >= line * map.line && high < line * map.line + 14);
      return squares.get(x + "/" + y);
    };
    const choose = (square) => {
      const start = map.base_ms + square[2] * map.square_ms;
      table.only({ topic: map.names[square[4]][0], from: start, to: start + map.square_ms });
    };
    svg.addEventListener("pointermove", (event) => { const found = under(event); if (found && found !== at) show(found); });
    svg.addEventListener("click", (event) => { const found = under(event); if (found) choose(found); });
    svg.addEventListener("focus", () => { if (!at && map.squares.length && svg.matches(":focus-visible")) show(map.squares.reduce((a, b) => (b[3] < a[3] ? b : a))); });
    svg.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
      if (event.key === "Enter" && at) { event.preventDefault(); choose(at); return; }
      if (!step || !map.squares.length) return;
      event.preventDefault();
      const from = at || map.squares[0];
      let line = lines.indexOf(from[1]), x = from[0];
      const widest = Math.max(...map.squares.map((each) => each[0]));
      for (let tries = 0; tries <= widest + lines.length; tries++) {
        x += step[0];
        line += step[1];
        if (x < 0 || x > widest || line < 0 || line >= lines.length) return;
        const found = squares.get(x + "/" + lines[line]);
        if (found) { show(found); return; }
      }
    });
  }

  // ---- reconciliation -------------------------------------------------------------------------------------
  const plain = data.table;
  const COUNTS = ["missing", "twice", "on the way", "unreported", "unknown", "explained"];
  const CONTENT = ["", "content equal", "content not compared", "content differs"];
  const rows = plain.rows.map((row) => ({
    topic: plain.topics[row[0]], producer: plain.producers[row[1]],
    start: row[2] == null ? null : plain.base_ms + row[2] * plain.unit_ms,
    state: row[3] || 0, ms: (row[4] || 0) * plain.unit_ms, published: row[5] || 0, tiers: row[6] || [],
    counts: row[7] || [], content: row[8] || 0, revision: row[9] || 0, streams: row[10] || 0, waived: row[11] || 0,
    windows: 1,
  }));
  const rest = plain.rest.map((row) => ({
    topic: plain.topics[row[0]], producer: row[1] == null ? "all others" : plain.producers[row[1]],
    start: row[2] == null ? null : plain.base_ms + row[2] * plain.unit_ms,
    last: row[3] == null ? null : plain.base_ms + row[3] * plain.unit_ms,
    windows: row[4], state: row[5], published: row[6], tiers: row[7], counts: [], rest: true,
  }));
  const table = (() => {
    const view = { text: "", show: "all", single: false, range: null, sort: null, down: false, page: 0, open: new Set() };
    let shown = [];
    const wanted = (row) => {
      if (view.show === "attention" ? row.state >= CALM : view.show !== "all" && row.state !== Number(view.show)) return false;
      if (view.text && !(row.topic + " " + row.producer).toLowerCase().includes(view.text)) return false;
      const range = view.range;
      if (!range) return true;
      return row.topic === range.topic && row.start !== null && row.start < range.to && (row.last ?? row.start) >= range.from;
    };
    const value = {
      topic: (row) => row.topic, producer: (row) => row.producer, window: (row) => row.start ?? -Infinity,
      published: (row) => row.published, missing: (row) => row.counts[0] || 0, duplicates: (row) => row.counts[1] || 0,
      state: (row) => row.state,
    };
    // Proven windows that follow one another in the list become one line, unless it was opened.
    const collapsed = (found) => {
      const list = [];
      let run = null;
      for (const row of found) {
        const calm = row.state >= CALM;
        if (!calm || row.rest || row.waived || row.revision) { run = null; list.push(row); continue; }
        const key = row.topic + "\n" + row.producer + "\n" + row.state;
        if (view.open.has(key)) { run = null; list.push(row); continue; }
        if (run && run.key === key) {
          run.windows += 1;
          run.published += row.published;
          run.last = Math.max(run.last, row.start);
          run.start = Math.min(run.start, row.start);
          run.tiers = run.tiers.map((each, index) => (row.tiers[index] == null ? each : (each || 0) + row.tiers[index]));
        } else {
          run = { ...row, key, last: row.start, tiers: [...row.tiers] };
          list.push(run);
        }
      }
      return list;
    };
    const line = (row) => {
      const made = element("tr", undefined, row.windows > 1 ? "run" : "");
      const cell = (text, kind) => made.appendChild(element("td", text, kind));
      cell(row.topic, "name");
      cell(row.producer, "name");
      if (row.windows > 1) {
        const where = cell();
        if (row.start !== null) where.append(element("span", `${time(row.start)} –`, "at"), " ", element("span", time(row.last), "at"), " · ");
        if (row.key) {
          const open = element("button", `${number(row.windows)} windows`);
          open.addEventListener("click", () => { view.open.add(row.key); update(); });
          where.append(open);
        } else where.append(`${number(row.windows)} windows, in reconciliation.parquet`);
      } else cell(row.start === null ? "no window known" : time(row.start), "at");
      cell(number(row.published), "number");
      plain.tiers.forEach((_, index) => cell(row.tiers[index] == null ? "–" : number(row.tiers[index]), "number"));
      const lost = row.counts[0] || 0, twice = row.counts[1] || 0;
      cell(number(lost), lost ? "number bad" : "number");
      cell(number(twice), twice ? "number warn" : "number");
      const verdict = cell(undefined, "word");
      verdict.append(element("span", WORDS[row.state], "chip " + STATES[row.state]));
      if (row.waived) verdict.append(" ", element("span", "waived", "chip"));
      const more = COUNTS.slice(2).map((word, index) => row.counts[index + 2] && `${number(row.counts[index + 2])} ${word}`);
      if (row.content) more.push(CONTENT[row.content]);
      if (row.revision) more.push(`revision ${row.revision}`);
      if (row.streams) more.push(`${row.streams} streams`);
      const text = more.filter(Boolean).join(", ");
      if (text) verdict.append(element("span", text, "quiet"));
      return made;
    };
    const update = () => {
      let found = [...rows, ...rest].filter(wanted);
      const total = found.reduce((sum, row) => sum + row.windows, 0);
      if (view.sort !== null) {
        const by = value[view.sort] || ((row) => row.tiers[Number(view.sort)] ?? -1);
        const way = view.down ? -1 : 1;
        found = found.map((row, index) => [by(row), index, row])
          .sort(([a, i], [b, j]) => way * (typeof a === "string" ? a.localeCompare(b) : a - b) || i - j).map((each) => each[2]);
      }
      shown = view.single ? found : collapsed(found);
      const pages = Math.max(1, Math.ceil(shown.length / PAGE));
      view.page = Math.min(view.page, pages - 1);
      const first = view.page * PAGE;
      id("plain").tBodies[0].replaceChildren(...carded(id("plain"), shown.slice(first, first + PAGE).map(line)));
      id("status").textContent = total === 0 ? "Nothing fits." : `${number(total)} of ${number(plain.total)} windows in ${number(shown.length)} rows`;
      id("page").textContent = `${number(view.page + 1)} of ${number(pages)}`;
      id("back").disabled = view.page === 0;
      id("on").disabled = view.page === pages - 1;
      document.querySelector(".pager").hidden = pages === 1;
      const range = id("range");
      range.hidden = !view.range;
      if (view.range) range.textContent = `× ${view.range.topic}, ${time(view.range.from)} – ${time(view.range.to)}`;
    };
    const change = (changes) => { Object.assign(view, { page: 0 }, changes); update(); };
    id("search").addEventListener("input", (event) => change({ text: event.target.value.trim().toLowerCase() }));
    id("show").addEventListener("change", (event) => change({ show: event.target.value }));
    id("single").addEventListener("change", (event) => change({ single: event.target.checked }));
    id("range").addEventListener("click", () => change({ range: null, single: id("single").checked }));
    id("controls").addEventListener("submit", (event) => event.preventDefault());
    const turn = (by) => { view.page += by; update(); id("reconciliation").scrollIntoView(); };
    id("back").addEventListener("click", () => turn(-1));
    id("on").addEventListener("click", () => turn(1));
    for (const heading of document.querySelectorAll("#plain th")) {
      sortable(heading, (down) => change({ sort: heading.dataset.sort, down }));
    }
    update();
    return {
      only: (range) => {
        change({ range, single: true });
        id("reconciliation").scrollIntoView();
        id("range").focus({ preventScroll: true });
      },
    };
  })();

  // ---- headings that sort; the producers ------------------------------------------------------------------
  function sortable(heading, sort) {
    const button = element("button", heading.textContent.trim());
    button.type = "button";
    heading.replaceChildren(button);
    button.addEventListener("click", () => {
      const first = heading.classList.contains("number") ? "descending" : "ascending";
      const other = first === "ascending" ? "descending" : "ascending";
      const order = heading.getAttribute("aria-sort") === first ? other : first;
      for (const each of heading.parentElement.cells) each.removeAttribute("aria-sort");
      heading.setAttribute("aria-sort", order);
      sort(order === "descending");
    });
  }
  for (const producers of document.querySelectorAll("table.sortable")) {
    const body = producers.tBodies[0];
    [...producers.tHead.rows[0].cells].forEach((heading, column) => sortable(heading, (down) => {
      const isNumber = heading.classList.contains("number");
      const value = (row) => {
        const text = row.cells[column].textContent.trim();
        return isNumber ? Number(text.replaceAll(",", "").replace("–", "-1")) : text;
      };
      body.append(...[...body.rows].sort((one, other) => {
        const [a, b] = [value(one), value(other)];
        return (down ? -1 : 1) * (isNumber ? a - b : a.localeCompare(b));
      }));
    }));
    id("filter").addEventListener("input", (event) => {
      const text = event.target.value.trim().toLowerCase();
      for (const row of body.rows) row.hidden = !row.textContent.toLowerCase().includes(text);
    });
  }

  addEventListener("beforeprint", () => { for (const each of document.querySelectorAll("details")) each.open = true; });
})();
