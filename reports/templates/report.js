"use strict";
(() => {
  const ROUTER_COLOURS = 8;
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const hidden = new Set();
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const routerColour = (place) => css(`--router-${place % ROUTER_COLOURS}`);
  const dark = () => matchMedia("(prefers-color-scheme: dark)").matches;

  // Replicas share one muted scale from cool to warm, neighbours alternating in lightness; routers alone are vivid.
  const replicaColour = (place, count) => {
    const share = count > 1 ? place / (count - 1) : 0.3;
    const light = (dark() ? 60 : 42) + (place % 2 ? 14 : 0);
    return `hsl(${Math.round(222 - 204 * share)} 26% ${light}%)`;
  };

  const colourOf = (meta) => {
    if (meta.mark) return css("--warn");
    if (meta.phase !== undefined) return css(`--phase-${meta.phase}`);
    return meta.router === undefined ? replicaColour(meta.replica, meta.replicas) : routerColour(meta.router);
  };

  // Black or white, whichever stands out more on a bar: by relative luminance (WCAG).
  const readable = (colour) => {
    const context = readable.context ||= document.createElement("canvas").getContext("2d");
    context.fillStyle = colour;
    const parts = [1, 3, 5].map((at) => parseInt(context.fillStyle.slice(at, at + 2), 16) / 255);
    const [red, green, blue] = parts.map((part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.2 ? "#14161a" : "#ffffff";
  };

  const axis = (given, ink) => ({
    gridcolor: css("--grid"), zeroline: false, linecolor: css("--line"), tickcolor: css("--line"), automargin: true,
    ...given, tickfont: { size: 12, color: ink }, title: { ...(given.title || {}), font: { size: 12.5, color: ink } },
  });

  function themed(figure) {
    const ink = css("--soft");
    const data = figure.data.map((trace) => {
      const meta = trace.meta;
      const colour = colourOf(meta);
      const own = { ...trace, visible: !hidden.has(meta.router) };
      if (trace.type === "bar") {
        const inside = { color: readable(colour), size: 12 };
        return { ...own, marker: { color: colour, opacity: meta.faint ? 0.45 : 1 }, insidetextfont: inside, outsidetextfont: { color: ink, size: 12 } };
      }
      return { ...own, line: { ...trace.line, color: colour }, marker: { color: colour, size: 7 } };
    });
    const layout = {
      ...figure.layout, autosize: true, height: figure.height, showlegend: Boolean(figure.layout.showlegend),
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", traceorder: "normal", font: { size: 12.5, color: ink } },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 52, r: 18, t: figure.layout.annotations || figure.layout.showlegend ? 34 : 14, b: 44 },
      font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: css("--ink") },
      hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { color: css("--ink"), size: 13 }, namelength: -1 },
    };
    for (const key of Object.keys(layout)) if (/^[xy]axis\d*$/.test(key)) layout[key] = axis(layout[key], ink);
    layout.shapes = (layout.shapes || []).map((shape) => ({ ...shape, line: { ...shape.line, color: ink } }));
    layout.annotations = (layout.annotations || []).map(({ router, small, ...note }) => ({ ...note, font: small ? { size: 11, color: ink } : { size: 13, color: routerColour(router) } }));
    return [data, layout];
  }

  const config = { displayModeBar: false, responsive: true }; // drag zooms, a double click zooms out

  function paint() {
    for (const chip of document.querySelectorAll("i[data-router]")) chip.style.background = routerColour(chip.dataset.router);
    for (const chip of document.querySelectorAll("i[data-replica]")) chip.style.background = replicaColour(Number(chip.dataset.replica), Number(chip.dataset.replicas));
  }

  async function draw() {
    for (const figure of figures) {
      const [data, layout] = themed(figure);
      await Plotly.react(figure.id, data, layout, config);
    }
    document.documentElement.dataset.plots = String(figures.length);
  }

  async function unpack() {
    const text = document.getElementById("plotly-packed").textContent;
    const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
  }

  paint();
  for (const button of document.querySelectorAll(".legend button")) {
    button.addEventListener("click", () => {
      const router = Number(button.dataset.router);
      if (!hidden.delete(router)) hidden.add(router);
      button.setAttribute("aria-pressed", String(!hidden.has(router)));
      draw();
    });
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { paint(); draw(); });
  if (figures.length) unpack().then(draw).catch((error) => {
    for (const place of document.querySelectorAll(".plot")) {
      place.classList.add("failed");
      place.textContent = `This browser could not draw the plot (${error.message}); the tables hold the same figures.`;
    }
  });
})();
