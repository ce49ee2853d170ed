"use strict";
// The interactive part of the page. User text enters the document as text content only, never as markup.

const data = JSON.parse(document.getElementById("data").textContent);
const find = (id) => document.getElementById(id);
const depth = Math.max(...data.models.map((model) => model.layers.length));
// point: where the chosen patch lies, as parts of height and width; token: number of a token beside the patches, or null
const state = { image: 0, step: data.start, head: null, point: { y: 0.5, x: 0.5 }, token: null, scale: "zero" };
const STRONGEST = 5;

// ---- weights: of the page itself, or asked of the server

function bytesOf(text) {
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer;
}

// the cell of `count` cells in which a part of the whole lies
const cellOf = (part, count) => Math.min(count - 1, Math.max(0, Math.floor(part * count)));

function patchOf(layer, point) {
  const [rows, columns] = layer.queries, [height, width] = layer.grid;
  const row = cellOf(point.y, rows), column = cellOf(point.x, columns);
  // the stored patch in the middle of this part of the grid
  return { number: row * columns + column, y: Math.floor(((row + 0.5) * height) / rows), x: Math.floor(((column + 0.5) * width) / columns) };
}

// what every map needs: for each head its entropy, its weights on tokens beside the patches, and its weights on the cells
function storedRows(model, image, layer) {
  const size = layer.cells[0] * layer.cells[1], beside = layer.beside.length, heads = layer.heads;
  const queries = layer.queries[0] * layer.queries[1] + beside;
  layer.unpacked ??= [];
  const bytes = (layer.unpacked[image] ??= bytesOf(layer.rows[image]));
  const facts = new Float32Array(bytes, 0, queries * heads * (2 + beside));
  const codes = new Uint8Array(bytes, facts.byteLength);
  const patch = patchOf(layer, state.point);
  // a layer without such a token is asked from the patch
  const query = state.token === null || !beside ? patch.number : layer.queries[0] * layer.queries[1] + Math.min(state.token, beside - 1);
  return Array.from({ length: heads }, (_, head) => {
    const place = query * heads + head, fact = facts.subarray(place * (2 + beside), (place + 1) * (2 + beside));
    const code = codes.subarray(place * size, (place + 1) * size);
    // largest * (code / 255)^2: the square root keeps small weights apart
    return { entropy: fact[1], beside: [...fact.subarray(2)], weights: Float32Array.from(code, (c) => fact[0] * (c / 255) ** 2) };
  });
}

async function servedRows(number) {
  const where = state.token === null ? `y=${state.point.y}&x=${state.point.x}` : `token=${state.token}`;
  const answer = await fetch(`rows?model=${number}&image=${state.image}&${where}`);
  if (!answer.ok) throw new Error(await answer.text());
  const values = new Float32Array(await answer.arrayBuffer());
  let start = 0;
  return data.models[number].layers.map((layer) => {
    const beside = layer.beside.length, length = 1 + beside + layer.cells[0] * layer.cells[1];
    return Array.from({ length: layer.heads }, () => {
      const part = values.subarray(start, (start += length));
      return { entropy: part[0], beside: [...part.subarray(1, 1 + beside)], weights: part.subarray(1 + beside) };
    });
  });
}

async function rowsOf(number) {
  const model = data.models[number];
  const layers = data.live ? await servedRows(number) : model.layers.map((layer) => storedRows(model, state.image, layer));
  return layers.map((heads) => ({ heads, mean: meanOf(heads) }));
}

function meanOf(heads) {
  const average = (read) => heads.reduce((sum, head) => sum + read(head), 0) / heads.length;
  return {
    entropy: average((head) => head.entropy),
    beside: heads[0].beside.map((_, token) => average((head) => head.beside[token])),
    weights: heads[0].weights.map((_, cell) => average((head) => head.weights[cell])),
  };
}

// ---- colours

// from dark violet to pale yellow, evenly brighter: readable without colour vision and in print
const COLOURS = [[12, 8, 38], [66, 10, 104], [147, 38, 103], [221, 81, 58], [252, 165, 10], [252, 255, 164]];

function colourOf(part) {
  const place = Math.min(0.9999, Math.max(0, part)) * (COLOURS.length - 1), start = Math.floor(place), rest = place - start;
  return COLOURS[start].map((from, channel) => Math.round(from + (COLOURS[start + 1][channel] - from) * rest));
}

function rangeOf(row, heads) {
  const rows = state.scale === "shared" ? heads : [row];
  const largest = Math.max(...rows.map((each) => each.weights.reduce((a, b) => Math.max(a, b), 0)), 1e-12);
  const least = state.scale === "least" ? row.weights.reduce((a, b) => Math.min(a, b), Infinity) : 0;
  return { least, largest };
}

function partOf(weight, { least, largest }) {
  const part = largest > least ? (weight - least) / (largest - least) : 1;
  return state.scale === "root" ? Math.sqrt(Math.max(0, part)) : part;
}

const weightAt = (part, { least, largest }) => least + (state.scale === "root" ? part * part : part) * (largest - least);

// ---- drawing

const pictures = data.models.map((model) => model.images.map(({ picture }) => Object.assign(new Image(), { src: picture })));

function drawPicture(canvas, picture, filter) {
  const context = canvas.getContext("2d");
  context.filter = filter;
  context.imageSmoothingEnabled = picture.naturalWidth > 100;
  context.drawImage(picture, 0, 0, canvas.width, canvas.height);
  context.filter = "none";
}

function drawFrame(canvas, layer) {
  if (state.token !== null && layer.beside.length) return;
  const { width, height } = canvas, context = canvas.getContext("2d");
  const patch = patchOf(layer, state.point), [high, wide] = layer.grid;
  const box = [(patch.x * width) / wide, (patch.y * height) / high, Math.max(width / wide, 5), Math.max(height / high, 5)];
  for (const [colour, line] of [["#000", width / 75], ["#3df0ff", width / 170]]) {
    context.strokeStyle = colour;
    context.lineWidth = Math.max(1, line);
    context.strokeRect(...box);
  }
}

function draw(canvas, picture, layer, row, range, marked = []) {
  const { width, height } = canvas, context = canvas.getContext("2d");
  drawPicture(canvas, picture, "grayscale(1)");
  const [rows, columns] = layer.cells;
  const map = new OffscreenCanvas(columns, rows), pixels = new ImageData(columns, rows);
  row.weights.forEach((weight, cell) => pixels.data.set([...colourOf(partOf(weight, range)), 175], 4 * cell));
  map.getContext("2d").putImageData(pixels, 0, 0);
  context.imageSmoothingEnabled = false;
  context.drawImage(map, 0, 0, width, height);
  drawFrame(canvas, layer);
  const radius = width / 38;
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.font = `700 ${Math.round(radius * 1.45)}px system-ui, sans-serif`;
  // the first last, so that it lies on top
  [...marked].reverse().forEach((cell, index) => {
    const rank = marked.length - 1 - index;
    const x = ((cell % columns) + 0.5) * (width / columns), y = (Math.floor(cell / columns) + 0.5) * (height / rows);
    context.beginPath();
    context.arc(Math.min(width - radius, Math.max(radius, x)), Math.min(height - radius, Math.max(radius, y)), radius, 0, 2 * Math.PI);
    context.fillStyle = "#fff";
    context.fill();
    context.lineWidth = Math.max(1, width / 300);
    context.strokeStyle = "#000";
    context.stroke();
    context.fillStyle = "#000";
    context.fillText(String(rank + 1), Math.min(width - radius, Math.max(radius, x)), Math.min(height - radius, Math.max(radius, y)) + 1);
  });
}

const written = (weight) => (weight >= 0.0995 ? weight.toFixed(2) : weight >= 1e-4 || weight === 0 ? String(Number(weight.toPrecision(2))) : weight.toExponential(1));
const percent = (weight) => `${Number((100 * weight).toPrecision(3))}%`;

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// ---- one panel for each model

function makePanel(model, number) {
  const canvas = element("canvas", { tabindex: "0", role: "application", class: "map" });
  const plain = element("canvas", { "aria-hidden": "true" });
  const panel = {
    model, number, canvas, plain,
    caption: element("p", { class: "facts" }),
    answer: element("p", { class: "facts" }),
    bar: element("div", { class: "bar", "aria-hidden": "true" }),
    ticks: element("div", { class: "ticks" }),
    readout: element("p", { class: "readout" }),
    most: element("p", { class: "heading" }),
    strongest: element("ol", { class: "strongest" }),
    tiles: element("div", { class: "tiles", role: "group", "aria-label": "Heads" }),
    strip: element("div", { class: "strip", role: "group", "aria-label": "Layers" }),
  };
  const legend = element("div", { class: "legend" }, panel.bar, panel.ticks);
  const box = element("article", { class: "model", "aria-label": model.name },
    element("div", { class: "title" }, element("h3", {}, model.name), panel.caption, panel.answer),
    element("figure", { class: "main" }, element("div", { class: "pair" }, plain, canvas), legend, panel.readout, panel.most, panel.strongest),
    element("div", {}, element("p", { class: "heading" }, "Heads of this layer"), panel.tiles,
      element("p", { class: "heading" }, "All layers, mean of their heads"), panel.strip));
  find("models").append(box);
  const place = (event) => {
    const box = event.target.getBoundingClientRect();
    return { y: (event.clientY - box.top) / box.height, x: (event.clientX - box.left) / box.width };
  };
  for (const each of [canvas, plain]) {
    each.addEventListener("click", (event) => choose({ point: place(event), token: null }));
    each.addEventListener("pointermove", (event) => tell(panel, place(event)));
    each.addEventListener("pointerleave", () => tell(panel, null));
  }
  canvas.addEventListener("keydown", (event) => move(panel, event));
  return panel;
}

function layerOf(panel) {
  const count = panel.model.layers.length;
  // models of other depth are shown at the same part of their depth
  const number = depth > 1 ? Math.round((state.step * (count - 1)) / (depth - 1)) : 0;
  return { number, layer: panel.model.layers[number] };
}

const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

function move(panel, event) {
  const { layer } = layerOf(panel), [rows, columns] = layer.queries;
  let row = cellOf(state.point.y, rows), column = cellOf(state.point.x, columns);
  if (STEPS[event.key]) {
    row += STEPS[event.key][0];
    column += STEPS[event.key][1];
  } else if (event.key === "Home") column = 0;
  else if (event.key === "End") column = columns - 1;
  else if (event.key === "PageUp" || event.key === "PageDown") {
    event.preventDefault();
    choose({ step: Math.min(depth - 1, Math.max(0, state.step + (event.key === "PageUp" ? -1 : 1))) });
    return;
  } else return;
  event.preventDefault();
  row = Math.min(rows - 1, Math.max(0, row));
  column = Math.min(columns - 1, Math.max(0, column));
  choose({ point: { y: (row + 0.5) / rows, x: (column + 0.5) / columns }, token: null });
}

function tell(panel, point) {
  const shown = panel.shown;
  if (!shown) return;
  const [rows, columns] = shown.layer.cells, uniform = 1 / (rows * columns);
  if (!point) {
    panel.readout.textContent = "Point at the picture to read a weight.";
    return;
  }
  const row = cellOf(point.y, rows), column = cellOf(point.x, columns), weight = shown.row.weights[row * columns + column];
  panel.readout.textContent = `Row ${row + 1}, column ${column + 1}: weight ${written(weight)}, ${(weight / uniform).toFixed(2)} × even`;
}

function fit(canvas, picture, width) {
  canvas.width = width;
  canvas.height = Math.round((width * picture.naturalHeight) / picture.naturalWidth);
}

function entropyText(row, layer) {
  const evenly = Math.log2(layer.keys);
  return `${row.entropy.toFixed(2)} of ${evenly.toFixed(2)} bits`;
}

function show(panel, layers) {
  const { model, canvas } = panel, { number, layer } = layerOf(panel), picture = pictures[panel.number][state.image];
  const image = model.images[state.image], { heads, mean } = layers[number];
  const head = state.head !== null && state.head < heads.length ? state.head : null;
  const row = head === null ? mean : heads[head], range = rangeOf(row, heads);
  const marked = [...row.weights.keys()].sort((a, b) => row.weights[b] - row.weights[a]).slice(0, STRONGEST);
  panel.shown = { layer, row };
  fit(canvas, picture, 560);
  draw(canvas, picture, layer, row, range, marked);
  fit(panel.plain, picture, 360);
  drawPicture(panel.plain, picture, "none");
  drawFrame(panel.plain, layer);
  const patch = patchOf(layer, state.point);
  const from = state.token === null || !layer.beside.length ? `patch in row ${patch.y + 1} of ${layer.grid[0]}, column ${patch.x + 1} of ${layer.grid[1]}`
    : layer.beside[Math.min(state.token, layer.beside.length - 1)];
  const which = head === null ? `mean of ${heads.length} head${heads.length > 1 ? "s" : ""}` : `head ${head + 1} of ${heads.length}`;
  panel.caption.textContent = `Layer ${number + 1} of ${model.layers.length}: ${layer.name}, ${layer.kind}. From the ${from}; ${which}; entropy ${entropyText(row, layer)}.`
    + layer.beside.map((name, token) => ` On the ${name}: ${percent(row.beside[token])}.`).join("");
  panel.answer.textContent = image.answer ? `It says: ${image.answer}` : "";
  canvas.setAttribute("aria-label", `${image.name}, ${from}, ${layer.name}, ${which}. Arrow keys move the patch, page keys change the layer.`);
  const stops = Array.from({ length: 11 }, (_, i) => `rgb(${colourOf(i / 10).join(" ")}) ${10 * i}%`);
  panel.bar.style.background = `linear-gradient(to right, ${stops.join(", ")})`;
  panel.ticks.replaceChildren(...[0, 0.25, 0.5, 0.75, 1].map((part) => element("span", {}, written(weightAt(part, range)))));
  panel.most.textContent = `Most weight, among ${layer.cells[0]} × ${layer.cells[1]} cells`;
  panel.strongest.replaceChildren(...marked.map((cell, rank) => {
    const columns = layer.cells[1];
    return element("li", {}, element("b", {}, String(rank + 1)),
      `row ${Math.floor(cell / columns) + 1}, column ${(cell % columns) + 1}: ${percent(row.weights[cell])}`);
  }));
  const fact = (text) => element("span", { class: "fact" }, text);
  // of a single head, the mean is the head
  const shownHeads = heads.length > 1 ? [mean, ...heads] : [mean];
  fill(panel.tiles, shownHeads, (each, index, tile, small) => {
    const chosen = index === 0 ? null : index - 1;
    draw(small, picture, layer, each, rangeOf(each, heads));
    tile.label.replaceChildren(element("span", { class: "name" }, index > 0 ? `head ${index}` : heads.length > 1 ? "mean" : "head 1"), fact(`${each.entropy.toFixed(2)} bits`),
      fact(`most ${percent(rangeOf({ weights: each.weights }, [each]).largest)}`));
    tile.setAttribute("aria-pressed", String(chosen === head));
    tile.onclick = () => choose({ head: chosen });
  }, picture);
  fill(panel.strip, layers, (each, index, tile, small) => {
    const other = model.layers[index];
    draw(small, picture, other, each.mean, rangeOf(each.mean, each.heads));
    tile.label.replaceChildren(element("span", { class: "name" }, `layer ${index + 1}`), fact(other.kind), fact(entropyText(each.mean, other)));
    tile.setAttribute("aria-pressed", String(index === number));
    const step = model.layers.length > 1 ? Math.round((index * (depth - 1)) / (model.layers.length - 1)) : 0;
    tile.onclick = () => choose({ step });
  }, picture);
  tell(panel, null);
  return `${model.name}, ${layer.name}, ${from}, ${which}: most weight ${percent(row.weights[marked[0]])} in row ${Math.floor(marked[0] / layer.cells[1]) + 1}, column ${(marked[0] % layer.cells[1]) + 1}; entropy ${entropyText(row, layer)}.`;
}

// tiles are kept between changes, so that the focus stays where it is
function fill(box, items, update, picture) {
  while (box.children.length > items.length) box.lastChild.remove();
  items.forEach((item, index) => {
    let tile = box.children[index];
    if (!tile) {
      tile = element("button", { type: "button", class: "tile" });
      tile.small = element("canvas", { "aria-hidden": "true" });
      tile.label = element("span");
      tile.append(tile.small, tile.label);
      box.append(tile);
    }
    fit(tile.small, picture, 160);
    update(item, index, tile, tile.small);
  });
}

// ---- changes

let turn = 0;

async function choose(change) {
  Object.assign(state, change);
  const own = ++turn;
  let said = [];
  try {
    const found = await Promise.all(panels.map((panel) => rowsOf(panel.number)));
    // a later choice has overtaken this one
    if (own !== turn) return;
    said = panels.map((panel, number) => show(panel, found[number]));
  } catch (error) {
    said = [`The weights cannot be read: ${error.message}`];
    panels.forEach((panel) => { panel.readout.textContent = said[0]; });
  }
  const names = panels.map((panel) => layerOf(panel)).map(({ number, layer }) => `${number + 1}, ${layer.name}`);
  const slider = find("layer");
  slider.value = String(state.step);
  slider.setAttribute("aria-valuetext", `layer ${[...new Set(names)].join("; ")}`);
  find("layer-name").textContent = [...new Set(names)].join(" | ");
  find("said").textContent = said.join(" ");
  for (const button of find("tokens").querySelectorAll("button")) {
    button.setAttribute("aria-pressed", String((state.token === null ? "" : String(state.token)) === button.value));
  }
  document.body.dataset.turn = String(own);
}

const panels = data.models.map(makePanel);
find("models").classList.toggle("single", panels.length === 1);
find("layer").max = String(depth - 1);
find("layer").addEventListener("input", (event) => choose({ step: Number(event.target.value) }));
find("scale").addEventListener("change", (event) => choose({ scale: event.target.value }));
data.models[0].images.forEach((image, index) => {
  const input = element("input", { type: "radio", name: "image", value: index, "aria-label": image.name });
  input.checked = index === 0;
  input.addEventListener("change", () => choose({ image: index }));
  find("images").append(element("label", { class: "choice", title: image.name }, input, element("img", { src: image.picture, alt: "" })));
});
find("images").hidden = data.models[0].images.length < 2;
const beside = data.models.flatMap((model) => model.layers.map((layer) => layer.beside)).sort((a, b) => b.length - a.length)[0];
find("tokens").hidden = beside.length === 0;
["the patch", ...beside].forEach((name, index) => {
  const button = element("button", { type: "button", value: index ? index - 1 : "" }, name);
  button.addEventListener("click", () => choose({ token: index ? index - 1 : null }));
  find("tokens").append(button);
});
Promise.all(pictures.flat().map((picture) => picture.decode())).then(() => choose({}));
