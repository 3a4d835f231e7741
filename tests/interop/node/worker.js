// A worker of npm's faktory-worker, as in its documentation: node worker.js URL
const faktory = require("faktory-worker");

faktory.register("add", async (x, y) => {
  if (x + y !== 9) throw new Error(`expected 4 and 5, got ${x} and ${y}`);
});
faktory.register("fails", async (text) => {
  throw new TypeError(text);
});

faktory.register("pauses", async () => {
  console.log("running");
  await new Promise((resolve) => setTimeout(resolve, 500));
});

faktory
  .work({ url: process.argv[2], concurrency: 2, beatInterval: 5, timeout: 5 })
  .then(() => console.log("working"))
  .catch((error) => {
    console.error(error);
    process.exit(1);
  });
