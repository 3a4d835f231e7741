# Push a job with faktory_worker_ruby, and print its jid and the server's total of jobs: ruby producer.rb JOB_JSON
require "faktory_worker_ruby"

job = {"jid" => SecureRandom.hex(12)}.merge(JSON.parse(ARGV[0]))
client = Faktory::Client.new
client.push(job)
puts JSON.generate("jid" => job["jid"], "total" => client.info["faktory"]["total_enqueued"])
client.close
