// Lines over time, by uPlot.
import { colour } from "./dom.js";

// Series: [{label, colour (a variable of the style sheet), value: number -> text}].
export class Chart {
  constructor(host, series, height = 150) {
    this.host = host;
    this.series = series;
    this.height = height;
    this.data = [[], ...series.map(() => [])];
    this.seen = new ResizeObserver(() => this.plot?.setSize({ width: this.width(), height: this.height }));
    this.seen.observe(host);
    this.draw();
  }

  width() {
    return Math.max(this.host.clientWidth, 120);
  }

  draw() {
    this.plot?.destroy();
    const axis = { stroke: colour("soft"), grid: { stroke: colour("line"), width: 1 }, ticks: { show: false } };
    const first = this.series[0].value;
    this.plot = new uPlot(
      {
        width: this.width(),
        height: this.height,
        cursor: { y: false },
        padding: [8, 8, 0, 0],
        legend: { show: this.series.length > 1 },
        axes: [
          { ...axis, space: 80, size: 30, values: "{HH}:{mm}:{ss}" },
          { ...axis, size: 56, values: (_, ticks) => ticks.map(first) },
        ],
        scales: { y: { range: (_, low, high) => [0, Math.max(high, 1e-3) * 1.05] } },
        series: [
          { value: "{HH}:{mm}:{ss}" },
          ...this.series.map((s) => ({
            label: s.label,
            stroke: colour(s.colour),
            width: 1.5,
            points: { show: false },
            value: (_, v) => (v === null || v === undefined ? "-" : s.value(v)),
          })),
        ],
      },
      this.data,
      this.host,
    );
  }

  set(data) {
    this.data = data;
    this.plot.setData(data);
  }

  close() {
    this.seen.disconnect();
    this.plot.destroy();
  }
}
