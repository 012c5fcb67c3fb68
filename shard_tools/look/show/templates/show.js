"use strict";
// Adds keys, copying and reasons to pages that can be read without. It asks only for what the page already shows.
(() => {
  const home = document.querySelector("a.mark").getAttribute("href");  // "/", or that of this browser's session

  const dialog = document.getElementById("keys");
  const button = document.querySelector("[data-keys]");
  if (button && dialog.showModal) {
    button.hidden = false;
    button.addEventListener("click", () => dialog.showModal());
  }

  for (const one of document.querySelectorAll("[data-copy]")) {
    if (!navigator.clipboard) break;
    one.hidden = false;
    one.addEventListener("click", async () => {
      const text = one.previousElementSibling.textContent;
      await navigator.clipboard.writeText(text.startsWith("/") ? location.origin + home + text.slice(1) : text);
      one.textContent = "Copied";
      setTimeout(() => { one.textContent = "Copy"; }, 1500);
    });
  }

  const broken = async (image) => {
    const frame = image.closest(".picture, .over") || image;
    if (image.hasAttribute("data-optional")) { frame.remove(); return; }
    frame.classList.add("failed");
    const url = new URL(image.src);
    url.searchParams.set("format", "json");
    try {
      const told = await (await fetch(url)).json();
      if (told.error) frame.title = told.error.message;
      const words = document.createElement("span");
      words.textContent = told.error ? told.error.message : "cannot be shown";
      frame.append(words);
    } catch { frame.title = "cannot be shown"; }
  };
  for (const image of document.images) {
    if (image.complete && !image.naturalWidth && image.loading !== "lazy") broken(image);
    else image.addEventListener("error", () => broken(image), { once: true });
  }

  const posters = new IntersectionObserver((seen) => { // a poster is asked for when its video comes into view
    for (const { target, isIntersecting } of seen) {
      if (!isIntersecting) continue;
      target.poster = target.dataset.poster;
      posters.unobserve(target);
    }
  }, { rootMargin: "200px" });
  for (const video of document.querySelectorAll("video[data-poster]")) posters.observe(video);

  for (const form of document.querySelectorAll("form[method=get]")) {  // addresses without empty parameters
    form.addEventListener("submit", () => {
      for (const input of form.elements) if (input.name && !input.value) input.disabled = true;
    });
  }

  const rows = [...document.querySelectorAll("[data-row]")];
  let at = -1;
  const link = (row) => row.querySelector("[data-open]");
  const go = (next) => {
    if (!rows.length) return;
    at = Math.max(0, Math.min(next, rows.length - 1));
    const target = link(rows[at]) || rows[at];
    target.focus({ preventScroll: true });
    rows[at].scrollIntoView({ block: "nearest" });
  };
  document.addEventListener("focusin", (event) => {
    const row = event.target.closest("[data-row]");
    if (row) at = rows.indexOf(row);
  });
  const across = () => {  // rows of a grid that stand beside the first one
    const top = rows[0].offsetTop;
    const count = rows.findIndex((row) => row.offsetTop !== top);
    return count < 1 ? rows.length : count;
  };
  const follow = (selector) => { const found = document.querySelector(selector); if (found) found.click(); };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || dialog.open) return;
    if (event.target.closest("input, select, textarea, audio, video, pre")) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    const keys = {
      j: () => go(at + 1), k: () => go(at - 1), ArrowRight: () => go(at + 1), ArrowLeft: () => go(at - 1),
      ArrowDown: () => go(at < 0 ? 0 : at + across()), ArrowUp: () => go(at - across()),
      n: () => follow("a[rel=next]"), p: () => follow("a[rel=prev]"), "?": () => dialog.showModal(),
      "/": () => { const found = document.querySelector("[data-search]"); if (found) found.focus(); else location.assign(home); },
    };
    if (/^[1-9]$/.test(event.key)) follow(`nav[aria-label=Pages] a:nth-of-type(${event.key})`);
    else if (event.key in keys && (rows.length || !event.key.startsWith("Arrow"))) keys[event.key]();
    else return;
    event.preventDefault();
  });
})();

// Pages of what goes on: the server makes the new content, too, so that nothing is rendered twice over.
for (const box of document.querySelectorAll("[data-refresh]")) {
  const renew = async () => {
    if (document.hidden) return;
    try {
      const answer = await fetch(location.href, { signal: AbortSignal.timeout(10000) });
      if (!answer.ok) throw new Error(answer.status);
      const made = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById(box.id);
      if (made) box.replaceChildren(...made.childNodes);
      box.classList.remove("stale");
    } catch {
      box.classList.add("stale"); // shown faint: the server has ended, or does not answer
    }
  };
  const again = () => setTimeout(() => renew().finally(again), Number(box.dataset.refresh));
  again();
}
