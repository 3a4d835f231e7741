// A worker of faktory_worker_go, as in its documentation. FAKTORY_URL is the server's address.
package main

import (
	"context"
	"errors"
	"fmt"

	worker "github.com/contribsys/faktory_worker_go"
)

func add(ctx context.Context, args ...interface{}) error {
	if sum := args[0].(float64) + args[1].(float64); sum != 9 {
		return fmt.Errorf("expected 4 and 5, got %v", args)
	}
	return nil
}

func fails(ctx context.Context, args ...interface{}) error {
	return errors.New(args[0].(string))
}

func main() {
	manager := worker.NewManager()
	manager.Register("add", add)
	manager.Register("fails", fails)
	manager.Concurrency = 2
	manager.ProcessStrictPriorityQueues("default")
	if err := manager.Run(); err != nil {
		panic(err)
	}
}
