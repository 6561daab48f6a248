// Strip data: the positions of nodes and modules on the strip, and searches in them.

const LEAST_SHARE = 0.12; // part of the strip that all nodes share evenly, so that each node has a width
const MOST_LEVELS = 4; // of modules under the strip

function readStrip(raw) {
  const { nodes, stages } = raw;
  const text = (name) => nodes[name].map((number) => nodes.texts[number]);
  const columns = Object.fromEntries(["op", "module", "inputs", "outputs", "source"].map((name) => [name, text(name)]));
  const seconds = nodes.name.map(
    (_, i) => nodes.forward_seconds[i] + nodes.input_grad_seconds[i] + nodes.weight_grad_seconds[i],
  );
  const total = seconds.reduce((a, b) => a + b, 0);
  const stageOf = new Int32Array(seconds.length);
  for (const stage of stages) stageOf.fill(stage.index, stage.first_node, stage.first_node + stage.num_nodes);
  const levels = readLevels(columns.module);
  return { ...raw, nodes: { ...nodes, ...columns }, count: seconds.length, seconds, total, stageOf, levels };
}

// The start of each node and the end of the last; the total width is 1.
function placeNodes({ seconds, total, count }, isEven) {
  const places = new Float64Array(count + 1);
  const least = isEven || !total ? 1 : LEAST_SHARE;
  for (let i = 0; i < count; i++)
    places[i + 1] = places[i] + least / count + (total ? ((1 - least) * seconds[i]) / total : 0);
  return places;
}

// The modules at each depth as runs of nodes; a list and its members count as one level.
function readLevels(modules) {
  const paths = modules.map(splitPath);
  const depth = Math.min(MOST_LEVELS, Math.max(...paths.map((path) => path.length)));
  return Array.from({ length: depth }, (_, level) => runsAt(paths, level));
}

function splitPath(module) {
  const parts = [];
  for (const part of module ? module.split(".") : []) {
    if (/^\d+$/.test(part) && parts.length) parts[parts.length - 1] += `.${part}`;
    else parts.push(part);
  }
  return parts;
}

function runsAt(paths, level) {
  const runs = [];
  paths.forEach((path, i) => {
    const name = path.length > level ? path.slice(0, level + 1).join(".") : null;
    const last = runs.at(-1);
    if (name !== null && last?.path === name && last.last === i) last.last = i + 1;
    else if (name !== null) runs.push({ path: name, label: path[level], first: i, last: i + 1 });
  });
  return runs;
}

// The node at a position.
function nodeAt(places, position) {
  let low = 0,
    high = places.length - 2;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (places[middle] <= position) low = middle;
    else high = middle - 1;
  }
  return low;
}
