
// What is measured now, on the page of a run in progress. Its server sends an event a second.

const live = document.getElementById("live");
const points = [];
const nowParts = {
  badge: element("span", { class: "badge live" }, "live"),
  what: element("span"),
  meter: element("i"),
  tiles: element("dl", { class: "tiles" }),
  plots: element("div"),
};

function showNow(now) {
  const measured = now.window ? `window ${now.window}${now.windows ? ` of ${now.windows}` : ""}` : "";
  const place = now.count > 1 ? `level ${now.number} of ${now.count}` : "";
  const left = now.left ? `at most ${now.left} left` : "";
  nowParts.badge.textContent = "live";
  nowParts.badge.className = "badge live";
  nowParts.what.textContent = ` ${[now.level, place, measured, left].filter(Boolean).join(" · ")}`;
  nowParts.meter.style.width = `${100 * now.share}%`;
  const tile = (name, value) => element("div", {}, element("dt", {}, name), element("dd", {}, value));
  const last = points[points.length - 1];
  if (!last) return;
  const [, rate, median, slow] = last;
  nowParts.tiles.replaceChildren(
    tile("Inferences/s", threeDigits(rate)),
    tile("Median latency", median ? durationText(median) : "-"),
    tile("p99", slow ? durationText(slow) : "-"),
    tile("In flight", now.inFlight.toLocaleString("en")),
    tile("Errors in this level", now.errors.toLocaleString("en")),
  );
}

function drawNow() {
  // Not under a pointer or a cursor that reads values, and not where the page is not seen.
  if (document.hidden || points.length < 2 || nowParts.plots.matches(":hover, :focus-within")) return;
  const marks = points.filter(([, , , , level], place) => place && level !== points[place - 1][4]);
  const common = {
    x: { kind: "linear", unit: "seconds", range: [points[0][0], points[points.length - 1][0]] },
    stops: points.map(([time, rate, median, slow, level]) => ({
      x: time,
      title: `${threeDigits(time / 1000)} s, ${level}`,
      rows: [
        ["Inferences/s", null, threeDigits(rate), rate],
        ["Median", color(0), durationText(median), median || NaN],
        ["p99", color(1), durationText(slow), slow || NaN],
      ],
    })),
    marks: marks.map(([time]) => [time, ""]),
    peers: [],
  };
  const line = (name, place, value) => ({ name, color: color(place), points: points.map((point) => [point[0], value(point)]) });
  const lines = [line("Median", 0, (point) => point[2] || NaN), line("p99", 1, (point) => point[3] || NaN)];
  const rates = { ...common, stops: common.stops.map((stop) => ({ ...stop, rows: stop.rows.map(([name, , text, value], place) => [name, place ? null : color(0), text, value]) })) };
  nowParts.plots.replaceChildren(
    plot({ ...rates, title: "Inferences per second", height: 170, series: [line("Inferences/s", 0, (point) => point[1])], y: { kind: "linear", unit: "count", name: "Inferences per second" } }),
    plot({ ...common, title: "Latency", height: 190, series: lines, y: { kind: "linear", unit: "duration", name: "Latency" } }),
    legend(lines.map(({ name, color: shade }) => [name, shade])),
  );
}

live.append(
  element("p", { class: "headline" }, nowParts.badge, nowParts.what),
  element("div", { class: "meter" }, nowParts.meter),
  nowParts.tiles,
  nowParts.plots,
);
live.hidden = false;
nowParts.what.textContent = " Starting";

const events = new EventSource("events");
// The server begins with all that it has.
events.addEventListener("open", () => points.splice(0));
events.addEventListener("message", (event) => {
  const now = JSON.parse(event.data);
  if (now.page !== data.page) {
    events.close();
    location.reload();
    return;
  }
  points.push(...now.points);
  points.splice(0, points.length - data.pointsMax);
  showNow(now);
  drawNow();
});
events.addEventListener("error", () => {
  nowParts.badge.textContent = "no connection";
  nowParts.badge.className = "badge bad";
  nowParts.what.textContent = " The run has ended, or cannot be reached. What follows is the last that was seen.";
});
