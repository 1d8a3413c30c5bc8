// Puts updated parts from the server into the page. Without this script the pages work, and show
// changes when they are reloaded.
"use strict";

document.documentElement.classList.add("js");

const events = document.body.dataset.events;
const connection = document.getElementById("connection");

const waiting = {};

function place(name, html) {
  const part = document.querySelector(`[data-part="${name}"]`);
  // Keep an older revision that is being viewed.
  if (!part || part.dataset.pinned !== undefined) return;
  // Keep a part that is being edited, until it loses the focus.
  if (isBusy(part)) {
    waiting[name] = html;
    return;
  }
  delete waiting[name];
  const focused = part.contains(document.activeElement) ? keyOf(document.activeElement) : null;
  const opened = [...part.querySelectorAll("details")].map((one) => one.open);
  const scrolled = [...part.querySelectorAll(".wide")].map((one) => one.scrollLeft);
  part.innerHTML = html;
  part.querySelectorAll("details").forEach((one, index) => {
    if (opened[index] !== undefined) one.open = opened[index];
  });
  part.querySelectorAll(".wide").forEach((one, index) => {
    if (scrolled[index]) one.scrollLeft = scrolled[index];
  });
  if (focused) {
    // Keep the place of keyboard users.
    const same = [...part.querySelectorAll(FOCUSABLE)].find((one) => keyOf(one) === focused);
    if (same) same.focus({ preventScroll: true });
  }
  fillNames(part);
}

const FOCUSABLE = "a, summary, [tabindex]";

function keyOf(element) {
  const name = element.getAttribute("href") ?? element.getAttribute("aria-label");
  return `${element.tagName} ${name ?? element.textContent}`;
}

function isBusy(part) {
  const active = document.activeElement;
  if (active && part.contains(active) && active.matches("input, textarea, select, button")) {
    return true;
  }
  return [...part.querySelectorAll("textarea, input")].some((one) => one.dataset.edited);
}

function fillNames(within) {
  const kept = document.cookie.match(/(?:^|; )replanning-name=([^;]*)/);
  if (!kept) return;
  within.querySelectorAll("[data-name]").forEach((one) => {
    if (!one.value) one.value = decodeURIComponent(kept[1]);
  });
}

document.addEventListener("input", (event) => {
  const input = event.target;
  input.dataset.edited = "yes";
  if (input.id === "revision") showRevision(input);
});

document.addEventListener("focusout", () => {
  // The next element gets the focus only after this event.
  setTimeout(() => {
    for (const [name, html] of Object.entries(waiting)) place(name, html);
  });
});

document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  const told = document.getElementById("told");
  try {
    await navigator.clipboard.writeText(button.dataset.copy);
    button.textContent = "Copied";
    told.textContent = "Copied";
  } catch {
    // Browsers allow writing to the clipboard only on local pages or with TLS.
    getSelection().selectAllChildren(button.parentElement.querySelector("code"));
    told.textContent = "Selected: copy it with your keyboard";
  }
});

let asked = 0;

async function showRevision(input) {
  const number = Number(input.value);
  const last = Number(input.max);
  const form = input.form;
  form.querySelector("output").textContent = `${number} of ${last}`;
  const mine = ++asked;
  const response = await fetch(form.dataset.revisions + number);
  if (!response.ok || mine !== asked) return;
  const html = await response.text();
  const part = form.closest("[data-part]");
  part.innerHTML = html;
  if (number === last) {
    delete part.dataset.pinned;
  } else {
    part.dataset.pinned = "";
  }
  part.querySelector("#revision").focus();
}

if (events) {
  const source = new EventSource(events);
  source.addEventListener("parts", (event) => {
    const reading = document.getElementById("reading");
    if (reading) reading.remove();
    for (const [name, html] of Object.entries(JSON.parse(event.data))) place(name, html);
  });
  source.addEventListener("problem", (event) => {
    connection.textContent = JSON.parse(event.data).text;
    source.close();
  });
  source.onopen = () => { connection.textContent = ""; };
  source.onerror = () => { connection.textContent = "No connection: this page may be out of date."; };
}
fillNames(document);

// The slider may have been moved before this script was loaded.
const slider = document.getElementById("revision");
if (slider && slider.value !== slider.defaultValue) showRevision(slider);
