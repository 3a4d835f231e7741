// Push a job with npm's faktory-worker, and print its jid and the server's total: node producer.js URL JOB_JSON
const faktory = require("faktory-worker");

(async () => {
  const client = await faktory.connect({ url: process.argv[2] });
  const { jobtype, args, ...options } = JSON.parse(process.argv[3]);
  const job = client.job(jobtype, ...args);
  Object.assign(job, options);
  const jid = await job.push();
  const info = await client.info();
  console.log(JSON.stringify({ jid, total: info.faktory.total_enqueued }));
  await client.close();
})().catch((error) => {
  console.error(error);
  process.exit(1);
});
