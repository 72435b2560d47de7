"""One file per verb or group of verbs: build the request, run the operation, show the result."""
