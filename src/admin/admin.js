// Fetches the page anew every two seconds, and sends what a button says.
"use strict";

const told = document.getElementById("told");

async function show() {
  try {
    const response = await fetch(location.href);
    if (!response.ok) throw new Error(`${response.status} ${response.statusText}`);
    const page = new DOMParser().parseFromString(await response.text(), "text/html");
    document.querySelector("main").replaceWith(page.querySelector("main"));
    told.textContent = "";
  } catch (error) {
    told.textContent = `not up to date: ${error.message}`;
  }
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest("button[data-url]");
  if (!button) return;
  const { method, url } = button.dataset;
  const headers = { "x-semaphore-admin": "1" };
  let body;
  if (method === "PUT") {
    const field = url.slice(url.lastIndexOf("/") + 1);
    const number = prompt(field === "weight" ? "What weight, from 1 to 64?" : "How many permits?");
    if (number === null || number.trim() === "") return;
    headers["content-type"] = "application/json";
    body = JSON.stringify({ [field]: Number(number) });
  } else if (!confirm(`${button.textContent}?`)) {
    return;
  }
  const response = await fetch(url, { method, headers, body });
  const problem = response.ok ? "" : (await response.json()).detail;
  await show();
  if (problem) told.textContent = problem;
});

setInterval(show, 2000);
