"use strict";
const posters = new IntersectionObserver((seen) => { // a poster is asked for when its video comes into view
  for (const { target, isIntersecting } of seen) {
    if (!isIntersecting) continue;
    target.poster = target.dataset.poster;
    posters.unobserve(target);
  }
}, { rootMargin: "200px" });
const watchPosters = (part) => {
  for (const video of part.querySelectorAll("video[data-poster]")) posters.observe(video);
};
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

  watchPosters(document);

  for (const form of document.querySelectorAll("form[method=get]")) {  // addresses without empty parameters
    form.addEventListener("submit", () => {
      for (const input of form.elements) if (input.name && !input.value) input.disabled = true;
    });
  }

  const listed = () => [...document.querySelectorAll("[data-row]")];  // parts of pages are renewed
  let at = -1;
  const link = (row) => row.querySelector("[data-open]");
  const go = (next) => {
    const rows = listed();
    if (!rows.length) return;
    at = Math.max(0, Math.min(next, rows.length - 1));
    const target = link(rows[at]) || rows[at];
    target.focus({ preventScroll: true });
    rows[at].scrollIntoView({ block: "nearest" });
  };
  document.addEventListener("focusin", (event) => {
    const row = event.target.closest("[data-row]");
    if (row) at = listed().indexOf(row);
  });
  const across = () => {  // rows of a grid that stand beside the first one
    const rows = listed();
    const top = rows.length ? rows[0].offsetTop : 0;
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
    else if (event.key in keys && (listed().length || !event.key.startsWith("Arrow"))) keys[event.key]();
    else return;
    event.preventDefault();
  });
})();

// Pages of what goes on: the server makes the new content, too, so that nothing is rendered twice over.
for (const box of document.querySelectorAll("[data-refresh]")) {
  const renew = async () => {
    if (document.hidden) return true;
    try {
      const answer = await fetch(location.href, { signal: AbortSignal.timeout(10000) });
      if (!answer.ok) throw new Error(answer.status);
      const made = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById(box.id);
      const held = box.contains(document.activeElement) ? document.activeElement : null;
      if (made) box.replaceChildren(...made.childNodes);
      watchPosters(box);
      const again = held && [...box.querySelectorAll(held.tagName)].find((one) => one.isEqualNode(held));
      if (again) again.focus({ preventScroll: true });
      box.classList.remove("stale");
      return !made || made.hasAttribute("data-refresh");  // else nothing further comes
    } catch {
      box.classList.add("stale"); // shown faint: the server has ended, or does not answer
      return true;
    }
  };
  const again = () => setTimeout(async () => { if (await renew()) again(); }, Number(box.dataset.refresh));
  again();
}

// Completes columns and their frequent values in a condition, from the page of the columns, which is asked for once.
for (const input of document.querySelectorAll("[data-hints]")) {
  const list = document.createElement("ul");
  list.className = "hints";
  list.id = `hints-${input.name}`;
  list.setAttribute("role", "listbox");
  list.setAttribute("aria-label", "Completions");
  list.hidden = true;
  (input.closest("label") || input).after(list);  // what is within a label names the input
  for (const [name, value] of [["role", "combobox"], ["aria-autocomplete", "list"], ["aria-expanded", "false"], ["aria-controls", list.id]]) input.setAttribute(name, value);

  let columns = null, shown = [], at = -1, start = 0;
  const known = async () => {
    if (columns) return columns;
    columns = [];
    try {
      const home = document.querySelector("a.mark").getAttribute("href");
      const answer = await fetch(home + input.dataset.hints.slice(1), { signal: AbortSignal.timeout(10000) });
      if (answer.ok) columns = (await answer.json()).columns;
    } catch { /* without completions, the condition is typed */ }
    return columns;
  };
  const quoted = (name) => (/^[A-Za-z_]\w*$/.test(name) ? name : `"${name.replaceAll('"', '""')}"`);
  const literal = (value) => (typeof value === "string" ? `'${value.replaceAll("'", "''")}'` : String(value).toUpperCase());
  const matches = (text) => {  // the completions of what stands before the caret, and where it begins
    const value = /(?:"((?:[^"]|"")+)"|(\b[A-Za-z_][\w.]*))\s*(?:=|!=|<>|<=|>=|<|>|\bIN\s*\((?:[^()]*,)?)\s*('[^']*|[\w.-]*)$/i.exec(text);
    if (value) {
      const name = (value[1] || value[2]).replaceAll('""', '"');
      const column = columns.find((one) => one.name === name);
      const found = column ? column.top.map(([one, count]) => [literal(one), count.toLocaleString("en")]) : [];
      return [found.filter(([one]) => one.startsWith(value[3]) && one !== value[3]), text.length - value[3].length];
    }
    const word = /(?:^|[\s(])("[^"]*|[A-Za-z_][\w.]*)$/.exec(text);
    if (!word && text.trim() && !/\b(and|or|not)\s+$|\($/i.test(text)) return [[], text.length];
    const begun = word ? word[1] : "";
    const plain = begun.replace(/^"/, "").toLowerCase();
    const found = columns.filter((one) => one.name.toLowerCase().startsWith(plain) && quoted(one.name) !== begun);
    return [found.map((one) => [quoted(one.name), one.type]), text.length - begun.length];
  };
  const close = () => {
    list.hidden = true;
    at = -1;
    input.setAttribute("aria-expanded", "false");
    input.removeAttribute("aria-activedescendant");
  };
  const choose = (next) => {
    at = (next + shown.length) % shown.length;
    [...list.children].forEach((one, number) => one.setAttribute("aria-selected", String(number === at)));
    list.children[at].scrollIntoView({ block: "nearest" });
    input.setAttribute("aria-activedescendant", list.children[at].id);
  };
  const take = (number) => {
    const rest = input.value.slice(input.selectionStart);
    input.value = `${input.value.slice(0, start)}${shown[number][0]} ${rest.trimStart()}`;
    const caret = start + shown[number][0].length + 1;
    input.setSelectionRange(caret, caret);
    close();
  };
  const offer = async () => {
    await known();
    if (document.activeElement !== input) return;
    [shown, start] = matches(input.value.slice(0, input.selectionStart));
    shown = shown.slice(0, 12);
    list.replaceChildren(...shown.map(([text, about], number) => {
      const one = document.createElement("li");
      one.id = `${list.id}-${number}`;
      one.setAttribute("role", "option");
      one.setAttribute("aria-selected", "false");
      const detail = document.createElement("small");
      detail.textContent = about;
      one.append(text, detail);
      one.addEventListener("mousedown", (event) => { event.preventDefault(); take(number); offer(); });
      return one;
    }));
    if (!shown.length) { close(); return; }
    at = -1;
    list.style.left = `${input.offsetLeft}px`;
    list.style.top = `${input.offsetTop + input.offsetHeight}px`;
    list.style.width = `${input.offsetWidth}px`;
    list.hidden = false;
    input.setAttribute("aria-expanded", "true");
    input.removeAttribute("aria-activedescendant");
  };
  input.addEventListener("input", offer);
  input.addEventListener("focus", offer);
  input.addEventListener("blur", close);
  input.addEventListener("keydown", (event) => {
    if (list.hidden) return;
    if (event.key === "ArrowDown") choose(at + 1);
    else if (event.key === "ArrowUp") choose(at < 0 ? shown.length - 1 : at - 1);
    else if ((event.key === "Enter" || event.key === "Tab") && at >= 0) { take(at); offer(); }
    else if (event.key === "Escape") { close(); event.stopPropagation(); return; }
    else return;
    event.preventDefault();
  });
}
