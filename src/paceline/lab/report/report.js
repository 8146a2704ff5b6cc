"use strict";
const data = JSON.parse(document.getElementById("report-data").textContent);
const options = { displaylogo: false, responsive: true, modeBarButtonsToRemove: ["lasso2d", "select2d"] };
const draw = (id, figure) => Plotly.react(id, figure.data, figure.layout, options);

/* The boxes above the charts show and hide an engine in all of them. */
const boxes = Array.from(document.querySelectorAll(".legend input"));
const filter = () => {
  const shown = new Set(boxes.filter((box) => box.checked).map((box) => box.value));
  for (const plot of document.querySelectorAll(".js-plotly-plot")) {
    if (plot.data.length) Plotly.restyle(plot, { visible: plot.data.map((trace) => shown.has(trace.legendgroup)) });
  }
};
for (const box of boxes) box.addEventListener("change", filter);

for (const [id, figure] of Object.entries(data.charts)) draw(id, figure);

const choice = document.getElementById("stage");
if (choice) {
  const show = () => {
    const stage = data.stages[Number(choice.value)];
    draw("requests-ttft", stage.ttft);
    draw("requests-open", stage.open);
    document.getElementById("stage-note").textContent = stage.note;
    document.getElementById("stage-name").textContent = stage.name;
    filter();
  };
  choice.addEventListener("change", show);
  show();
}

/* On paper a chart that is too wide shrinks, which an SVG does only with a viewBox. */
const drawings = () => document.querySelectorAll(".main-svg");
window.addEventListener("beforeprint", () => drawings().forEach((svg) =>
  svg.setAttribute("viewBox", `0 0 ${svg.getAttribute("width")} ${svg.getAttribute("height")}`)));
window.addEventListener("afterprint", () => drawings().forEach((svg) => svg.removeAttribute("viewBox")));

/* A click on a column's head sorts by it, a second one the other way round; missing values stay last. */
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const head = button.parentElement;
    const direction = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    const body = head.closest("table").tBodies[0];
    const key = (row) => row.cells[head.cellIndex].dataset.value ?? row.cells[head.cellIndex].textContent.trim();
    const compare = (a, b) => {
      if (a === "" || b === "") return (a === "") - (b === "");
      const numbers = [Number(a), Number(b)];
      return direction * (numbers.some(Number.isNaN) ? a.localeCompare(b, "en", { numeric: true }) : numbers[0] - numbers[1]);
    };
    const rows = Array.from(body.rows, (row) => [key(row), row]);
    rows.sort((one, two) => compare(one[0], two[0])).forEach(([, row]) => body.append(row));
    for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", direction === 1 ? "ascending" : "descending");
  });
}
