"use strict";
const at = (id) => document.getElementById(id);
const controls = ["label", "guidance", "steps", "seed", "strength", "moving"];
const canvas = at("pictures");
let socket, answer = null, number = 0, asked = new Map(), arrivals = [], waiting = false, device = "";

function wish() {
  return {
    number, label: at("label").value === "" ? null : Number(at("label").value), guidance: Number(at("guidance").value),
    steps: Number(at("steps").value), seed: Math.max(0, Math.floor(Number(at("seed").value)) || 0),
    strength: Number(at("strength").value), moving: at("moving").checked,
  };
}

function ask() {  // once a frame of the screen, however often a control moves
  for (const output of document.querySelectorAll("output")) output.value = at(output.htmlFor.value).value;
  at("mistake").textContent = "";  // at once: what was sent before may be answered before the next frame
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    if (socket.readyState !== WebSocket.OPEN) return;
    number += 1;
    asked.set(number, performance.now());
    arrivals = [];
    socket.send(JSON.stringify(wish()));
  });
}

function introduce(model) {
  device = model.device;
  at("label").replaceChildren(...[["", "all in turn"], ...model.classes.map((name, i) => [i, name]), ["-1", "none"]]
    .map(([value, text]) => new Option(text, value)));
  at("label").disabled = at("guidance").disabled = model.classes.length === 0;
  at("guidance").value = model.guidance;
  at("steps").max = Math.max(100, model.steps);
  at("steps").value = model.steps;
  ask();
}

async function show(frame, content) {
  const picture = await createImageBitmap(new Blob([content], { type: "image/png" }));
  [canvas.width, canvas.height] = [picture.width, picture.height];
  canvas.getContext("2d").drawImage(picture, 0, 0);
  const now = performance.now(), begin = asked.get(frame.number);
  for (const old of asked.keys()) if (old <= frame.number) asked.delete(old);
  arrivals = [...arrivals.filter((time) => now - time < 2000), now];
  const rate = arrivals.length > 1 ? 1000 * (arrivals.length - 1) / (now - arrivals[0]) : 0;
  const latency = begin === undefined ? frame.milliseconds : now - begin;
  at("speed").textContent = (rate ? `${rate.toFixed(1)} frames/s, ` : "") + `${latency.toFixed(0)} ms, ${device}`;
}

function connect() {
  const there = new URL("socket", location.href);
  there.protocol = "ws:";
  socket = new WebSocket(there);
  socket.binaryType = "arraybuffer";
  socket.onmessage = ({ data }) => {
    if (typeof data !== "string") { show(answer, data); return; }
    answer = JSON.parse(data);
    if (answer.classes) introduce(answer);
    if (answer.error) at("mistake").textContent = answer.error;
  };
  socket.onclose = () => { at("speed").textContent = "not connected: is cudiff play running, or are four pages open? Reload the page."; };
}

for (const id of controls) at(id).addEventListener("input", ask);
at("controls").addEventListener("submit", (event) => event.preventDefault());
at("next").addEventListener("click", () => { at("seed").value = wish().seed + 1; ask(); });
at("picture").addEventListener("change", async () => {
  const [file] = at("picture").files;
  if (!file) return;
  if (file.size > 8 * 2 ** 20) { at("mistake").textContent = "the picture is larger than 8 MB"; return; }
  socket.send(await file.arrayBuffer());
  at("forget").disabled = false;
  ask();
});
at("forget").addEventListener("click", () => {
  socket.send(JSON.stringify({ forget: true }));
  at("picture").value = "";
  at("forget").disabled = true;
  ask();
});
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("select, [type=number]")) return;
  if (event.key === "m") at("moving").click();
  else if (event.key === "n") at("next").click();
  else if (/^[0-9]$/.test(event.key) && at("label").querySelector(`[value="${event.key}"]`)) {
    at("label").value = event.key;
    ask();
  }
});
connect();
