"use strict";
// Draws the curves and the answers of the JSON in #data. Foreign text becomes a text node, and
// Plotly, which reads some tags, gets it escaped.
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const LIGHT = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a8a8a"];
const DARK = ["#4fa8e0", "#f0894a", "#35c79a", "#e0a0c4", "#f2bb45", "#8fd0f7", "#a8a8a8"];
const darkMode = matchMedia("(prefers-color-scheme: dark)");
const pickColour = (i) => (darkMode.matches ? DARK : LIGHT)[i % LIGHT.length];
const escapeText = (text) =>
  String(text).replace(/[&<>]/g, (mark) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[mark]);

function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children.filter((child) => child !== null));
  return node;
}

function fillSelect(select, entries) {
  select.replaceChildren(...entries.map(([value, text]) => element("option", { value }, text)));
}

const formatNumber = (value) => (value === null || value === undefined ? "n/a" : String(Number(value.toPrecision(3))));

// ---------------------------------------------------------------------------------------- curves

// Mean of each value and its neighbours of the same stage; near the ends over those that exist.
function smoothen(values, window, stages) {
  if (window < 2) return values;
  const cut = stages.findIndex((stage) => stage !== stages[0]);
  if (cut > 0) {
    const rest = smoothen(values.slice(cut), window, stages.slice(cut));
    return [...smoothen(values.slice(0, cut), window, stages.slice(0, cut)), ...rest];
  }
  const half = Math.floor(window / 2), sums = [0];
  for (const value of values) sums.push(sums[sums.length - 1] + value);
  return values.map((_, i) => {
    const first = Math.max(0, i - half), end = Math.min(values.length, i + half + 1);
    return (sums[end] - sums[first]) / (end - first);
  });
}

function getPoints(run, metric, axis) {
  const series = metric && run.series[metric];
  if (!series) return null;
  const steps = series.rows.map((row) => run.axes.steps[row]);
  return {
    x: series.rows.map((row) => run.axes[axis][row]),
    y: series.values,
    steps,
    stages: steps.map((step) => run.stages.findIndex((stage) => step <= stage.last)),
  };
}

function fade(colour, opacity) {
  return colour + Math.round(opacity * 255).toString(16).padStart(2, "0");
}

// Mean and standard deviation of the runs of a group at the steps that all of them have. Tokens and
// hours of a step are the means of the runs.
function averageSeeds(members) {
  const tables = members.map((points) => new Map(points.steps.map((step, i) => [step, i])));
  const steps = members[0].steps.filter((step) => tables.every((table) => table.has(step)));
  const x = [], mean = [], low = [], high = [], stages = [];
  for (const step of steps) {
    const places = tables.map((table) => table.get(step));
    const values = members.map((points, i) => points.y[places[i]]);
    x.push(members.reduce((sum, points, i) => sum + points.x[places[i]], 0) / members.length);
    stages.push(members[0].stages[places[0]]);
    const average = values.reduce((a, b) => a + b, 0) / values.length;
    const square = values.reduce((a, b) => a + (b - average) ** 2, 0);
    const deviation = Math.sqrt(square / Math.max(1, values.length - 1));
    mean.push(average); low.push(average - deviation); high.push(average + deviation);
  }
  return { x, mean, low, high, stages };
}

function lineOf(x, y, colour, name, width = 1.8) {
  return { x, y, name: escapeText(name), type: "scatter", mode: x.length < 30 ? "lines+markers" : "lines",
    line: { color: colour, width }, marker: { size: 4 }, hovertemplate: "%{y:.4g}" };
}

function buildTraces(metrics, axis, window, seeds) {
  const traces = [], groups = new Map();
  data.runs.forEach((run, i) => {
    const points = getPoints(run, metrics[i], axis);
    if (!points) return;
    const key = seeds ? `group ${run.group}` : `run ${i}`;
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push({ ...points, run, colour: pickColour(seeds ? run.group : i) });
  });
  for (const group of groups.values()) {
    const started = group.filter((points) => points.steps.some((step) => step > 0));
    const members = started.length ? started : group;
    const { colour, run } = members[0];
    if (members.length > 1) {
      const average = averageSeeds(members);
      const band = { type: "scatter", mode: "lines", line: { width: 0 }, hoverinfo: "skip" };
      traces.push({ ...band, x: average.x, y: smoothen(average.low, window, average.stages) });
      traces.push({ ...band, x: average.x, y: smoothen(average.high, window, average.stages), fill: "tonexty", fillcolor: fade(colour, 0.2) });
      traces.push(lineOf(average.x, smoothen(average.mean, window, average.stages), colour, `mean of ${members.length}: ${run.label} ...`));
      continue;
    }
    const { x, y, stages } = members[0];
    if (window > 1) traces.push({ ...lineOf(x, y, fade(colour, 0.3), run.label, 1), hoverinfo: "skip", hovertemplate: null });
    traces.push(lineOf(x, smoothen(y, window, stages), colour, run.label));
  }
  return traces;
}

// The position of a step on an axis.
function placeOf(run, step, axis) {
  const row = run.axes.steps.findIndex((other) => other >= step);
  return run.axes[axis][row < 0 ? run.axes.steps.length - 1 : row];
}

// Bands where alarms were on and lines where stages begin, within the curves of a panel.
function buildBands(traces, axis) {
  const places = traces.flatMap((trace) => [trace.x[0], trace.x[trace.x.length - 1]]);
  const low = Math.min(...places), high = Math.max(...places), shapes = [];
  const add = (x0, x1, style) => {
    if (x1 >= low && x0 <= high)
      shapes.push({ xref: "x", yref: "paper", x0: Math.max(x0, low), x1: Math.min(x1, high), y0: 0, y1: 1, layer: "below", ...style });
  };
  data.runs.forEach((run, i) => {
    const fillcolor = data.runs.length > 1 ? fade(pickColour(byId("seeds").checked ? run.group : i), 0.15) : "rgba(208, 60, 50, 0.18)";
    for (const alarm of byId("show-alarms").checked ? run.alarms.slice(0, 100) : [])
      add(placeOf(run, alarm.first - 1, axis), placeOf(run, alarm.last, axis), { type: "rect", line: { width: 0 }, fillcolor });
    for (const stage of data.runs.length > 1 ? [] : run.stages.slice(1)) {
      const x = placeOf(run, stage.first, axis);
      add(x, x, { type: "line", line: { width: 1, dash: "dot", color: "#999999" } });
    }
  });
  return shapes;
}

function baseLayout() {
  const style = getComputedStyle(document.documentElement);
  const [text, line] = ["--text", "--line"].map((name) => style.getPropertyValue(name).trim());
  const axis = { gridcolor: line, zeroline: false, linecolor: line, automargin: true, exponentformat: "e", minexponent: 4 };
  const card = style.getPropertyValue("--card").trim();
  return { margin: { l: 46, r: 10, t: 8, b: 34 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { size: 11, color: text }, showlegend: false, hovermode: "x unified",
    hoverlabel: { bgcolor: card, bordercolor: line, font: { color: text } },
    xaxis: { ...axis, showgrid: false }, yaxis: { ...axis } };
}

// 1, 2 and 5 times the powers of ten: Plotly would label 0.5 as 5.
const LOG_TICKS = Array.from({ length: 39 }, (_, i) => Number(`${[1, 2, 5][i % 3]}e${Math.floor(i / 3) - 6}`));

const OPTIONS = { displayModeBar: false, responsive: true };

function drawPanel(panel) {
  const axis = byId("axis").value, window = panel.smooth ? Number(byId("smoothing").value) : 0;
  const layout = baseLayout();
  layout.xaxis.title = { text: axis, standoff: 4 };
  const traces = buildTraces(panel.metrics, axis, window, byId("seeds").checked);
  layout.shapes = buildBands(traces, axis);
  if (panel.log) Object.assign(layout.yaxis, { type: "log", tickvals: LOG_TICKS, ticktext: LOG_TICKS.map(String) });
  if (panel.share) layout.yaxis.range = [-0.03, 1.05];
  Plotly.react(panel.plot, traces, layout, OPTIONS);
}

function addPanel(panel) {
  panel.plot = element("div", { class: "plot" });
  byId("panels").append(element("div", { class: "panel" }, element("h3", {}, element("bdi", {}, panel.title)), panel.plot));
  panels.push(panel);
  drawPanel(panel);
}

const panels = [];
const drawPanels = () => panels.forEach(drawPanel);

function drawTimes() {
  byId("times").replaceChildren();
  for (const run of data.runs) {
    const parts = Object.entries(run.times.parts);
    if (!parts.length) continue;
    const plot = element("div", { class: "plot" });
    if (data.runs.length > 1) byId("times").append(element("h3", {}, element("bdi", {}, run.label)));
    byId("times").append(plot);
    const layout = { ...baseLayout(), barmode: "stack", bargap: 0.05, showlegend: true, legend: { orientation: "h", y: 1.18 } };
    layout.margin = { l: 46, r: 10, t: 34, b: 34 };
    layout.xaxis.title = { text: "steps", standoff: 4 };
    layout.yaxis.title = { text: "seconds a step" };
    const traces = parts.map(([name, y], i) => ({ type: "bar", name: escapeText(name), x: run.times.steps, y,
      marker: { color: pickColour(i) }, hovertemplate: "%{y:.3g} s" }));
    Plotly.newPlot(plot, traces, layout, OPTIONS);
  }
}

function drawLegend() {
  if (data.runs.length < 2) return;
  const seeds = byId("seeds").checked;
  byId("legend").replaceChildren(...data.runs.map((run, i) => {
    const mark = element("i");
    mark.style.background = pickColour(seeds ? run.group : i);
    return element("span", {}, mark, element("bdi", {}, run.label));
  }));
}

function startCurves() {
  data.panels.forEach((panel) => addPanel({ ...panel }));
  const metrics = [...new Set(data.runs.flatMap((run) => Object.keys(run.series)))].sort();
  fillSelect(byId("metric"), [["", "any metric ..."], ...metrics.map((name) => [name, name])]);
  byId("metric").addEventListener("change", (event) => {
    const name = event.target.value;
    if (name) addPanel({ title: name, metrics: data.runs.map(() => name), smooth: true });
    event.target.value = "";
  });
  const groups = new Set(data.runs.map((run) => run.group));
  if (groups.size === data.runs.length) {
    byId("seeds").checked = false;
    byId("seeds-label").hidden = true;
  }
  const rows = Math.max(...data.runs.map((run) => run.axes.steps.length));
  byId("smoothing").max = Math.min(1000, Math.max(50, Math.floor(rows / 10)));
  byId("smoothing").value = rows >= 40 ? Math.max(3, Math.floor(rows / 20)) : 0;
  const showWindow = () => {
    const window = Number(byId("smoothing").value);
    byId("smoothing-value").textContent = window > 1 ? `${window} points` : "off";
  };
  for (const id of ["axis", "show-alarms", "seeds"]) byId(id).addEventListener("change", () => { drawLegend(); drawPanels(); });
  byId("smoothing").addEventListener("input", () => { showWindow(); drawPanels(); });
  darkMode.addEventListener("change", () => { drawLegend(); drawPanels(); drawTimes(); });
  showWindow();
  drawLegend();
  drawPanels();
  drawTimes();
}

// ---------------------------------------------------------------------------------------- answers

// The class of the band that a number is in: p for probabilities, e for entropies, r for ratios.
function bandOf(kind, value) {
  const band = data.bands[kind].findIndex((upper) => value < upper);
  return kind + (band < 0 ? data.bands[kind].length : band);
}

const numberAt = (list, i) => (list && typeof list[i] === "number" ? list[i] : null);

function piecesOf(answer) {
  return answer.tokens || (answer.text || "").match(/\s+|[^\s]+/g) || [];
}

function classOf(answer, i) {
  const logprob = answer.logprobs ? answer.logprobs[i] : undefined;
  if (answer.logprobs && logprob === null) return "ob";
  const advantage = answer.advantages ? answer.advantages[i] : answer.advantage;
  const kinds = [];
  if (logprob !== undefined) kinds.push(bandOf("p", Math.exp(Math.min(logprob, 0))));
  const entropy = numberAt(answer.entropies, i), ratio = numberAt(answer.ratios, i);
  if (entropy !== null) kinds.push(bandOf("e", entropy));
  if (ratio !== null) kinds.push(bandOf("r", ratio));
  if (advantage) kinds.push(advantage > 0 ? "aup" : "adown");
  return kinds.join(" ");
}

// Which pieces are not in the longest common subsequence with another answer.
function findNew(pieces, others) {
  if (!others || pieces.length * others.length > 400000) return new Set();
  const lengths = Array.from({ length: pieces.length + 1 }, () => new Uint16Array(others.length + 1));
  for (let i = pieces.length - 1; i >= 0; i--)
    for (let j = others.length - 1; j >= 0; j--)
      lengths[i][j] = pieces[i] === others[j] ? lengths[i + 1][j + 1] + 1 : Math.max(lengths[i + 1][j], lengths[i][j + 1]);
  const fresh = new Set();
  for (let i = 0, j = 0; i < pieces.length; )
    if (j < others.length && pieces[i] === others[j]) { i++; j++; }
    else if (j < others.length && lengths[i][j + 1] >= lengths[i + 1][j]) j++;
    else fresh.add(i++);
  return fresh;
}

function renderAnswer(answer, { title = null, before = null } = {}) {
  const facts = [`reward ${formatNumber(answer.reward)}`];
  if (answer.advantage !== null) facts.push(`advantage ${formatNumber(answer.advantage)}`);
  if (answer.stop) facts.push(answer.stop);
  facts.push(`${answer.length} ${answer.unit}`);
  for (const [name, value] of Object.entries(answer.metrics)) facts.push(`${name} ${formatNumber(value)}`);
  const side = answer.advantage ? answer.advantage : answer.advantage === null && answer.score !== null ? answer.score - 0.5 : 0;
  const article = element("article", { class: `${side > 0 ? "up" : side < 0 ? "down" : ""}${answer.html ? " wide" : ""}` });
  if (title) article.append(element("p", {}, element("b", {}, title)));
  article.append(element("p", {}, facts.join(" · ")));
  if (answer.error) article.append(element("p", { class: "error" }, answer.error));
  if (answer.html) { // rendered and escaped by rl/reporting/episode_html.py
    const body = element("div");
    body.innerHTML = answer.html;
    article.append(body);
    return article;
  }
  const pieces = piecesOf(answer), fresh = before ? findNew(pieces, piecesOf(before)) : new Set();
  const body = element("pre", { dir: "auto" });
  pieces.forEach((piece, i) => {
    const span = element("span", { class: classOf(answer, i) + (fresh.has(i) ? " new" : "") }, piece);
    const logprob = numberAt(answer.logprobs, i), notes = [];
    if (logprob !== null) notes.push(`logprob ${logprob}, p ${Math.exp(Math.min(logprob, 0)).toFixed(3)}`);
    for (const [name, values] of [["entropy", answer.entropies], ["ratio", answer.ratios]])
      if (numberAt(values, i) !== null) notes.push(`${name} ${values[i]}`);
    if (notes.length) span.title = notes.join(", ");
    body.append(span);
  });
  if (answer.tokens && answer.length > answer.tokens.length) body.append(` [... ${answer.length - answer.tokens.length} tokens more ...]`);
  article.append(body);
  return article;
}

function renderProblem(problem) {
  const nodes = [];
  const name = [problem.tag, problem.number].filter((part) => part !== undefined).join(" ");
  const line = element("p", {}, element("bdi", {}, name));
  if (problem.expected !== undefined) line.append(element("span", { class: "expected" }, ", expected answer ", element("bdi", {}, problem.expected)));
  nodes.push(line);
  if (problem.prompt !== undefined) nodes.push(element("pre", { class: "prompt", dir: "auto" }, problem.prompt));
  return nodes;
}

const currentRollouts = () => data.runs[Number(byId("run").value)].rollouts;
const describeMean = (entry) => (entry.mean === null ? "" : `, mean ${formatNumber(entry.mean)}`);

function listSeries() {
  const series = new Map();
  for (const entry of currentRollouts().evaluations) {
    const key = `${entry.stage}${entry.greedy ? ", greedy" : ", sampled"}`;
    if (!series.has(key)) series.set(key, []);
    series.get(key).push(entry);
  }
  return series;
}

function describeChange(answers) {
  const words = answers.map((answer) => (answer.score === null ? "no score" : answer.score > 0.5 ? "right" : "wrong"));
  return words.join(", ");
}

// The first, the middle and the last item.
function selectThree(items) {
  return [...new Set([items[0], items[Math.floor((items.length - 1) / 2)], items[items.length - 1]])];
}

function showProblem() {
  const entries = listSeries().get(byId("series").value) || [];
  const number = Number(byId("problem").value);
  const answers = entries.map((entry) => entry.rows.find((row) => row.problem === number) || null);
  const first = answers.find(Boolean);
  byId("problem-view").replaceChildren();
  if (!first) {
    byId("problem-view").append(element("p", { class: "note" }, "No held-out answers are stored: a run writes rollouts/*-eval-*.jsonl at its evaluations."));
    return;
  }
  const row = element("div", { class: "answers" });
  const places = entries.map((_, i) => i).filter((i) => answers[i]);
  const shown = byId("every").checked ? places : selectThree(places);
  shown.forEach((place, i) => {
    const before = i ? answers[shown[i - 1]] : null;
    row.append(renderAnswer(answers[place], { title: `step ${entries[place].step}`, before }));
  });
  byId("every-label").hidden = places.length < 4;
  byId("problem-view").append(element("div", { class: "group" }, ...renderProblem(first), row));
}

function listProblems() {
  const entries = listSeries().get(byId("series").value) || [];
  const numbers = [...new Set(entries.flatMap((entry) => entry.rows.map((row) => row.problem)))];
  fillSelect(byId("problem"), numbers.map((number) => {
    const answers = entries.map((entry) => entry.rows.find((row) => row.problem === number));
    const first = answers.find(Boolean);
    return [number, `${describeChange(selectThree(answers.filter(Boolean)))}: ${(first.prompt || String(first.number)).slice(0, 60)}`];
  }));
  showProblem();
}

function moveProblem(distance) {
  const select = byId("problem");
  select.selectedIndex = Math.min(select.length - 1, Math.max(0, select.selectedIndex + distance));
  showProblem();
}

function readLimit(id, fallback) {
  return byId(id).value === "" ? fallback : Number(byId(id).value);
}

function passes(answer) {
  const reward = answer.reward === null ? 0 : answer.reward;
  const words = byId("words").value.toLowerCase(), tag = byId("tag").value;
  return reward >= readLimit("reward-low", -Infinity) && reward <= readLimit("reward-high", Infinity) &&
    answer.length >= readLimit("length-low", 0) && answer.length <= readLimit("length-high", Infinity) &&
    (!tag || answer.tag === tag) &&
    (!words || `${answer.prompt || ""}\n${answer.html || piecesOf(answer).join("")}`.toLowerCase().includes(words));
}

function linkTo(rollouts, name) {
  return element("a", { href: `${rollouts.link}/${encodeURIComponent(name)}` }, name);
}

function showSource() {
  const rollouts = currentRollouts(), [kind, index] = byId("source").value.split(" ");
  const view = byId("source-view"), note = byId("source-note");
  view.replaceChildren();
  note.replaceChildren();
  if (!kind) {
    note.append(byId("alarm").value ? "No answers are stored of the steps of this alarm." : "This run stores no answers (rollouts_every is 0).");
    return;
  }
  const entry = kind === "batch" ? rollouts.batches[index] : rollouts.evaluations[index];
  const groups = kind === "batch" ? entry.groups : entry.rows.map((row) => ({ ...row, size: 1, answers: [row] }));
  let shown = 0;
  for (const group of groups) {
    const answers = group.answers.filter(passes);
    if (!answers.length) continue;
    shown += answers.length;
    const row = element("div", { class: "answers" });
    answers.forEach((answer, i) => {
      const title = answers.length < 2 || answers[0].reward === answers[answers.length - 1].reward ? null : i === 0 ? "best" : i === answers.length - 1 ? "worst" : null;
      row.append(renderAnswer(answer, { title }));
    });
    view.append(element("div", { class: "group" }, ...renderProblem(group), row));
  }
  const total = kind === "batch" ? entry.num_answers : entry.answers;
  note.append(`${shown} of ${total} answers; all are in `, linkTo(rollouts, entry.file));
  if (entry.page) note.append(", with a page of their own: ", linkTo(rollouts, entry.page));
}

function showRun() {
  const rollouts = currentRollouts(), series = [...listSeries().keys()];
  fillSelect(byId("series"), series.map((name) => [name, name]));
  byId("series").value = series.filter((name) => name.endsWith(", sampled")).pop() || series[0] || "";
  const answers = [...rollouts.batches.flatMap((entry) => entry.groups.flatMap((group) => group.answers)), ...rollouts.evaluations.flatMap((entry) => entry.rows)];
  const tags = [...new Set(answers.map((answer) => answer.tag).filter((tag) => tag !== undefined))].sort();
  fillSelect(byId("tag"), [["", "any"], ...tags.map((tag) => [tag, tag])]);
  byId("tag-label").hidden = tags.length < 2;
  const names = [...new Set(currentAlarms().map((alarm) => alarm.name))].sort();
  fillSelect(byId("alarm"), [["", "any step"], ...names.map((name) => [name, name])]);
  byId("alarm-label").hidden = !names.length;
  for (const [id, name] of [["entropy-label", "entropies"], ["ratio-label", "ratios"]])
    byId(id).hidden = !data.runs.some((run) => run.rollouts.token_values.includes(name));
  byId("files").replaceChildren(...rollouts.files.flatMap((name) => [linkTo(rollouts, name), " "]));
  listProblems();
  listSources();
}

const currentAlarms = () => data.runs[Number(byId("run").value)].alarms;

// The training steps and the evaluations, those of an alarm alone if one is selected.
function listSources() {
  const rollouts = currentRollouts(), alarm = byId("alarm").value;
  const during = (step) => !alarm || currentAlarms().some((item) => item.name === alarm && item.first <= step && step <= item.last);
  const describe = (entry) => (entry.alarms.length ? `, alarms: ${entry.alarms.join(", ")}` : "");
  const batches = rollouts.batches.map((entry, i) => [`batch ${i}`, `step ${entry.step}: groups of training${describe(entry)}`, entry.step]);
  const evaluations = rollouts.evaluations.map((entry, i) => [`evaluation ${i}`,
    `step ${entry.step}: held-out${entry.greedy ? ", greedy" : ""}, ${entry.stage}${describeMean(entry)}`, entry.step]);
  const sources = [...batches, ...evaluations].filter(([, , step]) => during(step));
  fillSelect(byId("source"), sources);
  const last = sources.filter(([key]) => key.startsWith("batch")).pop();
  if (last) byId("source").value = last[0];
  showSource();
}

function startAnswers() {
  fillSelect(byId("run"), data.runs.map((run, i) => [i, run.label]));
  byId("run-label").hidden = data.runs.length < 2;
  byId("run").addEventListener("change", showRun);
  byId("series").addEventListener("change", listProblems);
  byId("problem").addEventListener("change", showProblem);
  byId("previous").addEventListener("click", () => moveProblem(-1));
  byId("next").addEventListener("click", () => moveProblem(1));
  byId("every").addEventListener("change", showProblem);
  byId("alarm").addEventListener("change", listSources);
  for (const id of ["source", "tag", "reward-low", "reward-high", "length-low", "length-high", "words"]) byId(id).addEventListener("input", showSource);
  for (const radio of document.querySelectorAll('input[name="colour"]'))
    radio.addEventListener("change", () => { document.body.className = radio.value; });
  showRun();
}

startAnswers();
startCurves();
document.body.dataset.drawn = `${panels.length} panels`;
