// Manage jobs with npm's faktory-worker, and print the server's replies: node manager.js URL
const faktory = require("faktory-worker");

(async () => {
  const client = await faktory.connect({ url: process.argv[2] });
  const jobs = ["a", "b", "b"].map((jobtype) => client.job(jobtype, 1.5, "é"));
  jobs.push(Object.assign(client.job("bad"), { args: "no array" }));
  const rejected = await client.pushBulk(jobs);
  const later = new Date(Date.now() + 3600 * 1000);
  for (const jobtype of ["c", "d", "e", "f"]) {
    const job = client.job(jobtype);
    job.at = later;
    await job.push();
  }
  await client.scheduled.ofType("c").requeue();
  await client.scheduled.ofType("d").kill();
  await client.scheduled.matching("*:\"e\"*").discard();
  await client.dead.withJids("nobody-has-this").discard();
  const { queues, tasks } = (await client.info()).faktory;
  console.log(
    JSON.stringify({
      rejected: Object.values(rejected).length,
      enqueued: queues.default,
      scheduled: tasks.Scheduled.size,
      dead: tasks.Dead.size,
    })
  );
  await client.flush();
  await client.close();
})().catch((error) => {
  console.error(error);
  process.exit(1);
});
