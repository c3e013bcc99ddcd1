"use strict";
const $ = id => document.getElementById(id);
const NUMBERS = {temperature: false, top_p: false, max_tokens: true, max_nodes: true, seed: true};
const KINDS = {corrected: "corrected by the model", bonus: "bonus of the model", plain: "plain step"};
const NOTES = {
  beside: "Both run in one batch, so each pass of the model serves both: the rates compare tokens per pass.",
  after: "It runs once the other has ended: the rates compare the two ways, each on its own.",
  off: "",
};
let model = null, abort = null, steps = [], colours = new Map(), drawing = false;

class Told extends Error {}  // what the user is to read

function element(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

function show(error) {
  $("error").textContent = error;
  $("error").hidden = !error;
}

function colour(drafter) {  // a class per drafter, by order of appearance
  if (!colours.has(drafter)) colours.set(drafter, "d" + colours.size % 6);
  return colours.get(drafter);
}

async function ask(path, options = {}) {
  const headers = {"Content-Type": "application/json"};
  if ($("key").value) headers.Authorization = "Bearer " + $("key").value.trim();
  let answer;
  try {
    answer = await fetch(path, {...options, headers});
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Told("The server cannot be reached at " + location.origin + "; is it still running?");
  }
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => ({}));
  const reason = body.error?.message ?? "it gave no reason";
  const later = answer.headers.get("Retry-After");
  const again = later ? ` (try again in ${later} s)` : "";
  throw new Told(`The server refused (status ${answer.status}): ${reason}${again}`);
}

async function* events(answer) {  // the JSON of each server-sent event
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let read;
    try {
      read = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      read = {done: true};
    }
    if (read.done) throw new Told("The connection broke before the answer was complete.");
    const blocks = (rest + read.value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Told("The server stopped: " + event.error.message);
      yield event;
    }
  }
}

async function learn() {  // what is served
  const found = (await (await ask("/v1/models")).json()).data[0];
  model = found;
  const offered = found.speculation;
  $("method").replaceChildren(...offered.methods.map(name =>
    new Option(name === offered.default ? name + " (default)" : name, name)));
  $("method").value = offered.default;
  $("max_nodes").placeholder = `server decides, up to ${offered.max_nodes}`;
  $("chat").checked = found.has_chat_template;
  const law = offered.lossless ? "texts follow the model's own law" : "this verifier changes the law of the text";
  $("about").textContent = `${found.id}, context ${found.max_model_len} tokens; ${law}`;
}

function parameters() {
  const given = {};
  for (const [name, isWhole] of Object.entries(NUMBERS)) {
    const text = $(name).value.trim(), value = Number(text);
    const isGood = isWhole ? Number.isSafeInteger(value) : Number.isFinite(value);
    if (text && !isGood) {
      $(name).focus();
      throw new Told(`${name}: expected a ${isWhole ? "whole " : ""}number, got "${text}"; correct it or leave it empty.`);
    }
    if (text) given[name] = value;
  }
  return given;
}

function request(method) {  // path and body
  const {max_nodes, ...rest} = parameters(), prompt = $("prompt").value;
  const speculation = {method, trace: true, statistics: true};
  if (max_nodes !== undefined && method !== "none") speculation.max_nodes = max_nodes;
  const shared = {model: model.id, stream: true, speculation, ...rest};
  return $("chat").checked
    ? ["/v1/chat/completions", {...shared, messages: [{role: "user", content: prompt}]}]
    : ["/v1/completions", {...shared, prompt}];
}

class Lane {
  constructor(name) {
    this.name = name;
    this.text = $(name + "-text");
    this.text.replaceChildren();
    this.counts = new Map();
    this.tokens = this.passes = this.end = this.start = 0;
    this.final = null;
    this.draw();
  }

  async run(method) {
    const [path, body] = request(method);
    this.start = performance.now();
    const answer = await ask(path, {method: "POST", body: JSON.stringify(body), signal: abort.signal});
    for await (const event of events(answer)) {
      if (event.choices[0]?.speculation) this.add(event.choices[0].speculation);
      if (event.speculation) this.final = event.speculation;
      later();
    }
    this.draw();
  }

  add({spans, steps: done}) {
    const isDown = this.text.scrollHeight - this.text.scrollTop - this.text.clientHeight < 40;
    for (const span of spans) this.text.append(piece(span));
    for (const step of done) {
      this.tokens += step.generated;
      this.passes += 1;
      for (const node of step.accepted) this.count("accepted", step.drafters[node]);
      if (step.own !== null) this.count(step.kind, "");
      if (this.name === "draft") steps.push(step);
    }
    this.end = performance.now();
    if (isDown) this.text.scrollTop = this.text.scrollHeight;
  }

  count(kind, drafter) {
    const key = kind + "\n" + drafter;
    this.counts.set(key, (this.counts.get(key) ?? 0) + 1);
  }

  draw() {
    const tau = this.final?.tau ?? (this.passes ? this.tokens / this.passes : 0);
    const tokens = this.final?.generated ?? this.tokens;
    const rate = this.end > this.start ? tokens / (this.end - this.start) * 1000 : 0;
    const figures = {"tau, tokens per pass": tau.toFixed(2), "tokens/s": rate.toFixed(0), tokens, passes: this.passes};
    $(this.name + "-figures").replaceChildren(...Object.entries(figures).map(([name, value]) =>
      element("div", {}, element("dt", {textContent: name}), element("dd", {textContent: value}))));
    if (this.name === "draft") this.legend();
  }

  legend() {
    $("legend").replaceChildren(...[...this.counts].sort().map(([key, count]) => {
      const [kind, drafter] = key.split("\n");
      return element("li", {}, element("span", {className: look(kind, drafter), textContent: words(kind, drafter)}), ` ${count}`);
    }));
  }
}

const look = (kind, drafter) => `t ${kind} ${kind === "accepted" ? colour(drafter) : ""}`.trim();
const words = (kind, drafter) => kind === "accepted" ? `accepted from ${drafter}` : KINDS[kind];
const piece = ({text, kind, drafter}) =>
  element("span", {className: look(kind, drafter), textContent: text, title: words(kind, drafter)});

// The tree

const visible = text => text.replaceAll("\n", "\u23ce").replaceAll("\t", "\u21e5").replace(/^ /, "\u00b7");
const short = text => visible(text).length > 18 ? visible(text).slice(0, 17) + "\u2026" : visible(text);

function shape(step) {  // nodes with their places; the target's own token is the last one
  const own = step.accepted.at(-1) ?? -1, path = new Set(step.accepted);
  const nodes = step.tokens.map((text, i) => ({text, parent: step.parents[i], isOn: path.has(i),
    look: path.has(i) ? colour(step.drafters[i]) : "off",
    title: path.has(i) ? words("accepted", step.drafters[i]) : `drafted by ${step.drafters[i]}, not used`}));
  if (step.own !== null) nodes.push({text: step.own, parent: own, isOn: true, look: step.kind, title: KINDS[step.kind]});
  const root = {text: "text so far", look: "root", isOn: true, title: "what the tree continues", depth: 0, children: []};
  for (const node of nodes) {
    node.up = node.parent < 0 ? root : nodes[node.parent];
    node.depth = node.up.depth + 1;
    node.children = [];
    node.up.children.push(node);
  }
  let row = 0;
  (function place(node) {
    node.children.sort((a, b) => b.isOn - a.isOn).forEach(place);
    node.row = node.children.length ? node.children[0].row : row++;
  })(root);
  return {all: [root, ...nodes], rows: row};
}

function svg(tag, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

function drawTree(step) {
  const {all, rows} = shape(step), widths = [];
  for (const node of all) {
    node.width = 16 + 8 * [...short(node.text)].length;
    widths[node.depth] = Math.max(widths[node.depth] ?? 0, node.width);
  }
  const lefts = [10];
  widths.forEach((width, depth) => lefts.push(lefts[depth] + width + 34));
  const picture = svg("svg", {width: lefts.at(-1), height: rows * 34 + 16, role: "img", "aria-label": told(step)});
  for (const node of all) {
    node.x = lefts[node.depth];
    node.y = node.row * 34 + 10;
    if (!node.up) continue;
    const x = node.up.x + node.up.width, y = node.up.y + 13, half = node.x - 16;
    picture.append(svg("path", {d: `M${x} ${y}H${half}V${node.y + 13}H${node.x}`, class: node.isOn ? "on" : "off"}));
  }
  for (const node of all) {
    const group = svg("g", {class: "node"});
    group.append(svg("title", {}, `${visible(node.text)}: ${node.title}`),
      svg("rect", {x: node.x, y: node.y, width: node.width, height: 26, rx: 5, class: `${node.look} ${node.isOn ? "on" : ""}`}),
      svg("text", {x: node.x + 8, y: node.y + 18, class: node.isOn ? "" : "off-text"}, short(node.text)));
    picture.append(group);
  }
  $("tree").replaceChildren(picture);
}

function told(step) {
  if (!step.tokens.length) return `Nothing was drafted; the pass gave ${JSON.stringify(step.own ?? "")}.`;
  const accepted = step.accepted.map(node => step.tokens[node]).join("");
  const own = step.own === null ? "the text ended there" : `${JSON.stringify(step.own)}, ${KINDS[step.kind]}`;
  return `${step.tokens.length} drafted, ${step.accepted.length} accepted`
    + (accepted ? ` (${JSON.stringify(accepted)})` : "") + `; then ${own}.`;
}

function drawStep() {
  if (!steps.length) return;
  const slider = $("step");
  slider.max = steps.length;
  slider.disabled = false;
  if ($("follow").checked) slider.value = steps.length;
  const step = steps[slider.value - 1];
  $("at").value = slider.value;
  $("steps").value = steps.length;
  $("told").textContent = told(step);
  drawTree(step);
}

// Running

let lanes = [];

function later() {  // at most once per frame
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    for (const lane of lanes) lane.draw();
    if ($("follow").checked || steps.length < 2) drawStep();
    else { $("steps").value = steps.length; $("step").max = steps.length; }
  });
}

async function both(draft, plain, order) {
  const method = $("method").value;
  if (order === "beside") {
    const ends = await Promise.allSettled([draft.run(method), plain.run("none")]);
    const failed = ends.find(end => end.status === "rejected");
    if (failed) throw failed.reason;
    return;
  }
  await draft.run(method);
  if (order === "after") await plain.run("none");
}

async function run() {
  if (abort) return;
  abort = new AbortController();
  show("");
  steps = [];
  colours = new Map();
  const order = $("plain").value;
  lanes = [new Lane("draft"), new Lane("plain")];
  $("tree").replaceChildren();
  $("plain-note").textContent = NOTES[order];
  $("run").disabled = true;
  $("stop").disabled = false;
  $("status").textContent = "running";
  document.body.dataset.state = "running";
  try {
    if (!model) await learn();
    await both(...lanes, order);
    $("status").textContent = summary(...lanes);
  } catch (error) {
    const isStopped = error.name === "AbortError";
    $("status").textContent = isStopped ? "stopped" : "not finished";
    if (!isStopped) show(error instanceof Told ? error.message : `The page met an error: ${error.message}`);
  } finally {
    abort.abort();
    abort = null;
    later();
    $("run").disabled = false;
    $("stop").disabled = true;
    document.body.dataset.state = "done";
  }
}

function summary(draft, plain) {
  const tau = draft.final.tau.toFixed(2), rate = lane => lane.tokens / (lane.end - lane.start);
  const beside = plain.tokens ? `, ${(rate(draft) / rate(plain)).toFixed(2)} times the tokens per second of plain decoding` : "";
  return `done: ${tau} tokens per pass${beside}`;
}

$("form").addEventListener("submit", event => { event.preventDefault(); run(); });
$("stop").addEventListener("click", () => abort?.abort());
$("step").addEventListener("input", () => { $("follow").checked = false; drawStep(); });
$("follow").addEventListener("change", drawStep);
$("key").addEventListener("change", () => learn().then(() => show(""), error => show(error.message)));
document.addEventListener("keydown", event => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); run(); }
  if (event.key === "Escape") abort?.abort();
});
learn().catch(error => {
  $("about").textContent = "The server has not told what it serves; once the reason below is gone, Run asks again.";
  show(error.message);
});
