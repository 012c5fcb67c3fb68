// Ranks what the site's search finds: pages that explain come before messages, design records, the reference and changes.
"use strict";
const rankedBelow = /^(docs\/(messages|design|api)\/|docs\/(options|every-\w+)$|benchmarks\/|tests\/|CHANGELOG|CONTRIBUTING|RELEASING)/;
var Scorer = { // read by Sphinx's searchtools.js
  score: ([page, , , , score]) => (rankedBelow.test(page) ? 0.2 * score : score),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
