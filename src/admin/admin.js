// Keeps the page up to date, and sends what was confirmed.
"use strict";

const EVERY_MS = 2000;
const PATIENCE_MS = 5000;

const by = (id) => document.getElementById(id);
const main = by("main");
const dialog = by("ask");
let shownAt = by("problem") ? null : Date.now();
// Counts changes: what was asked for before one is not shown after it.
let generation = 0;
// What goes on with the answer to the question that is open.
let answered = null;

// ----- what is shown -----

async function fetchPage() {
  let response, text;
  try {
    const signal = AbortSignal.timeout(PATIENCE_MS);
    response = await fetch(location.href, { signal, cache: "no-store" });
    text = await response.text();
  } catch (error) {
    throw new Error(error.name === "TimeoutError"
      ? `the server did not answer within ${PATIENCE_MS / 1000} s`
      : "the server cannot be reached");
  }
  const page = new DOMParser().parseFromString(text, "text/html");
  const fresh = page.getElementById("main");
  if (!response.ok) {
    const problem = page.getElementById("problem");
    throw new Error(problem ? problem.textContent : `${response.status} ${response.statusText}`);
  }
  if (!fresh) throw new Error("the answer is another page; is a login needed?");
  return { fresh, title: page.title };
}

async function refresh() {
  const asked = generation;
  try {
    const { fresh, title } = await fetchPage();
    if (asked !== generation) return;
    const focused = document.activeElement;
    const inMain = main.contains(focused) && focused !== main;
    patch(main, fresh);
    // What had the focus is gone: the next key begins at the top of the content, not of the page.
    if (inMain && !main.contains(document.activeElement)) main.focus({ preventScroll: true });
    if (document.title !== title) document.title = title;
    shownAt = Date.now();
    say(null);
  } catch (error) {
    if (asked === generation) say(error.message);
  }
}

// An alert is read aloud when it changes: the age, which does at all times, is beside it.
function say(reason) {
  by("stale").hidden = reason === null;
  const text = reason === null ? "" : `Not up to date: ${reason}`;
  if (by("stale-reason").textContent !== text) by("stale-reason").textContent = text;
  tick();
}

function tick() {
  const age = shownAt === null ? null : Math.round((Date.now() - shownAt) / 1000);
  by("stale-age").textContent =
    age === null ? "Nothing was shown yet." : `What is shown is ${age} s old.`;
  by("fresh").textContent = age === null || !by("stale").hidden ? "" : `Shown: ${age} s ago`;
}

// Makes one element like another, and keeps what is the same: the focus, a selection, and the button under a pointer.
// Children with an id are told apart by it.
function patch(old, fresh) {
  if (old.nodeType === Node.TEXT_NODE && fresh.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  if (old.nodeName !== fresh.nodeName || buttonOf(old) !== buttonOf(fresh)) {
    old.replaceWith(fresh);
    return;
  }
  for (const { name } of [...old.attributes]) {
    if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  }
  for (const { name, value } of fresh.attributes) {
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  const known = new Map([...old.children].filter((one) => one.id).map((one) => [one.id, one]));
  let at = old.firstChild;
  for (const node of [...fresh.childNodes]) {
    const same = node.id ? known.get(node.id) : at && !at.id ? at : null;
    if (!same) {
      old.insertBefore(node, at);
      continue;
    }
    if (same === at) at = at.nextSibling;
    else old.insertBefore(same, at);
    patch(same, node);
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

// A button never becomes the button of something else.
function buttonOf(node) {
  const { method, url, field, clears } = node.dataset ?? {};
  return url === undefined ? "" : `${method} ${url} ${field} ${clears}`;
}

// ----- what is done -----

// Asks, and gives what was confirmed. The dialog is no part of what is shown anew, and the button's data is read once.
function ask({ title, text, field, label, min, max, now, confirm }) {
  by("ask-title").textContent = title;
  by("ask-text").textContent = text;
  by("ask-confirm").textContent = confirm;
  const number = by("ask-number");
  by("ask-field").hidden = field === undefined;
  number.disabled = field === undefined;
  if (field !== undefined) {
    by("ask-label").textContent = label;
    number.min = min;
    number.max = max;
    number.value = now ?? "";
  }
  dialog.showModal();
  // What cannot be taken back is not what the key for "yes" does.
  (field === undefined ? by("ask-cancel") : number).focus();
  if (field !== undefined) number.select();
  return new Promise((resolve) => { answered = resolve; });
}

function answer(value) {
  const resolve = answered;
  answered = null;
  dialog.close();
  resolve?.(value);
}

by("ask-cancel").addEventListener("click", () => answer(null));
by("ask-form").addEventListener("submit", (event) => {
  // Reached only with a number that the field allows, or without one.
  event.preventDefault();
  answer({ number: by("ask-number").valueAsNumber });
});
// By Escape. It is told late: the next question may be open by then.
dialog.addEventListener("close", () => {
  if (!dialog.open) answer(null);
});

async function send({ method, url, field, clears, windowMs }, number) {
  const headers = { "x-semaphore-admin": "1" };
  let body;
  if (field !== undefined || clears !== undefined) {
    headers["content-type"] = "application/json";
    // A rate is set with its window.
    const rest = windowMs === undefined ? {} : { window_ms: Number(windowMs) };
    body = JSON.stringify(field === undefined ? { [clears]: null } : { [field]: number, ...rest });
  }
  let response;
  try {
    response = await fetch(url, { method, headers, body, signal: AbortSignal.timeout(2 * PATIENCE_MS) });
  } catch {
    throw new Error("no answer; it may or may not have been done");
  }
  if (response.ok) return;
  const problem = await response.json().catch(() => null);
  throw new Error(problem?.detail ?? `${response.status} ${response.statusText}`);
}

function tell(text, failed) {
  const told = by("told");
  told.textContent = text;
  told.classList.toggle("failed", failed);
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest("button[data-url]");
  if (!button || dialog.open) return;
  answered?.(null);
  const action = { ...button.dataset, confirm: button.firstChild.textContent };
  const confirmed = await ask(action);
  if (confirmed === null) return;
  const what = action.field === undefined ? action.title.replace(/\?$/, "") : `${action.title}: ${confirmed.number}`;
  try {
    await send(action, confirmed.number);
    tell(`Done: ${what}`, false);
  } catch (error) {
    tell(`Failed: ${what}: ${error.message}`, true);
  }
  generation += 1;
  await refresh();
});

async function keep() {
  if (!document.hidden) await refresh();
  setTimeout(keep, EVERY_MS);
}

tick();
setInterval(tick, 1000);
setTimeout(keep, EVERY_MS);
