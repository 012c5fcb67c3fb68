// Finds the heading of an error message that was pasted: into the box of the troubleshooting page, or into the search.
// What is filled into a message (URLs, keys, numbers) is not in the source: a message whose every other piece is there,
// in order, comes first; then those that share most words, rare ones before common ones.
"use strict";
(function () {
  const words = (text) => text.toLowerCase().match(/[a-z0-9_]+/g) || [];
  let entries = null;

  let weight = null; // of a word: rare ones say more, those of no message nothing

  function prepare() {
    const common = new Map();
    entries = window.shardstreamMessages.map(([address, text, kind]) => ({ address, text, kind, words: words(text) }));
    for (const entry of entries)
      for (const word of new Set(entry.words)) common.set(word, (common.get(word) || 0) + 1);
    weight = (word) => (common.has(word) ? Math.log(1 + entries.length / common.get(word)) : 0);
    for (const entry of entries) {
      entry.total = sum(entry.words);
      entry.pieces = plain(entry.text).split("\u2026").map((piece) => piece.trim()).filter(Boolean);
    }
  }

  const plain = (text) => text.toLowerCase().replace(/\s+/g, " ");

  // Whether all pieces of the message are in the text, one after the other.
  function isWhole(text, entry) {
    let at = 0;
    return entry.pieces.every((piece) => {
      const found = text.indexOf(piece, at);
      at = found + piece.length;
      return found >= 0;
    });
  }

  const sum = (list) => list.reduce((total, word) => total + weight(word), 0);

  // The weight of the longest run of words that both have in this order.
  function shared(asked, entry) {
    const weights = entry.words.map(weight);
    let before = new Float64Array(asked.length + 1);
    entry.words.forEach((word, row) => {
      const now = new Float64Array(asked.length + 1);
      for (let column = 1; column <= asked.length; column++)
        now[column] = asked[column - 1] === word
          ? before[column - 1] + weights[row]
          : Math.max(before[column], now[column - 1]);
      before = now;
    });
    return before[asked.length];
  }

  function find(text, most = 3) {
    if (!entries) prepare();
    const asked = words(text.replace(/\w+:\/\/\S+/g, " ")).slice(-400); // an URL is filled in
    const known = new Set(asked);
    const pasted = plain(text);
    const total = sum(asked);
    const found = [];
    for (const entry of entries) {
      if (!entry.words.some((word) => known.has(word))) continue;
      const both = shared(asked, entry);
      const part = Math.max(both / entry.total, (0.6 * both) / total); // all of a message, or all that was asked
      found.push({ entry, part, score: both * part, whole: isWhole(pasted, entry) });
    }
    found.sort((one, other) => other.whole - one.whole || other.score - one.score);
    return found.slice(0, most);
  }

  // Shows the messages that a text is; returns whether one of them is there whole.
  function show(target, root, text) {
    target.replaceChildren();
    if (words(text).length < 2) return false;
    const found = find(text);
    for (const { entry, part, score, whole } of found) {
      if (!whole && (score < 3 || part < 0.4)) continue;
      const line = document.createElement("p");
      const link = document.createElement("a");
      link.href = root + entry.address;
      link.textContent = (entry.kind ? entry.kind + ": " : "") + entry.text;
      line.append(link);
      target.append(line);
    }
    return found.some(({ whole }) => whole);
  }

  function load(root, then) {
    if (window.shardstreamMessages) return then();
    const script = document.createElement("script");
    script.src = root + "_static/messages.js";
    script.onload = then;
    document.head.append(script);
  }

  document.addEventListener("DOMContentLoaded", () => {
    const root = document.documentElement.dataset.content_root;
    const box = document.querySelector("#find-message textarea");
    const results = document.getElementById("search-results");
    const shown = document.createElement("div");
    shown.className = "found-messages";
    if (box) {
      box.parentElement.append(shown);
      box.addEventListener("input", () => load(root, () => show(shown, root, box.value)));
    } else if (results) {
      const asked = new URLSearchParams(window.location.search).get("q") || "";
      load(root, () => {
        if (show(shown, root, asked)) results.before(shown); // a message was pasted
        else results.after(shown); // words were asked for: pages come first
      });
    }
  });
  // Sphinx would mark every word of a pasted message on the page that is found, and stumbles over titles of icons.
  try {
    window.localStorage.removeItem("sphinx_highlight_terms");
  } catch {
    // no storage, nothing to mark
  }
  window.shardstreamFind = (text, most) => find(text, most).map(({ entry }) => entry.address);
})();
