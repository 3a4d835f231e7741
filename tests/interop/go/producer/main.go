// Push a job with the Go client, and print its jid and the server's number of enqueued jobs: producer JOB_JSON
package main

import (
	"encoding/json"
	"os"

	faktory "github.com/contribsys/faktory/client"
)

func main() {
	var given faktory.Job
	must(json.Unmarshal([]byte(os.Args[1]), &given))
	client, err := faktory.Open()
	must(err)
	job := faktory.NewJob(given.Type, given.Args...)
	if given.Queue != "" {
		job.Queue = given.Queue
	}
	if given.Retry != nil {
		job.Retry = given.Retry
	}
	job.Custom = given.Custom
	must(client.Push(job))
	info, err := client.Info()
	must(err)
	total := info["faktory"].(map[string]interface{})["total_enqueued"]
	must(json.NewEncoder(os.Stdout).Encode(map[string]interface{}{"jid": job.Jid, "total": total}))
	must(client.Close())
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}
