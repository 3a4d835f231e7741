module interop

go 1.19

require (
	github.com/contribsys/faktory v1.8.0
	github.com/contribsys/faktory_worker_go v1.7.0
)
