// Charts of fedskew's pages: plain data drawn as SVG, without a library. `fedskewCharts.draw(box, chart)` draws a chart
// into an element and may be called again with new data. Colours of text and lines come from page.css.
"use strict";
const fedskewCharts = (() => {
  // Tableau's ten: easy to tell apart on white and on black; dashes tell apart what comes after
  const COLOURS = ["#4e79a7", "#f28e2b", "#e15759", "#76b7b2", "#59a14f", "#edc948", "#b07aa1", "#ff9da7", "#9c755f", "#bab0ac"];
  const DASHES = ["", "7 4", "2 3"];
  const HEAT = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];  // viridis
  const LETTER = 6.9;  // width of a letter, in pixels
  const colour = i => COLOURS[i % COLOURS.length];
  const dash = i => DASHES[Math.floor(i / COLOURS.length) % DASHES.length];
  const narrow = () => window.innerWidth < 640;

  // Names are data of users: they only ever become text, never markup.
  function node(kind, attributes = {}, text = null) {
    const isSvg = ["svg", "g", "path", "rect", "circle", "line", "text", "tspan", "polygon"].includes(kind);
    const made = isSvg ? document.createElementNS("http://www.w3.org/2000/svg", kind) : document.createElement(kind);
    for (const [key, value] of Object.entries(attributes)) {
      if (key === "style") made.style.cssText = value;  // a page may forbid style attributes, but not this
      else made.setAttribute(key, value);
    }
    if (text !== null) made.textContent = text;
    return made;
  }
  const add = (parent, ...rest) => parent.appendChild(node(...rest));

  // Text in as many lines as the width needs; returns how many.
  function wrapped(text, width) {
    const most = Math.max(4, Math.floor(width / LETTER)), lines = [];
    let rest = String(text);
    while (rest.length > most) {
      const at = Math.max(...[" ", ",", ":", "-", "_", "/"].map(mark => rest.lastIndexOf(mark, most - 1)));
      const cut = at > most / 3 ? at + 1 : most;
      lines.push(rest.slice(0, cut));
      rest = rest.slice(cut);
    }
    return [...lines, rest];
  }
  function label(parent, lines, x, y, anchor = "end") {
    const top = y - (lines.length - 1) * 7 + 4;
    const text = add(parent, "text", { x, y: top, "text-anchor": anchor });
    lines.forEach((line, i) => add(text, "tspan", { x, dy: i ? 14 : 0 }, line));
  }

  function ticks(low, high, count, whole) {
    const raw = (high - low) / Math.max(count, 1) || 1, power = 10 ** Math.floor(Math.log10(raw));
    let step = [1, 2, 5, 10].map(k => k * power).find(s => s >= raw * 0.999) || raw;
    if (whole) step = Math.max(1, Math.round(step));
    const made = [];
    for (let v = Math.ceil(low / step) * step; v <= high + step * 1e-6; v += step) made.push(Number(v.toPrecision(10)));
    return made;
  }
  const shown = (value, digits = 2) => value === null || value === undefined ? "–" : Number(value.toFixed(digits)).toLocaleString("en");
  // with all its decimals, as a table shows it
  const fixed = (value, digits) => value === null || value === undefined ? "–" : value.toFixed(digits);

  const tip = (() => {
    let box = null;
    return (event, lines) => {
      box = box || document.body.appendChild(node("div", { class: "tip", hidden: "" }));
      box.hidden = !lines;
      if (!lines) return;
      box.replaceChildren(...lines.map(([text, mark]) => {
        const line = node("div", {}, mark ? "" : text);
        if (mark) { add(line, "span", { style: `color:${mark}` }, "● "); line.append(text); }
        return line;
      }));
      const left = event.clientX + 14 + box.offsetWidth > window.innerWidth ? event.clientX - box.offsetWidth - 14 : event.clientX + 14;
      box.style.left = `${Math.max(4, left)}px`;
      box.style.top = `${Math.min(event.clientY + 12, window.innerHeight - box.offsetHeight - 4)}px`;
    };
  })();
  const forget = element => element.addEventListener("pointerleave", () => tip(null, null));

  // mean by round for each method, with a band of one standard deviation; series: {name, colour, points: [[x, mean, std]]}
  function lines(svg, chart, view, width, hidden) {
    const series = view.series.filter(s => !hidden.has(s.name));
    const height = narrow() ? 260 : 340, left = 46, right = 12, top = 8, bottom = 40;
    const all = series.flatMap(s => s.points);
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    if (!all.length) { add(svg, "text", { x: left, y: 40, class: "soft-text" }, "no values"); return height; }
    const xs = all.map(p => p[0]), ys = all.flatMap(p => [p[1] - p[2], p[1] + p[2]]);
    let [low, high] = [Math.min(...ys), Math.max(...ys)];
    const room = Math.max((high - low) * 0.06, 0.5e-9 + Math.abs(high) * 0.01);
    [low, high] = [low - room, high + room];
    if (chart.unit === "%") [low, high] = [Math.max(0, low), Math.min(100, high)];
    const [first, last] = [Math.min(...xs), Math.max(...xs)];
    const x = v => left + (width - left - right) * (last > first ? (v - first) / (last - first) : 0.5);
    const y = v => height - bottom - (height - top - bottom) * (v - low) / (high - low || 1);
    const marks = ticks(low, high, 6, false), digits = Math.ceil(-Math.log10(marks[1] - marks[0]));  // that tell them apart
    for (const v of marks) {
      add(svg, "line", { class: "grid-line", x1: left, x2: width - right, y1: y(v), y2: y(v) });
      add(svg, "text", { x: left - 6, y: y(v) + 4, "text-anchor": "end", class: "soft-text" }, shown(v, Math.max(2, Math.min(digits || 2, 9))));
    }
    for (const v of ticks(first, last, Math.min(12, width / 70), true)) {
      add(svg, "text", { x: x(v), y: height - bottom + 18, "text-anchor": "middle", class: "soft-text" }, shown(v, 0));
    }
    add(svg, "text", { x: (left + width) / 2, y: height - 4, "text-anchor": "middle", class: "soft-text" }, chart.x);
    for (const s of series) {
      if (s.points.some(p => p[2])) {
        const edge = [...s.points.map(p => [p[0], p[1] + p[2]]), ...s.points.map(p => [p[0], p[1] - p[2]]).reverse()];
        const inside = v => Math.min(high, Math.max(low, v));
        add(svg, "polygon", { class: "band", fill: colour(s.colour), points: edge.map(([a, b]) => `${x(a)},${y(inside(b))}`).join(" ") });
      }
    }
    for (const s of series) {
      const path = s.points.map((p, i) => `${i ? "L" : "M"}${x(p[0]).toFixed(1)} ${y(p[1]).toFixed(1)}`).join("");
      add(svg, "path", { class: "curve", stroke: colour(s.colour), "stroke-dasharray": dash(s.colour), d: path });
      if (s.points.length < 30) for (const p of s.points) add(svg, "circle", { cx: x(p[0]), cy: y(p[1]), r: 2.6, fill: colour(s.colour) });
    }
    const cursor = add(svg, "line", { class: "cursor", y1: top, y2: height - bottom, visibility: "hidden" });
    const known = [...new Set(xs)].sort((a, b) => a - b);
    svg.onpointermove = event => {
      const box = svg.getBoundingClientRect(), at = (event.clientX - box.left) * width / box.width;
      const near = known.reduce((best, v) => Math.abs(x(v) - at) < Math.abs(x(best) - at) ? v : best, known[0]);
      for (const end of ["x1", "x2"]) cursor.setAttribute(end, x(near));
      cursor.setAttribute("visibility", "visible");
      const here = series.map(s => [s, s.points.find(p => p[0] === near)]).filter(([, p]) => p).sort((a, b) => b[1][1] - a[1][1]);
      const text = ([s, p]) => [`${s.name}: ${fixed(p[1], 2)}${p[2] ? ` ± ${fixed(p[2], 2)}` : ""} ${chart.unit}`, colour(s.colour)];
      tip(event, [[`${chart.x} ${shown(near, 0)}`], ...here.map(text)]);
    };
    svg.addEventListener("pointerleave", () => cursor.setAttribute("visibility", "hidden"));
    return height;
  }

  // stacked horizontal bars; parts: {name of the part: [value of each name]}
  function bars(svg, chart, view, width) {
    const most = Math.max(...chart.names.map((_, i) => Object.values(chart.parts).reduce((sum, v) => sum + v[i], 0)), 1e-9);
    const longest = Math.max(...chart.names.map(n => n.length)) * LETTER;
    const left = Math.min(longest + 10, width * 0.42), right = 66;
    const rows = chart.names.map(name => wrapped(name, left - 10));
    let y = 4;
    chart.names.forEach((name, i) => {
      const tall = Math.max(24, rows[i].length * 14 + 8);
      let x = left;
      label(svg, rows[i], left - 8, y + tall / 2);
      Object.entries(chart.parts).forEach(([part, values], k) => {
        const long = (width - left - right) * values[i] / most;
        const bar = add(svg, "rect", { x, y: y + tall / 2 - 9, width: Math.max(0, long), height: 18, fill: colour(k) });
        bar.onpointermove = event => tip(event, [[name], [`${part}: ${shown(values[i])} ${chart.unit}`, colour(k)]]);
        forget(bar);
        x += long;
      });
      const total = Object.values(chart.parts).reduce((sum, v) => sum + v[i], 0);
      add(svg, "text", { x: x + 6, y: y + tall / 2 + 4, class: "soft-text" }, shown(total, total < 10 ? 2 : 0));
      y += tall;
    });
    svg.setAttribute("viewBox", `0 0 ${width} ${y + 4}`);
    return y + 4;
  }

  function columnLabels(svg, names, x, y, step, width) {
    const longest = Math.max(...names.map(n => n.length)) * LETTER;
    const skip = longest + 6 <= step ? 1 : Math.ceil((/^\d+$/.test(names.join("")) ? longest + 8 : 15) / step);
    const slanted = longest > step * skip;
    const most = Math.floor(130 / LETTER);
    names.forEach((name, i) => {
      if (i % skip) return;
      const text = name.length > most ? name.slice(0, most - 1) + "…" : name;  // the tip has the whole name
      const at = slanted ? { transform: `translate(${x(i) + 4},${y}) rotate(-40)`, "text-anchor": "end" } : { x: x(i), y, "text-anchor": "middle" };
      add(svg, "text", at, text);
    });
    return slanted ? Math.min(longest, 130) * 0.68 + 12 : 18;
  }

  function shade(share) {
    const at = Math.min(1, Math.max(0, share)) * (HEAT.length - 1), i = Math.min(HEAT.length - 2, Math.floor(at));
    const mix = HEAT[i].map((v, k) => Math.round(v + (HEAT[i + 1][k] - v) * (at - i)));
    return [`rgb(${mix})`, 0.299 * mix[0] + 0.587 * mix[1] + 0.114 * mix[2] > 140 ? "#10151a" : "#ffffff"];
  }

  // a heat map; view.values[y][x], null is a gap; low and high, of the view or the chart, are the ends of the colour scale
  function heat(svg, chart, view, width) {
    const { low, high, unit, digits, reverse } = { ...chart, ...view };
    const share = at => reverse ? 1 - at : at;
    const xNames = chart.columns, yNames = view.rows || chart.rows;
    const longest = Math.max(...yNames.map(n => n.length)) * LETTER;
    const left = Math.min(longest + 12, width * 0.36), top = chart.x ? 20 : 4;
    const step = Math.min((width - left - 6) / xNames.length, 64), rows = yNames.map(name => wrapped(name, left - 12));
    const tall = rows.map(r => Math.max(22, r.length * 14 + 8, xNames.length === yNames.length ? Math.min(step, 40) : 0));
    const withText = step >= 27;
    let y = top;
    if (chart.x) add(svg, "text", { x: left, y: 12, class: "soft-text" }, `${chart.x} →${chart.y ? `, ${chart.y} ↓` : ""}`);
    view.values.forEach((row, j) => {
      label(svg, rows[j], left - 8, y + tall[j] / 2);
      row.forEach((value, i) => {
        const [fill, ink] = value === null ? ["", ""] : shade(share((value - low) / (high - low || 1)));
        const look = value === null ? { class: "gap" } : { fill };
        const cell = add(svg, "rect", { x: left + i * step, y, width: Math.max(step - 1, 0.5), height: tall[j] - 1, ...look });
        const more = view.counts ? ` (${view.counts[j][i].toLocaleString("en")} samples)` : "";
        cell.onpointermove = event => tip(event, [[`${yNames[j]}, ${xNames[i]}: ${shown(value, digits + 1)} ${unit}${more}`]]);
        forget(cell);
        if (withText && value !== null) {
          const at = { x: left + (i + 0.5) * step - 0.5, y: y + tall[j] / 2 + 3.5, "text-anchor": "middle" };
          add(svg, "text", { ...at, style: `fill:${ink};pointer-events:none;font-size:11px` }, fixed(value, digits));
        }
      });
      y += tall[j];
    });
    y += 4 + columnLabels(svg, xNames, i => left + (i + 0.5) * step, y + 14, step, width);
    for (let k = 0; k < 60; k++) add(svg, "rect", { x: left + 2 * k, y, width: 2.5, height: 8, fill: shade(share(k / 59))[0] });
    add(svg, "text", { x: left - 6, y: y + 8, "text-anchor": "end", class: "soft-text" }, shown(low));
    add(svg, "text", { x: left + 126, y: y + 8, class: "soft-text" }, `${shown(high)} ${unit}`);
    svg.setAttribute("viewBox", `0 0 ${width} ${y + 14}`);
    return y + 14;
  }

  // who has what: a dot's area is a number of samples; points: [[column, row, samples]]
  function dots(svg, chart, view, width) {
    const longest = Math.max(...chart.rows.map(n => n.length)) * LETTER;
    const left = Math.min(longest + 12, width * 0.36), rows = chart.rows.map(name => wrapped(name, left - 12));
    const step = (width - left - 8) / chart.columns.length, tall = Math.max(20, ...rows.map(r => r.length * 14 + 4));
    const most = Math.max(...chart.points.map(p => p[2]), 1), widest = Math.max(2, Math.min(step, tall) * 0.48);
    const radius = n => Math.max(0.8, widest * Math.sqrt(n / most));
    const top = 22, x = i => left + (i + 0.5) * step, y = j => top + (j + 0.5) * tall;
    add(svg, "text", { x: left, y: 12, class: "soft-text" }, `${chart.x} →, ${chart.y} ↓`);
    chart.rows.forEach((_, j) => {
      label(svg, rows[j], left - 8, y(j));
      add(svg, "line", { class: "grid-line", x1: left, x2: width - 8, y1: y(j), y2: y(j) });
    });
    for (const [i, j, n] of chart.points) {
      const dot = add(svg, "circle", { cx: x(i).toFixed(1), cy: y(j), r: radius(n).toFixed(2), fill: colour(0), opacity: 0.85 });
      dot.onpointermove = event => tip(event, [[`${chart.one} ${chart.columns[i]}, ${chart.rows[j]}: ${n.toLocaleString("en")} samples`]]);
      forget(dot);
    }
    let end = top + chart.rows.length * tall;
    end += 4 + columnLabels(svg, chart.columns, x, end + 14, step, width);
    let at = Math.max(left, 62);
    add(svg, "text", { x: at - 6, y: end + widest + 4, "text-anchor": "end", class: "soft-text" }, "samples");
    for (const n of [...new Set([most, most / 4, most / 20].map(n => Math.max(1, Number(n.toPrecision(1 + (n > 99))))))]) {
      const r = radius(n);
      add(svg, "circle", { cx: at + r, cy: end + widest, r, fill: colour(0), opacity: 0.85 });
      add(svg, "text", { x: at + 2 * r + 5, y: end + widest + 4, class: "soft-text" }, n.toLocaleString("en"));
      at += 2 * r + 24 + String(n).length * LETTER;
    }
    svg.setAttribute("viewBox", `0 0 ${width} ${end + 2 * widest + 6}`);
    return end + 2 * widest + 6;
  }

  // a cloud of points [[x, y, class]], coloured by class
  function points(svg, chart, view, width, hidden) {
    const height = Math.min(width, 360), edge = 8;
    const span = k => [Math.min(...chart.points.map(p => p[k])), Math.max(...chart.points.map(p => p[k]))];
    const [xs, ys] = [span(0), span(1)];
    const place = (v, [low, high], size) => edge + (size - 2 * edge) * (v - low) / (high - low || 1);
    for (const [a, b, c] of chart.points) {
      if (hidden.has(chart.labels[c])) continue;
      const dot = add(svg, "circle", { cx: place(a, xs, width).toFixed(1), cy: place(b, ys, height).toFixed(1), r: 3, fill: colour(c), opacity: 0.85 });
      if (c >= COLOURS.length) { dot.setAttribute("stroke", "var(--ink)"); dot.setAttribute("stroke-width", 1); }
      dot.onpointermove = event => tip(event, [[chart.labels[c], colour(c)]]);
      forget(dot);
    }
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    return height;
  }

  const KINDS = { lines, bars, heat, dots, points };

  function legend(chart, view) {
    if (chart.kind === "lines") return view.series.map(s => [s.name, s.colour]);
    if (chart.kind === "bars") return Object.keys(chart.parts).map((name, i) => [name, i]);
    if (chart.kind === "points") return [...new Set(chart.points.map(p => p[2]))].sort((a, b) => a - b).map(c => [chart.labels[c], c]);
    return [];
  }

  // Draw a chart into an element. `chart.views`, if there are several, become a switch; a view's `choices` a menu.
  // Returns a function that draws another chart of the same kind in its place: what the user chose stays chosen.
  function draw(box, chart) {
    const hidden = new Set(), state = { view: 0, choice: 0 };
    const controls = node("div", { class: "switch" }), keys = node("div", { class: "legend" }), holder = node("div");
    box.replaceChildren(controls, keys, holder);
    let views = chart.views || [{}];
    const current = () => views[state.view].choices ? views[state.view].choices[state.choice] : views[state.view];

    function menu(names, at, chosen) {
      const select = add(controls, "select", { "aria-label": "what to show" });
      names.forEach((name, i) => { const option = add(select, "option", { value: i }, name); option.selected = i === at; });
      select.onchange = () => chosen(select.selectedIndex);
    }
    function paintControls() {
      controls.replaceChildren();
      const go = i => { state.view = i; state.choice = 0; paint(); };
      if (views.length > (narrow() ? 3 : 7)) menu(views.map(v => v.name), state.view, go);
      else if (views.length > 1) views.forEach((view, i) => {
        add(controls, "button", { type: "button", "aria-pressed": i === state.view }, view.name).onclick = () => go(i);
      });
      const choices = views[state.view].choices;
      if (choices) menu(choices.map(c => c.name), state.choice, i => { state.choice = i; paint(); });
    }
    function paintLegend() {
      const names = legend(chart, current());
      keys.replaceChildren();
      if (names.length < 2) return;
      for (const [name, i] of names) {
        const button = add(keys, "button", { type: "button", "aria-pressed": !hidden.has(name) });
        const mark = add(button, "svg", { viewBox: "0 0 22 10", "aria-hidden": "true" });
        if (chart.kind === "lines") add(mark, "line", { x1: 0, x2: 22, y1: 5, y2: 5, stroke: colour(i), "stroke-width": 3, "stroke-dasharray": dash(i) });
        else add(mark, "rect", { x: 6, width: 10, height: 10, rx: 5, fill: colour(i) });
        button.append(name);
        button.onclick = () => { hidden.has(name) ? hidden.delete(name) : hidden.add(name); if (chart.kind !== "bars") paint(); };
      }
    }
    function paint() {
      const width = Math.max(260, Math.round(box.clientWidth));
      const svg = node("svg", { role: "img", "aria-label": chart.title });
      const height = KINDS[chart.kind](svg, chart, current(), width, hidden);
      svg.setAttribute("height", height);
      forget(svg);
      const focused = [...box.querySelectorAll("button, select")].indexOf(document.activeElement);
      paintControls();
      paintLegend();
      if (focused >= 0) box.querySelectorAll("button, select")[focused]?.focus();
      holder.replaceChildren(svg);
    }
    let before = 0;
    paint();
    new ResizeObserver(() => {
      if (Math.abs(box.clientWidth - before) > 2) { before = box.clientWidth; paint(); }
    }).observe(box);
    return next => {
      const same = (list, old) => Math.max(0, list.findIndex(v => v.name === old.name));
      const [was, choice] = [views[state.view], current()];
      [chart, views] = [next, next.views || [{}]];
      state.view = same(views, was);
      state.choice = views[state.view].choices ? same(views[state.view].choices, choice) : 0;
      paint();
    };
  }
  return { draw };
})();
