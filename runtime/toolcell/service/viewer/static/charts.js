// Draw the tables of data below a chart. The numbers are those of the table; no other data is on the page.
"use strict";
(() => {
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  const draw = (figure) => {
    const place = figure.querySelector(".plot");
    const heads = [...figure.querySelectorAll("thead th")];
    const rows = [...figure.querySelectorAll("tbody tr")];
    const xs = rows.map((row) => Number(row.cells[0].dataset.x));
    const columns = heads.slice(1).map((_, at) => rows.map((row) => Number(row.cells[at + 1].textContent)));
    const axis = { stroke: colour("quiet"), grid: { stroke: colour("line"), width: 1 }, ticks: { show: false } };
    place.replaceChildren();
    new uPlot(
      {
        width: place.clientWidth,
        height: 220,
        tzDate: (at) => uPlot.tzDate(new Date(at * 1e3), "UTC"),
        series: [
          {},
          ...heads.slice(1).map((head) => ({
            label: head.textContent,
            stroke: colour(head.dataset.series),
            width: 1.5,
            points: { show: rows.length < 60, size: 4 },
          })),
        ],
        axes: [axis, { ...axis, size: 56 }],
        scales: { y: { range: (_, low, high) => [0, Math.max(1e-9, high * 1.05)] } },
        legend: { live: false },
      },
      [xs, ...columns],
      place,
    );
  };

  const drawAll = () => document.querySelectorAll("figure.chart").forEach(draw);
  drawAll();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  let last = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== last) drawAll();
    last = innerWidth;
  });
})();
