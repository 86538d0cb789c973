"use strict";
for (const chart of document.querySelectorAll(".chart")) {
  const [left, right, low, high] = chart.dataset.x.split(",").map(Number);
  const found = chart.querySelector(".found");
  const readout = chart.parentElement.querySelector(".readout");
  const lines = [...chart.querySelectorAll("g[data-steps]")].map((line) => ({
    run: line.dataset.run,
    steps: line.dataset.steps.split(",").map(Number),
    values: line.dataset.values.split(",").map(Number),
  }));
  chart.addEventListener("pointermove", (event) => {
    const box = chart.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * chart.viewBox.baseVal.width;
    const step = low + ((x - left) / (right - left)) * (high - low);
    let shown = null;
    const texts = lines.map((line) => {
      let best = 0;
      line.steps.forEach((each, index) => {
        if (Math.abs(each - step) < Math.abs(line.steps[best] - step)) best = index;
      });
      shown = shown ?? line.steps[best];
      return `${line.run ? line.run + ": " : ""}${line.values[best]} at step ${Math.round(line.steps[best])}`;
    });
    const at = left + ((shown - low) / (high - low)) * (right - left);
    found.setAttribute("x1", at);
    found.setAttribute("x2", at);
    found.style.visibility = "visible";
    readout.textContent = texts.join("; ");
  });
  chart.addEventListener("pointerleave", () => {
    found.style.visibility = "hidden";
    readout.textContent = "";
  });
}
