/* The example and the sliders of tiles.html, in plain JavaScript. `likTiles` has the functions that tests call. */
"use strict";

globalThis.likTiles = (() => {
  /* Bytes and operations of plain PyTorch and of lik_ops. tiles.md has the formulas. */
  function count({ Nq, Nd, Lq, Ld, d, b, training }) {
    const pairs = Nq * Nd;
    const inputs = (Nq * Lq + Nd * Ld) * d * b;
    const similarities = pairs * Lq * Ld * b;
    const maxima = pairs * Lq * b;
    const argmax = pairs * Lq * (Ld > 32767 ? 4 : 2);
    const scores = 4 * pairs;
    const operations = 2 * pairs * Lq * Ld * d;
    const naiveMoved = inputs + 2 * similarities + 2 * maxima + pairs * b;
    const fusedMoved = inputs + scores;
    return {
      inputs,
      similarities,
      operations,
      naive: {
        moved: naiveMoved,
        memory: training ? similarities + Math.max(similarities, inputs) : similarities + maxima,
        intensity: operations / naiveMoved,
      },
      fused: {
        moved: fusedMoved,
        memory: training ? inputs + argmax + scores : scores,
        intensity: operations / fusedMoved,
      },
    };
  }

  /* The example: one query and two documents of small integers, in fp32. */
  const EXAMPLE = { Nq: 1, Nd: 2, Lq: 4, Ld: 6, d: 8, b: 4, training: false };

  function makeTokens(rows, d, seed) {
    let state = seed;
    const next = () => {
      state = (state * 1103515245 + 12345) % 2147483648;
      return (Math.floor(state / 65536) % 5) - 2;
    };
    return Array.from({ length: rows }, () => Array.from({ length: d }, next));
  }

  const Q = makeTokens(EXAMPLE.Lq, EXAMPLE.d, 7);
  const D = Array.from({ length: EXAMPLE.Nd }, (_, j) => makeTokens(EXAMPLE.Ld, EXAMPLE.d, 40 + j));
  const dot = (x, y) => x.reduce((sum, value, k) => sum + value * y[k], 0);
  const S = D.map((tokens) => Q.map((query) => tokens.map((token) => dot(query, token))));

  /* The tiles of all documents in order, as [document, first token, end]. */
  function listTiles(size) {
    const tiles = [];
    for (let j = 0; j < EXAMPLE.Nd; j++) {
      for (let t = 0; t < EXAMPLE.Ld; t += size) tiles.push([j, t, Math.min(t + size, EXAMPLE.Ld)]);
    }
    return tiles;
  }

  function emptySide() {
    const cells = D.map(() => Q.map(() => Array(EXAMPLE.Ld).fill("empty")));
    const maxima = D.map(() => Q.map(() => null));
    return { cells, maxima, scores: D.map(() => null), moved: 0, memory: 0, peak: 0, registers: 0, text: "Not started." };
  }

  function mark(side, [j, start, end], state) {
    for (const row of side.cells[j]) row.fill(state, start, end);
  }

  function updateMaxima(side, [j, start, end]) {
    side.maxima[j] = side.maxima[j].map((best, s) => Math.max(best ?? -Infinity, ...S[j][s].slice(start, end)));
  }

  const addUp = (values) => values.reduce((sum, value) => sum + value, 0);
  const nameTile = ([j, start, end]) => `tokens ${start + 1} to ${end} of document ${"AB"[j]}`;

  /* Apply step `k` (from 1) to the side of plain PyTorch: all products, then all maxima, then the sums. */
  function stepNaive(side, tiles, k) {
    const { Nd, Lq, Ld, d, b } = EXAMPLE;
    const similarities = Nd * Lq * Ld * b;
    const maxima = Nd * Lq * b;
    if (k <= tiles.length) {
      const tile = tiles[k - 1];
      const tokens = tile[2] - tile[1];
      if (k > 1) mark(side, tiles[k - 2], "stored");
      mark(side, tile, "written");
      side.moved += (k === 1 ? Lq * d * b : 0) + tokens * d * b + Lq * tokens * b;
      side.memory = similarities;
      side.text = `Multiply, and write the similarities of ${nameTile(tile)}.`;
    } else if (k <= 2 * tiles.length) {
      const tile = tiles[k - tiles.length - 1];
      mark(side, k === tiles.length + 1 ? tiles[tiles.length - 1] : tiles[k - tiles.length - 2], "stored");
      mark(side, tile, "read");
      updateMaxima(side, tile);
      side.moved += Lq * (tile[2] - tile[1]) * b + (tile[2] === Ld ? Lq * b : 0);
      side.memory = similarities + maxima;
      side.text = `Read the similarities of ${nameTile(tile)} again for the maxima.`;
    } else if (k === 2 * tiles.length + 1) {
      tiles.forEach((tile) => mark(side, tile, "dropped"));
      side.scores = side.maxima.map(addUp);
      side.moved += maxima + Nd * b;
      side.memory = maxima + Nd * b;
      side.text = "Read the maxima, and write their sums, the scores.";
    }
  }

  /* Apply step `k` (from 1) to the side of lik_ops: product, maxima and, after the last tile, the sum. */
  function stepFused(side, tiles, k) {
    const { Nd, Lq, Ld, d, b } = EXAMPLE;
    if (k > 1 && k <= tiles.length + 1) mark(side, tiles[k - 2], "dropped");
    if (k > tiles.length) {
      side.registers = 0;
      side.text = "Done.";
      return;
    }
    const tile = tiles[k - 1];
    const tokens = tile[2] - tile[1];
    mark(side, tile, "registers");
    updateMaxima(side, tile);
    side.moved += (k === 1 ? Lq * d * b : 0) + tokens * d * b;
    side.memory = 4 * Nd;
    side.registers = Lq * (tokens + 1) * 4;
    side.text = `Multiply ${nameTile(tile)}, and update the maxima in registers.`;
    if (tile[2] === Ld) {
      side.scores[tile[0]] = addUp(side.maxima[tile[0]]);
      side.moved += 4;
      side.text += " Write the score.";
    }
  }

  const countSteps = (size) => 2 * listTiles(size).length + 1;

  /* Both sides after `step` steps with tiles of `size` document tokens. */
  function simulate(size, step) {
    const tiles = listTiles(size);
    const [naive, fused] = [emptySide(), emptySide()];
    for (let k = 1; k <= step; k++) {
      stepNaive(naive, tiles, k);
      stepFused(fused, tiles, k);
      for (const side of [naive, fused]) side.peak = Math.max(side.peak, side.memory);
    }
    return { naive, fused };
  }

  const PREFIXES = ["", "k", "M", "G", "T", "P", "E"];

  /* A number with three significant digits and a decimal prefix, for example "2.52 GB". */
  function format(value, unit) {
    let power = 0;
    while (value >= 999.5 && power < PREFIXES.length - 1) {
      value /= 1000;
      power += 1;
    }
    const digits = Number.isInteger(value) ? 0 : Math.max(0, 2 - Math.floor(Math.log10(Math.max(value, 0.01))));
    return `${value.toFixed(Math.min(digits, 2))} ${PREFIXES[power]}${unit}`;
  }

  const SIZES = {
    Nq: ["queries", [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]],
    Nd: ["documents", [1, 16, 32, 64, 128, 256, 512, 1000, 2000, 5000, 10000, 50000, 100000, 1000000]],
    Lq: ["tokens of a query", [8, 16, 32, 64, 128, 256, 512, 1024]],
    Ld: ["tokens of a document", [32, 64, 128, 180, 256, 300, 512, 1024, 2048, 4096, 8192]],
    d: ["features of a token", [32, 48, 64, 96, 128, 192, 256, 320, 512, 768]],
  };
  const PRESETS = {
    "Rerank 1,000 documents": { Nq: 1, Nd: 1000, Lq: 32, Ld: 300, d: 128, b: 2, training: false },
    "Train with 256 in-batch negatives": { Nq: 256, Nd: 256, Lq: 32, Ld: 300, d: 128, b: 2, training: true },
    "Search 100,000 documents": { Nq: 16, Nd: 100000, Lq: 32, Ld: 180, d: 128, b: 2, training: false },
    "Train on pages": { Nq: 128, Nd: 128, Lq: 1024, Ld: 1024, d: 128, b: 2, training: true },
  };

  return { count, simulate, countSteps, format, EXAMPLE, SIZES, PRESETS, Q, D, S };
})();

if (typeof document !== "undefined") {
  (() => {
    const { count, simulate, countSteps, format, EXAMPLE, SIZES, PRESETS, S } = globalThis.likTiles;

    function make(tag, properties = {}, ...children) {
      const element = document.createElement(tag);
      for (const [name, value] of Object.entries(properties)) {
        if (name in element) element[name] = value;
        else element.setAttribute(name, value);
      }
      element.append(...children);
      return element;
    }

    const LEGEND = {
      naive: { written: "written now", read: "read now", stored: "in device memory", dropped: "freed" },
      fused: { registers: "in registers", dropped: "dropped, never stored" },
    };

    function drawMatrix(side) {
      const rows = S[0].map((_, s) => {
        const cells = side.cells.map((grid, j) =>
          make("span", { className: "tiles-document" }, ...grid[s].map((state, t) => drawCell(state, S[j][s][t]))),
        );
        const maxima = side.maxima.map((x) => make("span", { className: "tiles-cell tiles-maximum" }, showNumber(x[s])));
        return make("div", { className: "tiles-row" }, ...cells, make("span", { className: "tiles-document" }, ...maxima));
      });
      const heads = ["A", "B"].map((name) => make("span", { className: "tiles-head" }, `document ${name}`));
      heads.push(make("span", { className: "tiles-head tiles-maxima" }, "max"));
      return [make("div", { className: "tiles-row" }, ...heads), ...rows];
    }

    function drawCell(state, value) {
      const hasNumber = state !== "empty" && state !== "dropped";
      return make("span", { className: `tiles-cell tiles-${state}` }, hasNumber ? showNumber(value) : "");
    }

    const showNumber = (value) => (value === null ? "" : String(value).replace("-", "\u2212"));

    function drawSide(panel, name, side) {
      const scores = side.scores.map((x, j) => `${"AB"[j]} ${x === null ? "..." : showNumber(x)}`).join(", ");
      const figures = [
        ["bytes moved", format(side.moved, "B")],
        ["device memory, beyond the inputs", format(side.memory, "B")],
        ["peak of this memory", format(side.peak, "B")],
        ["scores", scores],
      ];
      if (name === "fused") figures.splice(3, 0, ["registers of the tile and the maxima", format(side.registers, "B")]);
      const list = make("dl", { className: "tiles-figures" });
      for (const [label, value] of figures) list.append(make("dt", {}, label), make("dd", {}, value));
      const matrix = make("div", { className: "tiles-matrix", "aria-hidden": "true" }, ...drawMatrix(side));
      const items = Object.entries(LEGEND[name]).map(([state, label]) =>
        make("span", {}, make("span", { className: `tiles-cell tiles-${state}` }), ` ${label}`),
      );
      const legend = make("p", { className: "tiles-legend", "aria-hidden": "true" }, ...items);
      const title = name === "naive" ? "Plain PyTorch" : "lik_ops";
      panel.replaceChildren(make("h3", {}, title), matrix, legend, list, make("p", { className: "tiles-text" }, side.text));
    }

    function addSteps(root) {
      const panels = { naive: make("section", { id: "tiles-naive" }), fused: make("section", { id: "tiles-fused" }) };
      const slider = make("input", { type: "range", id: "tiles-step", min: 0, value: 0, step: 1 });
      const size = make("select", { id: "tiles-size" }, ...[2, 3, 6].map((n) => make("option", { value: n }, `${n} tokens`)));
      size.value = "3";
      const label = make("label", { htmlFor: "tiles-step" });
      const status = make("p", { id: "tiles-status", className: "tiles-hidden", role: "status" });
      let timer = null;

      function show(step) {
        const last = countSteps(Number(size.value));
        slider.max = last;
        slider.value = step;
        const { naive, fused } = simulate(Number(size.value), Number(slider.value));
        drawSide(panels.naive, "naive", naive);
        drawSide(panels.fused, "fused", fused);
        label.textContent = `Step ${slider.value} of ${last}`;
        status.textContent =
          `Step ${slider.value}. Plain PyTorch: ${naive.text} ${format(naive.moved, "B")} moved. ` +
          `lik_ops: ${fused.text} ${format(fused.moved, "B")} moved.`;
        back.disabled = Number(slider.value) === 0;
        next.disabled = Number(slider.value) === last;
        if (next.disabled) stop();
      }

      function stop() {
        clearInterval(timer);
        timer = null;
        play.textContent = "Play";
      }

      function toggle() {
        if (timer !== null) return stop();
        if (Number(slider.value) === Number(slider.max)) show(0);
        play.textContent = "Pause";
        timer = setInterval(() => show(Number(slider.value) + 1), 900);
      }

      const back = make("button", { type: "button", onclick: () => show(Number(slider.value) - 1) }, "Back");
      const next = make("button", { type: "button", onclick: () => show(Number(slider.value) + 1) }, "Step");
      const play = make("button", { type: "button", onclick: toggle }, "Play");
      slider.addEventListener("input", () => show(slider.value));
      size.addEventListener("change", () => (stop(), show(0)));
      const tile = make("label", { htmlFor: "tiles-size" }, "Tile: ");
      const buttons = make("div", { className: "tiles-buttons" }, back, next, play, make("span", {}, tile, size));
      const both = make("div", { className: "tiles-panels" }, panels.naive, panels.fused);
      root.append(buttons, make("div", { className: "tiles-slider" }, label, slider), both, status);
      show(0);
    }

    const formatRatio = (x) => (x < 100 ? x.toPrecision(3) : Math.round(x).toLocaleString("en-US"));

    /* A row of the table of sizes: label, both values with a bar each, and their ratio. */
    function drawComparison(label, naive, fused, unit) {
      const largest = Math.max(naive, fused);
      const write = (value) => (unit ? format(value, unit) : Math.round(value).toLocaleString("en-US"));
      const cell = (value) => {
        const bar = make("span", { className: "tiles-bar", "aria-hidden": "true" });
        bar.style.width = `${(100 * value) / largest}%`;
        return value === 0 ? make("td", {}, "none") : make("td", {}, write(value), bar);
      };
      const ratio = fused === 0 ? "" : `${formatRatio(naive / fused)}x`;
      return make("tr", {}, make("th", { scope: "row" }, label), cell(naive), cell(fused), make("td", {}, ratio));
    }

    const GPU_BYTES = 80e9;

    function summarize(sizes, found) {
      const what = sizes.training ? "A training step" : "The forward";
      const gpus = Math.floor(found.naive.memory / GPU_BYTES);
      const more = gpus > 0 ? ` (more than ${gpus.toLocaleString("en-US")} GPU${gpus > 1 ? "s" : ""} of 80 GB)` : "";
      const naive = `${format(found.naive.memory, "B")}${more}`;
      return `${what} needs ${naive} in plain PyTorch, and ${format(found.fused.memory, "B")} in lik_ops, beyond the inputs.`;
    }

    function addSizes(root) {
      const inputs = {};
      const labels = {};
      const controls = make("div", { className: "tiles-controls" });
      for (const [name, [description, values]] of Object.entries(SIZES)) {
        inputs[name] = make("input", { type: "range", id: `tiles-${name}`, min: 0, max: values.length - 1, step: 1 });
        labels[name] = make("output", { htmlFor: `tiles-${name}` });
        const label = make("label", { htmlFor: `tiles-${name}` }, make("code", {}, name), ` ${description}: `, labels[name]);
        controls.append(make("div", { className: "tiles-slider" }, label, inputs[name]));
      }
      const choices = (id, text, options) => {
        const items = options.map(([value, label]) => make("option", { value }, label));
        inputs[id] = make("select", { id: `tiles-${id}` }, ...items);
        controls.append(make("div", {}, make("label", { htmlFor: `tiles-${id}` }, `${text} `), inputs[id]));
      };
      choices("b", "dtype", [[2, "fp16, bf16"], [4, "fp32"]]);
      choices("training", "call", [["", "forward"], ["yes", "forward and backward"]]);
      const summary = make("p", { id: "tiles-summary", role: "status" });
      const body = make("tbody");
      const heads = ["", "plain PyTorch", "lik_ops", "ratio"].map((text) => make("th", { scope: "col" }, text));
      const table = make("table", { id: "tiles-table", className: "tiles-table" }, make("thead", {}, make("tr", {}, ...heads)), body);

      function show() {
        const sizes = { b: Number(inputs.b.value), training: inputs.training.value !== "" };
        for (const [name, [, values]] of Object.entries(SIZES)) {
          sizes[name] = values[inputs[name].value];
          labels[name].textContent = sizes[name].toLocaleString("en-US");
          inputs[name].setAttribute("aria-valuetext", labels[name].textContent);
        }
        const found = count(sizes);
        summary.textContent = summarize(sizes, found);
        body.replaceChildren(
          drawComparison("similarities [Nq, Nd, Lq, Ld]", found.similarities, 0, "B"),
          drawComparison("peak memory beyond the inputs", found.naive.memory, found.fused.memory, "B"),
          drawComparison("bytes moved by the forward", found.naive.moved, found.fused.moved, "B"),
          drawComparison("operations per byte", found.naive.intensity, found.fused.intensity, ""),
        );
        body.lastChild.lastChild.textContent = "";
        both.textContent =
          `Both read ${format(found.inputs, "B")} of inputs and compute ${format(found.operations, "FLOP")} in the forward.`;
      }

      function apply(preset) {
        for (const [name, [, values]] of Object.entries(SIZES)) inputs[name].value = values.indexOf(preset[name]);
        inputs.b.value = String(preset.b);
        inputs.training.value = preset.training ? "yes" : "";
        show();
      }

      const presets = Object.entries(PRESETS).map(([name, preset]) =>
        make("button", { type: "button", onclick: () => apply(preset) }, name),
      );
      const both = make("p", { id: "tiles-both" });
      for (const input of Object.values(inputs)) input.addEventListener("input", show);
      root.append(make("div", { className: "tiles-buttons" }, ...presets), controls, summary, table, both);
      apply(PRESETS["Train with 256 in-batch negatives"]);
    }

    addSteps(document.getElementById("tiles-steps"));
    addSizes(document.getElementById("tiles-sizes"));
  })();
}
