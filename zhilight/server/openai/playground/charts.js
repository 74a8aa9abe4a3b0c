// Small line charts of the server's own metrics, read once a second from /metrics.

const HISTORY = 120;

export function parseMetrics(text) {
  // Sum of each metric's samples over its labels; buckets are left out.
  const sums = new Map();
  for (const line of text.split("\n")) {
    const match = /^([A-Za-z_:][\w:]*)(?:\{.*\})? (\S+)$/.exec(line);
    if (match && !match[1].endsWith("_bucket")) {
      sums.set(match[1], (sums.get(match[1]) ?? 0) + Number(match[2]));
    }
  }
  return sums;
}

const value = (name) => (now) => now.get(name) ?? 0;
const rate = (name) => (now, before, seconds) => before ? Math.max(0, (now.get(name) ?? 0) - (before.get(name) ?? 0)) / seconds : 0;
function mean(name) {
  let last = 0;
  return (now, before) => {
    const count = (now.get(name + "_count") ?? 0) - (before?.get(name + "_count") ?? 0);
    if (count > 0) last = ((now.get(name + "_sum") ?? 0) - (before?.get(name + "_sum") ?? 0)) / count;
    return last;
  };
}

const SERIES = [
  { title: "Running", unit: "", read: value("zhilight:num_requests_running") },
  { title: "Waiting", unit: "", read: value("zhilight:num_requests_waiting") },
  { title: "KV cache", unit: " %", scale: 100, top: 100, read: value("zhilight:kv_cache_usage_perc") },
  { title: "Output tokens/s", unit: "", read: rate("zhilight:generation_tokens_total") },
  { title: "Time to first token", unit: " ms", scale: 1000, read: mean("zhilight:time_to_first_token_seconds") },
];

export class Charts {
  constructor(container) {
    this.before = null;
    this.beforeTime = 0;
    this.series = SERIES.map((series) => {
      const box = document.createElement("div");
      box.className = "chart";
      const caption = document.createElement("div");
      caption.className = "caption";
      const figure = document.createElement("span");
      caption.append(series.title, figure);
      const canvas = document.createElement("canvas");
      box.append(caption, canvas);
      container.append(box);
      return { ...series, figure, canvas, values: [] };
    });
  }

  async update(url) {
    const response = await fetch(url);
    if (!response.ok) throw new Error(`metrics: ${response.status}`);
    const now = parseMetrics(await response.text());
    const time = performance.now() / 1000;
    for (const series of this.series) {
      const read = series.read(now, this.before, time - this.beforeTime) * (series.scale ?? 1);
      series.values.push(read);
      if (series.values.length > HISTORY) series.values.shift();
      series.figure.textContent = (read >= 100 || Number.isInteger(read) ? read.toFixed(0) : read.toFixed(1)) + series.unit;
      draw(series);
    }
    this.before = now;
    this.beforeTime = time;
  }
}

function draw({ canvas, values, top }) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  if (canvas.width !== width * ratio) {
    canvas.width = width * ratio;
    canvas.height = height * ratio;
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  const highest = top ?? Math.max(1, ...values);
  pen.strokeStyle = getComputedStyle(document.querySelector("a")).color;
  pen.lineWidth = 1.5;
  pen.beginPath();
  values.forEach((each, index) => {
    const x = width - (values.length - 1 - index) * width / (HISTORY - 1);
    const y = height - 3 - (height - 6) * Math.min(1, each / highest);
    index ? pen.lineTo(x, y) : pen.moveTo(x, y);
  });
  pen.stroke();
}
