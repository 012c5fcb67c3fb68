// Ranks what the site's search finds: first the page that explains a word, then others that explain; then messages,
// design records, the reference and changes.
"use strict";
const rankedBelow = /^(docs\/(messages|design|api)\/|docs\/(options|every-\w+)$|benchmarks\/|tests\/|CHANGELOG|CONTRIBUTING|RELEASING)/;
const explained = { // by page: words that users type, which its title does not have
  "docs/trainers": "resume resumes resuming restart checkpoint checkpoints checkpointing state_dict",
  "docs/remesh": "elastic elasticity resize",
  "docs/mixing": "mix mixture mixtures weights proportions",
  "docs/guide": "shuffle shuffling cache caching workers num_workers threads processes memory drop_last",
  "docs/packing": "pack packed packing",
  "docs/filters": "filter filters filtering where subset exclude",
  "docs/stores": "s3 gcs azure bucket buckets minio store",
  "docs/tools/convert": "convert import parquet jsonl csv",
  "docs/sound-and-video": "video videos audio sounds clips wav mp4",
  "docs/text": "tokenize tokenizer tokens chat conversations",
  "docs/waiting": "slow bottleneck idle starving",
  "docs/curriculum": "balanced imbalance oversample",
  "docs/launchers": "slurm kubernetes",
  "docs/late-fields": "captions latents embeddings",
  "docs/show": "browse gallery viewer",
  "docs/life-of-a-set": "duplicate duplicates",
  "docs/random": "seed augmentation augmentations",
  "docs/metrics": "prometheus opentelemetry grafana",
};
const pagesOf = new Map(); // by word: the page that explains it
for (const [page, words] of Object.entries(explained)) for (const word of words.split(" ")) pagesOf.set(word, page);
const wanted = new Set( // the pages that explain a word of what is asked for
  (new URLSearchParams(window.location.search).get("q") || "").toLowerCase().split(/[^\w]+/).map((word) => pagesOf.get(word)),
);
var Scorer = { // read by Sphinx's searchtools.js
  score: ([page, , , , score]) => (rankedBelow.test(page) ? 0.2 * score : score) + (wanted.has(page) ? 20 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
