/* Plays recorded runs step by step: plain SVG, no framework, no network.
 *
 * A page has <div class="player"> elements, each with a player's file in a
 * <script type="application/json">. The layout is in the file (see scene.py); this script draws the
 * shapes, and goes from step to step by buttons, keys and a slider.
 */
"use strict";
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const FORMAT = "distlab player 1";
  const LARGEST_FILE = 20e6; // bytes
  const STRIP = 3; // room between a cell's frame and its strips
  const KEYS = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity };
  let players = 0; // on this page: ids must differ

  // -- elements -------------------------------------------------------------------------------
  function element(name, attributes = {}, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  function svg(name, attributes = {}, text = "") {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text) made.textContent = text;
    return made;
  }

  function button(label, sign, act) {
    const made = element("button", { type: "button", "aria-label": label, title: label }, sign);
    made.addEventListener("click", act);
    return made;
  }

  // -- shapes: still.py draws the same --------------------------------------------------------
  const draw = {
    box(group, [, looks, x, y, width, height, text]) {
      group.append(svg("rect", { class: `box ${looks}`, x, y, width, height, rx: 2 }));
      if (text) {
        const place = { class: `label ${looks}`, x: x + width / 2, y: y + height / 2 };
        group.append(svg("text", place, text));
      }
    },
    cell(group, [, looks, x, y, width, height, text]) {
      const full = text && !text.includes("0") ? " full" : "";
      group.append(svg("rect", { class: `cell ${looks}${full}`, x, y, width, height, rx: 3 }));
      const strip = (width - 2 * STRIP) / text.length;
      for (let rank = 0; rank < text.length; rank++) {
        if (text[rank] === "0") continue;
        const place = { x: x + STRIP + rank * strip, y: y + STRIP, width: strip };
        group.append(svg("rect", { class: `part rank${rank}`, ...place, height: height - 2 * STRIP }));
      }
    },
    text(group, [, looks, x, y, , , text]) {
      group.append(svg("text", { class: looks, x, y }, text));
    },
    line(group, [, looks, x, y, width, height]) {
      const ends = { x1: x, y1: y, x2: x + width, y2: y + height };
      group.append(svg("line", { class: `line ${looks}`, ...ends }));
    },
    arrow(group, [, looks, x, y, width, height], id) {
      const ends = { x1: x, y1: y, x2: x + width, y2: y + height };
      const head = `url(#${id}-head)`;
      group.append(svg("line", { class: `line ${looks}`, ...ends, "marker-end": head }));
    },
    area(group, [, looks, , , , , text]) {
      group.append(svg("path", { class: `area ${looks}`, d: text }));
    },
  };

  function whole([kind, looks = "", x = 0, y = 0, width = 0, height = 0, text = ""]) {
    return [kind, looks, x, y, width, height, text];
  }

  // -- files ----------------------------------------------------------------------------------
  class BadFile extends Error {}

  /* The player's part of a file's text: of a trace, or of a player's own file. */
  function readDocument(text) {
    let data;
    try {
      data = JSON.parse(text);
    } catch {
      throw new BadFile("This file is not JSON. Choose a trace-….json that `distlab trace` wrote.");
    }
    const found = data?.player ?? data;
    if (found?.format !== FORMAT) {
      throw new BadFile(
        "This file has no steps for this player. Write it again with this version's `distlab trace`.",
      );
    }
    try {
      check(found);
    } catch (error) {
      throw new BadFile(`This file is damaged: ${error.message}. Write it again with \`distlab trace\`.`);
    }
    return found;
  }

  function expect(holds, what) {
    if (!holds) throw new Error(what);
  }

  function check(found) {
    expect(Array.isArray(found.choices), "it does not say what can be chosen");
    for (const { name, values } of found.choices) {
      expect(typeof name === "string" && values?.every((v) => typeof v === "string"), "a bad choice");
    }
    for (const key of keysOf(found.choices.map((choice) => choice.values))) {
      expect(found.scenes?.[key], `the scene “${key}” is missing`);
      checkScene(found.scenes[key]);
    }
  }

  function checkScene({ size, clock, shapes, timed, names, steps, legend, ended }) {
    const words = (value) => typeof value === "string";
    const simple = (value) => words(value) && /^[a-z0-9 -]*$/.test(value);
    const path = (value) => words(value) && /^[MLQHVZ\d .,-]*$/.test(value);
    expect([size, clock].every((pair) => pair?.length === 2 && pair.every(Number.isFinite)), "no size");
    for (const shape of [...shapes, ...timed].map(whole)) {
      const [kind, looks, ...rest] = shape;
      const text = rest.pop();
      const fits = Object.hasOwn(draw, kind) && simple(looks) && rest.every(Number.isFinite);
      expect(fits && (kind === "area" ? path(text) : words(text)), "a shape can't be drawn");
    }
    expect(Object.values(names).every((index) => index in shapes), "a name without a shape");
    expect(steps.length > 0 && steps.every((step) => words(step.say)), "it has no steps");
    for (const step of steps) {
      const known = Object.keys(step.texts ?? {}).every((name) => Object.hasOwn(names, name));
      expect(known && Object.values(step.texts ?? {}).every(words), "a step changes what is not there");
      expect((step.moves ?? []).every(([d, looks]) => path(d) && simple(looks)), "a bad move");
      expect(Number.isFinite(step.reached ?? 0), "a step without its time");
    }
    expect(legend.every(([looks, text]) => simple(looks) && words(text)) && ended, "no legend");
  }

  /* "4 | 1 MB": the keys of all combinations. */
  function keysOf(lists) {
    const joined = lists.reduce((all, list) => all.flatMap((a) => list.map((b) => [...a, b])), [[]]);
    return joined.map((each) => each.join(" | "));
  }

  // -- the player -----------------------------------------------------------------------------
  class Player {
    constructor(root, found) {
      this.root = root;
      this.id = `player-${players++}`;
      this.build();
      this.open(found);
    }

    build() {
      this.title = element("p", { class: "player-title", id: `${this.id}-title` });
      this.about = element("p", { class: "player-about" });
      this.choices = element("div", { class: "player-choices" });
      const stage = { class: "player-stage", tabindex: "0", role: "group" };
      this.stage = element("div", { ...stage, "aria-labelledby": `${this.id}-title` });
      this.say = element("p", { class: "player-say", "aria-live": "polite" });
      this.playing = button("Play", "Play", () => this.play());
      this.slider = element("input", { type: "range", min: "0", "aria-label": "Step" });
      this.slider.addEventListener("input", () => this.go(Number(this.slider.value)));
      const controls = element(
        "div",
        { class: "player-controls" },
        button("First step", "|◀", () => this.go(0)),
        button("One step back", "◀", () => this.go(this.step - 1)),
        this.playing,
        button("One step on", "▶", () => this.go(this.step + 1)),
        button("Last step", "▶|", () => this.go(Infinity)),
        this.slider,
      );
      this.legend = element("ul", { class: "player-legend" });
      const parts = [this.title, this.about, this.choices, this.stage, this.say, controls];
      this.root.append(...parts, this.legend, this.ownFile());
      this.root.addEventListener("keydown", (event) => this.key(event));
    }

    ownFile() {
      const input = element("input", { type: "file", accept: ".json,application/json" });
      this.trouble = element("p", { class: "player-trouble", role: "alert" });
      input.addEventListener("change", () => input.files[0] && this.load(input.files[0]));
      const keys = "Keys: ← and → one step, Home and End, space to play. ";
      const label = element("label", {}, "Choose the trace-….json of `distlab trace`: ", input);
      const summary = element("summary", {}, "Keys, and your own trace");
      return element("details", { class: "player-own" }, summary, keys, label, this.trouble);
    }

    async load(file) {
      this.trouble.textContent = "";
      try {
        if (file.size > LARGEST_FILE) throw new BadFile("This file is larger than 20 MB.");
        this.open(readDocument(await file.text()));
      } catch (error) {
        const known = error instanceof BadFile;
        this.trouble.textContent = known ? error.message : "This file can't be read.";
      }
    }

    open(found) {
      this.found = found;
      this.title.textContent = found.title;
      this.about.textContent = found.about;
      const start = found.start ?? [];
      const choices = found.choices.map(({ name, values }, number) => {
        const select = element("select", {}, ...values.map((value) => new Option(value, value)));
        select.value = values.includes(start[number]) ? start[number] : values[0];
        select.addEventListener("change", () => this.choose());
        return { select, label: element("label", {}, `${name} `, select) };
      });
      const several = choices.filter(({ select }) => select.options.length > 1);
      this.choices.replaceChildren(...several.map(({ label }) => label));
      this.selects = choices.map(({ select }) => select);
      this.choose();
    }

    choose() {
      this.stop();
      this.scene = this.found.scenes[this.selects.map((select) => select.value).join(" | ")];
      this.slider.max = this.scene.steps.length - 1;
      this.picture();
      this.legend.replaceChildren(
        ...this.scene.legend.map(([looks, text]) =>
          element("li", {}, element("span", { class: `swatch ${looks}` }), text),
        ),
      );
      this.go(0);
    }

    /* The SVG with all shapes; those that have a name are drawn again in `go`. */
    picture() {
      const [width, height] = this.scene.size;
      const about = { role: "img", "aria-label": `${this.found.title}: the picture of this step` };
      const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, ...about });
      const head = { id: `${this.id}-head`, viewBox: "0 0 8 8", refX: 7, refY: 4, orient: "auto" };
      const size = { markerWidth: 9, markerHeight: 9, markerUnits: "userSpaceOnUse" };
      const marker = svg("marker", { ...head, ...size });
      marker.append(svg("path", { d: "M0 0L8 4L0 8Z", class: "head" }));
      const clip = svg("clipPath", { id: `${this.id}-clip` });
      this.window = svg("rect", { x: 0, y: 0, width: 0, height, class: "window" });
      clip.append(this.window);
      const timed = svg("g", { "clip-path": `url(#${this.id}-clip)` });
      for (const shape of this.scene.timed.map(whole)) draw[shape[0]](timed, shape, this.id);
      const [y1, y2] = this.scene.clock;
      this.clock = svg("line", { class: "clock", x1: 0, x2: 0, y1, y2 });
      this.moves = svg("g");
      const names = new Map(Object.entries(this.scene.names).map(([name, index]) => [index, name]));
      this.named = {};
      const shapes = this.scene.shapes.map((shape, index) => {
        const group = svg("g");
        const name = names.get(index);
        if (name !== undefined) {
          group.dataset.name = name;
          this.named[name] = { group, shape: whole(shape) };
        } else draw[shape[0]](group, whole(shape), this.id);
        return group;
      });
      picture.append(marker, clip, ...shapes, timed, this.clock, this.moves);
      this.stage.replaceChildren(picture);
    }

    go(wanted) {
      const last = this.scene.steps.length - 1;
      const forward = wanted === this.step + 1;
      this.step = Math.max(0, Math.min(last, wanted));
      const step = this.scene.steps[this.step];
      const texts = Object.assign({}, ...this.scene.steps.slice(0, this.step + 1).map((s) => s.texts));
      for (const [name, { group, shape }] of Object.entries(this.named)) {
        const text = texts[name] ?? shape[6];
        if (group.dataset.text === text) continue;
        group.dataset.text = text;
        group.replaceChildren();
        draw[shape[0]](group, [...shape.slice(0, 6), text], this.id);
      }
      this.move(step.moves ?? [], forward);
      this.window.style.width = `${step.reached ?? this.scene.size[0]}px`;
      this.clock.style.transform = `translateX(${step.reached ?? -9}px)`;
      const count = this.step ? `Step ${this.step} of ${last}. ` : "";
      this.say.textContent = count + step.say;
      this.slider.value = this.step;
      this.slider.setAttribute("aria-valuetext", `step ${this.step} of ${last}`);
      if (this.step === last) this.stop();
    }

    /* Arrows, and on each a dot that travels along it. */
    move(moves, forward) {
      this.moves.replaceChildren();
      const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
      for (const [d, looks] of moves) {
        const arrow = { class: `move ${looks}`, d, "marker-end": `url(#${this.id}-head)` };
        this.moves.append(svg("path", arrow));
        if (!forward || still) continue;
        const dot = svg("circle", { class: `dot ${looks}`, r: 6 });
        const path = { path: d, dur: "0.8s", begin: "indefinite", fill: "freeze" };
        const travel = svg("animateMotion", path);
        dot.append(travel);
        this.moves.append(dot);
        travel.addEventListener("endEvent", () => dot.remove());
        travel.beginElement();
      }
    }

    key(event) {
      if (event.altKey || event.ctrlKey || event.metaKey) return;
      if (event.target.closest("select, input, summary")) return;
      if (event.key in KEYS) this.go(this.step + KEYS[event.key]);
      else if (event.key === " " && !event.target.closest("button")) this.play();
      else return;
      event.preventDefault();
      event.stopPropagation(); // a site may turn its pages by the same keys
    }

    play() {
      if (this.timer) {
        this.stop();
        return;
      }
      const count = this.scene.steps.length;
      if (this.step === count - 1) this.go(0);
      this.timer = setInterval(() => this.go(this.step + 1), Math.max(500, Math.min(1800, 3e4 / count)));
      this.face("Pause");
    }

    stop() {
      clearInterval(this.timer);
      this.timer = null;
      this.face("Play");
    }

    face(label) {
      this.playing.textContent = label;
      this.playing.title = label;
      this.playing.setAttribute("aria-label", label);
    }
  }

  function start() {
    for (const root of document.querySelectorAll("div.player")) {
      new Player(root, readDocument(root.querySelector("script").textContent));
    }
  }

  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
