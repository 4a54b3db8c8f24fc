// Asks the built site's own search, and fails where the right page is not the first.
//
//     node docs/search.js build/docs
"use strict";

const fs = require("fs");
const vm = require("vm");

// What is typed, and the page that has to come first.
const QUESTIONS = {
  GPU: "how-to/gpu",
  cuda: "how-to/gpu",
  "num_workers auto": "how-to/auto",
  "dtype float32": "faq",
  "lambda collate": "how-to/dataloader-differences",
  resume: "how-to/checkpoints",
  hang: "how-to/reliability",
  "killed worker": "how-to/reliability",
  "progress bar": "how-to/watch",
  profiler: "how-to/tools",
  "slow loop": "how-to/slow",
  "bucket by length": "explanation/choosing-an-order",
  checkpoint: "how-to/checkpoints",
  "replace DataLoader": "how-to/from-dataloader",
  "MPSequence or DataLoader": "how-to/which-class",
  "cannot pickle": "reference/errors",
  install: "tutorial/quickstart",
  "install from source": "tutorial/quickstart",
  "not on PyPI": "tutorial/quickstart",
  windows: "reference/platforms",
};

const site = `${process.argv[2]}`;
const page = {
  document: { getElementById: () => null, addEventListener: () => {}, documentElement: { dataset: {} } },
  localStorage: { setItem: () => {} },
  location: { search: "" },
  _ready: () => {}, // of doctools.js: there is no document
  SPHINX_HIGHLIGHT_ENABLED: false,
  _: (text) => text,
  console,
};
page.window = page;
const context = vm.createContext(page);
const read = (name) => vm.runInContext(fs.readFileSync(`${site}/${name}`, "utf8"), context);
read("_static/language_data.js");
read("_static/searchtools.js");
vm.runInContext("globalThis.Search = Search", context);
read("searchindex.js");

let wrong = 0;
for (const [question, expected] of Object.entries(QUESTIONS)) {
  const found = page.Search._performSearch(...page.Search._parseQuery(question));
  const first = found.length ? found.at(-1)[0] : "nothing"; // the best one is the last
  if (first !== expected) {
    wrong += 1;
    console.log(`${question}: ${first}, not ${expected}`);
  }
  // An entry of the index is the page itself: the list has that once.
  if (found.some((result) => result[2].startsWith("#index-"))) {
    wrong += 1;
    console.log(`${question}: a page stands there twice`);
  }
}
process.exit(wrong ? 1 : 0);
