// Search a built site without a browser: node search_site.js FOLDER, with queries as JSON on stdin.
// Prints, for each query, the pages and anchors that are found, best first, and the suggestion.
"use strict";

const { readFileSync } = require("fs");
const { join } = require("path");
const vm = require("vm");

const folder = process.argv[2];
const page = readFileSync(join(folder, "search.html"), "utf8");
const words = JSON.parse(page.match(/id="words-of-the-pages"[^>]*>(.*?)<\/script>/s)[1]);
const scripts = [...page.matchAll(/<script src="((?:_static\/(?:searchtools|language_data)|searchindex)\.js)/g)];

const site = vm.createContext({
  _: (text) => text,
  _ready: () => {},
  SPHINX_HIGHLIGHT_ENABLED: false,
  document: { addEventListener: () => {}, getElementById: () => null },
});
site.window = site;
for (const [, script] of scripts) vm.runInContext(readFileSync(join(folder, script), "utf8"), site, script);

const answers = JSON.parse(readFileSync(0, "utf8")).map((query) => {
  site.query = query;
  site.words = words;
  const found = vm.runInContext("Search._performSearch(...Search._parseQuery(query))", site);
  return {
    found: found.reverse().map(([docname, , anchor]) => docname + anchor),
    suggestion: vm.runInContext("suggest(query, words)", site),
  };
});
console.log(JSON.stringify(answers));
