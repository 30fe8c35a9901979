"use strict";
// Draws the charts; on a page of `report --serve` it also asks for new content.
const errors = [];
addEventListener("error", (event) => note(event.message));
addEventListener("unhandledrejection", (event) => note(event.reason));

function note(error) {
  errors.push(String(error));
  document.body.dataset.errors = JSON.stringify(errors);
}

function numPoints(view) {
  const sources = view.model.renderers.map((renderer) => renderer.data_source);
  return sources.reduce((sum, source) => sum + (source ? source.get_length() || 0 : 0), 0);
}

async function draw(charts) {
  for (const [id, item] of Object.entries(charts)) {
    const element = document.getElementById(id);
    const views = await Bokeh.embed.embed_item(item, id);
    const view = [...views].find((each) => each.model.id === item.root_id);
    element.dataset.points = numPoints(view);
  }
  document.body.dataset.errors = JSON.stringify(errors);
  document.body.dataset.drawn = Object.keys(charts).length;
}

async function update() {
  const token = new URLSearchParams(location.search).get("token");
  const query = new URLSearchParams({ token, state: document.body.dataset.state || "" });
  const response = await fetch(`content?${query}`).catch(() => null);
  if (!response || response.status !== 200) return;
  const content = await response.json();
  const main = document.getElementById("content");
  const open = [...main.querySelectorAll("details[open]")].map((each) => each.id);
  main.style.minHeight = `${main.offsetHeight}px`;
  for (const document_ of Bokeh.documents.splice(0)) document_.clear();
  main.innerHTML = content.html;
  for (const each of main.querySelectorAll("details")) each.open = open.includes(each.id);
  await draw(content.charts);
  main.style.minHeight = "";
  document.body.dataset.state = content.state;
}

Bokeh.set_log_level("warn");
draw(JSON.parse(document.getElementById("charts").textContent)).catch(note);
if ("live" in document.body.dataset) setInterval(() => update().catch(note), 5000);
