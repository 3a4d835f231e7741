// The original server's example of a parent and a child batch with npm's faktory-worker, which has no commands for
// batches: node batch.js URL. Print the jobs that ran, in their order, and the server's replies.
const faktory = require("faktory-worker");

const ran = [];
const replies = {};

(async () => {
  const client = await faktory.connect({ url: process.argv[2] });
  const batch = (...words) => client.send(["BATCH", ...words]);
  const push = (jobtype, bid) => Object.assign(client.job(jobtype), { custom: { bid } }).push();

  faktory.register("BatchJob", () => async ({ job }) => {
    ran.push("BatchJob");
    if (ran.length === 1) {
      const bid = job.custom.bid;
      replies.opened = (await batch("OPEN", bid)) === bid;
      await push("Added", bid);
      await batch("COMMIT", bid);
    }
  });
  for (const jobtype of ["Added", "BarJob"]) {
    faktory.register(jobtype, async () => void ran.push(jobtype));
  }
  const end = new Promise((resolve) => {
    faktory.register("FooJob", () => async ({ job }) => {
      ran.push("FooJob");
      resolve(job.custom);
    });
  });

  const parent = await batch("NEW", JSON.stringify({ success: { jobtype: "FooJob", args: [] } }));
  await push("BatchJob", parent);
  const child = await batch("NEW", JSON.stringify({ parent_bid: parent, success: { jobtype: "BarJob", args: [] } }));
  await push("BatchJob", child);
  await batch("COMMIT", child);
  await batch("COMMIT", parent);
  replies.outside = await push("BatchJob", parent).then(
    () => "accepted",
    (error) => error.message.replace(parent, "BID")
  );

  const worker = await faktory.work({ url: process.argv[2], concurrency: 1, timeout: 5 });
  const custom = await end;
  replies.callback = custom._bid === parent && custom._cb;
  const status = JSON.parse(await batch("STATUS", child));
  replies.child = [status.parent_bid === parent, status.pending, status.success_st];
  console.log(JSON.stringify({ ran, ...replies }));
  await worker.stop();
  await client.close();
})().catch((error) => {
  console.error(error);
  process.exit(1);
});
