// The page of `fedskew watch`: a list of runs and one chosen run, drawn from server-sent events (see watch/app.py).
// Everything that comes from a run (names, methods, reasons) becomes text, never markup.
"use strict";
(() => {
  const at = id => document.getElementById(id);
  const TITLES = ["cells", "sites", "curves", "loss", "clients", "split", "costs", "lost", "settings"];
  let source = null, chosen = location.hash.slice(1), list = null, row = null;
  const drawn = {};  // name of a part -> { box, update, title, note }

  function make(kind, attributes = {}, ...children) {
    const made = document.createElement(kind);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children.map(child => typeof child === "number" ? String(child) : child));
    return made;
  }
  const now = () => Date.now() / 1000;

  // 75 -> "1 min", 4000 -> "1 h 6 min"
  function span(seconds) {
    if (seconds < 60) return `${Math.max(0, Math.round(seconds))} s`;
    if (seconds < 3600) return `${Math.round(seconds / 60)} min`;
    if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.round(seconds % 3600 / 60)} min`;
    return `${Math.floor(seconds / 86400)} d ${Math.round(seconds % 86400 / 3600)} h`;
  }
  const left = run => run.state !== "running" ? "" : run.ends === null ? "not known yet" : run.ends < now() ? "soon" : span(run.ends - now());
  const ago = run => run.written ? `${span(now() - run.written)} ago` : "no round yet";
  const state = run => make("span", { class: `state ${run.state}` }, run.state);
  const rounds = run => `${run.round.toLocaleString("en")}${run.rounds ? ` / ${run.rounds.toLocaleString("en")}` : ""}${run.unit ? ` ${run.unit}` : ""}`;

  function line(run) {
    const name = make("a", { class: "name", href: `#${run.id}` }, run.name);
    const bar = make("progress", { max: run.rounds || 1, value: run.round, "aria-label": "done" });
    const cell = (...inside) => make("td", {}, ...inside);
    const text = (...inside) => make("td", { class: "text" }, ...inside);
    return make("tr", { "aria-current": row !== null && run.id === row.id },
      cell(name), text(state(run)), cell(rounds(run), bar), cell(run.value), cell(left(run)), cell(ago(run)),
      text(run.method), text(run.data), cell(run.seed));
  }

  function paintList() {
    if (!list) return;
    at("folder").textContent = `Runs in ${list.folder}`;
    const box = at("runs"), body = box.querySelector("tbody");
    const focused = box.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
    list.runs.forEach((run, i) => {
      const here = body.children[i], key = JSON.stringify([run, left(run), ago(run), row !== null && run.id === row.id]);
      if (here && here.key === key) return;  // a long list is not laid out anew for one run
      const made = line(run);
      made.key = key;
      here ? here.replaceWith(made) : body.append(made);
    });
    while (body.children.length > list.runs.length) body.lastElementChild.remove();
    at("none").hidden = list.runs.length > 0;
    if (focused && !box.contains(document.activeElement)) box.querySelector(`[href="${focused}"]`)?.focus({ preventScroll: true });
    at("more").textContent = list.more ? `${list.more} older runs are not listed.` : "";
  }

  function paintRun() {
    if (!row) return;
    const box = at("run");
    if (!box.querySelector(".summary")) {
      box.replaceChildren(make("h2"), make("div", { class: "summary" }), make("p", { class: "warning", hidden: "" }),
        ...TITLES.map(name => make("div", { id: `part-${name}` })));
    }
    box.querySelector("h2").textContent = row.title;
    const value = row.value ? [make("b", {}, row.value), row.figure] : [row.unit ? "" : "not evaluated yet"];
    const time = row.state === "running" ? [`time left: ${left(row)}`] : [];
    box.querySelector(".summary").replaceChildren(...[[state(row)], value, [row.unit ? rounds(row) : `round ${rounds(row)}`], time, [row.now && `now: ${row.now}`],
      [row.seed && `seed ${row.seed}`], [row.unit ? `written ${ago(row)}` : `last round ${ago(row)}`]].filter(items => items.some(Boolean))
      .map(items => make("span", {}, ...items.flatMap(item => [item, " "]))));
    const why = box.querySelector(".warning");
    why.hidden = !row.why;
    why.textContent = row.why;
    document.title = `${row.state}: ${row.unit ? row.title : row.method} – fedskew watch`;
  }

  function frame(name, part) {
    const title = make("h3", {}, part.title), body = make("div", { class: part.kind === "table" || part.kind === "facts" ? "" : "chart" });
    const note = make("figcaption");
    at(`part-${name}`).replaceChildren(make("figure", {}, title, body, note));
    return { body, title, note, kind: part.kind, update: null };
  }

  function table(part) {
    const cell = text => make("td", text === "online" || text === "offline" ? { class: text } : {}, text);
    const head = make("tr", {}, ...part.columns.map(name => make("th", { scope: "col" }, name)));
    const made = make("table", {}, make("thead", {}, head), make("tbody", {}, ...part.rows.map(cells => make("tr", {}, ...cells.map(cell)))));
    const inside = [make("div", { class: `scroll table-part${part.text ? " as-text" : ""}`, tabindex: "0", role: "region", "aria-label": part.title }, made)];
    if (part.list && part.list.length) inside.push(make("h3", {}, part.list_title), make("ul", { class: "refused" }, ...part.list.map(text => make("li", {}, text))));
    return inside;
  }

  function paintPart(name, part) {
    if (drawn[name] && drawn[name].kind !== part.kind) delete drawn[name];
    const shown = drawn[name] = drawn[name] || frame(name, part);
    shown.title.textContent = part.title;
    shown.note.textContent = part.note || "";
    if (part.kind === "table") {
      const before = shown.body.querySelector(".table-part"), place = before ? [before.scrollTop, before.scrollLeft] : [0, 0];
      shown.body.replaceChildren(...table(part));
      const after = shown.body.querySelector(".table-part");
      [after.scrollTop, after.scrollLeft] = place;
    } else if (part.kind === "facts") {
      shown.body.replaceChildren(make("ul", { class: "facts" }, ...part.facts.map(([key, value]) => make("li", {}, make("b", {}, key), value))));
    } else if (shown.update) shown.update(part);
    else if (part.kind !== "text") shown.update = fedskewCharts.draw(shown.body, part);
  }

  function forgetParts() {
    for (const name of Object.keys(drawn)) delete drawn[name];
    row = null;
    at("run").replaceChildren();
  }

  function connect() {
    if (source) source.close();
    forgetParts();
    source = new EventSource(`events?run=${encodeURIComponent(chosen)}`);
    source.onopen = () => {
      at("connection").textContent = "live";
      at("connection").classList.remove("lost-connection");
    };
    source.onerror = () => {
      at("connection").textContent = "no connection to fedskew watch: what is shown may be old; trying again …";
      at("connection").classList.add("lost-connection");
      if (source.readyState === EventSource.CLOSED) setTimeout(connect, 3000);  // refused: the browser does not try again
    };
    source.addEventListener("list", event => { list = JSON.parse(event.data); paintList(); });
    source.addEventListener("run", event => {
      const told = JSON.parse(event.data);
      if (row && row.id !== told.row.id) forgetParts();  // the run that was shown is gone
      const first = row === null;
      row = told.row;
      paintRun();
      if (first) paintList();
      for (const name of Object.keys(drawn)) if (!told.parts.includes(name)) { delete drawn[name]; at(`part-${name}`).replaceChildren(); }
    });
    for (const name of TITLES) source.addEventListener(`part-${name}`, event => {
      const part = JSON.parse(event.data);
      if (row && part.run === row.id) paintPart(name, part);
    });
  }

  addEventListener("hashchange", () => { chosen = location.hash.slice(1); connect(); });
  setInterval(() => { paintList(); paintRun(); }, 5000);  // times pass
  connect();
})();
