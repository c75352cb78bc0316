// The current load of a model: rate, times, instances, batches, memory; for an ensemble, the same for each step of its pipeline.

const NAMES_MAX = 3;  // of tensors between two stages

function liveSection(model, stateOf) {
  const isPipeline = model.ensemble.length > 0;
  const tiles = element("dl", { class: "tiles live" });
  const pipeline = isPipeline ? pipelineOf(model, stateOf) : null;
  const section = element("section", { hidden: true }, element("h2", {}, "Now"), tiles, ...(pipeline ? [pipeline.element] : []));
  return {
    element: section,
    async update() {
      try {
        const [now, { model_stats: stats }] = await Promise.all([askJson(`${model.path}/explain`), askJson(`${model.path}/stats`)]);
        tiles.replaceChildren(...liveTiles(model, now, stats, isPipeline));
        pipeline?.update(now.steps);
        section.hidden = false;
      } catch {
        section.hidden = true;  // this key may not, or the model has gone
      }
    },
  };
}

function rateText(now) {
  return `${numberText(Number((now.requests.success / (now.seconds || 1)).toPrecision(3)))}/s`;  // 0 s: it has just been loaded
}

function liveTiles(model, now, stats, isPipeline) {
  const { requests, time_us: time, instances, batches } = now;
  const failed = Object.values(requests.failed).reduce((sum, count) => sum + count, 0);
  const inTime = now.seconds < 1 ? "so far" : `in the last ${Math.round(now.seconds)} s`;
  const waits = [`${requests.waiting.toLocaleString("en")} waiting`, ...(failed ? [`${failed.toLocaleString("en")} failed`] : [])].join(", ");
  const tiles = [tile("Requests", rateText(now), requests.success || failed || requests.waiting ? waits : `none ${inTime}`)];
  tiles.push(requests.success
    ? tile("Time of a request", durationText(time.request / 1000), isPipeline ? inTime : `${durationText(time.queue / 1000)} in the queue`)
    : tile("Time of a request", "–"));
  if (isPipeline) return tiles;
  const range = instances.min < instances.max ? ` (${instances.min} to ${instances.max})` : "";
  tiles.push(tile("Instances", `${instances.count}${range}`, `${Math.round(100 * instances.busy)} % busy`));
  if (model.max_batch_size > 1) tiles.push(tile("Batches", batches.count ? `${Number(batches.mean_size.toPrecision(2))} rows` : "–", `up to ${model.max_batch_size}`));
  const memory = stats.flatMap((version) => version.memory_usage);
  const bytes = memory.reduce((sum, part) => sum + Number(part.byte_size), 0);
  if (bytes) tiles.push(tile("Memory", sizeText(bytes), [...new Set(memory.map((part) => part.type))].join(" and ")));
  return tiles;
}

// The steps in stages: a stage begins when the tensors that it takes are there.
function stagesOf(steps, inputs) {
  const known = new Set(inputs);
  const stages = [];
  let rest = steps;
  while (rest.length) {
    const ready = rest.filter((step) => step.takes.every((name) => known.has(name)));
    const stage = ready.length ? ready : rest;
    stages.push(stage);
    stage.forEach((step) => step.gives.forEach((name) => known.add(name)));
    rest = rest.filter((step) => !stage.includes(step));
  }
  return stages;
}

function pipelineOf(model, stateOf) {
  const facts = new Map();  // by name of a model: the texts below it, in each of its steps
  const step = ({ model: name }) => {
    const dot = element("span", { class: "dot" });
    const text = element("small");
    facts.set(name, [...facts.get(name) ?? [], { dot, text }]);
    return element("a", { class: "step", href: `#${encodeURIComponent(name)}` }, element("span", { class: "name" }, dot, " ", ...breakable(name)), text);
  };
  const arrow = (names, kind = "arrow") => element("span", { class: kind, title: names.join(", ") },
    names.length > NAMES_MAX ? `${names.length} tensors` : names.join(", "));
  const stages = stagesOf(model.ensemble, model.inputs.map(({ name }) => name));
  const parts = stages.flatMap((stage) =>
    [arrow([...new Set(stage.flatMap(({ takes }) => takes))]), element("div", { class: "stage" }, ...stage.map(step))]);
  parts.push(arrow(model.outputs.map(({ name }) => name), "arrow last"));
  const flow = element("div", { class: "pipeline", role: "group", "aria-label": "Pipeline" }, ...parts);
  return {
    element: flow,
    update(steps) {
      const found = new Map(steps.map((now) => [now.model_name, now]));
      for (const [name, shown] of facts) {
        const [state, kind] = stateOf(name);
        const now = found.get(name);
        const parts = state === "ready" && now ? [now.requests.success ? durationText(now.time_us.request / 1000) : "idle",
          ...(now.requests.success ? [rateText(now)] : []), plural(now.instances.count, "instance")] : [state];
        for (const { dot, text } of shown) {
          dot.className = `dot ${kind}`;
          text.textContent = parts.join(" · ");
        }
      }
    },
  };
}
