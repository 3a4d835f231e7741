"""Start, watch and replace the processes of `runfaktory`."""
